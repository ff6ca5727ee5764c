//! A step's sweeps, dealt out to threads.

use std::cmp::Reverse;
use std::ops::Range;

use crate::cpu::pages::Pages;
use crate::cpu::plan::{ChunkPlan, Layout};
use crate::cpu::{Block, Found, Piece, Scratch, SlotMut, Sums, threads};
use crate::rule::Hyper;

/// Applies each rule to its tensor, by order of the iterator. `scratch` is made as long as there are
/// threads.
///
/// A tensor that lies in one share is finished before the next is begun, so that the second of two
/// sweeps finds it in a cache if it fits one. What lies in several is first observed by all, and
/// moved when its sums are known. A tensor of a rule by tensor lies in one share.
#[expect(single_use_lifetimes, reason = "`impl Trait` takes no anonymous ones")]
pub(crate) fn run<'a, H: Hyper>(
    tensors: impl Iterator<Item = (H::Rule, Piece<'a>)>,
    threads: usize,
    scratch: &mut Vec<Scratch>,
) {
    if threads <= 1 {
        scratch.resize_with(1, Scratch::default);
        let scratch = &mut scratch[0];
        return tensors.for_each(|(rule, piece)| Job::<H>::new(rule, piece).begin(scratch));
    }
    let mut tensors: Vec<_> = tensors.collect();
    let shares = if H::BY_TENSOR {
        let job = |(rule, piece)| Job::new(rule, piece);
        let shares = piles(tensors, threads).into_iter();
        shares.map(|tensors| tensors.into_iter().map(job).collect()).collect()
    } else {
        if H::TWO_SWEEPS {
            tensors = piles(tensors, threads).into_iter().flatten().collect();
        }
        let layouts: Vec<Layout> = tensors.iter().map(|(_, piece)| piece.layout).collect();
        deal::<H>(tensors, &ChunkPlan::new(&layouts, threads))
    };
    scratch.resize_with(shares.len(), Scratch::default);
    let mut shares: Vec<_> = shares.into_iter().zip(scratch).collect();
    threads::for_each(&mut shares, |(share, scratch)| {
        share.iter_mut().for_each(|job| job.begin(scratch));
    });
    if H::TWO_SWEEPS {
        let all = shares.iter_mut().flat_map(|(share, _)| share);
        let mut parts: Vec<_> = all.filter(|job| !job.piece.is_whole()).collect();
        for parts in parts.chunk_by_mut(|a, b| a.piece.blocks.end == b.piece.blocks.start) {
            let sums = parts.iter_mut().flat_map(|job| std::mem::take(&mut job.sums));
            let mut sums: Vec<Sums> = sums.collect();
            parts[0].conclude(&mut sums);
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

/// Tensors dealt out whole, the fullest share first: the largest first, each goes where there is least so far.
///
/// One after another, they are in such an order that cut shares are alike in more than length: the second
/// sweep of a large tensor finds less in a cache, so every share gets its part of those. Since the fullest
/// shares come first, where one is cut there are small ones.
fn piles<'a, R>(mut tensors: Vec<(R, Piece<'a>)>, shares: usize) -> Vec<Vec<(R, Piece<'a>)>> {
    let count = |(_, piece): &(R, Piece<'_>)| piece.layout.count();
    let mut piles: Vec<_> = (0..shares).map(|_| (0_usize, Vec::new())).collect();
    tensors.sort_by_key(|tensor| Reverse(count(tensor)));
    for tensor in tensors {
        let (load, pile) = piles.iter_mut().min_by_key(|(load, _)| *load).expect("some shares");
        *load = load.saturating_add(count(&tensor));
        pile.push(tensor);
    }
    piles.retain(|(_, pile)| !pile.is_empty());
    piles.sort_by_key(|(load, _)| Reverse(*load));
    piles.into_iter().map(|(_, pile)| pile).collect()
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
    /// Directions that a thread keeps from the first of two sweeps to the second, which then need not read both
    /// moments and compute them again: 16 MiB, of which the last are still in a cache. All of a rule by tensor.
    const KEPT: usize = if H::BY_TENSOR { usize::MAX } else { 1 << 22 };

    const fn new(rule: H::Rule, piece: Piece<'a>) -> Self {
        Self { rule, piece, sums: Vec::new(), factors: Vec::new() }
    }

    /// All that can be done before other pieces are heard.
    fn begin(&mut self, scratch: &mut Scratch) {
        if H::one_sweep(&self.rule) {
            return self.sweep(scratch);
        }
        let Piece { layout, ref blocks, .. } = self.piece;
        let mut sums = std::mem::take(&mut scratch.sums);
        let mut directions = std::mem::take(&mut scratch.directions);
        sums.clear();
        let wanted = layout.count().min(Self::KEPT);
        if directions.len() < wanted {
            directions = Pages::new(wanted).take(wanted);
        }
        for (_, elements) in layout.spans(blocks.clone(), self.piece.stride()) {
            // What is not kept is written all the same, where others come later.
            let from = self.kept(&elements).unwrap_or(0);
            let directions = &mut directions[from..][..elements.len()];
            let observe = |block: Block<'_>| H::observe(&self.rule, block, directions, &mut sums);
            self.piece.visit(elements, false, scratch, observe);
        }
        scratch.directions = directions;
        if !self.piece.is_whole() {
            self.sums = sums;
            return;
        }
        if H::BY_TENSOR {
            let slots = self.piece.slots.each_mut().map(SlotMut::all);
            let directions = &mut scratch.directions[..wanted];
            H::finish(&mut self.rule, Sums::fold(&mut sums), directions, slots);
        } else {
            self.conclude(&mut sums);
        }
        scratch.sums = sums;
        self.sweep(scratch);
    }

    /// Where the directions of some elements are kept between the sweeps; nowhere, if they are not among
    /// the tensor's last, or if other tensors come between the sweeps.
    fn kept(&self, elements: &Range<usize>) -> Option<usize> {
        let first = self.piece.layout.count().saturating_sub(Self::KEPT);
        elements.start.checked_sub(first).filter(|_| self.piece.is_whole())
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

    /// The last sweep. The second of two goes backwards: of a tensor that fits no cache it begins
    /// with what the first has left in one.
    fn sweep(&mut self, scratch: &mut Scratch) {
        let Piece { layout, ref blocks, .. } = self.piece;
        let spans = layout.spans(blocks.clone(), self.piece.stride());
        if H::one_sweep(&self.rule) {
            return spans
                .for_each(|(_, elements)| self.move_on(Found::default(), elements, scratch));
        }
        let factors = std::mem::take(&mut self.factors);
        let directions = std::mem::take(&mut scratch.directions);
        let mut backwards = std::mem::take(&mut scratch.spans);
        backwards.extend(spans);
        for (row, elements) in backwards.drain(..).rev() {
            let directions = self.kept(&elements).map(|from| &directions[from..][..elements.len()]);
            self.move_on(Found { factors: &factors[row..], directions }, elements, scratch);
        }
        (scratch.directions, scratch.spans) = (directions, backwards);
    }

    fn move_on(&mut self, found: Found<'_>, elements: Range<usize>, scratch: &mut Scratch) {
        let sweep = |block: Block<'_>| H::sweep(&self.rule, found, block);
        self.piece.visit(elements, true, scratch, sweep);
    }
}
