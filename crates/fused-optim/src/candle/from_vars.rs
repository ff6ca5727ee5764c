//! `FromVars`: makes an optimizer for variables.

use candle_core::{Error, Result, Var};

use crate::rule::Hyper;
use crate::{CpuOptimizer, Optimizer, ParamGroup};

/// An optimizer that can be created for variables.
pub trait FromVars: Optimizer + Sized {
    /// The rule's hyper-parameters.
    type Hyper;

    /// Creates an optimizer for `vars`, in this order, with one parameter group.
    ///
    /// # Errors
    ///
    /// Hyper-parameters out of range; on a GPU the errors of
    /// `cuda::CudaDeviceOptimizer::new`.
    fn from_vars(vars: &[Var], hyper: Self::Hyper) -> Result<Self>;

    /// Creates an optimizer for `vars`, of which the groups have the indices.
    ///
    /// # Errors
    ///
    /// As [`from_vars`](Self::from_vars); a variable in two groups.
    fn from_groups(
        vars: &[Var],
        groups: impl IntoIterator<Item = ParamGroup<Self::Hyper>>,
    ) -> Result<Self>;
}

impl<H: Hyper> FromVars for CpuOptimizer<H> {
    type Hyper = H;

    fn from_vars(vars: &[Var], hyper: H) -> Result<Self> {
        Self::with_one_group(hyper, vars.len()).map_err(Error::wrap)
    }

    fn from_groups(_: &[Var], groups: impl IntoIterator<Item = ParamGroup<H>>) -> Result<Self> {
        Self::new(groups).map_err(Error::wrap)
    }
}
