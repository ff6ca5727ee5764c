//! Matrix product of `bf16` by the processor instruction `vdpbf16ps`, which multiplies pairs and
//! adds them to `f32` sums: twice as many products as an `f32` instruction, from half the memory.
//!
//! Blocks of both matrices are packed into panels, with pairs of neighbouring inner indices in one
//! `u32`; a tile of the result stays in registers for a whole block. [`scalar_tile`] defines a
//! tile. Sums are in `f32`, in an order that depends only on shapes and processor. The instruction
//! treats subnormal numbers as 0.

#![expect(unsafe_code, reason = "vector loads and stores, a function compiled for a feature")]

use half::bf16;

use super::gemm::Mat;
#[cfg(target_arch = "x86_64")]
use super::{simd::is_allowed, simd_limit::Simd};

/// Lines and columns of a tile: 24 registers for sums, so that the processor's 32 registers
/// suffice.
const TILE: (usize, usize) = (12, 32);
/// Sizes of the blocks that are packed at a time: inner pairs, lines, columns.
const BLOCK: (usize, usize, usize) = (256, 192, 1024);

/// Pairs of the lines or columns of a panel, by inner pair.
type Pairs<const N: usize> = [u32; N];
/// One tile of the result.
type Tile = [[f32; TILE.1]; TILE.0];

/// Whether the processor has the instruction and the environment allows it. Without it the product
/// is slower than in `f32`.
pub(crate) fn is_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_allowed(Simd::Avx512)
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512bw");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// [`gemm`](super::gemm::gemm), with checked sizes.
pub(crate) fn gemm(dst: &mut [f32], accumulate: bool, lhs: Mat<'_, bf16>, rhs: Mat<'_, bf16>) {
    #[cfg(target_arch = "x86_64")]
    if is_available() {
        // SAFETY: the processor has the features, as detected above.
        return unsafe { x86::product(dst, accumulate, lhs, rhs) };
    }
    product(dst, accumulate, lhs, rhs, scalar_tile);
}

