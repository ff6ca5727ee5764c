//! How tensors are cut: into blocks, and blocks into one share per thread. Pure arithmetic.
//!
//! A tensor is rows of equal length (most rules see a single row), each cut into blocks of
//! [`BLOCK`] elements and a shorter last one. A block is the unit of everything: of the sweep, of
//! what may lie on different threads, and of sums. Since blocks depend on the tensor's layout alone,
//! so does every sum, whoever computes its parts.

use std::ops::Range;

/// Elements per block: four f32 streams of it fit a first-level cache.
pub const BLOCK: usize = 1024;

/// How one tensor is cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    count: usize,
    cols: usize,
}

impl Layout {
    /// `count` elements in `rows` rows; 0 rows count as one, and so do rows that do not divide
    /// `count`.
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

    /// Number of blocks; none if there are no elements.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        if self.count == 0 { 0 } else { self.count / self.cols * self.blocks_per_row() }
    }

    /// The elements of a block, also of the one past the last, which is empty.
    #[must_use]
    pub const fn range(&self, block: usize) -> Range<usize> {
        if block >= self.blocks() {
            return self.count..self.count;
        }
        let (row, block) = (block / self.blocks_per_row(), block % self.blocks_per_row());
        let end = if (block + 1) * BLOCK < self.cols { (block + 1) * BLOCK } else { self.cols };
        row * self.cols + block * BLOCK..row * self.cols + end
    }

    /// The first block that begins at `element` or later.
    const fn block_from(&self, element: usize) -> usize {
        if element >= self.count {
            return self.blocks();
        }
        let (row, col) = (element / self.cols, element % self.cols);
        row * self.blocks_per_row() + col.div_ceil(BLOCK)
    }
}

/// Some blocks of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which tensor.
    pub tensor: usize,
    /// Which of its blocks.
    pub blocks: Range<usize>,
}

/// Who sweeps what: one share of about equally many elements per thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    shares: Vec<Vec<Chunk>>,
}

impl ChunkPlan {
    /// Cuts tensors into `threads` shares, fewer if there is too little for each. Every block is in
    /// one share, in order; a share exceeds the mean by less than a block. Tensors without elements
    /// are in none. A share depends on lengths alone: at every step a thread meets the memory it
    /// met before.
    #[must_use]
    pub fn new(layouts: &[Layout], threads: usize) -> Self {
        // In u128 the products below cannot overflow.
        let total: u128 = layouts.iter().map(|layout| layout.count as u128).sum();
        let count = (total / MIN_SHARE).clamp(1, threads.max(1) as u128);
        // At most `threads`, a `usize`.
        let mut shares = vec![Vec::new(); count as usize];
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

/// Fewer elements than this are not worth a thread: its start costs as much as their sweep.
const MIN_SHARE: u128 = 1 << 15;
