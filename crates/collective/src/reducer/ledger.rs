//! What a reducer keeps of parameters and passes, wherever the gradients lie.
//!
//! [`Reducer`](super::Reducer) and [`DeviceReducer`](super::DeviceReducer) differ in what a bucket is
//! and in who waits for it. Which gradient may come, which bucket leaves next, who had no gradient, and
//! how the buckets are laid out is here, once, so that both keep the same rules.
//!
//! Invariant: [`next_full`](Ledger::next_full) gives the buckets in the order of the plan, which is
//! equal on all ranks.

use serde::{Deserialize, Serialize};

use super::{BucketPlan, ParamInfo, Place, ReducerOptions};
use crate::{DType, Error, ProcessGroup, ReduceOp, Result, object};

/// Parameters, their gradients' states, and the pass under way.
#[derive(Debug)]
pub(super) struct Ledger {
    params: Vec<ParamInfo>,
    options: ReducerOptions,
    plan: BucketPlan,
    states: Vec<ParamState>,
    pass: Pass,
    /// The buckets have got their final layout.
    rebuilt: bool,
    /// How many passes have been averaged.
    passes: u64,
    /// What made this reducer unusable.
    failed: Option<Error>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ParamState {
    /// It has a gradient: its place in the bucket is not to be overwritten, but added to.
    has_grad: bool,
    /// Its gradient is not in the bucket, but with whoever reported it.
    elsewhere: bool,
    /// It got a gradient on this rank since the last averaging.
    used: bool,
    /// It got a gradient in this pass.
    reported: bool,
    /// With a static graph: it never gets one on this rank, or on none.
    idle: Idle,
}

impl ParamState {
    /// It is to get a gradient in this pass, and has not.
    fn is_unused(&self) -> bool {
        !self.reported && self.idle == Idle::No
    }
}

/// Whether a static graph has a gradient for a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Idle {
    #[default]
    No,
    /// Other ranks have.
    Here,
    Everywhere,
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

impl Ledger {
    /// Checks that all ranks brought the same parameters and options.
    pub(super) fn new(
        group: &ProcessGroup,
        params: Vec<ParamInfo>,
        options: ReducerOptions,
    ) -> Result<Self> {
        if let Some(param) = params.iter().find(|param| !ReduceOp::Avg.supports(param.dtype)) {
            let what = format!("{} gradients (parameter {})", param.dtype, param.name);
            return Err(Error::Unsupported { backend: "reducer", what });
        }
        check_equal_on_all_ranks(group, &params, format!("{options:?}"))?;
        let rebuilt = options.finds_unused();
        let plan = if rebuilt {
            BucketPlan::registered(&params, &options.caps())?
        } else {
            BucketPlan::registered(&params, &[usize::MAX])?
        };
        let states = vec![ParamState::default(); params.len()];
        let (pass, passes, failed) = (Pass::default(), 0, None);
        Ok(Self { params, options, plan, states, pass, rebuilt, passes, failed })
    }

    pub(super) fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    pub(super) fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    pub(super) fn place(&self, index: usize) -> Place {
        self.plan.places()[index]
    }

    pub(super) fn launched(&self) -> usize {
        self.pass.launched
    }

    /// The number of the pass that averages next, from 1.
    pub(super) fn pass_number(&self) -> u64 {
        self.passes + 1
    }

    /// Whether a bucket has been launched in a pass that is not finished.
    pub(super) fn is_flying(&self, bucket: usize) -> bool {
        self.pass.open && bucket < self.pass.launched
    }

    pub(super) fn check_usable(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
        }
    }

