//! State that a model of the candle engine carries over steps.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use fused_optim::Slice;
use parking_lot::Mutex;
use runner::Result;
use runner::data::Batch;
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch,
};
use runner::engine::{GradSink, SharedSink};

use crate::common::step::train_step;

struct Ignore;

impl GradSink for Ignore {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> Result<()> {
        Ok(())
    }
}

/// A recurrent model that carries its state over batches, and keeps a view of its parameter.
struct Recurrent {
    transposed: Tensor,
    state: Mutex<Option<Tensor>>,
    detaches: bool,
}

impl CandleModel for Recurrent {
    fn loss(&self, _batch: &TensorBatch) -> candle_core::Result<Loss> {
        let mut state = self.state.lock();
        let start = Tensor::ones((1, 2), candle_core::DType::F32, &Device::Cpu)?;
        let next = state.take().unwrap_or(start).matmul(&self.transposed)?.tanh()?;
        *state = Some(if self.detaches { next.detach() } else { next.clone() });
        Ok(Loss::new(next.sqr()?.sum_all()?))
    }

    fn predict(&self, _batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

#[test]
fn state_carried_over_steps_without_detach_is_an_error() {
    for detaches in [true, false] {
        let options = CandleOptions { check_gradients: false, ..CandleOptions::default() };
        let build = |vb: VarBuilder<'static>| {
            let transposed = vb.get((2, 2), "w")?.t()?;
            Ok(Recurrent { transposed, state: Mutex::new(None), detaches })
        };
        let mut engine = CandleEngine::new(options, build).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Ignore));
        let steps: Vec<_> =
            (0..3).map(|_| train_step(&mut engine, None, &Batch::new(), 1.0, &sink)).collect();
        assert!(steps[0].is_ok());
        for step in &steps[1..] {
            match step {
                Ok(_) => assert!(detaches),
                Err(error) => {
                    assert!(!detaches && error.to_string().contains("call `detach`"), "{error}");
                }
            }
        }
    }
}
