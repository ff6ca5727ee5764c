//! A reducer's bookkeeping of parameters and passes, for gradients on the host and on devices.
//!
//! [`Reducer`](super::Reducer) and [`DeviceReducer`](super::DeviceReducer) differ in their buckets
//! and in how they wait. Both follow the same rules, implemented here: which gradient is valid,
//! which bucket is launched next, which parameters had no gradient, and how the buckets are laid
//! out.
//!
//! Invariant: [`next_full`](Ledger::next_full) returns the buckets in the order of the plan, which
//! is equal on all ranks.

use tracing::{Span, debug_span};

use super::{BucketPlan, BucketSpec, ParamInfo, ReducerOptions, Slot};
use crate::{DType, Error, ProcessGroup, Rank, ReduceOp, Result, object};

/// Parameters, the states of their gradients, and the current pass.
#[derive(Debug)]
pub(super) struct Ledger {
    params: Vec<ParamInfo>,
    options: ReducerOptions,
    plan: BucketPlan,
    states: Vec<ParamState>,
    pass: PassState,
    /// Whether the buckets have their final layout.
    rebuilt: bool,
    /// Number of passes averaged so far.
    passes: u64,
    /// The error that made this reducer unusable.
    failed: Option<Error>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ParamState {
    /// It has a gradient: the next one is added to its slot, not written over it.
    has_grad: bool,
    /// Its gradient is outside the bucket, see `mark_ready_external`.
    external: bool,
    /// It got a gradient on this rank since the last averaging.
    used: bool,
    /// It got a gradient in this pass.
    reported: bool,
    /// Whether it is unused in the static graph.
    idle: Idle,
}

impl ParamState {
    /// Whether it needs a gradient in this pass and has none yet.
    fn is_unused(&self) -> bool {
        !self.reported && self.idle == Idle::No
    }
}

/// Whether a parameter has no gradient in the static graph.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Idle {
    #[default]
    No,
    /// Unused on this rank, but used on others.
    OnThisRank,
    OnAllRanks,
}

/// State of one forward and backward pass.
#[derive(Debug, Default)]
struct PassState {
    /// Between `prepare` and `finish`.
    active: bool,
    /// Whether gradients are averaged in this pass.
    sync: bool,
    /// For each bucket, the number of its parameters without a gradient in this pass.
    missing: Vec<usize>,
    /// Number of buckets launched, which is the index of the next.
    launched: usize,
    /// Parameters in the order in which their gradients arrived.
    arrived: Vec<usize>,
}

impl Ledger {
    /// Checks that parameters and options are the same on all ranks.
    pub(super) fn new(
        group: &ProcessGroup,
        params: Vec<ParamInfo>,
        options: ReducerOptions,
    ) -> Result<Self> {
        if let Some(param) = params.iter().find(|param| !ReduceOp::Avg.supports(param.dtype)) {
            let what = format!("{} gradients (parameter {})", param.dtype, param.name);
            return Err(Error::Unsupported { backend: "reducer", what });
        }
        check_equal_on_all_ranks(group, &params, &options)?;
        if let Some(uneven) = params.iter().find(|of| of.rows > 0 && of.count % of.rows != 0) {
            let ParamInfo { name, count, rows, .. } = uneven;
            let text = format!("parameter {name}: {count} elements in {rows} rows of one length");
            return Err(Error::InvalidArgument(text));
        }
        let rebuilt = options.finds_unused();
        let plan = if rebuilt {
            BucketPlan::registered(&params, &options.caps())?
        } else {
            BucketPlan::registered(&params, &[usize::MAX])?
        };
        let states = vec![ParamState::default(); params.len()];
        let (pass, passes, failed) = (PassState::default(), 0, None);
        Ok(Self { params, options, plan, states, pass, rebuilt, passes, failed })
    }

    pub(super) fn params(&self) -> &[ParamInfo] {
        &self.params
    }

    pub(super) fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    pub(super) fn slot(&self, index: usize) -> Slot {
        self.plan.slots()[index]
    }

    pub(super) fn launched(&self) -> usize {
        self.pass.launched
    }

    /// Number of the next pass to be averaged, from 1.
    pub(super) fn pass_number(&self) -> u64 {
        self.passes + 1
    }

