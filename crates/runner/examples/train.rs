//! A program of one's own: a model of plain candle-nn layers, a hook, a model wrapper and a data set.
//!
//! ```text
//! cargo run --release -p runner --example train [WORK_DIR]
//! runner launch --nproc-per-node 2 -- target/release/examples/train [WORK_DIR]
//! ```

#![expect(clippy::print_stdout, reason = "a program of one's own may")]

use std::sync::Arc;

use candle_core::Module;
use candle_nn::{Linear, VarBuilder, linear};
use collective::ReducerOptions;
use fused_optim::{DType, Sgd, SgdHyper};
use runner::data::{Array, ArrayData, Batch, Dataset};
use runner::engine::Losses;
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, candle_core, candle_nn,
    ops,
};
use runner::evaluate::Accuracy;
use runner::hooks::Hook;
use runner::model::DistributedDataParallel;
use runner::optim_wrapper::{Fp32OptimWrapper, OptimWrapperFactory};
use runner::{DataLoaderConfig, Result, Runner};

/// Points of a square; the label says on which side of a line they lie.
struct Points(usize);

impl Dataset for Points {
    fn name(&self) -> &'static str {
        "points"
    }

    fn len(&self) -> usize {
        self.0
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch> {
        let point =
            |i: usize| [(i * 37 % 101) as f32 / 50.0 - 1.0, (i * 59 % 103) as f32 / 51.0 - 1.0];
        let points: Vec<_> = indices.iter().map(|i| point(*i)).collect();
        let labels = points.iter().map(|[x, y]| i64::from(x + 2.0 * y > 0.3)).collect();
        Ok(Batch::new()
            .with("inputs", Array::new([points.len(), 2], ArrayData::F32(points.concat()))?)
            .with("labels", Array::new([points.len()], ArrayData::I64(labels))?))
    }
}

struct Net(Linear, Linear);

impl Net {
    fn logits(&self, batch: &TensorBatch) -> candle_core::Result<candle_core::Tensor> {
        self.1.forward(&self.0.forward(batch.get("inputs")?)?.relu()?)
    }
}

impl CandleModel for Net {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        Ok(Loss::new(ops::cross_entropy(&self.logits(batch)?, batch.get("labels")?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// Stops a run whose loss is not a number.
struct StopOnNan;

impl Hook for StopOnNan {
    fn name(&self) -> &'static str {
        "StopOnNan"
    }

    fn after_train_iter(&mut self, _: &mut Runner, _: &Batch, losses: &Losses) -> Result<()> {
        match losses.scalars.iter().find(|(_, value)| value.is_nan()) {
            Some((name, _)) => Err(runner::Error::Data(format!("{name} is not a number"))),
            None => Ok(()),
        }
    }
}

fn main() -> Result<()> {
    let work_dir = std::env::args().nth(1).unwrap_or_else(|| "work_dirs/train".to_owned());
    let points = |count| DataLoaderConfig {
        dataset: Box::new(move || Ok(Arc::new(Points(count)))),
        batch_size: 32,
        shuffle: true,
        drop_last: false,
        infinite: false,
    };
    let build =
        |vb: VarBuilder<'static>| Ok(Net(linear(2, 16, vb.pp("a"))?, linear(16, 2, vb.pp("b"))?));
    let metrics = Runner::builder()
        .model(Box::new(move |cx| {
            let options = CandleOptions { dtype: cx.dtype, seed: cx.seed };
            Ok(Box::new(CandleEngine::new(options, build)?))
        }))
        .model_wrapper(Box::new(|group, params| {
            let ddp =
                DistributedDataParallel::new(group.clone(), params, ReducerOptions::default())?;
            Ok(Box::new(ddp.with_broadcast_buffers(group)))
        }))
        .optim_wrapper(OptimWrapperFactory {
            dtype: DType::F32,
            build: Box::new(|params| {
                let hyper = SgdHyper { lr: 0.2, momentum: 0.9, ..SgdHyper::default() };
                Ok(Box::new(Fp32OptimWrapper::new(
                    Box::new(Sgd::with_one_group(hyper, params.len())?),
                    1,
                )))
            }),
        })
        .hook(Box::new(StopOnNan))
        .train_dataloader(points(2048))
        .validation(points(512), Box::new(Accuracy))
        .train_cfg(runner::TrainConfig::new(3))
        .work_dir(work_dir)
        .build()?
        .train()?;
    println!("{metrics:?}");
    Ok(())
}
