//! Those of CUDA.

#![expect(unsafe_code, reason = "an address is only a number")]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cuda_rt::{DType, DeviceSlice, Gpu};

use crate::{Result, StepCtl};

/// A tensor and its gradient in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceParam {
    /// The weight, updated in place.
    pub weight: DeviceSlice,
    /// The gradient, as long as the weight. A tensor without one is not updated.
    pub grad: Option<DeviceSlice>,
    /// As [`ParamMut::rows`](crate::ParamMut::rows).
    pub rows: usize,
    /// Whether to zero the gradient after a step.
    pub clear: bool,
    /// Device address of a moving average of the weight, f32, and its decay, `0 ..= 1`.
    pub ema: Option<(u64, f32)>,
}

impl DeviceParam {
    /// A tensor with or without a gradient.
    #[must_use]
    pub const fn new(weight: DeviceSlice, grad: Option<DeviceSlice>) -> Self {
        Self { weight, grad, rows: 0, clear: false, ema: None }
    }
}

/// Identifies the kernel launches of a step. If two are equal, so are the launches with all their
/// arguments: the kernels read everything that differs from step to step from device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launches {
    pub(crate) bound: u64,
    pub(crate) takes_stats: bool,
}

/// Tensors in device memory, lent for a step.
#[derive(Clone, Copy, Debug)]
pub struct DeviceParams<'a> {
    pub(crate) on: &'a Gpu,
    pub(crate) params: &'a [DeviceParam],
}

impl<'a> DeviceParams<'a> {
    /// Lends `params` for work in the stream of `on`.
    ///
    /// # Safety
    ///
    /// Each address must have that number of elements of that type on the device of `on`, until all
    /// work that is launched in its stream while this is lent is done. Other code that writes or
    /// frees them, or reads the weights, is ordered before or after that work. No weight overlaps
    /// another weight or a gradient; gradients that are not cleared may overlap each other.
    #[must_use]
    #[expect(unsafe_code, reason = "an address is only a number")]
    pub const unsafe fn new(on: &'a Gpu, params: &'a [DeviceParam]) -> Self {
        Self { on, params }
    }
}

/// Takes statistics of gradients (their norm, whether they are finite) before the step, for example
/// of a bucket after its all-reduce, while it is in the device's cache: the step does not read them
/// again for this. Returned by [`DeviceOptimizer::grad_stats`](crate::DeviceOptimizer::grad_stats),
/// for the next step.
#[derive(Clone, Debug)]
pub struct GradStats {
    pub(crate) optimizer: Arc<Mutex<dyn TakesStats>>,
    pub(crate) ctl: StepCtl,
}

impl GradStats {
    /// Reads some gradients, each given with its tensor's index, in the stream of `on`. Ignores
    /// gradients that are not bound at these addresses; the step will read them.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`](crate::Error::Cuda).
    ///
    /// # Safety
    ///
    /// The optimizer's next call is a step on these gradients, which do not change after this call
    /// in the stream of `on`. This stream is on the optimizer's device and is ordered after all
    /// work that the optimizer's own stream has now. The optimizer's own stream waits for it before
    /// the step, and before the optimizer and this are dropped.
    pub unsafe fn take(&self, grads: &[(usize, DeviceSlice)], on: &Gpu) -> Result<()> {
        let mut optimizer = self.optimizer.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: guaranteed by the caller.
        unsafe { optimizer.take_bound(grads, &self.ctl, on) }
    }
}

/// An optimizer that takes statistics.
pub(crate) trait TakesStats: Send + std::fmt::Debug {
    /// # Safety
    ///
    /// As [`GradStats::take`].
    unsafe fn take_bound(
        &mut self,
        grads: &[(usize, DeviceSlice)],
        ctl: &StepCtl,
        on: &Gpu,
    ) -> Result<()>;
}

/// Launch parameters of the kernel `step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaunchShape {
    /// Maximum number of blocks of 256 threads per multiprocessor.
    pub blocks: u32,
    /// Number of elements that a warp updates at a time.
    pub sweep: u32,
    /// Number of elements of each vector that a thread loads at a time; 0: 8 if weight or gradient
    /// is 16-bit, else 4.
    pub pack: u32,
}

impl LaunchShape {
    /// Used without a search.
    pub(crate) const DEFAULT: Self = Self { blocks: 4, sweep: 4096, pack: 0 };

    /// The candidates of a search.
    pub(crate) const ALL: [Self; 18] = {
        let (mut all, mut at) = ([Self::DEFAULT; 18], 0);
        while at < all.len() {
            all[at] = Self {
                blocks: [2, 4, 8][at % 3],
                sweep: [1024, 4096, 16384][at / 3 % 3],
                pack: [4, 8][at / 9],
            };
            at += 1;
        }
        all
    };

    pub(crate) fn to_text(self) -> String {
        format!("{} {} {}", self.blocks, self.sweep, self.pack)
    }

    /// Parses the result of [`to_text`](Self::to_text), if it is a candidate.
    pub(crate) fn from_text(text: &[u8]) -> Option<Self> {
        let all = [Self::DEFAULT].into_iter().chain(Self::ALL);
        all.into_iter().find(|shape| shape.to_text().as_bytes() == text)
    }
}

/// Result of a search for tensors that are updated in one launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// Types of weight and gradient.
    pub types: (DType, DType),
    /// Launch parameters of later steps.
    pub shape: LaunchShape,
    /// Time of a step with each candidate; empty if the result was cached.
    pub searched: Vec<(LaunchShape, Duration)>,
}
