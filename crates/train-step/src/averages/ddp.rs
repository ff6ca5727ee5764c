//! `DistributedDataParallel`: averages gradients over a process group during backward.
//!
//! Each gradient is copied into its bucket as soon as backward has completed it; a full bucket is
//! sent at once, and [`finish`](ModelWrapper::finish) waits for buckets in flight. Gradients are
//! stored only in buckets (PyTorch's `gradient_as_bucket_view`). In a group over HCCL, buckets pass
//! through the memory of the NPUs. If model and optimizer are on a GPU, gradients stay there: those
//! of a single rank without copies, those of a group over NCCL in buckets in GPU memory
//! ([`DeviceBuckets`]).
//!
//! In the first step in which a parameter gets no gradient, every rank returns an error that names
//! it, unless [`find_unused_parameters`](ReducerOptions::find_unused_parameters) or
//! [`static_graph`](ReducerOptions::static_graph) allows it.

use std::sync::Arc;

use collective::device::DeviceWork;
use collective::reducer::{CommHook, ParamInfo};
use collective::{
    ProcessGroup, ReduceOp,
    reducer::{Reducer, ReducerOptions},
};
use fused_optim::{DType, Slice};
use parking_lot::Mutex;

use super::{ModelWrapper, WrapperFactory, state};
use crate::model::{broadcast, type_of};
use crate::{
    DeviceBuckets, DeviceTensor, Error, GradSink, Gradient, Model, OptimizerStep, Result,
    SharedSink, StepContext, TensorSpec,
};

/// Data parallelism: every rank holds the whole model and computes on its own share of each batch.
/// With one rank it only stores gradients.
#[derive(Debug)]
pub struct DistributedDataParallel {
    inner: Arc<Mutex<Inner>>,
    /// Group for broadcasts of buffers from rank 0, if enabled.
    group: Option<ProcessGroup>,
    /// Whether the previous forward pass had `sync` set, or there was none.
    buffers_due: bool,
}

#[derive(Debug)]
struct Inner {
    reducers: Vec<Reducer>,
    /// Index of the reducer of each parameter, and the parameter's index there.
    route: Vec<(usize, usize)>,
    dtypes: Vec<DType>,
    options: ReducerOptions,
    /// Gradients on the model's device that have not been averaged.
    kept: Vec<Option<Box<dyn DeviceTensor>>>,
    /// Whether there is nothing to average: one rank, and no communication hook.
    alone: bool,
    /// Device buckets that average in passes with `sync`; one for each reducer, which it replaces.
    buckets: Vec<Box<dyn DeviceBuckets>>,
    sync: bool,
    /// The last operation of the model's own on a device.
    watched: Option<DeviceWork>,
}

impl Inner {
    fn check_index(&self, index: usize) -> Result<()> {
        let count = self.route.len();
        if index < count { Ok(()) } else { Err(Error::NoParameter { index, count }) }
    }

    /// Returns a gradient in its bucket.
    fn in_bucket(&self, index: usize) -> Option<Slice<'_>> {
        let (part, at) = self.route[index];
        let reducer = &self.reducers[part];
        match self.dtypes[index] {
            DType::F32 => reducer.grad(at).map(Slice::F32),
            DType::F16 => reducer.grad(at).map(Slice::F16),
            DType::Bf16 => reducer.grad(at).map(Slice::Bf16),
        }
    }

    /// Returns whether this pass averages on the device.
    fn averages_there(&self) -> bool {
        self.sync && !self.buckets.is_empty()
    }

    /// Returns the average on the device, or the gradient in its bucket or on its device.
    fn gradient(&self, index: usize) -> Option<Gradient<'_>> {
        let (part, at) = self.route[index];
        if let Some(average) = self.buckets.get(part).and_then(|buckets| buckets.grad(at)) {
            return Some(Gradient::Device(average));
        }
        match &self.kept[index] {
            Some(kept) => Some(Gradient::Device(&**kept)),
            None => self.in_bucket(index).map(Gradient::Host),
        }
    }

    /// Returns whether the gradients of the pass that begins go to the optimizer as they are.
    fn passes_unchanged(&self) -> bool {
        let is_empty = |index| self.gradient(index).is_none();
        self.alone && (0..self.route.len()).all(is_empty)
    }

    fn prepare(&mut self, cx: &mut StepContext<'_>) -> Result<()> {
        self.sync = cx.sync;
        if self.averages_there() {
            let stats = cx.step.as_mut().map_or(Ok(None), OptimizerStep::grad_stats)?;
            return self.buckets.iter_mut().try_for_each(|buckets| buckets.prepare(stats.clone()));
        }
        self.reducers.iter_mut().try_for_each(|reducer| reducer.prepare(cx.sync))?;
        if let Some(step) = &mut cx.step {
            step.may_join_backward = self.passes_unchanged();
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if !self.averages_there() {
            return self.reducers.iter_mut().try_for_each(|reducer| Ok(reducer.finish()?));
        }
        if self.options.find_unused_parameters {
            // Gradients of earlier passes for parameters that got none in this pass.
            for index in 0..self.route.len() {
                if let Some(kept) = self.kept[index].take() {
                    let (part, at) = self.route[index];
                    self.buckets[part].ready(at, &*kept)?;
                }
            }
        }
        self.buckets.iter_mut().try_for_each(|buckets| buckets.finish())
    }
}

