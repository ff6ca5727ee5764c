//! `OptimWrapperDict`: an optimizer for each part of the model.
//!
//! A part consists of the parameters under a prefix of their names: `generator.`, `discriminator.`.
//! [`OptimizerDict`] combines the parts' optimizers to one [`Optimizer`], whose groups are those of
//! the first part, followed by those of the second and so on, so that schedulers, checkpoints and
//! both wrappers work with it as with any other.
//!
//! Difference to MMEngine: there a model with an `OptimWrapperDict` runs its own training step,
//! with a backward pass for each part. Here all parts share one loss, and step together: if a
//! gradient of any part is not finite, no part steps.

use fused_optim::{
    Applied, Clip, DeviceOptimizer, DeviceParam, DeviceParams, Error as OptimError, FoundInf, Grad,
    HyperParam, Optimizer, ParamMut, ParamSpec, Slice, StateDict, StateProblem, StepCtl, Tuned,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Error, Result, TensorSpec, on_device};

/// One part of a model with its optimizer.
#[derive(Debug)]
pub struct Member {
    /// Prefix of the parameters' names, without a dot at its end.
    pub name: String,
    /// Optimizer whose groups contain the part's parameters, by their index in the whole model.
    pub optimizer: Box<dyn Optimizer>,
    /// Gradient clipping of this part; by default that of the step.
    pub clip: Option<Clip>,
}

impl Member {
    /// Options of a step whose gradients are all finite.
    fn ctl(&self, ctl: &StepCtl) -> StepCtl {
        StepCtl { found_inf: FoundInf::Known(false), clip: self.clip.or(ctl.clip), ..*ctl }
    }
}

/// Several optimizers combined to one.
#[derive(Debug)]
pub struct OptimizerDict {
    members: Vec<Member>,
    /// For each group, the member that it belongs to, and its index there.
    groups: Vec<(usize, usize)>,
}

/// Assigns parameters to `names`: those under each prefix, by index.
///
/// # Errors
///
/// [`Error::NoPart`] for a parameter that belongs to no part or to two; [`Error::EmptyPart`] for a
/// name without parameters.
pub fn assign(names: &[&str], params: &[TensorSpec]) -> Result<Vec<Vec<usize>>> {
    let mut parts = vec![Vec::new(); names.len()];
    for (index, param) in params.iter().enumerate() {
        let is_under =
            |name: &str| param.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
        let mut owners = (0..names.len()).filter(|&at| is_under(names[at]));
        let (Some(owner), None) = (owners.next(), owners.next()) else {
            let parts = names.iter().map(|name| (*name).to_owned()).collect();
            return Err(Error::NoPart { parameter: param.name.clone(), parts });
        };
        parts[owner].push(index);
    }
    match parts.iter().position(Vec::is_empty) {
        Some(at) => Err(Error::EmptyPart { part: names[at].to_owned() }),
        None => Ok(parts),
    }
}

impl OptimizerDict {
    /// Combines several optimizers, over different parameters.
    #[must_use]
    pub fn new(members: Vec<Member>) -> Self {
        let own = |(at, member): (usize, &Member)| {
            (0..member.optimizer.group_count()).map(move |group| (at, group))
        };
        let groups = members.iter().enumerate().flat_map(own).collect();
        Self { members, groups }
    }

    /// Returns the parts, in order.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    fn locate(&self, group: usize) -> Result<(usize, usize), OptimError> {
        let missing = OptimError::NoSuchGroup { group, count: self.groups.len() };
        self.groups.get(group).copied().ok_or(missing)
    }
}

