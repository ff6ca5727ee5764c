//! What every rule shares: groups, per-tensor state, the checked step, saving and loading.
//!
//! Invariant: everything a call could object to is looked at before the first write, so an error
//! leaves no half-done step behind.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::state_dict::MASTER;
use crate::{
    Applied, DType, Error, FoundInf, ParamGroup, ParamMut, ParamState, Result, Slice, StateDict,
    StateProblem, StepCtl, cpu,
};

/// A rule's hyper-parameters, and the rule.
pub(crate) trait Hyper: Clone + Serialize + DeserializeOwned {
    /// The rule's name in state dicts.
    const KIND: &'static str;
    /// The numbers of one step of one tensor.
    type Rule;

    /// Refuses values outside their ranges.
    fn validate(&self) -> Result<()>;
    /// The learning rate.
    fn lr(&self) -> f64;
    /// The learning rate, to set; the caller validates.
    fn lr_mut(&mut self) -> &mut f64;
    /// Names of the state values each element has; all start at zero.
    fn slots(&self) -> &'static [&'static str];
    /// The numbers for a tensor's `step`-th step, counted from 1.
    fn rule(&self, step: u64, grad_scale: f32) -> Self::Rule;
    /// Applies the rule to one block, which is `range` of the tensor's `state` vectors; these are in
    /// the order of [`Self::slots`].
    fn sweep(
        rule: &Self::Rule,
        param: &mut [f32],
        grad: &[f32],
        state: &mut [Vec<f32>],
        range: Range<usize>,
    );
}

/// An optimizer of any elementwise rule.
#[derive(Clone, Debug)]
pub(crate) struct Core<H> {
    groups: Vec<ParamGroup<H>>,
    /// By tensor index; made at a tensor's first step.
    state: BTreeMap<usize, TensorState>,
}

/// The state of one tensor; all vectors have the tensor's length.
#[derive(Clone)]
struct TensorState {
    step: u64,
    /// The f32 value of a half weight; `None` if the weight is f32.
    master: Option<Vec<f32>>,
    slots: Vec<Vec<f32>>,
}

impl<H: Hyper> Core<H> {
    pub(crate) fn new(groups: impl IntoIterator<Item = ParamGroup<H>>) -> Result<Self> {
        let mut core = Self { groups: Vec::new(), state: BTreeMap::new() };
        for group in groups {
            core.add_param_group(group)?;
        }
        Ok(core)
    }

