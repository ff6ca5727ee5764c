//! Averaging gradients in a device's memory while backward computes: the host waits for no device.
//!
//! [`DeviceReducer`] keeps the rules of [`Reducer`](super::Reducer), of which [`Ledger`] knows; here is
//! what streams, events and memory add to them.
//!
//! Invariant: whatever touches a bucket is ordered behind what touched it before by events, never by
//! time. Memory is given back once all streams that may touch it have come past.

#![expect(unsafe_code, reason = "hands memory that streams use to the backend")]

use std::time::{Duration, Instant};

use super::ledger::Ledger;
use super::{BucketKernels, BucketPlan, CommHook, ParamInfo, ReducerOptions};
use crate::device::{DeviceBackend, DeviceMemory, Kept, Mark};
use crate::{DType, DeviceBuf, DeviceStream, DeviceWork, Error, ProcessGroup, ReduceOp, Result};

/// Averages gradients in the memory of a group's device over its ranks: by the rules of [`Reducer`](super::Reducer), with three
/// differences:
///
/// * **Time is a stream's.** A gradient is ready once the stream that [`ready`](Self::ready)
///   names has come that far; buckets travel in a stream of the reducer's own, which waits for it; and
///   [`finish`](Self::finish) has the caller's stream wait for the averages. All calls return
///   at once. Only ranks meet on the host, and only where they must agree: at the end of the first
///   pass, and in each pass with
///   [`find_unused_parameters`](super::ReducerOptions::find_unused_parameters).
/// * **Gradients may be written where they will be sent from.** [`slot`](Self::slot) says
///   where that is; a gradient that is elsewhere is copied in order of its stream.
/// * **Kernels are the caller's.** This crate has none. [`BucketKernels`] adds gradients that are
///   elsewhere, casts buckets of f32 that travel in 16 bits ([`CommHook`]), and has an epilogue: called for
///   each bucket behind its all-reduce, in the same stream, while the bucket is still in the device's
///   cache. There a look for values that are not finite, or a sum of squares, reads no memory.
///
/// # Where the kernels come from
///
/// `amp` and `fused-optim` have them, and neither knows this crate; addresses and streams are numbers
/// to all three. Casts are `amp::cuda::cast` over an `amp::cuda::Gpu::with_stream` of
/// [`stream`](Self::stream). The verdict on the gradients and their norm are an
/// `amp::cuda::CudaScaler` over the same: `bind_parts`, a part for each bucket, in
/// [`laid_out`](BucketKernels::laid_out), `check_part(bucket)` in
/// [`averaged`](BucketKernels::averaged). On the stream that `finish` was given,
/// `fused_optim::cuda::CudaOptimizer::step_unless` takes the verdict from the device. Where a step
/// clips by the norm, `CudaOptimizer::look_part` of the bucket's tensors, on a `Gpu` of the same
/// stream, takes `check_part`'s place: `step` then reads no gradient twice.
///
/// ```text
/// ready(i) .. ready(j)  ->  bucket's stream: all-reduce | look      all-reduce | look   ...
/// caller's stream:  backward ............................ finish | step_unless(found_inf) | forward
/// ```
///
/// # Failures
///
/// As everywhere in [`device`](crate::device): a group that fails lets streams go on, and what they
/// compute then is unspecified. The next [`prepare`](Self::prepare) returns the failure;
/// [`settled`](Self::settled) and [`wait`](Self::wait) tell sooner.
///
/// # Streams and memory
///
/// Streams that it is given must live until it is dropped. Dropping it waits until the device has let
/// go of the buckets, but no longer than ten seconds: then their memory is never freed.
#[derive(Debug)]
#[doc(alias = "DistributedDataParallel")]
pub struct DeviceReducer<K> {
    ledger: Ledger,
    kernels: K,
    /// The type of 16 bits in which buckets of f32 travel.
    compress: Option<DType>,
    /// The stream in which buckets travel.
    stream: DeviceStream,
    lanes: Vec<Lane>,
    /// Room for a bucket in 16 bits.
    scratch: Option<DeviceBuf>,
    memory: Vec<DeviceMemory>,
    /// Memory that is no longer used once its mark is reached.
    retired: Vec<(Vec<DeviceMemory>, Box<dyn Mark>)>,
    /// The averages that are not known to have ended well.
    works: Vec<DeviceWork>,
    /// Streams of the caller in this pass.
    seen: Vec<DeviceStream>,
    /// Ends of what earlier passes do with the buckets.
    before: Vec<Box<dyn Mark>>,
    /// The stream that the last pass was finished on.
    reader: Option<DeviceStream>,
    group: ProcessGroup,
    _stream: Kept,
}

