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
//! Invariant: buckets are launched in the order of the plan, which is equal on all ranks, so all
//! ranks make the same collective calls in the same order, whatever the order of arrival.

mod bucket;
mod plan;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use self::bucket::Gradient;
use self::bucket::{Bucket, alloc, slice, slice_mut};
pub use self::plan::{BucketPlan, BucketSpec, ParamInfo, Place};
use crate::{Element, Error, ProcessGroup, ReduceOp, Result, object};

/// How a [`Reducer`] fills its buckets.
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
}

impl Default for ReducerOptions {
    fn default() -> Self {
        Self { first_bucket_bytes: 1 << 20, bucket_bytes: 25 << 20, find_unused_parameters: false }
    }
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
    params: Vec<ParamInfo>,
    options: ReducerOptions,
    plan: BucketPlan,
    buckets: Vec<Box<dyn Bucket>>,
    states: Vec<ParamState>,
    pass: Pass,
    /// The buckets have got their final layout.
    rebuilt: bool,
    /// What made this reducer unusable.
    failed: Option<Error>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ParamState {
    /// It has a gradient: its place in the bucket is not to be overwritten, but added to.
    has_grad: bool,
    /// It got a gradient on this rank since the last averaging.
    used: bool,
    /// It got a gradient in this pass.
    reported: bool,
}

/// One forward and backward.
#[derive(Debug, Default)]
struct Pass {
    /// Between `prepare` and `finish`.
    open: bool,
    /// Gradients are averaged in this pass.
    sync: bool,
    /// For each bucket, how many of its parameters have not reported.
    missing: Vec<usize>,
    /// How many buckets have been launched: the index of the next.
    launched: usize,
    /// Parameters in the order in which they reported.
    arrived: Vec<usize>,
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
    /// [`Error::Unsupported`] for parameters that are not floating-point numbers; those of
    /// [`ProcessGroup::alloc`].
    pub fn new(
        group: ProcessGroup,
        params: Vec<ParamInfo>,
        options: ReducerOptions,
    ) -> Result<Self> {
        if let Some(param) = params.iter().find(|param| !param.dtype.is_float()) {
            let what = format!("{} gradients (parameter {})", param.dtype, param.name);
            return Err(Error::Unsupported { backend: "reducer", what });
        }
        check_equal_on_all_ranks(&group, &params, &options)?;
        let plan = if options.find_unused_parameters {
            BucketPlan::registered(&params, &options.caps())?
        } else {
            BucketPlan::registered(&params, &[usize::MAX])?
        };
        let buckets = alloc_all(&group, &plan)?;
        let states = vec![ParamState::default(); params.len()];
        let (pass, rebuilt) = (Pass::default(), options.find_unused_parameters);
        Ok(Self { group, params, options, plan, buckets, states, pass, rebuilt, failed: None })
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
        self.check_usable()?;
        if self.pass.open && self.pass.launched > 0 {
            return Err(Error::InvalidArgument(
                "the last pass was not finished: call finish after each backward".to_owned(),
            ));
        }
        let missing = self.plan.buckets().iter().map(|bucket| bucket.params.len()).collect();
        self.pass = Pass { open: true, sync, missing, launched: 0, arrived: Vec::new() };
        self.states.iter_mut().for_each(|state| state.reported = false);
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
        self.check_usable()?;
        self.check_gradient::<T>(index, grad.len())?;
        let place = self.plan.places()[index];
        let bucket = slice_mut::<T>(&mut *self.buckets[place.bucket])
            .expect("a bucket whose parameter has not reported is here, and of its type");
        let own = &mut bucket[place.elements()];
        let state = &mut self.states[index];
        if state.has_grad {
            T::accumulate(own, grad);
        } else {
            own.copy_from_slice(grad);
        }
        *state = ParamState { has_grad: true, used: true, reported: true };
        if self.pass.sync {
            self.pass.arrived.push(index);
            self.pass.missing[place.bucket] -= 1;
            self.launch_full()?;
        }
        Ok(())
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
        self.check_usable()?;
        if !std::mem::take(&mut self.pass.open) {
            return Err(Error::InvalidArgument("finish without prepare".to_owned()));
        }
        if !self.pass.sync {
            return Ok(());
        }
        let finished = self.average();
        self.remember(finished)
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
        let place = self.plan.places()[index];
        if !self.states[index].has_grad {
            return None;
        }
        slice::<T>(&*self.buckets[place.bucket]).map(|bucket| &bucket[place.elements()])
    }

    /// Forgets all gradients: the next ones overwrite. Call it between passes.
    pub fn zero_grad(&mut self) {
        self.states.iter_mut().for_each(|state| state.has_grad = false);
    }

    /// The layout of the buckets now.
    #[must_use]
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// How many buckets have left in this pass; they are the first of the [plan](Self::plan).
    #[must_use]
    pub fn launched(&self) -> usize {
        self.pass.launched
    }