    pub(crate) fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        group.hyper.validate()?;
        for (at, &index) in group.params.iter().enumerate() {
            if group.params[..at].contains(&index) || self.is_grouped(index) {
                return Err(Error::DuplicateParam { index });
            }
        }
        self.groups.push(group);
        Ok(())
    }

    pub(crate) fn groups(&self) -> &[ParamGroup<H>] {
        &self.groups
    }

    pub(crate) fn lr(&self, group: usize) -> Result<f64> {
        let count = self.groups.len();
        let group = self.groups.get(group).ok_or(Error::NoSuchGroup { group, count })?;
        Ok(group.hyper.lr())
    }

    pub(crate) fn set_lr(&mut self, group: usize, lr: f64) -> Result<()> {
        at_least_zero("learning rate", lr)?;
        let count = self.groups.len();
        let group = self.groups.get_mut(group).ok_or(Error::NoSuchGroup { group, count })?;
        *group.hyper.lr_mut() = lr;
        Ok(())
    }

    pub(crate) fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        ctl.validate()?;
        self.validate(params)?;
        let found_inf = match ctl.found_inf {
            FoundInf::Known(found) => found,
            FoundInf::Check => self
                .indices()
                .filter_map(|index| params[index].grad)
                .any(|grad| cpu::has_non_finite(grad, ctl.grad_scale)),
        };
        if found_inf {
            return Ok(Applied::SkippedNonFinite);
        }
        for group in &self.groups {
            for &index in &group.params {
                let ParamMut { weight, grad: Some(grad) } = &mut params[index] else { continue };
                let state = self
                    .state
                    .entry(index)
                    .or_insert_with(|| TensorState::new(&group.hyper, weight.as_slice()));
                state.step += 1;
                let rule = group.hyper.rule(state.step, ctl.grad_scale);
                let TensorState { master, slots, .. } = state;
                cpu::walk(weight.reborrow(), master.as_deref_mut(), *grad, |range, param, grad| {
                    H::sweep(&rule, param, grad, slots, range);
                });
            }
        }
        Ok(Applied::Applied)
    }

    /// Every grouped tensor, in group order.
    fn indices(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().flat_map(|group| group.params.iter().copied())
    }

    fn is_grouped(&self, index: usize) -> bool {
        self.indices().any(|other| other == index)
    }

    fn validate(&self, params: &[ParamMut<'_>]) -> Result<()> {
        for index in self.indices() {
            let count = params.len();
            let param = params.get(index).ok_or(Error::MissingParam { index, count })?;
            let Some(grad) = param.grad else { continue };
            let expected = param.weight.len();
            let same_length = |what, got| {
                let mismatch = Error::LengthMismatch { index, what, expected, got };
                if got == expected { Ok(()) } else { Err(mismatch) }
            };
            same_length("gradient", grad.len())?;
            if let Some(state) = self.state.get(&index) {
                let (weight, master) = (param.weight.dtype(), state.master.is_some());
                if (weight != DType::F32) != master {
                    return Err(Error::MasterMismatch { index, weight, master });
                }
                state.vectors().try_for_each(|vector| same_length("state", vector.len()))?;
            }
        }
        Ok(())
    }

    pub(crate) fn state_dict(&self) -> StateDict {
        let groups = self.groups.iter().map(group_to_json).collect();
        let state = self.state.iter().map(|(&index, state)| {
            // A tensor with state is in a group, and its state has that group's slots.
            let names = self.slots_of(index).iter().copied();
            let mut tensors: BTreeMap<_, _> =
                names.map(String::from).zip(state.slots.iter().cloned()).collect();
            if let Some(master) = &state.master {
                tensors.insert(MASTER.into(), master.clone());
            }
            (index, ParamState { step: state.step, tensors })
        });
        StateDict {
            kind: H::KIND.into(),
            param_groups: Value::Array(groups).to_string(),
            state: state.collect(),
        }
    }

    pub(crate) fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        if dict.kind != H::KIND {
            return Err(Error::WrongKind { expected: H::KIND, got: dict.kind.clone() });
        }
        let mut loaded = Self { groups: self.groups_from_json(dict)?, state: BTreeMap::new() };
        for (&index, state) in &dict.state {
            if !loaded.is_grouped(index) {
                return Err(problem(format!("state.{index}"), StateProblem::Unknown));
            }
            let known = self.state.get(&index).and_then(|state| state.vectors().next());
            let state =
                TensorState::load(index, state, loaded.slots_of(index), known.map(Vec::len))?;
            loaded.state.insert(index, state);
        }
        *self = loaded;
        Ok(())
    }

    fn slots_of(&self, index: usize) -> &'static [&'static str] {
        let group = self.groups.iter().find(|group| group.params.contains(&index));
        group.map_or(&[], |group| group.hyper.slots())
    }

    /// The saved groups, if they are over the tensors of this optimizer's.
    fn groups_from_json(&self, dict: &StateDict) -> Result<Vec<ParamGroup<H>>> {
        let saved: Vec<Value> = serde_json::from_str(&dict.param_groups).map_err(|source| {
            Error::Format { action: "read param_groups", source: source.into() }
        })?;
        if saved.len() != self.groups.len() {
            let text = format!("expected {} groups, got {}", self.groups.len(), saved.len());
            return Err(problem("param_groups".into(), StateProblem::Invalid(text)));
        }
        let groups = saved.into_iter().zip(&self.groups).enumerate();
        groups.map(|(at, (saved, own))| group_from_json(at, saved, own)).collect()
    }
}

impl TensorState {
    fn new<H: Hyper>(hyper: &H, weight: Slice<'_>) -> Self {
        let half = weight.dtype() != DType::F32;
        Self {
            step: 0,
            master: half.then(|| cpu::widen(weight)),
            slots: hyper.slots().iter().map(|_| vec![0.0; weight.len()]).collect(),
        }
    }

    fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        self.slots.iter().chain(&self.master)
    }

    /// Checks one tensor's saved state and takes it over; `count` is its length where known.
    fn load(
        index: usize,
        saved: &ParamState,
        slots: &[&str],
        mut count: Option<usize>,
    ) -> Result<Self> {
        let key = |name: &str| format!("state.{index}.{name}");
        if !(1..=i64::MAX as u64).contains(&saved.step) {
            let text = StateProblem::Invalid(format!("{} is not a step count", saved.step));
            return Err(problem(key("step"), text));
        }
        for (name, values) in &saved.tensors {
            if name != MASTER && !slots.contains(&name.as_str()) {
                return Err(problem(key(name), StateProblem::Unknown));
            }
            let (expected, got) = (*count.get_or_insert(values.len()), values.len());
            if got != expected {
                return Err(problem(key(name), StateProblem::Length { expected, got }));
            }
            if let Some(at) = values.iter().position(|x| !x.is_finite()) {
                return Err(problem(key(name), StateProblem::NonFinite { at }));
            }
        }
        let slot = |name: &&str| {
            let values = saved.tensors.get(*name).cloned();
            values.ok_or_else(|| problem(key(name), StateProblem::Missing))
        };
        Ok(Self {
            step: saved.step,
            master: saved.tensors.get(MASTER).cloned(),
            slots: slots.iter().map(slot).collect::<Result<_>>()?,
        })
    }
}

