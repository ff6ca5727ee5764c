//! Gradient averaging that overlaps with backward.
//!
//! Backward produces gradients one by one, last layer first. The [`Reducer`] packs them into
//! buckets. As soon as a bucket has all of its gradients, and all earlier buckets were launched,
//! its average over all ranks starts in the background, while backward continues. At the end of
//! backward [`finish`](Reducer::finish) waits for the buckets in flight.
//!
//! The rules are those of PyTorch's `DistributedDataParallel`. In the first pass (a forward and its
//! backward) there is one bucket per dtype; after it the buckets are rebuilt in the order in which
//! rank 0's gradients arrived, so that from then on buckets fill one after the other. See
//! [`BucketPlan`].
//!
//! ```text
//! prepare(sync) -> ready(i, grad) for each parameter, in any order -> finish()
//! ```
//!
//! Differences from PyTorch: a parameter without gradient is an error in the same step rather than
//! in the next forward, and on all ranks; and the all-reduce divides by the world size
//! ([`ReduceOp::Avg`]), so 16-bit gradients are added in `f32` and rounded once.
//!
//! [`DeviceReducer`] averages gradients in device memory; its host never waits for the device.
//!
//! Invariant: buckets are launched in the order of the plan, which is equal on all ranks, so all
//! ranks make the same collective calls in the same order, whatever the order in which gradients
//! arrive.

mod bucket;
mod device;
mod kernels;
mod ledger;
mod plan;
#[cfg(feature = "powersgd")]
mod power_sgd;
mod staging;

use std::ops::Range;
use std::sync::Arc;

use self::bucket::{Bucket, alloc, slice, slice_mut};
pub use self::bucket::{BucketMemory, Gradient};
pub use self::device::DeviceReducer;
pub use self::kernels::{BucketKernels, NoKernels};
use self::ledger::Ledger;
pub use self::plan::{BucketPlan, BucketSpec, ParamInfo, Slot};
#[cfg(feature = "powersgd")]
pub use self::power_sgd::PowerSgd;
use self::staging::Staging;
use crate::memory::copy::copy_slice;
use crate::{DType, Element, Error, ProcessGroup, ReduceOp, Result};

/// Options of a [`Reducer`] or [`DeviceReducer`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReducerOptions {
    /// Cap of the first bucket of each dtype. Default: 1 MiB, small so that communication starts
    /// early.
    pub first_bucket_bytes: usize,
    /// Cap of each further bucket. Default: 25 MiB.
    pub bucket_bytes: usize,
    /// Whether a pass may leave parameters without gradient: they count as zero on this rank, and
    /// have no gradient if no rank had one. The buckets then keep their first layout, and each pass
    /// performs one additional small all-reduce. Default: off.
    pub find_unused_parameters: bool,
    /// Whether every pass uses the same parameters as the first: those without gradient then, on
    /// this rank, count as zero, and a different set in a later pass is an error. The buckets are
    /// rebuilt after the second pass instead of the first. Overrides `find_unused_parameters`.
    /// Default: off.
    pub static_graph: bool,
    /// How a bucket is communicated.
    pub comm_hook: CommHook,
    /// Whether buckets are averaged in the memory of the group's device, by the
    /// [rules](crate::device::DeviceCalls) there: for gradients in host memory in a group over NCCL
    /// or HCCL. Each bucket is copied to the device when it is full and back when the pass ends.
    /// Not with PowerSGD. Default: off.
    pub through_device: bool,
}

/// How a bucket is communicated; modelled on `torch.distributed.algorithms.ddp_comm_hooks`. A
/// [`DeviceReducer`] compresses only buckets of `f32`, with its kernels, and sends others
/// uncompressed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "register_comm_hook")]
pub enum CommHook {
    /// Uncompressed.
    #[default]
    AllReduce,
    /// `f32` as `f16`: half the bytes; values above 65504 become infinite. Buckets of 16-bit
    /// gradients are sent uncompressed.
    #[doc(alias = "fp16_compress_hook")]
    Fp16Compress,
    /// `f32` as `bf16`: half the bytes, eight significant bits.
    #[doc(alias = "bf16_compress_hook")]
    Bf16Compress,
    /// `f32` matrices as low-rank factors. Other types are [`Unsupported`](Error::Unsupported).
    /// With the feature `powersgd`.
    #[cfg(feature = "powersgd")]
    PowerSgd(PowerSgd),
}

