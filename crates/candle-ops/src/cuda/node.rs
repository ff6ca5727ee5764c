//! Adds the result of a kernel to candle's graph, with its backward pass.

use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};
use parking_lot::Mutex;

use super::Output;
use super::channels_last::Order;
use crate::graph::custom_op::Differentiable;

/// Computes the gradients of `N` inputs from these, the result, and the result's gradient, which is
/// contiguous for [`node`], and in any layout for [`node_of`].
pub(super) trait Backward<const N: usize>:
    Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static
{
}

impl<const N: usize, F> Backward<N> for F where
    F: Fn([&Tensor; N], &Tensor, &Tensor) -> Result<[Option<Tensor>; N]> + Send + Sync + 'static
{
}

/// candle asks it for the result once, and for gradients in the backward pass.
pub(super) struct Node<B> {
    name: &'static str,
    /// Layout of images; `None` for other results.
    order: Option<Order>,
    /// A type of gradients besides that of the result.
    half: Option<DType>,
    y: Mutex<Option<(CudaStorage, Shape)>>,
    backward: B,
}

/// A node with this result.
pub(super) fn node<const N: usize, B: Backward<N>>(
    name: &'static str,
    y: Output,
    backward: B,
) -> Node<B> {
    node_taking(name, y, None, backward)
}

/// A node whose gradient may have another type than its result; see `tape::casts::prepare`.
pub(super) fn node_taking<const N: usize, B: Backward<N>>(
    name: &'static str,
    y: Output,
    half: Option<DType>,
    backward: B,
) -> Node<B> {
    Node { name, order: None, half, y: Mutex::new(Some((y.storage, y.shape))), backward }
}

/// A node with images in this layout.
pub(super) fn node_of<const N: usize, B: Backward<N>>(
    name: &'static str,
    y: Output,
    order: Order,
    backward: B,
) -> Node<B> {
    let half = None;
    Node { name, order: Some(order), half, y: Mutex::new(Some((y.storage, y.shape))), backward }
}

impl<const N: usize, B: Backward<N>> Differentiable<N> for Node<B> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn is_channels_last(&self) -> bool {
        self.order == Some(Order::Last)
    }

    fn cuda_forward(&self, _: [(&CudaStorage, &Layout); N]) -> Result<(CudaStorage, Shape)> {
        match self.y.lock().take() {
            Some(result) => Ok(result),
            None => bail!("{}: its result was taken before", self.name),
        }
    }

    fn backward(
        &self,
        inputs: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        let fits = dy.dtype() == y.dtype() || Some(dy.dtype()) == self.half;
        if !fits || dy.shape() != y.shape() {
            bail!("{}: a gradient {dy:?} of a result {y:?}", self.name);
        }
        match self.order {
            Some(_) => (self.backward)(inputs, y, dy),
            None => (self.backward)(inputs, y, &dy.contiguous()?),
        }
    }
}
