//! `CudaOptimizer`: its tables and its steps.
//!
//! [`bind`](CudaOptimizer::bind) allocates state, builds the tables and the lists of chunks, and
//! compiles the kernels. [`step`](CudaOptimizer::step) only launches kernels, after an upload of a
//! few bytes if hyper-parameters or [`StepCtl`] differ from the last step's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{bytes_of, bytes_of_mut, cast_slice, cast_slice_mut};
use cuda_rt::Device;

use super::LaunchShape;
use super::averages::AverageKernel;
use super::device::{Program, Tables, blocks, launch};
use super::device_state::DeviceState;
use super::requests::{group_table, request};
use super::rules::DeviceHyper;
use super::table::{
    Class, DeviceStatus, Group, Job, Plan, Progress, Request, Shape, Tensor, Types,
};
use super::taken_stats::TakenStats;
use super::{DType, DeviceParam, Gpu, Launches, LossScale, validate, without_addresses};
use crate::core::{Core, check_len};
use crate::{Error, Result, StepCtl, norms};

/// Tables and kernels for the bound tensors.
#[derive(Debug)]
pub(super) struct Bound<D: Device> {
    /// Unique in the process.
    id: u64,
    /// Indices of the tensors with a gradient, in order.
    pub(super) indices: Vec<usize>,
    /// All tensors, without addresses.
    params: Vec<DeviceParam>,
    /// Table of the tensors with a gradient.
    tensor_table: D::Memory,
    /// Contents of `tensor_table`.
    pub(super) tensors: Vec<Tensor>,
    /// By tensor with a gradient: index of its first chunk of `first_sweep` and of its first row,
    /// in its class.
    offsets: Vec<(u64, u64)>,
    /// Of all classes, after the gradient statistics.
    launches: Vec<Launch<D::Kernel>>,
    pub(super) stats_job: Job,
    pub(super) grad_stats: D::Kernel,
    finish_grad_stats: D::Kernel,
    pub(super) taken: TakenStats,
    progress: D::Memory,
    groups: D::Memory,
    pub(super) ctl: D::Memory,
    /// Uploaded `Request`, and uploaded contents of `groups`.
    uploaded: (Vec<u8>, Vec<u8>),
    /// Memory that the jobs point to.
    _tables: Vec<D::Memory>,
}

/// Argument, kernel and number of blocks.
type Launch<K> = (Job, K, u32);

/// An optimizer whose weights, gradients and state are on a GPU; `H` is the rule's
/// hyper-parameters, for example [`AdamWHyper`](crate::AdamWHyper).
///
/// Stochastic rounding, 8-bit state and norms other than the 2-norm are
/// [`Error::Unsupported`].
#[derive(Debug)]
pub struct CudaOptimizer<H, D: Device = Gpu> {
    pub(super) device: D,
    pub(super) core: Core<H>,
    pub(super) states: BTreeMap<usize, DeviceState<D::Memory>>,
    pub(super) bound: Option<Bound<D>>,
    pub(super) loss_scale: Option<LossScale>,
    /// The status when no tables are bound; otherwise the device has it.
    pub(super) status: DeviceStatus,
    /// Results of `tune`, by rule type and types.
    pub(super) launch_shapes: BTreeMap<(String, Types), LaunchShape>,
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: DeviceHyper, D: Device> CudaOptimizer<H, D> {
    /// Sets the tensors of the next steps. Call it again if addresses change or other tensors have
    /// a gradient.
    ///
    /// Allocates the state of new tensors, including f32 masters of half weights, builds the tables
    /// of the kernels and compiles them; waits for the device. If only addresses differ from the
    /// last `bind`, it uploads them in the stream without a wait; if nothing differs, it does
    /// nothing.
    ///
    /// # Errors
    ///
    /// As [`Optimizer::step`](crate::Optimizer::step);
    /// [`Error::MisalignedPointer`](crate::Error::MisalignedPointer);
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// Until the next `bind`, `params` must be valid: each address has that number of elements of
    /// that type on this device. No two tensors overlap, except gradients that are not cleared.
    /// Kernels that [`take_grad_stats`](Self::take_grad_stats) has launched in another stream must
    /// have finished, or come before the next work of the optimizer's stream, since `bind` frees
    /// their tables. The same holds for dropping the optimizer.
    #[expect(unsafe_code, reason = "reads weights at the caller's addresses")]
    pub unsafe fn bind(&mut self, params: &[DeviceParam]) -> Result<()> {
        self.validate(params)?;
        let members: Vec<(usize, usize)> =
            self.core.members().filter(|(index, _)| params[*index].grad.is_some()).collect();
        let lengths = params.iter().map(without_addresses);
        if let Some(bound) = &self.bound
            && lengths.eq(bound.params.iter().copied())
        {
            let tensors = self.tensors(&members, params, &bound.offsets);
            return if tensors == bound.tensors { Ok(()) } else { self.upload_addresses(tensors) };
        }
        self.unbind()?;
        // SAFETY: the caller guarantees the weights.
        unsafe { self.init(&members, params) }?;
        self.bound = Some(self.tables(&members, params)?);
        Ok(())
    }

    /// Uploads the new addresses of the bound tensors.
    fn upload_addresses(&mut self, tensors: Vec<Tensor>) -> Result<()> {
        self.forget_stats()?;
        let bound = self.bound.as_mut().ok_or(NOT_BOUND)?;
        self.device.write(&mut bound.tensor_table, 0, cast_slice(&tensors))?;
        bound.tensors = tensors;
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
            validate(param, index)?;
            if let Some(own) = self.states.get(&index) {
                let weight = param.weight.dtype;
                if own.master && !self.wants_master(weight) {
                    return Err(Error::UnwantedMaster { index, weight: weight.into() });
                }
                let count = param.weight.len;
                check_len(index, "state", count, own.count.unwrap_or(count))?;
            }
        }
        self.core.check_count(params.len())
    }

