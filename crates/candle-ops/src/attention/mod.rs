//! Multi-head scaled dot-product attention, with one operator each for the forward and the backward
//! pass.
//!
//! [`scaled_dot_product_attention`] and [`scaled_dot_product_attention_thd`] take queries, keys and
//! values as three tensors.
//! [`self_attention`] takes them concatenated in the last dimension, the output of one fully
//! connected layer, so that no tensor is transposed. Both are a [`Problem`], which `blocks.rs`
//! computes on the CPU.

mod blocks;
mod dispatch;
pub(crate) mod rope;

use candle_core::{DType, Result, Shape, Tensor, bail};

use self::blocks::{Heads, Operand};
use crate::cast;
use crate::cpu::real::Real;
use crate::elementwise::dropout::Factors;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1, apply3};
use crate::sizes::{AttentionSizes, PackedSizes};

/// Options of [`self_attention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionOptions {
    /// Number of heads; must divide the width.
    pub heads: usize,
    /// Whether a position attends only to itself and earlier positions.
    pub causal: bool,
}

/// Options of [`scaled_dot_product_attention`]. The default has no mask and no dropout. Follows:
/// PyTorch's arguments.
#[derive(Clone, Copy, Debug, Default)]
pub struct SdpaOptions<'a> {
    /// A mask whose shape broadcasts to `[b, heads, queries, keys]`. A `u8` mask is nonzero where a
    /// query attends to a key. A floating-point mask is added to the scaled scores; its gradient is
    /// computed if it is a parameter.
    pub mask: Option<&'a Tensor>,
    /// Whether query `i` attends only to keys `0..=i`. A mask may hide more keys. A NaN in a key or
    /// a value may reach earlier queries, too.
    pub causal: bool,
    /// Factor of the scores. Defaults to `1 / sqrt(d)`.
    pub scale: Option<f64>,
    /// Probability with which [`dropout`](crate::dropout) drops attention weights in training.
    pub dropout: f32,
}

/// `softmax(scale * q * k^T + mask) * v` for each head.
///
/// Shapes: `q` is `[b, heads, queries, d]`, `k` is `[b, kv_heads, keys, d]`, `v` is
/// `[b, kv_heads, keys, w]`, all of the same type; the result is `[b, heads, queries, w]`.
/// `kv_heads` divides `heads`: successive query heads share a key head (grouped-query attention;
/// multi-query attention if `kv_heads` is 1). A query with all keys masked has a result of 0.
///
/// A mask hides keys by a weight of 0, and 0 times a NaN or an infinity is NaN, as in PyTorch: such
/// a value in a masked key or value makes results NaN. Fill padding with finite numbers.
///
/// On the CPU the attention weights exist for a block of queries at a time, and causal attention
/// skips most masked keys; a mask that needs a gradient is computed by a composition of candle's
/// operators. On a GPU, with kernels, they are never in memory in half types with heads of up to
/// 64, a multiple of 8: a `u8` mask and dropout are a bit for each weight there, packed samples one
/// mask. With other sizes or types and without mask and dropout they are in memory for some samples
/// at a time; otherwise, and with a floating-point mask, it is a composition. Single-threaded.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ops::{SdpaOptions, scaled_dot_product_attention};
///
/// let (q, k) = (Tensor::ones((2, 8, 5, 4), candle_core::DType::F32, &Device::Cpu)?, (2, 2, 7, 4));
/// let k = Tensor::ones(k, candle_core::DType::F32, &Device::Cpu)?;
/// // The last two keys of the second sample are padding.
/// let mask = Tensor::new(&[[1_u8; 7], [1, 1, 1, 1, 1, 0, 0]], &Device::Cpu)?;
/// let mask = mask.reshape((2, 1, 1, 7))?;
/// let options = SdpaOptions { mask: Some(&mask), ..Default::default() };
/// assert_eq!(scaled_dot_product_attention(&q, &k, &k, options)?.dims(), [2, 8, 5, 4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Mismatched shapes or dtypes; a `dropout` not in `[0, 1)`.
pub fn scaled_dot_product_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: SdpaOptions<'_>,
) -> Result<Tensor> {
    separate([q, k, v], options, Order::HeadsFirst)
}