impl CommHook {
    /// Validates the options; returns whether buckets have state that the next pass depends on.
    fn keeps_memory(&self) -> Result<bool> {
        match self {
            Self::AllReduce | Self::Fp16Compress | Self::Bf16Compress => Ok(false),
            #[cfg(feature = "powersgd")]
            Self::PowerSgd(options) => options.validate().map(|()| true),
        }
    }
}

impl Default for ReducerOptions {
    fn default() -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            find_unused_parameters: false,
            static_graph: false,
            comm_hook: CommHook::AllReduce,
            through_device: false,
        }
    }
}

/// State of a [`Reducer`] besides gradients: PowerSGD's memory. Each rank has its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReducerState {
    /// Number of passes averaged so far.
    pub passes: u64,
    /// The parameters in the order of the buckets' final layout; empty before that exists.
    pub order: Vec<usize>,
    /// For each parameter, whether the static graph does not use it: 1 on this rank, 2 on any rank.
    pub idle: Vec<u8>,
    /// Each bucket's memory.
    pub buckets: Vec<BucketMemory>,
}

/// Averages the gradients of one model over the ranks of a group.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use collective::reducer::{ParamInfo, Reducer, ReducerOptions};
/// use collective::{DType, ProcessGroup};
///
/// let groups = ProcessGroup::threads(2, Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || -> collective::Result<()> {
///             let gradient = [group.rank() as f32; 3];
///             let params = vec![ParamInfo::new("weight", 3, DType::F32)];
///             let mut reducer = Reducer::new(group, params, ReducerOptions::default())?;
///             reducer.prepare(true)?;
///             reducer.ready(0, &gradient)?;
///             reducer.finish()?;
///             assert_eq!(reducer.grad::<f32>(0), Some(&[0.5; 3][..]));
///             reducer.zero_grad();
///             Ok(())
///         });
///     }
/// });
/// # Ok::<(), collective::Error>(())
/// ```
#[derive(Debug)]
#[doc(alias = "DistributedDataParallel")]
pub struct Reducer {
    group: ProcessGroup,
    ledger: Ledger,
    hook: CommHook,
    /// Whether the next pass depends on more than gradients.
    keeps_memory: bool,
    staging: Option<Arc<Staging>>,
    buckets: Vec<Box<dyn Bucket>>,
}

impl Reducer {
    /// Makes a reducer for `params`, in registration (forward) order; index `i` is `params[i]` in
    /// all methods.
    ///
    /// Every rank of `group` must call it with equal arguments, which are compared. Blocks: one
    /// all-gather of the parameter list, and an allocation for each bucket.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] on every rank, with the first parameter or option that differs;
    /// [`Error::Unsupported`] for parameters that are not floating-point numbers, and for
    /// [`through_device`](ReducerOptions::through_device) in a group without a device; the errors
    /// of [`ProcessGroup::alloc`].
    pub fn new(
        group: ProcessGroup,
        params: Vec<ParamInfo>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let hook = options.comm_hook.clone();
        let staging = options.through_device.then(|| Staging::new(&group)).transpose()?;
        let ledger = Ledger::new(&group, params, options)?;
        let keeps_memory = hook.keeps_memory()?;
        let mut this = Self { group, ledger, hook, keeps_memory, staging, buckets: Vec::new() };
        this.buckets = this.alloc_all(this.ledger.plan())?;
        Ok(this)
    }

    /// Begins a pass: call it before each forward.
    ///
    /// With `sync`, the pass ends with averaged gradients. Without (PyTorch's `no_sync`), gradients
    /// are only accumulated on this rank, to be averaged in a later pass; every rank must do the
    /// same. Gradients accumulate over passes until [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the last pass launched a bucket and was not
    /// [finished](Self::finish); [`Error::Poisoned`] after a failure.
    #[doc(alias = "no_sync")]
    pub fn prepare(&mut self, sync: bool) -> Result<()> {
        self.check_usable()?;
        self.ledger.prepare(sync)?;
        for slot in self.ledger.stale() {
            self.buckets[slot.bucket].clear(slot.range());
        }
        Ok(())
    }

