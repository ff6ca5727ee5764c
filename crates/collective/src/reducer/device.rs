//! Averages gradients in device memory while backward computes; the host never waits for the
//! device.
//!
//! [`DeviceReducer`] follows the rules of [`Reducer`](super::Reducer), implemented in [`Ledger`];
//! this file adds streams, events and memory.
//!
//! Invariant: accesses to a bucket are ordered by events, never by timing. Memory is freed only
//! after all streams that may access it have executed their work on it.

#![expect(unsafe_code, reason = "passes memory used by streams to the backend")]

use std::time::{Duration, Instant};

use super::ledger::Ledger;
use super::{BucketKernels, BucketPlan, CommHook, ParamInfo, ReducerOptions};
use crate::device::{DeviceBackend, DeviceMemory, KeepAlive, Mark};
use crate::{DType, DeviceBuf, DeviceStream, DeviceWork, Error, ProcessGroup, ReduceOp, Result};

/// Averages gradients in the memory of a group's device over its ranks, by the rules of
/// [`Reducer`](super::Reducer), with three differences:
///
/// * **Stream order.** A gradient is ready once the stream passed to [`ready`](Self::ready) has
///   executed its work so far; buckets are reduced in the reducer's own stream, which waits for
///   that; and [`finish`](Self::finish) makes the caller's stream wait for the averages. All calls
///   return at once, except that the ranks' hosts wait for each other at the end of the first pass,
///   and in each pass with
///   [`find_unused_parameters`](super::ReducerOptions::find_unused_parameters).
/// * **Gradients may be written directly into the buckets.** [`slot`](Self::slot) returns a
///   gradient's memory in its bucket; a gradient outside of it is copied in stream order.
/// * **The caller provides kernels.** This crate has none. [`BucketKernels`] adds gradients that
///   are outside of their slots, casts buckets of f32 that are sent in 16 bits ([`CommHook`]), and
///   has an epilogue, called for each bucket after its all-reduce, in the same stream. The bucket
///   is then still in the device's cache, so a finite check or a sum of squares reads no memory.
///
/// # Where the kernels come from
///
/// `amp` and `fused-optim` provide them. Neither depends on this crate: all three represent
/// addresses and streams as numbers. Casts are `amp::cuda::cast` over an
/// `amp::cuda::Gpu::with_stream` of [`stream`](Self::stream). The finite check and the gradients'
/// norm are an `amp::cuda::CudaScaler` over the same: `bind_parts`, a part for each bucket, in
/// [`laid_out`](BucketKernels::laid_out), `check_part(bucket)` in
/// [`averaged`](BucketKernels::averaged). On the stream passed to `finish`,
/// `fused_optim::cuda::CudaOptimizer::step_unless` reads the result on the device. If a step clips
/// by the norm, `CudaOptimizer::take_grad_stats` of the bucket's tensors, on a `Gpu` of the same
/// stream, replaces `check_part`: `step` then reads no gradient twice.
///
/// ```text
/// ready(i) .. ready(j) -> bucket's stream: all-reduce | check  all-reduce | check  ...
/// caller's stream:  backward ...................... finish | step_unless(found_inf) | forward
/// ```
///
/// # Failures
///
/// As everywhere in [`device`](crate::device): after the group fails, streams continue, and their
/// results are unspecified. The next [`prepare`](Self::prepare) returns the failure;
/// [`settled`](Self::settled) and [`wait`](Self::wait) return it earlier.
///
/// # Streams and memory
///
/// Streams passed to it must live until it is dropped. Dropping it waits until the device no longer
/// uses the buckets, for at most ten seconds: after that their memory is leaked.
#[derive(Debug)]
#[doc(alias = "DistributedDataParallel")]
pub struct DeviceReducer<K> {
    ledger: Ledger,
    kernels: K,
    /// The 16-bit type in which buckets of f32 are sent.
    compress: Option<DType>,
    /// The stream in which buckets are reduced.
    stream: DeviceStream,
    buckets: Vec<DeviceBuf>,
    /// Buffer for a bucket in 16 bits.
    scratch: Option<DeviceBuf>,
    memory: Vec<DeviceMemory>,
    /// Memory that may be freed once its mark is reached.
    retired: Vec<(Vec<DeviceMemory>, Box<dyn Mark>)>,
    /// Averages whose success is not confirmed yet.
    works: Vec<DeviceWork>,
    /// The caller's streams in this pass, each ordered after `finish_stream`.
    streams: Vec<DeviceStream>,
    /// The stream that is ordered after all accesses of earlier passes to the buckets.
    finish_stream: Option<DeviceStream>,
    group: ProcessGroup,
    _stream: KeepAlive,
}