impl Optimizer for OptimizerDict {
    fn kind(&self) -> &'static str {
        KIND
    }

    /// Steps the parts one after another. Unlike with a single optimizer, an error of a later part
    /// leaves earlier parts stepped.
    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied, OptimError> {
        let overflow = match ctl.found_inf {
            FoundInf::Known(known) => known,
            FoundInf::Check => {
                params.iter().filter_map(|p| p.grad.as_ref()).any(|grad| !is_finite(grad, ctl))
            }
        };
        if overflow {
            return Ok(Applied::SkippedNonFinite);
        }
        self.members.iter_mut().try_for_each(|member| {
            member.optimizer.step(params, &member.ctl(ctl)).map(|_applied| ())
        })?;
        Ok(Applied::Applied)
    }

    /// Returns `None` unless all members can step on device memory.
    fn as_device(&mut self) -> Option<&mut dyn DeviceOptimizer> {
        let is_device = self.members.iter_mut().all(|m| m.optimizer.as_device().is_some());
        is_device.then_some(self)
    }

    fn state_dict(&self) -> Result<StateDict, OptimError> {
        let mut whole = StateDict { kind: KIND.to_owned(), ..StateDict::default() };
        let mut saved = Vec::new();
        for member in &self.members {
            let part = member.optimizer.state_dict()?;
            let StateDict { kind, param_groups, state, params } = part;
            let groups = serde_json::from_str(&param_groups).unwrap_or(Value::Null);
            saved.push(Saved { name: member.name.clone(), kind, groups });
            whole.state.extend(state);
            whole.params.extend(params);
        }
        whole.param_groups = serde_json::to_string(&saved).unwrap_or_default();
        Ok(whole)
    }

    fn has_eval_weights(&self) -> bool {
        self.members.iter().any(|member| member.optimizer.has_eval_weights())
    }

    fn eval_weights(
        &self,
        index: usize,
        weight: Slice<'_>,
        output: &mut [f32],
    ) -> Result<(), OptimError> {
        let mut missing = Err(OptimError::MissingParam { index, count: 0 });
        for member in self.members.iter().filter(|member| member.optimizer.has_eval_weights()) {
            missing = member.optimizer.eval_weights(index, weight, output);
            if !matches!(missing, Err(OptimError::MissingParam { .. })) {
                break;
            }
        }
        missing
    }

    /// Returns the devices of its members.
    fn device(&self) -> String {
        let mut devices: Vec<_> = self.members.iter().map(|m| m.optimizer.device()).collect();
        devices.dedup();
        devices.join(" and ")
    }

    /// As [`Optimizer::set_param_names`], with the whole model's parameters for each part. An error
    /// of a later part leaves earlier parts named.
    fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<(), OptimError> {
        self.members.iter_mut().try_for_each(|member| member.optimizer.set_param_names(params))
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<(), OptimError> {
        if dict.kind != KIND {
            let (got, expected) = (dict.kind.clone(), KIND);
            return Err(OptimError::WrongKind { expected, got });
        }
        let saved: Vec<Saved> =
            serde_json::from_str(&dict.param_groups).map_err(|e| invalid(e.to_string()))?;
        let names = |names: &mut dyn Iterator<Item = &str>| names.collect::<Vec<_>>().join(", ");
        let was = names(&mut saved.iter().map(|saved| &*saved.name));
        let is = names(&mut self.members.iter().map(|member| &*member.name));
        if was != is {
            return Err(invalid(format!("the state has the parts {was}, this run has {is}")));
        }
        let before = self.members.iter().map(|m| m.optimizer.state_dict());
        let before: Vec<_> = before.collect::<Result<_, _>>()?;
        let parts: Vec<_> = saved.iter().map(|saved| saved.part(dict)).collect::<Result<_, _>>()?;
        let known = |index: &usize| parts.iter().any(|part| part.state.contains_key(index));
        if let Some(index) = dict.state.keys().find(|index| !known(index)) {
            let (key, problem) = (format!("state.{index}"), StateProblem::Unknown);
            return Err(OptimError::State { key, problem });
        }
        for (at, part) in parts.iter().enumerate() {
            if let Err(error) = self.members[at].optimizer.load_state_dict(part) {
                // Members loaded so far get their previous state, which cannot fail.
                for (member, before) in self.members[..at].iter_mut().zip(&before) {
                    member.optimizer.load_state_dict(before)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn group_count(&self) -> usize {
        self.groups.len()
    }

    fn hyper_param(&self, group: usize, param: HyperParam) -> Result<Option<f64>, OptimError> {
        let (at, group) = self.locate(group)?;
        self.members[at].optimizer.hyper_param(group, param)
    }

    fn set_hyper_param(
        &mut self,
        group: usize,
        param: HyperParam,
        value: f64,
    ) -> Result<(), OptimError> {
        let (at, group) = self.locate(group)?;
        self.members[at].optimizer.set_hyper_param(group, param, value)
    }

    fn refresh_masters(&mut self) -> Result<(), OptimError> {
        self.members.iter_mut().try_for_each(|member| member.optimizer.refresh_masters())
    }

    fn set_threads(&mut self, threads: usize) {
        self.members.iter_mut().for_each(|member| member.optimizer.set_threads(threads));
    }

    /// Returns the norm over all parts that clip by norm; `None` if no part does.
    fn grad_norm(&self) -> Option<f64> {
        let norms = self.members.iter().filter_map(|member| member.optimizer.grad_norm());
        norms.map(|norm| norm * norm).reduce(|sum, square| sum + square).map(f64::sqrt)
    }
}

impl DeviceOptimizer for OptimizerDict {
    /// As [`step`](Optimizer::step).
    fn step_on_device(
        &mut self,
        params: DeviceParams<'_>,
        ctl: &StepCtl,
    ) -> Result<Applied, OptimError> {
        let overflow = match ctl.found_inf {
            FoundInf::Known(known) => known,
            FoundInf::Check => self.found_inf(params, ctl)?,
        };
        if overflow {
            return Ok(Applied::SkippedNonFinite);
        }
        for member in &mut self.members {
            let ctl = member.ctl(ctl);
            let _applied = on_device(&mut *member.optimizer)?.step_on_device(params, &ctl)?;
        }
        Ok(Applied::Applied)
    }

    fn found_inf(&mut self, params: DeviceParams<'_>, ctl: &StepCtl) -> Result<bool, OptimError> {
        for member in &mut self.members {
            if on_device(&mut *member.optimizer)?.found_inf(params, ctl)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn tune(&mut self, params: &[DeviceParam]) -> Result<Vec<Tuned>, OptimError> {
        let tune = |member: &mut Member| on_device(&mut *member.optimizer)?.tune(params);
        let each: Result<Vec<_>, _> = self.members.iter_mut().map(tune).collect();
        Ok(each?.concat())
    }
}

/// One part in a state dict's `param_groups`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    name: String,
    kind: String,
    groups: Value,
}

impl Saved {
    /// Returns the part's own state dict.
    fn part(&self, whole: &StateDict) -> Result<StateDict, OptimError> {
        let groups = self.groups.as_array().into_iter().flatten();
        let own = groups.flat_map(|group| group["params"].as_array().into_iter().flatten());
        let mut part = StateDict {
            kind: self.kind.clone(),
            param_groups: self.groups.to_string(),
            ..StateDict::default()
        };
        for index in own {
            let index = index.as_u64().and_then(|index| usize::try_from(index).ok());
            let index = index.ok_or_else(|| invalid("a parameter is not an index".to_owned()))?;
            part.state.extend(whole.state.get(&index).map(|state| (index, state.clone())));
            part.params.extend(whole.params.get(&index).map(|param| (index, param.clone())));
        }
        Ok(part)
    }
}

pub(super) fn invalid(text: String) -> OptimError {
    OptimError::State { key: "param_groups".to_owned(), problem: StateProblem::Invalid(text) }
}

fn is_finite(grad: &Grad<'_>, ctl: &StepCtl) -> bool {
    match grad.as_slice() {
        Slice::F32(v) => v.iter().all(|v| (v * ctl.grad_scale).is_finite()),
        Slice::F16(v) => v.iter().all(|v| (v.to_f32() * ctl.grad_scale).is_finite()),
        Slice::Bf16(v) => v.iter().all(|v| (v.to_f32() * ctl.grad_scale).is_finite()),
    }
}

const KIND: &str = "optimizer_dict";