/// A bucket.
#[derive(Debug)]
struct Lane {
    buf: DeviceBuf,
    /// Where its gradients of this pass come from.
    streams: Vec<DeviceStream>,
    /// Once it is full: how far they were then.
    full: Vec<Box<dyn Mark>>,
}

impl<K: BucketKernels> DeviceReducer<K> {
    /// A reducer for `params`, in registration (forward) order; index `i` is `params[i]` everywhere.
    ///
    /// Every rank of `group` must call it with equal arguments, `kernels` aside; this is checked.
    /// Blocks: one gathering of the parameter list, and an allocation for each bucket.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] on every rank, with the first parameter or option that differs;
    /// [`Error::Unsupported`] for parameters that are not floating-point numbers, for a group without
    /// a device, for [`static_graph`](ReducerOptions::static_graph),
    /// [`through_device`](ReducerOptions::through_device) and PowerSGD; those of
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
        let mut made = Self {
            ledger,
            kernels,
            compress,
            stream,
            lanes: Vec::new(),
            scratch: None,
            memory: Vec::new(),
            retired: Vec::new(),
            works: Vec::new(),
            seen: Vec::new(),
            before: Vec::new(),
            reader: None,
            group,
            _stream: Kept(kept),
        };
        let plan = made.ledger.plan().clone();
        (made.memory, made.lanes, made.scratch) = alloc_all(&made.group, &plan, compress)?;
        made.tell_layout(&plan)?;
        Ok(made)
    }

    /// Begins a pass, as [`Reducer::prepare`](super::Reducer::prepare).
    ///
    /// # Errors
    ///
    /// As there, and the failure of an earlier pass that has shown since.
    #[doc(alias = "no_sync")]
    pub fn prepare(&mut self, sync: bool) -> Result<()> {
        self.ledger.check_usable()?;
        let usable = self.group.device().map(drop);
        self.ledger.remember(usable)?;
        let settled: Vec<_> = self.works.iter().map(DeviceWork::settled).collect();
        if let Some(Err(error)) = settled.into_iter().flatten().find(Result::is_err) {
            return self.ledger.remember(Err(error));
        }
        self.works.retain(|work| work.settled().is_none());
        self.retired.retain(|(_, mark)| !matches!(mark.reached(), Ok(true)));
        self.ledger.prepare(sync)?;
        // Of a pass that was given up.
        for stream in std::mem::take(&mut self.seen) {
            let mark = self.mark(stream)?;
            self.before.push(mark);
        }
        for lane in &mut self.lanes {
            (lane.streams, lane.full) = (Vec::new(), Vec::new());
        }
        Ok(())
    }

    /// Where the gradient of parameter `index` lies in its bucket. A gradient that was written, or
    /// added, there before it is reported as [`ready`](Self::ready) is not copied.
    ///
    /// It moves when the buckets are laid out anew: ask again after each [`finish`](Self::finish).
    /// Before the first gradient, and after [`zero_grad`](Self::zero_grad), it holds anything.
    ///
    /// # Panics
    ///
    /// If there is no such parameter.
    #[must_use]
    #[doc(alias = "gradient_as_bucket_view")]
    pub fn slot(&self, index: usize) -> DeviceBuf {
        let place = self.ledger.place(index);
        let bucket = self.lanes[place.bucket].buf;
        bucket.part(place.elements()).expect("a plan's places lie in their buckets")
    }

    /// Takes the gradient of parameter `index`, which is there once `stream` has done what it has to
    /// do already: copies it into its slot or adds it to what is there, in order of `stream`, unless it
    /// lies in the slot. If that completes buckets that are next in order, they leave. Waits for
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], naming the parameter, if it has reported in this pass already, if
    /// type or length are not its own, or if it overlaps its slot in part; [`Error::Unsupported`] for a
    /// stream that is being captured: nothing was changed. Else that of an earlier bucket's failure, or
    /// of the kernels.
    ///
    /// # Safety
    ///
    /// The gradient is as [`DeviceBuf::from_raw`] says until `stream` has come this far, and the slot
    /// is used by nobody else but what is ordered before `stream`, or behind the stream of
    /// [`finish`](Self::finish). The stream lives until the reducer is dropped.
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
            let text = format!("the gradient of parameter {index} lies across its slot");
            return Err(Error::InvalidArgument(text));
        }
        self.see(stream)?;
        if grad != slot && slot.count() > 0 {
            let taken = if self.ledger.has_grad(index) {
                // SAFETY: the slot is a bucket's, which the caller's streams have to themselves until
                // it leaves; the gradient is the caller's promise.
                unsafe { self.kernels.add(slot, grad, stream) }
            } else {
                // SAFETY: as above.
                unsafe { backend(&self.group).copy(slot, grad, stream) }
            };
            self.remember(taken)?;
        }
        self.ledger.report(index, false);
        let bucket = self.ledger.place(index).bucket;
        let lane = &mut self.lanes[bucket];
        if !lane.streams.contains(&stream) {
            lane.streams.push(stream);
        }
        let left = self.note_full(bucket).and_then(|()| self.launch_full());
        self.remember(left)
    }

    /// Ends a pass: once `stream` has come this far, every bucket has been averaged and its epilogue
    /// is done, or, without `sync`, this rank's gradients are all there. After the first pass with
    /// `sync`, lays the buckets out anew.
    ///
    /// Every rank must call it. Does not wait for the device; for the other ranks' hosts after the
    /// first pass with `sync`, and in each with
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters).
    ///
    /// # Errors
    ///
    /// As [`Reducer::finish`](super::Reducer::finish); [`Error::Unsupported`] for a stream that is
    /// being captured; those of the kernels.
    ///
    /// # Safety
    ///
    /// The stream lives until the reducer is dropped. Whatever uses the gradients does so in it, or
    /// ordered behind it and before what the next pass's streams have to do.
    pub unsafe fn finish(&mut self, stream: DeviceStream) -> Result<()> {
        self.ledger.check_usable()?;
        // Refuses a stream that is being captured, before anything is changed.
        drop(self.mark(stream)?);
        self.see(stream)?;
        let sync = self.ledger.close()?;
        let finished = if sync { self.average(stream) } else { self.gather(stream) };
        self.remember(finished)?;
        self.seen.clear();
        self.reader = Some(stream);
        Ok(())
    }

    /// The gradient of parameter `index`, once the stream of [`finish`](Self::finish) has come that
    /// far: averaged after a pass with `sync`, this rank's sum after one without. `None` if it has
    /// none, or while its bucket is in flight in a pass that is not finished.
    ///
    /// # Panics
    ///
    /// If there is no such parameter.
    #[must_use]
    pub fn grad(&self, index: usize) -> Option<DeviceBuf> {
        let here = !self.ledger.is_flying(self.ledger.place(index).bucket);
        (here && self.ledger.has_grad(index)).then(|| self.slot(index))
    }

    /// Forgets all gradients: the next ones overwrite. Call it between passes.
    pub fn zero_grad(&mut self) {
        self.ledger.zero_grad();
    }

    /// How the averages begun so far ended, once they have. Does not wait.
    #[must_use]
    pub fn settled(&self) -> Option<Result<()>> {
        let ends: Option<Vec<_>> = self.works.iter().map(DeviceWork::settled).collect();
        ends.map(|ends| ends.into_iter().collect())
    }

    /// Waits, here on the host, until the averages begun so far have ended.
    ///
    /// # Errors
    ///
    /// As [`DeviceWork::wait`].
    pub fn wait(&self) -> Result<()> {
        self.works.iter().try_for_each(DeviceWork::wait)
    }

    /// The layout of the buckets now.
    #[must_use]
    pub fn plan(&self) -> &BucketPlan {
        self.ledger.plan()
    }

    /// How many buckets have left in this pass; they are the first of the [plan](Self::plan).
    #[must_use]
    pub fn launched(&self) -> usize {
        self.ledger.launched()
    }

    /// The stream in which buckets travel, which lives as long as the reducer.
    #[must_use]
    pub fn stream(&self) -> DeviceStream {
        self.stream
    }

    /// The kernels it was made with.
    #[must_use]
    pub fn kernels(&self) -> &K {
        &self.kernels
    }

    /// As [`kernels`](Self::kernels), to be changed.
    pub fn kernels_mut(&mut self) -> &mut K {
        &mut self.kernels
    }

    /// The group the gradients are averaged over.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Passes `result` on; an error ends this reducer, and tells the peers if they do not know.
    fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && self.group.backend.health().is_ok()
        {
            self.group.abort(&error.to_string());
        }
        self.ledger.remember(result)
    }

    fn mark(&self, stream: DeviceStream) -> Result<Box<dyn Mark>> {
        mark(&self.group, stream)
    }

    /// Has `later` wait for what `earlier` has to do now.
    fn order(&self, earlier: DeviceStream, later: DeviceStream) -> Result<()> {
        order(&*self.mark(earlier)?, later)
    }

    /// Notes a stream of this pass: it comes behind the passes before, and behind what was done with
    /// their gradients.
    fn see(&mut self, stream: DeviceStream) -> Result<()> {
        if self.seen.contains(&stream) {
            return Ok(());
        }
        // Refuses a stream that is being captured, before anything is changed.
        drop(self.mark(stream)?);
        for mark in &self.before {
            order(&**mark, stream)?;
        }
        if let Some(reader) = self.reader.filter(|&reader| reader != stream) {
            self.order(reader, stream)?;
        }
        self.seen.push(stream);
        Ok(())
    }

    /// Notes how far the streams of a bucket are at the moment when it is full, so that it waits for
    /// no more than that.
    fn note_full(&mut self, bucket: usize) -> Result<()> {
        if self.ledger.is_full(bucket) && self.lanes[bucket].full.is_empty() {
            let streams = std::mem::take(&mut self.lanes[bucket].streams);
            let marks: Result<Vec<_>> = streams.into_iter().map(|one| self.mark(one)).collect();
            self.lanes[bucket].full = marks?;
        }
        Ok(())
    }

    /// Launches buckets, in order, as far as they are full.
    fn launch_full(&mut self) -> Result<()> {
        while let Some(next) = self.ledger.next_full() {
            self.note_full(next)?;
            self.launch(next)?;
            self.ledger.launch();
        }
        Ok(())
    }

    fn launch(&mut self, bucket: usize) -> Result<()> {
        if bucket == 0 {
            for mark in &self.before {
                order(&**mark, self.stream)?;
            }
        }
        for mark in std::mem::take(&mut self.lanes[bucket].full) {
            order(&*mark, self.stream)?;
        }
        let buf = self.lanes[bucket].buf;
        let small = self.scratch.filter(|_| buf.dtype() == DType::F32);
        let small = small.map(|scratch| scratch.part(0..buf.count())).transpose()?;
        if let Some(small) = small {
            // SAFETY: both are this reducer's, and are used in this stream alone until `finish`.
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
        let empty = self.ledger.excuse_unused(&self.group)?;
        if !empty.is_empty() {
            // What was last done with these places was done in `stream`, or before it.
            self.order(stream, self.stream)?;
        }
        for place in empty {
            let buf = self.lanes[place.bucket].buf.part(place.elements())?;
            // SAFETY: a part of a bucket that nobody else uses, as was just ordered.
            unsafe { backend(&self.group).clear(buf, self.stream) }?;
        }
        self.launch_full()?;
        let used = self.ledger.used();
        let used = used.map(|map| self.group.all_reduce_async(map, ReduceOp::Max)?.wait());
        self.ledger.averaged(used.transpose()?.as_deref());
        if let Some(plan) = self.ledger.next_plan(&self.group)? {
            self.lay_out(plan)?;
        }
        let end = self.mark(self.stream)?;
        order(&*end, stream)?;
        self.before = vec![end];
        Ok(())
    }

    /// Ends a pass that is not averaged: `stream` comes behind all others.
    fn gather(&mut self, stream: DeviceStream) -> Result<()> {
        for &other in self.seen.iter().filter(|&&other| other != stream) {
            self.order(other, stream)?;
        }
        self.before = vec![self.mark(stream)?];
        Ok(())
    }

    /// Lays the buckets out anew, and takes the gradients along.
    fn lay_out(&mut self, plan: BucketPlan) -> Result<()> {
        let (memory, lanes, scratch) = alloc_all(&self.group, &plan, self.compress)?;
        let old = self.memory.len();
        self.memory.extend(memory);
        for (index, new) in plan.places().iter().enumerate() {
            let (from, to) = (self.slot(index), lanes[new.bucket].buf.part(new.elements())?);
            // SAFETY: both are this reducer's; no stream but this one uses them before `finish` has
            // ordered it.
            unsafe { backend(&self.group).copy(to, from, self.stream) }?;
        }
        let mark = self.mark(self.stream)?;
        let new = self.memory.split_off(old);
        self.retired.push((std::mem::replace(&mut self.memory, new), mark));
        (self.lanes, self.scratch) = (lanes, scratch);
        self.tell_layout(&plan)?;
        self.ledger.adopt(plan);
        Ok(())
    }

    fn tell_layout(&mut self, plan: &BucketPlan) -> Result<()> {
        let bufs: Vec<DeviceBuf> = self.lanes.iter().map(|lane| lane.buf).collect();
        self.kernels.laid_out(plan, &bufs)
    }
}

