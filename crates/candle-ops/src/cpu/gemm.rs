//! Matrix product of checked slices: the only module that passes pointers to the `gemm` crate.
//! Matrices of `bf16` are multiplied by `gemm_bf16.rs` if the processor has an instruction for
//! them.
//!
//! A [`Mat`] is a borrowed row-major matrix or its transpose, and its constructor checks that the
//! slice has exactly `rows * cols` elements. So every element accessed by a product is inside its
//! slice, and [`gemm`] is safe.

#![expect(unsafe_code, reason = "the gemm crate takes raw pointers and strides")]

use half::bf16;

use super::gemm_bf16;
use super::real::Real;

/// An element type of matrices that are multiplied in `T`.
pub(crate) trait Factor<T>: Copy {
    fn widen(self) -> T;

    /// [`gemm`] with checked sizes.
    fn product(dst: &mut [T], accumulate: bool, lhs: Mat<'_, Self>, rhs: Mat<'_, Self>);
}

impl Factor<f32> for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn product(dst: &mut [f32], accumulate: bool, lhs: Mat<'_, Self>, rhs: Mat<'_, Self>) {
        gemm_bf16::gemm(dst, accumulate, lhs, rhs);
    }
}

/// A borrowed matrix, row-major or the transpose of one.
///
/// Invariant: `data` has `rows * cols` elements, and `{row_stride, col_stride}` is `{cols, 1}` or,
/// transposed, `{1, rows}`; so element `(r, c)` is in `data` for every `r < rows`, `c < cols`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Views `data` as `rows` rows of `cols` elements.
    ///
    /// # Panics
    ///
    /// If `data` has another length.
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(rows.checked_mul(cols), Some(data.len()), "a {rows} x {cols} matrix");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transpose, without copying.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// Writes `lhs * rhs` to `dst`, row-major; with `accumulate` adds it to `dst`.
///
/// Computed in `T`, on the calling thread. The order of summation depends on the shapes and the
/// processor, not on the data. NaN and infinities propagate; with an inner dimension of 0 the
/// product is zero.
///
/// # Panics
///
/// If the inner dimensions differ or `dst` has another size than the product; for `bf16`, without
/// [`gemm_bf16::is_available`].
pub(crate) fn gemm<T, E: Factor<T>>(
    dst: &mut [T],
    accumulate: bool,
    lhs: Mat<'_, E>,
    rhs: Mat<'_, E>,
) {
    assert_eq!(lhs.cols, rhs.rows, "inner dimensions of a matrix product");
    let (m, n) = (lhs.rows, rhs.cols);
    assert_eq!(m.checked_mul(n), Some(dst.len()), "a {m} x {n} destination");
    E::product(dst, accumulate, lhs, rhs);
}

impl<T: Real> Factor<T> for T {
    #[inline(always)]
    fn widen(self) -> T {
        self
    }

    fn product(dst: &mut [T], accumulate: bool, lhs: Mat<'_, T>, rhs: Mat<'_, T>) {
        let (m, n, k) = (lhs.rows, rhs.cols, lhs.cols);
        assert!(k == rhs.rows && m * n == dst.len(), "extents were checked");
        // SAFETY: gemm (0.19) asks that `dst`, `lhs` and `rhs` are valid for an m x n, m x k and k
        // x n matrix with the given strides, and that `dst` overlaps neither. Sizes: `Mat`'s
        // invariant for the operands, the assertion above for `dst`, which is row-major. Overlap:
        // `dst` is a unique borrow. Strides fit `isize` because they are at most a slice's length
        // or, where a dimension is 0, never used. Of other types than its own it panics; `Real` are
        // two of those.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                dst.as_mut_ptr(),
                1,
                n.cast_signed(),
                accumulate,
                lhs.data.as_ptr(),
                lhs.col_stride.cast_signed(),
                lhs.row_stride.cast_signed(),
                rhs.data.as_ptr(),
                rhs.col_stride.cast_signed(),
                rhs.row_stride.cast_signed(),
                T::ONE,
                T::ONE,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(lhs: Mat<'_, f32>, rhs: Mat<'_, f32>, start: &[f32]) -> Vec<f32> {
        let at = |m: Mat<'_, f32>, r: usize, c: usize| m.data[r * m.row_stride + c * m.col_stride];
        let mut dst = start.to_vec();
        for r in 0..lhs.rows {
            for c in 0..rhs.cols {
                dst[r * rhs.cols + c] +=
                    (0..lhs.cols).map(|i| at(lhs, r, i) * at(rhs, i, c)).sum::<f32>();
            }
        }
        dst
    }

    #[test]
    fn equals_the_triple_loop_for_every_transposition() {
        // Small integers: every product and sum is exact, so the results are equal.
        let values = |count: usize, by: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * by) % 7) as f32 - 3.0).collect()
        };
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (16, 17, 9), (2, 40, 0), (0, 3, 2)] {
            let (a, b) = (values(m * k, 3), values(k * n, 5));
            let lhs = [Mat::new(&a, m, k), Mat::new(&a, k, m).t()];
            let rhs = [Mat::new(&b, k, n), Mat::new(&b, n, k).t()];
            for lhs in lhs {
                for rhs in rhs {
                    for accumulate in [false, true] {
                        let start = vec![if accumulate { 2.0 } else { 0.0 }; m * n];
                        let mut dst = start.clone();
                        gemm(&mut dst, accumulate, lhs, rhs);
                        assert_eq!(dst, naive(lhs, rhs, &start), "{m} {n} {k} {accumulate}");
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "a 2 x 3 matrix")]
    fn a_slice_of_another_length_is_refused() {
        let _ = Mat::new(&[0.0; 5], 2, 3);
    }

    #[test]
    #[should_panic(expected = "inner dimensions")]
    fn inner_dimensions_must_agree() {
        gemm(&mut [0.0; 4], false, Mat::new(&[0.0; 4], 2, 2), Mat::new(&[0.0; 6], 3, 2));
    }
}
