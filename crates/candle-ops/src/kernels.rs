//! The operators for which a device may have kernels of its own: the one trait between the
//! operators and the code of a device.
//!
//! A [`Context`](crate::Context) holds the kernels as a value; an operator asks for them by
//! `graph/device.rs`. `cuda` implements the trait.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use crate::sizes::{
    AttentionSizes, BatchNormOptions, Grouped, LinearSizes, NormBy, PackedSizes, Planes, Running,
    Statistics, Windows, Words,
};

/// Kernels for tensors on a device, forward and backward. Results are nodes of candle's graph or of
/// the current tape.
///
/// Unless stated otherwise, an operator may be called if [`supports`](Self::supports) is true for
/// its first tensor and the size of its largest one, with shapes that its function in this crate
/// has checked.
pub(crate) trait DeviceKernels: Any + fmt::Debug + Send + Sync {
    /// Whether there are kernels in `dtype` for the device of `x`, for the size of `x` and tensors
    /// of up to `elements` elements.
    fn supports(&self, x: &Tensor, dtype: DType, elements: usize) -> bool;

    fn relu(self: Arc<Self>, x: &Tensor) -> Result<Tensor>;

    fn gelu(self: Arc<Self>, x: &Tensor) -> Result<Tensor>;

    /// Over the last dimension.
    fn softmax(self: Arc<Self>, x: &Tensor) -> Result<Tensor>;

    /// Dropout of a contiguous tensor by these words.
    fn dropout(self: Arc<Self>, x: &Tensor, words: Words) -> Result<Tensor>;

    /// Both have the same shape and type, and are contiguous.
    fn add(self: Arc<Self>, a: &Tensor, b: &Tensor) -> Result<Tensor>;

    /// Adds an `f32` and a half-precision tensor of the same shape, contiguous. Needs support for
    /// `half`.
    fn add_to_f32(self: Arc<Self>, wide: &Tensor, half: &Tensor) -> Result<Tensor>;

    /// Adds the elements of `row` to each row of `whole`. Both have the same type and are
    /// contiguous.
    fn add_rows(self: Arc<Self>, whole: &Tensor, row: &Tensor) -> Result<Tensor>;

    /// Both have the same shape and type.
    fn add_relu(self: Arc<Self>, a: &Tensor, b: &Tensor) -> Result<Tensor>;

    /// Casts a contiguous tensor between `f32` and a half-precision type. Needs support for the
    /// latter.
    fn cast(self: Arc<Self>, x: &Tensor, dtype: DType) -> Result<Tensor>;

    /// Normalizes `u8` images `[n, c, h, w]` by means and deviations, one for each channel or one
    /// for all. Needs support for `dtype`. Has no backward pass.
    fn normalize(&self, images: &Tensor, by: [&[f32]; 2], dtype: DType) -> Result<Tensor>;

    fn linear(
        self: Arc<Self>,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        sizes: LinearSizes,
    ) -> Result<Tensor>;

    /// `None` if there is no kernel for this convolution.
    fn conv2d(
        self: Arc<Self>,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        sizes: Grouped,
    ) -> Result<Option<Tensor>>;

    /// Returns the statistics, too.
    fn batch_norm(
        self: Arc<Self>,
        inputs: [&Tensor; 3],
        by: NormBy<'_>,
        options: BatchNormOptions,
        planes: Planes,
    ) -> Result<(Tensor, Statistics)>;

    /// Updates running statistics.
    fn track(&self, running: Running<'_>, batch: &Statistics) -> Result<()>;

    fn layer_norm(
        self: Arc<Self>,
        x: &Tensor,
        gamma: &Tensor,
        beta: &Tensor,
        eps: f32,
    ) -> Result<Tensor>;

    fn max_pool2d(self: Arc<Self>, x: &Tensor, windows: Windows) -> Result<Tensor>;

    fn global_avg_pool(self: Arc<Self>, x: &Tensor) -> Result<Tensor>;

    fn self_attention(self: Arc<Self>, qkv: &Tensor, sizes: PackedSizes) -> Result<Tensor>;

    /// `hidden` is a mask of `u8` of four dimensions, 0 where a query does not attend to a key.
    /// With it or with dropout by these words, `None` if there is no kernel for these sizes.
    fn attention(
        self: Arc<Self>,
        qkv: [&Tensor; 3],
        sizes: &AttentionSizes,
        hidden: Option<&Tensor>,
        dropout: Option<Words>,
    ) -> Result<Option<Tensor>>;

    /// The mean loss. Labels are checked.
    fn cross_entropy(self: Arc<Self>, logits: &Tensor, labels: &Tensor) -> Result<Tensor>;

    /// Indices are checked, and there is at least one.
    fn embedding(
        self: Arc<Self>,
        ids: &Tensor,
        weight: &Tensor,
        padding: Option<usize>,
    ) -> Result<Tensor>;
}
