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
