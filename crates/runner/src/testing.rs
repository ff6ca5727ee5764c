//! Helpers of unit tests: an engine without a tensor crate, and a run with it.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::{DType, Sgd, SgdHyper, Slice, SliceMut};
use half::{bf16, f16};

use crate::data::{Array, Batch, BoxError, DATASETS, Dataset, Sample, SampleRng};
use crate::engine::{Engine, Losses, Model, StepContext, TensorSpec, Visit};
use crate::evaluate::Metric;
use crate::model::{MODELS, ModelFactory};
use crate::optim_wrapper::OptimWrapperFactory;
use crate::runner::{DataLoaderConfig, RunnerBuilder, TrainConfig};
use crate::{Error, Result};

/// Elements of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Values {
    fn slice(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(v) => SliceMut::F32(v),
            Self::F16(v) => SliceMut::F16(v),
            Self::Bf16(v) => SliceMut::Bf16(v),
        }
    }
}

/// An engine whose gradients are all `gradient`.
pub(crate) struct FakeEngine {
    pub(crate) specs: [Vec<TensorSpec>; 2],
    pub(crate) params: Vec<Values>,
    pub(crate) buffers: Vec<Values>,
    pub(crate) gradient: f32,
    /// Number of tokens of a batch, by the index of the step, if known.
    pub(crate) count: fn(&Batch, usize) -> Option<f64>,
    /// Number of training steps so far.
    pub(crate) steps: usize,
    /// Index of the step from which on loss and gradients are NaN.
    pub(crate) nan_from: usize,
    /// Index of the step that fails after its first gradient.
    pub(crate) fails_at: usize,
}

impl FakeEngine {
    /// Creates an engine from names and values of vectors: parameters and buffers.
    pub(crate) fn new(params: &[(&str, Values)], buffers: &[(&str, Values)]) -> Self {
        let specs = [params, buffers].map(|tensors| {
            let spec = |(name, values): &(&str, Values)| {
                let mut values = values.clone();
                let (shape, dtype) = (vec![values.slice().len()], values.slice().dtype());
                TensorSpec { name: (*name).to_owned(), shape, dtype }
            };
            tensors.iter().map(spec).collect()
        });
        let values = |tensors: &[(&str, Values)]| tensors.iter().map(|t| t.1.clone()).collect();
        Self {
            specs,
            params: values(params),
            buffers: values(buffers),
            gradient: 1.0,
            count: |_, _| None,
            steps: 0,
            nan_from: usize::MAX,
            fails_at: usize::MAX,
        }
    }
}

impl Model for FakeEngine {
    fn params(&self) -> &[TensorSpec] {
        &self.specs[0]
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.specs[1]
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        visit(&mut self.params.iter_mut().map(Values::slice).collect::<Vec<_>>())
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> train_step::Result<()> {
        visit(&mut self.buffers.iter_mut().map(Values::slice).collect::<Vec<_>>())
    }
}

impl Engine for FakeEngine {
    fn train_step(&mut self, _: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        let step = self.steps;
        self.steps += 1;
        let loss = if step >= self.nan_from { f32::NAN } else { 1.0 };
        let gradient = self.gradient * cx.loss_scale * loss;
        for (index, spec) in self.specs[0].iter().enumerate() {
            let (mut sink, count) = (cx.sink.lock(), spec.count());
            match spec.dtype {
                DType::F32 => sink.ready(index, Slice::F32(&vec![gradient; count]))?,
                DType::F16 => {
                    sink.ready(index, Slice::F16(&vec![f16::from_f32(gradient); count]))?;
                }
                DType::Bf16 => {
                    sink.ready(index, Slice::Bf16(&vec![bf16::from_f32(gradient); count]))?;
                }
            }
            if step == self.fails_at {
                return Err(Error::engine("backward failed"));
            }
        }
        Ok(Losses::new(vec![("loss".into(), loss.into())]))
    }

    fn loss_count(&self, batch: &Batch) -> Result<Option<f64>> {
        Ok((self.count)(batch, self.steps))
    }

    fn eval(&mut self, _: &Batch) -> Result<Vec<(String, Array)>> {
        Ok(Vec::new())
    }
}

/// Data set of `.0` equal samples.
struct Blank(usize);

impl Dataset for Blank {
    fn name(&self) -> &'static str {
        "blank"
    }

    fn len(&self) -> usize {
        self.0
    }

    fn sample(&self, _: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        Ok(Sample::new().with("inputs", Array::scalar(0_u8)))
    }
}

/// Loader of `len` equal samples, with batch size 1.
pub(crate) fn blank(len: usize) -> DataLoaderConfig {
    DataLoaderConfig::new(Blank(len), 1)
}

/// SGD with learning rate `lr`.
pub(crate) fn sgd(lr: f64) -> OptimWrapperFactory {
    OptimWrapperFactory::fp32(move |count| {
        Sgd::with_one_group(SgdHyper { lr, ..SgdHyper::default() }, count)
    })
}

/// A fake engine with one parameter of two elements.
fn fake() -> ModelFactory {
    Box::new(|_| Ok(Box::new(FakeEngine::new(&[("w", Values::F32(vec![1.0, 2.0]))], &[]))))
}

/// Registers the model `Fake`, and the data set `Blank` of eight samples.
pub(crate) fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        MODELS.register("Fake", |_| Ok(fake())).unwrap();
        DATASETS.register("Blank", |_| Ok(Box::new(|| Ok(Arc::new(Blank(8)))))).unwrap();
    });
}

/// Metrics with a given result for each validation; the last result repeats.
pub(crate) struct Metrics(Vec<Vec<(&'static str, f64)>>, AtomicUsize);

impl Metrics {
    pub(crate) fn new<const N: usize>(
        rows: impl IntoIterator<Item = [(&'static str, f64); N]>,
    ) -> Box<Self> {
        Box::new(Self(rows.into_iter().map(Vec::from).collect(), AtomicUsize::new(0)))
    }
}

impl Metric for Metrics {
    fn update(&mut self, _: &Batch, _: &[(String, Array)]) -> Result<(), BoxError> {
        Ok(())
    }

    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        let at = self.1.fetch_add(1, Ordering::Relaxed).min(self.0.len() - 1);
        Ok(self.0[at].iter().map(|(name, value)| ((*name).to_owned(), *value)).collect())
    }

    fn reset(&mut self) {}
}

/// Builder of a run of one rank on `len` samples, with a fake engine.
pub(crate) fn builder(dir: &Path, len: usize) -> RunnerBuilder {
    RunnerBuilder::default()
        .model(fake())
        .optim_wrapper(sgd(0.1))
        .train_dataloader(blank(len))
        .train_cfg(TrainConfig::new(1))
        .work_dir(dir)
        .process_group(group())
}

/// A process group of one rank.
pub(crate) fn group() -> ProcessGroup {
    ProcessGroup::threads(1, Duration::from_secs(10)).unwrap().remove(0)
}
