//! What every rule shares: groups, the checked step, saving and loading.
//!
//! Invariant: everything a call could object to is looked at before the first write, so an error
//! leaves no half-done step behind.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::cpu::pages::Pages;
use crate::cpu::plan::{Layout, share_count};
use crate::cpu::{GradMap, Piece, SLOTS, Scratch, SlotMut, step_key};
use crate::names::{self, PARAMS};
use crate::param::rows;
use crate::rule::{Hyper, OwnClip};
use crate::state::{TensorState, problem};
use crate::state_dict::MASTER;
use crate::{
    Applied, DType, Ema, Error, FoundInf, Grad, HalfWeights, HyperParam, ParamGroup, ParamMut,
    ParamSpec, Result, StateDict, StateProblem, StepCtl, norms, sweep,
};

/// An optimizer of any rule.
#[derive(Clone, Debug)]
pub(crate) struct Core<H> {
    groups: Vec<ParamGroup<H>>,
    /// Every grouped tensor by its index.
    tensors: Tensors,
    /// How many tensors a step must be given, if it is to be given no others than the groups'.
    count: Option<usize>,
    /// Names and shapes of all tensors of a step; empty if unknown.
    names: Vec<ParamSpec>,
    pub(crate) threads: usize,
    pub(crate) half_weights: HalfWeights,
    /// Keep state in eight bits; not for rules by rows.
    pub(crate) eight_bits: bool,
    grad_norm: Option<f64>,
    /// Of each thread.
    scratch: Vec<Scratch>,
}

type Tensors = BTreeMap<usize, Tensor>;

#[derive(Clone, Debug)]
struct Tensor {
    group: usize,
    /// Made at its first step.
    state: Option<TensorState>,
}

impl<H: Hyper> Core<H> {
    pub(crate) fn new(groups: impl IntoIterator<Item = ParamGroup<H>>) -> Result<Self> {
        let mut core = Self {
            groups: Vec::new(),
            tensors: BTreeMap::new(),
            count: None,
            names: Vec::new(),
            threads: 1,
            half_weights: HalfWeights::default(),
            eight_bits: false,
            grad_norm: None,
            scratch: Vec::new(),
        };
        for group in groups {
            core.add_param_group(group)?;
        }
        Ok(core)
    }

    /// One group of all tensors that steps are given.
    pub(crate) fn with_one_group(hyper: H, count: usize) -> Result<Self> {
        let core = Self::new([ParamGroup::new(hyper, 0..count)])?;
        Ok(Self { count: Some(count), ..core })
    }

