//! An optimizer whose tensors and state are on a device.
//!
//! [`bind`](Fused::bind) does all that takes time: it makes state, builds the tables and the lists of
//! chunks, compiles the kernels. [`step`](Fused::step) then only launches; and where hyper-parameters or
//! [`StepCtl`] differ from the last step's, sends a few bytes before.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_rt::Device;

use super::averages::Mover;
use super::device::{Program, Tables, launch};
use super::device_state::DeviceState;
use super::requests::{group_table, request};
use super::rules::DeviceHyper;
use super::table::{
    Answer, Bytes, Class, Group, Job, Plan, Progress, Request, Shape, Tensor, Types,
};
use super::taken_stats::TakenStats;
use super::tune::LaunchShape;
use super::{DType, DeviceParam, DeviceSlice, Launches, LossScale, Status};
use crate::core::Core;
use crate::state::TensorState;
use crate::{Error, HalfWeights, ParamGroup, Result, StateDict, StepCtl, norms};

/// What the kernels are given as long as the same tensors are bound.
#[derive(Debug)]
pub(super) struct Bound<D: Device> {
    /// That of no other.
    number: u64,
    /// Indices of the tensors with a gradient, in order.
    pub(super) indices: Vec<usize>,
    /// All tensors, without their addresses.
    forms: Vec<DeviceParam>,
    /// What the kernels know of those with a gradient, addresses among it.
    tensors: D::Memory,
    /// What was sent of it.
    pub(super) at: Vec<Tensor>,
    /// By tensor with a gradient: its first chunk of `observe`, its first row.
    places: Vec<(u64, u64)>,
    /// One for each class, with its number of blocks.
    launches: Vec<Launch<D::Kernel>>,
    pub(super) look: Job,
    pub(super) look_part: D::Kernel,
    last_look: D::Kernel,
    pub(super) taken: TakenStats,
    progress: D::Memory,
    groups: D::Memory,
    pub(super) ctl: D::Memory,
    /// What the device has of what the host says.
    sent: (Vec<u8>, Vec<u8>),
    /// The tables, kept as long as the jobs point to them.
    _tables: Vec<D::Memory>,
}

#[derive(Debug)]
struct Launch<K> {
    observe: Option<(Job, [(K, u32); 2])>,
    step: (Job, K, u32),
}

/// An optimizer of rule `H` on device `D`.
#[derive(Debug)]
pub(super) struct Fused<H, D: Device> {
    pub(super) device: D,
    pub(super) core: Core<H>,
    states: BTreeMap<usize, DeviceState<D::Memory>>,
    pub(super) bound: Option<Bound<D>>,
    pub(super) loss_scale: Option<LossScale>,
    /// What was found out about launches, for tensors of a class.
    pub(super) launch_shapes: BTreeMap<(String, Types), LaunchShape>,
}

impl<H: DeviceHyper, D: Device> Fused<H, D> {
    pub(super) fn new(
        device: D,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        Ok(Self {
            device,
            core: Core::on_device(groups, half_weights)?,
            states: BTreeMap::new(),
            bound: None,
            loss_scale: None,
            launch_shapes: BTreeMap::new(),
        })
    }

    pub(super) fn add_param_group(&mut self, group: ParamGroup<H>) -> Result<()> {
        let mut core = self.core.clone();
        core.add_param_group(group)?;
        self.unbind()?;
        self.core = core;
        Ok(())
    }

    /// # Safety
    ///
    /// As [`CudaOptimizer::bind`](super::CudaOptimizer::bind).
    #[expect(unsafe_code, reason = "reads weights at the caller's addresses")]
    pub(super) unsafe fn bind(&mut self, params: &[DeviceParam]) -> Result<()> {
        self.validate(params)?;
        let members: Vec<(usize, usize)> =
            self.core.members().filter(|(index, _)| params[*index].grad.is_some()).collect();
        let forms = params.iter().map(DeviceParam::form);
        if self.bound.as_ref().is_some_and(|bound| forms.eq(bound.forms.iter().copied())) {
            return self.move_to(&members, params);
        }
        self.unbind()?;
        // SAFETY: the caller vouches for the weights.
        unsafe { self.init(&members, params) }?;
        self.bound = Some(self.tables(&members, params)?);
        if let Some(scale) = self.loss_scale {
            self.send_loss_scale(scale)?;
        }
        Ok(())
    }