impl DistributedDataParallel {
    /// Returns whether the gradients of the pass that begins go to the optimizer as they are.
    pub(crate) fn passes_unchanged(&self) -> bool {
        self.inner.lock().passes_unchanged()
    }

    /// Lets [`settle`](ModelWrapper::settle) wait for this operation, too, instead of the last one
    /// of this call.
    pub(crate) fn watch(&self, work: DeviceWork) {
        self.inner.lock().watched = Some(work);
    }

    /// Creates the wrapper and joins the group. Every rank calls this with the same parameters in
    /// the same order.
    ///
    /// # Errors
    ///
    /// Returns an error if the ranks' parameters differ, naming the first difference, or if a peer
    /// fails.
    pub fn new(
        group: ProcessGroup,
        params: &[TensorSpec],
        options: ReducerOptions,
    ) -> Result<Self> {
        Self::over(vec![(group, (0..params.len()).collect())], params, options)
    }

    /// As [`new`](Self::new), with separate buckets and a separate group for each part of the
    /// model. Parts are distinguished by the first component of the parameters' names.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and those of [`ProcessGroup::split`].
    #[doc(alias = "MMSeparateDistributedDataParallel")]
    pub fn separate(
        group: ProcessGroup,
        params: &[TensorSpec],
        options: ReducerOptions,
    ) -> Result<Self> {
        let mut parts: Vec<(&str, Vec<usize>)> = Vec::new();
        for (index, param) in params.iter().enumerate() {
            let name = param.name.split('.').next().unwrap_or_default();
            match parts.iter_mut().find(|(part, _)| *part == name) {
                Some((_, indices)) => indices.push(index),
                None => parts.push((name, vec![index])),
            }
        }
        // Calls in a group must have one order on all ranks, but gradients for several reducers
        // arrive in any order: hence one group per reducer.
        let key = i64::try_from(group.rank()).unwrap_or(i64::MAX);
        let split = |(_, indices)| match group.split(Some(0), key)? {
            Some(group) => Ok((group, indices)),
            None => Err(Error::NoGroup),
        };
        let parts = parts.into_iter().map(split).collect::<Result<_>>()?;
        Self::over(parts, params, options)
    }

    /// Broadcasts the buffers of rank 0 before each forward pass that follows a step.
    #[must_use]
    #[doc(alias = "broadcast_buffers")]
    pub fn with_broadcast_buffers(mut self, group: ProcessGroup) -> Self {
        self.group = Some(group);
        self
    }

