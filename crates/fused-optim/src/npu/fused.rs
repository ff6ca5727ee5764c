//! `NpuOptimizer`: flat buffers, steps, state dicts.

use std::collections::BTreeMap;

use npu_sys::safe::{Operators, View};
use npu_sys::sys::AclDataType;

use super::NpuParam;
use super::flat::{self, Entry, Kind, Span};
use super::grad_scales::GradScales;
use super::numbers::{acl, bytes, floats};
use super::rules::NpuHyper;
use super::sequence::{Op, Reg};
use crate::core::{Core, check_len, check_rows};
use crate::state::TensorState;
use crate::{
    Applied, DType, Error, FoundInf, HalfWeights, HyperParam, ParamGroup, ParamSpec, Result, Slice,
    StateDict, StepCtl,
};

/// An optimizer whose weights, gradients and state are on an Ascend NPU; `H` is the rule's
/// hyper-parameters, for example [`AdamWHyper`](crate::AdamWHyper).
///
/// Stochastic rounding, norms other than the 2-norm and `error_if_nonfinite` are
/// [`Error::Unsupported`], and so is bf16 on chips that do not compute in it.
#[derive(Debug)]
pub struct NpuOptimizer<H> {
    pub(super) on: Operators,
    pub(super) core: Core<H>,
    pub(super) flats: Vec<Flat>,
    /// State of tensors that are not in a buffer yet.
    pending: BTreeMap<usize, TensorState>,
    pub(super) scratch: Scratch,
    pub(super) norm: Option<View>,
    pub(super) kernels: bool,
}

/// The flat buffers of the tensors of one kind.
#[derive(Debug)]
pub(super) struct Flat {
    pub(super) kind: Kind,
    pub(super) entries: Vec<Entry>,
    pub(super) weight: View,
    pub(super) grad: View,
    pub(super) slots: Vec<View>,
    pub(super) master: Option<View>,
    /// Directions, for rules that need sums over whole tensors.
    direction: Option<View>,
    /// Copies of the slots, to restore if the step is skipped.
    pub(super) saved: Vec<View>,
}

impl Flat {
    /// The slots, then the masters.
    fn vectors(&self) -> impl Iterator<Item = &View> {
        self.slots.iter().chain(&self.master)
    }
}

