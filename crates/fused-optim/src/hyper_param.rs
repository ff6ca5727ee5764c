//! Hyper-parameters that every rule may have.

use std::fmt;

/// A hyper-parameter that can be read and set between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HyperParam {
    /// The learning rate.
    Lr,
    /// The momentum; for Adam-like rules the decay rate of the first moment, `β1`.
    Momentum,
    /// The weight decay.
    WeightDecay,
}

impl fmt::Display for HyperParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lr => "learning rate",
            Self::Momentum => "momentum",
            Self::WeightDecay => "weight decay",
        })
    }
}
