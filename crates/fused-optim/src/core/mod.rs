//! The optimizer core of every rule: parameter groups, argument checks, steps on the CPU, state
//! dicts.
//!
//! Invariant: every argument is checked before the first write, so an error never leaves a step
//! half done.

mod saved;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::cpu::pages::Pages;
use crate::cpu::plan::{Layout, share_count};
use crate::cpu::{BLOCK, Block, FirstSweep, GradMap, Piece, SLOTS, Scratch, SlotMut, step_key};
use crate::error::invalid;
use crate::names::{self, PARAMS};
use crate::rule::{Hyper, OwnClip, require};
use crate::state::{Slot, TensorState};
use crate::state_dict::{MASTER, STEP};
use crate::{
    Applied, DType, Ema, Error, FoundInf, Grad, HalfWeights, HyperParam, ParamGroup, ParamMut,
    ParamSpec, Result, Slice, SliceMut, StepCtl, cpu, norms, sweep,
};

/// An optimizer with the rule `H`.
#[derive(Clone, Debug)]
pub(crate) struct Core<H> {
    groups: Vec<ParamGroup<H>>,
    /// Tensors of all groups by index.
    tensors: Tensors,
    /// Number of tensors that a step must be given; `None` if it may be given tensors of no group.
    count: Option<usize>,
    /// Names and shapes of all tensors of a step; empty if not set.
    names: Vec<ParamSpec>,
    pub(crate) threads: usize,
    pub(crate) half_weights: HalfWeights,
    /// Whether to keep state in eight bits; not supported for rules by rows.
    pub(crate) eight_bits: bool,
    grad_norm: Option<f64>,
    /// Scratch memory of each thread.
    scratch: Vec<Scratch>,
}

type Tensors = BTreeMap<usize, Tensor>;

#[derive(Clone, Debug)]
struct Tensor {
    group: usize,
    /// Created in its first step.
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

    /// One group with all tensors.
    pub(crate) fn with_one_group(hyper: H, count: usize) -> Result<Self> {
        let core = Self::new([ParamGroup::new(hyper, 0..count)])?;
        Ok(Self { count: Some(count), ..core })
    }

    /// Core of an optimizer on a device, which keeps the state itself.
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
        check_names(group.hyper.slots(), &json_of(&group.hyper)?)?;
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

    /// Smallest number of tensors that a step must be given.
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

    /// Returns an error unless `got` is the number of the optimizer's tensors.
    pub(crate) fn check_count(&self, got: usize) -> Result<()> {
        let named = Some(self.names.len()).filter(|count| *count > 0);
        match named.or(self.count).filter(|expected| *expected != got) {
            Some(expected) => Err(Error::ParamCount { expected, got }),
            None => Ok(()),
        }
    }

    /// Returns an error if a tensor's number of elements is not that of its shape.
    pub(crate) fn check_shape(&self, index: usize, expected: usize) -> Result<()> {
        check_len(index, "shape", expected, self.named_count(index).unwrap_or(expected))
    }

    /// Number of elements by the tensor's shape; `None` if the shape is unknown.
    fn named_count(&self, index: usize) -> Option<usize> {
        self.names.get(index)?.count()
    }

    pub(crate) fn groups(&self) -> &[ParamGroup<H>] {
        &self.groups
    }

