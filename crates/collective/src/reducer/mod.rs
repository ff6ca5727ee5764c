//! Gradient averaging that overlaps backward.
//!
//! Backward produces gradients one by one, last layer first. The [`Reducer`] packs them into
//! buckets; the moment a bucket has all of its gradients, and those before it have left, its
//! average over all ranks starts in the background, while backward goes on. At the end of backward
//! [`finish`](Reducer::finish) waits for what is still under way.
//!
//! The rules are those of PyTorch's `DistributedDataParallel`. In the first pass there is one
//! bucket per dtype; after it the buckets are laid out once more, in the order in which rank 0's
//! gradients arrived, so that from then on buckets fill one after the other. See [`BucketPlan`].
//!
//! ```text
//! prepare(sync) -> ready(i, grad) for each parameter, in any order -> finish()
//! ```
//!
//! Where we differ from PyTorch: a parameter without gradient is an error in the same step rather
//! than in the next forward, and the other ranks get it too; and the division by the world size is
//! the all-reduce's ([`ReduceOp::Avg`]), so 16-bit gradients are added in
//! `f32` and rounded once.
//!
//! Gradients in the memory of a device have a reducer of their own, which never has the host wait for the
//! device: [`DeviceReducer`].
//!
//! Invariant: buckets are launched in the order of the plan, which is equal on all ranks, so all
//! ranks make the same collective calls in the same order, whatever the order of arrival.

mod bucket;
mod detour;
mod device;
mod kernels;
mod ledger;
mod plan;
#[cfg(feature = "powersgd")]
mod power_sgd;

use std::ops::Range;
use std::sync::Arc;

use self::bucket::{Bucket, alloc, slice, slice_mut};
pub use self::bucket::{BucketMemory, Gradient};
use self::detour::Lane;
pub use self::device::DeviceReducer;
pub use self::kernels::{BucketKernels, NoKernels};
use self::ledger::Ledger;
pub use self::plan::{BucketPlan, BucketSpec, ParamInfo, Place};
#[cfg(feature = "powersgd")]
pub use self::power_sgd::PowerSgd;
use crate::copy::copy_slice;
use crate::{DType, Element, Error, ProcessGroup, ReduceOp, Result};

/// How a [`Reducer`] or [`DeviceReducer`] fills its buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReducerOptions {
    /// Cap of the first bucket of each dtype: 1 MiB unless set. Small, so that communication
    /// starts early.
    pub first_bucket_bytes: usize,
    /// Cap of each further bucket: 25 MiB unless set.
    pub bucket_bytes: usize,
    /// Whether a pass may leave parameters without gradient: they count as zero on this rank, and
    /// have no gradient if no rank had one. The buckets then keep their first layout, and each
    /// pass has one more small all-reduce. Off unless set.
    pub find_unused_parameters: bool,
    /// Whether every pass uses the parameters that the first one used: what got no gradient then,
    /// on this rank, counts as zero, and another set in a later pass is an error. The buckets are
    /// laid out anew after the second pass instead of the first. Overrides
    /// `find_unused_parameters`. Off unless set.
    pub static_graph: bool,
    /// How a bucket travels.
    pub comm_hook: CommHook,
    /// Whether buckets travel through the memory of the group's device, where its library averages
    /// them, by the [rules](crate::device::DeviceCalls) there: for gradients that are made on the host in a
    /// group over HCCL. Each bucket is copied there when it is full and back when the pass ends. Not
    /// with PowerSGD. Off unless set.
    pub through_device: bool,
}

