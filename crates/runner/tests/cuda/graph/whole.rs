//! The optimizer step in a graph, tested without a runner.

use std::time::Duration;

use collective::{ProcessGroup, reducer::ReducerOptions};
use fused_optim::cuda::CudaDeviceOptimizer;
use fused_optim::{AdamWHyper, Applied, Clip, HalfWeights, ParamGroup};
use runner::engine::candle::CandleEngine;
use runner::engine::{Engine, EngineState, Model};
use runner::model::DistributedDataParallel;
use runner::optim_wrapper::{OptimWrapper, update_params};

use crate::gpu;

use super::{EAGER, Stock, batch, buffers, compiled, engine, launched};

/// A model and its optimizer, on one rank.
struct Training {
    engine: CandleEngine,
    optim: OptimWrapper,
    model: DistributedDataParallel,
    state: EngineState,
}

impl Training {
    /// Uses a loss scale at which every other step overflows.
    fn new(engine: CandleEngine) -> Self {
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let count = engine.params().len();
        let model = DistributedDataParallel::new(group, engine.params(), ReducerOptions::default());
        let groups = [ParamGroup::new(AdamWHyper::default(), 0..count)];
        let adamw =
            CudaDeviceOptimizer::new(engine.gpu().unwrap().clone(), groups, HalfWeights::Master)
                .unwrap();
        let scale = ::amp::LossScalerOptions {
            init_scale: 1e38,
            growth_interval: 2,
            ..::amp::LossScalerOptions::default()
        };
        let optim = OptimWrapper::new(Box::new(adamw), 1).with_clip_grad(Some(Clip::norm(0.5)));
        let optim = optim.with_mixed_precision(::amp::LossScaler::new(scale).unwrap());
        Self { engine, optim, model: model.unwrap(), state: EngineState::default() }
    }

    /// Takes a step; returns its outcome, and the numbers of launches.
    fn step(&mut self, seed: usize) -> (String, Option<Applied>, Option<[u64; 2]>) {
        let before = launched();
        let Self { engine, optim, model, state } = self;
        let update = update_params(optim, (engine, model), &batch(seed), state).unwrap();
        let count = launched().zip(before).map(|(now, then)| [now[0] - then[0], now[1] - then[1]]);
        let told = format!("{:?} {:?}", update.losses.scalars().unwrap(), optim.log_scalars());
        (told, update.applied, count)
    }
}

#[test]
fn whole_step_is_one_launch_and_follows_changes_of_the_optimizer() {
    let _gpu = gpu::alone();
    let mut eager = Training::new(engine(Stock::new));
    let mut graph = Training::new(compiled(engine(Stock::new), true));
    let (mut skipped, mut single) = (0, 0);
    for seed in 0..18 {
        for training in [&mut eager, &mut graph] {
            training.optim.optimizer_mut().set_lr(0, 0.1 / (seed + 1) as f64).unwrap();
            if seed == 9 {
                // The restored state has other addresses.
                let state = training.optim.state_dict().unwrap();
                training.optim.load_state_dict(&state).unwrap();
            }
        }
        let (wanted, applied, _) = eager.step(seed);
        let (told, came, launched) = graph.step(seed);
        assert_eq!((told, came), (wanted, applied), "{seed}");
        assert_eq!(buffers(&mut graph.engine), buffers(&mut eager.engine), "{seed}");
        let is_in_force = (EAGER + 2..9).contains(&seed) || seed >= 9 + EAGER + 3;
        if let Some(launched) = launched {
            // A kernel copies the buffers, and a skipped step copies them back one by one.
            let skipped = came == Some(Applied::SkippedNonFinite);
            let back = if skipped { graph.engine.buffers().len() as u64 } else { 0 };
            assert_eq!(launched == [1 + back, 1], is_in_force, "{seed}: {launched:?}");
        }
        skipped += usize::from(is_in_force && came == Some(Applied::SkippedNonFinite));
        single += usize::from(is_in_force && came == Some(Applied::Applied));
    }
    assert!(skipped > 1 && single > 1, "{skipped} skipped, {single} not");
    let weights = |training: &Training| training.optim.state_dict().unwrap().optimizer;
    assert_eq!(weights(&graph), weights(&eager));
    let report = graph.engine.compile_report().unwrap().to_string();
    assert!(report.starts_with(
        "compile: applied: forward, backward and optimizer step as one CUDA graph, for "
    ));
}