    /// Sends where the tensors are now, which are else as they were bound, if that is elsewhere.
    fn move_to(&mut self, members: &[(usize, usize)], params: &[DeviceParam]) -> Result<()> {
        let bound = self.bound.as_ref().ok_or(UNBOUND)?;
        let tensors = self.tensors(members, params, &bound.places);
        if tensors == bound.at {
            return Ok(());
        }
        self.forget_stats()?;
        let bound = self.bound.as_mut().ok_or(UNBOUND)?;
        self.device.write(&mut bound.tensors, 0, &tensors.bytes())?;
        bound.at = tensors;
        Ok(())
    }

    pub(super) fn validate(&self, params: &[DeviceParam]) -> Result<()> {
        for (index, _) in self.core.members() {
            let count = params.len();
            let param = params.get(index).ok_or(Error::MissingParam { index, count })?;
            self.core.check_shape(index, param.weight.len)?;
            if param.grad.is_none() {
                continue;
            }
            param.validate(index)?;
            if let Some(own) = self.states.get(&index) {
                let weight = param.weight.dtype;
                if own.master && !self.wants_master(weight) {
                    return Err(Error::UnwantedMaster { index, weight: weight.into() });
                }
                own.count.map_or(Ok(()), |count| param.same_length(index, "state", count))?;
            }
        }
        self.core.check_count(params.len())
    }

    pub(super) fn wants_master(&self, weight: DType) -> bool {
        self.core.wants_master(weight.into())
    }

    /// Forgets the tables; what the device knows better is taken back first.
    pub(super) fn unbind(&mut self) -> Result<()> {
        for (index, step) in self.steps()? {
            self.states.get_mut(&index).expect("what is bound has state").step = step;
        }
        if let Some(loss_scale) = &mut self.loss_scale
            && let Some(bound) = &self.bound
        {
            let answer = read_answer(&self.device, bound)?;
            (loss_scale.scale, loss_scale.growth_tracker) = (answer.loss_scale, answer.tracker);
        }
        self.bound = None;
        Ok(())
    }

    /// How many steps the tensors that are bound have taken, by index. Waits for the device.
    fn steps(&self) -> Result<BTreeMap<usize, u64>> {
        let Some(bound) = &self.bound else { return Ok(BTreeMap::new()) };
        let mut bytes = vec![0; bound.indices.len() * size_of::<Progress>()];
        self.device.read(&bound.progress, 0, &mut bytes)?;
        let (all, _) = bytes.as_chunks::<{ size_of::<Progress>() }>();
        let step = |progress: &[u8; size_of::<Progress>()]| {
            let (step, _) = progress.split_first_chunk().expect("more bytes than a step has");
            u64::from_ne_bytes(*step)
        };
        Ok(bound.indices.iter().copied().zip(all.iter().map(step)).collect())
    }

    /// Gives tensors the slots and masters that they are to have and have not.
    ///
    /// # Safety
    ///
    /// The weights must lie where they say, until the device has read them.
    #[expect(unsafe_code, reason = "reads weights at the caller's addresses")]
    unsafe fn init(&mut self, members: &[(usize, usize)], params: &[DeviceParam]) -> Result<()> {
        let (mut new, mut masters) = (Vec::new(), Vec::new());
        for &(index, group) in members {
            let (weight, hyper) = (params[index].weight, &self.core.groups()[group].hyper);
            let master = self.wants_master(weight.dtype);
            let own = match self.states.get(&index) {
                Some(own) if own.count.is_some() && (own.master || !master) => {
                    continue;
                }
                Some(own) => {
                    let state = own.read(&self.device, hyper, weight.len)?;
                    DeviceState::send(&self.device, &state, Some(weight.len), master)?
                }
                None => DeviceState::fresh(&self.device, hyper, weight.len, master)?,
            };
            if master {
                let slots = hyper.slots().len();
                masters.push((weight, D::address(&own.memory) + (slots * own.stride) as u64));
            }
            new.push((index, own));
        }
        if !masters.is_empty() {
            let counts: Vec<usize> = masters.iter().map(|(weight, _)| weight.len).collect();
            let mut mover = Mover::new(self.device.clone(), &counts)?;
            // SAFETY: the masters were just made, for weights that the caller vouches for.
            unsafe { mover.launch(masters.into_iter(), None) }?;
        }
        self.states.extend(new);
        Ok(())
    }

