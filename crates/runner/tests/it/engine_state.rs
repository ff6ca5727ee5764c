//! State that a model of the candle engine carries over steps.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use fused_optim::Slice;
use parking_lot::Mutex;
use runner::data::Batch;
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch,
};
use runner::engine::{GradSink, SharedSink};

use crate::common::step::train_step;

struct Ignore;

impl GradSink for Ignore {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> train_step::Result<()> {
        Ok(())
    }
}

/// A recurrent model that carries its state over batches, and keeps a view of its parameter.
struct Recurrent {
    transposed: Tensor,
    /// State, and number of batches so far.
    state: Mutex<(Option<Tensor>, usize)>,
    /// Number of batches after which the state is detached.
    detaches: usize,
}

impl CandleModel for Recurrent {
    fn loss(&self, _batch: &TensorBatch) -> candle_core::Result<Loss> {
        let (state, count) = &mut *self.state.lock();
        let start = Tensor::ones((1, 2), candle_core::DType::F32, &Device::Cpu)?;
        let next = state.take().unwrap_or(start).matmul(&self.transposed)?.tanh()?;
        *state = Some(if *count < self.detaches { next.detach() } else { next.clone() });
        *count += 1;
        Ok(Loss::new(next.sqr()?.sum_all()?))
    }

    fn predict(&self, _batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

#[test]
fn state_carried_over_steps_without_detach_is_an_error() {
    // The first steps are checked, then each 64th.
    for (detaches, error_at) in [(usize::MAX, None), (0, Some(1)), (10, Some(64))] {
        let options = CandleOptions { check_gradients: false, ..CandleOptions::default() };
        let build = |vb: VarBuilder<'static>| {
            let transposed = vb.get((2, 2), "w")?.t()?;
            Ok(Recurrent { transposed, state: Mutex::new((None, 0)), detaches })
        };
        let mut engine = CandleEngine::new(options, build).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Ignore));
        let mut step = || train_step(&mut engine, None, &Batch::new(), 1.0, &sink).err();
        let error = (0..70).find_map(|at| Some((at, step()?.to_string())));
        assert_eq!(error.as_ref().map(|(at, _)| *at), error_at);
        assert!(error.is_none_or(|(_, text)| text.contains("call `detach`")));
    }
}
