//! Gradients and averages in device memory.

use std::any::Any;
use std::fmt;

use fused_optim::{DType, GradStats, Slice};
use half::{bf16, f16};

use crate::Result;

/// Tensors of a model that are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Averaged {
    /// All parameters.
    Params,
    /// All buffers.
    Buffers,
    /// All parameters, followed by all buffers.
    Model,
}

/// A gradient of an engine in device memory, valid as long as this value exists.
pub trait DeviceTensor: Any + Send + fmt::Debug {
    /// Returns the element type.
    fn dtype(&self) -> DType;

    /// Returns the number of elements.
    fn count(&self) -> usize;

    /// Adds host values of equal type and length, rounded once per element.
    ///
    /// # Errors
    ///
    /// As [`add`](Self::add).
    fn add_host(&mut self, term: Slice<'_>) -> Result<()>;

    /// Adds a tensor of the same engine, type and length, rounded once per element.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails, or for a tensor of another
    /// engine, type or length.
    fn add(&mut self, term: &dyn DeviceTensor) -> Result<()>;

    /// Copies the elements to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails.
    fn to_host(&self) -> Result<HostTensor>;
}

/// Elements of a tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// Elements of `f32`.
    F32(Vec<f32>),
    /// Elements of `f16`.
    F16(Vec<f16>),
    /// Elements of `bf16`.
    Bf16(Vec<bf16>),
}

impl HostTensor {
    /// Rounds values to a type, to nearest even.
    #[must_use]
    pub fn rounded(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::F32 => Self::F32(values.to_vec()),
            DType::F16 => Self::F16(values.iter().map(|value| f16::from_f32(*value)).collect()),
            DType::Bf16 => Self::Bf16(values.iter().map(|value| bf16::from_f32(*value)).collect()),
        }
    }

    /// Returns the elements.
    #[must_use]
    pub fn as_slice(&self) -> Slice<'_> {
        match self {
            Self::F32(v) => Slice::F32(v),
            Self::F16(v) => Slice::F16(v),
            Self::Bf16(v) => Slice::Bf16(v),
        }
    }
}

/// Averages gradients over the ranks of a group in device memory, by the library of the device and
/// concurrently with backward. Every rank makes the same calls.
pub trait DeviceBuckets: Send + fmt::Debug {
    /// Begins a pass, before its forward. `stats` computes statistics of each average when it is
    /// complete, for the following optimizer step.
    ///
    /// # Errors
    ///
    /// An error of an earlier pass that was detected later.
    fn prepare(&mut self, stats: Option<GradStats>) -> Result<()>;

    /// Takes the gradient of parameter `index`, once per pass.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::ready`];
    /// [`Error::Model`](crate::Error::Model) for a gradient of another engine.
    fn ready(&mut self, index: usize, grad: &dyn DeviceTensor) -> Result<()>;

    /// Ends the pass: later work of the engine, or of an optimizer in its stream, is ordered after
    /// the averages.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::finish`].
    fn finish(&mut self) -> Result<()>;

    /// Blocks until the averages begun so far have ended on the device.
    ///
    /// # Errors
    ///
    /// The failure of one of them: it is unspecified, also for a step that has used it since.
    fn settle(&self) -> Result<()>;

    /// Returns the average of a parameter's gradients if a pass since
    /// [`zero_grad`](Self::zero_grad) had any.
    fn grad(&self, index: usize) -> Option<&dyn DeviceTensor>;

    /// Returns whether [`finish`](Self::finish) waits for a gradient of parameter `index`.
    fn needs_gradient(&self, index: usize) -> bool;

    /// Discards the averages.
    fn zero_grad(&mut self);
}

/// Moving averages of an engine's tensors, in f32 and in device memory.
pub trait DeviceAverages: Send + fmt::Debug {
    /// Updates each average to `average + share * (newest - average)`, with each operation rounded
    /// to f32; without `share`, copies the tensor. Uses the tensor's value at this point of the
    /// stream, and does not block.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails.
    fn update(&mut self, share: Option<f32>) -> Result<()>;

    /// Copies the averages to the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails.
    fn to_host(&self) -> Result<Vec<Vec<f32>>>;

    /// Sets the averages.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails, or if number or lengths differ.
    fn load(&mut self, averages: &[Vec<f32>]) -> Result<()>;
}

/// A gradient on the host or on a device.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// In host memory.
    Host(Slice<'a>),
    /// In the memory of the engine's device.
    Device(&'a dyn DeviceTensor),
}