/// Scratch memory for a step in f32, each as long as the longest flat buffer.
#[derive(Debug)]
pub(super) struct Scratch {
    /// The scaled and clipped gradient.
    pub(super) g: View,
    pub(super) t: View,
    d: View,
    u: View,
    /// Half weights without masters, in f32.
    p: View,
    /// Number of previous steps, for CANN's fused kernels.
    pub(super) step: View,
    pub(super) zero: View,
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: NpuHyper> NpuOptimizer<H> {
    /// An optimizer over these groups, in the stream of `on`.
    ///
    /// # Errors
    ///
    /// As [`AdamW::new`](crate::AdamW::new); [`Error::Unsupported`] for stochastic rounding;
    /// [`Error::Npu`].
    pub fn new(
        on: Operators,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        let core = Core::on_device(groups, half_weights)?;
        let scratch = Scratch::new(&on, 0)?;
        let (flats, pending) = (Vec::new(), BTreeMap::new());
        Ok(Self { on, core, flats, pending, scratch, norm: None, kernels: true })
    }

    /// Sets whether to use CANN's [fused kernels](super#fused-kernels-of-cann) where CANN, the chip
    /// and the hyper-parameters allow; by default they are used.
    #[must_use]
    pub const fn with_kernels(mut self, used: bool) -> Self {
        self.kernels = used;
        self
    }

    /// Creates flat buffers for these tensors, which are identified by their index in the list.
    /// Weights and gradients are zero; state of earlier steps and loaded state are kept.
    ///
    /// # Errors
    ///
    /// [`Error::MissingParam`], [`Error::UnevenRows`], [`Error::LengthMismatch`],
    /// [`Error::UnwantedMaster`], [`Error::Unsupported`]: nothing is changed then. [`Error::Npu`].
    pub fn combine(&mut self, params: &[NpuParam]) -> Result<()> {
        self.validate(params)?;
        for (index, state) in self.states()? {
            self.pending.insert(index, state);
        }
        let mut kinds: BTreeMap<Kind, Vec<(usize, usize, usize)>> = BTreeMap::new();
        for (index, group) in self.core.members() {
            let NpuParam { count, rows, weight, grad } = params[index];
            let kind = Kind { group, weight, grad };
            kinds.entry(kind).or_default().push((index, count, rows));
        }
        let flats = kinds.into_iter().map(|(kind, tensors)| self.flat(kind, tensors));
        let flats = flats.collect::<Result<Vec<_>>>()?;
        let most = flats.iter().map(|flat| flat.weight.count()).max().unwrap_or(0);
        self.scratch = Scratch::new(&self.on, most)?;
        self.flats = flats;
        self.send_pending()
    }

    fn validate(&self, params: &[NpuParam]) -> Result<()> {
        let bf16 = self.on.soc().is_second_generation();
        for (index, _) in self.core.members() {
            let count = params.len();
            let param = params.get(index).ok_or(Error::MissingParam { index, count })?;
            let (count, rows) = (param.count, param.rows);
            self.core.check_shape(index, count)?;
            check_rows(index, count, rows)?;
            if !bf16 && [param.weight, param.grad].contains(&DType::Bf16) {
                return Err(Error::Unsupported { what: "bf16 on this chip" });
            }
            let combined = self.entry(index).map(|(flat, entry)| {
                let has_master = entry.has_master && self.flats[flat].master.is_some();
                (Some(entry.count), has_master && entry.step > 0)
            });
            let pending = self.pending.get(&index);
            let pending = pending.map(|state| (state.lengths().next(), state.master.is_some()));
            let (known, master) = pending.or(combined).unwrap_or_default();
            check_len(index, "state", count, known.unwrap_or(count))?;
            if master && !self.core.wants_master(param.weight) {
                return Err(Error::UnwantedMaster { index, weight: param.weight });
            }
        }
        self.core.check_count(params.len())
    }

    fn flat(&self, kind: Kind, tensors: Vec<(usize, usize, usize)>) -> Result<Flat> {
        let hyper = &self.core.groups()[kind.group].hyper;
        let entries = flat::entries(tensors);
        let len = flat::buffer_len(&entries);
        let filled = |dtype: DType, value: f32| -> Result<View> {
            let view = self.on.alloc(len, acl(dtype))?;
            match value {
                0.0 => self.on.zero(&view)?,
                value => self.on.fill(&view, value)?,
            }
            Ok(view)
        };
        let slots = hyper.slots().iter().map(|slot| filled(DType::F32, hyper.initial(slot)));
        Ok(Flat {
            kind,
            weight: filled(kind.weight, 0.0)?,
            grad: filled(kind.grad, 0.0)?,
            slots: slots.collect::<Result<_>>()?,
            master: self
                .core
                .wants_master(kind.weight)
                .then(|| filled(DType::F32, 0.0))
                .transpose()?,
            direction: H::TWO_SWEEPS.then(|| filled(DType::F32, 0.0)).transpose()?,
            saved: Vec::new(),
            entries,
        })
    }

    fn entry(&self, index: usize) -> Option<(usize, &Entry)> {
        self.flats.iter().enumerate().find_map(|(at, flat)| {
            Some((at, flat.entries.iter().find(|entry| entry.index == index)?))
        })
    }

    fn view_of(&self, index: usize, of: impl Fn(&Flat) -> &View) -> Result<View> {
        let (flat, entry) = self.entry(index).ok_or(Error::MissingParam { index, count: 0 })?;
        Ok(of(&self.flats[flat]).part(entry.start, entry.count)?)
    }

    /// View of a tensor's weight.
    ///
    /// # Errors
    ///
    /// [`Error::MissingParam`] for a tensor that is not combined.
    pub fn weight(&self, index: usize) -> Result<View> {
        self.view_of(index, |flat| &flat.weight)
    }

    /// View of a tensor's gradient.
    ///
    /// # Errors
    ///
    /// As [`weight`](Self::weight).
    pub fn grad(&self, index: usize) -> Result<View> {
        self.view_of(index, |flat| &flat.grad)
    }

    /// Copies a weight from the host. If the tensor has a master, call
    /// [`refresh_masters`](Self::refresh_masters) after this.
    ///
    /// # Errors
    ///
    /// As [`weight`](Self::weight); [`Error::LengthMismatch`]; [`Error::Unsupported`] for another
    /// type than the weight's; [`Error::Npu`].
    pub fn write_weight(&mut self, index: usize, values: Slice<'_>) -> Result<()> {
        self.write(index, &self.weight(index)?, values)
    }

    /// Copies a gradient from the host.
    ///
    /// # Errors
    ///
    /// As [`write_weight`](Self::write_weight).
    pub fn write_grad(&mut self, index: usize, values: Slice<'_>) -> Result<()> {
        self.write(index, &self.grad(index)?, values)
    }

    fn write(&self, index: usize, to: &View, values: Slice<'_>) -> Result<()> {
        check_len(index, "content", to.count(), values.len())?;
        if acl(values.dtype()) != to.dtype() {
            return Err(Error::Unsupported { what: "a copy between element types" });
        }
        Ok(self.on.write(to, bytes(values))?)
    }

    /// A weight, in f32. Waits for the device.
    ///
    /// # Errors
    ///
    /// As [`weight`](Self::weight), and [`Error::Npu`].
    pub fn read_weight(&self, index: usize) -> Result<Vec<f32>> {
        let from = self.weight(index)?;
        let bytes = self.on.read(&from)?;
        Ok(floats(&bytes, from.dtype()))
    }

    /// Updates every tensor that has a gradient, `has_grad` by index, in the stream. Waits for
    /// the device only to check gradients, and if the rule needs sums over whole tensors.
    ///
    /// The norm for BertAdam's own clipping is over the group's tensors that have a gradient.
    ///
    /// # Errors
    ///
    /// [`Error::MissingParam`], an invalid `ctl`, [`Error::Unsupported`], [`Error::CalledBefore`]
    /// [`combine`](Self::combine): nothing is changed then. [`Error::Npu`]: weights and state may
    /// be half updated.
    pub fn step(&mut self, has_grad: &[bool], ctl: &StepCtl) -> Result<Applied> {
        let ctl = &ctl.validated()?;
        ctl.max_norm_on_device()?;
        ctl.host_total_norm()?;
        let combined = self.flats.iter().flat_map(|flat| &flat.entries);
        let last = combined.map(|entry| entry.index).max().unwrap_or(0);
        if self.core.members().any(|(index, _)| self.entry(index).is_none()) {
            return Err(Error::CalledBefore { call: "step", needed: "combine" });
        }
        if last >= has_grad.len() && self.core.members().next().is_some() {
            return Err(Error::MissingParam { index: last, count: has_grad.len() });
        }
        if ctl.found_inf == FoundInf::Known(true) {
            return Ok(Applied::SkippedNonFinite);
        }
        let flats = self.flats.iter().enumerate();
        let spans = flats.flat_map(|(at, flat)| flat::spans(at, &flat.entries, |i| has_grad[i]));
        let spans: Vec<Span> = spans.filter(|span| span.count > 0).collect();
        let scales = self.grad_scales(&spans, ctl)?;
        if H::TWO_SWEEPS {
            if !self.step_tensors(&spans, &scales)? {
                return Ok(Applied::SkippedNonFinite);
            }
        } else {
            if self.found_inf(&scales)? {
                return Ok(Applied::SkippedNonFinite);
            }
            spans.iter().try_for_each(|span| self.step_span(span, &scales))?;
        }
        for flat in &mut self.flats {
            for entry in flat.entries.iter_mut().filter(|entry| has_grad[entry.index]) {
                entry.step += 1;
                entry.has_master = true;
            }
        }
        Ok(Applied::Applied)
    }

    /// The step of a span, for element-wise rules.
    fn step_span(&self, span: &Span, scales: &GradScales) -> Result<()> {
        let grad = self.gradient(span, scales)?;
        self.widen(span)?;
        if !self.step_native(span, &grad)? {
            self.sequence(span, &grad)?;
        }
        self.narrow(span)
    }

    /// Launches the rule's operators on a span.
    pub(super) fn sequence(&self, span: &Span, grad: &View) -> Result<()> {
        let hyper = &self.core.groups()[self.flats[span.flat].kind.group].hyper;
        let mut ops = Vec::new();
        hyper.sequence(span.step, &mut ops);
        self.launch(&ops, span, grad)
    }

    /// Launches operators on a span.
    pub(super) fn launch(&self, ops: &[Op], span: &Span, grad: &View) -> Result<()> {
        let launch = |op: &Op| op.launch(&self.on, |reg| self.register(span, grad, reg));
        Ok(ops.iter().try_for_each(launch)?)
    }

    /// View of a register for a span.
    pub(super) fn register(&self, span: &Span, grad: &View, reg: Reg) -> npu_sys::Result<View> {
        let flat = &self.flats[span.flat];
        let of_span = |view: &View| view.part(span.start, span.count);
        let of_step = |view: &View| view.part(0, span.count);
        match reg {
            Reg::P => self.parameters(span),
            Reg::G => Ok(grad.clone()),
            Reg::S(slot) => of_span(&flat.slots[slot]),
            Reg::T => of_step(&self.scratch.t),
            Reg::D => of_step(&self.scratch.d),
            Reg::U => flat.direction.as_ref().map_or_else(|| of_step(&self.scratch.u), of_span),
            Reg::Zero => Ok(self.scratch.zero.clone()),
        }
    }

    /// A span's parameters in f32: the weights, their masters, or scratch memory with converted
    /// weights.
    pub(super) fn parameters(&self, span: &Span) -> npu_sys::Result<View> {
        let flat = &self.flats[span.flat];
        match &flat.master {
            Some(master) => master.part(span.start, span.count),
            None if flat.kind.weight == DType::F32 => flat.weight.part(span.start, span.count),
            None => self.scratch.p.part(0, span.count),
        }
    }

    /// Converts half weights to f32: once for those with a master, in each step for others.
    pub(super) fn widen(&self, span: &Span) -> Result<()> {
        let flat = &self.flats[span.flat];
        let Some(master) = &flat.master else {
            if flat.kind.weight != DType::F32 {
                let weight = flat.weight.part(span.start, span.count)?;
                self.on.cast(&self.parameters(span)?, &weight)?;
            }
            return Ok(());
        };
        let entries = &flat.entries[span.entries.clone()];
        if entries.iter().all(|entry| !entry.has_master) {
            let weight = flat.weight.part(span.start, span.count)?;
            return Ok(self.on.cast(&self.parameters(span)?, &weight)?);
        }
        for entry in entries.iter().filter(|entry| !entry.has_master) {
            let part = |view: &View| view.part(entry.start, entry.count);
            self.on.cast(&part(master)?, &part(&flat.weight)?)?;
        }
        Ok(())
    }

    /// Rounds the f32 parameters to half weights.
    pub(super) fn narrow(&self, span: &Span) -> Result<()> {
        let flat = &self.flats[span.flat];
        if flat.kind.weight != DType::F32 {
            let weight = flat.weight.part(span.start, span.count)?;
            self.on.cast(&weight, &self.parameters(span)?)?;
        }
        Ok(())
    }

    /// A span's gradients, without scaling.
    pub(super) fn raw_gradient(&self, span: &Span) -> npu_sys::Result<View> {
        self.flats[span.flat].grad.part(span.start, span.count)
    }

    /// Norm of all unscaled gradients, before clipping, of the last step that clipped by norm.
    /// Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Npu`].
    pub fn grad_norm(&self) -> Result<Option<f64>> {
        let Some(norm) = &self.norm else { return Ok(None) };
        Ok(floats(&self.on.read(norm)?, norm.dtype()).first().map(|norm| f64::from(*norm)))
    }

    /// State of the tensors in the buffers that have taken a step.
    fn states(&self) -> Result<Vec<(usize, TensorState)>> {
        let mut states = Vec::new();
        for flat in &self.flats {
            for entry in flat.entries.iter().filter(|entry| entry.step > 0) {
                let read = |at: usize| {
                    let view = flat.vectors().nth(at).expect("a view of each slot and the master");
                    let bytes = self.on.read(&view.part(entry.start, entry.count)?)?;
                    Ok(floats(&bytes, AclDataType::FLOAT))
                };
                let master = flat.master.is_some() && entry.has_master;
                let state = TensorState::read(entry.step, flat.slots.len(), master, read)?;
                states.push((entry.index, state));
            }
        }
        Ok(states)
    }

    /// Copies loaded state to the buffers; tensors without state keep their initial state.
    fn send_pending(&mut self) -> Result<()> {
        for flat in &mut self.flats {
            let vectors: Vec<View> = flat.vectors().cloned().collect();
            for entry in &mut flat.entries {
                let Some(state) = self.pending.remove(&entry.index) else { continue };
                for (values, view) in state.vectors().zip(&vectors) {
                    let to = view.part(entry.start, entry.count)?;
                    self.on.write(&to, bytes(Slice::F32(values)))?;
                }
                entry.step = state.step;
                entry.has_master = state.master.is_some();
            }
        }
        Ok(())
    }

    /// As [`Optimizer::state_dict`](crate::Optimizer::state_dict), with the same keys. Waits for
    /// the device.
    ///
    /// # Errors
    ///
    /// [`Error::Npu`].
    pub fn state_dict(&self) -> Result<StateDict> {
        let pending = self.pending.iter().map(|(index, state)| (*index, state.clone()));
        Ok(self.core.state_dict_with(pending.chain(self.states()?)))
    }

    /// As [`Optimizer::set_param_names`](crate::Optimizer::set_param_names), in the order of
    /// [`combine`](Self::combine).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()> {
        self.core.set_param_names(params)
    }

