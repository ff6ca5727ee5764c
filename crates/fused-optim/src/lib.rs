//! Fused multi-tensor optimizers.

mod error;
mod optimizer;
mod param;
mod state_dict;

pub use error::{Error, Result, StateProblem};
pub use optimizer::{Applied, FoundInf, Optimizer, StepCtl};
pub use param::{DType, ParamGroup, ParamMut, Slice, SliceMut};
pub use state_dict::{ParamState, StateDict};
