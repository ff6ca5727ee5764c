//! Checks for non-finite numbers: such a loss is a warning, such weights and buffers are not saved.

use collective::ReduceOp;
use fused_optim::{Applied, SliceMut};

use super::Runner;
use crate::Result;
use crate::checkpoint::{visit_buffers, visit_model};
use crate::engine::TensorSpec;
use crate::model::with_host_grads;
use crate::optim_wrapper::{Update, has_non_finite};

impl Runner {
    /// Warns of a loss that is not finite, on its own rank, once for several in a row.
    pub(super) fn check_loss(&mut self, update: &Update) {
        let bad = update.losses.non_finite();
        let was_bad = std::mem::replace(&mut self.status.loss_is_bad, bad.is_some());
        let Some(loss) = bad.filter(|_| !was_bad) else { return };
        let (iter, rank) = (self.position.iter + 1, self.group.rank());
        let then = match update.applied {
            Some(Applied::SkippedNonFinite) => "the optimizer has skipped this step",
            _ => "weights that are not finite are not saved; CheckInvalidLossHook ends such a run",
        };
        let text = format!("the loss is {loss} at iteration {iter} on rank {rank}: {then}");
        self.logger().warning_of_rank(&text);
    }

    /// What makes a checkpoint useless, with its verb: a weight or buffer that is not finite, accumulated gradients if a
    /// step on them would not be skipped, or what the model wrapper adds to coming gradients. The same on all ranks, but
    /// for the name of the weight or buffer, which its own rank has.
    pub(super) fn find_non_finite(&mut self) -> Result<Option<String>> {
        let mut name = None;
        let mut look = |_: usize, spec: &TensorSpec, values: &mut SliceMut<'_>| {
            if name.is_none() && has_non_finite(values.as_slice()) {
                name = Some(spec.name.clone());
            }
            Ok(())
        };
        // Rank 0's weights are saved, and every rank's buffers.
        match self.group.rank() {
            0 => visit_model(&mut *self.engine, &mut look)?,
            _ => visit_buffers(&mut *self.engine, &mut look)?,
        }
        let mut bad_gradients = false;
        if !self.optim.skips_non_finite() {
            with_host_grads(&*self.model, &mut |grads| {
                bad_gradients = grads.iter().flatten().any(|grad| has_non_finite(*grad));
                Ok(())
            })?;
        }
        let bad_state = !self.model.is_state_finite();
        let mut found = [name.is_some(), bad_gradients, bad_state].map(u8::from);
        self.group.all_reduce(&mut found, ReduceOp::Max)?;
        Ok(match found {
            [0, 0, 0] => None,
            [0, 0, _] => Some("what PowerSGD has left out of the gradients is".to_owned()),
            [0, _, _] => Some("the gradients that wait for a step are".to_owned()),
            _ => Some(match name {
                Some(name) => format!("`{name}` is"),
                None => "a buffer of another rank is".to_owned(),
            }),
        })
    }
}
