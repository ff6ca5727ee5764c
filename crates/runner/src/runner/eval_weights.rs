//! Evaluates and saves the weights that an optimizer has for evaluation.

use fused_optim::Error as OptimError;

use super::{Hook, Runner};
use crate::Result;
use crate::checkpoint::{
    AVERAGES, Checkpoint, Contents, TRAINED, Tensor, copy_from_bytes, to_bytes,
};
use crate::engine::round_into;

/// Replaces the weights by the optimizer's [evaluation
/// weights](fused_optim::Optimizer::eval_weights) in validations, tests and checkpoints, as
/// `ScheduleFreeAdamW` needs. The trained weights are saved beside the model, where `EMAHook` has
/// them, and a run resumes from them. A run whose optimizer has such weights has this hook.
#[derive(Debug, Default)]
pub(super) struct EvalWeightsHook {
    /// The trained weights, while others replace them.
    trained: Vec<Tensor>,
}

impl EvalWeightsHook {
    pub(super) const NAME: &'static str = "EvalWeightsHook";

    fn replace(&mut self, runner: &mut Runner) -> Result<()> {
        let (engine, optimizer) = runner.engine_and_optimizer();
        let specs = engine.params().to_vec();
        self.trained.clear();
        Ok(engine.with_params(&mut |weights| {
            for (index, (weight, spec)) in weights.iter_mut().zip(&specs).enumerate() {
                let mut values = vec![0.0; spec.count()];
                self.trained.push(Tensor::copy(spec, weight));
                match optimizer.eval_weights(index, weight.as_slice(), &mut values) {
                    // A tensor in no group is not trained.
                    Err(OptimError::MissingParam { .. }) => {}
                    result => result.map(|()| round_into(weight, &values))?,
                }
            }
            Ok(())
        })?)
    }

    /// Restores the trained weights, unless they are in place.
    fn restore(&mut self, runner: &mut Runner) -> Result<()> {
        let trained = std::mem::take(&mut self.trained);
        Ok(runner.engine_mut().with_params(&mut |weights| {
            let all = weights.iter_mut().zip(&trained);
            all.for_each(|(weight, trained)| copy_from_bytes(weight, &trained.bytes));
            Ok(())
        })?)
    }
}

impl Hook for EvalWeightsHook {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn after_load_checkpoint(
        &mut self,
        runner: &mut Runner,
        checkpoint: &Checkpoint,
    ) -> Result<()> {
        if !runner.is_resuming() {
            return Ok(());
        }
        match checkpoint.extra(AVERAGES)? {
            Some(saved) => checkpoint.load_trained(&saved, runner.engine_mut()),
            None => Ok(()),
        }
    }