/// How a bucket travels. A [`DeviceReducer`] rounds only buckets of `f32`, by its kernels; the others travel as they
/// are. Follows: `torch.distributed.algorithms.ddp_comm_hooks`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "register_comm_hook")]
pub enum CommHook {
    /// As it is.
    #[default]
    AllReduce,
    /// `f32` as `f16`: half the bytes; what is above 65504 becomes infinite. A bucket of 16-bit
    /// gradients travels as it is.
    #[doc(alias = "fp16_compress_hook")]
    Fp16Compress,
    /// `f32` as `bf16`: half the bytes, eight significant bits.
    #[doc(alias = "bf16_compress_hook")]
    Bf16Compress,
    /// `f32` matrices as two thin ones. Other types are refused. With the feature `powersgd`.
    #[cfg(feature = "powersgd")]
    PowerSgd(PowerSgd),
}

impl CommHook {
    /// Refuses options that make no sense; returns whether buckets keep something from pass to pass.
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

/// What a [`Reducer`] goes on from besides gradients, where that is more than nothing: PowerSGD's memory.
/// Each rank has its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReducerState {
    /// Passes averaged so far.
    pub passes: u64,
    /// The parameters in the order of the buckets' final layout; empty before there is one.
    pub order: Vec<usize>,
    /// Which parameters a static graph leaves out, on this rank (1) or on all (2).
    pub idle: Vec<u8>,
    /// What each bucket keeps.
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
    lane: Option<Arc<Lane>>,
    buckets: Vec<Box<dyn Bucket>>,
}

impl Reducer {
    /// A reducer for `params`, in registration (forward) order; index `i` is `params[i]`
    /// everywhere.
    ///
    /// Every rank of `group` must call it with equal arguments; this is checked. Blocks: one
    /// gathering of the parameter list, and an allocation for each bucket.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] on every rank, with the first parameter or option that differs;
    /// [`Error::Unsupported`] for parameters that are not floating-point numbers, and for
    /// [`through_device`](ReducerOptions::through_device) in a group without one; those of
    /// [`ProcessGroup::alloc`].
    pub fn new(
        group: ProcessGroup,
        params: Vec<ParamInfo>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let hook = options.comm_hook.clone();
        let lane = options.through_device.then(|| Lane::new(&group)).transpose()?;
        let ledger = Ledger::new(&group, params, options)?;
        let keeps_memory = hook.keeps_memory()?;
        let buckets = alloc_all(&group, ledger.params(), ledger.plan(), (&hook, lane.as_ref()))?;
        Ok(Self { group, ledger, hook, keeps_memory, lane, buckets })
    }

    /// Begins a pass: call it before each forward.
    ///
    /// With `sync`, the pass ends with averaged gradients. Without (PyTorch's `no_sync`), gradients
    /// are only added up on this rank, to be averaged in a later pass; every rank must do the same.
    /// Gradients that are there, of earlier passes, are added to until
    /// [`zero_grad`](Self::zero_grad).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the last pass has begun communication and was not
    /// [finished](Self::finish); [`Error::Poisoned`] after a failure.
    #[doc(alias = "no_sync")]
    pub fn prepare(&mut self, sync: bool) -> Result<()> {
        self.ledger.check_usable()?;
        self.ledger.prepare(sync)?;
        for place in self.ledger.stale() {
            self.buckets[place.bucket].clear(place.elements());
        }
        Ok(())
    }

    /// Takes the gradient of parameter `index`: copies it into its bucket, or adds it to what is
    /// there. If that completes buckets that are next in order, they leave; does not wait for them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], naming the parameter, if it has reported in this pass already,
    /// or if type or length are not its own: nothing was changed. Else that of an earlier bucket's
    /// failure.
    #[expect(clippy::missing_panics_doc, reason = "`check_gradient` leaves nothing to panic about")]
    pub fn ready<T: Gradient>(&mut self, index: usize, grad: &[T]) -> Result<()> {
        self.ledger.check_usable()?;
        self.ledger.check_gradient(index, T::DTYPE, grad.len())?;
        self.ledger.check_here(index)?;
        let place = self.ledger.place(index);
        let bucket = slice_mut::<T>(&mut *self.buckets[place.bucket])
            .expect("a bucket whose parameter has not reported is here, and of its type");
        let own = &mut bucket[place.elements()];
        if self.ledger.has_grad_here(index) {
            T::accumulate(own, grad);
        } else {
            copy_slice(own, grad);
        }
        self.ledger.report(index, false);
        self.launch_full()
    }

