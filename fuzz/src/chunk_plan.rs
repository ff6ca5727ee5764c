//! Splits a step's tensors between threads, for arbitrary lengths and rows.
//!
//! Input: a byte with the number of threads, then five bytes for each tensor: four are its element
//! count, one its number of rows. Checks: each block lies within one row, blocks have no gaps, and
//! each block is in exactly one share, in order.

use fused_optim::plan::{BLOCK, ChunkPlan, Layout};

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((&threads, data)) = data.split_first() else { return };
    let (specs, _) = data.as_chunks::<5>();
    let layout = |&[a, b, c, d, rows]: &[u8; 5]| {
        Layout::new(u32::from_le_bytes([a, b, c, d]) as usize, rows.into())
    };
    let layouts: Vec<_> = specs.iter().map(layout).collect();
    for layout in &layouts {
        // The first, second, middle and last block.
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
}
