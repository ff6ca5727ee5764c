//! The tensors that a captured step reads and writes, which stay where they are.

use std::any::Any;
use std::sync::{Arc, Weak};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Tensor, bail};
use fused_optim::Slice;
use parking_lot::Mutex;

use super::failed;
use crate::data::{ArrayData, Batch};
use crate::engine::candle::cuda::checks_of;
use crate::engine::candle::model::{self, scalar_of};
use crate::engine::candle::on_device::{FOREIGN, OnDevice};
use crate::engine::candle::ops::known_inputs::IndexCheck;
use crate::engine::candle::params::{Tensors, set};
use crate::engine::candle::{CandleEngine, Loss, TensorBatch};
use crate::engine::{DeviceTensor, GradSink, HostTensor, Losses, SharedSink};
use crate::{Error, Result};

/// What a step computes.
pub(super) struct Computed {
    pub(super) names: Vec<String>,
    /// The loss and the other numbers for the log, `f64`.
    pub(super) scalars: Tensor,
    /// By parameter, in order of backward.
    pub(super) grads: Vec<(usize, Tensor)>,
}

impl Computed {
    fn losses(&self) -> Result<Losses> {
        losses(&self.names, &self.scalars)
    }

    pub(super) fn report(self, sink: &SharedSink) -> Result<Losses> {
        let losses = self.losses()?;
        for (index, grad) in self.grads {
            sink.lock().ready_on_device(index, Box::new(OnDevice::new(grad)))?;
        }
        Ok(losses)
    }
}

pub(super) fn losses(names: &[String], scalars: &Tensor) -> Result<Losses> {
    let values = scalars.to_vec1::<f64>().map_err(|e| failed("reading the losses", &e))?;
    Ok(Losses { scalars: names.iter().cloned().zip(values).collect() })
}

/// Gradients, until backward has ended.
#[derive(Default)]
struct Gathered(Vec<(usize, Tensor)>);

impl GradSink for Gathered {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> Result<()> {
        Err(Error::Engine("a gradient of a step on a GPU is on the host".to_owned()))
    }

    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        let grad: Box<dyn Any> = grad;
        match grad.downcast::<OnDevice>() {
            Ok(grad) => self.0.push((index, grad.tensor())),
            Err(_) => return Err(Error::Engine(FOREIGN.to_owned())),
        }
        Ok(())
    }
}

/// Forward and backward on fixed tensors. `batch` is what they hold.
pub(super) fn compute(
    engine: &CandleEngine,
    inputs: &Inputs,
    batch: &Batch,
    is_capture: bool,
) -> Result<(Computed, Vec<IndexCheck>)> {
    let forward = || engine.forward(&TensorBatch::of(&inputs.fields, engine.dtype)?);
    let (loss, checks) = checks_of(&inputs.fields, batch, is_capture, forward);
    let loss = loss?;
    let (names, scalars) = pack(&loss)?;
    let scaled = loss.value().broadcast_mul(&inputs.scale).map_err(|e| failed("loss scale", &e))?;
    let gathered = Arc::new(Mutex::new(Gathered::default()));
    let sink: SharedSink = gathered.clone();
    engine.slot.with(&sink, || scaled.backward())?;
    let grads = std::mem::take(&mut gathered.lock().0);
    Ok((Computed { names, scalars, grads }, checks))
}

/// Checks the loss; all scalars' names, and their numbers, `f64`, where the loss is.
fn pack(loss: &Loss) -> Result<(Vec<String>, Tensor)> {
    let (names, scalars): (Vec<_>, Vec<_>) = loss.checked()?.unzip();
    let scalars = scalars.into_iter().map(|scalar| scalar_of(scalar)?.detach().reshape(1));
    let packed = scalars.collect::<candle_core::Result<Vec<_>>>();
    let packed = packed.and_then(|all| Tensor::cat(&all, 0));
    let packed = packed.map_err(|e| Error::Engine(format!("scalars {names:?}: {e}")))?;
    Ok((names.into_iter().map(str::to_owned).collect(), packed))
}

/// Where a captured step reads.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) fields: Vec<(String, Tensor)>,
    scale: Tensor,
}

impl Inputs {
    pub(super) fn new(batch: &Batch, scale: f32, device: &Device) -> Result<Self> {
        let scale = Tensor::new(scale, device).map_err(|e| failed("loss scale", &e))?;
        Ok(Self { fields: model::send(batch, device)?, scale })
    }