    /// As [`ready`](Self::ready), for a gradient of `count` elements of `dtype` that stays outside the buckets. Its
    /// owner adds it up, with the gradient in its bucket, which is forgotten. Where nothing is averaged:
    /// in a group of one rank, or in a pass without `sync`. [`grad`](Self::grad) has none of it.
    ///
    /// # Errors
    ///
    /// As [`ready`](Self::ready); [`Error::InvalidArgument`] in a pass with `sync` of several ranks, or with
    /// a [`comm_hook`](ReducerOptions::comm_hook).
    pub fn mark_ready_external(&mut self, index: usize, dtype: DType, count: usize) -> Result<()> {
        self.ledger.check_usable()?;
        self.ledger.check_gradient(index, dtype, count)?;
        let alone = self.group.world_size() == 1 && self.hook == CommHook::AllReduce;
        if self.ledger.is_synced() && !alone {
            let name = &self.ledger.params()[index].name;
            let text = format!("a gradient of {name} elsewhere: it is averaged in its bucket");
            return Err(Error::InvalidArgument(text));
        }
        self.ledger.report(index, true);
        self.launch_full()
    }

    /// Ends a pass: waits until every bucket has been averaged. After the first pass with `sync`,
    /// lays the buckets out anew.
    ///
    /// Every rank must call it. Without `sync` it does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] on a rank where parameters got no gradient, unless
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters); its peers get
    /// [`Error::Aborted`] with the beginning of the same text. Else a peer's failure. The reducer and its group are
    /// unusable after any of them.
    pub fn finish(&mut self) -> Result<()> {
        self.ledger.check_usable()?;
        if !self.ledger.close()? {
            return Ok(());
        }
        let finished = self.average();
        self.ledger.remember(finished)
    }

    /// The gradient of parameter `index`, a view into its bucket: averaged after a pass with
    /// `sync`, this rank's sum after one without. `None` if it has none, if `T` is not its type,
    /// or while its bucket is in flight.
    ///
    /// # Panics
    ///
    /// If there is no such parameter.
    #[must_use]
    pub fn grad<T: Element>(&self, index: usize) -> Option<&[T]> {
        let place = self.ledger.place(index);
        if !self.ledger.has_grad_here(index) {
            return None;
        }
        slice::<T>(&*self.buckets[place.bucket]).map(|bucket| &bucket[place.elements()])
    }

    /// Forgets all gradients: the next ones overwrite. Call it between passes.
    pub fn zero_grad(&mut self) {
        self.ledger.zero_grad();
    }

    /// What it goes on from, between two passes; none if the next pass depends on gradients alone, which
    /// is so unless they are compressed by PowerSGD.
    #[must_use]
    pub fn state(&self) -> Option<ReducerState> {
        self.keeps_memory.then(|| {
            let (passes, order, idle) = self.ledger.state();
            let buckets = self.buckets.iter().map(|bucket| bucket.memory()).collect();
            ReducerState { passes, order, idle, buckets }
        })
    }

    /// Goes on from the state of a reducer of the same parameters and options; there are no gradients
    /// then. Every rank calls it, each with its own state of the same moment. Blocks: an allocation for
    /// each bucket.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the state does not fit, or inside a pass; those of
    /// [`ProcessGroup::alloc`]. The reducer is unusable after any of them but the first.
    pub fn load_state(&mut self, state: &ReducerState) -> Result<()> {
        self.ledger.check_usable()?;
        let plan = self.ledger.resume(state.passes, &state.order, &state.idle)?;
        let loaded = self.load_buckets(plan, &state.buckets);
        self.ledger.remember(loaded)
    }

    fn load_buckets(&mut self, plan: Option<BucketPlan>, memory: &[BucketMemory]) -> Result<()> {
        if let Some(plan) = plan {
            self.buckets = self.alloc_all(&plan)?;
            self.ledger.adopt(plan);
        }
        if memory.len() != self.buckets.len() {
            let (were, are) = (memory.len(), self.buckets.len());
            let text = format!("the reducer's state is of {were} buckets, and there are {are}");
            return Err(Error::InvalidArgument(text));
        }
        self.buckets.iter_mut().zip(memory).try_for_each(|(b, memory)| b.set_memory(memory))
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

    /// The group the gradients are averaged over.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Launches buckets, in order, as far as they are full.
    fn launch_full(&mut self) -> Result<()> {
        while let Some(next) = self.ledger.next_full() {
            let launched = self.buckets[next].launch(&self.group, self.ledger.pass_number());
            self.ledger.remember(launched)?;
            self.ledger.launch();
        }
        Ok(())
    }

    fn alloc_all(&self, plan: &BucketPlan) -> Result<Vec<Box<dyn Bucket>>> {
        alloc_all(&self.group, self.ledger.params(), plan, (&self.hook, self.lane.as_ref()))
    }

    fn average(&mut self) -> Result<()> {
        for place in self.ledger.excuse_unused(&self.group)? {
            self.buckets[place.bucket].clear(place.elements());
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
        for (new, old) in plan.places().iter().zip(self.ledger.plan().places()) {
            let from = &*self.buckets[old.bucket];
            buckets[new.bucket].copy_from(new.offset, from, old.elements());
        }
        self.buckets = buckets;
        self.ledger.adopt(plan);
        Ok(())
    }
}

impl Place {
    fn elements(&self) -> Range<usize> {
        self.offset..self.offset + self.count
    }
}

fn alloc_all(
    group: &ProcessGroup,
    params: &[ParamInfo],
    plan: &BucketPlan,
    (hook, lane): (&CommHook, Option<&Arc<Lane>>),
) -> Result<Vec<Box<dyn Bucket>>> {
    plan.buckets().iter().map(|bucket| alloc(group, params, bucket, hook, lane)).collect()
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
                            // Only this bucket's own wait can end; the pass is not over.
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
    fn a_gradient_elsewhere_keeps_the_rules_and_none_other_takes_its_place() {
        let group =
            |world| ProcessGroup::threads(world, Duration::from_secs(20)).unwrap().remove(0);
        let params = || ["a", "b"].map(|name| ParamInfo::new(name, 2, DType::F32)).to_vec();
        let said = |result: Result<()>| result.err().map(|e| e.to_string()).unwrap_or_default();
        let mut reducer = Reducer::new(group(1), params(), ReducerOptions::default()).unwrap();
        for pass in 0..2 {
            reducer.prepare(pass == 1).unwrap();
            reducer.mark_ready_external(0, DType::F32, 2).unwrap();
            let twice = said(reducer.mark_ready_external(0, DType::F32, 2));
            assert!(twice.contains("a second gradient for a"), "{twice}");
            let short = said(reducer.mark_ready_external(1, DType::F32, 1));
            assert!(short.contains("the gradient of b is f32 [1]"), "{short}");
            reducer.ready(1, &[1.0_f32; 2]).unwrap();
            reducer.finish().unwrap();
            assert_eq!(
                (reducer.grad::<f32>(0), reducer.grad(1)),
                (None, Some(&[1.0 + pass as f32; 2][..]))
            );
        }
        reducer.prepare(true).unwrap();
        let both = said(reducer.ready(0, &[1.0_f32; 2]));
        assert!(both.contains("a gradient of a here: it has one elsewhere"), "{both}");
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
        let refused = said(hooked.mark_ready_external(0, DType::F32, 2));
        assert!(refused.contains("it is averaged in its bucket"), "{refused}");
    }

    fn is_done(reducer: &Reducer, bucket: usize) -> bool {
        bucket::is_done::<f32>(&*reducer.buckets[bucket])
    }
}