impl<K> DeviceReducer<K> {
    /// Whether all streams that may use the buckets have come past what they have to do now.
    fn is_past(&self, patience: Duration) -> bool {
        if self.group.backend.forked() {
            return false;
        }
        let streams = self.seen.iter().copied().chain(self.reader).chain([self.stream]);
        let marks: Result<Vec<_>> = streams.map(|stream| mark(&self.group, stream)).collect();
        let Ok(marks) = marks else { return false };
        let deadline = Instant::now() + patience;
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
        if !self.is_past(GOODBYE) {
            // Somebody may still write there.
            std::mem::forget(std::mem::take(&mut self.memory));
            std::mem::forget(std::mem::take(&mut self.retired));
        }
    }
}

/// How long dropping a reducer may take.
const GOODBYE: Duration = Duration::from_secs(10);
/// Between two looks at a mark.
const TICK: Duration = Duration::from_micros(200);

/// The type in which buckets of f32 travel, if that is another; refuses what only the host's reducer does.
fn compression(options: &ReducerOptions) -> Result<Option<DType>> {
    let what = match options {
        ReducerOptions { static_graph: true, .. } => "a static graph on devices".to_owned(),
        ReducerOptions { through_device: true, .. } => {
            "a way through the device it is on".to_owned()
        }
        ReducerOptions { comm_hook: CommHook::AllReduce, .. } => return Ok(None),
        ReducerOptions { comm_hook: CommHook::Fp16Compress, .. } => return Ok(Some(DType::F16)),
        ReducerOptions { comm_hook: CommHook::Bf16Compress, .. } => return Ok(Some(DType::Bf16)),
        #[cfg(feature = "powersgd")]
        ReducerOptions { comm_hook, .. } => format!("{comm_hook:?} on devices"),
    };
    Err(Error::Unsupported { backend: "reducer", what })
}

