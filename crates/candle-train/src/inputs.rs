//! [`Inputs`]: batches on a model's device.

use candle_core::{Device, Result, Tensor};
use train_data::{Array, Batch};

use crate::data::Fields;
use crate::tensors::ModelTensors;
#[cfg(feature = "cuda")]
use {crate::pinned::Pinned, train_data::ArrayData};

/// Copies arrays to the device of a model, to a GPU through pinned memory.
#[derive(Debug)]
pub struct Inputs {
    device: Device,
    /// Copies to the model's GPU.
    #[cfg(feature = "cuda")]
    pinned: Option<Pinned>,
}

impl Inputs {
    /// Copies to `device`, that of these tensors.
    #[must_use]
    pub fn new(device: &Device, tensors: &ModelTensors) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = tensors;
        Self {
            device: device.clone(),
            #[cfg(feature = "cuda")]
            pinned: tensors.on_gpu().ok().cloned().map(Pinned::new),
        }
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// Copies an array to a tensor of its own type; a mask to bytes of 0 and 1. The array may
    /// change after the return.
    ///
    /// # Errors
    ///
    /// An error of the device; a type that candle does not have.
    pub fn tensor(&self, array: &Array) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let (Some(pinned), Device::Cuda(device)) = (&self.pinned, &self.device) {
            return pinned.tensor(array, device);
        }
        crate::tensor(array, &self.device)
    }

    /// Copies all fields of a batch, as [`tensor`](Self::tensor) does.
    ///
    /// # Errors
    ///
    /// As [`tensor`](Self::tensor).
    pub fn fields(&self, batch: &Batch) -> Result<Fields> {
        Fields::of(batch, |array| self.tensor(array))
    }

    /// Copies values to a tensor, which keeps its address.
    #[cfg(feature = "cuda")]
    pub(crate) fn fill(&self, tensor: &Tensor, values: &ArrayData) -> Result<()> {
        match &self.pinned {
            Some(pinned) => pinned.fill(tensor, values),
            None => candle_core::bail!("the model is on the host"),
        }
    }
}