    fn over(
        parts: Vec<(ProcessGroup, Vec<usize>)>,
        params: &[TensorSpec],
        mut options: ReducerOptions,
    ) -> Result<Self> {
        let mut route = vec![(0, 0); params.len()];
        let mut reducers = Vec::with_capacity(parts.len());
        let alone = parts.iter().all(|(group, _)| group.world_size() == 1);
        let alone = alone && options.comm_hook == CommHook::AllReduce;
        for (part, (group, indices)) in parts.into_iter().enumerate() {
            options.through_device = group.backend_name() == "hccl";
            for (at, &index) in indices.iter().enumerate() {
                route[index] = (part, at);
            }
            let infos = indices.iter().map(|&index| info(&params[index])).collect();
            reducers.push(Reducer::new(group, infos, options.clone())?);
        }
        let dtypes = params.iter().map(|p| p.dtype).collect();
        let kept = params.iter().map(|_| None).collect();
        let (buckets, sync, watched) = (Vec::new(), true, None);
        let inner = Inner { reducers, route, dtypes, options, kept, alone, buckets, sync, watched };
        let inner = Arc::new(Mutex::new(inner));
        Ok(Self { inner, group: None, buffers_due: true })
    }

    /// Returns whether parameter `index` has a gradient since the last
    /// [`zero_grad`](ModelWrapper::zero_grad).
    #[must_use]
    pub fn has_gradient(&self, index: usize) -> bool {
        self.inner.lock().gradient(index).is_some()
    }

    /// Returns whether [`finish`](ModelWrapper::finish) waits for a gradient of parameter `index`,
    /// in a pass that has not reported it; with
    /// [`static_graph`](ReducerOptions::static_graph), whether its graph uses the parameter.
    #[must_use]
    pub fn needs_gradient(&self, index: usize) -> bool {
        let inner = self.inner.lock();
        let (part, at) = inner.route[index];
        match inner.buckets.get(part).filter(|_| inner.sync) {
            Some(buckets) => buckets.needs_gradient(at),
            None => inner.reducers[part].needs_gradient(at),
        }
    }

    /// Returns a factory with default options.
    #[must_use]
    pub fn factory() -> WrapperFactory {
        Box::new(|group, params| Ok(Box::new(Self::new(group, params, ReducerOptions::default())?)))
    }

    /// As [`factory`](Self::factory), but backward may leave parameters without gradient, such as
    /// frozen ones or those of branches that a batch does not take.
    #[must_use]
    #[doc(alias = "find_unused_parameters")]
    pub fn finding_unused() -> WrapperFactory {
        let mut options = ReducerOptions::default();
        options.find_unused_parameters = true;
        Box::new(|group, params| Ok(Box::new(Self::new(group, params, options)?)))
    }
}

fn info(param: &TensorSpec) -> ParamInfo {
    let dtype = type_of(param.dtype);
    ParamInfo::new(&param.name, param.count(), dtype).with_rows(param.rows())
}

impl GradSink for Inner {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        self.check_index(index)?;
        let (part, index) = self.route[index];
        let reducer = &mut self.reducers[part];
        match grad {
            Slice::F32(g) => reducer.ready(index, g)?,
            Slice::F16(g) => reducer.ready(index, g)?,
            Slice::Bf16(g) => reducer.ready(index, g)?,
        }
        Ok(())
    }

    /// Stores the gradient, or averages it on the device, after adding gradients of earlier passes
    /// or of a checkpoint.
    fn ready_on_device(&mut self, index: usize, mut grad: Box<dyn DeviceTensor>) -> Result<()> {
        self.check_index(index)?;
        if !self.alone && self.buckets.is_empty() {
            return self.ready(index, grad.to_host()?.as_slice());
        }
        if let Some(kept) = &self.kept[index] {
            grad.add(&**kept)?;
        } else if let Some(bucket) = self.in_bucket(index) {
            grad.add_host(bucket)?;
        }
        let (part, at) = self.route[index];
        if self.averages_there() {
            self.kept[index] = None;
            return self.buckets[part].ready(at, &*grad);
        }
        self.reducers[part].mark_ready_external(at, type_of(grad.dtype()), grad.count())?;
        self.kept[index] = Some(grad);
        Ok(())
    }
}

impl ModelWrapper for DistributedDataParallel {
    fn sink(&self) -> SharedSink {
        self.inner.clone()
    }