    pub(super) fn wants_master(&self, weight: DType) -> bool {
        self.core.wants_master(weight.into())
    }

    /// Drops the tables, after reading the step counts and the status from the device.
    pub(super) fn unbind(&mut self) -> Result<()> {
        for (index, step) in self.steps()? {
            self.states.get_mut(&index).expect("a bound tensor has state").step = step;
        }
        if let Some(bound) = &self.bound {
            self.status = read_status(&self.device, bound)?;
        }
        self.bound = None;
        Ok(())
    }

    /// Step count of each bound tensor, by index. Waits for the device.
    pub(super) fn steps(&self) -> Result<BTreeMap<usize, u64>> {
        let Some(bound) = &self.bound else { return Ok(BTreeMap::new()) };
        let mut all = vec![Progress::default(); bound.indices.len()];
        self.device.read(&bound.progress, 0, cast_slice_mut(&mut all))?;
        Ok(bound.indices.iter().copied().zip(all.iter().map(|progress| progress.step)).collect())
    }

    /// Allocates missing slots and masters, and copies the masters from the weights.
    ///
    /// # Safety
    ///
    /// The weights must be valid until the device has read them.
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
                    DeviceState::upload(&self.device, &state, Some(weight.len), master)?
                }
                None => DeviceState::new(&self.device, hyper, weight.len, master)?,
            };
            if master {
                let slots = hyper.slots().len();
                masters.push((weight, D::address(&own.memory) + (slots * own.stride) as u64));
            }
            new.push((index, own));
        }
        if !masters.is_empty() {
            let counts: Vec<usize> = masters.iter().map(|(weight, _)| weight.len).collect();
            let mut copy = AverageKernel::new(self.device.clone(), &counts)?;
            // SAFETY: the masters were just allocated; the caller guarantees the weights.
            unsafe { copy.launch(masters.into_iter(), None) }?;
        }
        self.states.extend(new);
        Ok(())
    }

    /// The program of each class, and each tensor's shape. A class is the tensors of one rule type
    /// and types.
    fn classes(
        &self,
        members: &[(usize, usize)],
        params: &[DeviceParam],
    ) -> (Vec<Program>, Vec<Shape>) {
        let (mut programs, mut shapes) = (Vec::new(), Vec::new());
        for &(index, group) in members {
            let param = &params[index];
            let class = self.class_of(group, param);
            let shape = self.launch_shapes.get(&class).copied().unwrap_or(LaunchShape::DEFAULT);
            let (rule, types) = class;
            let program = Program { rule: Some((rule, H::TWO_SWEEPS)), types, shape };
            let known = programs.iter().position(|one| *one == program);
            let class = known.unwrap_or(programs.len());
            if known.is_none() {
                programs.push(program);
            }
            shapes.push(Shape { count: param.weight.len, rows: param.rows, group, class });
        }
        (programs, shapes)
    }

    /// Rule type and types of a tensor. A missing gradient is taken to have the weight's type.
    pub(super) fn class_of(&self, group: usize, param: &DeviceParam) -> (String, Types) {
        let weight = param.weight.dtype;
        let types = Types {
            grad: param.grad.map_or(weight, |grad| grad.dtype).number(),
            weight: weight.number(),
            master: self.wants_master(weight),
        };
        (self.core.groups()[group].hyper.rule_type(), types)
    }

    /// Builds the kernels' tables and uploads them.
    fn tables(&self, members: &[(usize, usize)], params: &[DeviceParam]) -> Result<Bound<D>> {
        let (programs, shapes) = self.classes(members, params);
        let sweeps: Vec<usize> = programs.iter().map(|one| one.shape.sweep as usize).collect();
        let plan = Plan::new(&shapes, self.core.groups().len(), H::BY_ROWS, &sweeps);
        let tensors = self.tensors(members, params, &plan.offsets);
        let progress = |(index, _): &(usize, usize)| Progress {
            step: self.states[index].step,
            ..Progress::default()
        };
        let progress: Vec<Progress> = members.iter().map(progress).collect();
        let first_sweep = plan.classes.iter().map(|class| 4 * class.first_sweep.len()).max();
        let sums = plan.values as usize + first_sweep.unwrap_or(0);
        let rows = plan.classes.iter().map(|class| class.rows).max().unwrap_or(0);
        let groups = self.device.alloc(self.core.groups().len() * size_of::<Group>())?;
        let mut tables = Tables::new(&self.device);
        // `nonfinite` is of gradients that are no longer bound.
        let status = DeviceStatus { nonfinite: 0, ..self.status };
        let ctl = tables.upload(&[bytes_of(&Request::default()), bytes_of(&status)].concat())?;
        let progress = tables.upload(cast_slice(&progress))?;
        let tensor_table = tables.upload(cast_slice(&tensors))?;
        let stats_job = Job {
            tensor: D::address(&tensor_table),
            chunk: tables.add(cast_slice(&plan.stats))?,
            group: D::address(&groups),
            progress: D::address(&progress),
            ctl: D::address(&ctl),
            sum: tables.add(&vec![0; 8 * sums])?,
            arrived: tables.add(&vec![0; 4 * plan.stats.len()])?,
            factor: tables.add(&vec![0; 4 * rows as usize])?,
            order: tables.add(cast_slice(&plan.order))?,
            fold: tables.add(cast_slice(&plan.folds))?,
            level: tables.add(cast_slice(&plan.levels))?,
            chunks: plan.stats.len() as u32,
            tensors: tensors.len() as u32,
            groups: self.core.groups().len() as u32,
            levels: plan.levels.len() as u32 - 1,
            ..Job::default()
        };
        let mut launches = Vec::new();
        for (program, class) in programs.iter().zip(&plan.classes) {
            launches.extend(self.launches(program, class, &plan, &stats_job, &mut tables)?);
        }
        Ok(Bound {
            // Relaxed: only uniqueness matters.
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            indices: members.iter().map(|(index, _)| *index).collect(),
            launches,
            stats_job,
            grad_stats: Program::SHARED.kernel(&self.device, "grad_stats")?,
            finish_grad_stats: Program::SHARED.kernel(&self.device, "finish_grad_stats")?,
            taken: TakenStats::new(plan.stats_chunks(tensors.len())),
            params: params.iter().map(without_addresses).collect(),
            tensor_table,
            tensors,
            offsets: plan.offsets,
            progress,
            groups,
            ctl,
            uploaded: Default::default(),
            _tables: tables.memory,
        })
    }

    /// The launches of a class; uploads its lists.
    fn launches(
        &self,
        program: &Program,
        class: &Class,
        plan: &Plan,
        stats_job: &Job,
        tables: &mut Tables<'_, D>,
    ) -> Result<Vec<Launch<D::Kernel>>> {
        let kernel = |name| program.kernel(&self.device, name);
        let mut launches = Vec::new();
        if H::TWO_SWEEPS {
            let chunks = class.first_sweep.len() as u32;
            let tensors = class.members.len() as u32;
            let job = Job {
                chunk: tables.add(cast_slice(&class.first_sweep))?,
                order: tables.add(cast_slice(&class.members))?,
                // After the sums of the gradient statistics, which must stay 0 for a tensor without
                // elements.
                sum: stats_job.sum + 8 * u64::from(plan.values),
                chunks,
                tensors,
                ..*stats_job
            };
            let blocks = blocks(&self.device, chunks, BLOCKS);
            launches.push((job, kernel("first_sweep")?, blocks));
            launches.push((job, kernel("row_factors")?, tensors.max(1)));
        }
        let chunks = class.sweep.len() as u32;
        let job = Job { chunk: tables.add(cast_slice(&class.sweep))?, chunks, ..*stats_job };
        let blocks = blocks(&self.device, chunks, program.shape.blocks);
        launches.push((job, kernel("step")?, blocks));
        Ok(launches)
    }

    /// Table of the tensors with a gradient.
    fn tensors(
        &self,
        members: &[(usize, usize)],
        params: &[DeviceParam],
        offsets: &[(u64, u64)],
    ) -> Vec<Tensor> {
        let tensor = |(&(index, group), &(first, row)): (&(usize, usize), &(u64, u64))| {
            let (param, own) = (&params[index], &self.states[&index]);
            let grad = param.grad.expect("only tensors with a gradient are bound");
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
        members.iter().zip(offsets).map(tensor).collect()
    }

    /// As [`step`](Self::step); the step is also skipped if the `u32` at the device address
    /// `found_inf` is not 0 when it runs, for example the result of another kernel or of all ranks.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    ///
    /// # Safety
    ///
    /// As [`step`](Self::step); `found_inf` must be the address of a `u32` on this device.
    #[expect(unsafe_code, reason = "kernels write the bound tensors")]
    pub unsafe fn step_unless(&mut self, ctl: &StepCtl, found_inf: u64) -> Result<()> {
        let takes_stats = self.upload_step(ctl)?;
        let bound = self.bound.as_ref().ok_or(NOT_BOUND)?;
        let mut ranges =
            if takes_stats { bound.taken.remaining(&bound.uploaded.0) } else { Vec::new() };
        let last = ranges.pop().unwrap_or_default();
        for chunks in &ranges {
            // SAFETY: the tables were made for this kernel and live as long as `bound`; the caller
            // guarantees the tensors in them.
            unsafe { bound.launch_stats(&self.device, chunks) }?;
        }
        let levels = if takes_stats { bound.stats_job.levels } else { 0 };
        let blocks = blocks(&self.device, last.len() as u32, BLOCKS);
        let job = Job { first: last.start, chunks: last.end, levels, found_inf, ..bound.stats_job };
        // SAFETY: as above.
        unsafe { launch(&self.device, &bound.finish_grad_stats, blocks, &job) }?;
        for (job, kernel, blocks) in &bound.launches {
            // SAFETY: as above.
            unsafe { launch(&self.device, kernel, *blocks, job) }?;
        }
        // `finish_grad_stats` has cleared `nonfinite`.
        if let Some(bound) = &mut self.bound {
            bound.taken.forget();
        }
        Ok(())
    }

    /// Uploads the arguments of a step with this `ctl`. Returns whether the step needs gradient
    /// statistics.
    fn upload_step(&mut self, ctl: &StepCtl) -> Result<bool> {
        let ctl = &ctl.validated()?;
        let request = request(ctl, self.core.groups(), self.loss_scale)?;
        self.upload(&request, Some(cast_slice(&group_table(self.core.groups()))), None)?;
        Ok(norms::needed(ctl, &self.core.own_clips()))
    }

    /// As [`DeviceOptimizer::prepare_step`](crate::DeviceOptimizer::prepare_step).
    pub(super) fn prepare(&mut self, ctl: &StepCtl) -> Result<Launches> {
        self.forget_stats()?;
        let takes_stats = self.upload_step(ctl)?;
        Ok(Launches { bound: self.bound.as_ref().ok_or(NOT_BOUND)?.id, takes_stats })
    }

    /// Uploads what differs from the last upload, in the stream of `on`.
    pub(super) fn upload(
        &mut self,
        request: &Request,
        groups: Option<&[u8]>,
        on: Option<&D>,
    ) -> Result<()> {
        let device = on.unwrap_or(&self.device);
        let bound = self.bound.as_mut().ok_or(NOT_BOUND)?;
        let tables = [
            (&mut bound.ctl, &mut bound.uploaded.0, Some(bytes_of(request))),
            (&mut bound.groups, &mut bound.uploaded.1, groups),
        ];
        for (memory, uploaded, bytes) in tables {
            if let Some(bytes) = bytes.filter(|bytes| bytes != uploaded) {
                device.write(memory, 0, bytes)?;
                *uploaded = bytes.to_vec();
            }
        }
        Ok(())
    }
}

pub(super) fn read_status<D: Device>(device: &D, bound: &Bound<D>) -> Result<DeviceStatus> {
    let mut status = DeviceStatus::default();
    device.read(&bound.ctl, size_of::<Request>(), bytes_of_mut(&mut status))?;
    Ok(status)
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

pub(super) const NOT_BOUND: Error = Error::CalledBefore { call: "step", needed: "bind" };

/// Blocks of 256 threads per multiprocessor that hide memory latency.
pub(super) const BLOCKS: u32 = LaunchShape::DEFAULT.blocks;
