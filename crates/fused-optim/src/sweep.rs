//! The sweeps of a step, on one thread or several.

use std::cmp::Reverse;
use std::ops::Range;

use crate::cpu::pages::Pages;
use crate::cpu::plan::{ChunkPlan, Layout};
use crate::cpu::{Block, FirstSweep, Piece, Scratch, SlotMut, Sums, threads};
use crate::rule::Hyper;

/// Applies each rule to its tensor, in the order of the iterator. `scratch` is resized to one per
/// thread.
///
/// Each thread has a share of the tensors. A tensor within one share gets both sweeps before the
/// next tensor, so that the second finds it in a cache if it fits one. A tensor split over shares
/// gets its second sweep after all threads have done the first. A tensor of a rule by tensor is
/// never split.
#[expect(single_use_lifetimes, reason = "`impl Trait` takes no anonymous ones")]
pub(crate) fn run<'a, H: Hyper>(
    tensors: impl Iterator<Item = (H::Rule, Piece<'a>)>,
    threads: usize,
    scratch: &mut Vec<Scratch>,
) {
    if threads <= 1 {
        scratch.resize_with(1, Scratch::default);
        let scratch = &mut scratch[0];
        return tensors.for_each(|(rule, piece)| Job::<H>::new(rule, piece).start(scratch));
    }
    let mut tensors: Vec<_> = tensors.collect();
    let shares = if H::BY_TENSOR {
        let job = |(rule, piece)| Job::new(rule, piece);
        let shares = largest_first(tensors, threads).into_iter();
        shares.map(|tensors| tensors.into_iter().map(job).collect()).collect()
    } else {
        if H::TWO_SWEEPS {
            tensors = largest_first(tensors, threads).into_iter().flatten().collect();
        }
        let layouts: Vec<Layout> = tensors.iter().map(|(_, piece)| piece.layout).collect();
        split::<H>(tensors, &ChunkPlan::new(&layouts, threads))
    };
    scratch.resize_with(shares.len(), Scratch::default);
    let mut shares: Vec<_> = shares.into_iter().zip(scratch).collect();
    threads::for_each(&mut shares, |(share, scratch)| {
        share.iter_mut().for_each(|job| job.start(scratch));
    });
    if H::TWO_SWEEPS {
        let all = shares.iter_mut().flat_map(|(share, _)| share);
        let mut parts: Vec<_> = all.filter(|job| !job.piece.is_whole()).collect();
        for parts in parts.chunk_by_mut(|a, b| a.piece.blocks.end == b.piece.blocks.start) {
            let sums = parts.iter_mut().flat_map(|job| std::mem::take(&mut job.sums));
            let mut sums: Vec<Sums> = sums.collect();
            parts[0].set_factors(&mut sums);
            let (rule, factors) = (parts[0].rule, parts[0].factors.clone());
            for job in parts {
                (job.rule, job.factors) = (rule, factors.clone());
            }
        }
        threads::for_each(&mut shares, |(share, scratch)| {
            let parts = share.iter_mut().filter(|job| !job.piece.is_whole());
            parts.rev().for_each(|job| job.sweep(scratch));
        });
    }
}

/// Distributes whole tensors over shares: the largest first, each to the share with the fewest
/// elements so far. Returns the largest share first.
///
/// The concatenation of the shares is also a good order for splitting into equal shares: the second
/// sweep of a large tensor finds less of it in a cache, and this order gives every share its part
/// of the large tensors. As the largest share comes first, the cuts fall on small tensors.
fn largest_first<'a, R>(
    mut tensors: Vec<(R, Piece<'a>)>,
    shares: usize,
) -> Vec<Vec<(R, Piece<'a>)>> {
    let count = |(_, piece): &(R, Piece<'_>)| piece.layout.count();
    let mut shares: Vec<_> = (0..shares).map(|_| (0_usize, Vec::new())).collect();
    tensors.sort_by_key(|tensor| Reverse(count(tensor)));
    for tensor in tensors {
        let (load, share) = shares.iter_mut().min_by_key(|(load, _)| *load).expect("some shares");
        *load = load.saturating_add(count(&tensor));
        share.push(tensor);
    }
    shares.retain(|(_, share)| !share.is_empty());
    shares.sort_by_key(|(load, _)| Reverse(*load));
    shares.into_iter().map(|(_, share)| share).collect()
}

/// Splits tensors into the pieces of a plan.
fn split<'a, H: Hyper>(
    tensors: Vec<(H::Rule, Piece<'a>)>,
    plan: &ChunkPlan,
) -> Vec<Vec<Job<'a, H>>> {
    let mut tensors = tensors.into_iter().enumerate();
    let mut rest = None;
    let mut job = |tensor: usize, end: usize| {
        let (rule, mut piece) = match rest.take() {
            Some((of, rule, piece)) if of == tensor => (rule, piece),
            _ => tensors.find(|(at, _)| *at == tensor).expect("chunks are in order").1,
        };
        let first = piece.split_off(end);
        rest = Some((tensor, rule, piece));
        Job::new(rule, first)
    };
    let shares = plan.shares().iter();
    shares
        .map(|share| share.iter().map(|chunk| job(chunk.tensor, chunk.blocks.end)).collect())
        .collect()
}

