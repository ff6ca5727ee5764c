//! `cuda.rs` of a build without the feature `candle-cuda`: there is no GPU.

use candle_core::{Device, Tensor};

use super::CandleEngine;
use super::ops::Context;
use crate::Result;
use crate::data::Batch;
use crate::engine::{CompileOptions, CompileReport, DeviceEngine, Losses, StepContext};

pub(super) enum Cuda {}

impl Cuda {
    #[expect(clippy::unnecessary_wraps, reason = "as in `cuda.rs`")]
    pub(super) fn open(_: &Device) -> Result<Option<Self>> {
        Ok(None)
    }

    pub(super) fn compile(&self, _: &Device, _: &CompileOptions) -> Option<Graphs> {
        match *self {}
    }

    pub(super) fn set_kernels(&self, _: &mut Context) {
        match *self {}
    }

    pub(super) fn report(&self, _: &CompileOptions, _: &mut CompileReport) {
        match *self {}
    }
}

pub(super) enum Graphs {}

impl Graphs {
    pub(super) fn step(
        &self,
        _: &CandleEngine,
        _: &Batch,
        _: &mut StepContext<'_>,
    ) -> Result<Losses> {
        match *self {}
    }

    pub(super) fn report(&self, _: &mut CompileReport) {
        match *self {}
    }
}

pub(super) fn with_known_inputs<R>(
    _: &[(String, Tensor)],
    _: &Batch,
    call: impl FnOnce() -> R,
) -> R {
    call()
}

pub(super) fn device_engine(_: &mut CandleEngine) -> Option<&mut dyn DeviceEngine> {
    None
}
