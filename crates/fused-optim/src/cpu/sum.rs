//! Sums over tensors, in an order that depends on their layout only.
//!
//! # The order of a sum
//!
//! 1. Every term is a product of two f32, computed in f64, where it is exact.
//! 2. Within a block, element `i` is added to lane `i mod 16`, in order; the lanes start at 0.
//! 3. The 16 lanes are folded by the tree: neighbours `(0, 1)`, `(2, 3)`, ... are added, an odd
//!    last one is kept, and so on until one is left.
//! 4. The blocks of a row, the rows of a tensor, and the tensors of a group (in index order) are
//!    each folded by the same tree.
//!
//! Threads, instruction sets and devices may compute blocks in any order and get the same bits by
//! these four rules. A maximum ([`Reduction::MaxAbs`]) does not depend on the order.

use std::array;

use super::plan::{ChunkPlan, Layout, share_count};
use super::{BLOCK, GradMap, load, scalar, threads};
use crate::Slice;

/// Lanes of a block's sum.
pub(super) const LANES: usize = 16;

/// A reduction of a gradient to one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Reduction {
    /// The sum of squares. Finite exactly if all elements are: the square of a finite f32 is
    /// at most 1.2e77.
    Squares,
    /// The largest magnitude; NaN if an element is NaN.
    MaxAbs,
    /// The sum of the given power of magnitudes.
    Powers(f64),
}

impl Reduction {
    /// Combines the results of parts, which are overwritten.
    pub(crate) fn fold(self, parts: &mut [f64]) -> f64 {
        match self {
            Self::Squares | Self::Powers(_) => tree(parts, |a, b| a + b).unwrap_or(0.0),
            Self::MaxAbs => parts.iter().fold(0.0, |a, &b| if b > a || b.is_nan() { b } else { a }),
        }
    }

    /// The norm, from the result for all gradients.
    pub(crate) fn norm(self, whole: f64) -> f64 {
        match self {
            Self::Squares => whole.sqrt(),
            Self::MaxAbs => whole,
            Self::Powers(p) => whole.powf(p.recip()),
        }
    }

    /// Reduces one block.
    fn block(self, input: &[f32], map: GradMap) -> f64 {
        match self {
            Self::Squares => scalar::sum_of_squares(input, map),
            Self::MaxAbs => f32::from_bits(scalar::largest(input, map)).into(),
            Self::Powers(p) => {
                let mut lanes = [0.0; LANES];
                for (i, x) in input.iter().enumerate() {
                    lanes[i % LANES] += f64::from(map.apply(*x)).abs().powf(p);
                }
                fold_lanes(lanes)
            }
        }
    }
}

/// Reduces each gradient, after `map`.
pub(crate) fn reduce(
    grads: &[Slice<'_>],
    what: Reduction,
    map: GradMap,
    threads: usize,
) -> Vec<f64> {
    if share_count(grads.iter().map(Slice::len), threads) == 1 {
        return reduce_alone(grads, what, map);
    }
    let layouts: Vec<Layout> = grads.iter().map(|grad| Layout::new(grad.len(), 0)).collect();
    let plan = ChunkPlan::new(&layouts, threads);
    // One number per block of all tensors; a share's are neighbours.
    let mut sums = vec![0.0; layouts.iter().map(Layout::blocks).sum()];
    let mut rest = &mut sums[..];
    let mut shares: Vec<_> = (plan.shares().iter())
        .map(|share| {
            let count = share.iter().map(|chunk| chunk.blocks.len()).sum();
            (share, rest.split_off_mut(..count).expect("the shares' blocks are all blocks"))
        })
        .collect();
    threads::for_each(&mut shares, |(share, sums)| {
        let mut wide = [0.0; BLOCK];
        // Backwards: the sweep then starts with the elements that were read last and are still in a
        // cache.
        for chunk in share.iter().rev() {
            let (layout, blocks) = (layouts[chunk.tensor], chunk.blocks.clone());
            let own = sums.split_off_mut(sums.len() - blocks.len()..);
            let own = own.expect("one number per block");
            for (sum, (_, range)) in own.iter_mut().zip(layout.spans(blocks, BLOCK)) {
                *sum = what.block(load(grads[chunk.tensor], range, &mut wide), map);
            }
        }
    });
    let mut rest = &mut sums[..];
    let blocks = layouts.iter().map(|layout| {
        what.fold(rest.split_off_mut(..layout.blocks()).expect("one number per block"))
    });
    blocks.collect()
}

/// [`reduce`] on the calling thread, without a plan, which takes longer than the sum of a short
/// gradient.
fn reduce_alone(grads: &[Slice<'_>], what: Reduction, map: GradMap) -> Vec<f64> {
    let (mut wide, mut sums) = ([0.0; BLOCK], Vec::new());
    let mut each = vec![0.0; grads.len()];
    // Backwards, as above.
    for (whole, grad) in each.iter_mut().zip(grads).rev() {
        sums.clear();
        for start in (0..grad.len()).step_by(BLOCK) {
            let block = start..grad.len().min(start + BLOCK);
            sums.push(what.block(load(*grad, block, &mut wide), map));
        }
        *whole = what.fold(&mut sums);
    }
    each
}

/// Folds a block's lanes by the tree, in steps of constant length.
#[inline(always)]
pub(super) fn fold_lanes(lanes: [f64; LANES]) -> f64 {
    let eight: [f64; LANES / 2] = array::from_fn(|i| lanes[2 * i] + lanes[2 * i + 1]);
    let four: [f64; LANES / 4] = array::from_fn(|i| eight[2 * i] + eight[2 * i + 1]);
    (four[0] + four[1]) + (four[2] + four[3])
}

/// Folds neighbours until one is left; `values` are overwritten.
pub(crate) fn tree<T: Copy>(values: &mut [T], add: impl Fn(T, T) -> T) -> Option<T> {
    let mut count = values.len();
    while count > 1 {
        for i in 0..count / 2 {
            values[i] = add(values[2 * i], values[2 * i + 1]);
        }
        if count % 2 == 1 {
            values[count / 2] = values[count - 1];
        }
        count = count.div_ceil(2);
    }
    values.first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_folded_by_the_tree() {
        // The values differ so much in size that another order gives another sum.
        for seed in 0..100_u32 {
            let value = |i: u32| 0.1 * 7.3_f64.powi((i * 29 + seed * 13) as i32 % 31 - 15);
            let mut lanes = array::from_fn(|i| value(i as u32));
            let folded = fold_lanes(lanes);
            assert_eq!(Some(folded), tree(&mut lanes, |a, b| a + b));
        }
    }
}
