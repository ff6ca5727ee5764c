//! Replacement of `cuda/mod.rs` without the feature `cuda`: no engine has a GPU.

#![expect(
    clippy::needless_pass_by_ref_mut,
    clippy::unnecessary_wraps,
    reason = "as with the feature"
)]

use candle_core::{Device, Tensor};
use candle_train::ModelTensors;

use super::CandleEngine;
use super::model::read_losses;
use super::ops::AutotuneSummary;
use super::ops::Context;
use crate::Result;
use crate::data::Batch;
use crate::engine::{CompileOptions, CompileReport, DeviceEngine, Losses, StepContext};

/// The GPU of an engine; no values exist.
pub(super) enum Cuda {}

impl Cuda {
    pub(super) const fn open(_: &Device, _: &mut ModelTensors) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(super) const fn compile(&mut self, _: &Device, _: &CompileOptions, _: &mut Context) {
        match *self {}
    }

    pub(super) const fn report(
        &self,
        _: &CompileOptions,
        _: Option<AutotuneSummary>,
        _: &mut CompileReport,
    ) {
        match *self {}
    }
}

pub(super) const fn device(_: &mut CandleEngine) -> Option<&mut dyn DeviceEngine> {
    None
}

impl CandleEngine {
    pub(super) fn step_or_launch(
        &mut self,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<Losses> {
        self.step(batch, cx)
    }

    pub(super) fn losses(&self, (names, values): (&[String], &Tensor)) -> Result<Losses> {
        read_losses(names, values)
    }
}
