//! The checks of a call that need no peer, and [`Blocks`]: what each rank sends to and receives
//! from each other rank.
//!
//! Shared by the verbs on slices, [`group::verbs`](crate::group::verbs), and those on device
//! memory, [`device::DeviceCalls`](crate::device::DeviceCalls).

use std::ops::Range;

use crate::{DType, Error, OpDesc, Rank, ReduceOp, Result, Verb};

/// Point-to-point messages.
pub(crate) const BATCH: OpDesc = describe(Verb::Batch, DType::U8, None, None, 0);

pub(crate) const fn describe(
    verb: Verb,
    dtype: DType,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    count: usize,
) -> OpDesc {
    OpDesc { verb, dtype, op, root, count }
}

/// The blocks of this rank's buffers in a call that moves one block between each pair of ranks, or
/// between each rank and the root; including the block that this rank sends to itself.
pub(crate) struct Blocks {
    /// Destination ranks, and ranges of the input.
    pub(crate) sends: Vec<(Rank, Range<usize>)>,
    /// Source ranks, and ranges of the output, which do not overlap.
    pub(crate) receives: Vec<(Rank, Range<usize>)>,
}

impl Blocks {
    /// Checks a call of rank `rank` of `world`. `output` and `input` are the buffers' lengths and,
    /// for a buffer with a block per rank, the blocks' lengths. A buffer that only the root uses is
    /// ignored elsewhere.
    pub(crate) fn new(
        desc: &OpDesc,
        (rank, world): (Rank, usize),
        (output, to): (usize, &[usize]),
        (input, from): (usize, &[usize]),
    ) -> Result<Self> {
        desc.check(world)?;
        let whole = |what, len, counts: &[usize]| {
            check_counts(what, len, counts, world)?;
            let mut end = 0;
            let block = |(peer, &count): (Rank, &usize)| {
                end += count;
                (peer, end - count..end)
            };
            Ok(counts.iter().enumerate().map(block).collect())
        };
        let single = |len| match desc.root {
            Some(root) => vec![(root, 0..len)],
            None => (0..world).map(|peer| (peer, 0..len)).collect(),
        };
        let unused = desc.root.is_some_and(|root| root != rank);
        let sends = match desc.verb {
            Verb::Gather | Verb::GatherV | Verb::AllGatherV => single(input),
            Verb::Scatter | Verb::ScatterV if unused => Vec::new(),
            _ => whole("input", input, from)?,
        };
        let receives = match desc.verb {
            Verb::Scatter | Verb::ScatterV | Verb::ReduceScatterV => single(output),
            Verb::Gather | Verb::GatherV if unused => Vec::new(),
            _ => whole("output", output, to)?,
        };
        let blocks = Self { sends, receives };
        match blocks.own(rank) {
            Some((to, from)) if to.len() != from.len() => Err(Error::InvalidArgument(format!(
                "this rank's own block has {} elements in the input and {} in the output",
                from.len(),
                to.len()
            ))),
            _ => Ok(blocks),
        }
    }

    /// Returns the ranges in the output and in the input of the block that this rank sends to
    /// itself.
    pub(crate) fn own(&self, rank: Rank) -> Option<(Range<usize>, Range<usize>)> {
        let of = |blocks: &[(Rank, Range<usize>)]| {
            blocks.iter().find(|(peer, _)| *peer == rank).map(|(_, block)| block.clone())
        };
        Some((of(&self.receives)?, of(&self.sends)?))
    }
}

/// Checks a call that a backend runs itself, and the lengths of its buffers.
pub(crate) fn check_run(desc: &OpDesc, world: usize, output: usize, input: usize) -> Result<()> {
    check_bytes(desc.dtype, desc.count, world)?;
    check_len("output", output, desc.output_count(world))?;
    check_len("input", input, desc.input_count(world))?;
    desc.check(world)
}

/// Checks that a message goes to, or comes from, another rank.
pub(crate) fn check_peer(peer: Rank, rank: Rank, world: usize) -> Result<()> {
    if peer != rank && peer < world {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "message to or from rank {peer}: not another rank of the group (this is rank {rank} of {world})"
    )))
}

/// Checks that there is a count for each rank, and that they add up to `len`.
fn check_counts(what: &str, len: usize, counts: &[usize], world: usize) -> Result<()> {
    check_len("list of counts", counts.len(), world)?;
    let total = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
    check_len(what, len, total.unwrap_or(usize::MAX))
}

pub(crate) fn check_len(what: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("the {what} has {got} elements, expected {expected}")))
}

/// Checks that `count` elements for each of `times` ranks have at most `isize::MAX` bytes.
pub(crate) fn check_bytes(dtype: DType, count: usize, times: usize) -> Result<()> {
    let bytes = count.checked_mul(times).and_then(|count| count.checked_mul(dtype.size()));
    if bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok()) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{count} elements exceed the address space")))
}