    /// For a device, which keeps state itself.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn on_device(
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        if matches!(half_weights, HalfWeights::Stochastic { .. }) {
            return Err(Error::Unsupported { what: "stochastic rounding" });
        }
        Ok(Self { half_weights, ..Self::new(groups)? })
    }

    pub(crate) fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        group.hyper.validate()?;
        json_of(&group.hyper)?;
        let mut added = BTreeMap::new();
        for &index in &group.params {
            let tensor = Tensor { group: self.groups.len(), state: None };
            if self.tensors.contains_key(&index) || added.insert(index, tensor).is_some() {
                return Err(Error::DuplicateParam { index });
            }
        }
        self.tensors.append(&mut added);
        self.groups.push(group);
        self.count = self.count.map(|count| count.max(self.least_count()));
        Ok(())
    }

    /// As many tensors as a step must at least be given.
    fn least_count(&self) -> usize {
        self.tensors.last_key_value().map_or(0, |(index, _)| index + 1)
    }

    pub(crate) fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()> {
        let (least, got) = (self.least_count(), params.len());
        if got < least || self.count.is_some_and(|count| count != got) {
            return Err(Error::ParamCount { expected: self.count.unwrap_or(least), got });
        }
        names::check_unique(params)?;
        self.names = params.to_vec();
        Ok(())
    }

    /// Refuses another number of tensors than the optimizer was told of.
    pub(crate) fn check_count(&self, got: usize) -> Result<()> {
        let named = Some(self.names.len()).filter(|count| *count > 0);
        match named.or(self.count).filter(|expected| *expected != got) {
            Some(expected) => Err(Error::ParamCount { expected, got }),
            None => Ok(()),
        }
    }

    /// Refuses a tensor of another length than its shape says.
    pub(crate) fn check_shape(&self, index: usize, expected: usize) -> Result<()> {
        match self.named_count(index).filter(|got| *got != expected) {
            Some(got) => Err(Error::LengthMismatch { index, what: "shape", expected, got }),
            None => Ok(()),
        }
    }

    /// A tensor's number of elements by its shape, where that is known.
    fn named_count(&self, index: usize) -> Option<usize> {
        self.names.get(index)?.count()
    }

    pub(crate) fn groups(&self) -> &[ParamGroup<H>] {
        &self.groups
    }

    /// Every grouped tensor: its index, and its group's.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn members(&self) -> impl Iterator<Item = (usize, usize)> {
        self.tensors.iter().map(|(&index, tensor)| (index, tensor.group))
    }

    /// A tensor's hyper-parameters, and its state if it has taken a step.
    pub(crate) fn state_of(&self, index: usize) -> Result<(&H, Option<&TensorState>)> {
        let count = self.least_count();
        let tensor = self.tensors.get(&index).ok_or(Error::MissingParam { index, count })?;
        Ok((&self.groups[tensor.group].hyper, tensor.state.as_ref()))
    }

    /// Whether the state of a weight of this type has an f32 master.
    pub(crate) fn wants_master(&self, weight: DType) -> bool {
        weight != DType::F32 && self.half_weights == HalfWeights::Master
    }

    /// What each group's rule does to gradients of large norm.
    pub(crate) fn own_clips(&self) -> Vec<OwnClip> {
        self.groups.iter().map(|group| group.hyper.own_clip()).collect()
    }

    pub(crate) const fn grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }

    pub(crate) fn hyper_param(&self, group: usize, param: HyperParam) -> Result<Option<f64>> {
        Ok(self.group(group)?.hyper.clone().param_mut(param).copied())
    }

    pub(crate) fn set_hyper_param(
        &mut self,
        group: usize,
        param: HyperParam,
        value: f64,
    ) -> Result<()> {
        let old = &self.group(group)?.hyper;
        let mut new = old.clone();
        let place = new.param_mut(param).ok_or(Error::NoHyperParam { kind: H::KIND, param })?;
        *place = value;
        new.validate()?;
        if new.slots() != old.slots() {
            return Err(Error::MomentumFromZero { value });
        }
        self.groups[group].hyper = new;
        Ok(())
    }

    pub(crate) fn refresh_masters(&mut self) {
        let states = self.tensors.values_mut().filter_map(|tensor| tensor.state.as_mut());
        states.for_each(|state| state.master = None);
    }

    fn group(&self, group: usize) -> Result<&ParamGroup<H>> {
        let count = self.groups.len();
        self.groups.get(group).ok_or(Error::NoSuchGroup { group, count })
    }

    pub(crate) fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        let ctl = &ctl.validated()?;
        self.validate(params)?;
        let Some(scales) = self.scales(params, ctl)? else {
            return Ok(Applied::SkippedNonFinite);
        };
        let mut pages = self.pages(params);
        // To make a list of tensors and deal them out costs more than to sweep small ones.
        let lengths = with_grad(&mut self.tensors, params).map(|(_, _, p)| p.weight.len());
        let threads = share_count(lengths, self.threads);
        let (groups, half_weights, eight_bits) = (&self.groups, self.half_weights, self.eight_bits);
        // Most tensors of a group are at one step: its numbers are computed once.
        let mut last = None;
        let work = with_grad(&mut self.tensors, params).enumerate().map(|(at, (index, t, p))| {
            let hyper = &groups[t.group].hyper;
            let weight = p.weight.as_slice();
            let new = || TensorState::beside(hyper, weight, p.rows, eight_bits, &mut pages);
            let state = t.state.get_or_insert_with(new);
            if half_weights == HalfWeights::Master {
                state.ensure_master(weight, &mut pages);
            }
            state.step += 1;
            let key = (t.group, state.step, p.rows);
            let rule = match last {
                Some((of, rule)) if of == key => rule,
                _ => hyper.rule(state.step, p.rows),
            };
            last = Some((key, rule));
            let map = scales.map(at, ctl.limit(), hyper.maximize());
            (rule, piece::<H>(index, state, p, map, half_weights))
        });
        sweep::run::<H>(work, threads, &mut self.scratch);
        Ok(Applied::Applied)
    }

    /// Memory for the state of those tensors whose first step this is.
    fn pages(&mut self, params: &mut [ParamMut<'_>]) -> Pages {
        let (groups, masters) = (&self.groups, self.half_weights == HalfWeights::Master);
        let new =
            with_grad(&mut self.tensors, params).filter(|(_, tensor, _)| tensor.state.is_none());
        let room = new.map(|(_, tensor, param)| {
            let (hyper, count) = (&groups[tensor.group].hyper, param.weight.len());
            let slots = 0..if self.eight_bits { 0 } else { hyper.slots().len() };
            let master = masters && param.weight.dtype() != DType::F32;
            let lengths = slots.map(|slot| hyper.slot_len(slot, count, param.rows));
            TensorState::room(lengths.chain(master.then_some(count)))
        });
        Pages::new(room.fold(0, usize::saturating_add))
    }

    /// Looks at the gradients as far as it is asked for: what each is to be multiplied by, or
    /// nothing if the step is to be skipped.
    fn scales(
        &mut self,
        params: &mut [ParamMut<'_>],
        ctl: &StepCtl,
    ) -> Result<Option<norms::Scales>> {
        if ctl.found_inf == FoundInf::Known(true) {
            return Ok(None);
        }
        let (mut grads, mut groups) = (Vec::new(), Vec::new());
        let own = self.own_clips();
        if norms::needed(ctl, &own) {
            for (_, tensor, param) in with_grad(&mut self.tensors, params) {
                grads.extend(param.grad.as_ref().map(Grad::as_slice));
                groups.push(tensor.group);
            }
        }
        let found = norms::grad_scales(&grads, &groups, &own, ctl, self.threads)?;
        if let Some((_, Some(norm))) = &found {
            self.grad_norm = Some(*norm);
        }
        Ok(found.map(|(scales, _)| scales))
    }

    pub(crate) fn validate(&self, params: &[ParamMut<'_>]) -> Result<()> {
        for (&index, tensor) in &self.tensors {
            let count = params.len();
            let param = params.get(index).ok_or(Error::MissingParam { index, count })?;
            let expected = param.weight.len();
            self.check_shape(index, expected)?;
            let Some(grad) = &param.grad else { continue };
            let same_length = |what, got| {
                let mismatch = Error::LengthMismatch { index, what, expected, got };
                if got == expected { Ok(()) } else { Err(mismatch) }
            };
            same_length("gradient", grad.as_slice().len())?;
            if let Some(Ema { values, decay }) = &param.ema {
                same_length("moving average", values.len())?;
                if !(0.0..=1.0).contains(decay) {
                    return Err(Error::InvalidHyper { name: "ema decay", value: (*decay).into() });
                }
            }
            if param.rows != 0 && !expected.is_multiple_of(param.rows) {
                return Err(Error::UnevenRows { index, count: expected, rows: param.rows });
            }
            if let Some(state) = &tensor.state {
                let weight = param.weight.dtype();
                if state.master.is_some() && !self.wants_master(weight) {
                    return Err(Error::UnwantedMaster { index, weight });
                }
                let hyper = &self.groups[tensor.group].hyper;
                if H::BY_TENSOR && !state.fits(hyper, expected, param.rows) {
                    return Err(Error::StateShape { index });
                } else if !H::BY_TENSOR {
                    state.lengths().try_for_each(|length| same_length("state", length))?;
                }
            }
        }
        self.check_count(params.len())
    }

    pub(crate) fn state_dict(&self) -> StateDict {
        let groups = self.groups.iter().map(group_to_json).collect();
        let state = self.tensors.iter().filter_map(|(&index, tensor)| {
            let hyper = &self.groups[tensor.group].hyper;
            tensor.state.as_ref().map(|state| (index, state.save(hyper)))
        });
        let named = self.tensors.keys().filter_map(|&index| Some((index, self.names.get(index)?)));
        StateDict {
            kind: H::KIND.into(),
            param_groups: Value::Array(groups).to_string(),
            state: state.collect(),
            params: named.map(|(index, param)| (index, param.clone())).collect(),
        }
    }

    /// The same with state that is on a device.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn state_dict_with(
        &self,
        states: impl IntoIterator<Item = (usize, TensorState)>,
    ) -> StateDict {
        let mut core = self.clone();
        for (index, state) in states {
            core.tensors.entry(index).and_modify(|tensor| tensor.state = Some(state));
        }
        core.state_dict()
    }

    /// A state dict of this rule, with the tensors at this optimizer's places.
    fn matched<'a>(&self, dict: &'a StateDict) -> Result<Cow<'a, StateDict>> {
        if dict.kind != H::KIND {
            return Err(Error::WrongKind { expected: H::KIND, got: dict.kind.clone() });
        }
        let groups: Vec<_> = self.groups.iter().map(|group| &*group.params).collect();
        names::matched(dict, &self.names, &groups)
    }

    pub(crate) fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        let known = |index| self.tensors[&index].state.as_ref()?.lengths().next();
        (self.groups, self.tensors) = self.loaded(dict, known)?;
        Ok(())
    }

    /// What an optimizer on a device is after a load, and the states for it to keep. `known` is the length of a
    /// tensor, where the device knows it.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn load_for_device(
        &self,
        dict: &StateDict,
        known: impl Fn(usize) -> Option<usize>,
    ) -> Result<(Self, BTreeMap<usize, TensorState>)> {
        let (groups, mut tensors) = self.loaded(dict, known)?;
        let take = |(index, tensor): (&usize, &mut Tensor)| Some((*index, tensor.state.take()?));
        let states = tensors.iter_mut().filter_map(take).collect();
        Ok((Self { groups, tensors, ..self.clone() }, states))
    }

    fn loaded(
        &self,
        dict: &StateDict,
        known: impl Fn(usize) -> Option<usize>,
    ) -> Result<(Vec<ParamGroup<H>>, Tensors)> {
        let dict = &*self.matched(dict)?;
        let groups = self.groups_from_json(dict)?;
        if let Some(index) = dict.state.keys().find(|index| !self.tensors.contains_key(index)) {
            return Err(problem(format!("state.{index}"), StateProblem::Unknown));
        }
        let room = dict.state.values().map(|saved| {
            let kept = saved.tensors.iter().filter(|(name, _)| !self.eight_bits || *name == MASTER);
            TensorState::room(kept.map(|(_, values)| values.len()))
        });
        let mut pages = Pages::new(room.fold(0, usize::saturating_add));
        let load = |(&index, tensor): (&usize, &Tensor)| {
            let known = known(index).or_else(|| self.named_count(index));
            let hyper = &groups[tensor.group].hyper;
            let state = dict.state.get(&index).map(|saved| {
                TensorState::load(index, saved, hyper, known, self.eight_bits, &mut pages)
            });
            let state = state.transpose()?;
            let shape = self.names.get(index).and_then(|param| param.shape.as_deref());
            if let (Some(state), Some(shape), true) = (&state, shape, H::BY_TENSOR)
                && !state.fits(hyper, shape.iter().product(), rows(shape))
            {
                let text = format!("not of shape {shape:?}");
                return Err(problem(format!("state.{index}"), StateProblem::Invalid(text)));
            }
            Ok((index, Tensor { group: tensor.group, state }))
        };
        let tensors = self.tensors.iter().map(load).collect::<Result<_>>()?;
        Ok((groups, tensors))
    }

    /// The saved groups, if they are over the tensors of this optimizer's.
    fn groups_from_json(&self, dict: &StateDict) -> Result<Vec<ParamGroup<H>>> {
        let saved = names::parse_groups(&dict.param_groups)?;
        if saved.len() != self.groups.len() {
            let text = format!("expected {} groups, got {}", self.groups.len(), saved.len());
            return Err(problem("param_groups", StateProblem::Invalid(text)));
        }
        let groups = saved.into_iter().zip(&self.groups).enumerate();
        groups.map(|(at, (saved, own))| group_from_json(at, saved, own)).collect()
    }
}