/// [`scaled_dot_product_attention`] for `q` of shape `[b, queries, heads, d]`, `k` of
/// `[b, keys, kv_heads, d]` and `v` of `[b, keys, kv_heads, w]`, the outputs of fully connected
/// layers: on the CPU no tensor is transposed. The result is `[b, queries, heads, w]`; a mask
/// broadcasts to `[b, heads, queries, keys]`.
///
/// # Errors
///
/// Those of [`scaled_dot_product_attention`].
pub fn scaled_dot_product_attention_thd(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: SdpaOptions<'_>,
) -> Result<Tensor> {
    separate([q, k, v], options, Order::PositionsFirst)
}

/// Order of the two dimensions in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    HeadsFirst,
    PositionsFirst,
}

fn separate(inputs: [&Tensor; 3], options: SdpaOptions<'_>, order: Order) -> Result<Tensor> {
    let inputs = cast("scaled_dot_product_attention", inputs)?;
    let [q, k, v] = inputs.each_ref().map(|t| match order {
        Order::HeadsFirst => Ok(t.clone()),
        Order::PositionsFirst => t.transpose(1, 2),
    });
    let heads = [q?, k?, v?];
    let mut problem = Problem::new(heads.each_ref(), options)?;
    let count = problem.sizes.scores_shape().elem_count();
    problem.dropout = Factors::draw(options.dropout, count)?;
    let is_tracked = problem.mask.as_ref().is_some_and(Tensor::track_op);
    if !device::dispatches(&inputs[0]) && !is_tracked {
        problem.mask = problem.added_mask(heads[0].dtype())?;
        return apply3(Separate(problem, order), inputs);
    }
    if order == Order::HeadsFirst {
        return dispatch::attention(heads.each_ref(), &problem);
    }
    let [q, k, v] = heads.each_ref().map(Tensor::contiguous);
    dispatch::attention([&q?, &k?, &v?], &problem)?.transpose(1, 2)
}

/// `softmax(q * k^T / sqrt(d)) * v` for each head.
///
/// Shapes: `qkv` is `[n, t, 3 * c]`: first `c` values of queries, then of keys, then of values,
/// each `heads` times `d`; the result is `[n, t, c]`. NaN and infinities reach every position that
/// attends to them. Single-threaded.
///
/// # Errors
///
/// An unsupported shape or dtype.
pub fn self_attention(qkv: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    let [qkv] = cast("scaled_dot_product_attention", [qkv])?;
    let sizes = PackedSizes::new(qkv.shape(), options)?;
    if device::dispatches(&qkv) {
        return dispatch::self_attention(&qkv, sizes);
    }
    apply1(Packed(sizes), [qkv])
}

/// One call of attention, checked for consistency.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) sizes: AttentionSizes,
    /// The tensor added to the scores: contiguous, of four dimensions, in the compute type.
    pub(crate) mask: Option<Tensor>,
    /// A mask of `u8` that is not `mask` yet, of four dimensions.
    pub(crate) seen: Option<Tensor>,
    pub(crate) dropout: Option<Factors>,
}

