//! What convolution and the fully connected layer share: an input, a weight, perhaps a bias, and
//! kernels over `f32` slices for both directions.
//!
//! candle has one trait for operators of two tensors and another for three; [`Weighted`] is both,
//! around one [`Kernel`].

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};

use super::{cast, host};

/// The shapes of one call, checked against each other, and its arithmetic.
pub(super) trait Kernel: Sized {
    /// What is chosen besides the shapes.
    type Options: Copy + Send + Sync + 'static;
    /// Name in messages, and PyTorch's in the lists of autocast.
    const NAME: &'static str;

    /// Checks the shapes of input and weight.
    fn new(x: &Shape, weight: &Shape, options: Self::Options) -> Result<Self>;

    /// Length of a bias.
    fn outputs(&self) -> usize;

    /// Shape of the result for an input of shape `x`.
    fn output_shape(&self, x: &Shape) -> Shape;

    /// The result.
    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32>;

    /// The gradients, given that of the result; that of the input only if it is wanted.
    fn backward(&self, x: &[f32], weight: &[f32], dy: &[f32], wants_x: bool) -> Gradients;
}

/// The gradients of one call.
pub(super) struct Gradients {
    pub(super) x: Option<Vec<f32>>,
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
}

/// Applies `K`. All arguments are of one dtype; computed and accumulated in `f32`, rounded once.
pub(super) fn apply<K: Kernel + 'static>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: K::Options,
) -> Result<Tensor> {
    match bias {
        Some(bias) => {
            let [x, weight, bias] = cast(K::NAME, [x, weight, bias])?;
            let op = Weighted::<K>(options);
            x.contiguous()?.apply_op3(&weight.contiguous()?, &bias.contiguous()?, op)
        }
        None => {
            let [x, weight] = cast(K::NAME, [x, weight])?;
            x.contiguous()?.apply_op2(&weight.contiguous()?, Weighted::<K>(options))
        }
    }
}

struct Weighted<K: Kernel>(K::Options);

/// A tensor as candle hands it to a forward pass.
type Argument<'a> = (&'a CpuStorage, &'a Layout);

impl<K: Kernel> Weighted<K> {
    fn forward(
        &self,
        (x, x_layout): Argument<'_>,
        (weight, weight_layout): Argument<'_>,
        bias: Option<Argument<'_>>,
    ) -> Result<(CpuStorage, Shape)> {
        let kernel = K::new(x_layout.shape(), weight_layout.shape(), self.0)?;
        let bias = match bias {
            Some((_, layout)) if layout.shape().dims() != [kernel.outputs()] => {
                let (shape, outputs) = (layout.shape(), kernel.outputs());
                bail!("{}: a bias of shape {shape:?} for {outputs} outputs", K::NAME);
            }
            Some((bias, layout)) => Some(host::floats(bias, layout)?),
            None => None,
        };
        let (input, weights) = (host::floats(x, x_layout)?, host::floats(weight, weight_layout)?);
        let y = kernel.forward(&input, &weights, bias.as_deref());
        Ok((host::rounded(y, host::float_dtype(x)?)?, kernel.output_shape(x_layout.shape())))
    }

    /// Gradients of the input, if anything needs it, of the weight, and of a bias.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Tensor, Vec<f32>)> {
        let kernel = K::new(x.shape(), weight.shape(), self.0)?;
        let dy = dy.contiguous()?;
        let (x_storage, x_layout) = x.storage_and_layout();
        let (w_storage, w_layout) = weight.storage_and_layout();
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let gradients = kernel.backward(
            &host::floats_of(&x_storage, x_layout)?,
            &host::floats_of(&w_storage, w_layout)?,
            &host::floats_of(&dy_storage, dy_layout)?,
            x.track_op(),
        );
        let dx = gradients.x.map(|dx| host::tensor(dx, x.shape(), x.dtype())).transpose()?;
        let dw = host::tensor(gradients.weight, weight.shape(), weight.dtype())?;
        Ok((dx, dw, gradients.bias))
    }
}

impl<K: Kernel> CustomOp2 for Weighted<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((x, x_layout), (weight, weight_layout), None)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dw, _) = self.gradients(x, weight, dy)?;
        Ok((dx, Some(dw)))
    }
}

impl<K: Kernel> CustomOp3 for Weighted<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward((x, x_layout), (weight, weight_layout), Some((bias, bias_layout)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dw, db) = self.gradients(x, weight, dy)?;
        Ok((dx, Some(dw), Some(host::tensor(db, bias.shape(), bias.dtype())?)))
    }
}
