//! A training step of an engine, without a runner.

use fused_optim::DType;
use runner::Result;
use runner::data::Batch;
use runner::engine::{Engine, EngineState, Losses, SharedSink, StepContext};

pub(crate) fn train_step(
    engine: &mut dyn Engine,
    autocast: Option<DType>,
    batch: &Batch,
    loss_scale: f32,
    sink: &SharedSink,
) -> Result<Losses> {
    let mut state = EngineState::default();
    let cx = StepContext::new(sink.clone(), &mut state);
    engine.train_step(batch, &mut StepContext { autocast, loss_scale, ..cx })
}
