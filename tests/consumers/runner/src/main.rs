//! The first program of `runner`'s README.

use std::sync::Arc;

use runner::data::{Array, BoxError, DATASETS, Dataset, Sample, SampleRng};
use runner::engine::candle::nn::{Linear, Module, linear};
use runner::engine::candle::{CandleEngine, CandleModel, Loss, Outputs, TensorBatch};
use runner::engine::candle::{candle_core::Result, ops::cross_entropy};
use runner::model::MODELS;

struct Net(Linear);

impl CandleModel for Net {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let logits = self.0.forward(batch.get("inputs")?)?;
        Ok(Loss::new(cross_entropy(&logits, batch.get("labels")?)?))
    }
    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new().with("logits", self.0.forward(batch.get("inputs")?)?))
    }
}

struct Points;

impl Dataset for Points {
    fn len(&self) -> usize {
        512
    }
    fn sample(&self, index: usize, _: &mut SampleRng) -> std::result::Result<Sample, BoxError> {
        let [x, y] = [37, 59].map(|by| (index * by % 101) as f32 / 50.0 - 1.0);
        let sample = Sample::new().with("inputs", Array::new([2], vec![x, y])?);
        Ok(sample.with("labels", Array::scalar(i64::from(x + 2.0 * y > 0.3))))
    }
}

fn main() -> std::process::ExitCode {
    let net = || CandleEngine::factory(|vb| Ok(Net(linear(2, 2, vb.pp("fc"))?)));
    MODELS.register("Net", move |_| Ok(net())).expect("a new name");
    DATASETS.register("Points", |_| Ok(Box::new(|| Ok(Arc::new(Points))))).expect("a new name");
    runner::cli::main() // PROGRAM train net.toml
}
