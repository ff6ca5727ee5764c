//! `Model`: the tensors of a model, lent to a step, on the host or on a device.

use std::borrow::Cow;

use collective::ProcessGroup;
use collective::reducer::{ParamInfo, ReducerOptions};
use fused_optim::{Applied, DType, Slice, SliceMut};
use half::slice::HalfFloatSliceExt;

use crate::{
    Averaged, DeviceAverages, DeviceBuckets, DeviceTensor, Gradient, OptimizerStep, Result,
    TensorSpec,
};

/// Lends tensors as plain slices, which the callee may change in place.
pub type Visit<'a> = dyn FnMut(&mut [SliceMut<'_>]) -> Result<()> + 'a;

/// The tensors of a model, lent to a step; a tensor crate keeps their memory.
///
/// Invariant: parameter `i` is `params()[i]` everywhere: in gradients, in the slices lent, in the
/// optimizer's state, in checkpoints, and on every rank.
pub trait Model {
    /// Returns the trainable parameters in registration (forward) order.
    fn params(&self) -> &[TensorSpec];

    /// Returns tensors of the model without gradient (batch-norm statistics). In mixed precision a
    /// skipped step leaves them unchanged.
    fn buffers(&self) -> &[TensorSpec] {
        &[]
    }

    /// Returns the frozen parameters: they have no gradients and no optimizer state, and no step
    /// changes them. Empty if the model does not support freezing.
    fn frozen(&self) -> &[TensorSpec] {
        &[]
    }

    /// Lends every parameter as one mutable slice, in the order of [`params`](Self::params). A
    /// model on a device lends copies, and copies them back after the visit.
    ///
    /// # Errors
    ///
    /// Those of `visit`, and of copies from and to a device.
    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()>;

    /// Lends every buffer, in the order of [`buffers`](Self::buffers).
    ///
    /// # Errors
    ///
    /// As [`with_params`](Self::with_params).
    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        visit(&mut [])
    }

    /// Lends every frozen parameter, in the order of [`frozen`](Self::frozen).
    ///
    /// # Errors
    ///
    /// As [`with_params`](Self::with_params).
    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        visit(&mut [])
    }

    /// Returns the device of parameters and buffers; `None` for the host.
    fn on_device(&mut self) -> Option<&mut dyn DeviceModel> {
        None
    }
}

impl<M: Model + ?Sized> Model for &mut M {
    fn params(&self) -> &[TensorSpec] {
        (**self).params()
    }

    fn buffers(&self) -> &[TensorSpec] {
        (**self).buffers()
    }

    fn frozen(&self) -> &[TensorSpec] {
        (**self).frozen()
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        (**self).with_params(visit)
    }

    fn with_buffers(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        (**self).with_buffers(visit)
    }

    fn with_frozen(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        (**self).with_frozen(visit)
    }

    fn on_device(&mut self) -> Option<&mut dyn DeviceModel> {
        (**self).on_device()
    }
}

/// A model whose parameters and buffers are on a device.
pub trait DeviceModel {
    /// Runs an optimizer step on the parameters in device memory, with gradients in their order.
    /// Gradients on the host are copied to the device.
    ///
    /// # Errors
    ///
    /// Those of the optimizer; [`Error::Model`](crate::Error::Model) for a gradient of another
    /// model.
    fn optimizer_step(
        &mut self,
        step: &mut OptimizerStep<'_>,
        grads: &[Option<Gradient<'_>>],
    ) -> Result<Applied>;

    /// Creates buckets that average the gradients of `params`, by their index in the model, over
    /// the ranks of a group on this device; every rank calls it.
    ///
    /// # Errors
    ///
    /// Those of [`collective::reducer::DeviceReducer::new`].
    fn buckets(
        &self,
        group: ProcessGroup,
        params: Vec<(usize, ParamInfo)>,
        options: ReducerOptions,
    ) -> Result<Box<dyn DeviceBuckets>>;

    /// Creates a gradient of zeros for parameter `index`.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails.
    fn zero_gradient(&self, index: usize) -> Result<Box<dyn DeviceTensor>>;

    /// Creates moving averages of some of the model's tensors in device memory.
    ///
    /// # Errors
    ///
    /// [`Error::Model`](crate::Error::Model) if the device fails.
    fn averages(&self, of: Averaged) -> Result<Box<dyn DeviceAverages>>;
}

/// Converts a type to that of `collective`.
pub(crate) const fn type_of(dtype: DType) -> collective::DType {
    match dtype {
        DType::F32 => collective::DType::F32,
        DType::F16 => collective::DType::F16,
        DType::Bf16 => collective::DType::Bf16,
    }
}

/// Broadcasts the elements of rank 0.
///
/// # Errors
///
/// Those of [`ProcessGroup::broadcast`].
pub fn broadcast(group: &ProcessGroup, slice: &mut SliceMut<'_>) -> Result<()> {
    match slice {
        SliceMut::F32(s) => group.broadcast(s, 0)?,
        SliceMut::F16(s) => group.broadcast(s, 0)?,
        SliceMut::Bf16(s) => group.broadcast(s, 0)?,
    }
    Ok(())
}

/// Returns the elements as f32, exactly.
#[must_use]
pub fn to_f32(slice: Slice<'_>) -> Cow<'_, [f32]> {
    match slice {
        Slice::F32(values) => Cow::Borrowed(values),
        Slice::F16(values) => Cow::Owned(values.to_f32_vec()),
        Slice::Bf16(values) => Cow::Owned(values.to_f32_vec()),
    }
}

/// Copies values, rounded to nearest even if the slice has a narrower type.
///
/// # Panics
///
/// If the lengths differ.
pub fn round_into(slice: &mut SliceMut<'_>, values: &[f32]) {
    match slice {
        SliceMut::F32(v) => v.copy_from_slice(values),
        SliceMut::F16(v) => v.convert_from_f32_slice(values),
        SliceMut::Bf16(v) => v.convert_from_f32_slice(values),
    }
}

/// Returns whether any of these numbers is infinite or NaN.
#[must_use]
pub fn has_non_finite(slice: Slice<'_>) -> bool {
    match slice {
        Slice::F32(values) => amp::has_non_finite(values),
        Slice::F16(values) => amp::has_non_finite(values),
        Slice::Bf16(values) => amp::has_non_finite(values),
    }
}