    fn prepare(&mut self, model: Option<&mut dyn Model>, cx: &mut StepContext<'_>) -> Result<()> {
        self.inner.lock().prepare(cx)?;
        let Some(model) = model else { return Ok(()) };
        let due = std::mem::replace(&mut self.buffers_due, cx.sync);
        let Some(group) = self.group.as_ref().filter(|_| due) else { return Ok(()) };
        model.with_buffers(&mut |buffers| {
            buffers.iter_mut().try_for_each(|buffer| broadcast(group, buffer))
        })
    }

    fn finish(&mut self) -> Result<()> {
        self.inner.lock().finish()
    }

    fn with_grads(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> Result<()>,
    ) -> Result<()> {
        let inner = self.inner.lock();
        visit(&(0..inner.route.len()).map(|index| inner.gradient(index)).collect::<Vec<_>>())
    }

    fn settle(&self) -> Result<()> {
        let inner = self.inner.lock();
        inner.buckets.iter().try_for_each(|buckets| buckets.settle())?;
        Ok(inner.watched.as_ref().map_or(Ok(()), DeviceWork::wait)?)
    }

    fn place(&mut self, model: &mut dyn Model) -> Result<()> {
        let inner = &mut *self.inner.lock();
        let is_there = |reducer: &Reducer| reducer.group().backend_name() == "nccl";
        if inner.alone || !inner.reducers.iter().all(is_there) {
            return Ok(());
        }
        let option = match &inner.options {
            ReducerOptions { static_graph: true, .. } => Some("static_graph"),
            ReducerOptions {
                comm_hook: CommHook::AllReduce | CommHook::Fp16Compress | CommHook::Bf16Compress,
                ..
            } => None,
            // It alone keeps memory.
            _ => Some("comm_hook = \"powerSGD\""),
        };
        if let Some(option) = option {
            return Err(Error::NotOnDevice { option });
        }
        let params: Vec<ParamInfo> = model.params().iter().map(info).collect();
        let Some(device) = model.on_device() else { return Ok(()) };
        for (part, reducer) in inner.reducers.iter().enumerate() {
            let own = params.iter().cloned().enumerate();
            let own = own.filter(|(index, _)| inner.route[*index].0 == part).collect();
            let group = reducer.group().clone();
            inner.buckets.push(device.buckets(group, own, inner.options.clone())?);
        }
        Ok(())
    }

    fn zero_grad(&mut self) {
        let inner = &mut *self.inner.lock();
        inner.reducers.iter_mut().for_each(Reducer::zero_grad);
        inner.kept.fill_with(|| None);
        inner.buckets.iter_mut().for_each(|buckets| buckets.zero_grad());
    }

    fn rescale(&mut self, factor: f32) {
        self.inner.lock().reducers.iter_mut().for_each(|reducer| reducer.rescale(factor));
    }

