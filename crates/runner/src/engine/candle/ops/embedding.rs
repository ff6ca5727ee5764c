//! Rows of a table by index.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::{cast, host};

/// Row `ids[i]` of `weight` for each `i`.
///
/// Shapes: `ids` is `[...]`, `i64`; `weight` is `[rows, width]`, `f32`, `f16` or `bf16`; the result
/// is `[..., width]`, exact. Backward adds up, in `f32` and in the order of `ids`, what comes back
/// for each row, and is 0 for rows not asked for.
///
/// # Errors
///
/// Shapes or dtypes that do not fit, an index that is no row.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let [weight] = cast("embedding", [weight])?;
    weight.contiguous()?.apply_op2(&ids.contiguous()?, Embedding)
}

struct Embedding;

/// `id` as an index, if it is one.
fn row(id: i64, rows: usize) -> Result<usize> {
    match usize::try_from(id) {
        Ok(row) if row < rows => Ok(row),
        _ => bail!("embedding: index {id} is none of {rows} rows"),
    }
}

impl CustomOp2 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(
        &self,
        weight: &CpuStorage,
        weight_layout: &Layout,
        ids: &CpuStorage,
        ids_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = weight_layout.shape().dims2()?;
        let dtype = host::float_dtype(weight)?;
        let weight = host::floats(weight, weight_layout)?;
        let ids = host::indices(ids, ids_layout)?;
        let mut y = Vec::with_capacity(ids.len() * width);
        for id in ids {
            y.extend_from_slice(&weight[row(*id, rows)? * width..][..width]);
        }
        let mut shape = ids_layout.shape().dims().to_vec();
        shape.push(width);
        Ok((host::rounded(y, dtype)?, shape.into()))
    }

    fn bwd(
        &self,
        weight: &Tensor,
        ids: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, width) = weight.dims2()?;
        let dy = dy.contiguous()?;
        let (dy_storage, dy_layout) = dy.storage_and_layout();
        let dy = host::floats_of(&dy_storage, dy_layout)?;
        let mut dw = vec![0.0; rows * width];
        for (id, dy) in ids.flatten_all()?.to_vec1()?.into_iter().zip(dy.chunks_exact(width.max(1)))
        {
            let own = &mut dw[row(id, rows)? * width..][..width];
            own.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
        }
        Ok((Some(host::tensor(dw, weight.shape(), weight.dtype())?), None))
    }
}
