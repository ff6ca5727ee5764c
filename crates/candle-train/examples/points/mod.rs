//! A dataset for the examples: points, labelled by the signs of two sums.

use candle_core::{DType, Device, Result, Tensor};

/// Number of classes.
pub(crate) const CLASSES: usize = 4;
/// Number of values per point.
pub(crate) const FEATURES: usize = 16;

/// `count` points and their labels.
pub(crate) fn data(count: usize) -> Result<(Tensor, Tensor)> {
    let x: Vec<f32> = (0..count * FEATURES).map(|i| (i as f32 * 0.731).sin()).collect();
    let is_above = |half: &[f32]| i64::from(half.iter().sum::<f32>() > 0.0);
    let label = |x: &[f32]| is_above(&x[..8]) * 2 + is_above(&x[8..]);
    let y: Vec<i64> = x.chunks(FEATURES).map(label).collect();
    let x = Tensor::from_vec(x, (count, FEATURES), &Device::Cpu)?;
    Ok((x, Tensor::from_vec(y, count, &Device::Cpu)?.to_dtype(DType::I64)?))
}

/// The rows of these samples.
pub(crate) fn batch(x: &Tensor, y: &Tensor, rows: &[u32]) -> Result<(Tensor, Tensor)> {
    let rows = Tensor::new(rows, &Device::Cpu)?;
    Ok((x.index_select(&rows, 0)?, y.index_select(&rows, 0)?))
}
