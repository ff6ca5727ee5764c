//! From a batch to updated parameters: accumulation, precision, the optimizer's turn.
//!
//! One call of [`OptimWrapper::update_params`] runs forward and backward through the engine and,
//! when enough batches have been added up, lets the optimizer step. [`Fp32OptimWrapper`] (named
//! `OptimWrapper` in configurations, as in MMEngine) does just that; [`AmpOptimWrapper`] adds
//! autocast, or half parameters, and the dynamic loss scale. Either takes any optimizer, [`OptimizerDict`] among them;
//! [`Paramwise`] makes groups with rates of their own.

mod accumulation;
mod amp;
mod builtin;
mod dict;
mod fp32;
mod paramwise;
mod watch;

use ::amp::ScalerState;
#[cfg(feature = "candle-cuda")]
use fused_optim::cuda::GradStats;
use fused_optim::{
    Applied, Clip, DType, Optimizer, ParamGroup, ParamMut, ParamSpec, StateDict, StepCtl,
};

pub use accumulation::{Accumulation, Turn};
pub use amp::{AmpOptimWrapper, LossScale};
pub use builtin::{OPTIM_WRAPPERS, OPTIMIZERS};
pub use dict::{Member, OptimizerDict, assign};
pub use fp32::Fp32OptimWrapper;
pub use paramwise::{Multipliers, Paramwise};

use crate::Result;
use crate::data::Batch;
use crate::device::Device;
use crate::engine::{ComputeDevice, Engine, Losses, SharedSink, TensorSpec};
use crate::model::ModelWrapper;

/// Makes an optimizer once the parameters are known: over the groups given, which hold parameters
/// by index, and whose factors its learning rate and weight decay are multiplied by; to compute on the
/// device given.
pub type OptimizerFactory = Box<
    dyn FnOnce(&[TensorSpec], &[ParamGroup<Multipliers>], &Device) -> Result<Box<dyn Optimizer>>
        + Send,
>;

/// The making of an optimizer wrapper, whose optimizer is to compute on the device given.
pub type BuildOptimWrapper =
    Box<dyn FnOnce(&[TensorSpec], &Device) -> Result<Box<dyn OptimWrapper>> + Send>;

/// Makes an optimizer wrapper once the parameters are known.
pub struct OptimWrapperFactory {
    /// The type it wants the model's parameters in.
    pub dtype: DType,
    /// Makes it.
    pub build: BuildOptimWrapper,
}

impl OptimWrapperFactory {
    /// An [`Fp32OptimWrapper`] that steps after each batch, around what `make` makes for a number of
    /// parameters: an optimizer on the host.
    #[must_use]
    pub fn fp32<O: Optimizer + 'static>(
        make: impl FnOnce(usize) -> fused_optim::Result<O> + Send + 'static,
    ) -> Self {
        let build: BuildOptimWrapper = Box::new(|params, _| {
            Ok(Box::new(Fp32OptimWrapper::new(Box::new(make(params.len())?), 1)))
        });
        Self { dtype: DType::F32, build }
    }

    /// Makes it for these parameters, and tells its optimizer their names, by which state is saved and loaded.
    pub(crate) fn make(
        self,
        params: &[TensorSpec],
        device: &Device,
    ) -> Result<Box<dyn OptimWrapper>> {
        let mut optim = (self.build)(params, device)?;
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
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// What the model reported.
    pub losses: Losses,
    /// What became of the optimizer's step; none if the batch only added up.
    pub applied: Option<Applied>,
}

/// Drives the optimizer.
pub trait OptimWrapper: Send {
    /// The optimizer inside.
    fn optimizer(&self) -> &dyn Optimizer;

    /// The optimizer inside.
    fn optimizer_mut(&mut self) -> &mut dyn Optimizer;

    /// The parts of an optimizer of several, and how many groups each has, in the groups' order.
    fn parts(&self) -> Vec<(String, usize)> {
        Vec::new()
    }

    /// How many batches make a step.
    fn accumulation(&mut self) -> &mut Accumulation;

    /// What the loss is multiplied by before backward.
    fn loss_scale(&self) -> f32 {
        1.0
    }

    /// Whether a step is skipped whose gradients are not all finite; else they become the weights'.
    fn skips_non_finite(&self) -> bool {
        false
    }

    /// The lower precision that the engine is to run suitable operators in, if any: asked once, before
    /// training.
    #[doc(alias = "optim_context")]
    fn autocast(&self) -> Option<DType> {
        None
    }

