//! Saved state: PyTorch's names, and bytes.

use std::collections::BTreeMap;

/// Everything an optimizer remembers, under PyTorch's names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateDict {
    /// Which optimizer this is of, for example `adamw`.
    pub kind: String,
    /// The groups as a JSON array of objects: hyper-parameters, and tensor indices as `params`.
    pub param_groups: String,
    /// State by tensor index; a tensor that never had a gradient has none.
    pub state: BTreeMap<usize, ParamState>,
}

/// The state of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParamState {
    /// Steps this tensor has taken.
    pub step: u64,
    /// Moments by name (`exp_avg`, `momentum_buffer`, ...), and `master` if the weight is half.
    pub tensors: BTreeMap<String, Vec<f32>>,
}
