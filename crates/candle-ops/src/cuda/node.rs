//! A result that is there already, as a node of candle's graph.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail,
};
use parking_lot::Mutex;

use super::Output;

/// The gradients of `N` inputs, given those, the result, and the result's gradient, which is contiguous.
pub(super) trait Backward<const N: usize>:
    Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static
{
}

impl<const N: usize, F> Backward<N> for F where
    F: Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static
{
}

/// candle asks it for the result once, and for gradients when backward comes.
struct Node<B> {
    name: &'static str,
    y: Mutex<Option<(CudaStorage, Shape)>>,
    backward: B,
}

/// The result of one input.
pub(super) fn node1(
    name: &'static str,
    [x]: [&Tensor; 1],
    y: Output,
    backward: impl Backward<1>,
) -> Result<Tensor> {
    x.apply_op1(Node::new(name, y, backward))
}

/// The result of two inputs.
pub(super) fn node2(
    name: &'static str,
    [a, b]: [&Tensor; 2],
    y: Output,
    backward: impl Backward<2>,
) -> Result<Tensor> {
    a.apply_op2(b, Node::new(name, y, backward))
}

/// The result of three inputs.
pub(super) fn node3(
    name: &'static str,
    [a, b, c]: [&Tensor; 3],
    y: Output,
    backward: impl Backward<3>,
) -> Result<Tensor> {
    a.apply_op3(b, c, Node::new(name, y, backward))
}

impl<B> Node<B> {
    fn new(name: &'static str, y: Output, backward: B) -> Self {
        Self { name, y: Mutex::new(Some((y.storage, y.shape))), backward }
    }

    fn result(&self) -> Result<(CudaStorage, Shape)> {
        match self.y.lock().take() {
            Some(result) => Ok(result),
            None => bail!("{}: its result has been given", self.name),
        }
    }

    fn gradients<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]>
    where
        B: Backward<N>,
    {
        if (dy.dtype(), dy.shape()) != (y.dtype(), y.shape()) {
            bail!("{}: a gradient {dy:?} of a result {y:?}", self.name);
        }
        (self.backward)(inputs, y, &dy.contiguous()?)
    }
}

const ON_THE_HOST: &str = "a kernel of a GPU over tensors of the host";

impl<B: Backward<1>> CustomOp1 for Node<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{ON_THE_HOST}")
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.result()
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = self.gradients([x], y, dy)?;
        Ok(dx)
    }
}

impl<B: Backward<2>> CustomOp2 for Node<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{ON_THE_HOST}")
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.result()
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

impl<B: Backward<3>> CustomOp3 for Node<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{ON_THE_HOST}")
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.result()
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