    /// Scalars worth a place in the log.
    fn log_scalars(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Called before the forward of a pass that ends in a [`step`](Self::step): what of that step can be done with
    /// each gradient as soon as it is averaged, if the optimizer is on a GPU and the step has to look at them first.
    ///
    /// # Errors
    ///
    /// Those of the optimizer.
    #[cfg(feature = "candle-cuda")]
    fn look_ahead(&mut self) -> Result<Option<GradStats>> {
        Ok(None)
    }

    /// Lets the optimizer step on the gradients that are there.
    ///
    /// # Errors
    ///
    /// Those of the optimizer; a loss scale that has fallen to its floor.
    fn step(&mut self, engine: &mut dyn Engine, model: &dyn ModelWrapper) -> Result<Applied>;

    /// The optimizer and what the step that comes is told, if that is all there is to a [`step`](Self::step): an
    /// engine may then make it together with backward.
    fn step_behind(&mut self) -> Option<(&mut dyn Optimizer, StepCtl)> {
        None
    }

    /// Called in place of [`step`](Self::step) where an engine has made it.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step), but for the optimizer's.
    fn stepped(&mut self, _applied: Applied) -> Result<()> {
        Ok(())
    }

    /// Called before each forward pass, with where gradients are to go; where they go at first. A
    /// wrapper that looks at them before they are averaged puts itself before `sink`.
    ///
    /// # Errors
    ///
    /// The wrapper's own.
    fn before_forward(&mut self, sink: SharedSink) -> Result<SharedSink> {
        Ok(sink)
    }

    /// What to save.
    ///
    /// # Errors
    ///
    /// Those of a device that the optimizer's state is on.
    fn state_dict(&self) -> Result<OptimWrapperState>;

    /// Goes on from what was saved.
    ///
    /// # Errors
    ///
    /// If it is of another optimizer or other parameters; nothing has changed then.
    fn load_state_dict(&mut self, state: &OptimWrapperState) -> Result<()>;

    /// Trains on one batch: forward, backward, and the optimizer's step if it is due.
    ///
    /// # Errors
    ///
    /// Those of the engine, of communication, and of the optimizer.
    fn update_params(
        &mut self,
        engine: &mut dyn Engine,
        model: &mut dyn ModelWrapper,
        batch: &Batch,
    ) -> Result<Update> {
        let turn = self.accumulation().turn();
        model.prepare(turn.update)?;
        #[cfg(feature = "candle-cuda")]
        if turn.update
            && let Some(look) = self.look_ahead()?
        {
            model.look_ahead(look);
        }
        model.before_forward(engine)?;
        let scale = self.loss_scale() / turn.divisor as f32;
        let sink = self.before_forward(model.sink())?;
        let is_behind = turn.update && turn.divisor == 1 && model.passes_on();
        let behind = if is_behind { self.step_behind() } else { None };
        let (losses, mut applied) = match behind {
            Some((optimizer, ctl)) => {
                engine.forward_backward_step(batch, scale, &sink, (optimizer, &ctl))?
            }
            None => (engine.forward_backward(batch, scale, &sink)?, None),
        };
        model.finish()?;
        if turn.update {
            match applied {
                Some(applied) => self.stepped(applied)?,
                None => applied = Some(self.step(engine, model)?),
            }
            model.zero_grad();
        }
        Ok(Update { losses, applied })
    }
}

/// The norm of the gradients, if the last batch ended in a step that took it.
fn grad_norm(
    optimizer: &dyn Optimizer,
    clip: Option<Clip>,
    applied: Option<Applied>,
) -> Option<(&'static str, f64)> {
    match (clip, applied) {
        (Some(Clip::Norm(_)), Some(Applied::Applied)) => {
            optimizer.grad_norm().map(|norm| ("grad_norm", norm))
        }
        _ => None,
    }
}

/// Brings parameters and gradients together for one optimizer step: where they are, or on the host.
fn optimizer_step(
    optimizer: &mut dyn Optimizer,
    engine: &mut dyn Engine,
    model: &dyn ModelWrapper,
    ctl: &StepCtl,
) -> Result<Applied> {
    let mut applied = Applied::SkippedNonFinite;
    if engine.device() != ComputeDevice::Cpu && optimizer.device() != "cpu" {
        model.with_gradients(&mut |grads| {
            applied = engine.step_on_device(optimizer, grads, ctl)?;
            Ok(())
        })?;
        return Ok(applied);
    }
    let rows: Vec<usize> = engine.params().iter().map(TensorSpec::rows).collect();
    engine.with_params(&mut |weights| {
        model.with_grads(&mut |grads| {
            let mut params: Vec<_> = weights
                .iter_mut()
                .zip(grads)
                .zip(&rows)
                .map(|((weight, grad), &rows)| ParamMut {
                    rows,
                    ..ParamMut::new(weight.reborrow(), *grad)
                })
                .collect();
            applied = optimizer.step(&mut params, ctl)?;
            Ok(())
        })
    })?;
    Ok(applied)
}
