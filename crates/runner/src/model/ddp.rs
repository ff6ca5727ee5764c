//! `DistributedDataParallel`: gradients averaged over a process group while backward still runs.
//!
//! Each gradient is copied into its bucket the moment backward has finished it; a full bucket
//! leaves at once, and [`finish`](ModelWrapper::finish) waits for those still under way. The
//! bucket is the gradient's only home (PyTorch's `gradient_as_bucket_view`).

use std::sync::Arc;

use collective::reducer::ParamInfo;
use collective::{ProcessGroup, Reducer, ReducerOptions};
use fused_optim::{DType, Slice};
use parking_lot::Mutex;

use super::{ModelWrapper, WrapperFactory};
use crate::Result;
use crate::engine::{GradSink, SharedSink, TensorSpec};

/// Data parallelism: every rank holds the whole model and sees its own share of each batch. With one
/// rank it only keeps the gradients.
#[derive(Debug)]
pub struct DistributedDataParallel {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    reducer: Reducer,
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
        let infos = params.iter().map(|p| ParamInfo {
            name: p.name.clone(),
            count: p.count(),
            dtype: match p.dtype {
                DType::F32 => collective::DType::F32,
                DType::F16 => collective::DType::F16,
                DType::Bf16 => collective::DType::Bf16,
            },
        });
        let reducer = Reducer::new(group, infos.collect(), options)?;
        let dtypes = params.iter().map(|p| p.dtype).collect();
        Ok(Self { inner: Arc::new(Mutex::new(Inner { reducer, dtypes })) })
    }
}

impl DistributedDataParallel {
    /// Joins with the default options.
    pub(crate) fn factory() -> WrapperFactory {
        Box::new(|group, params| Ok(Box::new(Self::new(group, params, ReducerOptions::default())?)))
    }
}

impl GradSink for Inner {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        match grad {
            Slice::F32(g) => self.reducer.ready(index, g)?,
            Slice::F16(g) => self.reducer.ready(index, g)?,
            Slice::Bf16(g) => self.reducer.ready(index, g)?,
        }
        Ok(())
    }
}

impl ModelWrapper for DistributedDataParallel {
    fn sink(&self) -> SharedSink {
        self.inner.clone()
    }

    fn prepare(&mut self, sync: bool) -> Result<()> {
        Ok(self.inner.lock().reducer.prepare(sync)?)
    }

    fn finish(&mut self) -> Result<()> {
        Ok(self.inner.lock().reducer.finish()?)
    }

    fn with_grads(&self, visit: &mut dyn FnMut(&[Option<Slice<'_>>]) -> Result<()>) -> Result<()> {
        let inner = self.inner.lock();
        let slices: Vec<_> = inner
            .dtypes
            .iter()
            .enumerate()
            .map(|(i, dtype)| match dtype {
                DType::F32 => inner.reducer.grad(i).map(Slice::F32),
                DType::F16 => inner.reducer.grad(i).map(Slice::F16),
                DType::Bf16 => inner.reducer.grad(i).map(Slice::Bf16),
            })
            .collect();
        visit(&slices)
    }

    fn zero_grad(&mut self) {
        self.inner.lock().reducer.zero_grad();
    }
}
