//! A reducer and an optimizer: `collective` averages the gradients, `fused-optim` checks each
//! bucket after its all-reduce and then steps with them.
//!
//! The crates exchange only addresses, lengths, types and a stream. The check (sums of squares,
//! non-finite values) runs on the buckets' stream while they are in the device's cache, and
//! overlaps with backward. The step then reads each gradient once: it skips or clips and updates.
//!
//! ```text
//! ready(i) .. ready(j) -> bucket's stream: all-reduce | take_grad_stats  ...
//! caller's stream:  backward ................................ finish | step | forward
//! ```

use collective::device::{DeviceBuf, DeviceStream};
use collective::reducer::{BucketKernels, BucketPlan, DeviceReducer, ParamInfo, ReducerOptions};
use collective::{DType, Error, ProcessGroup};
use fused_optim::StepCtl;
use fused_optim::cuda::{DeviceParam, DeviceSlice, Gpu, LossScale, Status};

use super::Result;
use super::rules::Any;

/// The epilogue of a bucket: checks its gradients.
#[derive(Debug)]
pub struct BucketStats {
    optimizer: Any,
    ctl: StepCtl,
    device: usize,
    /// The device with the buckets' stream.
    on: Option<Gpu>,
    /// The tensors in each bucket.
    members: Vec<Vec<usize>>,
    /// Whether the gradients' current addresses are bound to the optimizer.
    bound: bool,
}

impl BucketKernels for BucketStats {
    fn laid_out(&mut self, plan: &BucketPlan, _: &[DeviceBuf]) -> collective::Result<()> {
        self.members = plan.buckets().iter().map(|bucket| bucket.params.clone()).collect();
        self.bound = false;
        Ok(())
    }

    unsafe fn averaged(
        &mut self,
        bucket: usize,
        _: DeviceBuf,
        stream: DeviceStream,
    ) -> collective::Result<()> {
        if !self.bound {
            // Buckets have moved since the last step: the step will check.
            return Ok(());
        }
        if self.on.is_none() {
            // SAFETY: the reducer's stream outlives its kernels.
            let gpu = unsafe { Gpu::with_stream(self.device, stream.as_raw()) };
            self.on = Some(gpu.map_err(|error| failed("open the device", &error))?);
        }
        // SAFETY: the gradients are the bucket's, bound and averaged. The reducer has ordered this
        // stream after the stream of the last step; the next step waits for `finish`.
        unsafe {
            self.optimizer.take_grad_stats(&self.members[bucket], &self.ctl, self.on.as_ref())
        }
        .map_err(|error| failed("take statistics of a bucket", &error))
    }
}

/// Averages the gradients of all ranks and updates the weights, on a device.
#[derive(Debug)]
pub struct ReducerStep {
    reducer: DeviceReducer<BucketStats>,
    weights: Vec<DeviceSlice>,
    stream: DeviceStream,
}

impl ReducerStep {
    /// Uses the optimizer `name` for `weights`; all ranks must pass the same. Steps run on
    /// `stream`, on which gradients are ready, too.
    ///
    /// # Errors
    ///
    /// Those of the reducer and the optimizer.
    ///
    /// # Safety
    ///
    /// The weights must be valid as long as this value, on the group's device with index `device`;
    /// the stream must belong to that device and live as long.
    pub unsafe fn new(
        group: ProcessGroup,
        (device, stream): (usize, DeviceStream),
        name: &str,
        weights: Vec<DeviceSlice>,
        (options, ctl): (ReducerOptions, StepCtl),
    ) -> Result<Self> {
        // SAFETY: the caller guarantees the stream.
        let gpu = unsafe { Gpu::with_stream(device, stream.as_raw()) }?;
        let optimizer = Any::new(name, gpu, weights.len())?;
        let param = |(index, slice): (usize, &DeviceSlice)| {
            ParamInfo::new(index.to_string(), slice.len, type_of(slice.dtype))
        };
        let params = weights.iter().enumerate().map(param).collect();
        let (members, bound) = (Vec::new(), false);
        let stats = BucketStats { optimizer, ctl, device, on: None, members, bound };
        let reducer = DeviceReducer::new(group, params, options, stats)?;
        let mut made = Self { reducer, weights, stream };
        // SAFETY: the caller guarantees the weights; no work has been enqueued yet.
        unsafe { made.bind() }?;
        Ok(made)
    }

