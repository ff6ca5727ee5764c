//! Embedding tables.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use super::parameter::parameter;

/// An embedding table: [`embedding`](crate::embedding) with a `weight`. Indices may have any
/// integer type.
#[derive(Clone, Debug)]
pub struct Embedding {
    embeddings: Tensor,
    hidden_size: usize,
    padding_idx: Option<usize>,
}

impl Embedding {
    /// A layer with a table `[rows, hidden_size]`.
    pub const fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self { embeddings, hidden_size, padding_idx: None }
    }

    /// Disables the gradient of row `padding_idx`, like
    /// [`embedding_with_padding`](crate::embedding_with_padding): the row keeps its value, which is
    /// not set to 0 here. `forward` returns an error if there is no such row.
    #[must_use]
    pub const fn with_padding_idx(mut self, padding_idx: usize) -> Self {
        self.padding_idx = Some(padding_idx);
        self
    }

    /// The table.
    pub const fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }

    /// Length of a vector.
    pub const fn hidden_size(&self) -> usize {
        self.hidden_size
    }
}

impl Module for Embedding {
    fn forward(&self, indexes: &Tensor) -> Result<Tensor> {
        let indexes = super::indices(indexes)?;
        match self.padding_idx {
            Some(padding) => crate::embedding_with_padding(&indexes, &self.embeddings, padding),
            None => crate::embedding(&indexes, &self.embeddings),
        }
    }
}

/// A table of `in_size` vectors of length `out_size`, initialized from a standard normal
/// distribution.
///
/// # Errors
///
/// Errors of the builder; a parameter larger than the memory.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder<'_>) -> Result<Embedding> {
    let init = Init::Randn { mean: 0.0, stdev: 1.0 };
    Ok(Embedding::new(parameter((in_size, out_size), "weight", init, &vb)?, out_size))
}
