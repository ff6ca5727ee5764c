//! `DistributedDataParallel`: gradients averaged over a process group while backward still runs.
//!
//! Each gradient is copied into its bucket the moment backward has finished it; a full bucket
//! leaves at once, and [`finish`](ModelWrapper::finish) waits for those still under way. The
//! bucket is the gradient's only home (PyTorch's `gradient_as_bucket_view`). In a group over HCCL buckets
//! travel through the memory of the ranks' NPUs.
//!
//! The first step that a parameter gets no gradient in is an error that names it, on every rank,
//! unless [`find_unused_parameters`](ReducerOptions::find_unused_parameters) or
//! [`static_graph`](ReducerOptions::static_graph) allows it.

use std::sync::Arc;

use collective::reducer::ParamInfo;
use collective::{ProcessGroup, Reducer, ReducerOptions};
use fused_optim::{DType, Slice, SliceMut};
use parking_lot::Mutex;

use super::{ModelWrapper, WrapperFactory, state};
use crate::engine::{Engine, GradSink, SharedSink, TensorSpec};
use crate::{Error, Result};

/// Data parallelism: every rank holds the whole model and sees its own share of each batch. With one
/// rank it only keeps the gradients.
#[derive(Debug)]
pub struct DistributedDataParallel {
    inner: Arc<Mutex<Inner>>,
    /// For buffers, if they are rank 0's.
    group: Option<ProcessGroup>,
    sync: bool,
    /// The forward before was one with `sync`, or there was none.
    buffers_due: bool,
}

#[derive(Debug)]
struct Inner {
    reducers: Vec<Reducer>,
    /// For each parameter, its reducer and its index there.
    route: Vec<(usize, usize)>,
    dtypes: Vec<DType>,
}

impl DistributedDataParallel {
    /// Joins the group. Every rank calls this with the same parameters in the same order.
    ///
    /// # Errors
    ///
    /// If the ranks' parameters differ, naming the first difference; a peer's failure.
    pub fn new(
        group: ProcessGroup,
        params: &[TensorSpec],
        options: ReducerOptions,
    ) -> Result<Self> {
        Self::over(vec![(group, (0..params.len()).collect())], params, options)
    }

    /// As [`new`](Self::new), with buckets and a group of its own for each of the model's parts,
    /// which are what the first word of the parameters' names tells apart.
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
        // Within a group all ranks' calls have one order, which the order of arrival over several
        // reducers is not: hence a group for each.
        let key = i64::try_from(group.rank()).unwrap_or(i64::MAX);
        let split = |(_, indices)| match group.split(Some(0), key)? {
            Some(group) => Ok((group, indices)),
            None => Err(Error::Config("a split left this rank out".to_owned())),
        };
        let parts = parts.into_iter().map(split).collect::<Result<_>>()?;
        Self::over(parts, params, options)
    }

    /// Gives every rank the buffers of rank 0 before each forward that follows a step.
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
        for (part, (group, indices)) in parts.into_iter().enumerate() {
            options.through_device = group.backend_name() == "hccl";
            for (at, &index) in indices.iter().enumerate() {
                route[index] = (part, at);
            }
            let infos = indices.iter().map(|&index| info(&params[index])).collect();
            reducers.push(Reducer::new(group, infos, options.clone())?);
        }
        let dtypes = params.iter().map(|p| p.dtype).collect();
        let inner = Arc::new(Mutex::new(Inner { reducers, route, dtypes }));
        Ok(Self { inner, group: None, sync: true, buffers_due: true })
    }

    /// Joins with the default options.
    pub(crate) fn factory() -> WrapperFactory {
        Box::new(|group, params| Ok(Box::new(Self::new(group, params, ReducerOptions::default())?)))
    }

    /// Joins, and lets passes leave parameters out.
    pub(crate) fn finding_unused() -> WrapperFactory {
        let mut options = ReducerOptions::default();
        options.find_unused_parameters = true;
        Box::new(|group, params| Ok(Box::new(Self::new(group, params, options)?)))
    }
}

fn info(param: &TensorSpec) -> ParamInfo {
    let dtype = match param.dtype {
        DType::F32 => collective::DType::F32,
        DType::F16 => collective::DType::F16,
        DType::Bf16 => collective::DType::Bf16,
    };
    ParamInfo::new(&param.name, param.count(), dtype).with_rows(param.rows())
}

impl GradSink for Inner {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        let (part, index) = self.route[index];
        let reducer = &mut self.reducers[part];
        match grad {
            Slice::F32(g) => reducer.ready(index, g)?,
            Slice::F16(g) => reducer.ready(index, g)?,
            Slice::Bf16(g) => reducer.ready(index, g)?,
        }
        Ok(())
    }
}

impl ModelWrapper for DistributedDataParallel {
    fn sink(&self) -> SharedSink {
        self.inner.clone()
    }

    fn prepare(&mut self, sync: bool) -> Result<()> {
        self.sync = sync;
        self.inner.lock().reducers.iter_mut().try_for_each(|r| Ok(r.prepare(sync)?))
    }

    fn before_forward(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let due = std::mem::replace(&mut self.buffers_due, self.sync);
        let Some(group) = self.group.as_ref().filter(|_| due) else { return Ok(()) };
        engine.with_buffers(&mut |buffers| {
            for buffer in buffers {
                match buffer {
                    SliceMut::F32(s) => group.broadcast(s, 0)?,
                    SliceMut::F16(s) => group.broadcast(s, 0)?,
                    SliceMut::Bf16(s) => group.broadcast(s, 0)?,
                }
            }
            Ok(())
        })
    }

    fn finish(&mut self) -> Result<()> {
        self.inner.lock().reducers.iter_mut().try_for_each(|r| Ok(r.finish()?))
    }

    fn with_grads(&self, visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>) -> Result<()> {
        let inner = self.inner.lock();
        let slices: Vec<_> = inner
            .dtypes
            .iter()
            .zip(&inner.route)
            .map(|(dtype, &(part, index))| match dtype {
                DType::F32 => inner.reducers[part].grad(index).map(Slice::F32),
                DType::F16 => inner.reducers[part].grad(index).map(Slice::F16),
                DType::Bf16 => inner.reducers[part].grad(index).map(Slice::Bf16),
            })
            .collect();
        visit(&slices)
    }

    fn zero_grad(&mut self) {
        self.inner.lock().reducers.iter_mut().for_each(Reducer::zero_grad);
    }

    fn state(&self) -> Result<Vec<u8>> {
        state::to_bytes(&self.inner.lock().reducers)
    }

    fn load_state(&mut self, bytes: &[u8]) -> Result<()> {
        state::load(&mut self.inner.lock().reducers, bytes)
    }
}
