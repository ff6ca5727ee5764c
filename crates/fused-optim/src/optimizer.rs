//! The traits `Optimizer` and `DeviceOptimizer`.

use std::fmt;

use crate::error::format;
use crate::{
    Applied, DeviceParam, DeviceParams, Error, GradStats, HyperParam, Launches, ParamMut,
    ParamSpec, ReadState, Result, Slice, StateDict, StateLayout, StepCtl, Tuned, VisitState,
};
#[cfg(doc)]
use crate::{FoundInf, HalfWeights};

/// A fused optimizer: one call updates every tensor, by most rules in one sweep over memory.
///
/// Object safe, so that a training loop can hold a `Box<dyn Optimizer>` without knowing the rule.
pub trait Optimizer: Send + fmt::Debug {
    /// The rule's name, as written into state dicts, for example `adamw`.
    fn kind(&self) -> &'static str;

    /// Updates every grouped tensor that has a gradient.
    ///
    /// Tensors are identified by their index in `params`, which must be the same at every step. If
    /// the gradients are known or [found](FoundInf::Check) to be non-finite, the step is skipped:
    /// it returns [`SkippedNonFinite`](Applied::SkippedNonFinite) and changes no weight, state,
    /// gradient or step count.
    ///
    /// Gradients are multiplied by `grad_scale`, then clipped, then used; they are not written
    /// back. One pass over the gradients before the update both checks for non-finite values and
    /// computes the norm.
    ///
    /// # Errors
    ///
    /// All arguments are checked before anything is written: a group's tensor that is not in
    /// `params`, a [wrong number](Error::ParamCount) of tensors, a gradient or average of another
    /// length than its weight, a weight whose length or type is not that of earlier steps, an
    /// invalid `grad_scale` or clip; [`Error::NonFiniteNorm`] with
    /// [`error_if_nonfinite`](crate::ClipNorm::error_if_nonfinite).
    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied>;

    /// This optimizer as a [`DeviceOptimizer`]; `None` if it steps in host memory.
    fn as_device(&mut self) -> Option<&mut dyn DeviceOptimizer> {
        None
    }

    /// Copy of the state and hyper-parameters, from which training resumes with the same bits.
    ///
    /// # Errors
    ///
    /// Errors of the device that holds the state; none on the CPU.
    fn state_dict(&self) -> Result<StateDict>;

    /// Device that holds the state and computes steps: `cpu`, or for example `npu:0`.
    fn device(&self) -> String {
        "cpu".to_owned()
    }

    /// Sets the names and shapes of all tensors, including those in no group, in the order of a
    /// step's `params`. Names are saved in state dicts, and a state dict with names is loaded by
    /// name. Later steps must pass this number of tensors, of these shapes. After adding a group
    /// with new tensors, call this again for all tensors.
    ///
    /// # Errors
    ///
    /// [`Error::ParamCount`] if a group's tensor has no name, or if the number of names is not the
    /// optimizer's number of tensors; [`Error::DuplicateName`]. The optimizer is unchanged then.
    fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()>;

    /// Loads a state dict, including hyper-parameters and learning rates.
    ///
    /// The optimizer must have the groups of the saved one, with the same tensors. If both the
    /// optimizer and the state dict have [names](Self::set_param_names), tensors are matched by
    /// name in any order; names and shapes must be equal in each group. If either has no names (for
    /// example a file of an older version), tensors are matched by index and only lengths are
    /// checked. Training resumes with the same bits as without a restart.
    ///
    /// # Errors
    ///
    /// [`Error::WrongKind`]; [`Error::State`] with the entry or the tensor. The optimizer is
    /// unchanged then.
    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()>;

    /// The state dict's layout: lengths in place of values. With
    /// [`visit_state`](Self::visit_state) it saves a state without a copy of all of it.
    ///
    /// # Errors
    ///
    /// As [`state_dict`](Self::state_dict).
    fn state_layout(&self) -> Result<StateLayout> {
        Ok(self.state_dict()?.layout())
    }