impl Problem {
    pub(crate) fn new([q, k, v]: [&Tensor; 3], options: SdpaOptions<'_>) -> Result<Self> {
        let (samples, heads, queries, depth) = q.dims4()?;
        let (_, kv_heads, keys, _) = k.dims4()?;
        let (_, _, _, value_depth) = v.dims4()?;
        let fits = *k.dims() == [samples, kv_heads, keys, depth]
            && *v.dims() == [samples, kv_heads, keys, value_depth]
            && heads.checked_rem(kv_heads) == Some(0);
        if !fits || heads * keys * depth * value_depth == 0 {
            let (q, k, v) = (q.shape(), k.shape(), v.shape());
            bail!("attention: queries {q:?} do not fit keys {k:?} and values {v:?}");
        }
        if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            let (q, k, v) = (q.dtype(), k.dtype(), v.dtype());
            bail!("attention: queries of {q:?}, keys of {k:?} and values of {v:?} need one type");
        }
        let mut problem = Self::from(AttentionSizes {
            samples,
            heads,
            kv_heads,
            queries,
            keys,
            depth,
            value_depth,
            causal: options.causal,
            scale: options.scale.unwrap_or_else(|| AttentionSizes::default_scale(depth)),
        });
        if let Some(mask) = options.mask {
            let mask = problem.checked(mask)?;
            match mask.dtype() {
                DType::U8 => problem.seen = Some(mask),
                _ => problem.mask = Some(mask.to_dtype(wide_of(q.dtype()))?.contiguous()?),
            }
        }
        Ok(problem)
    }

    /// A mask that fits, as one of four dimensions.
    fn checked(&self, mask: &Tensor) -> Result<Tensor> {
        let scores = self.sizes.scores_shape();
        let fits = mask.shape().broadcast_shape_binary_op(&scores, "attention");
        if fits.ok().as_ref() != Some(&scores) {
            bail!("attention: a mask of shape {:?} does not fit scores {scores:?}", mask.shape());
        }
        if mask.dtype() != DType::U8 && !mask.dtype().is_float() {
            let other = mask.dtype();
            bail!("attention: a mask must be of u8 or a floating-point type, not {other:?}")
        }
        let mut dims = vec![1; 4 - mask.rank()];
        dims.extend(mask.dims());
        mask.reshape(dims)
    }

    /// The mask as numbers to add to scores of queries of this type.
    pub(crate) fn added_mask(&self, dtype: DType) -> Result<Option<Tensor>> {
        let Some(seen) = &self.seen else { return Ok(self.mask.clone()) };
        let zeros = seen.zeros_like()?.to_dtype(wide_of(dtype))?;
        seen.contiguous()?.where_cond(&zeros, &(&zeros + f64::NEG_INFINITY)?).map(Some)
    }

    /// Runs `call` with the values of the mask, if there is one.
    fn with_mask<T: Real, R>(&self, call: impl FnOnce(Option<&[T]>) -> R) -> Result<R> {
        let Some(mask) = &self.mask else { return Ok(call(None)) };
        let (storage, layout) = mask.storage_and_layout();
        Ok(call(Some(&Input::new(&storage, layout)?.values()?)))
    }
}

/// The type of masks for scores of this one.
const fn wide_of(dtype: DType) -> DType {
    if matches!(dtype, DType::F64) { dtype } else { DType::F32 }
}

impl From<AttentionSizes> for Problem {
    /// A call without a mask and dropout.
    fn from(sizes: AttentionSizes) -> Self {
        Self { sizes, mask: None, seen: None, dropout: None }
    }
}

/// Attention of three tensors: queries, keys and values.
struct Separate(Problem, Order);

impl Separate {
    /// Memory layouts of queries, keys, values and results.
    fn heads(&self) -> [Heads; 4] {
        let AttentionSizes { heads, kv_heads, queries, keys, depth, value_depth, .. } =
            self.0.sizes;
        let layout = |heads, rows, depth| match self.1 {
            Order::HeadsFirst => Heads::separate(heads, rows, depth),
            Order::PositionsFirst => Heads::packed(rows, heads * depth, depth, 1, 0),
        };
        [
            layout(heads, queries, depth),
            layout(kv_heads, keys, depth),
            layout(kv_heads, keys, value_depth),
            layout(heads, queries, value_depth),
        ]
    }
}

impl Operator<3> for Separate {
    const NAME: &'static str = "scaled_dot_product_attention";

