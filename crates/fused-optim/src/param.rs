//! Weights and gradients of a step, as slices of f32, f16 or bf16; groups, names and shapes.
//!
//! A tensor is a slice, and for some rules its number of rows. It is identified by its index in the
//! list passed to [`Optimizer::step`](crate::Optimizer::step): the same tensor must have the same
//! index at every step, with or without a gradient. In saved state it can have a
//! [name](crate::ParamSpec).

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The element type of a weight or a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16: 5 exponent bits, largest finite value 65504.
    F16,
    /// The upper half of an `f32`: 8 exponent bits, 8 significant bits.
    Bf16,
}

impl DType {
    /// Bytes per element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// A shared slice of one of the three element types.
#[derive(Clone, Copy, Debug)]
pub enum Slice<'a> {
    /// Of `f32`.
    F32(&'a [f32]),
    /// Of `f16`.
    F16(&'a [f16]),
    /// Of `bf16`.
    Bf16(&'a [bf16]),
}

impl Slice<'_> {
    /// Number of elements.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        match self {
            Self::F32(s) => s.len(),
            Self::F16(s) => s.len(),
            Self::Bf16(s) => s.len(),
        }
    }

    /// Whether there are no elements, which is legal everywhere.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    #[must_use]
    #[inline]
    pub const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// The elements of a range.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(s) => Self::F32(&s[range]),
            Self::F16(s) => Self::F16(&s[range]),
            Self::Bf16(s) => Self::Bf16(&s[range]),
        }
    }
}

/// A mutable slice of one of the three element types.
#[derive(Debug)]
pub enum SliceMut<'a> {
    /// Of `f32`.
    F32(&'a mut [f32]),
    /// Of `f16`.
    F16(&'a mut [f16]),
    /// Of `bf16`.
    Bf16(&'a mut [bf16]),
}

impl SliceMut<'_> {
    /// Number of elements.
    #[must_use]
    #[inline]
    pub const fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are no elements, which is legal everywhere.
    #[must_use]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    #[must_use]
    #[inline]
    pub const fn dtype(&self) -> DType {
        self.as_slice().dtype()
    }

    /// A shared slice of the same elements.
    #[must_use]
    #[inline]
    pub const fn as_slice(&self) -> Slice<'_> {
        match self {
            Self::F32(s) => Slice::F32(s),
            Self::F16(s) => Slice::F16(s),
            Self::Bf16(s) => Slice::Bf16(s),
        }
    }

    /// Reborrows the elements, as `&mut *slice` does for a plain slice.
    #[must_use]
    pub const fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            Self::F32(s) => SliceMut::F32(s),
            Self::F16(s) => SliceMut::F16(s),
            Self::Bf16(s) => SliceMut::Bf16(s),
        }
    }

    /// Reborrows the elements of a range.
    pub(crate) fn part(&mut self, range: Range<usize>) -> SliceMut<'_> {
        match self {
            Self::F32(s) => SliceMut::F32(&mut s[range]),
            Self::F16(s) => SliceMut::F16(&mut s[range]),
            Self::Bf16(s) => SliceMut::Bf16(&mut s[range]),
        }
    }

    /// Splits off the first `count` elements.
    pub(crate) fn split_off(&mut self, count: usize) -> Self {
        match self {
            Self::F32(s) => Self::F32(split_off(s, count)),
            Self::F16(s) => Self::F16(split_off(s, count)),
            Self::Bf16(s) => Self::Bf16(split_off(s, count)),
        }
    }

    /// Sets every element to zero.
    pub(crate) fn clear(&mut self) {
        match self {
            Self::F32(s) => s.fill(0.0),
            Self::F16(s) => s.fill(f16::ZERO),
            Self::Bf16(s) => s.fill(bf16::ZERO),
        }
    }
}

/// Splits off the first `count` elements, or all if there are fewer.
#[inline]
pub(crate) fn split_off<'a, T>(slice: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    slice.split_off_mut(..count.min(slice.len())).unwrap_or_default()
}

macro_rules! from_slices {
    ($($element:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a [$element]> for Slice<'a> {
            fn from(slice: &'a [$element]) -> Self {
                Self::$variant(slice)
            }
        }

        impl<'a> From<&'a mut [$element]> for SliceMut<'a> {
            fn from(slice: &'a mut [$element]) -> Self {
                Self::$variant(slice)
            }
        }
    )*};
}

from_slices!(f32 => F32, f16 => F16, bf16 => Bf16);

/// One tensor of a step: its weight, and its gradient if it has one in this step.
///
/// Weight and gradient may have different types. A tensor without a gradient is not updated, nor
/// are its state, its moving average and its step count.
#[derive(Debug)]
pub struct ParamMut<'a> {
    /// The weight, updated in place.
    pub weight: SliceMut<'a>,
    /// The gradient, as long as the weight.
    pub grad: Option<Grad<'a>>,
    /// Length of the first dimension if the tensor has two or more, else 0; the weight's length is
    /// a multiple of it. Used by the rules for rows and matrices only: `AdamP`, `Adafactor`,
    /// `Muon`.
    pub rows: usize,
    /// A moving average of the weight, updated in the same sweep.
    pub ema: Option<Ema<'a>>,
}