    /// As [`Optimizer::load_state_dict`](crate::Optimizer::load_state_dict), before or after
    /// [`combine`](Self::combine). A state dict contains no weights other than masters.
    ///
    /// # Errors
    ///
    /// As there; this optimizer is then unchanged. [`Error::Npu`].
    pub fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        let known = |index| Some(self.entry(index)?.1.count);
        let (core, pending) = self.core.load_for_device(dict, known)?;
        for (&index, _) in pending.iter().filter(|(_, state)| state.master.is_some()) {
            let weight = self.entry(index).map(|(flat, _)| self.flats[flat].kind.weight);
            if let Some(weight) = weight.filter(|weight| !core.wants_master(*weight)) {
                return Err(Error::UnwantedMaster { index, weight });
            }
        }
        let missing_slots = |flat: &Flat| {
            let slots = flat.slots.len()..core.groups()[flat.kind.group].hyper.slots().len();
            slots.map(|_| self.on.alloc(flat.weight.count(), AclDataType::FLOAT)).collect()
        };
        let missing = self.flats.iter().map(missing_slots).collect::<npu_sys::Result<Vec<_>>>()?;
        (self.core, self.pending) = (core, pending);
        for (flat, missing) in self.flats.iter_mut().zip::<Vec<Vec<_>>>(missing) {
            let hyper = &self.core.groups()[flat.kind.group].hyper;
            flat.slots.extend(missing);
            flat.slots.truncate(hyper.slots().len());
            for (slot, view) in hyper.slots().iter().zip(&flat.slots) {
                self.on.fill(view, hyper.initial(slot))?;
            }
            for entry in &mut flat.entries {
                (entry.step, entry.has_master) = (0, false);
            }
        }
        self.send_pending()
    }

    /// The groups.
    #[must_use]
    pub fn groups(&self) -> &[ParamGroup<H>] {
        self.core.groups()
    }

    /// Adds a group. Call [`combine`](Self::combine) with its tensors before the next step.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        self.core.add_param_group(group)
    }

    /// As [`Optimizer::set_hyper_param`](crate::Optimizer::set_hyper_param).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()> {
        self.core.set_hyper_param(group, param, value)
    }

    /// As [`Optimizer::refresh_masters`](crate::Optimizer::refresh_masters).
    pub fn refresh_masters(&mut self) {
        let entries = self.flats.iter_mut().flat_map(|flat| &mut flat.entries);
        entries.for_each(|entry| entry.has_master = false);
        self.pending.values_mut().for_each(|state| state.master = None);
    }
}

impl Scratch {
    fn new(on: &Operators, count: usize) -> Result<Self> {
        let alloc = |count| on.alloc(count, AclDataType::FLOAT);
        let zero = alloc(1)?;
        on.zero(&zero)?;
        Ok(Self {
            g: alloc(count)?,
            t: alloc(count)?,
            d: alloc(count)?,
            u: alloc(count)?,
            p: alloc(count)?,
            step: alloc(1)?,
            zero,
        })
    }
}