/// The product, by blocks and panels; `tile` computes a tile.
#[inline(always)]
fn product(
    dst: &mut [f32],
    accumulate: bool,
    lhs: Mat<'_, bf16>,
    rhs: Mat<'_, bf16>,
    tile: impl Fn(&[Pairs<{ TILE.0 }>], &[Pairs<{ TILE.1 }>]) -> Tile,
) {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    // Columns are packed like rows.
    let (inner, width, rhs) = (lhs.cols, rhs.cols, rhs.t());
    if inner == 0 && !accumulate {
        dst.fill(0.0);
    }
    for column in (0..width).step_by(BLOCK.2) {
        let columns = BLOCK.2.min(width - column);
        for first in (0..inner).step_by(2 * BLOCK.0) {
            let depth = (2 * BLOCK.0).min(inner - first);
            pack(&mut right, rhs, (column, columns), (first, depth));
            for row in (0..lhs.rows).step_by(BLOCK.1) {
                let rows = BLOCK.1.min(lhs.rows - row);
                pack(&mut left, lhs, (row, rows), (first, depth));
                let pairs = depth.div_ceil(2);
                for (right, column) in right.chunks_exact(pairs).zip((column..).step_by(TILE.1)) {
                    for (left, row) in left.chunks_exact(pairs).zip((row..).step_by(TILE.0)) {
                        let sums = tile(left, right);
                        let columns = column..width.min(column + TILE.1);
                        for (sums, row) in sums.iter().zip(row..lhs.rows) {
                            let dst = &mut dst[row * width..][..width][columns.clone()];
                            if accumulate || first > 0 {
                                dst.iter_mut().zip(sums).for_each(|(dst, sum)| *dst += sum);
                            } else {
                                dst.copy_from_slice(&sums[..dst.len()]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Packs a block of `factor`: panels of `N` rows, each by inner pair. An odd last inner index is
/// paired with 0. Rows after the last one have unspecified values, since their results are not
/// stored.
#[inline(always)]
fn pack<const N: usize>(
    panels: &mut Vec<Pairs<N>>,
    factor: Mat<'_, bf16>,
    (row, rows): (usize, usize),
    (first, depth): (usize, usize),
) {
    let pairs = depth.div_ceil(2);
    panels.resize(rows.div_ceil(N) * pairs, [0; N]);
    let Mat { data, row_stride, col_stride, .. } = factor;
    for (panel, row) in panels.chunks_exact_mut(pairs).zip((row..row + rows).step_by(N)) {
        let rows = N.min(factor.rows - row);
        if col_stride == 1 {
            for at in 0..rows {
                let values = &data[(row + at) * row_stride + first..][..depth];
                let (whole, last) = values.as_chunks::<2>();
                for (pair, [low, high]) in panel.iter_mut().zip(whole) {
                    pair[at] = joined(*low, *high);
                }
                if let [last] = last {
                    panel[pairs - 1][at] = joined(*last, bf16::ZERO);
                }
            }
        } else {
            let at = |inner: usize| &data[inner * col_stride + row..][..rows];
            for (pair, inner) in panel.iter_mut().zip((first..).step_by(2)) {
                pair.iter_mut()
                    .zip(at(inner))
                    .for_each(|(pair, low)| *pair = joined(*low, bf16::ZERO));
                if inner + 1 < first + depth {
                    let highs = pair.iter_mut().zip(at(inner + 1));
                    highs.for_each(|(pair, high)| *pair |= joined(bf16::ZERO, *high));
                }
            }
        }
    }
}

#[inline(always)]
fn joined(low: bf16, high: bf16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

/// The product of two panels.
fn scalar_tile(left: &[Pairs<{ TILE.0 }>], right: &[Pairs<{ TILE.1 }>]) -> Tile {
    let halves = |pair: u32| [pair << 16, pair & 0xffff_0000].map(f32::from_bits);
    let mut tile = [[0.0; TILE.1]; TILE.0];
    for (left, right) in left.iter().zip(right) {
        for (sums, left) in tile.iter_mut().zip(left) {
            for (sum, right) in sums.iter_mut().zip(right) {
                let ([l0, l1], [r0, r1]) = (halves(*left), halves(*right));
                *sum += l0 * r0 + l1 * r1;
            }
        }
    }
    tile
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_setzero_ps, _mm512_storeu_ps,
    };
    use std::mem::transmute;

    use half::bf16;

    use super::{Mat, Pairs, TILE, Tile};

    const VECTOR: usize = 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(crate) fn product(
        dst: &mut [f32],
        accumulate: bool,
        lhs: Mat<'_, bf16>,
        rhs: Mat<'_, bf16>,
    ) {
        super::product(dst, accumulate, lhs, rhs, |left, right| tile(left, right));
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    fn tile(left: &[Pairs<{ TILE.0 }>], right: &[Pairs<{ TILE.1 }>]) -> Tile {
        let mut sums = [[_mm512_setzero_ps(); TILE.1 / VECTOR]; TILE.0];
        for (left, right) in left.iter().zip(right) {
            let (right, _) = right.as_chunks::<VECTOR>();
            let right = [load(&right[0]), load(&right[1])];
            for (sums, left) in sums.iter_mut().zip(left) {
                let left = pairs(_mm512_set1_epi32(left.cast_signed()));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = _mm512_dpbf16_ps(*sum, left, right);
                }
            }
        }
        let mut tile = [[0.0; TILE.1]; TILE.0];
        for (to, sums) in tile.iter_mut().zip(sums) {
            let (to, _) = to.as_chunks_mut::<VECTOR>();
            to.iter_mut().zip(sums).for_each(|(to, sum)| store(to, sum));
        }
        tile
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn load(values: &[u32; VECTOR]) -> __m512bh {
        // SAFETY: the array has the 64 bytes that are read.
        pairs(unsafe { _mm512_loadu_si512(values.as_ptr().cast()) })
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn pairs(values: __m512i) -> __m512bh {
        // SAFETY: both types have 512 bits, and all bit patterns are valid.
        unsafe { transmute::<__m512i, __m512bh>(values) }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn store(to: &mut [f32; VECTOR], values: __m512) {
        // SAFETY: the array has the 64 bytes that are written.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    use super::*;

    /// Rounded numbers from -1 to 1.
    fn random(count: usize, rng: &mut ChaCha8Rng) -> Vec<bf16> {
        let next = |_| bf16::from_f32(rng.next_u32() as f32 / (1_u32 << 31) as f32 - 1.0);
        (0..count).map(next).collect()
    }

    fn exact(lhs: Mat<'_, bf16>, rhs: Mat<'_, bf16>, start: f64) -> Vec<f64> {
        let at = |m: Mat<'_, bf16>, r: usize, c: usize| {
            m.data[r * m.row_stride + c * m.col_stride].to_f64()
        };
        let element =
            |r, c| start + (0..lhs.cols).map(|i| at(lhs, r, i) * at(rhs, i, c)).sum::<f64>();
        let columns = 0..rhs.cols;
        (0..lhs.rows)
            .flat_map(|r| columns.clone().map(move |c| (r, c)))
            .map(|(r, c)| element(r, c))
            .collect()
    }

    #[test]
    fn products_of_all_sizes_and_transpositions_are_those_in_f64() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let sizes = [(1, 1, 1), (12, 32, 2), (13, 33, 3), (5, 70, 513), (200, 1, 40), (2, 1030, 7)];
        for (m, n, k) in sizes.into_iter().chain([(2, 3, 0), (0, 3, 2), (3, 0, 2)]) {
            let (a, b) = (random(m * k, &mut rng), random(k * n, &mut rng));
            for lhs in [Mat::new(&a, m, k), Mat::new(&a, k, m).t()] {
                for rhs in [Mat::new(&b, k, n), Mat::new(&b, n, k).t()] {
                    for (accumulate, start) in [(false, 0.0), (true, 2.0)] {
                        let expected = exact(lhs, rhs, start);
                        let mut dst = vec![if accumulate { 2.0 } else { f32::NAN }; m * n];
                        gemm(&mut dst, accumulate, lhs, rhs);
                        let mut scalar = vec![start as f32; m * n];
                        product(&mut scalar, accumulate, lhs, rhs, scalar_tile);
                        for (got, exact) in dst.iter().chain(&scalar).zip(expected.iter().cycle()) {
                            let bound = 1e-6 * (k + 2) as f64;
                            assert!(
                                (f64::from(*got) - exact).abs() <= bound,
                                "{m} x {n} x {k}: {got}, not {exact}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_propagates() {
        let values = |value: f32| vec![bf16::from_f32(value); 4];
        for (a, b) in [(f32::NAN, 1.0), (f32::INFINITY, 1.0), (f32::INFINITY, 0.0)] {
            let (left, right) = (values(a), values(b));
            let mut dst = [0.0; 4];
            gemm(&mut dst, false, Mat::new(&left, 2, 2), Mat::new(&right, 2, 2));
            let expected = a * b;
            assert!(
                dst.iter().all(|v| *v == expected || v.is_nan() && expected.is_nan()),
                "{dst:?}"
            );
        }
    }
}
