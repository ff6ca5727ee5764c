//! Input and output tensors of a captured step, which have fixed addresses.

use std::sync::{Arc, Weak};

use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Tensor, bail};
use candle_train::{OnDevice, bytes_of, report, set};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::failed;
use crate::Result;
use crate::data::{ArrayData, Batch};
use crate::engine::candle::cuda::{Cuda, checks_of};
use crate::engine::candle::model::{self, Scalars};
use crate::engine::candle::ops::known_inputs::IndexCheck;
use crate::engine::candle::params::Gradients;
use crate::engine::candle::{CandleEngine, TensorBatch};
use crate::engine::{Losses, SharedSink};

/// Results of a step.
#[derive(Debug)]
pub(super) struct Computed {
    pub(super) scalars: Scalars,
    pub(super) grads: Gradients,
}

impl Computed {
    pub(super) fn report(self, engine: &CandleEngine, sink: &SharedSink) -> Result<Losses> {
        let losses = engine.losses(&self.scalars)?;
        for (index, grad) in self.grads {
            report(sink, index, grad)?;
        }
        Ok(losses)
    }
}

/// Runs forward and backward on fixed tensors. `batch` equals their contents.
pub(super) fn compute(
    engine: &CandleEngine,
    inputs: &Inputs,
    batch: &Batch,
    is_capture: bool,
) -> Result<(Computed, Vec<IndexCheck>)> {
    let forward = || engine.forward(&TensorBatch::of(&inputs.fields, engine.dtype)?);
    let ((loss, tape), checks) =
        checks_of(&inputs.fields, batch, is_capture, || engine.passes.record(forward));
    let loss = loss?;
    let scalars = loss.scalars()?;
    let scale = inputs.scale.broadcast_as(loss.value.shape());
    let grads = engine.passes.backward((tape, &loss.value), scale, None, Some(Vec::new()))?;
    Ok((Computed { scalars, grads }, checks))
}

/// Input tensors of a captured step.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) fields: Vec<(String, Tensor)>,
    scale: Tensor,
}

impl Inputs {
    pub(super) fn new(batch: &Batch, scale: f32, device: &Device) -> Result<Self> {
        let scale = Tensor::new(scale, device).map_err(|e| failed("loss scale", e))?;
        Ok(Self { fields: model::send(batch, device)?, scale })
    }

    pub(super) fn fill(&self, engine: &CandleEngine, batch: &Batch, scale: f32) -> Result<()> {
        let cuda = engine.cuda()?;
        let filled =
            self.fields.iter().zip(batch.iter()).try_for_each(|((_, tensor), (_, array))| {
                tensor.inplace_op1(&Upload(cuda, array.data()))
            });
        filled
            .and_then(|()| self.scale.inplace_op1(&Upload(cuda, &ArrayData::F32(vec![scale]))))
            .map_err(|e| failed("batch", e))
    }
}

/// Copies host values into a tensor with a fixed address.
struct Upload<'a>(&'a Cuda, &'a ArrayData);

impl InplaceOp1 for Upload<'_> {
    fn name(&self) -> &'static str {
        "upload"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        bail!("cannot upload to a tensor on the host")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let Self(cuda, data) = self;
        match data {
            ArrayData::F32(v) => cuda.inputs.write(v, storage.as_cuda_slice_mut::<f32>()?),
            ArrayData::F16(v) => cuda.inputs.write(v, storage.as_cuda_slice_mut::<f16>()?),
            ArrayData::BF16(v) => cuda.inputs.write(v, storage.as_cuda_slice_mut::<bf16>()?),
            ArrayData::U8(v) => cuda.inputs.write(v, storage.as_cuda_slice_mut::<u8>()?),
            ArrayData::I32(v) => cuda.inputs.write(v, storage.as_cuda_slice_mut::<i32>()?),
            ArrayData::I64(v) => cuda.inputs.write(v, storage.as_cuda_slice_mut::<i64>()?),
            ArrayData::Bool(v) => {
                cuda.inputs.write(&bytes_of(v), storage.as_cuda_slice_mut::<u8>()?)
            }
            other => bail!("candle has no tensors of {}", other.type_name()),
        }
    }
}

/// Output tensors of a captured step.
#[derive(Debug)]
pub(super) struct Outputs {
    pub(super) own: Computed,
    /// Gradients that were reported.
    lent: Vec<(usize, Weak<Mutex<Tensor>>)>,
}

impl Outputs {
    pub(super) fn like(computed: &Computed) -> candle_core::Result<Self> {
        let own = |(index, grad): &(usize, Tensor)| Ok((*index, grad.zeros_like()?));
        let grads = computed.grads.iter().map(own).collect::<candle_core::Result<_>>()?;
        let Scalars { names, values } = &computed.scalars;
        let scalars = Scalars { names: names.clone(), values: values.zeros_like()? };
        let outputs = Self { own: Computed { scalars, grads }, lent: Vec::new() };
        outputs.take(computed)?;
        Ok(outputs)
    }

    /// Copies the results of a step.
    pub(super) fn take(&self, computed: &Computed) -> candle_core::Result<()> {
        let Self { own, .. } = self;
        let order = |of: &Computed| of.grads.iter().map(|(i, _)| *i).collect::<Vec<_>>();
        if order(own) != order(computed) || own.scalars.names != computed.scalars.names {
            bail!("the step computes different gradients each time");
        }
        set(&own.scalars.values, &computed.scalars.values)?;
        let mut pairs = own.grads.iter().zip(&computed.grads);
        pairs.try_for_each(|((_, to), (_, from))| set(to, from))
    }

    /// Copies gradients that are still in use, because the next launch overwrites them.
    pub(super) fn part(&mut self) -> candle_core::Result<()> {
        for (at, lent) in self.lent.drain(..) {
            let Some(kept) = lent.upgrade() else { continue };
            let mut kept = kept.lock();
            // A sum has its own memory already.
            if kept.id() == self.own.grads[at].1.id() {
                *kept = kept.copy()?;
            }
        }
        Ok(())
    }

    pub(super) fn report(&mut self, sink: &SharedSink) -> Result<()> {
        for (at, (index, grad)) in self.own.grads.iter().enumerate() {
            let grad = OnDevice::new(grad.clone());
            self.lent.push((at, Arc::downgrade(&grad.0)));
            sink.lock().ready_on_device(*index, Box::new(grad))?;
        }
        Ok(())
    }
}

pub(super) fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    let bytes = |tensor: &Tensor| {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).map(|()| bytes)
    };
    let same = || Ok(bytes(a)? == bytes(b)?);
    same().map_err(|e: candle_core::Error| failed("comparing results", e))
}