    fn before_val_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        self.replace(runner)
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, _: &[(String, f64)]) -> Result<()> {
        self.restore(runner)
    }

    fn on_interrupt(&mut self, runner: &mut Runner) -> Result<()> {
        // An interrupted validation leaves the other weights in place.
        self.restore(runner)
    }

    fn before_test_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        self.replace(runner)
    }

    fn after_test_epoch(&mut self, runner: &mut Runner, _: &[(String, f64)]) -> Result<()> {
        self.restore(runner)
    }

    fn before_save_checkpoint(
        &mut self,
        runner: &mut Runner,
        contents: &mut Contents,
    ) -> Result<()> {
        if contents.model.is_empty() {
            return Ok(());
        }
        let is_evaluating = !self.trained.is_empty();
        if !is_evaluating {
            self.replace(runner)?;
        }
        let engine = runner.engine_mut();
        let (params, buffers) = (engine.params().len(), engine.buffers().len());
        let buffers = contents.model.iter().skip(params).take(buffers);
        let mut saved: Vec<_> = self.trained.iter().chain(buffers).cloned().collect();
        saved.iter_mut().for_each(|tensor| tensor.spec.name.insert_str(0, TRAINED));
        contents.extra.push((AVERAGES.to_owned(), saved));
        engine.with_params(&mut |weights| {
            let all = contents.model.iter_mut().zip(weights);
            all.for_each(|(tensor, weight)| tensor.bytes = to_bytes(weight.as_slice()));
            Ok(())
        })?;
        if is_evaluating { Ok(()) } else { self.restore(runner) }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use fused_optim::{
        Applied, Optimizer, ParamMut, ScheduleFreeAdamW, ScheduleFreeAdamWHyper, Slice, SliceMut,
        StepCtl,
    };
    use parking_lot::Mutex;

    use super::*;
    use crate::data::Batch;
    use crate::hooks::{Average, CheckpointHook, EmaHook};
    use crate::optim_wrapper::OptimWrapperFactory;
    use crate::runner::{RunnerBuilder, TrainConfig};
    use crate::testing::{Metrics, blank, builder};

    const HYPER: ScheduleFreeAdamWHyper = ScheduleFreeAdamWHyper {
        lr: 0.1,
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.0,
        warmup_steps: 0,
        maximize: false,
    };

    /// Weights in training (`y`) and for evaluation (`x`) after each step with gradients of 1.
    fn expected(steps: usize) -> Vec<[Vec<f32>; 2]> {
        let mut optimizer = ScheduleFreeAdamW::with_one_group(HYPER, 1).unwrap();
        let mut weights = vec![1.0, 2.0];
        let step = |_| {
            let grad = Some(Slice::F32(&[1.0, 1.0]));
            let mut params = [ParamMut::new(&mut *weights, grad)];
            assert_eq!(optimizer.step(&mut params, &StepCtl::PLAIN).unwrap(), Applied::Applied);
            let mut x = vec![0.0; 2];
            optimizer.eval_weights(0, Slice::F32(&weights), &mut x).unwrap();
            [weights.clone(), x]
        };
        (0..steps).map(step).collect()
    }

    /// Records the weights before each batch of training and of evaluation.
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<Weights>>>);

    /// Stage, and weights in it.
    type Weights = (char, Vec<f32>);

    impl Seen {
        fn note(&self, kind: char, runner: &mut Runner) -> Result<()> {
            Ok(runner.engine_mut().with_params(&mut |params| {
                let SliceMut::F32(weights) = &params[0] else { panic!("not f32") };
                self.0.lock().push((kind, weights.to_vec()));
                Ok(())
            })?)
        }
    }

    impl Hook for Seen {
        fn name(&self) -> &'static str {
            "Seen"
        }

        fn before_train_iter(&mut self, runner: &mut Runner, _: &mut Batch) -> Result<()> {
            self.note('y', runner)
        }

        fn before_val_iter(&mut self, runner: &mut Runner, _: usize, _: &mut Batch) -> Result<()> {
            self.note('x', runner)
        }

        fn before_test_iter(&mut self, runner: &mut Runner, _: usize, _: &mut Batch) -> Result<()> {
            self.note('t', runner)
        }
    }

    fn run(dir: &Path, iters: usize, seen: &Seen) -> RunnerBuilder {
        let mut checkpoints = CheckpointHook::new(1);
        checkpoints.by_epoch = false;
        let optim =
            OptimWrapperFactory::fp32(|count| ScheduleFreeAdamW::with_one_group(HYPER, count));
        builder(dir, 4)
            .optim_wrapper(optim)
            .train_cfg(TrainConfig { val_interval: 1, ..TrainConfig::by_iters(iters) })
            .validation(blank(1), Metrics::new([[("acc", 1.0)]]))
            .test(blank(1), Metrics::new([[("acc", 1.0)]]))
            .hook(Box::new(checkpoints))
            .hook(Box::new(seen.clone()))
    }

    #[test]
    fn schedule_free_averages_are_evaluated_and_saved_and_training_resumes_without_them() {
        let (dir, wanted) = (tempfile::tempdir().unwrap(), expected(4));
        let seen = Seen::default();
        let mut first = run(dir.path(), 2, &seen).build().unwrap();
        first.train().unwrap();
        first.test().unwrap();
        run(dir.path(), 4, &seen).resume(true).build().unwrap().train().unwrap();
        let start = vec![1.0, 2.0];
        let y = |step: usize| {
            ('y', if step == 0 { start.clone() } else { wanted[step - 1][0].clone() })
        };
        let x = |step: usize| ('x', wanted[step - 1][1].clone());
        let tested = ('t', wanted[1][1].clone());
        // The resumed run repeats the validation of the checkpoint saved before it.
        let all = [y(0), x(1), y(1), x(2), tested, x(2), y(2), x(3), y(3), x(4)];
        assert_eq!(*seen.0.lock(), all);
        assert_ne!(wanted[3][0], wanted[3][1]);
        // The saved model is the average.
        let seen = Seen::default();
        let from = dir.path().join("iter_3");
        let other = run(&dir.path().join("other"), 4, &seen).load_from(from);
        other.build().unwrap().test().unwrap();
        assert_eq!(*seen.0.lock(), [('t', wanted[2][1].clone())]);
    }

    #[test]
    fn moving_average_of_a_schedule_free_optimizer_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let ema = EmaHook::new(Average::Stochastic);
        let run = run(dir.path(), 1, &Seen::default()).hook(Box::new(ema)).build();
        let error = run.unwrap_err().to_string();
        assert!(error.contains("EMAHook: this optimizer has averages"), "{error}");
    }
}