    fn forward<T: Real>(&self, [q, k, v]: [Input<'_>; 3]) -> Result<(Vec<T>, Shape)> {
        let AttentionSizes { samples, heads, queries, value_depth, .. } = self.0.sizes;
        let (q, k, v) = (q.values::<T>()?, k.values::<T>()?, v.values::<T>()?);
        let [of_q, of_k, of_v, of_y] = self.heads();
        let inputs = [Operand(&q, of_q), Operand(&k, of_k), Operand(&v, of_v)];
        let mut y = vec![T::ZERO; samples * heads * queries * value_depth];
        self.0.with_mask(|mask| self.0.forward(inputs, mask, of_y, &mut y))?;
        let [first, second] = match self.1 {
            Order::HeadsFirst => [heads, queries],
            Order::PositionsFirst => [queries, heads],
        };
        Ok((y, (samples, first, second, value_depth).into()))
    }

    fn backward<T: Real>(
        &self,
        [q, k, v]: [Input<'_>; 3],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 3]> {
        let (q, k, v) = (q.values::<T>()?, k.values::<T>()?, v.values::<T>()?);
        let [of_q, of_k, of_v, of_y] = self.heads();
        let inputs = [Operand(&q, of_q), Operand(&k, of_k), Operand(&v, of_v)];
        let dy = dy.values::<T>()?;
        let mut gradients = [q.len(), k.len(), v.len()].map(|len| vec![T::ZERO; len]);
        self.0.with_mask(|mask| {
            self.0.backward(inputs, mask, Operand(&dy, of_y), |part, rows| {
                rows.copy_to(inputs[part].1, &mut gradients[part]);
            });
        })?;
        Ok(gradients.map(Some))
    }
}

impl PackedSizes {
    pub(crate) fn new(
        qkv: &Shape,
        AttentionOptions { heads, causal }: AttentionOptions,
    ) -> Result<Self> {
        let (samples, positions, packed) = qkv.dims3()?;
        let width = packed / 3;
        let fits = packed % 3 == 0 && heads > 0 && width.is_multiple_of(heads);
        if !fits || width * positions == 0 {
            bail!("attention: an input of shape {qkv:?} is not 3 times {heads} heads");
        }
        Ok(Self { samples, positions, heads, depth: width / heads, causal })
    }
}

/// Attention of queries, keys and values in one tensor.
struct Packed(PackedSizes);

impl Packed {
    /// Queries, keys and values in `qkv`.
    fn operands<'a, T>(&self, qkv: &'a [T]) -> [Operand<'a, T>; 3] {
        [0, 1, 2].map(|part| Operand(qkv, self.heads(3, part)))
    }

    /// Memory layout of the heads in one of `parts` parts.
    fn heads(&self, parts: usize, part: usize) -> Heads {
        Heads::packed(self.0.positions, self.0.width(), self.0.depth, parts, part)
    }
}

impl Operator<1> for Packed {
    const NAME: &'static str = "self_attention";

    fn forward<T: Real>(&self, [qkv]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let qkv = qkv.values::<T>()?;
        let mut y = vec![T::ZERO; qkv.len() / 3];
        Problem::from(self.0.separate()).forward(
            self.operands(&qkv),
            None,
            self.heads(1, 0),
            &mut y,
        );
        Ok((y, self.0.output_shape()))
    }

    fn backward<T: Real>(
        &self,
        [qkv]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (qkv, dy) = (qkv.values::<T>()?, dy.values::<T>()?);
        let mut dx = vec![T::ZERO; qkv.len()];
        let (inputs, dy) = (self.operands(&qkv), Operand(&dy, self.heads(1, 0)));
        Problem::from(self.0.separate()).backward(inputs, None, dy, |part, rows| {
            rows.copy_to(inputs[part].1, &mut dx);
        });
        Ok([Some(dx)])
    }
}

#[cfg(test)]
mod tests;