    /// Passes `result` on, and makes the reducer unusable if it is an error.
    pub(super) fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.failed = Some(error.clone()))
    }

    pub(super) fn prepare(&mut self, sync: bool) -> Result<()> {
        if self.pass.open && self.pass.launched > 0 {
            return Err(Error::InvalidArgument(
                "the last pass was not finished: call finish after each backward".to_owned(),
            ));
        }
        let expected = |indices: &[usize]| {
            indices.iter().filter(|&&i| self.states[i].idle == Idle::No).count()
        };
        let Pass { mut missing, mut arrived, .. } = std::mem::take(&mut self.pass);
        missing.clear();
        missing.extend(self.plan.buckets().iter().map(|bucket| expected(&bucket.params)));
        arrived.clear();
        self.pass = Pass { open: true, sync, missing, launched: 0, arrived };
        self.states.iter_mut().for_each(|state| state.reported = false);
        Ok(())
    }

    /// What is to be set to zero before a pass: it holds what other ranks of a static graph had, and
    /// this one has nothing to give.
    pub(super) fn stale(&self) -> impl Iterator<Item = Place> {
        let stale = |state: &ParamState| state.idle == Idle::Here && !state.has_grad;
        let places = self.plan.places().iter().zip(&self.states);
        places.filter(move |(_, state)| stale(state)).map(|(place, _)| *place)
    }

    /// Whether parameter `index` may get this gradient now.
    pub(super) fn check_gradient(&self, index: usize, dtype: DType, count: usize) -> Result<()> {
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
        if self.states[index].idle != Idle::No {
            return wrong(format!(
                "a gradient for {name}, which had none in a static graph's first"
            ));
        }
        if dtype != param.dtype || count != param.count {
            let want = param.dtype;
            return wrong(format!(
                "the gradient of {name} is {dtype} [{count}], the parameter is {want} [{}]",
                param.count
            ));
        }
        Ok(())
    }

    pub(super) fn has_grad(&self, index: usize) -> bool {
        self.states[index].has_grad
    }

    /// Whether it has a gradient in its bucket.
    pub(super) fn has_grad_here(&self, index: usize) -> bool {
        self.states[index].has_grad && !self.states[index].elsewhere
    }

    /// Refuses a gradient for the bucket where there is one elsewhere.
    pub(super) fn check_here(&self, index: usize) -> Result<()> {
        if !self.states[index].elsewhere {
            return Ok(());
        }
        let name = &self.params[index].name;
        Err(Error::InvalidArgument(format!("a gradient of {name} here: it has one elsewhere")))
    }

    /// Notes that parameter `index` has got its gradient, which is checked and in its bucket, or elsewhere.
    pub(super) fn report(&mut self, index: usize, elsewhere: bool) {
        let state = &mut self.states[index];
        *state = ParamState { has_grad: true, elsewhere, used: true, reported: true, ..*state };
        if self.pass.sync {
            self.pass.arrived.push(index);
            self.pass.missing[self.plan.places()[index].bucket] -= 1;
        }
    }

    /// Whether a bucket has all its gradients in a pass that is averaged.
    pub(super) fn is_full(&self, bucket: usize) -> bool {
        self.pass.sync && self.pass.missing.get(bucket) == Some(&0)
    }

    /// Whether gradients are averaged in this pass.
    pub(super) fn is_synced(&self) -> bool {
        self.pass.sync
    }

    /// The bucket to be launched now, if it is full.
    pub(super) fn next_full(&self) -> Option<usize> {
        Some(self.pass.launched).filter(|&next| self.is_full(next))
    }

    /// Notes that [`next_full`](Self::next_full) has been launched.
    pub(super) fn launch(&mut self) {
        self.pass.launched += 1;
    }

    /// Ends the pass; whether it is averaged.
    pub(super) fn close(&mut self) -> Result<bool> {
        if !std::mem::take(&mut self.pass.open) {
            return Err(Error::InvalidArgument("finish without prepare".to_owned()));
        }
        Ok(self.pass.sync)
    }

    /// Completes the pass for parameters without gradient: what they have stays. The places of those
    /// that have nothing, to be set to zero.
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] if there may be none; the group is then aborted.
    pub(super) fn excuse_unused(&mut self, group: &ProcessGroup) -> Result<Vec<Place>> {
        let unused = |(_, state): &(usize, &ParamState)| state.is_unused();
        let unused: Vec<_> = self.states.iter().enumerate().filter(unused).collect();
        if !unused.is_empty() && !self.asks_ranks() {
            let names = unused.iter().map(|&(index, _)| self.params[index].name.clone()).collect();
            let error = Error::UnusedParameters { rank: group.rank(), names };
            group.abort(&error.to_string());
            return Err(error);
        }
        let mut empty = Vec::new();
        for (index, state) in unused {
            let place = self.plan.places()[index];
            if !state.has_grad {
                empty.push(place);
            }
            self.pass.missing[place.bucket] -= 1;
        }
        Ok(empty)
    }

    /// Which parameters got a gradient on this rank, if ranks are to tell one another.
    pub(super) fn used(&self) -> Option<Vec<u8>> {
        let map = || self.states.iter().map(|state| state.used.into()).collect();
        self.asks_ranks().then(map)
    }

    /// Whether this pass may leave parameters out, and ranks tell one another which.
    fn asks_ranks(&self) -> bool {
        self.options.finds_unused() || self.learns()
    }

    /// Whether this is the pass that a static graph is learned from.
    fn learns(&self) -> bool {
        self.options.static_graph && self.passes == 0
    }

    /// Notes that all buckets have been averaged; `used` are those used on any rank.
    pub(super) fn averaged(&mut self, used: Option<&[u8]>) {
        let learns = self.learns();
        for (index, state) in self.states.iter_mut().enumerate() {
            let anywhere = used.map(|used| used[index] != 0);
            if learns && !state.used {
                let elsewhere = anywhere.unwrap_or_default();
                state.idle = if elsewhere { Idle::Here } else { Idle::Everywhere };
            }
            state.has_grad |= anywhere.unwrap_or(state.idle == Idle::Here);
            state.used = false;
        }
        self.passes += 1;
    }

    pub(super) fn zero_grad(&mut self) {
        self.states.iter_mut().for_each(|s| (s.has_grad, s.elsewhere) = (false, false));
    }

    /// The final layout, in rank 0's order of arrival, after the first pass that was averaged, or a
    /// static graph's second; every rank calls it, and it waits for rank 0.
    pub(super) fn next_plan(&self, group: &ProcessGroup) -> Result<Option<BucketPlan>> {
        if self.rebuilt || self.passes < 1 + u64::from(self.options.static_graph) {
            return Ok(None);
        }
        let mut order: Vec<u64> = self.pass.arrived.iter().map(|&index| index as u64).collect();
        // What a static graph leaves out comes last: it never fills a bucket.
        let idle = self.states.iter().enumerate().filter(|(_, state)| state.idle != Idle::No);
        order.extend(idle.map(|(index, _)| index as u64));
        group.broadcast(&mut order, 0)?;
        let order: Vec<usize> =
            order.into_iter().map(|index| usize::try_from(index).unwrap_or(usize::MAX)).collect();
        BucketPlan::arrived(&self.params, &order, &self.options.caps()).map(Some)
    }

    /// How many passes have been averaged, the order of the final layout, empty before there is one, and
    /// which parameters a static graph leaves out, here (1) or everywhere (2).
    pub(super) fn state(&self) -> (u64, Vec<usize>, Vec<u8>) {
        let order = self.plan.buckets().iter().flat_map(|bucket| bucket.params.iter().copied());
        let order = if self.rebuilt { order.collect() } else { Vec::new() };
        (self.passes, order, self.states.iter().map(|state| state.idle as u8).collect())
    }

    /// Goes on from such a state. The layout, if it is another now; the gradients are lost.
    pub(super) fn resume(
        &mut self,
        passes: u64,
        order: &[usize],
        idle: &[u8],
    ) -> Result<Option<BucketPlan>> {
        let invalid = |text: &str| Err(Error::InvalidArgument(text.to_owned()));
        if self.pass.open {
            return invalid("a reducer's state cannot change inside a pass");
        }
        if idle.len() != self.states.len() || idle.iter().any(|idle| *idle > 2) {
            return invalid("the reducer's state is of other parameters");
        }
        let caps = self.options.caps();
        let plan = match order.is_empty() || self.options.finds_unused() {
            true => None,
            false => Some(BucketPlan::arrived(&self.params, order, &caps)?),
        };
        for (state, idle) in self.states.iter_mut().zip(idle) {
            let idle = [Idle::No, Idle::Here, Idle::Everywhere][usize::from(*idle)];
            *state = ParamState { idle, ..ParamState::default() };
        }
        self.passes = passes;
        Ok(plan)
    }

    /// Takes the final layout; the gradients have been moved.
    pub(super) fn adopt(&mut self, plan: BucketPlan) {
        (self.plan, self.rebuilt) = (plan, true);
    }
}

impl ReducerOptions {
    fn caps(&self) -> [usize; 2] {
        [self.first_bucket_bytes, self.bucket_bytes]
    }

    fn finds_unused(&self) -> bool {
        self.find_unused_parameters && !self.static_graph
    }
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
    options: String,
) -> Result<()> {
    let line = |ParamInfo { name, count, dtype, rows }: &ParamInfo| match rows {
        0 => format!("{name} {dtype} [{count}]"),
        rows => format!("{name} {dtype} [{count}] of {rows} rows"),
    };
    let own = Brought { options, params: params.iter().map(line).collect() };
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
