//! Reduction operators.

use std::fmt;
use std::mem;

use crate::DType;

/// How the ranks' numbers at one position are combined.
///
/// Every operator folds in rank order, `((x0 . x1) . x2) ...`, whatever the transport, the chunking
/// or the offset in the buffer, so all ranks get the same bits, and the same again when the call is
/// repeated:
///
/// * `f16` and `bf16` are folded in `f32` and rounded once, to nearest even.
/// * `Avg` is the rank-order sum times `1 / world_size`. Floating-point types only.
/// * `PreMulSum` multiplies each number, then adds: two roundings, no fused multiply-add.
/// * Integers wrap.
/// * `bool` supports `Max` (or) and `Min` (and) only.
/// * [`F8E4M3`](crate::F8E4M3) and [`F8E5M2`](crate::F8E5M2) support none.
/// * `Min` and `Max` return NaN if any rank has one; of two zeros, that of the lower rank.
/// * A NaN result is always the positive quiet NaN without payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The mean: sum times `1 / world_size`.
    #[doc(alias = "mean")]
    Avg,
    /// The product.
    #[doc(alias = "prod")]
    Product,
    /// The minimum.
    Min,
    /// The maximum.
    Max,
    /// Bitwise and; integers only.
    #[doc(alias = "BAND")]
    BitAnd,
    /// Bitwise or; integers only.
    #[doc(alias = "BOR")]
    BitOr,
    /// Bitwise exclusive or; integers only.
    #[doc(alias = "BXOR")]
    BitXor,
    /// The sum of all numbers, each multiplied by a factor that is the same on all ranks.
    /// Floating-point types only.
    #[doc(alias = "PREMUL_SUM")]
    PreMulSum(Factor),
}

/// The factor of [`ReduceOp::PreMulSum`]. Compared by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor(u64);

impl Factor {
    /// Makes a factor. Numbers narrower than `f64` are multiplied by it rounded to `f32`.
    pub const fn new(factor: f64) -> Self {
        Self(factor.to_bits())
    }

    /// Returns the factor.
    pub const fn get(self) -> f64 {
        f64::from_bits(self.0)
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

impl ReduceOp {
    /// All operators, in the order of their codes; `PreMulSum` with the factor 0.5.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Avg,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
        Self::PreMulSum(Factor::new(0.5)),
    ];

    /// Returns the operator for the sum of all numbers, each multiplied by `factor`.
    pub const fn pre_mul_sum(factor: f64) -> Self {
        Self::PreMulSum(Factor::new(factor))
    }

    /// Returns its index in [`ALL`](Self::ALL).
    pub(crate) fn code(self) -> u64 {
        let kind = mem::discriminant(&self);
        let index = Self::ALL.iter().position(|op| mem::discriminant(op) == kind);
        index.expect("the list has all operators") as u64
    }

    /// Returns the factor of `PreMulSum`; all zero bits for other operators.
    pub(crate) const fn factor(self) -> Factor {
        match self {
            Self::PreMulSum(factor) => factor,
            _ => Factor::from_bits(0),
        }
    }

    pub(crate) fn from_code(code: usize, factor: Factor) -> Option<Self> {
        match Self::ALL.get(code)? {
            Self::PreMulSum(_) => Some(Self::PreMulSum(factor)),
            op => Some(*op),
        }
    }

    /// Returns whether the operator is defined for the type.
    pub const fn supports(self, dtype: DType) -> bool {
        match (self, dtype) {
            (_, DType::F8E4M3 | DType::F8E5M2) => false,
            (Self::Min | Self::Max, _) => true,
            (_, DType::Bool) => false,
            (Self::Sum | Self::Product, _) => true,
            (Self::Avg | Self::PreMulSum(_), _) => dtype.is_float(),
            (Self::BitAnd | Self::BitOr | Self::BitXor, _) => !dtype.is_float(),
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PreMulSum(factor) => write!(f, "premulsum({})", factor.get()),
            // The variant's name.
            other => write!(f, "{}", format!("{other:?}").to_lowercase()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_indices_in_all() {
        for (code, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op.code(), code as u64);
            assert_eq!(ReduceOp::from_code(code, op.factor()), Some(op));
        }
    }

    #[test]
    fn avg_needs_floats_and_bit_operators_integers() {
        assert!(ReduceOp::Avg.supports(DType::Bf16));
        assert!(!ReduceOp::Avg.supports(DType::I64));
        assert!(!ReduceOp::BitOr.supports(DType::F32));
        assert!(ReduceOp::BitOr.supports(DType::U8));
    }

    #[test]
    fn bool_supports_min_and_max_and_8_bit_floats_nothing() {
        let of = |dtype| ReduceOp::ALL.into_iter().filter(move |op| op.supports(dtype));
        assert!(of(DType::Bool).eq([ReduceOp::Min, ReduceOp::Max]));
        assert_eq!(of(DType::F8E4M3).chain(of(DType::F8E5M2)).next(), None);
    }
}
