//! How a step's tensors are cut for threads, for arbitrary lengths and rows.
//!
//! The input: a byte of threads, then five bytes for each tensor: four of its element count and one
//! of its rows. Checked: every block is a run of one row's elements, blocks follow one another
//! without gap, and every block is in exactly one share, in order.

#![no_main]

use fused_optim::plan::{BLOCK, ChunkPlan, Layout};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&threads, data)) = data.split_first() else { return };
    let (specs, _) = data.as_chunks::<5>();
    let layout = |&[a, b, c, d, rows]: &[u8; 5]| {
        Layout::new(u32::from_le_bytes([a, b, c, d]) as usize, rows.into())
    };
    let layouts: Vec<_> = specs.iter().map(layout).collect();
    for layout in &layouts {
        // A few blocks of many; the others are between them.
        let last = layout.blocks().saturating_sub(1);
        for block in [0, 1, last / 2, last].into_iter().filter(|&block| block <= last) {
            let (range, next) = (layout.range(block), layout.range(block + 1));
            assert!(range.len() <= BLOCK && range.end == next.start);
            assert!(
                range.is_empty() || range.start / layout.cols() == (range.end - 1) / layout.cols()
            );
        }
        assert_eq!(layout.range(layout.blocks()), layout.count()..layout.count());
    }
    let plan = ChunkPlan::new(&layouts, threads.into());
    assert!(plan.shares().len() <= usize::from(threads).max(1));
    let mut expected = layouts.iter().enumerate().filter(|(_, layout)| layout.count() > 0);
    let mut current = expected.next();
    let mut at = 0;
    for chunk in plan.shares().iter().flatten() {
        let (tensor, layout) = current.expect("no chunk past the last tensor");
        assert_eq!((chunk.tensor, chunk.blocks.start), (tensor, at));
        assert!(chunk.blocks.end > at && chunk.blocks.end <= layout.blocks());
        at = chunk.blocks.end;
        if at == layout.blocks() {
            (current, at) = (expected.next(), 0);
        }
    }
    assert!(current.is_none(), "every tensor is in the plan");
});