    /// The group the gradients are averaged over.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    fn check_usable(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
        }
    }

    /// Passes `result` on, and makes this reducer unusable if it is an error.
    fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.failed = Some(error.clone()))
    }

    fn check_gradient<T: Gradient>(&self, index: usize, count: usize) -> Result<()> {
        let wrong = |text: String| Err(Error::InvalidArgument(text));
        let Some(param) = self.params.get(index) else {
            let all = self.params.len();
            return wrong(format!("a gradient for parameter {index} of a model with {all}"));
        };
        let name = &param.name;
        if !self.pass.open {
            return wrong(format!("a gradient for {name} outside of a pass: call prepare first"));
        }
        if self.states[index].reported {
            return wrong(format!("a second gradient for {name} in one pass"));
        }
        if T::DTYPE != param.dtype || count != param.count {
            let (got, want) = (T::DTYPE, param.dtype);
            return wrong(format!(
                "the gradient of {name} is {got} [{count}], the parameter is {want} [{}]",
                param.count
            ));
        }
        Ok(())
    }

    /// Launches buckets, in order, as far as they are full.
    fn launch_full(&mut self) -> Result<()> {
        while self.pass.missing.get(self.pass.launched) == Some(&0) {
            let launched = self.buckets[self.pass.launched].launch(&self.group);
            self.remember(launched)?;
            self.pass.launched += 1;
        }
        Ok(())
    }

    fn average(&mut self) -> Result<()> {
        let unused = self.states.iter().any(|state| !state.reported);
        if unused && !self.options.find_unused_parameters {
            return Err(self.give_up_unused());
        }
        if unused {
            self.contribute_zeros();
            self.launch_full()?;
        }
        let used_anywhere = if self.options.find_unused_parameters {
            let map: Vec<u8> = self.states.iter().map(|state| state.used.into()).collect();
            Some(self.group.all_reduce_async(map, ReduceOp::Max)?)
        } else {
            None
        };
        for bucket in &mut self.buckets {
            bucket.wait()?;
        }
        let used_anywhere = used_anywhere.map(|work| work.wait()).transpose()?;
        for (index, state) in self.states.iter_mut().enumerate() {
            state.has_grad |= used_anywhere.as_ref().is_some_and(|used| used[index] != 0);
            state.used = false;
        }
        if !self.rebuilt {
            self.rebuild()?;
        }
        Ok(())
    }

    /// Tells every rank that this one has parameters without gradient.
    fn give_up_unused(&self) -> Error {
        let unused = self.params.iter().zip(&self.states).filter(|(_, state)| !state.reported);
        let names = unused.map(|(param, _)| param.name.clone()).collect();
        let error = Error::UnusedParameters { rank: self.group.rank(), names };
        self.group.abort(&error.to_string());
        error
    }

    /// Completes the pass for parameters without gradient: what they have stays, else zero.
    fn contribute_zeros(&mut self) {
        for (index, state) in self.states.iter().enumerate().filter(|(_, state)| !state.reported) {
            let place = self.plan.places()[index];
            if !state.has_grad {
                self.buckets[place.bucket].clear(place.elements());
            }
            self.pass.missing[place.bucket] -= 1;
        }
    }

    /// Lays the buckets out in rank 0's order of arrival, and takes the gradients along.
    fn rebuild(&mut self) -> Result<()> {
        let mut order: Vec<u64> = self.pass.arrived.iter().map(|&index| index as u64).collect();
        self.group.broadcast(&mut order, 0)?;
        let order: Vec<usize> =
            order.into_iter().map(|index| usize::try_from(index).unwrap_or(usize::MAX)).collect();
        let plan = BucketPlan::arrived(&self.params, &order, &self.options.caps())?;
        let mut buckets = alloc_all(&self.group, &plan)?;
        for (new, old) in plan.places().iter().zip(self.plan.places()) {
            let from = &*self.buckets[old.bucket];
            buckets[new.bucket].copy_from(new.offset, from, old.elements());
        }
        (self.plan, self.buckets, self.rebuilt) = (plan, buckets, true);
        Ok(())
    }
}

impl ReducerOptions {
    fn caps(&self) -> [usize; 2] {
        [self.first_bucket_bytes, self.bucket_bytes]
    }
}

impl Place {
    fn elements(&self) -> Range<usize> {
        self.offset..self.offset + self.count
    }
}

fn alloc_all(group: &ProcessGroup, plan: &BucketPlan) -> Result<Vec<Box<dyn Bucket>>> {
    plan.buckets().iter().map(|bucket| alloc(group, bucket.dtype, bucket.count)).collect()
}

/// What each rank brought, for comparison.
#[derive(Debug, Serialize, Deserialize)]
struct Brought {
    options: String,
    params: Vec<String>,
}

fn check_equal_on_all_ranks(
    group: &ProcessGroup,
    params: &[ParamInfo],
    options: &ReducerOptions,
) -> Result<()> {
    let line = |ParamInfo { name, count, dtype }: &ParamInfo| format!("{name} {dtype} [{count}]");
    let own =
        Brought { options: format!("{options:?}"), params: params.iter().map(line).collect() };
    let all = object::all_gather_object(group, &own)?;
    let differ = |field: &'static str, at: &dyn Fn(&Brought) -> String| {
        let first = at(&all[0]);
        if all.iter().all(|brought| at(brought) == first) {
            return Ok(());
        }
        let by_rank = all.iter().map(at).enumerate().collect();
        Err(Error::Mismatch { op: "making a reducer".to_owned(), field, by_rank })
    };
    differ("options", &|brought| brought.options.clone())?;
    let most = all.iter().map(|brought| brought.params.len()).max().unwrap_or(0);
    (0..most).try_for_each(|index| {
        differ("the parameters", &|brought| match brought.params.get(index) {
            Some(param) => format!("parameter {index} is {param}"),
            None => format!("there is no parameter {index}"),
        })
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::DType;

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

    fn is_done(reducer: &Reducer, bucket: usize) -> bool {
        bucket::is_done::<f32>(&*reducer.buckets[bucket])
    }
}