    /// Sets a loss scale on the device.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub fn set_loss_scale(&mut self, scale: LossScale) -> Result<()> {
        Ok(self.reducer.kernels_mut().optimizer.set_loss_scale(Some(scale))?)
    }

    /// Averages the gradients; the last is ready first.
    ///
    /// # Errors
    ///
    /// Those of the reducer.
    ///
    /// # Safety
    ///
    /// The gradients must be valid device memory until the stream has reached this call.
    pub unsafe fn average(&mut self, grads: &[DeviceBuf]) -> Result<()> {
        self.reducer.zero_grad();
        self.reducer.prepare(true)?;
        for (index, grad) in grads.iter().enumerate().rev() {
            // SAFETY: the caller guarantees the gradient; the stream outlives the reducer.
            unsafe { self.reducer.ready(index, *grad, self.stream) }?;
        }
        // SAFETY: the stream outlives the reducer; only `step` uses the gradients, in the same
        // stream.
        Ok(unsafe { self.reducer.finish(self.stream) }?)
    }

    /// Updates the weights with the averages; checks only gradients that were not checked before.
    ///
    /// # Errors
    ///
    /// Those of the optimizer.
    ///
    /// # Safety
    ///
    /// Nothing else may use the weights until the stream has reached this call.
    pub unsafe fn step(&mut self) -> Result<()> {
        if !self.reducer.kernels().bound {
            // Its stream is ordered after all checks, so the tables that they read may be freed.
            // SAFETY: the caller guarantees the weights.
            unsafe { self.bind() }?;
        }
        let BucketStats { optimizer, ctl, .. } = self.reducer.kernels_mut();
        // SAFETY: weights and buckets are bound; `finish` has ordered this stream after the
        // epilogues.
        Ok(unsafe { optimizer.step(ctl) }?)
    }

    /// The status of the optimizer. Blocks until the stream is done.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    pub fn status(&self) -> Result<Status> {
        Ok(self.reducer.kernels().optimizer.status()?)
    }

    /// The reducer.
    #[must_use]
    pub fn reducer(&self) -> &DeviceReducer<BucketStats> {
        &self.reducer
    }

    /// # Safety
    ///
    /// The weights must be valid; accesses of other streams to the tables must be ordered before
    /// this stream.
    unsafe fn bind(&mut self) -> Result<()> {
        let slots: Vec<DeviceBuf> = (0..self.weights.len()).map(|i| self.reducer.slot(i)).collect();
        let params: Vec<DeviceParam> = (self.weights.iter().zip(slots))
            .map(|(weight, slot)| {
                let grad = DeviceSlice { ptr: slot.address(), ..*weight };
                DeviceParam::new(*weight, Some(grad))
            })
            .collect();
        let stats = self.reducer.kernels_mut();
        // SAFETY: the caller guarantees the weights; the reducer reports when its slots move.
        unsafe { stats.optimizer.bind(&params) }?;
        stats.bound = true;
        Ok(())
    }
}

/// The type in `collective`.
pub(super) const fn type_of(dtype: fused_optim::cuda::DType) -> DType {
    match dtype {
        fused_optim::cuda::DType::F32 => DType::F32,
        fused_optim::cuda::DType::F16 => DType::F16,
        fused_optim::cuda::DType::Bf16 => DType::Bf16,
    }
}

fn failed(during: &str, error: &dyn std::error::Error) -> Error {
    Error::Backend {
        backend: "kernels",
        during: during.into(),
        name: "error".into(),
        code: -1,
        text: error.to_string(),
    }
}