    /// Tensors of one form and types are a class; the classes in order, and each tensor's shape.
    fn classes(
        &self,
        members: &[(usize, usize)],
        params: &[DeviceParam],
    ) -> (Vec<Program>, Vec<Shape>) {
        let (mut programs, mut shapes) = (Vec::new(), Vec::new());
        for &(index, group) in members {
            let (param, grad) = grad_of(params, index);
            let types = Types {
                grad: grad.dtype.number(),
                weight: param.weight.dtype.number(),
                master: self.states[&index].master,
            };
            let form = self.core.groups()[group].hyper.form();
            let shape = self.launch_shapes.get(&(form.clone(), types)).copied();
            let shape = shape.unwrap_or(LaunchShape::DEFAULT);
            let program = Program { rule: Some((form, H::TWO_SWEEPS)), types, shape };
            let known = programs.iter().position(|one| *one == program);
            let class = known.unwrap_or(programs.len());
            if known.is_none() {
                programs.push(program);
            }
            shapes.push(Shape { count: param.weight.len, rows: param.rows, group, class });
        }
        (programs, shapes)
    }

    /// Everything the kernels read, sent to the device.
    fn tables(&self, members: &[(usize, usize)], params: &[DeviceParam]) -> Result<Bound<D>> {
        let (programs, shapes) = self.classes(members, params);
        let sweeps: Vec<usize> = programs.iter().map(|one| one.shape.sweep as usize).collect();
        let plan = Plan::new(&shapes, self.core.groups().len(), H::BY_ROWS, &sweeps);
        let tensors = self.tensors(members, params, &plan.places);
        let progress = |(index, _): &(usize, usize)| Progress {
            step: self.states[index].step,
            ..Progress::default()
        };
        let progress: Vec<Progress> = members.iter().map(progress).collect();
        let observed = plan.classes.iter().map(|class| 4 * class.observe.len()).max().unwrap_or(0);
        let rows = plan.classes.iter().map(|class| class.rows).max().unwrap_or(0);
        let groups = self.device.alloc(self.core.groups().len() * size_of::<Group>())?;
        let ctl = self.device.alloc(size_of::<Request>() + size_of::<Answer>())?;
        let mut tables = Tables::new(&self.device);
        let progress = tables.memory(&progress.bytes())?;
        let sent = tables.memory(&tensors.bytes())?;
        let look = Job {
            tensor: D::address(&sent),
            chunk: tables.send(&plan.look.bytes())?,
            group: D::address(&groups),
            progress: D::address(&progress),
            ctl: D::address(&ctl),
            sum: tables.send(&vec![0; 8 * (plan.values as usize + observed)])?,
            arrived: tables.send(&vec![0; 4 * plan.look.len()])?,
            factor: tables.send(&vec![0; 4 * rows as usize])?,
            order: tables.send(&plan.order.bytes())?,
            fold: tables.send(&plan.folds.bytes())?,
            level: tables.send(&plan.levels.bytes())?,
            chunks: plan.look.len() as u32,
            tensors: tensors.len() as u32,
            groups: self.core.groups().len() as u32,
            levels: plan.levels.len() as u32 - 1,
            ..Job::default()
        };
        let mut launches = Vec::new();
        for (program, class) in programs.iter().zip(&plan.classes) {
            launches.push(self.launch(program, class, &plan, &look, &mut tables)?);
        }
        Ok(Bound {
            number: BOUND.fetch_add(1, Ordering::Relaxed),
            indices: members.iter().map(|(index, _)| *index).collect(),
            launches,
            look,
            look_part: Program::LOOK.kernel(&self.device, "look_part")?,
            last_look: Program::LOOK.kernel(&self.device, "look")?,
            taken: TakenStats::new(plan.look_chunks(tensors.len())),
            forms: params.iter().map(DeviceParam::form).collect(),
            tensors: sent,
            at: tensors,
            places: plan.places,
            progress,
            groups,
            ctl,
            sent: Default::default(),
            _tables: tables.sent,
        })
    }

    /// What is launched for a class; its lists are sent.
    fn launch(
        &self,
        program: &Program,
        class: &Class,
        plan: &Plan,
        look: &Job,
        tables: &mut Tables<'_, D>,
    ) -> Result<Launch<D::Kernel>> {
        let kernel = |name| program.kernel(&self.device, name);
        let mut observe = None;
        if H::TWO_SWEEPS {
            let chunks = class.observe.len() as u32;
            let tensors = class.members.len() as u32;
            let job = Job {
                chunk: tables.send(&class.observe.bytes())?,
                order: tables.send(&class.members.bytes())?,
                // Apart from those of `look`, where a tensor without elements has a 0.
                sum: look.sum + 8 * u64::from(plan.values),
                chunks,
                tensors,
                ..*look
            };
            let observes = (kernel("observe")?, self.blocks(chunks, BLOCKS));
            observe = Some((job, [observes, (kernel("conclude")?, tensors.max(1))]));
        }
        let chunks = class.sweep.len() as u32;
        let job = Job { chunk: tables.send(&class.sweep.bytes())?, chunks, ..*look };
        let blocks = self.blocks(chunks, program.shape.blocks);
        Ok(Launch { observe, step: (job, kernel("step")?, blocks) })
    }