    fn mean_over_ranks(&self, value: f64) -> Result<f64> {
        let inner = self.inner.lock();
        // The groups of all reducers have the same ranks.
        let Some(reducer) = inner.reducers.first() else { return Ok(value) };
        let mut sum = [value];
        reducer.group().all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum[0] / reducer.group().world_size() as f64)
    }

    fn is_state_finite(&self) -> bool {
        let inner = self.inner.lock();
        let mut buckets =
            inner.reducers.iter().filter_map(Reducer::state_dict).flat_map(|s| s.buckets);
        buckets.all(|of| !amp::has_non_finite(&of.q) && !amp::has_non_finite(&of.error))
    }

    fn state_dict(&self) -> Result<Vec<u8>> {
        state::to_bytes(&self.inner.lock().reducers)
    }

    fn load_state_dict(&mut self, bytes: &[u8]) -> Result<()> {
        state::load(&mut self.inner.lock().reducers, bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use super::*;
    use crate::testing::{FakeModel, Values, group};
    use crate::{EngineState, HostTensor, with_host_grads};

    /// A gradient on a device, and the number of copies made to the host.
    #[derive(Clone, Debug)]
    struct Far(Vec<f32>, Arc<Mutex<usize>>);

    impl DeviceTensor for Far {
        fn dtype(&self) -> DType {
            DType::F32
        }

        fn count(&self) -> usize {
            self.0.len()
        }

        fn add(&mut self, term: &dyn DeviceTensor) -> Result<()> {
            let any: &dyn Any = term;
            let term: &Self = any.downcast_ref().unwrap();
            self.0.iter_mut().zip(&term.0).for_each(|(sum, term)| *sum += term);
            Ok(())
        }

        fn add_host(&mut self, term: Slice<'_>) -> Result<()> {
            let Slice::F32(term) = term else { panic!("of another type") };
            self.0.iter_mut().zip(term).for_each(|(sum, term)| *sum += term);
            Ok(())
        }

        fn to_host(&self) -> Result<HostTensor> {
            *self.1.lock() += 1;
            Ok(HostTensor::F32(self.0.clone()))
        }
    }

    fn wrapper(options: ReducerOptions) -> DistributedDataParallel {
        let model = FakeModel::new(&[("w", Values::F32(vec![0.0; 2]))], &[]);
        DistributedDataParallel::new(group(), model.params(), options).unwrap()
    }

    fn begin(model: &mut DistributedDataParallel, sync: bool) {
        let mut state = EngineState::default();
        let mut cx = StepContext { sync, ..StepContext::new(model.sink(), &mut state) };
        model.prepare(None, &mut cx).unwrap();
    }

    /// Runs a pass with one gradient.
    fn pass(model: &mut DistributedDataParallel, sync: bool, grad: Box<Far>) {
        begin(model, sync);
        model.sink().lock().ready_on_device(0, grad).unwrap();
        model.finish().unwrap();
    }

    /// Returns the gradient for the optimizer, and whether it is on the device.
    fn there(model: &DistributedDataParallel) -> Option<(Vec<f32>, bool)> {
        let mut found = None;
        model
            .with_grads(&mut |grads| {
                found = grads[0].map(|grad| match grad {
                    Gradient::Device(grad) => {
                        let any: &dyn Any = grad;
                        (any.downcast_ref::<Far>().unwrap().0.clone(), true)
                    }
                    Gradient::Host(Slice::F32(grad)) => (grad.to_vec(), false),
                    Gradient::Host(_) => panic!("of another type"),
                });
                Ok(())
            })
            .unwrap();
        found
    }

    #[test]
    fn gradients_of_a_single_rank_are_copied_to_the_host_only_on_request() {
        let mut model = wrapper(ReducerOptions::default());
        let copies = Arc::default();
        let far = |values: [f32; 2]| Box::new(Far(values.to_vec(), Arc::clone(&copies)));
        pass(&mut model, false, far([1.0, 2.0]));
        pass(&mut model, true, far([10.0, 20.0]));
        assert_eq!(there(&model), Some((vec![11.0, 22.0], true)));
        assert_eq!(*copies.lock(), 0);
        let mut lent = None;
        let mut lend = |grads: &[Option<Slice<'_>>]| {
            if let Some(Slice::F32(grad)) = grads[0] {
                lent = Some(grad.to_vec());
            }
            Ok(())
        };
        with_host_grads(&model, &mut lend).unwrap();
        assert_eq!((lent, *copies.lock()), (Some(vec![11.0, 22.0]), 1));
        model.zero_grad();
        assert_eq!(there(&model), None);
        // Gradients from a checkpoint are on the host until a pass adds to them.
        begin(&mut model, false);
        model.sink().lock().ready(0, Slice::F32(&[1.0, 2.0])).unwrap();
        model.finish().unwrap();
        assert_eq!(there(&model), Some((vec![1.0, 2.0], false)));
        pass(&mut model, true, far([10.0, 20.0]));
        assert_eq!(there(&model), Some((vec![11.0, 22.0], true)));
        model.zero_grad();
        pass(&mut model, true, far([3.0, 4.0]));
        assert_eq!(there(&model), Some((vec![3.0, 4.0], true)));
    }

    #[test]
    fn communication_hook_makes_gradients_pass_through_buckets() {
        let mut options = ReducerOptions::default();
        options.comm_hook = CommHook::Bf16Compress;
        let mut model = wrapper(options);
        pass(&mut model, true, Box::new(Far(vec![1.001, 2.0], Arc::default())));
        assert_eq!(there(&model), Some((vec![1.0, 2.0], false)));
    }
}