    pub(super) fn fill(&self, batch: &Batch, scale: f32) -> Result<()> {
        let filled =
            self.fields.iter().zip(batch.iter()).try_for_each(|((_, tensor), (_, array))| {
                tensor.inplace_op1(&Upload(array.data()))
            });
        filled
            .and_then(|()| self.scale.inplace_op1(&Upload(&ArrayData::F32(vec![scale]))))
            .map_err(|e| failed("batch", &e))
    }
}

/// Copies numbers of the host's into a tensor that stays where it is.
struct Upload<'a>(&'a ArrayData);

impl InplaceOp1 for Upload<'_> {
    fn name(&self) -> &'static str {
        "upload"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        bail!("an upload to the host")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let device = storage.device().clone();
        match self.0 {
            ArrayData::F32(v) => device.memcpy_htod(v, storage.as_cuda_slice_mut::<f32>()?),
            ArrayData::U8(v) => device.memcpy_htod(v, storage.as_cuda_slice_mut::<u8>()?),
            ArrayData::I64(v) => device.memcpy_htod(v, storage.as_cuda_slice_mut::<i64>()?),
        }
    }
}

/// Where a captured step writes.
#[derive(Debug)]
pub(super) struct Outputs {
    pub(super) names: Vec<String>,
    pub(super) scalars: Tensor,
    pub(super) grads: Vec<(usize, Tensor)>,
    /// Gradients that were handed out.
    lent: Vec<(usize, Weak<Mutex<Tensor>>)>,
}

impl Outputs {
    pub(super) fn like(computed: &Computed) -> candle_core::Result<Self> {
        let own = |(index, grad): &(usize, Tensor)| Ok((*index, grad.zeros_like()?));
        let outputs = Self {
            names: computed.names.clone(),
            scalars: computed.scalars.zeros_like()?,
            grads: computed.grads.iter().map(own).collect::<candle_core::Result<_>>()?,
            lent: Vec::new(),
        };
        outputs.take(computed)?;
        Ok(outputs)
    }

    /// Copies what was computed.
    pub(super) fn take(&self, computed: &Computed) -> candle_core::Result<()> {
        let order = |grads: &[(usize, Tensor)]| grads.iter().map(|(i, _)| *i).collect::<Vec<_>>();
        if order(&self.grads) != order(&computed.grads) || self.names != computed.names {
            bail!("the step computes something else each time");
        }
        set(&self.scalars, &computed.scalars)?;
        let pairs = self.grads.iter().zip(&computed.grads);
        pairs.into_iter().try_for_each(|((_, to), (_, from))| set(to, from))
    }

    /// Gradients that are kept until now keep their numbers: what comes overwrites the others.
    pub(super) fn part(&mut self) -> candle_core::Result<()> {
        for (at, lent) in self.lent.drain(..) {
            let Some(kept) = lent.upgrade() else { continue };
            let mut kept = kept.lock();
            // Unless it has become a sum, which has memory of its own.
            if kept.id() == self.grads[at].1.id() {
                *kept = kept.copy()?;
            }
        }
        Ok(())
    }

    pub(super) fn report(&mut self, sink: &SharedSink) -> Result<()> {
        for (at, (index, grad)) in self.grads.iter().enumerate() {
            let grad = OnDevice::new(grad.clone());
            self.lent.push((at, Arc::downgrade(&grad.0)));
            sink.lock().ready_on_device(*index, Box::new(grad))?;
        }
        Ok(())
    }
}

pub(super) fn copies(tensors: &Tensors) -> Result<Vec<Tensor>> {
    tensors.copies().map_err(|e| failed("copying buffers", &e))
}

pub(super) fn set_all(tensors: &Tensors, values: &[Tensor]) -> Result<()> {
    tensors.set_all(values).map_err(|e| failed("copying buffers", &e))
}

pub(super) fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    let host = |tensor: &Tensor| OnDevice::new(tensor.detach()).to_host();
    Ok(match (host(a)?, host(b)?) {
        (HostTensor::F32(a), HostTensor::F32(b)) => {
            a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
        }
        (HostTensor::F16(a), HostTensor::F16(b)) => {
            a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
        }
        (HostTensor::Bf16(a), HostTensor::Bf16(b)) => {
            a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
        }
        _ => false,
    })
}