    /// Blocks for so many chunks: a warp for each, and at most so many for each multiprocessor.
    pub(super) fn blocks(&self, chunks: u32, most: u32) -> u32 {
        chunks.div_ceil(8).clamp(1, self.device.processors() * most)
    }

    /// What the kernels know of the tensors with a gradient.
    fn tensors(
        &self,
        members: &[(usize, usize)],
        params: &[DeviceParam],
        places: &[(u64, u64)],
    ) -> Vec<Tensor> {
        let tensor = |(&(index, group), &(first, row)): (&(usize, usize), &(u64, u64))| {
            let (param, grad) = grad_of(params, index);
            let own = &self.states[&index];
            let slots = self.core.groups()[group].hyper.slots().len();
            let vector = |at: usize| D::address(&own.memory) + (at * own.stride) as u64;
            let mut slot = [0; 3];
            slot.iter_mut().enumerate().take(slots).for_each(|(at, slot)| *slot = vector(at));
            let rows = if H::BY_ROWS { param.rows.max(1) } else { 1 };
            let (ema, ema_decay) = param.ema.unwrap_or_default();
            Tensor {
                grad: grad.ptr,
                weight: param.weight.ptr,
                master: if own.master { vector(slots) } else { 0 },
                slot,
                ema,
                count: param.weight.len as u64,
                cols: (param.weight.len / rows) as u64,
                first,
                row,
                group: group as u32,
                grad_type: grad.dtype.number(),
                clear: param.clear.into(),
                project: (param.rows > 0).into(),
                ema_decay,
                unused: 0,
            }
        };
        members.iter().zip(places).map(tensor).collect()
    }

    /// # Safety
    ///
    /// As [`CudaOptimizer::step`](super::CudaOptimizer::step).
    #[expect(unsafe_code, reason = "kernels work on the caller's addresses")]
    pub(super) unsafe fn step(&mut self, ctl: &StepCtl, found_inf: u64) -> Result<()> {
        let needed = self.ask(ctl)?;
        let bound = self.bound.as_ref().ok_or(UNBOUND)?;
        let mut parts = if needed { bound.taken.left(&bound.sent.0) } else { Vec::new() };
        let last = parts.pop().unwrap_or_default();
        for part in &parts {
            // SAFETY: the tables were made for this kernel and live as long as `bound`; the caller
            // vouches for the tensors in them.
            unsafe { self.look_at(&self.device, part) }?;
        }
        let levels = if needed { bound.look.levels } else { 0 };
        let blocks = self.blocks(last.len() as u32, BLOCKS);
        let look = Job { first: last.start, chunks: last.end, levels, found_inf, ..bound.look };
        // SAFETY: as above.
        unsafe { launch(&self.device, &bound.last_look, blocks, &look) }?;
        for Launch { observe, step: (job, kernel, blocks) } in &bound.launches {
            if let Some((job, passes)) = observe {
                for (kernel, blocks) in passes {
                    // SAFETY: as above.
                    unsafe { launch(&self.device, kernel, *blocks, job) }?;
                }
            }
            // SAFETY: as above.
            unsafe { launch(&self.device, kernel, *blocks, job) }?;
        }
        // The kernel has forgotten what was not finite.
        if let Some(bound) = &mut self.bound {
            bound.taken.forget();
        }
        Ok(())
    }

    /// Sends what a step with this `ctl` is told; whether it has to look at the gradients.
    fn ask(&mut self, ctl: &StepCtl) -> Result<bool> {
        let ctl = &ctl.validated()?;
        let request = request(ctl, self.core.groups(), self.loss_scale)?;
        let groups = group_table(self.core.groups()).bytes();
        self.send(request.bytes(), Some(groups), None)?;
        Ok(norms::needed(ctl, &self.core.own_clips()))
    }

    /// Sends all that the launches of a step with this `ctl` read.
    pub(super) fn ready(&mut self, ctl: &StepCtl) -> Result<Launches> {
        self.forget_stats()?;
        let needed = self.ask(ctl)?;
        Ok(Launches { bound: self.bound.as_ref().ok_or(UNBOUND)?.number, takes_stats: needed })
    }

