//! [`CandleEngine`]'s checks of gradients, see [`gradient_check`]: of each parameter on request, of
//! all together in a run's first step, with whose precision the loss is compared. Steps with a
//! non-finite loss or non-finite gradients are skipped.

use amp::Autocast;
use candle_core::{DType, Result, Tensor};
use candle_train::gradient_check::{self, Compared, Repeatable};

use super::CandleEngine;
use super::model::Loss;
use super::ops::allows_tf32;
use super::ops::context::{random_position, set_random_position};
use crate::config::unknown;
use crate::data::Batch;
use crate::engine::{StepContext, WrongGradient};
use crate::{Error, Result as RunnerResult};

/// State changed by a forward pass, as it was before the pass.
pub(super) struct ForwardState {
    buffers: Vec<Tensor>,
    random_position: u64,
}

impl ForwardState {
    pub(super) fn of(engine: &CandleEngine) -> Result<Self> {
        Ok(Self { buffers: engine.tensors.buffers.copies()?, random_position: random_position() })
    }

    fn restore(&self, engine: &CandleEngine) -> Result<()> {
        set_random_position(self.random_position);
        engine.tensors.buffers.set_all(&self.buffers)
    }
}

/// The forward pass of a batch.
struct OnBatch<'a> {
    engine: &'a CandleEngine,
    batch: &'a Batch,
    start: &'a ForwardState,
}

impl Repeatable for OnBatch<'_> {
    type Error = Error;

    fn params(&self) -> &candle_train::Tensors {
        &self.engine.tensors.params
    }

    fn restore(&self) -> Result<()> {
        self.start.restore(self.engine)
    }

    fn loss(&mut self) -> RunnerResult<Tensor> {
        Ok(self.engine.loss(self.batch)?.value)
    }

    fn gradients(&mut self) -> RunnerResult<(Tensor, Vec<(usize, Tensor)>)> {
        let (loss, tape) = self.engine.passes.record(|| self.engine.loss(self.batch));
        let Loss { value, .. } = loss?;
        let (ones, kept) = (value.ones_like(), Some(Vec::new()));
        let gradients = self.engine.passes.backward((tape, &value), ones, None, kept)?;
        Ok((value.detach(), gradients))
    }

    fn failed(error: candle_core::Error) -> Error {
        Error::engine_during("checking gradients", error)
    }
}

/// Returns parameters with wrong gradients; see
/// [`Engine::check_gradients`](crate::engine::Engine::check_gradients).
pub(super) fn check(
    engine: &CandleEngine,
    batch: &Batch,
    ignore: &[String],
) -> RunnerResult<Vec<WrongGradient>> {
    let specs = &engine.tensors.params.specs;
    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    if let Some(name) = ignore.iter().find(|name| !names.contains(&name.as_str())) {
        return Err(Error::config(unknown("parameter", name, &names)));
    }
    let start = ForwardState::of(engine).map_err(OnBatch::failed)?;
    let mut pass = OnBatch { engine, batch, start: &start };
    gradient_check::check(&mut pass, |_, name| !ignore.iter().any(|ignored| ignored == name))
}

impl ForwardState {
    /// Compares loss and gradients in a run's first step, which began with this state. Called after
    /// the step's backward pass with its loss and its gradients, which carry the loss scale. Sets a
    /// warning in the context. An error of a forward pass is ignored; a failure to restore
    /// parameters is returned. Returns false if the comparison was not possible, so that the next
    /// step repeats it.
    pub(super) fn check_step(
        &self,
        engine: &CandleEngine,
        (batch, loss): (&Batch, f64),
        gradients: &[(usize, Tensor)],
        cx: &mut StepContext<'_>,
    ) -> RunnerResult<bool> {
        let Ok(end) = Self::of(engine) else { return Ok(true) };
        let loss = (loss, f64::from(cx.loss_scale));
        let mut pass = OnBatch { engine, batch, start: self };
        let compared = gradient_check::compare(&mut pass, loss, gradients, precision(engine));
        end.restore(engine).map_err(OnBatch::failed)?;
        match compared? {
            Compared::NotFinite => return Ok(false),
            Compared::Different { change, predicted } => {
                cx.warning = Some(format!(
                    "gradients do not match the loss: along a random direction it changes by {change:.3e}, \
                     but by {predicted:.3e} according to the gradients; training continues; \
                     `runner check CONFIG --gradients` names the parameters"
                ));
            }
            Compared::Alike | Compared::Failed => {}
        }
        Ok(true)
    }
}

/// Step size of the first step's comparison, and relative rounding error of its precision: for bf16
/// twice that of one operation, since all slopes of a deep network may be noise, as in PyTorch.
fn precision(engine: &CandleEngine) -> (f64, f64) {
    let autocast = Some(&engine.autocast).filter(|autocast| autocast.is_enabled());
    match (engine.dtype, autocast.map(Autocast::dtype)) {
        (DType::BF16, _) | (_, Some(amp::DType::Bf16)) => (3e-2, 2f64.powi(-7)),
        (DType::F16, _) | (_, Some(amp::DType::F16)) => (3e-2, 2f64.powi(-11)),
        // TF32 rounds factors to as many bits as f16 has.
        (DType::F32, None) if engine.device.is_cuda() && allows_tf32() => (3e-2, 2f64.powi(-11)),
        _ => (3e-4, 2f64.powi(-24)),
    }
}
