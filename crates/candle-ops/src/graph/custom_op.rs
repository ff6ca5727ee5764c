//! Implements candle's traits for operators of one, two and three inputs for [`Differentiable`].

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail,
};

use super::tape;

/// An operator with a backward pass.
pub(crate) trait Differentiable<const N: usize>: Send + Sync + 'static {
    /// Name in candle's error messages.
    fn name(&self) -> &'static str;

    /// The result on the CPU.
    fn forward(&self, _inputs: [(&CpuStorage, &Layout); N]) -> Result<(CpuStorage, Shape)> {
        bail!("{}: the inputs are not on a GPU", self.name())
    }

    /// The result on a GPU.
    fn cuda_forward(&self, _inputs: [(&CudaStorage, &Layout); N]) -> Result<(CudaStorage, Shape)> {
        bail!("{}: the inputs are not on the CPU", self.name())
    }

    /// Whether the result is channels-last in memory: the forward pass returns it as
    /// `[n, h, w, c]`, and it is viewed as `[n, c, h, w]`.
    fn is_channels_last(&self) -> bool {
        false
    }

    /// The gradients of the inputs, given the result `y` and its gradient `dy`.
    fn backward(
        &self,
        inputs: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]>;
}

/// Views `[n, h, w, c]` as `[n, c, h, w]`, with the same memory.
pub(crate) fn channels_second(images: &Tensor) -> Result<Tensor> {
    images.permute((0, 3, 1, 2))
}

/// Views a channels-last `[n, c, h, w]`, which is not contiguous, as `[n, h, w, c]`, with the same
/// memory.
pub(crate) fn channels_last(images: &Tensor) -> Option<Tensor> {
    if images.rank() != 4 || images.is_contiguous() {
        return None;
    }
    images.permute((0, 2, 3, 1)).ok().filter(Tensor::is_contiguous)
}

/// An operator wrapped as a candle operator.
struct CustomOp<D>(D);

impl<D> CustomOp<D> {
    /// The result of `apply`, in its final view.
    fn apply<const N: usize>(self, apply: impl FnOnce(Self) -> Result<Tensor>) -> Result<Tensor>
    where
        D: Differentiable<N>,
    {
        let is_channels_last = self.0.is_channels_last();
        let y = apply(self)?;
        if is_channels_last { channels_second(&y) } else { Ok(y) }
    }

    /// The backward pass, for a result and gradient of candle.
    fn gradients<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]>
    where
        D: Differentiable<N>,
    {
        match self.0.is_channels_last() {
            true => self.0.backward(inputs, &channels_second(y)?, &channels_second(dy)?),
            false => self.0.backward(inputs, y, dy),
        }
    }
}

/// Applies an operator to one tensor.
pub(crate) fn apply1(op: impl Differentiable<1>, [x]: [&Tensor; 1]) -> Result<Tensor> {
    tape::apply(op, [x], |op| CustomOp(op).apply(|op| x.apply_op1(op)))
}

/// Applies an operator to two tensors.
pub(crate) fn apply2(op: impl Differentiable<2>, [a, b]: [&Tensor; 2]) -> Result<Tensor> {
    tape::apply(op, [a, b], |op| CustomOp(op).apply(|op| a.apply_op2(b, op)))
}

/// Applies an operator to three tensors.
pub(crate) fn apply3(op: impl Differentiable<3>, [a, b, c]: [&Tensor; 3]) -> Result<Tensor> {
    tape::apply(op, [a, b, c], |op| CustomOp(op).apply(|op| a.apply_op3(b, c, op)))
}

impl<D: Differentiable<1>> CustomOp1 for CustomOp<D> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.forward([(x, x_layout)])
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.0.cuda_forward([(x, x_layout)])
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = self.gradients([x], y, dy)?;
        Ok(dx)
    }
}

impl<D: Differentiable<2>> CustomOp2 for CustomOp<D> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward([(a, a_layout), (b, b_layout)])
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.0.cuda_forward([(a, a_layout), (b, b_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok(self.gradients([a, b], y, dy)?.into())
    }
}

impl<D: Differentiable<3>> CustomOp3 for CustomOp<D> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        c: &CpuStorage,
        c_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward([(a, a_layout), (b, b_layout), (c, c_layout)])
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        a_layout: &Layout,
        b: &CudaStorage,
        b_layout: &Layout,
        c: &CudaStorage,
        c_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.0.cuda_forward([(a, a_layout), (b, b_layout), (c, c_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.gradients([a, b, c], y, dy)?.into())
    }
}