impl<K: BucketKernels> DeviceReducer<K> {
    /// Makes a reducer for `params`, in registration (forward) order; index `i` is `params[i]` in
    /// all methods.
    ///
    /// Every rank of `group` must call it with equal arguments, except `kernels`; they are
    /// compared. Blocks: one all-gather of the parameter list, and an allocation for each bucket.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] on every rank, with the first parameter or option that differs;
    /// [`Error::Unsupported`] for parameters that are not floating-point numbers, for a group
    /// without a device, for [`static_graph`](ReducerOptions::static_graph),
    /// [`through_device`](ReducerOptions::through_device) and PowerSGD; the errors of
    /// [`DeviceCalls::alloc`](crate::device::DeviceCalls::alloc) and of `kernels`.
    pub fn new(
        group: ProcessGroup,
        params: Vec<ParamInfo>,
        options: ReducerOptions,
        kernels: K,
    ) -> Result<Self> {
        drop(group.device()?);
        let compress = compression(&options)?;
        let ledger = Ledger::new(&group, params, options)?;
        let (stream, kept) = backend(&group).stream()?;
        let mut this = Self {
            ledger,
            kernels,
            compress,
            stream,
            buckets: Vec::new(),
            scratch: None,
            memory: Vec::new(),
            retired: Vec::new(),
            works: Vec::new(),
            streams: Vec::new(),
            finish_stream: None,
            group,
            _stream: KeepAlive(kept),
        };
        let plan = this.ledger.plan().clone();
        (this.memory, this.buckets, this.scratch) = alloc_all(&this.group, &plan, compress)?;
        this.kernels.laid_out(&plan, &this.buckets)?;
        Ok(this)
    }

    /// Begins a pass, as [`Reducer::prepare`](super::Reducer::prepare).
    ///
    /// # Errors
    ///
    /// As there, and an earlier pass's failure that was detected since.
    #[doc(alias = "no_sync")]
    pub fn prepare(&mut self, sync: bool) -> Result<()> {
        self.ledger.check_usable()?;
        let usable = self.group.device().map(drop);
        self.ledger.poison_on_error(usable)?;
        let settled: Vec<_> = self.works.iter().map(DeviceWork::settled).collect();
        if let Some(Err(error)) = settled.into_iter().flatten().find(Result::is_err) {
            return self.ledger.poison_on_error(Err(error));
        }
        self.works.retain(|work| work.settled().is_none());
        self.retired.retain(|(_, mark)| !matches!(mark.reached(), Ok(true)));
        self.ledger.prepare(sync)?;
        // Streams of a pass that was not finished.
        self.streams.last().copied().map_or(Ok(()), |last| self.gather(last))
    }

    /// Returns the memory of parameter `index`'s gradient in its bucket. A gradient that was
    /// written, or added, there before [`ready`](Self::ready) is not copied.
    ///
    /// It changes when the buckets are rebuilt: call this again after each
    /// [`finish`](Self::finish). Before the first gradient, and after
    /// [`zero_grad`](Self::zero_grad), its contents are unspecified.
    ///
    /// # Panics
    ///
    /// If `index` is out of range.
    #[doc(alias = "gradient_as_bucket_view")]
    pub fn slot(&self, index: usize) -> DeviceBuf {
        let slot = self.ledger.slot(index);
        self.buckets[slot.bucket]
            .part(slot.range())
            .expect("a plan's slots are inside their buckets")
    }

