//! Newton-Schulz iteration: a matrix with nearly the same singular vectors, and singular values
//! near 1.
//!
//! The only module that passes pointers to the `gemm` crate. Each [`View`] is first checked against
//! its slice.

#![expect(unsafe_code, reason = "the gemm crate takes raw pointers and strides")]

use crate::cpu::{GradMap, sum_of_squares};

/// Replaces the row-major matrix `x` of `rows` rows, divided by its Frobenius norm (at least
/// `eps`), by `a·X + (b·XXᵀ + c·(XXᵀ)²)·X`, `steps` times. A tall matrix is transposed first. In
/// f32.
pub(super) fn orthogonalize(x: &mut [f32], rows: usize, eps: f64, steps: u32) {
    if x.is_empty() {
        return;
    }
    let norm = sum_of_squares(x, GradMap::IDENTITY).sqrt();
    // Not `max`: a NaN must stay NaN.
    let norm = if norm < eps { eps } else { norm } as f32;
    x.iter_mut().for_each(|x| *x /= norm);
    let whole = View::new(rows, x.len() / rows);
    let wide = if rows > whole.cols { whole.transposed() } else { whole };
    let square = View::new(wide.rows, wide.rows);
    let [mut gram, mut polynomial] = [0, 1].map(|_| vec![0.0; wide.rows * wide.rows]);
    let mut old = vec![0.0; x.len()];
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..steps {
        multiply((&mut gram, square), (0.0, 1.0), (x, wide), (x, wide.transposed()));
        polynomial.copy_from_slice(&gram);
        multiply((&mut polynomial, square), (b, c), (&gram, square), (&gram, square));
        old.copy_from_slice(x);
        multiply((x, wide), (a, 1.0), (&polynomial, square), (&old, wide));
    }
}

/// The coefficients of the authors and of PyTorch.
const COEFFICIENTS: (f32, f32, f32) = (3.4445, -4.7750, 2.0315);

/// Layout of a matrix's elements in a slice.
#[derive(Clone, Copy, Debug)]
struct View {
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl View {
    /// Row-major.
    const fn new(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols, col_stride: 1 }
    }

    const fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// `dst ← α·dst + β·lhs·rhs` on the calling thread.
///
/// # Panics
///
/// If a matrix is not its whole slice, row-major or transposed, or if dimensions do not match.
fn multiply(
    (dst, d): (&mut [f32], View),
    (alpha, beta): (f32, f32),
    (lhs, l): (&[f32], View),
    (rhs, r): (&[f32], View),
) {
    assert_eq!((d.rows, d.cols, l.cols), (l.rows, r.cols, r.rows), "dimensions of a product");
    for (view, len) in [(d, dst.len()), (l, lhs.len()), (r, rhs.len())] {
        let strides = (view.row_stride, view.col_stride);
        assert!(strides == (view.cols, 1) || strides == (1, view.rows), "strides of a matrix");
        assert_eq!(view.rows.checked_mul(view.cols), Some(len), "elements of a matrix");
    }
    let strides = |view: View| (view.col_stride.cast_signed(), view.row_stride.cast_signed());
    let ((dc, dr), (lc, lr), (rc, rr)) = (strides(d), strides(l), strides(r));
    let (dst, lhs, rhs) = (dst.as_mut_ptr(), lhs.as_ptr(), rhs.as_ptr());
    // SAFETY: gemm (0.19) asks that `dst`, `lhs` and `rhs` are valid for an m x n, m x k and k x n
    // matrix with these strides, column's before row's, and that `dst` overlaps neither. Sizes and
    // strides: the assertions above. Overlap: `dst` is a unique borrow. Strides fit `isize`: they
    // are at most a slice's length.
    unsafe {
        gemm::gemm(
            d.rows,
            d.cols,
            l.cols,
            dst,
            dc,
            dr,
            alpha != 0.0,
            lhs,
            lc,
            lr,
            rhs,
            rc,
            rr,
            alpha,
            beta,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The iteration in f64 with plain loops.
    fn plain(x: &mut Vec<f64>, rows: usize, eps: f64, steps: u32) {
        let cols = x.len() / rows;
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(eps);
        x.iter_mut().for_each(|x| *x /= norm);
        let (a, b, c) = (3.4445, -4.7750, 2.0315);
        let sum = |count: usize, term: &dyn Fn(usize) -> f64| (0..count).map(term).sum::<f64>();
        let indices = |cols: usize| move |at: usize| (at / cols, at % cols);
        for _ in 0..steps {
            let gram: Vec<f64> = (0..rows * rows)
                .map(indices(rows))
                .map(|(i, j)| sum(cols, &|k| x[i * cols + k] * x[j * cols + k]))
                .collect();
            let polynomial: Vec<f64> = (0..rows * rows)
                .map(indices(rows))
                .map(|(i, j)| {
                    let square = sum(rows, &|k| gram[i * rows + k] * gram[k * rows + j]);
                    b * gram[i * rows + j] + c * square
                })
                .collect();
            *x = (0..rows * cols)
                .map(indices(cols))
                .map(|(i, j)| {
                    let moved = sum(rows, &|k| polynomial[i * rows + k] * x[k * cols + j]);
                    a * x[i * cols + j] + moved
                })
                .collect();
        }
    }

    proptest! {
        #[test]
        fn orthogonalize_agrees_with_plain_loops(
            (rows, values) in (1..40_usize, 1..40_usize).prop_flat_map(|(rows, cols)| {
                (Just(rows), prop::collection::vec(-4.0_f32..4.0, rows * cols))
            }),
            steps in 0..6_u32,
            eps in prop_oneof![Just(1e-7), Just(50.0)],
        ) {
            let mut wide: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
            let mut x = values;
            orthogonalize(&mut x, rows, eps, steps);
            plain(&mut wide, rows, eps, steps);
            // Each step amplifies rounding errors along small singular values, up to 3.4445⁵ times
            // in all.
            for (got, expected) in x.iter().zip(&wide) {
                prop_assert!((f64::from(*got) - expected).abs() < 1e-4, "{} {}", got, expected);
            }
        }
    }

    #[test]
    fn empty_and_zero_matrices_stay_and_nan_spreads() {
        orthogonalize(&mut [], 3, 1e-7, 5);
        let mut zeros = [0.0; 6];
        orthogonalize(&mut zeros, 2, 1e-7, 5);
        assert_eq!(zeros, [0.0; 6]);
        let mut one = [1.0, f32::NAN, 2.0, 3.0];
        orthogonalize(&mut one, 2, 1e-7, 5);
        assert!(one.iter().all(|x| x.is_nan()));
    }
}
