//! Splitting of tensors into blocks, and of blocks into one share per thread. Pure arithmetic.
//!
//! A tensor is rows of equal length (for most rules a single row), each split into blocks of
//! [`BLOCK`] elements and a shorter last one. A block is the unit of sweeps, of distribution to
//! threads, and of sums. Since blocks depend on the tensor's layout only, so does the order of
//! every sum.

use std::iter;
use std::ops::Range;

/// Elements per block: four f32 streams of this length fit a first-level cache.
pub const BLOCK: usize = 1024;

/// The rows and blocks of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    count: usize,
    cols: usize,
}

impl Layout {
    /// `count` elements in `rows` rows; a single row if `rows` is 0 or does not divide `count`.
    #[must_use]
    pub const fn new(count: usize, rows: usize) -> Self {
        let even = rows != 0 && count.is_multiple_of(rows);
        Self { count, cols: if even { count / rows } else { count } }
    }

    /// Number of elements.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Elements per row.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Blocks per row.
    #[must_use]
    pub const fn blocks_per_row(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    /// Number of blocks; 0 if there are no elements.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        if self.count == 0 { 0 } else { self.count / self.cols * self.blocks_per_row() }
    }

    /// The elements of a block; empty past the last.
    #[must_use]
    pub const fn range(&self, block: usize) -> Range<usize> {
        if block >= self.blocks() {
            return self.count..self.count;
        }
        let (row, block) = (block / self.blocks_per_row(), block % self.blocks_per_row());
        let start = row * self.cols + block * BLOCK;
        let left = self.cols - block * BLOCK;
        start..start + if left < BLOCK { left } else { BLOCK }
    }

    /// Splits neighbouring blocks into spans: several whole short rows, or whole blocks of one row,
    /// of at most `length` elements or one block. Returns each span's first row and its elements.
    pub(crate) fn spans(
        &self,
        blocks: Range<usize>,
        length: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let (cols, end) = (self.cols, self.range(blocks.end).start);
        let rows = if cols <= BLOCK { (length / cols.max(1)).max(1) } else { 1 };
        let length = (length / BLOCK).max(1) * BLOCK;
        let mut start = self.range(blocks.start).start;
        let mut row = start.checked_div(cols).unwrap_or(0);
        let mut rows_end = (row + rows).saturating_mul(cols);
        iter::from_fn(move || {
            let from = start;
            // Several rows always fit.
            let last = if rows > 1 { rows_end } else { from.saturating_add(length).min(rows_end) };
            start = last.min(end);
            let span = (row, from..start);
            if start == rows_end {
                row += rows;
                rows_end = (row + rows).saturating_mul(cols);
            }
            (from < end).then_some(span)
        })
    }

    /// The first block that starts at `element` or later.
    const fn block_from(&self, element: usize) -> usize {
        if element >= self.count {
            return self.blocks();
        }
        let (row, col) = (element / self.cols, element % self.cols);
        row * self.blocks_per_row() + col.div_ceil(BLOCK)
    }
}

/// Neighbouring blocks of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the tensor.
    pub tensor: usize,
    /// Its blocks.
    pub blocks: Range<usize>,
}

/// Distribution of blocks to threads: one share per thread, of about equally many elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    shares: Vec<Vec<Chunk>>,
}

impl ChunkPlan {
    /// Splits tensors into `threads` shares, or fewer if the shares would be too small. Every block
    /// is in one share, in order; a share exceeds the mean by less than a block. Tensors without
    /// elements are in none. Shares depend on lengths only: in every step a thread accesses the
    /// same memory.
    #[must_use]
    pub fn new(layouts: &[Layout], threads: usize) -> Self {
        let mut shares = vec![Vec::new(); share_count(layouts.iter().map(Layout::count), threads)];
        // In u128 the products below cannot overflow.
        let count = shares.len() as u128;
        let total: u128 = layouts.iter().map(|layout| layout.count as u128).sum();
        let (mut current, mut before) = (0, 0_u128);
        for (tensor, layout) in layouts.iter().enumerate() {
            let mut start = 0;
            while start < layout.blocks() {
                let end = total * (current as u128 + 1) / count;
                let within = usize::try_from(end.saturating_sub(before)).unwrap_or(usize::MAX);
                let until = layout.block_from(within);
                if until > start {
                    shares[current].push(Chunk { tensor, blocks: start..until });
                    start = until;
                }
                if start < layout.blocks() {
                    current += 1;
                }
            }
            before += layout.count as u128;
        }
        shares.retain(|share| !share.is_empty());
        Self { shares }
    }

    /// The shares, none of them empty.
    #[must_use]
    pub fn shares(&self) -> &[Vec<Chunk>] {
        &self.shares
    }
}

/// Number of shares of tensors of these lengths: `threads`, or fewer if the shares would be too
/// small.
pub(crate) fn share_count(lengths: impl Iterator<Item = usize>, threads: usize) -> usize {
    if threads <= 1 {
        return 1;
    }
    let (mut total, mut tensors) = (0_u128, 0_u128);
    for length in lengths {
        (total, tensors) = (total + length as u128, tensors + 1);
    }
    let worth = total.saturating_sub(TENSOR * tensors);
    // At most `threads`, a `usize`.
    (worth / MIN_SHARE).clamp(1, threads as u128) as usize
}