/// The update of one piece.
struct Job<'a, H: Hyper> {
    rule: H::Rule,
    piece: Piece<'a>,
    /// Sums of each block, between the two sweeps.
    sums: Vec<Sums>,
    /// Factor of each of the tensor's rows.
    factors: Vec<f32>,
}

impl<'a, H: Hyper> Job<'a, H> {
    /// Number of directions that a thread keeps from the first sweep for the second, which then
    /// need not compute them from both moments again: 16 MiB, the last of which are still in a
    /// cache. For a rule by tensor, all.
    const KEPT: usize = if H::BY_TENSOR { usize::MAX } else { 1 << 22 };

    const fn new(rule: H::Rule, piece: Piece<'a>) -> Self {
        Self { rule, piece, sums: Vec::new(), factors: Vec::new() }
    }

    /// Does all sweeps of a whole tensor, or the first sweep of a part.
    fn start(&mut self, scratch: &mut Scratch) {
        if H::one_sweep(&self.rule) {
            return self.sweep(scratch);
        }
        let Piece { layout, ref blocks, .. } = self.piece;
        let mut sums = std::mem::take(&mut scratch.sums);
        let mut directions = std::mem::take(&mut scratch.directions);
        sums.clear();
        let wanted = layout.count().min(Self::KEPT);
        if directions.len() < wanted {
            directions = Pages::new(wanted).alloc(wanted);
        }
        for (_, elements) in layout.spans(blocks.clone(), self.piece.span_len()) {
            // Directions that are not kept are written too, and overwritten later.
            let from = self.kept(&elements).unwrap_or(0);
            let directions = &mut directions[from..][..elements.len()];
            let first_sweep =
                |block: Block<'_>| H::first_sweep(&self.rule, block, directions, &mut sums);
            self.piece.visit(elements, false, scratch, first_sweep);
        }
        scratch.directions = directions;
        if !self.piece.is_whole() {
            self.sums = sums;
            return;
        }
        if H::BY_TENSOR {
            let slots = self.piece.slots.each_mut().map(SlotMut::all);
            let directions = &mut scratch.directions[..wanted];
            H::finish_directions(&mut self.rule, Sums::fold(&mut sums), directions, slots);
        } else {
            self.set_factors(&mut sums);
        }
        scratch.sums = sums;
        self.sweep(scratch);
    }

    /// Index of the kept directions of some elements. `None` if they are not among the tensor's
    /// last, or if the thread processes other tensors between the sweeps.
    fn kept(&self, elements: &Range<usize>) -> Option<usize> {
        let first = self.piece.layout.count().saturating_sub(Self::KEPT);
        elements.start.checked_sub(first).filter(|_| self.piece.is_whole())
    }

    /// Computes the factors from the sums of all of a tensor's blocks, which are overwritten.
    fn set_factors(&mut self, sums: &mut [Sums]) {
        let layout = self.piece.layout;
        let per_row = layout.blocks_per_row().max(1);
        let rows = sums.len() / per_row;
        for row in 0..rows {
            sums[row] = Sums::fold(&mut sums[row * per_row..][..per_row]);
        }
        self.factors = H::row_factors(&mut self.rule, &mut sums[..rows], layout);
    }

    /// The last sweep. The second of two runs backwards: it starts with the elements that the first
    /// has left in a cache.
    fn sweep(&mut self, scratch: &mut Scratch) {
        let Piece { layout, ref blocks, .. } = self.piece;
        let spans = layout.spans(blocks.clone(), self.piece.span_len());
        if H::one_sweep(&self.rule) {
            let mut prefetching = scratch.prefetching;
            for (_, elements) in spans {
                prefetching.run(elements.len(), |prefetch| {
                    self.update(FirstSweep::default(), elements, prefetch, scratch);
                });
            }
            scratch.prefetching = prefetching;
            return;
        }
        let factors = std::mem::take(&mut self.factors);
        let directions = std::mem::take(&mut scratch.directions);
        let mut backwards = std::mem::take(&mut scratch.spans);
        backwards.extend(spans);
        for (row, elements) in backwards.drain(..).rev() {
            let directions = self.kept(&elements).map(|from| &directions[from..][..elements.len()]);
            let first = FirstSweep { factors: &factors[row..], directions };
            self.update(first, elements, false, scratch);
        }
        (scratch.directions, scratch.spans) = (directions, backwards);
    }

    fn update(
        &mut self,
        first: FirstSweep<'_>,
        elements: Range<usize>,
        prefetch: bool,
        scratch: &mut Scratch,
    ) {
        let sweep = |block: Block<'_>| H::sweep(&self.rule, first, Block { prefetch, ..block });
        self.piece.visit(elements, true, scratch, sweep);
    }
}