    /// Calls `visit` with the vectors of the state, in the order of the
    /// [layout](Self::state_layout): each tensor's index, the vector's name, the values. On the CPU
    /// values are not copied.
    ///
    /// # Errors
    ///
    /// As [`state_dict`](Self::state_dict); [`Error::Format`] with the first error of `visit`.
    fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        for (index, state) in self.state_dict()?.state {
            for (name, values) in state.tensors {
                visit(index, &name, &values).map_err(format("write the state"))?;
            }
        }
        Ok(())
    }

    /// Checks that a state with this layout can be loaded, as
    /// [`load_state_dict`](Self::load_state_dict) does, and changes nothing.
    ///
    /// An optimizer without its own implementation loads zeros, and then its state again.
    ///
    /// # Errors
    ///
    /// As [`load_state_dict`](Self::load_state_dict).
    fn check_state(&mut self, saved: &StateLayout) -> Result<()> {
        let own = self.state_dict()?;
        let zeros = saved.with_values(&mut |_, _, _| Ok(()))?;
        let loaded = self.load_state_dict(&zeros);
        self.load_state_dict(&own)?;
        loaded
    }

    /// As [`load_state_dict`](Self::load_state_dict), one vector at a time: `read` writes the
    /// values of the vector with this saved index and name. On the CPU they are read into the
    /// optimizer's own memory.
    ///
    /// # Errors
    ///
    /// As [`load_state_dict`](Self::load_state_dict); [`Error::Format`] with the first error of
    /// `read`, after which part of the state is lost.
    fn load_state(&mut self, saved: &StateLayout, read: &mut ReadState<'_>) -> Result<()> {
        let dict = saved.with_values(read)?;
        self.load_state_dict(&dict)
    }

    /// Number of parameter groups.
    fn group_count(&self) -> usize;

    /// A group's hyper-parameter; `None` for a rule without it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn hyper_param(&self, group: usize, param: HyperParam) -> Result<Option<f64>>;

    /// Sets a group's hyper-parameter, as a scheduler does between steps.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`]; [`Error::NoHyperParam`]; [`Error::InvalidHyper`] if the value is out
    /// of range; [`Error::MomentumFromZero`] if a buffer would have to be added or removed. The
    /// group is unchanged then.
    fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()>;

    /// A group's learning rate.
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn lr(&self, group: usize) -> Result<f64> {
        let lr = self.hyper_param(group, HyperParam::Lr)?;
        lr.ok_or(Error::NoHyperParam { kind: self.kind(), param: HyperParam::Lr })
    }

    /// Sets a group's learning rate.
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        self.set_hyper_param(group, HyperParam::Lr, lr)
    }

    /// A group's [momentum](HyperParam::Momentum); `None` for a rule without one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn momentum(&self, group: usize) -> Result<Option<f64>> {
        self.hyper_param(group, HyperParam::Momentum)
    }

    /// Sets a group's [momentum](HyperParam::Momentum).
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<()> {
        self.set_hyper_param(group, HyperParam::Momentum, momentum)
    }

    /// A group's weight decay; `None` for a rule without one.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchGroup`].
    fn weight_decay(&self, group: usize) -> Result<Option<f64>> {
        self.hyper_param(group, HyperParam::WeightDecay)
    }

    /// Sets a group's weight decay.
    ///
    /// # Errors
    ///
    /// As [`set_hyper_param`](Self::set_hyper_param).
    fn set_weight_decay(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.set_hyper_param(group, HyperParam::WeightDecay, weight_decay)
    }

    /// Whether evaluation uses other weights than training, those of
    /// [`eval_weights`](Self::eval_weights): as by
    /// [`ScheduleFreeAdamW`](crate::ScheduleFreeAdamW).
    fn has_eval_weights(&self) -> bool {
        false
    }

    /// Writes the weights with which tensor `index`, whose weight in training is `weight`, is to be
    /// evaluated and published: `weight` itself, unless the rule
    /// [has others](Self::has_eval_weights).
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`]; [`Error::MissingParam`] if the rule has others, and the tensor is
    /// in no group.
    fn eval_weights(&self, index: usize, weight: Slice<'_>, output: &mut [f32]) -> Result<()> {
        crate::core::check_len(index, "evaluation weight", weight.len(), output.len())?;
        crate::cpu::widen_into(weight, output);
        Ok(())
    }

    /// Drops the f32 [masters](HalfWeights::Master); the next step copies them from the 16-bit
    /// weights again. Call this after weights were loaded or changed outside the optimizer.
    ///
    /// # Errors
    ///
    /// Errors of the device that holds the state; none on the CPU.
    fn refresh_masters(&mut self) -> Result<()>;

    /// Sets the number of threads of a step, including the calling thread; 0 counts as 1, the
    /// default. The number of threads changes no bit of the result.
    fn set_threads(&mut self, threads: usize);

    /// Norm of all gradients times `grad_scale`, before clipping, of the last step that clipped by
    /// norm.
    fn grad_norm(&self) -> Option<f64>;
}

/// Calls each method of the optimizer inside.
impl<O: Optimizer + ?Sized> Optimizer for Box<O> {
    fn kind(&self) -> &'static str {
        (**self).kind()
    }

    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        (**self).step(params, ctl)
    }

    fn as_device(&mut self) -> Option<&mut dyn DeviceOptimizer> {
        (**self).as_device()
    }

    fn state_dict(&self) -> Result<StateDict> {
        (**self).state_dict()
    }

    fn device(&self) -> String {
        (**self).device()
    }

    fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()> {
        (**self).set_param_names(params)
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        (**self).load_state_dict(dict)
    }

    fn state_layout(&self) -> Result<StateLayout> {
        (**self).state_layout()
    }

    fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        (**self).visit_state(visit)
    }

    fn check_state(&mut self, saved: &StateLayout) -> Result<()> {
        (**self).check_state(saved)
    }

    fn load_state(&mut self, saved: &StateLayout, read: &mut ReadState<'_>) -> Result<()> {
        (**self).load_state(saved, read)
    }

    fn group_count(&self) -> usize {
        (**self).group_count()
    }

    fn hyper_param(&self, group: usize, param: HyperParam) -> Result<Option<f64>> {
        (**self).hyper_param(group, param)
    }

    fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()> {
        (**self).set_hyper_param(group, param, value)
    }

    fn lr(&self, group: usize) -> Result<f64> {
        (**self).lr(group)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        (**self).set_lr(group, lr)
    }

    fn momentum(&self, group: usize) -> Result<Option<f64>> {
        (**self).momentum(group)
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<()> {
        (**self).set_momentum(group, momentum)
    }

    fn weight_decay(&self, group: usize) -> Result<Option<f64>> {
        (**self).weight_decay(group)
    }

    fn set_weight_decay(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        (**self).set_weight_decay(group, weight_decay)
    }

    fn has_eval_weights(&self) -> bool {
        (**self).has_eval_weights()
    }

    fn eval_weights(&self, index: usize, weight: Slice<'_>, output: &mut [f32]) -> Result<()> {
        (**self).eval_weights(index, weight, output)
    }

    fn refresh_masters(&mut self) -> Result<()> {
        (**self).refresh_masters()
    }

    fn set_threads(&mut self, threads: usize) {
        (**self).set_threads(threads);
    }

    fn grad_norm(&self) -> Option<f64> {
        (**self).grad_norm()
    }
}

/// An optimizer whose weights and gradients are in the memory of its [device](Optimizer::device),
/// as its state is.
pub trait DeviceOptimizer: Optimizer {
    /// As [`Optimizer::step`]: launches the step in the stream of `params`, and returns before it
    /// is done unless it has to check the gradients.
    ///
    /// # Errors
    ///
    /// As [`Optimizer::step`]; [`Error::DifferentStream`]; [`Error::MisalignedPointer`]; errors of
    /// the device.
    fn step_on_device(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<Applied>;

    /// Whether a gradient of a tensor in a group, times `grad_scale`, is infinite or NaN: the check
    /// of [`FoundInf::Check`] without a step. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn found_inf(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<bool>;

    /// Searches for the fastest launch parameters for steps on tensors like these, and uses them
    /// from now on. They change no bit of the result.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device); the optimizer is unchanged then.
    fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>>;

    /// Uploads the arguments of a step with this `ctl` and returns the step's kernel launches
    /// without launching them. If a captured CUDA graph ([`launch_step`](Self::launch_step) under
    /// capture) has these launches, it may be launched next, otherwise it must be captured again.
    /// `None` if a step does more than launch kernels.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn prepare_step(
        &mut self,
        params: DeviceParams<'_>,
        ctl: &StepCtl,
    ) -> Result<Option<Launches>> {
        let _ = (params, ctl);
        Ok(None)
    }

    /// Launches a step without waiting for it. After [`prepare_step`](Self::prepare_step) with the
    /// same arguments it only launches kernels, and so can be captured.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn launch_step(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<()> {
        let _ = (params, ctl);
        Err(Error::Unsupported { what: "`launch_step` of several optimizers" })
    }

    /// Whether the last launched step, with this `ctl`, was applied or skipped; waits for it if it
    /// had to check the gradients.
    ///
    /// # Errors
    ///
    /// As [`step_on_device`](Self::step_on_device).
    fn step_outcome(&mut self, ctl: &StepCtl) -> Result<Applied> {
        let _ = ctl;
        Err(Error::Unsupported { what: "`step_outcome` of several optimizers" })
    }

    /// Handle that computes statistics of gradients (their norm, whether they are finite) as soon
    /// as they are reduced, before the step with this `ctl`. The step then reads only the remaining
    /// gradients for its statistics, with the same bits. `None` before the first step, or if the
    /// step needs no statistics.
    ///
    /// # Errors
    ///
    /// An invalid `ctl`; errors of the device.
    fn grad_stats(&mut self, ctl: &StepCtl) -> Result<Option<GradStats>> {
        let _ = ctl;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// Names of the methods between a line and the next closing brace of the same depth.
    fn methods(opening: &str) -> BTreeSet<&'static str> {
        let source = include_str!("optimizer.rs");
        let (_, body) = source.split_once(opening).unwrap();
        let body = &body[..body.find("\n}\n").unwrap()];
        let name = |line: &'static str| line.strip_prefix("    fn ")?.split(['(', '<']).next();
        body.lines().filter_map(name).collect()
    }

    #[test]
    fn a_box_forwards_every_method_of_the_trait() {
        let all = methods("\npub trait Optimizer: Send + fmt::Debug {\n");
        assert!(all.len() > 20 && all.contains("set_lr"), "{all:?}");
        assert_eq!(methods("\nimpl<O: Optimizer + ?Sized> Optimizer for Box<O> {\n"), all);
    }
}
