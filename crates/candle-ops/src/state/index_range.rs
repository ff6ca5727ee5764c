//! Range checks of labels and indices, on the host: an index out of range on a GPU ends all of the process's work
//! there.

use candle_core::{DType, Result, Tensor, bail};

/// The range that an operator's labels or indices must be in.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IndexRange {
    /// Labels of `cross_entropy`, with this many classes, and the label that is ignored.
    Classes(usize, Option<i64>),
    /// Indices of `embedding`, with this many rows.
    Rows(usize),
}

impl IndexRange {
    /// # Errors
    ///
    /// An index that is out of range.
    pub(crate) fn check(self, index: i64) -> Result<()> {
        let (Self::Classes(end, _) | Self::Rows(end)) = self;
        let is_ignored = matches!(self, Self::Classes(_, ignored) if ignored == Some(index));
        if is_ignored || usize::try_from(index).is_ok_and(|index| index < end) {
            return Ok(());
        }
        match self {
            Self::Classes(..) => bail!("cross_entropy: label {index} is none of {end} classes"),
            Self::Rows(_) => bail!("embedding: index {index} is none of {end} rows"),
        }
    }

    /// Checks all of a tensor, which is copied to the host unless it is a [known input](crate::known_inputs).
    ///
    /// # Errors
    ///
    /// The errors of [`check`](Self::check); another type than `i64` or `u32`.
    pub(crate) fn check_all(self, indices: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if crate::known_inputs::check(indices, self)? {
            return Ok(());
        }
        to_host(indices)?.into_iter().try_for_each(|index| self.check(index))
    }
}

/// All indices, in order.
///
/// # Errors
///
/// Another type than `i64` or `u32`.
pub(crate) fn to_host(indices: &Tensor) -> Result<Vec<i64>> {
    match indices.dtype() {
        DType::I64 | DType::U32 => indices.flatten_all()?.to_dtype(DType::I64)?.to_vec1(),
        other => bail!("labels and indices must be i64 or u32, not {other:?}"),
    }
}