    /// Takes the gradient of parameter `index`: copies it into its bucket, or adds it to the one
    /// there. Launches the buckets that are full, in order, without waiting for them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], with the parameter's name, if it already has a gradient in this
    /// pass or its type or length is wrong; nothing is changed then. Otherwise an earlier bucket's
    /// failure.
    #[expect(clippy::missing_panics_doc, reason = "`check_gradient` rules the panic out")]
    pub fn ready<T: Gradient>(&mut self, index: usize, grad: &[T]) -> Result<()> {
        self.check_usable()?;
        self.ledger.check_gradient(index, T::DTYPE, grad.len())?;
        self.ledger.check_not_external(index)?;
        let slot = self.ledger.slot(index);
        let bucket = slice_mut::<T>(&mut *self.buckets[slot.bucket])
            .expect("a bucket whose parameter has not reported is here, and of its type");
        let own = &mut bucket[slot.range()];
        if self.ledger.has_grad_in_bucket(index) {
            T::accumulate(own, grad);
        } else {
            copy_slice(own, grad);
        }
        self.ledger.mark_ready(index, false);
        self.launch_full()
    }

    /// Same as [`ready`](Self::ready), for a gradient of `count` elements of `dtype` that stays
    /// outside the buckets. The caller accumulates it, including the gradient in its bucket, which
    /// the reducer drops. Only where nothing is averaged: in a group of one rank, or in a pass
    /// without `sync`. [`grad`](Self::grad) does not return it.
    ///
    /// # Errors
    ///
    /// Same as [`ready`](Self::ready); [`Error::InvalidArgument`] in a pass with `sync` of several
    /// ranks or with a [`comm_hook`](ReducerOptions::comm_hook).
    pub fn mark_ready_external(&mut self, index: usize, dtype: DType, count: usize) -> Result<()> {
        self.check_usable()?;
        self.ledger.check_gradient(index, dtype, count)?;
        let local = self.group.world_size() == 1 && self.hook == CommHook::AllReduce;
        if self.ledger.is_synced() && !local {
            let name = &self.ledger.params()[index].name;
            let text = format!("external gradient for {name} in a pass with sync: call ready");
            return Err(Error::InvalidArgument(text));
        }
        self.ledger.mark_ready(index, true);
        self.launch_full()
    }