/// Every grouped tensor that has a gradient, by ascending index.
fn with_grad<'t, 'p, 'a>(
    tensors: &'t mut Tensors,
    params: &'p mut [ParamMut<'a>],
) -> impl Iterator<Item = (usize, &'t mut Tensor, &'p mut ParamMut<'a>)> {
    let mut rest = params.iter_mut().enumerate();
    let all = tensors.iter_mut().map(move |(&index, tensor)| {
        let param = rest.find(|(at, _)| *at == index).expect("`validate` found every index");
        (index, tensor, param.1)
    });
    all.filter(|(_, _, param)| param.grad.is_some())
}

/// All of a tensor.
fn piece<'a, H: Hyper>(
    index: usize,
    state: &'a mut TensorState,
    param: &'a mut ParamMut<'_>,
    map: GradMap,
    half_weights: HalfWeights,
) -> Piece<'a> {
    let rounding = match half_weights {
        HalfWeights::Stochastic { seed } => Some(step_key(seed, index, state.step)),
        _ => None,
    };
    let layout = Layout::new(param.weight.len(), if H::BY_ROWS { param.rows } else { 0 });
    let mut slots: [SlotMut<'_>; SLOTS] = Default::default();
    for (at, (view, slot)) in slots.iter_mut().zip(&mut state.slots).enumerate() {
        *view = slot.view(step_key(at as u64, index, state.step));
    }
    Piece {
        layout,
        blocks: 0..layout.blocks(),
        start: 0,
        map,
        weight: param.weight.reborrow(),
        master: state.master.as_deref_mut(),
        rounding,
        grad: match param.grad.as_mut().expect("`with_grad` passes none without") {
            Grad::Keep(grad) => Grad::Keep(*grad),
            Grad::Clear(grad) => Grad::Clear(grad.reborrow()),
        },
        slots,
        ema: param.ema.as_mut().map(|Ema { values, decay }| Ema { values, decay: *decay }),
    }
}

