//! Tensors whose gradients are reported during a backward pass.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, Var, bail,
};
use parking_lot::Mutex;

use super::{Tape, in_pass, recording};

/// Creates tensors whose gradients [`Tape::backward_with`] reports while candle's own backward pass
/// runs.
///
/// candle has no hooks: its backward pass returns the gradients of [`Var`]s only at the end. A
/// tensor of this type is the result of an operator on a dummy variable. The backward pass of that
/// operator runs once the gradient is complete, reports it, and does not propagate it.
/// `loss.backward()` of such a tensor is an error.
#[derive(Clone, Debug)]
pub struct Sources {
    root: Var,
}

impl Sources {
    /// Creates sources for tensors on `device`.
    ///
    /// # Errors
    ///
    /// Memory on the device that cannot be allocated.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { root: Var::zeros(1, DType::F32, device)? })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.root.device()
    }

    /// A tensor with these values; `name` is used in messages.
    ///
    /// # Errors
    ///
    /// A failed copy.
    pub fn tensor(&self, name: &str, values: CpuStorage, shape: &Shape) -> Result<Tensor> {
        let (name, values) = (name.to_owned(), Mutex::new(Some(values)));
        self.root.apply_op1(Source { name, shape: shape.clone(), values })
    }

    /// Like [`record`](super::record), which would compute the same gradients with more work: it
    /// treats these tensors as results of candle's operators.
    pub fn record<R>(&self, call: impl FnOnce() -> R) -> (R, Tape) {
        let (root, roots) = (Some(self.root.id()), vec![self.root.clone()]);
        recording(Tape { root, roots, ..Tape::default() }, call)
    }
}

/// The operator whose result is a tensor of [`Sources`].
struct Source {
    name: String,
    shape: Shape,
    /// The values. The forward pass moves them out.
    values: Mutex<Option<CpuStorage>>,
}

impl Source {
    fn first_values(&self) -> Result<CpuStorage> {
        match self.values.lock().take() {
            Some(values) => Ok(values),
            None => bail!("`{}` is made once", self.name),
        }
    }
}

impl CustomOp1 for Source {
    fn name(&self) -> &'static str {
        "source"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((self.first_values()?, self.shape.clone()))
    }

    fn cuda_fwd(&self, root: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let values = root.device().storage_from_cpu_storage(&self.first_values()?)?;
        Ok((values, self.shape.clone()))
    }

    fn bwd(&self, _root: &Tensor, own: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        if gradient.shape() != own.shape() || gradient.dtype() != own.dtype() {
            let (name, got) = (&self.name, (gradient.shape(), gradient.dtype()));
            bail!("the gradient of `{name}` is {got:?}, the tensor {:?}", own.shape());
        }
        in_pass(|pass| {
            pass.add(own.id(), gradient)?;
            pass.settle(own.id())
        })?;
        Ok(None)
    }
}
