//! Averages batch-norm statistics over the ranks.

use collective::{ProcessGroup, ReduceOp};
use fused_optim::SliceMut;
use serde_json::{Value, json};

use super::Hook;
use crate::Result;
use crate::checkpoint::{Contents, copy_from_bytes, to_bytes, visit_buffers};
use crate::data::Batch;
use crate::engine::Losses;
use crate::runner::Runner;

/// Averages the model's buffers over the ranks after each epoch and before each validation.
///
/// Batch-norm statistics differ between ranks, because each sees other data. Without this hook
/// every rank would validate a different model; with it, the validated model is the saved one. A
/// checkpoint saved before they are averaged contains averages in its model and, separately, each
/// rank's own; training is not affected. Buffers are never averaged twice: the mean of equal
/// numbers can differ from that number in the last bit.
#[derive(Clone, Copy, Debug, Default)]
pub struct SyncBuffersHook {
    /// Whether this rank has trained since the buffers were last averaged.
    stale: bool,
}

impl SyncBuffersHook {
    fn sync(&mut self, runner: &mut Runner) -> Result<()> {
        let group = runner.group().clone();
        if !std::mem::take(&mut self.stale) || group.world_size() == 1 {
            return Ok(());
        }
        visit_buffers(runner.engine_mut(), &mut |_, _, buffer| average(&group, buffer))
    }
}

fn average(group: &ProcessGroup, buffer: &mut SliceMut<'_>) -> Result<()> {
    match buffer {
        SliceMut::F32(b) => group.all_reduce(b, ReduceOp::Avg)?,
        SliceMut::F16(b) => group.all_reduce(b, ReduceOp::Avg)?,
        SliceMut::Bf16(b) => group.all_reduce(b, ReduceOp::Avg)?,
    }
    Ok(())
}

impl Hook for SyncBuffersHook {
    fn name(&self) -> &'static str {
        "SyncBuffersHook"
    }

    fn after_train_iter(&mut self, _: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        self.stale = true;
        Ok(())
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        self.sync(runner)
    }

    fn before_val(&mut self, runner: &mut Runner) -> Result<()> {
        self.sync(runner)
    }

    fn before_save_checkpoint(
        &mut self,
        runner: &mut Runner,
        contents: &mut Contents,
    ) -> Result<()> {
        let group = runner.group().clone();
        if !self.stale || group.world_size() == 1 {
            return Ok(());
        }
        visit_buffers(runner.engine_mut(), &mut |_, spec, buffer| {
            let own = to_bytes(buffer.as_slice());
            average(&group, buffer)?;
            let averaged = to_bytes(buffer.as_slice());
            copy_from_bytes(buffer, &own);
            // Unless another hook has replaced it.
            let mut saved = contents.model.iter_mut().filter(|tensor| tensor.spec == *spec);
            if let Some(saved) = saved.find(|tensor| tensor.bytes == own) {
                saved.bytes = averaged;
            }
            Ok(())
        })
    }

    fn state_dict(&self) -> Option<Value> {
        Some(json!(self.stale))
    }

    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        self.stale = state.as_bool().unwrap_or(true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;
    use crate::hooks::CheckpointHook;
    use crate::model::ModelFactory;
    use crate::runner::{RunnerBuilder, TrainConfig};
    use crate::testing::{FakeEngine, Metrics, Values, blank, builder};

    /// Sets the buffer to the rank's number in training, and records it in validations.
    #[derive(Clone, Default)]
    struct OwnBuffers(Arc<Mutex<Vec<f32>>>);

    impl OwnBuffers {
        fn visit(runner: &mut Runner, mut act: impl FnMut(&mut f32)) -> Result<()> {
            visit_buffers(runner.engine_mut(), &mut |_, _, buffer| {
                let SliceMut::F32(buffer) = buffer else { panic!("not f32") };
                act(&mut buffer[0]);
                Ok(())
            })
        }
    }

    impl Hook for OwnBuffers {
        fn name(&self) -> &'static str {
            "OwnBuffers"
        }

        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            let rank = runner.group().rank() as f32;
            Self::visit(runner, |buffer| *buffer = rank)
        }

        fn before_val_iter(&mut self, runner: &mut Runner, _: usize, _: &mut Batch) -> Result<()> {
            let seen = Arc::clone(&self.0);
            Self::visit(runner, |buffer| seen.lock().push(*buffer))
        }
    }

    /// Runs two ranks, and returns the buffers seen in validations.
    fn seen(dir: &Path, call: impl Fn(RunnerBuilder) + Sync) -> Vec<f32> {
        let hook = OwnBuffers::default();
        let rank = |group| {
            let model: ModelFactory = Box::new(|_| {
                let (w, mean) = (Values::F32(vec![1.0]), Values::F32(vec![0.0]));
                Ok(Box::new(FakeEngine::new(&[("w", w)], &[("mean", mean)])))
            });
            let run = builder(dir, 4).process_group(group).model(model);
            let run = run.validation(blank(2), Metrics::new([[("acc", 1.0)]]));
            let run = run.train_cfg(TrainConfig { val_interval: 1, ..TrainConfig::by_iters(2) });
            call(run.hook(Box::new(hook.clone())).hook(Box::new(SyncBuffersHook::default())));
        };
        let groups = ProcessGroup::threads(2, Duration::from_secs(30)).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| rank(g))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
        hook.0.lock().clone()
    }

    #[test]
    fn ranks_validate_with_equal_buffers_in_training_and_from_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let trained = seen(&dir.path().join("a"), |run| {
            let mut checkpoints = CheckpointHook::new(1);
            checkpoints.by_epoch = false;
            run.hook(Box::new(checkpoints)).build().unwrap().train().unwrap();
        });
        assert_eq!(trained, [0.5; 4]);
        let from = dir.path().join("a/iter_1");
        let loaded = seen(&dir.path().join("b"), |run| {
            run.load_from(&from).build().unwrap().validate().unwrap();
        });
        assert_eq!(loaded, [0.5; 2]);
    }
}