/// PyTorch's layout: hyper-parameters and `params` side by side.
fn group_to_json<H: Hyper>(group: &ParamGroup<H>) -> Value {
    let mut json = json_of(&group.hyper).unwrap_or_default();
    json.insert(PARAMS.to_owned(), group.params.clone().into());
    json.into()
}

/// Hyper-parameters by name. A rule of a program's own may have none, which is an error where its group is added.
pub(crate) fn json_of<H: Hyper>(hyper: &H) -> Result<Map<String, Value>> {
    match serde_json::to_value(hyper) {
        Ok(Value::Object(json)) => Ok(json),
        Ok(_) => Err("not a struct with named fields".into()),
        Err(error) => Err(error.into()),
    }
    .map_err(|source| Error::Format { action: "save hyper-parameters that have no names", source })
}

fn group_from_json<H: Hyper>(
    at: usize,
    mut saved: Value,
    own: &ParamGroup<H>,
) -> Result<ParamGroup<H>> {
    let key = format!("param_groups[{at}]");
    let invalid = |text: String| problem(&*key, StateProblem::Invalid(text));
    let params = saved.as_object_mut().and_then(|group| group.remove(PARAMS));
    if params != Some(own.params.clone().into()) {
        return Err(invalid(format!("params are not {:?}", own.params)));
    }
    let hyper = H::deserialize(&saved).map_err(|error| invalid(error.to_string()))?;
    // What is missing would be read as the default; a saved group has all.
    if let Some(key) = json_of(&own.hyper)?.keys().find(|key| saved.get(key).is_none()) {
        return Err(invalid(format!("missing field `{key}`")));
    }
    hyper.validate().map_err(|error| invalid(error.to_string()))?;
    Ok(ParamGroup { hyper, params: own.params.clone() })
}
