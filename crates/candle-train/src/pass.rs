//! The forward and the backward pass of a batch.

use std::cell::Cell;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use candle_ops::{Context, Tape};
use collective::ProcessGroup;
use tracing::debug_span;
use train_step::StepContext;

use crate::age::check_age;
use crate::backward::ParamIndex;
use crate::first_step::check_first_step;
use crate::inputs::Inputs;
use crate::tensors::ModelTensors;
use crate::variables::{Statistics, Variables};
use crate::{Error, Result};
#[cfg(feature = "cuda")]
use crate::{graph::Graphs, tensors::Tensors};

/// The passes of a batch, with all that they need of a trainer.
pub(crate) struct Pass<'a> {
    pub(crate) map: &'a VarMap,
    pub(crate) variables: &'a Variables,
    pub(crate) recorder: Recorder<'a>,
    pub(crate) context: &'a mut Context,
    pub(crate) statistics: &'a mut Statistics,
    /// Steps as graphs, and the statistics of norm layers.
    #[cfg(feature = "cuda")]
    pub(crate) graphs: Option<&'a mut (Graphs, Tensors)>,
    /// Whether to check the map: once a step, as it looks up each variable.
    pub(crate) checks: bool,
    /// Whether the batch counts.
    pub(crate) counts: bool,
    /// The group of all ranks, if gradients are to be checked.
    pub(crate) check: Option<ProcessGroup>,
}

/// Runs passes on a tape.
#[derive(Clone, Copy)]
pub(crate) struct Recorder<'a> {
    pub(crate) index: &'a ParamIndex,
    pub(crate) inputs: &'a Inputs,
    pub(crate) has_lowered: &'a Cell<bool>,
}

impl Pass<'_> {
    /// Checks the variables, and copies the statistics of norm layers; in a run's first step checks
    /// the gradients.
    pub(crate) fn begin(
        &mut self,
        tensors: &ModelTensors,
        forward: &mut dyn FnMut(&Inputs) -> candle_core::Result<Tensor>,
    ) -> Result<()> {
        self.statistics.copy(&self.variables.buffers)?;
        let known = if self.checks { self.variables.check_map(self.map) } else { Ok(()) };
        let Some(group) = self.check.take() else { return known };
        // All ranks take part, also one that has an error already.
        let counts = self.counts && known.is_ok();
        let Recorder { index, inputs, .. } = self.recorder;
        let model = (tensors, self.variables, index);
        let forward = &mut || forward(inputs);
        let checked = self.context.enter(|| check_first_step(model, &group, counts, forward));
        known.and(checked)
    }

    /// As [`run`](Self::run), for a step without a batch, which is no graph.
    pub(crate) fn run_alone(
        self,
        mut forward: impl FnMut() -> candle_core::Result<Tensor>,
        tensors: &ModelTensors,
        cx: &StepContext<'_>,
    ) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.graphs.as_ref().is_some_and(|(graphs, _)| graphs.fullgraph) {
            let text = "compile: `fullgraph` is set, but a step without a batch cannot be captured: call \
                        `Trainer::step_on`, or remove `fullgraph`";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        self.run(|_| forward(), tensors, cx)
    }

    /// Runs the passes, and reports gradients, unless the batch does not count.
    pub(crate) fn run(
        mut self,
        mut forward: impl FnMut(&Inputs) -> candle_core::Result<Tensor>,
        tensors: &ModelTensors,
        cx: &StepContext<'_>,
    ) -> Result<Tensor> {
        self.begin(tensors, &mut forward)?;
        let Self { variables, recorder, context, statistics, .. } = self;
        let (loss, tape) = context.enter(|| recorder.record(|| forward(recorder.inputs)))?;
        if !self.counts {
            // The loss may be NaN, and so would be its gradients times 0, and statistics.
            statistics.restore(&variables.buffers, |_| Ok(true))?;
            return Ok(loss);
        }
        context.enter(|| recorder.report((tape, &loss), cx))?;
        Ok(loss)
    }
}

impl Recorder<'_> {
    /// Runs a forward pass, and checks its loss.
    pub(crate) fn record(
        &self,
        forward: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<(Tensor, Tape)> {
        let begin = Tensor::zeros((), DType::U8, &Device::Cpu)?;
        let span = debug_span!(target: "candle_train", "forward");
        let (loss, tape) = span.in_scope(|| candle_ops::record(forward));
        let lowered = candle_ops::lowered_operators();
        let loss = loss?;
        check_age(&loss, &tape, &begin)?;
        if loss.elem_count() != 1 {
            let shape = loss.dims();
            let text =
                format!("the loss has shape {shape:?}; expected one element, the batch's mean");
            return Err(Error::InvalidArgument(text));
        }
        let has_lowered = self.has_lowered.get() || lowered > 0;
        self.has_lowered.set(has_lowered);
        if !has_lowered {
            let text = "autocast is enabled, but no operator ran in half precision: candle-nn's own layers do not \
                        support autocast; use those of `candle_ops`";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        Ok((loss, tape))
    }

    /// Runs a backward pass, and reports the gradients.
    pub(crate) fn report(&self, (tape, loss): (Tape, &Tensor), cx: &StepContext<'_>) -> Result<()> {
        let gradient = Tensor::full(cx.loss_scale, loss.shape(), loss.device())?;
        let gradient = gradient.to_dtype(loss.dtype())?;
        let backward = || self.index.report((tape, loss), gradient, cx.sink.clone());
        debug_span!(target: "candle_train", "backward").in_scope(backward)
    }
}
