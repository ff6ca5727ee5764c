//! One tensor's state: made at its first step, saved, checked and loaded.

use std::collections::BTreeMap;
use std::fmt;

use crate::rule::Hyper;
use crate::state_dict::MASTER;
use crate::{DType, Error, ParamState, Result, Slice, StateProblem, cpu};

/// The state of one tensor; all vectors have the tensor's length.
#[derive(Clone)]
pub(crate) struct TensorState {
    pub(crate) step: u64,
    /// The f32 value of a half weight; `None` if the weight is f32 or is to have none.
    pub(crate) master: Option<Vec<f32>>,
    /// In the order of the rule's slots.
    pub(crate) slots: Vec<Vec<f32>>,
}

impl TensorState {
    pub(crate) fn new<H: Hyper>(hyper: &H, count: usize) -> Self {
        let slot = |name: &&str| vec![hyper.initial(name); count];
        Self { step: 0, master: None, slots: hyper.slots().iter().map(slot).collect() }
    }

    /// Takes the master from the weight if there is none yet.
    pub(crate) fn ensure_master(&mut self, weight: Slice<'_>) {
        if weight.dtype() != DType::F32 && self.master.is_none() {
            self.master = Some(cpu::widen(weight));
        }
    }

    pub(crate) fn vectors(&self) -> impl Iterator<Item = &Vec<f32>> {
        self.slots.iter().chain(&self.master)
    }

    pub(crate) fn save(&self, slots: &[&str]) -> ParamState {
        let names = slots.iter().copied().map(String::from);
        let mut tensors: BTreeMap<_, _> = names.zip(self.slots.iter().cloned()).collect();
        tensors.extend(self.master.iter().map(|master| (MASTER.into(), master.clone())));
        ParamState { step: self.step, tensors }
    }

    /// Checks one tensor's saved state and takes it over; `count` is its length where known.
    pub(crate) fn load(
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

pub(crate) fn problem(key: String, problem: StateProblem) -> Error {
    Error::State { key, problem }
}