fn backend(group: &ProcessGroup) -> &dyn DeviceBackend {
    group.backend.device().expect("a reducer is made for a group with a device only")
}

fn mark(group: &ProcessGroup, stream: DeviceStream) -> Result<Box<dyn Mark>> {
    // SAFETY: the reducer's own stream, or one that the caller promised lives.
    unsafe { backend(group).mark(stream) }
}

fn order(mark: &dyn Mark, stream: DeviceStream) -> Result<()> {
    // SAFETY: as for `mark`.
    unsafe { mark.order(stream) }
}

type Laid = (Vec<DeviceMemory>, Vec<Lane>, Option<DeviceBuf>);

/// Memory for all buckets, and for the largest of f32 in 16 bits.
fn alloc_all(group: &ProcessGroup, plan: &BucketPlan, compress: Option<DType>) -> Result<Laid> {
    let mut memory = Vec::new();
    let mut alloc = |dtype: DType, count: usize| {
        // A library may refuse to allocate nothing.
        let made = group.device()?.alloc(dtype, count.max(1))?;
        // SAFETY: dropped when no stream uses it any more, or never.
        let buf = unsafe { made.as_buf() }.part(0..count);
        memory.push(made);
        buf
    };
    let mut lanes = Vec::new();
    for spec in plan.buckets() {
        let buf = alloc(spec.dtype, spec.count)?;
        lanes.push(Lane { buf, streams: Vec::new(), full: Vec::new() });
    }
    let wide = plan.buckets().iter().filter(|spec| spec.dtype == DType::F32);
    let most = wide.map(|spec| spec.count).max();
    let scratch = compress.zip(most).map(|(to, most)| alloc(to, most)).transpose()?;
    Ok((memory, lanes, scratch))
}
