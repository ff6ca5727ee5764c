//! A gradient in device memory.

use std::any::Any;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use fused_optim::Slice;
use fused_optim::candle::tensor;
use half::{bf16, f16};
use parking_lot::Mutex;

use super::optim_dtype;
use crate::engine::{DeviceTensor, HostTensor};
use crate::{Error, Result};

/// A contiguous gradient with the type of its parameter. Its address may change while this value
/// exists: a graph writes the next gradient to the old address (`cuda/graph/mod.rs`).
#[derive(Debug)]
pub(super) struct OnDevice(pub(super) Arc<Mutex<Tensor>>);

impl OnDevice {
    pub(super) fn new(tensor: Tensor) -> Self {
        Self(Arc::new(Mutex::new(tensor)))
    }

    pub(super) fn tensor(&self) -> Tensor {
        self.0.lock().clone()
    }

    fn set(&self, sum: candle_core::Result<Tensor>) -> Result<()> {
        *self.0.lock() = sum.map_err(|e| failed("adding gradients", e))?;
        Ok(())
    }
}

impl DeviceTensor for OnDevice {
    fn dtype(&self) -> fused_optim::DType {
        // Gradients of other types do not exist.
        optim_dtype(self.tensor().dtype()).unwrap_or(fused_optim::DType::F32)
    }

    fn count(&self) -> usize {
        self.tensor().elem_count()
    }

    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()> {
        self.set(self.tensor() + own(term)?.tensor())
    }

    fn add_host(&mut self, term: Slice<'_>) -> Result<()> {
        let sum = || {
            let own = self.tensor();
            let term = tensor(term, own.shape(), own.device())?;
            own + term
        };
        self.set(sum())
    }

    fn to_host(&self) -> Result<HostTensor> {
        let copy = || {
            let flat = self.tensor().flatten_all()?;
            Ok(match flat.dtype() {
                DType::F16 => HostTensor::F16(flat.to_vec1::<f16>()?),
                DType::BF16 => HostTensor::Bf16(flat.to_vec1::<bf16>()?),
                _ => HostTensor::F32(flat.to_vec1::<f32>()?),
            })
        };
        copy().map_err(|e| failed("copying a gradient", e))
    }
}

/// Converts a gradient of this engine.
pub(super) fn own(tensor: &dyn DeviceTensor) -> Result<&OnDevice> {
    let any: &dyn Any = tensor;
    any.downcast_ref().ok_or_else(|| Error::Engine(FOREIGN.to_owned()))
}

pub(super) const FOREIGN: &str = "the gradient belongs to another engine";

pub(super) fn failed(during: &str, error: candle_core::Error) -> Error {
    Error::Engine(format!("{during}: {error}"))
}
