//! A reducer and an optimizer joined: what `collective` averages, `fused-optim` looks at behind the
//! all-reduce, bucket by bucket, and then steps with.
//!
//! Neither crate knows the other; addresses, lengths, types and a stream are all that passes. The look
//! (sums of squares, values that are not finite) runs in the stream of the buckets while they are in the
//! device's cache, beside the rest of backward. The step then reads each gradient once: it decides,
//! clips, moves.
//!
//! ```text
//! ready(i) .. ready(j)  ->  bucket's stream: all-reduce | look_part   all-reduce | look_part   ...
//! caller's stream:  backward ............................................ finish | step | forward
//! ```

use collective::device::{DeviceBuf, DeviceStream};
use collective::reducer::{BucketKernels, BucketPlan, DeviceReducer, ParamInfo, ReducerOptions};
use collective::{DType, Error, ProcessGroup};
use fused_optim::StepCtl;
use fused_optim::cuda::{DeviceParam, DeviceSlice, Gpu, LossScale, Status};

use super::Result;
use super::rules::Any;

/// The epilogue of a bucket: a look at its gradients.
#[derive(Debug)]
pub struct Looks {
    optimizer: Any,
    ctl: StepCtl,
    device: usize,
    /// The device by the buckets' stream.
    on: Option<Gpu>,
    /// By bucket, the tensors in it.
    members: Vec<Vec<usize>>,
    /// Whether the optimizer knows where the gradients are now.
    bound: bool,
}

impl BucketKernels for Looks {
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
            // Buckets have moved, and no step was made since: the step will look.
            return Ok(());
        }
        if self.on.is_none() {
            // SAFETY: the reducer's stream, which outlives its kernels.
            let gpu = unsafe { Gpu::with_stream(self.device, stream.as_raw()) };
            self.on = Some(gpu.map_err(|error| failed("open the device", &error))?);
        }
        // SAFETY: the gradients are the bucket's, where `bind` was told, and averaged by now. The last
        // step is in a stream behind which the reducer has put this one; the next waits for `finish`.
        unsafe { self.optimizer.look_part(&self.members[bucket], &self.ctl, self.on.as_ref()) }
            .map_err(|error| failed("look at a bucket", &error))
    }
}

/// Training on a device: the gradients of all ranks are averaged, and the weights move.
#[derive(Debug)]
pub struct Joined {
    reducer: DeviceReducer<Looks>,
    weights: Vec<DeviceSlice>,
    stream: DeviceStream,
}

impl Joined {
    /// Over `weights`, with an optimizer of the rule `name`; every rank with the same. `stream` is
    /// where steps are made, and gradients are ready in.
    ///
    /// # Errors
    ///
    /// Those of the reducer and the optimizer.
    ///
    /// # Safety
    ///
    /// The weights must be where they say for as long as this lives, on the group's device, which is
    /// the `device`-th; the stream is one of it, and lives as long.
    pub unsafe fn new(
        group: ProcessGroup,
        (device, stream): (usize, DeviceStream),
        name: &str,
        weights: Vec<DeviceSlice>,
        (options, ctl): (ReducerOptions, StepCtl),
    ) -> Result<Self> {
        // SAFETY: the caller vouches for the stream.
        let gpu = unsafe { Gpu::with_stream(device, stream.as_raw()) }?;
        let optimizer = Any::new(name, gpu, weights.len())?;
        let param = |(index, slice): (usize, &DeviceSlice)| {
            ParamInfo::new(index.to_string(), slice.len, type_of(slice.dtype))
        };
        let params = weights.iter().enumerate().map(param).collect();
        let (members, bound) = (Vec::new(), false);
        let looks = Looks { optimizer, ctl, device, on: None, members, bound };
        let reducer = DeviceReducer::new(group, params, options, looks)?;
        let mut made = Self { reducer, weights, stream };
        // SAFETY: the caller vouches for the weights; nothing has been put into a stream.
        unsafe { made.bind() }?;
        Ok(made)
    }

    /// Keeps a loss scale on the device from now on.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn set_loss_scale(&mut self, scale: LossScale) -> Result<()> {
        Ok(self.reducer.kernels_mut().optimizer.set_loss_scale(Some(scale))?)
    }

    /// A pass: averages the gradients, of which the last is ready first.
    ///
    /// # Errors
    ///
    /// The reducer's.
    ///
    /// # Safety
    ///
    /// The gradients are in the device's memory until the stream has come this far.
    pub unsafe fn average(&mut self, grads: &[DeviceBuf]) -> Result<()> {
        self.reducer.zero_grad();
        self.reducer.prepare(true)?;
        for (index, grad) in grads.iter().enumerate().rev() {
            // SAFETY: the caller vouches for the gradient; the stream outlives the reducer.
            unsafe { self.reducer.ready(index, *grad, self.stream) }?;
        }
        // SAFETY: the stream outlives the reducer; only `step` uses the gradients, in the same stream.
        Ok(unsafe { self.reducer.finish(self.stream) }?)
    }

    /// Moves the weights by the averages; looks only at what was not looked at.
    ///
    /// # Errors
    ///
    /// The optimizer's.
    ///
    /// # Safety
    ///
    /// Nobody else uses the weights until the stream has come this far.
    pub unsafe fn step(&mut self) -> Result<()> {
        if !self.reducer.kernels().bound {
            // Its stream comes behind all looks, so the tables that they read may go.
            // SAFETY: the caller vouches for the weights.
            unsafe { self.bind() }?;
        }
        let Looks { optimizer, ctl, .. } = self.reducer.kernels_mut();
        // SAFETY: weights and buckets are where `bind` was told; `finish` has put this stream behind
        // the epilogues.
        Ok(unsafe { optimizer.step(ctl) }?)
    }

    /// What the device knows of its steps. Waits for it.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn status(&self) -> Result<Status> {
        Ok(self.reducer.kernels().optimizer.status()?)
    }

    /// The reducer.
    #[must_use]
    pub fn reducer(&self) -> &DeviceReducer<Looks> {
        &self.reducer
    }

    /// # Safety
    ///
    /// The weights must be where they say; what other streams do with the tables must be ordered before
    /// the stream of this.
    unsafe fn bind(&mut self) -> Result<()> {
        let slots: Vec<DeviceBuf> = (0..self.weights.len()).map(|i| self.reducer.slot(i)).collect();
        let params: Vec<DeviceParam> = (self.weights.iter().zip(slots))
            .map(|(weight, slot)| {
                let grad = DeviceSlice { ptr: slot.address(), ..*weight };
                DeviceParam::new(*weight, Some(grad))
            })
            .collect();
        let looks = self.reducer.kernels_mut();
        // SAFETY: the caller's promise; the slots are the reducer's, which tells when they move.
        unsafe { looks.optimizer.bind(&params) }?;
        looks.bound = true;
        Ok(())
    }
}

/// As `collective` calls a type.
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