/// Smallest share: starting a thread takes as long as the sweep of this many elements.
const MIN_SHARE: u128 = 1 << 16;
/// Cost, in elements, of distributing a tensor, which one thread does for all.
const TENSOR: u128 = 512;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    fn layouts() -> impl Strategy<Value = Vec<Layout>> {
        let count = prop_oneof![0..3_usize, 1000..3000_usize, 0..200_000_usize];
        let layout = (count, prop_oneof![Just(0), 1..5_usize, 1..5000_usize]);
        prop::collection::vec(layout.prop_map(|(count, rows)| Layout::new(count, rows)), 0..40)
    }

    proptest! {
        #[test]
        fn blocks_are_the_tensor_in_order(layout in layouts(), ends: [Index; 2], length in 1..20_000_usize) {
            for layout in layout {
                let mut at = 0;
                for block in 0..layout.blocks() {
                    let range = layout.range(block);
                    prop_assert_eq!(range.start, at);
                    prop_assert!((1..=BLOCK).contains(&range.len()));
                    prop_assert_eq!(range.start / layout.cols(), (range.end - 1) / layout.cols());
                    prop_assert_eq!(block / layout.blocks_per_row(), range.start / layout.cols());
                    at = range.end;
                }
                prop_assert_eq!(at, layout.count());
                prop_assert_eq!(layout.range(layout.blocks()), at..at);
                let [start, end] = ends.map(|end| end.index(layout.blocks() + 1));
                let blocks = start.min(end)..start.max(end);
                let one_by_one = blocks.clone().map(|block| {
                    (block / layout.blocks_per_row().max(1), layout.range(block))
                });
                let spans: Vec<_> = layout.spans(blocks.clone(), 1).collect();
                prop_assert_eq!(spans, one_by_one.collect::<Vec<_>>());
                let mut at = layout.range(blocks.start).start;
                for (row, span) in layout.spans(blocks.clone(), length) {
                    let (first, last) = (span.start / layout.cols(), (span.end - 1) / layout.cols());
                    prop_assert_eq!((row, at), (first, span.start));
                    let (from, to) = (layout.block_from(span.start), layout.block_from(span.end));
                    prop_assert_eq!(layout.range(from).start..layout.range(to).start, span.clone());
                    prop_assert!(span.len() <= length || to - from == 1);
                    // Of one row, or whole rows of one block each.
                    prop_assert!(first == last || layout.blocks_per_row() == 1);
                    at = span.end;
                }
                prop_assert_eq!(at, layout.range(blocks.end).start);
            }
        }

        #[test]
        fn shares_are_all_blocks_in_order_and_balanced(layouts in layouts(), threads in 0..9_usize) {
            let plan = ChunkPlan::new(&layouts, threads);
            prop_assert!(plan.shares().len() <= threads.max(1));
            let all = |(tensor, layout): (usize, &Layout)| (0..layout.blocks()).map(move |block| (tensor, block));
            let expected: Vec<_> = layouts.iter().enumerate().flat_map(all).collect();
            let chunks = plan.shares().iter().flatten();
            let got: Vec<_> = chunks
                .flat_map(|chunk| chunk.blocks.clone().map(|block| (chunk.tensor, block)))
                .collect();
            prop_assert_eq!(got, expected);
            let total: usize = layouts.iter().map(Layout::count).sum();
            for share in plan.shares() {
                let count: usize = share.iter().map(|chunk| {
                    layouts[chunk.tensor].range(chunk.blocks.end - 1).end
                        - layouts[chunk.tensor].range(chunk.blocks.start).start
                }).sum();
                prop_assert!(count > 0 && share.iter().all(|chunk| !chunk.blocks.is_empty()));
                prop_assert!(count <= total.div_ceil(plan.shares().len()) + BLOCK);
                prop_assert!(plan.shares().len() == 1 || count + BLOCK >= MIN_SHARE as usize);
            }
        }
    }

    #[test]
    fn small_tensors_are_one_share() {
        let shares = |lengths: &[usize]| {
            let layouts: Vec<Layout> = lengths.iter().map(|&count| Layout::new(count, 0)).collect();
            let count = share_count(lengths.iter().copied(), 2);
            assert_eq!(ChunkPlan::new(&layouts, 2).shares().len(), count);
            count
        };
        assert_eq!(shares(&[64; 10_000]), 1);
        assert_eq!(shares(&[640_000]), 2);
        // One large tensor does not outweigh the cost of distributing thousands of small ones.
        assert_eq!(shares(&[&[200_000][..], &[64; 10_000]].concat()), 1);
    }

    #[test]
    fn lengths_above_u32_are_split() {
        let layouts = [Layout::new(5 << 30, 0), Layout::new(0, 0), Layout::new(usize::MAX, 0)];
        let plan = ChunkPlan::new(&layouts, 3);
        assert_eq!(plan.shares().len(), 3);
        let last = plan.shares()[2].last().unwrap();
        assert_eq!((last.tensor, last.blocks.end), (2, layouts[2].blocks()));
        assert_eq!(layouts[2].range(layouts[2].blocks() - 1).end, usize::MAX);
        assert_eq!(layouts[0].range(3 << 20), 3 << 30..(3 << 30) + BLOCK);
    }
}
