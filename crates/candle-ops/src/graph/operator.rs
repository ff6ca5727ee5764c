//! Operators over slices, and their conversion to candle operators.
//!
//! An [`Operator`] computes its result and its gradients from slices, for any [`Real`]. [`Op`]
//! wraps it as a candle operator: it selects the compute type by the first input's type (`f64` for
//! `f64`, else `f32`), widens half-precision inputs, which is exact, and rounds results once, to
//! nearest even. `f32` and `f64` tensors are borrowed and moved, never copied.

use std::borrow::Cow;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use half::bf16;

use super::custom_op::{self, Differentiable};
use crate::cpu::real::Real;

/// An operator with `N` floating-point tensors as inputs.
pub(crate) trait Operator<const N: usize>: Send + Sync + 'static {
    /// Name in candle's error messages.
    const NAME: &'static str;

    /// Whether all inputs have the same gradient. The backward pass then returns it for the first
    /// input.
    const ONE_GRADIENT: bool = false;

    /// The result.
    fn forward<T: Real>(&self, inputs: [Input<'_>; N]) -> Result<(Vec<T>, Shape)>;

    /// The gradients of the inputs, given the result `y` and its gradient `dy`.
    fn backward<T: Real>(
        &self,
        inputs: [Input<'_>; N],
        y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; N]>;

    /// The type of the result for a first input of `dtype`.
    fn output(&self, dtype: DType) -> DType {
        dtype
    }
}

/// A contiguous tensor in host memory.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
    /// Whether its gradient is needed.
    pub(crate) is_tracked: bool,
}

impl<'a> Input<'a> {
    /// Shape.
    pub(crate) fn shape(&self) -> &'a Shape {
        self.layout.shape()
    }

    /// The elements, widened if their type is narrower.
    pub(crate) fn values<T: Real>(&self) -> Result<Cow<'a, [T]>> {
        match self.layout.contiguous_offsets() {
            Some((start, end)) => T::read(self.storage, start..end),
            None => bail!("expected a contiguous tensor, got strides {:?}", self.layout.stride()),
        }
    }

    /// The elements as stored, if they are `bf16`.
    pub(crate) fn bf16(&self) -> Option<&'a [bf16]> {
        match (self.storage, self.layout.contiguous_offsets()) {
            (CpuStorage::BF16(values), Some((start, end))) => Some(&values[start..end]),
            _ => None,
        }
    }

    /// Creates an input from the guard that [`Tensor::storage_and_layout`] returns.
    pub(crate) fn new(storage: &'a Storage, layout: &'a Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self { storage, layout, is_tracked: true }),
            _ => bail!("expected a tensor on the CPU"),
        }
    }
}

/// An [`Operator`] wrapped as a candle operator.
struct Op<O>(O);

/// Applies an operator to one tensor.
pub(crate) fn apply1(op: impl Operator<1>, [x]: [Tensor; 1]) -> Result<Tensor> {
    custom_op::apply1(Op(op), [&x.contiguous()?])
}

/// Applies an operator to two tensors.
pub(crate) fn apply2(op: impl Operator<2>, [a, b]: [Tensor; 2]) -> Result<Tensor> {
    custom_op::apply2(Op(op), [&a.contiguous()?, &b.contiguous()?])
}

/// Applies an operator to three tensors.
pub(crate) fn apply3(op: impl Operator<3>, [a, b, c]: [Tensor; 3]) -> Result<Tensor> {
    custom_op::apply3(Op(op), [&a.contiguous()?, &b.contiguous()?, &c.contiguous()?])
}

/// The elements of a tensor in another floating-point type, rounded once to nearest even.
pub(crate) fn converted(storage: &CpuStorage, layout: &Layout, dtype: DType) -> Result<CpuStorage> {
    match layout.contiguous_offsets() {
        Some((start, end)) if ![storage.dtype(), dtype].contains(&DType::F64) => {
            f32::store(f32::read(storage, start..end)?, dtype)
        }
        _ => storage.to_dtype(layout, dtype),
    }
}

/// A tensor of `values` in `dtype`, outside of any graph.
pub(crate) fn tensor<T: Real>(
    values: Vec<T>,
    shape: impl Into<Shape>,
    dtype: DType,
) -> Result<Tensor> {
    let shape = shape.into();
    match T::store(values.into(), dtype)? {
        CpuStorage::F64(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::F32(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::F16(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::BF16(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        other => bail!("expected a floating-point type, got {:?}", other.dtype()),
    }
}

impl<O: Operator<N>, const N: usize> Differentiable<N> for Op<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn forward(&self, inputs: [(&CpuStorage, &Layout); N]) -> Result<(CpuStorage, Shape)> {
        let inputs = inputs.map(|(storage, layout)| Input { storage, layout, is_tracked: true });
        let dtype = inputs[0].storage.dtype();
        let output = self.0.output(dtype);
        if dtype == DType::F64 {
            let (y, shape) = self.0.forward::<f64>(inputs)?;
            return Ok((f64::store(y.into(), output)?, shape));
        }
        let (y, shape) = self.0.forward::<f32>(inputs)?;
        Ok((f32::store(y.into(), output)?, shape))
    }

    fn backward(
        &self,
        inputs: [&Tensor; N],
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<[Option<Tensor>; N]> {
        match inputs[0].dtype() {
            DType::F64 => backward_in::<f64, O, N>(&self.0, inputs, y, dy),
            _ => backward_in::<f32, O, N>(&self.0, inputs, y, dy),
        }
    }
}

fn backward_in<T: Real, O: Operator<N>, const N: usize>(
    op: &O,
    inputs: [&Tensor; N],
    y: &Tensor,
    dy: &Tensor,
) -> Result<[Option<Tensor>; N]> {
    let dy = dy.contiguous()?;
    let guards = inputs.map(Tensor::storage_and_layout);
    let (y_storage, y_layout) = y.storage_and_layout();
    let (dy_storage, dy_layout) = dy.storage_and_layout();
    let y = Input::new(&y_storage, y_layout)?;
    let mut views = [y; N];
    for ((view, (storage, layout)), input) in views.iter_mut().zip(&guards).zip(inputs) {
        *view = Input { is_tracked: input.track_op(), ..Input::new(storage, layout)? };
    }
    let gradients = op.backward::<T>(views, y, Input::new(&dy_storage, dy_layout)?)?;
    let mut tensors = [const { None }; N];
    for ((to, gradient), input) in tensors.iter_mut().zip(gradients).zip(inputs) {
        *to = gradient.map(|g| tensor(g, input.shape(), input.dtype())).transpose()?;
    }
    if O::ONE_GRADIENT {
        let (first, others) = tensors.split_at_mut(1);
        others.iter_mut().for_each(|other| other.clone_from(&first[0]));
    }
    Ok(tensors)
}