    /// Sends what differs from what the device has been sent, in order of the stream of `on`.
    pub(super) fn send(
        &mut self,
        request: Vec<u8>,
        groups: Option<Vec<u8>>,
        on: Option<&D>,
    ) -> Result<()> {
        let device = on.unwrap_or(&self.device);
        let bound = self.bound.as_mut().ok_or(UNBOUND)?;
        let tables = [
            (&mut bound.ctl, &mut bound.sent.0, Some(request)),
            (&mut bound.groups, &mut bound.sent.1, groups),
        ];
        for (memory, sent, bytes) in tables {
            if let Some(bytes) = bytes.filter(|bytes| bytes != sent) {
                device.write(memory, 0, &bytes)?;
                *sent = bytes;
            }
        }
        Ok(())
    }

    pub(super) fn set_loss_scale(&mut self, loss_scale: Option<LossScale>) -> Result<()> {
        self.loss_scale = loss_scale;
        self.forget_stats()?;
        loss_scale.map_or(Ok(()), |scale| self.send_loss_scale(scale))
    }

    fn send_loss_scale(&mut self, scale: LossScale) -> Result<()> {
        let Some(bound) = &mut self.bound else { return Ok(()) };
        self.device.write(&mut bound.ctl, Answer::TRACKER, &scale.growth_tracker.bytes())?;
        self.device.write(&mut bound.ctl, Answer::LOSS_SCALE, &scale.scale.bytes())?;
        Ok(())
    }

    pub(super) fn loss_scale_address(&self) -> u64 {
        self.bound.as_ref().map_or(0, |bound| D::address(&bound.ctl) + Answer::LOSS_SCALE as u64)
    }

    pub(super) fn status(&self) -> Result<Status> {
        let Some(bound) = &self.bound else { return Ok(Status::default()) };
        let answer = read_answer(&self.device, bound)?;
        Ok(Status {
            grad_norm: answer.norm,
            last_skipped: answer.skip != 0,
            skipped: answer.skipped,
            loss_scale: self.loss_scale.map(|_| answer.loss_scale),
            growth_tracker: answer.tracker,
            at_floor: answer.at_floor != 0,
        })
    }

    /// The next `bind` makes the masters anew.
    pub(super) fn refresh_masters(&mut self) -> Result<()> {
        self.unbind()?;
        self.states.values_mut().for_each(|state| state.master = false);
        Ok(())
    }

    pub(super) fn state_dict(&self) -> Result<StateDict> {
        let steps = self.steps()?;
        let mut states = Vec::new();
        for (index, group) in self.core.members() {
            let Some(own) = self.states.get(&index) else { continue };
            let step = steps.get(&index).copied().unwrap_or(own.step);
            if step > 0 {
                let hyper = &self.core.groups()[group].hyper;
                let state = own.read(&self.device, hyper, own.count.unwrap_or(0))?;
                states.push((index, TensorState { step, ..state }));
            }
        }
        Ok(self.core.state_dict_with(states))
    }

    pub(super) fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        let known = |index| self.states.get(&index)?.count;
        let (core, states) = self.core.load_for_device(dict, known)?;
        let mut sent = BTreeMap::new();
        for (index, state) in states {
            let count = state.lengths().next().or_else(|| known(index));
            sent.insert(index, DeviceState::send(&self.device, &state, count, false)?);
        }
        self.unbind()?;
        (self.core, self.states) = (core, sent);
        Ok(())
    }
}

pub(super) fn read_answer<D: Device>(device: &D, bound: &Bound<D>) -> Result<Answer> {
    let mut bytes = [0; size_of::<Answer>()];
    device.read(&bound.ctl, size_of::<Request>(), &mut bytes)?;
    Ok(Answer::from_bytes(&bytes))
}

/// A tensor that is bound, and its gradient.
fn grad_of(params: &[DeviceParam], index: usize) -> (&DeviceParam, DeviceSlice) {
    let param = &params[index];
    (param, param.grad.expect("only tensors with a gradient are bound"))
}

/// How many times tables have been made.
static BOUND: AtomicU64 = AtomicU64::new(0);

pub(super) const UNBOUND: Error = Error::CalledBefore { call: "step", needed: "bind" };

/// Blocks of 256 threads for each multiprocessor that hide the latency of memory.
pub(super) const BLOCKS: u32 = LaunchShape::DEFAULT.blocks;