    /// Indices of the tensors of all groups, each with its group's index.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn members(&self) -> impl Iterator<Item = (usize, usize)> {
        self.tensors.iter().map(|(&index, tensor)| (index, tensor.group))
    }

    /// A tensor's hyper-parameters, and its state if it has taken a step.
    fn state_of(&self, index: usize) -> Result<(&H, Option<&TensorState>)> {
        let count = self.least_count();
        let tensor = self.tensors.get(&index).ok_or(Error::MissingParam { index, count })?;
        Ok((&self.groups[tensor.group].hyper, tensor.state.as_ref()))
    }

    /// Writes the weights for evaluation of a tensor, whose weight in training is `weight`, or its
    /// master.
    pub(crate) fn eval_weights(
        &self,
        index: usize,
        weight: Slice<'_>,
        output: &mut [f32],
    ) -> Result<()> {
        check_len(index, "evaluation weight", weight.len(), output.len())?;
        cpu::widen_into(weight, output);
        if !H::HAS_EVAL_WEIGHTS {
            return Ok(());
        }
        let (hyper, Some(state)) = self.state_of(index)? else { return Ok(()) };
        state.lengths().try_for_each(|got| check_len(index, "state", weight.len(), got))?;
        if let Some(master) = &state.master {
            output.copy_from_slice(master);
        }
        let slots: Vec<_> = state.slots.iter().map(Slot::values).collect();
        let slots: Vec<&[f32]> = slots.iter().map(|values| &**values).collect();
        hyper.to_eval_weights(output, &slots);
        Ok(())
    }

    /// Whether the state of a weight of this type has an f32 master.
    pub(crate) fn wants_master(&self, weight: DType) -> bool {
        weight != DType::F32 && self.half_weights == HalfWeights::Master
    }

    /// The clipping that each group's rule itself does.
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
        ctl.host_total_norm()?;
        let has_states = self.validate(params)?;
        let Some(scales) = self.scales(params, ctl)? else {
            return Ok(Applied::SkippedNonFinite);
        };
        let mut pages = if has_states { Pages::new(0) } else { self.pages(params) };
        // Distributing small tensors over threads costs more than updating them.
        let lengths = with_grad(&mut self.tensors, params).map(|(_, _, p)| p.weight.len());
        let threads = share_count(lengths, self.threads);
        let (groups, half_weights, eight_bits) = (&self.groups, self.half_weights, self.eight_bits);
        // Most tensors of a group have the same step count: compute its numbers once.
        let mut last = None;
        let tensors = with_grad(&mut self.tensors, params).enumerate();
        let work = tensors.filter_map(|(at, (index, t, p))| {
            let hyper = &groups[t.group].hyper;
            let weight = p.weight.as_slice();
            let new = || TensorState::new(hyper, weight, p.rows, eight_bits, &mut pages);
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
            if threads <= 1
                && H::one_sweep(&rule)
                && let Some(block) = short_block(state, p, map)
            {
                H::sweep(&rule, FirstSweep::default(), block);
                if let Some(Grad::Clear(grad)) = &mut p.grad {
                    grad.clear();
                }
                return None;
            }
            Some((rule, piece::<H>(index, state, p, map, half_weights)))
        });
        sweep::run::<H>(work, threads, &mut self.scratch);
        Ok(Applied::Applied)
    }

    /// Memory for the state of the tensors whose first step this is.
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

    /// Checks the gradients and computes their norms as `ctl` asks. Returns the factor of each
    /// gradient, or `None` if the step is skipped.
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

    /// Checks the tensors of a step. Returns whether each with a gradient has a state already.
    pub(crate) fn validate(&self, params: &[ParamMut<'_>]) -> Result<bool> {
        let mut has_states = true;
        for (&index, tensor) in &self.tensors {
            let count = params.len();
            let param = params.get(index).ok_or(Error::MissingParam { index, count })?;
            let expected = param.weight.len();
            self.check_shape(index, expected)?;
            let Some(grad) = &param.grad else { continue };
            check_len(index, "gradient", expected, grad.as_slice().len())?;
            if let Some(Ema { values, decay }) = &param.ema {
                check_len(index, "moving average", expected, values.len())?;
                require((0.0..=1.0).contains(decay), "ema decay", (*decay).into())?;
            }
            check_rows(index, expected, param.rows)?;
            has_states &= tensor.state.is_some();
            if let Some(state) = &tensor.state {
                let weight = param.weight.dtype();
                if state.master.is_some() && !self.wants_master(weight) {
                    return Err(Error::UnwantedMaster { index, weight });
                }
                let hyper = &self.groups[tensor.group].hyper;
                if H::BY_TENSOR && !state.fits(hyper, expected, param.rows) {
                    return Err(Error::StateShape { index });
                } else if !H::BY_TENSOR {
                    let mut lengths = state.lengths();
                    lengths.try_for_each(|got| check_len(index, "state", expected, got))?;
                }
            }
        }
        self.check_count(params.len())?;
        Ok(has_states)
    }
}

/// Tensors of all groups that have a gradient, by ascending index.
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

/// Returns an error unless a tensor beside a weight, `what`, has as many elements.
#[inline]
pub(crate) const fn check_len(
    index: usize,
    what: &'static str,
    expected: usize,
    got: usize,
) -> Result<()> {
    match got == expected {
        true => Ok(()),
        false => Err(Error::LengthMismatch { index, what, expected, got }),
    }
}

/// Returns an error unless a tensor is rows of equal length.
#[inline]
pub(crate) const fn check_rows(index: usize, count: usize, rows: usize) -> Result<()> {
    match rows == 0 || count.is_multiple_of(rows) {
        true => Ok(()),
        false => Err(Error::UnevenRows { index, count, rows }),
    }
}

/// A short tensor that is updated as it is, without a buffer or a moving average: a [`Piece`],
/// which threads share and sweeps split, would take longer to make than the update. `None` for any
/// other tensor.
#[inline]
fn short_block<'a>(
    state: &'a mut TensorState,
    param: &'a mut ParamMut<'_>,
    map: GradMap,
) -> Option<Block<'a>> {
    let SliceMut::F32(weight) = &mut param.weight else { return None };
    let Slice::F32(grad) = param.grad.as_ref()?.as_slice() else { return None };
    if weight.len() >= BLOCK || param.ema.is_some() {
        return None;
    }
    let mut slots: [&mut [f32]; SLOTS] = Default::default();
    for (view, slot) in slots.iter_mut().zip(&mut state.slots) {
        *view = slot.as_f32_mut()?;
    }
    Some(Block { map, cols: weight.len(), prefetch: false, param: weight, grad, slots })
}

/// A whole tensor as one piece.
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
        *view = slot.view(|| step_key(at as u64, index, state.step));
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

/// Hyper-parameters by name. Those of a user's [`ElementwiseRule`](crate::ElementwiseRule) may have
/// no names, which is an error when a group is added.
pub(crate) fn json_of<H: Hyper>(hyper: &H) -> Result<Map<String, Value>> {
    match serde_json::to_value(hyper) {
        Ok(Value::Object(json)) => Ok(json),
        Ok(_) => Err("not a struct with named fields".into()),
        Err(error) => Err(error.into()),
    }
    .map_err(|source| Error::Format { action: "save hyper-parameters that have no names", source })
}

/// Checks that the names of a user's [`ElementwiseRule`](crate::ElementwiseRule) are unique in a
/// state dict.
fn check_names(slots: &[&str], hyper: &Map<String, Value>) -> Result<()> {
    let mut names = vec![MASTER, STEP];
    for name in slots {
        if names.contains(name) {
            return Err(invalid(*name, "used twice, or reserved for state dicts"));
        }
        names.push(name);
    }
    match hyper.contains_key(PARAMS) {
        true => Err(invalid(PARAMS, "reserved for state dicts")),
        false => Ok(()),
    }
}