    /// Takes the gradient of parameter `index`, which is complete once `stream` has executed its
    /// work so far: copies it into its slot or adds it to the gradient there, in stream order,
    /// unless it is in the slot already. Launches the buckets that are full, in order. Does not
    /// wait.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], with the parameter's name, if it already has a gradient in this
    /// pass, if type or length are wrong, or if it partly overlaps its slot; [`Error::Unsupported`]
    /// for a stream that is being captured. Neither changes anything. Otherwise the error of an
    /// earlier bucket or of the kernels.
    ///
    /// # Safety
    ///
    /// The gradient is valid as [`DeviceBuf::from_raw`] requires until `stream` has executed this.
    /// Other accesses to the slot are ordered before this work in `stream`, or after
    /// [`finish`](Self::finish)'s in its stream. The stream lives until the reducer is dropped.
    pub unsafe fn ready(
        &mut self,
        index: usize,
        grad: DeviceBuf,
        stream: DeviceStream,
    ) -> Result<()> {
        self.ledger.check_usable()?;
        self.ledger.check_gradient(index, grad.dtype(), grad.count())?;
        let slot = self.slot(index);
        if grad != slot && grad.overlaps(&slot) {
            let text = format!("the gradient of parameter {index} partly overlaps its slot");
            return Err(Error::InvalidArgument(text));
        }
        self.add_stream(stream)?;
        if grad != slot && slot.count() > 0 {
            let taken = if self.ledger.has_grad(index) {
                // SAFETY: the slot is in a bucket that only the caller's streams access until it is
                // launched; the gradient is valid by this function's contract.
                unsafe { self.kernels.add(slot, grad, stream) }
            } else {
                // SAFETY: as above.
                unsafe { backend(&self.group).copy(slot, grad, stream) }
            };
            self.poison_on_error(taken)?;
        }
        self.ledger.mark_ready(index, false);
        let launched = self.launch_full();
        self.poison_on_error(launched)
    }