impl<'a> ParamMut<'a> {
    /// A tensor with or without a gradient.
    #[inline]
    pub fn new(weight: impl Into<SliceMut<'a>>, grad: Option<Slice<'a>>) -> Self {
        Self { weight: weight.into(), grad: grad.map(Grad::Keep), rows: 0, ema: None }
    }

    /// Sets [`rows`](Self::rows) from the tensor's shape.
    #[must_use]
    #[inline]
    pub const fn with_shape(mut self, shape: &[usize]) -> Self {
        self.rows = rows(shape);
        self
    }

    /// Sets a gradient that the step sets to zero after using it.
    #[must_use]
    pub fn clearing(mut self, grad: impl Into<SliceMut<'a>>) -> Self {
        self.grad = Some(Grad::Clear(grad.into()));
        self
    }

    /// Sets a moving average of the weight, of the same length.
    #[must_use]
    pub const fn with_ema(mut self, values: &'a mut [f32], decay: f32) -> Self {
        self.ema = Some(Ema { values, decay });
        self
    }
}

/// Length of the first dimension if there are two or more, else 0.
#[inline]
pub(crate) const fn rows(shape: &[usize]) -> usize {
    match shape {
        [rows, _, ..] => *rows,
        _ => 0,
    }
}

/// A gradient, and whether the step clears it.
#[derive(Debug)]
pub enum Grad<'a> {
    /// The step only reads it.
    Keep(Slice<'a>),
    /// The step sets it to zero after using it. A skipped step does not.
    Clear(SliceMut<'a>),
}

impl Grad<'_> {
    /// A shared slice of the elements.
    #[must_use]
    #[inline]
    pub const fn as_slice(&self) -> Slice<'_> {
        match self {
            Self::Keep(grad) => *grad,
            Self::Clear(grad) => grad.as_slice(),
        }
    }
}

/// A moving average of a weight: `values ← decay·values + (1 − decay)·weight`, in f32, from the f32
/// master where there is one.
#[derive(Debug)]
pub struct Ema<'a> {
    /// The average.
    pub values: &'a mut [f32],
    /// The decay, `0 ..= 1`.
    pub decay: f32,
}

/// Tensors that share hyper-parameters.
///
/// `H` is the rule's own struct, for example [`AdamWHyper`](crate::AdamWHyper).
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroup<H> {
    /// The hyper-parameters of these tensors.
    pub hyper: H,
    /// Indices into the list passed to [`Optimizer::step`](crate::Optimizer::step). A tensor is in
    /// one group at most; a tensor in no group is never updated.
    pub params: Vec<usize>,
}

impl<H> ParamGroup<H> {
    /// A group over the given tensors.
    pub fn new(hyper: H, params: impl IntoIterator<Item = usize>) -> Self {
        Self { hyper, params: params.into_iter().collect() }
    }
}

/// A parameter's name, and its shape if known.
///
/// ```
/// use fused_optim::{AdamW, AdamWHyper, Optimizer, ParamSpec};
///
/// let mut adamw = AdamW::with_one_group(AdamWHyper::default(), 2)?;
/// adamw.set_param_names(&[ParamSpec::new("fc.weight", &[10, 64]), ParamSpec::from("fc.bias")])?;
/// # Ok::<(), fused_optim::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamSpec {
    /// Unique within the model, for example `layer1.0.conv1.weight`.
    pub name: String,
    /// Its dimensions; `None`, if unknown, matches every shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<usize>>,
}

impl ParamSpec {
    /// A name and a shape.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: Some(shape.to_vec()) }
    }

    /// Number of elements, if the shape is known.
    pub(crate) fn count(&self) -> Option<usize> {
        let shape = self.shape.as_ref()?;
        Some(shape.iter().fold(1, |count: usize, dim| count.saturating_mul(*dim)))
    }
}

impl From<&str> for ParamSpec {
    /// A name alone.
    fn from(name: &str) -> Self {
        Self { name: name.to_owned(), shape: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_keep_length_and_type() {
        let mut halves = [f16::ONE; 3];
        let mut view = SliceMut::from(&mut halves[..]);
        assert_eq!((view.len(), view.dtype(), view.is_empty()), (3, DType::F16, false));
        if let SliceMut::F16(s) = view.reborrow() {
            s[0] = f16::ZERO;
        }
        assert_eq!(view.as_slice().len(), 3);
        assert_eq!(halves[0], f16::ZERO);
        assert!(Slice::from(&[bf16::ONE; 0][..]).is_empty());
        assert_eq!(DType::Bf16.to_string(), "bf16");
        assert_eq!(DType::F32.size() + DType::F16.size() + DType::Bf16.size(), 8);
    }
}
