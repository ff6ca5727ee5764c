//! A step's sweeps, dealt out to threads.

use crate::cpu::plan::{BLOCK, ChunkPlan, Layout};
use crate::cpu::{Block, Piece, Scratch, Sums, threads};
use crate::rule::Hyper;

/// Applies each rule to its tensor, by order of the iterator.
///
/// A tensor that lies in one share is finished before the next is begun, so that the second of two
/// sweeps finds it in a cache if it fits one. What lies in several is first observed by all, and
/// moved when its sums are known.
#[expect(single_use_lifetimes, reason = "`impl Trait` takes no anonymous ones")]
pub(crate) fn run<'a, H: Hyper>(
    tensors: impl Iterator<Item = (H::Rule, Piece<'a>)>,
    threads: usize,
) {
    if threads <= 1 {
        let mut scratch = Scratch::new();
        return tensors.for_each(|(rule, piece)| Job::<H>::new(rule, piece).begin(&mut scratch));
    }
    let tensors: Vec<_> = tensors.collect();
    let layouts: Vec<Layout> = tensors.iter().map(|(_, piece)| piece.layout).collect();
    let mut shares = deal::<H>(tensors, &ChunkPlan::new(&layouts, threads));
    threads::for_each(&mut shares, |share| {
        let mut scratch = Scratch::new();
        share.iter_mut().for_each(|job| job.begin(&mut scratch));
    });
    if H::TWO_SWEEPS {
        let mut parts: Vec<_> =
            shares.iter_mut().flatten().filter(|job| !job.piece.is_whole()).collect();
        for parts in parts.chunk_by_mut(|a, b| a.piece.blocks.end == b.piece.blocks.start) {
            let sums = parts.iter_mut().flat_map(|job| std::mem::take(&mut job.sums));
            let mut sums: Vec<Sums> = sums.collect();
            parts[0].conclude(&mut sums);
            let (rule, factors) = (parts[0].rule, parts[0].factors.clone());
            for job in parts {
                (job.rule, job.factors) = (rule, factors.clone());
            }
        }
        threads::for_each(&mut shares, |share| {
            let mut scratch = Scratch::new();
            share
                .iter_mut()
                .filter(|job| !job.piece.is_whole())
                .for_each(|job| job.sweep(&mut scratch));
        });
    }
}

/// The pieces of a plan; together they are all of the tensors.
fn deal<'a, H: Hyper>(
    tensors: Vec<(H::Rule, Piece<'a>)>,
    plan: &ChunkPlan,
) -> Vec<Vec<Job<'a, H>>> {
    let mut tensors = tensors.into_iter().enumerate();
    let mut rest = None;
    let mut job = |tensor: usize, end: usize| {
        let (rule, piece) = match rest.take() {
            Some((of, rule, piece)) if of == tensor => (rule, piece),
            _ => tensors.find(|(at, _)| *at == tensor).expect("chunks are in order").1,
        };
        let (piece, others) = piece.split_at(end);
        rest = Some((tensor, rule, others));
        Job::new(rule, piece)
    };
    let shares = plan.shares().iter();
    shares
        .map(|share| share.iter().map(|chunk| job(chunk.tensor, chunk.blocks.end)).collect())
        .collect()
}

/// A piece and what is to be done with it.
struct Job<'a, H: Hyper> {
    rule: H::Rule,
    piece: Piece<'a>,
    /// Of each block, between the two sweeps.
    sums: Vec<Sums>,
    /// For each of the tensor's rows.
    factors: Vec<f32>,
}

impl<'a, H: Hyper> Job<'a, H> {
    const fn new(rule: H::Rule, piece: Piece<'a>) -> Self {
        Self { rule, piece, sums: Vec::new(), factors: Vec::new() }
    }

    /// All that can be done before other pieces are heard.
    fn begin(&mut self, scratch: &mut Scratch) {
        if !H::TWO_SWEEPS {
            return self.sweep(scratch);
        }
        let Piece { layout, ref blocks, .. } = self.piece;
        let mut sums = std::mem::take(&mut scratch.sums);
        sums.clear();
        for (_, elements) in layout.spans(blocks.clone(), BLOCK) {
            let observe = |block: Block<'_>| H::observe(&self.rule, block);
            sums.push(self.piece.visit(elements, false, scratch, observe));
        }
        if self.piece.is_whole() {
            self.conclude(&mut sums);
            scratch.sums = sums;
            self.sweep(scratch);
        } else {
            self.sums = sums;
        }
    }

    /// Turns the sums of all of a tensor's blocks into factors; the sums are spent.
    fn conclude(&mut self, sums: &mut [Sums]) {
        let layout = self.piece.layout;
        let per_row = layout.blocks_per_row().max(1);
        let rows = sums.len() / per_row;
        for row in 0..rows {
            sums[row] = Sums::fold(&mut sums[row * per_row..][..per_row]);
        }
        self.factors = H::conclude(&mut self.rule, &mut sums[..rows], layout);
    }

    fn sweep(&mut self, scratch: &mut Scratch) {
        let Piece { layout, ref blocks, .. } = self.piece;
        for (row, elements) in layout.spans(blocks.clone(), self.piece.stride()) {
            let factor = if H::TWO_SWEEPS { self.factors[row] } else { 0.0 };
            let sweep = |block: Block<'_>| H::sweep(&self.rule, factor, block);
            self.piece.visit(elements, true, scratch, sweep);
        }
    }
}