    /// Ends a pass: work enqueued into `stream` afterwards finds every bucket averaged and its
    /// epilogue done or, without `sync`, this rank's gradients complete. Rebuilds the buckets after
    /// the first pass with `sync`.
    ///
    /// Every rank must call it. Does not wait for the device. Waits for the other ranks' hosts
    /// after the first pass with `sync`, and in each with
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters).
    ///
    /// # Errors
    ///
    /// Same as [`Reducer::finish`](super::Reducer::finish); [`Error::Unsupported`] for a stream
    /// that is being captured; errors of the kernels. Any of them makes the reducer and its group
    /// unusable, also with one rank.
    ///
    /// # Safety
    ///
    /// The stream lives until the reducer is dropped. All uses of the gradients are in it, or
    /// ordered after it and before the work of the next pass's streams.
    pub unsafe fn finish(&mut self, stream: DeviceStream) -> Result<()> {
        self.ledger.check_usable()?;
        // Detects a stream that is being captured, before anything is changed.
        drop(self.mark(stream)?);
        self.add_stream(stream)?;
        let sync = self.ledger.end_pass()?;
        let span = self.ledger.finish_span(self.group.rank());
        let averaged = if sync { span.in_scope(|| self.average(stream)) } else { Ok(()) };
        let finished = averaged.and_then(|()| self.gather(stream));
        self.poison_on_error(finished)
    }

    /// Returns the gradient of parameter `index`, valid in stream order after
    /// [`finish`](Self::finish): averaged after a pass with `sync`, this rank's sum after one
    /// without. `None` if it has none, or while its bucket is in flight in a pass that is not
    /// finished.
    ///
    /// # Panics
    ///
    /// If `index` is out of range.
    pub fn grad(&self, index: usize) -> Option<DeviceBuf> {
        let here = !self.ledger.is_in_flight(self.ledger.slot(index).bucket);
        (here && self.ledger.has_grad(index)).then(|| self.slot(index))
    }

    /// Whether parameter `index` has no gradient in this pass, and is one of those that the static
    /// graph uses on this rank; without a static graph all are.
    ///
    /// # Panics
    ///
    /// If `index` is out of range.
    pub fn needs_gradient(&self, index: usize) -> bool {
        self.ledger.needs_gradient(index)
    }

    /// Drops all gradients; the next pass overwrites them. Call it between passes.
    pub fn zero_grad(&mut self) {
        self.ledger.zero_grad();
    }

    /// Returns the result of the averages begun so far; `None` while one is in flight. Does not
    /// block.
    pub fn settled(&self) -> Option<Result<()>> {
        let ends: Option<Vec<_>> = self.works.iter().map(DeviceWork::settled).collect();
        ends.map(|ends| ends.into_iter().collect())
    }

    /// Blocks the host until the averages begun so far have ended.
    ///
    /// # Errors
    ///
    /// Same as [`DeviceWork::wait`].
    pub fn wait(&self) -> Result<()> {
        self.works.iter().try_for_each(DeviceWork::wait)
    }

    /// The current layout of the buckets.
    pub fn plan(&self) -> &BucketPlan {
        self.ledger.plan()
    }

    /// Number of buckets launched in this pass; they are the first of the [plan](Self::plan).
    pub fn launched(&self) -> usize {
        self.ledger.launched()
    }

    /// The stream in which buckets are reduced. It lives as long as the reducer.
    pub fn stream(&self) -> DeviceStream {
        self.stream
    }

    /// The kernels passed to [`new`](Self::new).
    pub fn kernels(&self) -> &K {
        &self.kernels
    }

    /// The kernels, mutably.
    pub fn kernels_mut(&mut self) -> &mut K {
        &mut self.kernels
    }

    /// The group over which gradients are averaged.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns `result`; an error makes this reducer unusable and aborts the group.
    fn poison_on_error<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && self.group.backend.health().is_ok()
        {
            self.group.abort(&error.to_string());
        }
        self.ledger.poison_on_error(result)
    }

    /// Makes `later` wait for the work enqueued in `earlier` so far.
    fn order(&self, earlier: DeviceStream, later: DeviceStream) -> Result<()> {
        // SAFETY: as for `mark`.
        unsafe { self.mark(earlier)?.order(later) }
    }

    /// Adds a stream to this pass: orders it after earlier passes and after all uses of their
    /// gradients.
    fn add_stream(&mut self, stream: DeviceStream) -> Result<()> {
        if self.streams.contains(&stream) {
            return Ok(());
        }
        // Detects a stream that is being captured, before anything is changed.
        drop(self.mark(stream)?);
        if let Some(earlier) = self.finish_stream.filter(|&earlier| earlier != stream) {
            self.order(earlier, stream)?;
        }
        self.streams.push(stream);
        Ok(())
    }

    /// Launches full buckets, in the order of the plan.
    fn launch_full(&mut self) -> Result<()> {
        while let Some(next) = self.ledger.next_full() {
            let span = self.ledger.bucket_span(next, self.group.rank());
            span.in_scope(|| self.launch(next))?;
            self.ledger.launch();
        }
        Ok(())
    }

    fn launch(&mut self, bucket: usize) -> Result<()> {
        // Its gradients, and all accesses of earlier passes.
        self.streams.iter().try_for_each(|&stream| self.order(stream, self.stream))?;
        let buf = self.buckets[bucket];
        let small = self.scratch.filter(|_| buf.dtype() == DType::F32);
        let small = small.map(|scratch| scratch.part(0..buf.count())).transpose()?;
        if let Some(small) = small {
            // SAFETY: both belong to this reducer, and only this stream accesses them until
            // `finish`.
            unsafe { self.kernels.cast(small, buf, self.stream) }?;
        }
        let calls = self.group.device()?.all_reduce(small.unwrap_or(buf), ReduceOp::Avg)?;
        self.works.push(calls.enqueue(self.stream)?);
        if let Some(small) = small {
            // SAFETY: as above.
            unsafe { self.kernels.cast(buf, small, self.stream) }?;
        }
        // SAFETY: as above.
        unsafe { self.kernels.averaged(bucket, buf, self.stream) }
    }

    fn average(&mut self, stream: DeviceStream) -> Result<()> {
        let empty = self.ledger.complete_unused(&self.group)?;
        if !empty.is_empty() {
            // The last accesses to these slots were in `stream`, or ordered before it.
            self.order(stream, self.stream)?;
        }
        for slot in empty {
            let buf = self.buckets[slot.bucket].part(slot.range())?;
            // SAFETY: a part of a bucket that nothing else accesses, as was just ordered.
            unsafe { backend(&self.group).clear(buf, self.stream) }?;
        }
        self.launch_full()?;
        let used = self.ledger.used();
        let used = used.map(|map| self.group.all_reduce_async(map, ReduceOp::Max)?.wait());
        self.ledger.averaged(used.transpose()?.as_deref());
        if let Some(plan) = self.ledger.next_plan(&self.group)? {
            self.lay_out(plan)?;
        }
        self.order(self.stream, stream)
    }

    /// Ends a pass: orders `stream` after all others.
    fn gather(&mut self, stream: DeviceStream) -> Result<()> {
        for &other in self.streams.iter().filter(|&&other| other != stream) {
            self.order(other, stream)?;
        }
        self.streams.clear();
        self.finish_stream = Some(stream);
        Ok(())
    }

    /// Rebuilds the buckets, and copies the gradients.
    fn lay_out(&mut self, plan: BucketPlan) -> Result<()> {
        let (memory, buckets, scratch) = alloc_all(&self.group, &plan, self.compress)?;
        let old = self.memory.len();
        self.memory.extend(memory);
        for (index, new) in plan.slots().iter().enumerate() {
            let (from, to) = (self.slot(index), buckets[new.bucket].part(new.range())?);
            // SAFETY: both belong to this reducer; only this stream accesses them until `finish`
            // has ordered the caller's.
            unsafe { backend(&self.group).copy(to, from, self.stream) }?;
        }
        let mark = self.mark(self.stream)?;
        let new = self.memory.split_off(old);
        self.retired.push((std::mem::replace(&mut self.memory, new), mark));
        (self.buckets, self.scratch) = (buckets, scratch);
        self.kernels.laid_out(&plan, &self.buckets)?;
        self.ledger.set_plan(plan);
        Ok(())
    }
}

