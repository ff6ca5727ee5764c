//! Images that are channels-last in memory.
//!
//! Such a tensor has the shape `[n, c, h, w]` and the strides of a contiguous `[n, h, w, c]`, as in
//! PyTorch. cuDNN's convolutions return it, in the forward and the backward pass; `batch_norm`, the
//! pools, `relu`, `add` and `add_relu` keep the layout of their input. All other operators of this
//! crate, and most of candle's, see a tensor that is not contiguous, and copy it or use its
//! strides; candle's `index_select`, `gather`, `scatter` and `index_add` and candle-nn's fused
//! operators return an error.
//!
//! A result is added to the graph as `[n, h, w, c]` and transposed there ([`channels_second`]); its
//! gradient may have any layout, and is viewed or copied to that of the result.

use candle_core::{Result, Tensor};

use super::jobs::{TransposeJob, u32_of};
use super::{Kernel, Kernels, Output};
use crate::graph::custom_op::{channels_last, channels_second};

/// Memory layout of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// `[n, c, h, w]`.
    First,
    /// `[n, h, w, c]`.
    Last,
}

impl Order {
    /// The layout of a tensor; `First` if it is both, or neither.
    pub(super) fn of(x: &Tensor) -> Self {
        if channels_last(x).is_some() { Self::Last } else { Self::First }
    }

    /// The first value for channels-first images, the second for channels-last ones.
    pub(super) fn pick<T>(self, [first, last]: [T; 2]) -> T {
        match self {
            Self::First => first,
            Self::Last => last,
        }
    }

    /// The sizes of images in memory order.
    pub(super) fn shape(self, (n, c, h, w): (usize, usize, usize, usize)) -> [usize; 4] {
        self.pick([[n, c, h, w], [n, h, w, c]])
    }
}

impl Output {
    /// Images in this layout viewed as `[n, c, h, w]`, outside of any graph.
    pub(super) fn seen(self, order: Order) -> Result<Tensor> {
        match order {
            Order::First => Ok(self.tensor()),
            Order::Last => channels_second(&self.tensor()),
        }
    }
}

impl Kernels {
    /// A tensor's elements in this layout, contiguous and outside of any graph: the same memory if
    /// possible, else a copy.
    pub(super) fn laid(&self, x: &Tensor, order: Order) -> Result<Tensor> {
        match (order, channels_last(&x.detach())) {
            (Order::First, Some(turned)) => self.channels_first(turned),
            (Order::First, None) => x.detach().contiguous(),
            (Order::Last, _) => self.channels_last(x),
        }
    }

    /// Images, or a weight, from `[n, c, h, w]` to a contiguous `[n, h, w, c]`, outside of any
    /// graph: the same memory if possible, else a copy.
    pub(super) fn channels_last(&self, images: &Tensor) -> Result<Tensor> {
        let images = images.detach();
        let turned = images.permute((0, 2, 3, 1))?;
        if turned.is_contiguous() {
            return Ok(turned);
        }
        let images = images.contiguous()?;
        let (n, c, h, w) = images.dims4()?;
        self.transpose(&images, [n, c, h * w], [n, h, w, c])
    }

    /// The reverse: from a contiguous `[n, h, w, c]` to a contiguous `[n, c, h, w]`.
    pub(super) fn channels_first(&self, images: Tensor) -> Result<Tensor> {
        let (n, h, w, c) = images.dims4()?;
        if c == 1 || h * w == 1 {
            return images.reshape((n, c, h, w));
        }
        self.transpose(&images, [n, h * w, c], [n, c, h, w])
    }

    /// Transposes each of `count` matrices.
    fn transpose(
        &self,
        from: &Tensor,
        [count, rows, columns]: [usize; 3],
        shape: [usize; 4],
    ) -> Result<Tensor> {
        let to = self.empty(&shape[..], from.dtype())?;
        let job = TransposeJob {
            x: self.address(from)?,
            y: to.at,
            count: u32_of(count),
            rows: u32_of(rows),
            columns: u32_of(columns),
            unused: 0,
        };
        // The same as in `channels_last.cu`.
        let side = |own: usize, other: usize| match (own < TILE, other < TILE) {
            (true, _) => own,
            (false, true) => MOST / (other + 1),
            (false, false) => TILE,
        };
        let tiles = rows.div_ceil(side(rows, columns)) * columns.div_ceil(side(columns, rows));
        let blocks = (count * tiles).min(1 << 16);
        // SAFETY: a `TransposeJob` of `count` matrices, and memory for as many.
        unsafe { self.launch(from.dtype(), Kernel::transpose, blocks, &job) }?;
        Ok(to.tensor())
    }
}

/// Rows and columns that a block transposes at a time; and the approximate number of elements if
/// one dimension is smaller.
const TILE: usize = 32;
const MOST: usize = 8192;
