//! `TensorSpec`: name, shape and type of a parameter or buffer.

use std::fmt;

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

/// A parameter whose gradient does not match the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct WrongGradient {
    /// Name of the parameter.
    pub name: String,
    /// Slope of the loss along a random direction, computed from the gradient; `None` without a
    /// gradient.
    pub gradient: Option<f64>,
    /// The same slope computed from differences of the loss.
    pub difference: f64,
}

impl fmt::Display for WrongGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, difference, .. } = self;
        match self.gradient {
            Some(gradient) => write!(
                f,
                "the gradient of `{name}` is wrong: the slope of the loss along a random direction is \
                 {difference:.4e}, the gradient yields {gradient:.4e}"
            ),
            None => write!(
                f,
                "`{name}` has no gradient, but the loss depends on it: its slope along a random \
                 direction is {difference:.4e}"
            ),
        }
    }
}
