//! From a batch to updated parameters: accumulation, precision, the optimizer's step.
//!
//! One call of [`OptimWrapper::update_params`] runs forward and backward through the engine and,
//! when enough batches have been added up, lets the optimizer step. In configurations, as in MMEngine,
//! `OptimWrapper` does just that; `AmpOptimWrapper` is the same with autocast, or half parameters, and the dynamic
//! loss scale. It takes any optimizer, [`OptimizerDict`] among them; [`Paramwise`] makes groups with rates of their own.

mod accumulation;
mod buffers;
mod builtin;
mod dict;
mod overflow;
mod paramwise;
mod wrapper;

use ::amp::ScalerState;
use fused_optim::{Applied, DType, Optimizer, ParamGroup, ParamSpec, StateDict};

pub use accumulation::{Accumulation, BatchRole};
pub use builtin::{OPTIM_WRAPPERS, OPTIMIZERS};
pub use dict::{Member, OptimizerDict, assign};
pub(crate) use overflow::has_non_finite;
pub use paramwise::{Multipliers, Paramwise};
pub use wrapper::OptimWrapper;

use crate::Result;
use crate::engine::{Losses, TensorSpec};
use crate::placement::Placement;

/// Makes an optimizer once the parameters are known: over the groups given, which hold parameters
/// by index, and whose factors its learning rate and weight decay are multiplied by; on the device of the
/// placement.
pub type OptimizerFactory = Box<
    dyn FnOnce(&[TensorSpec], &[ParamGroup<Multipliers>], &Placement) -> Result<Box<dyn Optimizer>>
        + Send,
>;

/// Makes an optimizer wrapper whose optimizer is on the device of the placement.
pub type BuildOptimWrapper =
    Box<dyn FnOnce(&[TensorSpec], &Placement) -> Result<OptimWrapper> + Send>;

/// Makes an optimizer wrapper once the parameters are known.
pub struct OptimWrapperFactory {
    /// The type it wants the model's parameters in.
    pub dtype: DType,
    /// Makes it.
    pub build: BuildOptimWrapper,
}

impl OptimWrapperFactory {
    /// An [`OptimWrapper`] that steps after each batch, around an optimizer on the host that `make` makes for a number
    /// of parameters.
    #[must_use]
    pub fn fp32<O: Optimizer + 'static>(
        make: impl FnOnce(usize) -> fused_optim::Result<O> + Send + 'static,
    ) -> Self {
        let build: BuildOptimWrapper =
            Box::new(|params, _| Ok(OptimWrapper::new(Box::new(make(params.len())?), 1)));
        Self { dtype: DType::F32, build }
    }

    /// Makes it for these parameters, and tells its optimizer their names, by which state is saved and loaded.
    pub(crate) fn make(self, params: &[TensorSpec], placement: &Placement) -> Result<OptimWrapper> {
        let mut optim = (self.build)(params, placement)?;
        let names = params.iter().map(|param| ParamSpec::new(&*param.name, &param.shape));
        optim.optimizer_mut().set_param_names(&names.collect::<Vec<_>>())?;
        Ok(optim)
    }
}

impl std::fmt::Debug for OptimWrapperFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OptimWrapperFactory").field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

/// Everything a wrapper needs to go on where it was.
#[derive(Clone, Debug)]
pub struct OptimWrapperState {
    /// The optimizer's moments, master weights and hyper-parameters.
    pub optimizer: StateDict,
    /// The loss scaler's, if there is one.
    pub loss_scaler: Option<ScalerState>,
}

/// What became of one batch.
#[derive(Clone, Debug)]
pub struct Update {
    /// What the model reported.
    pub losses: Losses,
    /// What became of the optimizer's step; none if the batch only added up.
    pub applied: Option<Applied>,
    /// A line of the engine for the log.
    pub note: Option<String>,
    /// A warning of the engine's for the log.
    pub warning: Option<String>,
}
