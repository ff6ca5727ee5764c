//! Reduction operators: what happens to the ranks' numbers at one position.

use std::fmt;

use crate::DType;

/// How the numbers of all ranks at one position become one.
///
/// Every operator folds in rank order, `((x0 . x1) . x2) ...`, whatever the transport, the chunking
/// or the offset in the buffer, so that all ranks get the same bits and get them again when the
/// call is repeated:
///
/// * `f16` and `bf16` are folded in `f32` and rounded once, to nearest even.
/// * `Avg` is the rank-order sum times `1 / world_size`. Floating-point types only.
/// * Integers wrap.
/// * `Min` and `Max` give NaN if any rank has one; of two zeros the one of the lower rank is kept.
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
    /// The least.
    Min,
    /// The greatest.
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
}

impl ReduceOp {
    /// Every operator, in the order of their codes.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Avg,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Whether the operator is defined for the type.
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Product | Self::Min | Self::Max => true,
            Self::Avg => dtype.is_float(),
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::BitAnd => "bitand",
            Self::BitOr => "bitor",
            Self::BitXor => "bitxor",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_positions() {
        for (code, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, code);
        }
    }

    #[test]
    fn averages_are_for_floats_and_bits_for_integers() {
        assert!(ReduceOp::Avg.supports(DType::Bf16));
        assert!(!ReduceOp::Avg.supports(DType::I64));
        assert!(!ReduceOp::BitOr.supports(DType::F32));
        assert!(ReduceOp::BitOr.supports(DType::U8));
    }
}
