//! `TensorSpec`: name, shape and type of a parameter or buffer.

use fused_optim::DType;

/// Name, shape and type of a parameter or buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Dotted path, unique within the model: `layer1.0.conv1.weight`.
    pub name: String,
    /// Sizes of the dimensions, in row-major order.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl TensorSpec {
    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the length of the first dimension if there are two or more, else 0: for optimizers
    /// that treat a weight row by row.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self.shape[..] {
            [rows, _, ..] => rows,
            _ => 0,
        }
    }
}