impl fmt::Debug for TensorState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorState")
            .field("step", &self.step)
            .field("count", &self.vectors().next().map(Vec::len))
            .finish_non_exhaustive()
    }
}

/// Refuses a negative, infinite or NaN hyper-parameter.
pub(crate) fn at_least_zero(name: &'static str, value: f64) -> Result<()> {
    let valid = value >= 0.0 && value.is_finite();
    if valid { Ok(()) } else { Err(Error::InvalidHyper { name, value }) }
}

/// Refuses a decay rate outside `0 <= value < 1`.
pub(crate) fn below_one(name: &'static str, value: f64) -> Result<()> {
    let valid = (0.0..1.0).contains(&value);
    if valid { Ok(()) } else { Err(Error::InvalidHyper { name, value }) }
}

fn problem(key: String, problem: StateProblem) -> Error {
    Error::State { key, problem }
}

/// PyTorch's layout: hyper-parameters and `params` side by side.
fn group_to_json<H: Hyper>(group: &ParamGroup<H>) -> Value {
    let mut json = serde_json::to_value(&group.hyper).expect("a struct of plain numbers");
    json[PARAMS] = group.params.clone().into();
    json
}

fn group_from_json<H: Hyper>(
    at: usize,
    mut saved: Value,
    own: &ParamGroup<H>,
) -> Result<ParamGroup<H>> {
    let key = format!("param_groups[{at}]");
    let params = saved.as_object_mut().and_then(|group| group.remove(PARAMS));
    if params != Some(own.params.clone().into()) {
        let text = format!("params are not {:?}", own.params);
        return Err(problem(key, StateProblem::Invalid(text)));
    }
    let invalid = |text: String| problem(key, StateProblem::Invalid(text));
    let hyper: H = match serde_json::from_value(saved) {
        Ok(hyper) => hyper,
        Err(error) => return Err(invalid(error.to_string())),
    };
    match hyper.validate() {
        Ok(()) => Ok(ParamGroup { hyper, params: own.params.clone() }),
        Err(error) => Err(invalid(error.to_string())),
    }
}

const PARAMS: &str = "params";

/// Gives a rule its public face: a struct around [`Core`], and [`Optimizer`](crate::Optimizer).
macro_rules! optimizer {
    ($(#[$meta:meta])* $name:ident, $hyper:ident) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        pub struct $name {
            core: $crate::core::Core<$hyper>,
        }

        impl $name {
            /// An optimizer over these groups; there may be none yet.
            ///
            /// # Errors
            ///
            /// [`Error::InvalidHyper`](crate::Error::InvalidHyper) and its like, and
            /// [`Error::DuplicateParam`](crate::Error::DuplicateParam).
            pub fn new(
                groups: impl IntoIterator<Item = $crate::ParamGroup<$hyper>>,
            ) -> $crate::Result<Self> {
                Ok(Self { core: $crate::core::Core::new(groups)? })
            }

            /// One group over tensors `0..count`.
            ///
            /// # Errors
            ///
            /// As [`new`](Self::new).
            pub fn with_one_group(hyper: $hyper, count: usize) -> $crate::Result<Self> {
                Self::new([$crate::ParamGroup::new(hyper, 0..count)])
            }

            /// Adds a group, at any time.
            ///
            /// # Errors
            ///
            /// As [`new`](Self::new); nothing is added then.
            pub fn add_param_group(
                &mut self,
                group: $crate::ParamGroup<$hyper>,
            ) -> $crate::Result<()> {
                self.core.add_param_group(group)
            }

            /// The groups.
            #[must_use]
            pub fn groups(&self) -> &[$crate::ParamGroup<$hyper>] {
                self.core.groups()
            }
        }

        impl $crate::Optimizer for $name {
            fn kind(&self) -> &'static str {
                <$hyper as $crate::core::Hyper>::KIND
            }

            fn step(
                &mut self,
                params: &mut [$crate::ParamMut<'_>],
                ctl: &$crate::StepCtl,
            ) -> $crate::Result<$crate::Applied> {
                self.core.step(params, ctl)
            }

            fn state_dict(&self) -> $crate::StateDict {
                self.core.state_dict()
            }

            fn load_state_dict(&mut self, dict: &$crate::StateDict) -> $crate::Result<()> {
                self.core.load_state_dict(dict)
            }

            fn group_count(&self) -> usize {
                self.core.groups().len()
            }

            fn lr(&self, group: usize) -> $crate::Result<f64> {
                self.core.lr(group)
            }

            fn set_lr(&mut self, group: usize, lr: f64) -> $crate::Result<()> {
                self.core.set_lr(group, lr)
            }
        }
    };
}
pub(crate) use optimizer;
