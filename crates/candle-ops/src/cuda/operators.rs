//! The kernels as a [`Context`](crate::Context) uses them.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};

use super::attention::Masked;
use super::{
    Kernels, attention, conv, dropout, elementwise, embedding, linear, norm, pool, program, rows,
};
use crate::kernels::DeviceKernels;
use crate::sizes::{
    AttentionSizes, BatchNormOptions, Grouped, LinearSizes, NormBy, PackedSizes, Planes, Running,
    Statistics, Windows, Words,
};

impl DeviceKernels for Kernels {
    fn supports(&self, x: &Tensor, dtype: DType, elements: usize) -> bool {
        let is_own = matches!(x.device(), Device::Cuda(device) if device.id() == self.device.id());
        program(dtype).is_some()
            && x.elem_count() > 0
            && is_own
            && self.fits(x.elem_count().max(elements))
    }

    fn relu(self: Arc<Self>, x: &Tensor) -> Result<Tensor> {
        elementwise::relu(&self, x)
    }

    fn gelu(self: Arc<Self>, x: &Tensor) -> Result<Tensor> {
        elementwise::gelu(&self, x)
    }

    fn softmax(self: Arc<Self>, x: &Tensor) -> Result<Tensor> {
        rows::softmax(&self, x)
    }

    fn dropout(self: Arc<Self>, x: &Tensor, words: Words) -> Result<Tensor> {
        dropout::dropout(&self, x, words)
    }

    fn add(self: Arc<Self>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        elementwise::add(&self, a, b)
    }

    fn add_to_f32(self: Arc<Self>, wide: &Tensor, half: &Tensor) -> Result<Tensor> {
        elementwise::add_to_f32(&self, wide, half)
    }

    fn add_rows(self: Arc<Self>, whole: &Tensor, row: &Tensor) -> Result<Tensor> {
        elementwise::add_rows(&self, whole, row)
    }

    fn add_relu(self: Arc<Self>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        elementwise::add_relu(&self, a, b)
    }

    fn cast(self: Arc<Self>, x: &Tensor, dtype: DType) -> Result<Tensor> {
        elementwise::cast(&self, x, dtype)
    }

    fn normalize(&self, images: &Tensor, by: [&[f32]; 2], dtype: DType) -> Result<Tensor> {
        elementwise::normalize(self, images, by, dtype)
    }

    fn linear(
        self: Arc<Self>,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        sizes: LinearSizes,
    ) -> Result<Tensor> {
        linear::linear(&self, x, weight, bias, sizes)
    }

    fn conv2d(
        self: Arc<Self>,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        sizes: Grouped,
    ) -> Result<Option<Tensor>> {
        conv::conv2d(&self, x, weight, bias, sizes)
    }

    fn batch_norm(
        self: Arc<Self>,
        inputs: [&Tensor; 3],
        by: NormBy<'_>,
        options: BatchNormOptions,
        planes: Planes,
    ) -> Result<(Tensor, Statistics)> {
        norm::batch_norm(&self, inputs, by, options, planes)
    }

    fn track(&self, running: Running<'_>, batch: &Statistics) -> Result<()> {
        norm::track(self, running, batch)
    }

    fn layer_norm(
        self: Arc<Self>,
        x: &Tensor,
        gamma: &Tensor,
        beta: &Tensor,
        eps: f32,
    ) -> Result<Tensor> {
        rows::layer_norm(&self, x, gamma, beta, eps)
    }

    fn max_pool2d(self: Arc<Self>, x: &Tensor, windows: Windows) -> Result<Tensor> {
        pool::max_pool2d(&self, x, windows)
    }

    fn global_avg_pool(self: Arc<Self>, x: &Tensor) -> Result<Tensor> {
        pool::global_avg_pool(&self, x)
    }

    fn self_attention(self: Arc<Self>, qkv: &Tensor, sizes: PackedSizes) -> Result<Tensor> {
        attention::packed(&self, qkv, sizes, None)
    }

    fn attention(
        self: Arc<Self>,
        qkv: [&Tensor; 3],
        sizes: &AttentionSizes,
        hidden: Option<&Tensor>,
        dropout: Option<Words>,
    ) -> Result<Option<Tensor>> {
        attention::separate(&self, qkv, sizes, Masked { hidden, dropout }, None)
    }

    fn cross_entropy(self: Arc<Self>, logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
        rows::cross_entropy(&self, logits, labels)
    }

    fn embedding(
        self: Arc<Self>,
        ids: &Tensor,
        weight: &Tensor,
        padding: Option<usize>,
    ) -> Result<Tensor> {
        embedding::embedding(&self, ids, weight, padding)
    }
}