    /// Makes the span of a bucket's average, from its launch until it is complete.
    pub(super) fn bucket_span(&self, bucket: usize, rank: Rank) -> Span {
        let BucketSpec { dtype, count, .. } = &self.plan.buckets()[bucket];
        debug_span!(
            target: "collective", "bucket",
            rank, pass = self.pass_number(), bucket, bytes = count * dtype.size(), %dtype,
        )
    }

    /// Makes the span of a pass's end, in which this rank waits for the averages.
    pub(super) fn finish_span(&self, rank: Rank) -> Span {
        debug_span!(target: "collective", "finish", rank, pass = self.pass_number())
    }

    /// Whether a bucket was launched in the current pass.
    pub(super) fn is_in_flight(&self, bucket: usize) -> bool {
        self.pass.active && bucket < self.pass.launched
    }

    pub(super) fn check_usable(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(error) => Err(Error::Poisoned(Box::new(error.clone()))),
        }
    }

    /// Returns `result`, and makes the reducer unusable if it is an error.
    pub(super) fn poison_on_error<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.failed = Some(error.clone()))
    }

    pub(super) fn prepare(&mut self, sync: bool) -> Result<()> {
        if self.pass.active && self.pass.launched > 0 {
            return Err(Error::InvalidArgument(
                "`prepare` called before `finish`: call `finish` after each backward".to_owned(),
            ));
        }
        let expected = |indices: &[usize]| {
            indices.iter().filter(|&&i| self.states[i].idle == Idle::No).count()
        };
        let PassState { mut missing, mut arrived, .. } = std::mem::take(&mut self.pass);
        missing.clear();
        missing.extend(self.plan.buckets().iter().map(|bucket| expected(&bucket.params)));
        arrived.clear();
        self.pass = PassState { active: true, sync, missing, launched: 0, arrived };
        self.states.iter_mut().for_each(|state| state.reported = false);
        Ok(())
    }

    /// Returns the slots to zero before a pass: they hold other ranks' gradients of parameters that
    /// this rank does not use in the static graph.
    pub(super) fn stale(&self) -> impl Iterator<Item = Slot> {
        let stale = |state: &ParamState| state.idle == Idle::OnThisRank && !state.has_grad;
        let slots = self.plan.slots().iter().zip(&self.states);
        slots.filter(move |(_, state)| stale(state)).map(|(slot, _)| *slot)
    }

    /// Checks that parameter `index` may get this gradient now.
    pub(super) fn check_gradient(&self, index: usize, dtype: DType, count: usize) -> Result<()> {
        let wrong = |text: String| Err(Error::InvalidArgument(text));
        let Some(param) = self.params.get(index) else {
            let all = self.params.len();
            return wrong(format!("no parameter {index}: the model has {all} parameters"));
        };
        let name = &param.name;
        if !self.pass.active {
            return wrong(format!("gradient for {name} reported before `prepare`"));
        }
        if self.states[index].reported {
            return wrong(format!("second gradient for {name} in one pass"));
        }
        if self.states[index].idle != Idle::No {
            return wrong(format!(
                "gradient for {name}, which had none in the first pass of the static graph"
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

    pub(super) fn needs_gradient(&self, index: usize) -> bool {
        self.states[index].is_unused()
    }

    pub(super) fn has_grad(&self, index: usize) -> bool {
        self.states[index].has_grad
    }

    /// Whether it has a gradient in its bucket.
    pub(super) fn has_grad_in_bucket(&self, index: usize) -> bool {
        self.states[index].has_grad && !self.states[index].external
    }

    /// Checks that a parameter's gradient is not external, before one is put into the bucket.
    pub(super) fn check_not_external(&self, index: usize) -> Result<()> {
        if !self.states[index].external {
            return Ok(());
        }
        let name = &self.params[index].name;
        Err(Error::InvalidArgument(format!("gradient for {name}: already reported as external")))
    }

    /// Records that parameter `index` got its gradient, which is valid and in its bucket, or
    /// external.
    pub(super) fn mark_ready(&mut self, index: usize, external: bool) {
        let state = &mut self.states[index];
        *state = ParamState { has_grad: true, external, used: true, reported: true, ..*state };
        if self.pass.sync {
            self.pass.arrived.push(index);
            self.pass.missing[self.plan.slots()[index].bucket] -= 1;
        }
    }

    /// Whether gradients are averaged in this pass.
    pub(super) fn is_synced(&self) -> bool {
        self.pass.sync
    }

    /// Returns the next bucket to launch, if it has all its gradients in a pass that is averaged.
    pub(super) fn next_full(&self) -> Option<usize> {
        let PassState { sync, missing, launched, .. } = &self.pass;
        Some(*launched).filter(|&next| *sync && missing.get(next) == Some(&0))
    }

    /// Records that [`next_full`](Self::next_full) was launched.
    pub(super) fn launch(&mut self) {
        self.pass.launched += 1;
    }

    /// Ends the pass; returns whether it is averaged.
    pub(super) fn end_pass(&mut self) -> Result<bool> {
        if !std::mem::take(&mut self.pass.active) {
            return Err(Error::InvalidArgument("`finish` called before `prepare`".to_owned()));
        }
        Ok(self.pass.sync)
    }

    /// Completes the pass for parameters that got no gradient in it: keeps earlier gradients, and
    /// returns the slots of parameters without one, to be zeroed.
    ///
    /// # Errors
    ///
    /// [`Error::UnusedParameters`] if unused parameters are not allowed, [`Error::InvalidArgument`]
    /// if an earlier pass's external gradient would be left out of the average of several ranks. A
    /// group of several ranks is then aborted.
    pub(super) fn complete_unused(&mut self, group: &ProcessGroup) -> Result<Vec<Slot>> {
        let unused = |(_, state): &(usize, &ParamState)| state.is_unused();
        let unused: Vec<_> = self.states.iter().enumerate().filter(unused).collect();
        let name = |&(index, _): &(usize, &ParamState)| self.params[index].name.clone();
        let is_left_out = |(_, state): &&(_, &ParamState)| state.external && group.world_size() > 1;
        let error = if !unused.is_empty() && !self.exchanges_used() {
            let names = unused.iter().map(name).collect();
            Some(Error::UnusedParameters { rank: group.rank(), names })
        } else {
            unused.iter().find(is_left_out).map(|param| {
                let name = name(param);
                Error::InvalidArgument(format!(
                    "the external gradient for {name} is not in a bucket and would be lost: average it, or call \
                     zero_grad"
                ))
            })
        };
        if let Some(error) = error {
            if group.world_size() > 1 {
                group.abort(&error.to_string());
            }
            return Err(error);
        }
        let mut empty = Vec::new();
        for (index, state) in unused {
            let slot = self.plan.slots()[index];
            if !state.has_grad {
                empty.push(slot);
            }
            self.pass.missing[slot.bucket] -= 1;
        }
        Ok(empty)
    }

    /// Returns a flag per parameter, whether it got a gradient on this rank; `None` if ranks do not
    /// exchange the flags.
    pub(super) fn used(&self) -> Option<Vec<u8>> {
        let map = || self.states.iter().map(|state| state.used.into()).collect();
        self.exchanges_used().then(map)
    }

    /// Whether this pass may leave parameters unused, so that ranks exchange the flags.
    fn exchanges_used(&self) -> bool {
        self.options.finds_unused() || self.records_graph()
    }

    /// Whether this is the pass that records the static graph.
    fn records_graph(&self) -> bool {
        self.options.static_graph && self.passes == 0
    }

    /// Records that all buckets have been averaged; `used` flags the parameters used on any rank.
    pub(super) fn averaged(&mut self, used: Option<&[u8]>) {
        let records_graph = self.records_graph();
        for (index, state) in self.states.iter_mut().enumerate() {
            let anywhere = used.map(|used| used[index] != 0);
            if records_graph && !state.used {
                let by_others = anywhere.unwrap_or_default();
                state.idle = if by_others { Idle::OnThisRank } else { Idle::OnAllRanks };
            }
            state.has_grad |= anywhere.unwrap_or(state.idle == Idle::OnThisRank);
            state.used = false;
        }
        self.passes += 1;
    }

    pub(super) fn zero_grad(&mut self) {
        for state in &mut self.states {
            (state.has_grad, state.external, state.used) = (false, false, false);
        }
    }

    /// Returns the final layout, in the order in which rank 0's gradients arrived, after the first
    /// averaged pass, or the second with a static graph. Every rank must call it; it waits for rank
    /// 0.
    pub(super) fn next_plan(&self, group: &ProcessGroup) -> Result<Option<BucketPlan>> {
        if self.rebuilt || self.passes < 1 + u64::from(self.options.static_graph) {
            return Ok(None);
        }
        let mut order: Vec<u64> = self.pass.arrived.iter().map(|&index| index as u64).collect();
        // Parameters unused in a static graph come last: they never fill a bucket.
        let idle = self.states.iter().enumerate().filter(|(_, state)| state.idle != Idle::No);
        order.extend(idle.map(|(index, _)| index as u64));
        group.broadcast(&mut order, 0)?;
        let order: Vec<usize> =
            order.into_iter().map(|index| usize::try_from(index).unwrap_or(usize::MAX)).collect();
        BucketPlan::arrived(&self.params, &order, &self.options.caps()).map(Some)
    }

    /// Returns the number of passes averaged, the order of the final layout (empty before that
    /// exists), and for each parameter whether the static graph does not use it on this rank (1) or
    /// on any rank (2).
    pub(super) fn state(&self) -> (u64, Vec<usize>, Vec<u8>) {
        let order = self.plan.buckets().iter().flat_map(|bucket| bucket.params.iter().copied());
        let order = if self.rebuilt { order.collect() } else { Vec::new() };
        (self.passes, order, self.states.iter().map(|state| state.idle as u8).collect())
    }

    /// Restores a [`state`](Self::state), and drops the gradients. Returns the new layout, if it
    /// changes.
    pub(super) fn load_state(
        &mut self,
        passes: u64,
        order: &[usize],
        idle: &[u8],
    ) -> Result<Option<BucketPlan>> {
        let invalid = |text: &str| Err(Error::InvalidArgument(text.to_owned()));
        if self.pass.active {
            return invalid("cannot load a reducer's state inside a pass");
        }
        if idle.len() != self.states.len() || idle.iter().any(|idle| *idle > 2) {
            return invalid("the reducer's state does not match the parameters");
        }
        let caps = self.options.caps();
        let plan = match order.is_empty() || self.options.finds_unused() {
            true => None,
            false => Some(BucketPlan::arrived(&self.params, order, &caps)?),
        };
        for (state, idle) in self.states.iter_mut().zip(idle) {
            let idle = [Idle::No, Idle::OnThisRank, Idle::OnAllRanks][usize::from(*idle)];
            *state = ParamState { idle, ..ParamState::default() };
        }
        self.passes = passes;
        Ok(plan)
    }

    /// Sets the final layout; the caller has moved the gradients.
    pub(super) fn set_plan(&mut self, plan: BucketPlan) {
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

fn check_equal_on_all_ranks(
    group: &ProcessGroup,
    params: &[ParamInfo],
    options: &ReducerOptions,
) -> Result<()> {
    let line = |(index, ParamInfo { name, count, dtype, rows }): (usize, &ParamInfo)| match rows {
        0 => format!("parameter {index} is {name} {dtype} [{count}]"),
        rows => format!("parameter {index} is {name} {dtype} [{count}] of {rows} rows"),
    };
    // The options, then a line for each parameter.
    let own: Vec<String> =
        [format!("{options:?}")].into_iter().chain(params.iter().enumerate().map(line)).collect();
    let all = object::all_gather_object(group, &own)?;
    let most = all.iter().map(Vec::len).max().unwrap_or(0);
    let Some(at) = (0..most).find(|&at| all.iter().any(|lines| lines.get(at) != all[0].get(at)))
    else {
        return Ok(());
    };
    let field = if at == 0 { "options" } else { "the parameters" };
    let missing = || format!("parameter {} is missing", at.saturating_sub(1));
    let by_rank = all.iter().map(|lines| lines.get(at).cloned().unwrap_or_else(missing));
    let by_rank = by_rank.enumerate().collect();
    Err(Error::Mismatch { op: "making a reducer".to_owned(), field, by_rank })
}
