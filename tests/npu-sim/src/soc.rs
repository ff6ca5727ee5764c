//! Differences between chips.

use npu_sys::sys::{AclDataType, HcclDataType, HcclReduceOp};

/// A chip, as far as its differences show in the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Soc {
    /// The first generation: no bf16, no foreach operators, f16 saturates.
    Ascend910A,
    /// The second.
    #[default]
    Ascend910B,
    /// The third: two chips in one package.
    Ascend910C,
}

impl Soc {
    /// The name that `aclrtGetSocName` returns.
    pub(crate) const fn name(self) -> &'static std::ffi::CStr {
        match self {
            Self::Ascend910A => c"Ascend910A",
            Self::Ascend910B => c"Ascend910B2",
            Self::Ascend910C => c"Ascend910_9391",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        [Self::Ascend910A, Self::Ascend910B, Self::Ascend910C]
            .into_iter()
            .find(|soc| soc.name().to_str() == Ok(name))
    }

    /// Whether f16 cannot hold infinity and NaN.
    pub(crate) fn saturates(self) -> bool {
        self == Self::Ascend910A
    }

    /// Whether it has operators on lists, and the fused ones.
    pub(crate) fn has_foreach(self) -> bool {
        self != Self::Ascend910A
    }

    /// Whether operators take this type in arithmetic.
    pub(crate) fn computes(self, dtype: AclDataType) -> bool {
        match dtype {
            AclDataType::FLOAT | AclDataType::FLOAT16 => true,
            AclDataType::BF16 => self != Self::Ascend910A,
            _ => false,
        }
    }

    /// Whether HCCL reduces this type by this operation.
    pub(crate) fn reduces(self, dtype: HcclDataType, op: HcclReduceOp) -> bool {
        match dtype {
            HcclDataType::INT8
            | HcclDataType::INT32
            | HcclDataType::INT64
            | HcclDataType::FP16
            | HcclDataType::FP32 => true,
            HcclDataType::INT16 | HcclDataType::BFP16 => {
                self != Self::Ascend910A && op != HcclReduceOp::PROD
            }
            _ => false,
        }
    }
}