    /// Ends a pass: waits until every bucket has been averaged. Rebuilds the buckets after the
    /// first pass with `sync`.
    ///
    /// Every rank must call it. Without `sync` it does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] on a rank with parameters without gradient, unless
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters); its peers get
    /// [`Error::Aborted`] with the beginning of the same text. [`Error::InvalidArgument`] likewise,
    /// for a parameter whose only gradient is [external](Self::mark_ready_external) in a pass with
    /// `sync` of several ranks. Otherwise a peer's failure. After any error the reducer and its
    /// group are unusable, except for `UnusedParameters` in a group of one rank, which drops all
    /// gradients.
    pub fn finish(&mut self) -> Result<()> {
        self.check_usable()?;
        if !self.ledger.end_pass()? {
            return Ok(());
        }
        let span = self.ledger.finish_span(self.group.rank());
        let finished = span.in_scope(|| self.average());
        if self.group.world_size() == 1 && matches!(finished, Err(Error::UnusedParameters { .. })) {
            // No peer waits for this pass.
            let waited = self.buckets.iter_mut().try_for_each(|bucket| bucket.wait());
            self.ledger.poison_on_error(waited)?;
            self.ledger.zero_grad();
            return finished;
        }
        self.ledger.poison_on_error(finished)
    }

    /// Returns the gradient of parameter `index`, a view into its bucket: averaged after a pass
    /// with `sync`, this rank's sum after one without. `None` if it has none, if `T` is not its
    /// type, or while its bucket is in flight.
    ///
    /// # Panics
    ///
    /// If `index` is out of range.
    pub fn grad<T: Element>(&self, index: usize) -> Option<&[T]> {
        let slot = self.ledger.slot(index);
        if !self.ledger.has_grad_in_bucket(index) {
            return None;
        }
        slice::<T>(&*self.buckets[slot.bucket]).map(|bucket| &bucket[slot.range()])
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

    /// Multiplies PowerSGD's error, which is added to the next pass's gradients, by `factor`. Call
    /// it between passes on every rank when the loss scale changes, with the new scale divided by
    /// the old one.
    pub fn rescale(&mut self, factor: f32) {
        self.buckets.iter_mut().for_each(|bucket| bucket.rescale(factor));
    }

    /// Returns the reducer's state between two passes; `None` without PowerSGD, because the next
    /// pass then depends only on gradients.
    pub fn state_dict(&self) -> Option<ReducerState> {
        self.keeps_memory.then(|| {
            let (passes, order, idle) = self.ledger.state();
            let buckets = self.buckets.iter().map(|bucket| bucket.memory()).collect();
            ReducerState { passes, order, idle, buckets }
        })
    }

    /// Restores the state of a reducer with the same parameters and options, and drops all
    /// gradients. Every rank must call it, each with its own state of the same pass. Blocks: an
    /// allocation for each bucket.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the state does not match, or inside a pass; the errors of
    /// [`ProcessGroup::alloc`]. The reducer is unusable after any of them but the first.
    pub fn load_state_dict(&mut self, state: &ReducerState) -> Result<()> {
        self.check_usable()?;
        let plan = self.ledger.load_state(state.passes, &state.order, &state.idle)?;
        let loaded = self.load_buckets(plan, &state.buckets);
        self.ledger.poison_on_error(loaded)
    }

    /// Returns an earlier failure, or the group's error in a fork, which has no buckets.
    fn check_usable(&self) -> Result<()> {
        match self.group.backend.forked() {
            true => self.group.backend.ready(),
            false => self.ledger.check_usable(),
        }
    }

    fn load_buckets(&mut self, plan: Option<BucketPlan>, memory: &[BucketMemory]) -> Result<()> {
        if let Some(plan) = plan {
            self.buckets = self.alloc_all(&plan)?;
            self.ledger.set_plan(plan);
        }
        if memory.len() != self.buckets.len() {
            let (saved, own) = (memory.len(), self.buckets.len());
            let text = format!("the reducer's state has {saved} buckets, this reducer has {own}");
            return Err(Error::InvalidArgument(text));
        }
        self.buckets.iter_mut().zip(memory).try_for_each(|(b, memory)| b.set_memory(memory))
    }

    /// The current layout of the buckets.
    pub fn plan(&self) -> &BucketPlan {
        self.ledger.plan()
    }

    /// Number of buckets launched in this pass; they are the first of the [plan](Self::plan).
    pub fn launched(&self) -> usize {
        self.ledger.launched()
    }

    /// The group over which gradients are averaged.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Launches full buckets, in the order of the plan.
    fn launch_full(&mut self) -> Result<()> {
        while let Some(next) = self.ledger.next_full() {
            let (bucket, pass) = (&mut self.buckets[next], self.ledger.pass_number());
            let span = self.ledger.bucket_span(next, self.group.rank());
            let launched = span.in_scope(|| bucket.launch(&self.group, pass));
            self.ledger.poison_on_error(launched)?;
            self.ledger.launch();
        }
        Ok(())
    }

    fn alloc_all(&self, plan: &BucketPlan) -> Result<Vec<Box<dyn Bucket>>> {
        let (params, staging) = (self.ledger.params(), self.staging.as_ref());
        let new = |spec| alloc(&self.group, params, spec, &self.hook, staging);
        plan.buckets().iter().map(new).collect()
    }

    fn average(&mut self) -> Result<()> {
        for slot in self.ledger.complete_unused(&self.group)? {
            self.buckets[slot.bucket].clear(slot.range());
        }
        self.launch_full()?;
        let used = self.ledger.used();
        let used = used.map(|map| self.group.all_reduce_async(map, ReduceOp::Max)).transpose()?;
        for bucket in &mut self.buckets {
            bucket.wait()?;
        }
        let used = used.map(|work| work.wait()).transpose()?;
        self.ledger.averaged(used.as_deref());
        let Some(plan) = self.ledger.next_plan(&self.group)? else { return Ok(()) };
        let mut buckets = self.alloc_all(&plan)?;
        for (new, old) in plan.slots().iter().zip(self.ledger.plan().slots()) {
            let from = &*self.buckets[old.bucket];
            buckets[new.bucket].copy_from(new.offset, from, old.range());
        }
        self.buckets = buckets;
        self.ledger.set_plan(plan);
        Ok(())
    }
}

