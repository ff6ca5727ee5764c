//! A program with its own model of candle-nn layers, hook, model wrapper and data set.
//!
//! ```text
//! cargo run --release -p gradstack-runner --example train [WORK_DIR]
//! runner launch --nproc-per-node 2 -- target/release/examples/train [WORK_DIR]
//! ```

use candle_core::{Module, Result as CandleResult};
use candle_nn::{Linear, VarBuilder, linear};
use fused_optim::{Sgd, SgdHyper};
use runner::data::{Array, Batch, BoxError, Dataset, Sample, SampleRng};
use runner::engine::candle::{CandleEngine, CandleModel, Loss, Outputs, TensorBatch};
use runner::engine::candle::{candle_core, candle_nn, ops};
use runner::engine::{Losses, Model, StepContext};
use runner::evaluate::Accuracy;
use runner::model::{DistributedDataParallel as Ddp, ModelWrapper, WrapperOver};
use runner::optim_wrapper::OptimWrapperFactory;
use runner::{DataLoaderConfig, Error, Result, Runner, hooks::Hook};

/// Points of a square; the label is the side of a line on which they are.
struct Points(usize);

impl Dataset for Points {
    fn len(&self) -> usize {
        self.0
    }
    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let [x, y] = [37, 59].map(|by| (index * by % 101) as f32 / 50.0 - 1.0);
        Ok(Sample::new()
            .with("inputs", Array::new([2], vec![x, y])?)
            .with("labels", Array::scalar(i64::from(x + 2.0 * y > 0.3))))
    }
}

struct Net(Linear, Linear);

impl CandleModel for Net {
    fn loss(&self, batch: &TensorBatch) -> CandleResult<Loss> {
        let logits = self.1.forward(&self.0.forward(batch.get("inputs")?)?.relu()?)?;
        Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
    }
    fn predict(&self, batch: &TensorBatch) -> CandleResult<Outputs> {
        let hidden = self.0.forward(batch.get("inputs")?)?.relu()?;
        Ok(Outputs::new().with("logits", self.1.forward(&hidden)?))
    }
}

/// Data parallelism that returns an error for a model without parameters.
struct Checked(Ddp);

impl WrapperOver for Checked {
    type Inner = Ddp;
    fn inner(&self) -> &Ddp {
        &self.0
    }
    fn inner_mut(&mut self) -> &mut Ddp {
        &mut self.0
    }
    fn prepare(
        &mut self,
        engine: Option<&mut dyn Model>,
        cx: &mut StepContext<'_>,
    ) -> train_step::Result<()> {
        if engine.as_ref().is_some_and(|engine| engine.params().is_empty()) {
            return Err(Error::data("nothing to train").into());
        }
        self.0.prepare(engine, cx)
    }
}

/// Stops a run whose loss is NaN.
struct StopOnNan;

impl Hook for StopOnNan {
    fn name(&self) -> &'static str {
        "StopOnNan"
    }
    fn after_train_iter(&mut self, _: &mut Runner, _: &Batch, losses: &Losses) -> Result<()> {
        let nan = losses.scalars()?.iter().find(|(_, value)| value.is_nan());
        nan.map_or(Ok(()), |(name, _)| Err(Error::data(format!("{name} is not a number"))))
    }
}

fn main() -> Result<()> {
    let net =
        |vb: VarBuilder<'static>| Ok(Net(linear(2, 16, vb.pp("a"))?, linear(16, 2, vb.pp("b"))?));
    let hyper = SgdHyper { lr: 0.2, momentum: 0.9, ..SgdHyper::default() };
    Runner::builder()
        .model(CandleEngine::factory(net))
        .model_wrapper(Box::new(|group, params| {
            Ok(Box::new(Checked(Ddp::new(group, params, Default::default())?)))
        }))
        .optim_wrapper(OptimWrapperFactory::fp32(move |count| Sgd::with_one_group(hyper, count)))
        .default_hooks()
        .hook(Box::new(StopOnNan))
        .train_dataloader(DataLoaderConfig::new(Points(2048), 32).shuffled())
        .validation(DataLoaderConfig::new(Points(512), 32), Accuracy::default())
        .train_cfg(runner::TrainConfig::new(3))
        .work_dir(std::env::args().nth(1).unwrap_or_else(|| "work_dirs/train".to_owned()))
        .build()?
        .train()
        .map(drop)
}
