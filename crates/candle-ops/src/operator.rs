//! Between candle's operators and kernels over slices.
//!
//! An [`Operator`] says how its result and its gradients come of slices, for any [`Real`]. [`Op`] makes a
//! candle operator of it: it chooses the numbers by the first input's type (`f64` for `f64`, else `f32`),
//! widens half tensors, exactly, on the way in, and rounds once, to nearest even, on the way out. An `f32`
//! or `f64` tensor is borrowed and moved, never copied.

use std::borrow::Cow;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, Result, Shape, Storage,
    Tensor, bail,
};

use super::real::Real;

/// An operator of `N` floating-point tensors.
pub(super) trait Operator<const N: usize>: Send + Sync + 'static {
    /// Name in candle's messages.
    const NAME: &'static str;

    /// Whether all inputs have one and the same gradient, which backward then gives for the first.
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

    /// The result's type, the first input being of `dtype`.
    fn output(&self, dtype: DType) -> DType {
        dtype
    }
}

/// A contiguous tensor in host memory.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    storage: &'a CpuStorage,
    layout: &'a Layout,
    /// Whether anything needs its gradient.
    pub(super) is_tracked: bool,
}

impl<'a> Input<'a> {
    /// Shape.
    pub(super) fn shape(&self) -> &'a Shape {
        self.layout.shape()
    }

    /// Its elements, widened where they are narrower.
    pub(super) fn values<T: Real>(&self) -> Result<Cow<'a, [T]>> {
        match self.layout.contiguous_offsets() {
            Some((start, end)) => T::read(self.storage, start..end),
            None => bail!("expected a contiguous tensor, got strides {:?}", self.layout.stride()),
        }
    }

    /// From the guard that [`Tensor::storage_and_layout`] returns.
    pub(super) fn new(storage: &'a Storage, layout: &'a Layout) -> Result<Self> {
        match storage {
            Storage::Cpu(storage) => Ok(Self { storage, layout, is_tracked: true }),
            _ => bail!("the engine's operators run on the CPU"),
        }
    }
}

/// An [`Operator`] as one of candle's.
struct Op<O>(O);

/// Applies an operator to one tensor.
pub(super) fn apply1(op: impl Operator<1>, [x]: [Tensor; 1]) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Op(op))
}

/// Applies an operator to two tensors.
pub(super) fn apply2(op: impl Operator<2>, [a, b]: [Tensor; 2]) -> Result<Tensor> {
    a.contiguous()?.apply_op2(&b.contiguous()?, Op(op))
}

/// Applies an operator to three tensors.
pub(super) fn apply3(op: impl Operator<3>, [a, b, c]: [Tensor; 3]) -> Result<Tensor> {
    a.contiguous()?.apply_op3(&b.contiguous()?, &c.contiguous()?, Op(op))
}

/// A tensor of `values` in `dtype`, which belongs to no graph.
pub(super) fn tensor<T: Real>(
    values: Vec<T>,
    shape: impl Into<Shape>,
    dtype: DType,
) -> Result<Tensor> {
    let shape = shape.into();
    match T::store(values, dtype)? {
        CpuStorage::F64(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::F32(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::F16(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        CpuStorage::BF16(v) => Tensor::from_vec(v, shape, &Device::Cpu),
        other => bail!("expected a floating-point type, got {:?}", other.dtype()),
    }
}

type Argument<'a> = (&'a CpuStorage, &'a Layout);

fn forward<O: Operator<N>, const N: usize>(
    op: &O,
    arguments: [Argument<'_>; N],
) -> Result<(CpuStorage, Shape)> {
    let inputs = arguments.map(|(storage, layout)| Input { storage, layout, is_tracked: true });
    let output = op.output(inputs[0].storage.dtype());
    if inputs[0].storage.dtype() == DType::F64 {
        let (y, shape) = op.forward::<f64>(inputs)?;
        return Ok((f64::store(y, output)?, shape));
    }
    let (y, shape) = op.forward::<f32>(inputs)?;
    Ok((f32::store(y, output)?, shape))
}

fn backward<O: Operator<N>, const N: usize>(
    op: &O,
    inputs: [&Tensor; N],
    y: &Tensor,
    dy: &Tensor,
) -> Result<[Option<Tensor>; N]> {
    match inputs[0].dtype() {
        DType::F64 => backward_in::<f64, O, N>(op, inputs, y, dy),
        _ => backward_in::<f32, O, N>(op, inputs, y, dy),
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

impl<O: Operator<1>> CustomOp1 for Op<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        forward(&self.0, [(x, layout)])
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = backward(&self.0, [x], y, dy)?;
        Ok(dx)
    }
}

impl<O: Operator<2>> CustomOp2 for Op<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        forward(&self.0, [(a, a_layout), (b, b_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok(backward(&self.0, [a, b], y, dy)?.into())
    }
}

impl<O: Operator<3>> CustomOp3 for Op<O> {
    fn name(&self) -> &'static str {
        O::NAME
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
        forward(&self.0, [(a, a_layout), (b, b_layout), (c, c_layout)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(backward(&self.0, [a, b, c], y, dy)?.into())
    }
}