impl<K> DeviceReducer<K> {
    fn mark(&self, stream: DeviceStream) -> Result<Box<dyn Mark>> {
        // SAFETY: the reducer's own stream, or one that lives by the caller's contract.
        unsafe { backend(&self.group).mark(stream) }
    }

    /// Blocks until all streams that may access the buckets have executed their work so far; false
    /// on timeout.
    fn wait_idle(&self, timeout: Duration) -> bool {
        if self.group.backend.forked() {
            return false;
        }
        let streams = self.streams.iter().copied().chain(self.finish_stream).chain([self.stream]);
        let marks: Result<Vec<_>> = streams.map(|stream| self.mark(stream)).collect();
        let Ok(marks) = marks else { return false };
        let deadline = Instant::now() + timeout;
        marks.iter().all(|mark| {
            loop {
                match mark.reached() {
                    Ok(true) => return true,
                    Ok(false) if Instant::now() < deadline => std::thread::sleep(TICK),
                    _ => return false,
                }
            }
        })
    }
}

impl<K> Drop for DeviceReducer<K> {
    fn drop(&mut self) {
        if self.memory.is_empty() && self.retired.is_empty() {
            return;
        }
        if !self.wait_idle(DROP_TIMEOUT) {
            // A stream may still write there, so the memory is leaked.
            std::mem::forget(std::mem::take(&mut self.memory));
            std::mem::forget(std::mem::take(&mut self.retired));
        }
    }
}

/// Timeout of dropping a reducer.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval of a mark.
const TICK: Duration = Duration::from_micros(200);

/// Returns the 16-bit type in which buckets of f32 are sent, if any; rejects options that only the
/// host's reducer has.
fn compression(options: &ReducerOptions) -> Result<Option<DType>> {
    let what = match options {
        ReducerOptions { static_graph: true, .. } => "static graphs on devices".to_owned(),
        ReducerOptions { through_device: true, .. } => {
            "through_device for gradients that are on the device".to_owned()
        }
        ReducerOptions { comm_hook: CommHook::AllReduce, .. } => return Ok(None),
        ReducerOptions { comm_hook: CommHook::Fp16Compress, .. } => return Ok(Some(DType::F16)),
        ReducerOptions { comm_hook: CommHook::Bf16Compress, .. } => return Ok(Some(DType::Bf16)),
        #[cfg(feature = "powersgd")]
        ReducerOptions { comm_hook, .. } => format!("{comm_hook:?} on devices"),
    };
    Err(Error::Unsupported { backend: "reducer", what })
}

/// Returns the device backend of a group that has a device.
pub(super) fn backend(group: &ProcessGroup) -> &dyn DeviceBackend {
    group.backend.device().expect("a reducer is made for a group with a device only")
}

type Parts = (Vec<DeviceMemory>, Vec<DeviceBuf>, Option<DeviceBuf>);

/// Allocates all buckets, and the buffer for the largest bucket of f32 in 16 bits.
fn alloc_all(group: &ProcessGroup, plan: &BucketPlan, compress: Option<DType>) -> Result<Parts> {
    let mut memory = Vec::new();
    let mut alloc = |dtype: DType, count: usize| {
        // At least one element: a library may refuse an empty allocation.
        let made = group.device()?.alloc(dtype, count.max(1))?;
        // SAFETY: freed when no stream accesses it any more, or leaked.
        let buf = unsafe { made.as_buf() }.part(0..count);
        memory.push(made);
        buf
    };
    let buckets = plan.buckets().iter().map(|spec| alloc(spec.dtype, spec.count));
    let buckets = buckets.collect::<Result<_>>()?;
    let wide = plan.buckets().iter().filter(|spec| spec.dtype == DType::F32);
    let most = wide.map(|spec| spec.count).max();
    let scratch = compress.zip(most).map(|(to, most)| alloc(to, most)).transpose()?;
    Ok((memory, buckets, scratch))
}