impl Slot {
    fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.count
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_full_bucket_is_averaged_while_backward_goes_on() {
        let groups = ProcessGroup::threads(2, Duration::from_secs(20)).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let params = ["a", "b"].map(|name| ParamInfo::new(name, 4, DType::F32));
                    let options = ReducerOptions {
                        first_bucket_bytes: 1,
                        bucket_bytes: 1,
                        ..ReducerOptions::default()
                    };
                    let mut reducer = Reducer::new(group, params.into(), options).unwrap();
                    for pass in 0..2 {
                        reducer.prepare(true).unwrap();
                        reducer.ready(1, &[1.0_f32; 4]).unwrap();
                        if pass == 1 {
                            // Only this bucket's own operation can complete; the pass is not over.
                            assert_eq!(reducer.launched(), 1);
                            let deadline = Instant::now() + Duration::from_secs(20);
                            while !is_done(&reducer, 0) {
                                assert!(Instant::now() < deadline);
                                std::thread::yield_now();
                            }
                        }
                        reducer.ready(0, &[1.0_f32; 4]).unwrap();
                        reducer.finish().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn external_gradients_follow_the_same_rules() {
        let group =
            |world| ProcessGroup::threads(world, Duration::from_secs(20)).unwrap().remove(0);
        let params = || ["a", "b"].map(|name| ParamInfo::new(name, 2, DType::F32)).to_vec();
        let text_of = |result: Result<()>| result.err().map(|e| e.to_string()).unwrap_or_default();
        let mut reducer = Reducer::new(group(1), params(), ReducerOptions::default()).unwrap();
        for pass in 0..2 {
            reducer.prepare(pass == 1).unwrap();
            reducer.mark_ready_external(0, DType::F32, 2).unwrap();
            let twice = text_of(reducer.mark_ready_external(0, DType::F32, 2));
            assert!(twice.contains("second gradient for a"), "{twice}");
            let short = text_of(reducer.mark_ready_external(1, DType::F32, 1));
            assert!(short.contains("the gradient of b is f32 [1]"), "{short}");
            reducer.ready(1, &[1.0_f32; 2]).unwrap();
            reducer.finish().unwrap();
            assert_eq!(
                (reducer.grad::<f32>(0), reducer.grad(1)),
                (None, Some(&[1.0 + pass as f32; 2][..]))
            );
        }
        reducer.prepare(true).unwrap();
        let both = text_of(reducer.ready(0, &[1.0_f32; 2]));
        assert!(both.contains("gradient for a: already reported as external"), "{both}");
        reducer.mark_ready_external(1, DType::F32, 2).unwrap();
        assert_eq!(reducer.grad::<f32>(1), None);
        let unused = reducer.finish().unwrap_err();
        assert!(matches!(unused, Error::UnusedParameters { names, .. } if names == ["a"]));

        let options = ReducerOptions { comm_hook: CommHook::Fp16Compress, ..Default::default() };
        let mut hooked = Reducer::new(group(1), params(), options).unwrap();
        hooked.prepare(false).unwrap();
        hooked.mark_ready_external(0, DType::F32, 2).unwrap();
        hooked.finish().unwrap();
        hooked.prepare(true).unwrap();
        let refused = text_of(hooked.mark_ready_external(0, DType::F32, 2));
        assert!(refused.contains("in a pass with sync: call ready"), "{refused}");
    }

    #[test]
    fn an_external_gradient_that_would_be_left_out_of_an_average_is_an_error() {
        let groups = ProcessGroup::threads(2, Duration::from_secs(20)).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let params = ["a", "b"].map(|name| ParamInfo::new(name, 2, DType::F32));
                    let options =
                        ReducerOptions { find_unused_parameters: true, ..Default::default() };
                    let mut reducer = Reducer::new(group, params.into(), options).unwrap();
                    reducer.prepare(false).unwrap();
                    reducer.mark_ready_external(0, DType::F32, 2).unwrap();
                    reducer.ready(1, &[1.0_f32; 2]).unwrap();
                    reducer.finish().unwrap();
                    reducer.prepare(true).unwrap();
                    reducer.ready(1, &[1.0_f32; 2]).unwrap();
                    let text = reducer.finish().unwrap_err().to_string();
                    assert!(text.contains("the external gradient for a is not in"), "{text}");
                });
            }
        });
    }

    fn is_done(reducer: &Reducer, bucket: usize) -> bool {
        bucket::is_done::<f32>(&*reducer.buckets[bucket])
    }
}
