//! Element types that autocast knows.

use std::fmt;

/// The floating-point types of an operator's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
    /// Double precision: never cast.
    F64,
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["f16", "bf16", "f32", "f64"][*self as usize])
    }
}
