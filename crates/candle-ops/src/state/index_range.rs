//! Range checks of labels and indices, on the host: on a GPU an index out of range would abort all
//! work of the process.

use candle_core::{DType, Result, Tensor, bail};

/// The valid range of an operator's labels or indices.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IndexRange {
    /// Labels of `cross_entropy`: the number of classes, and the ignored label.
    Classes(usize, Option<i64>),
    /// Labels of `nll`: the number of classes.
    Nll(usize),
    /// Indices of `embedding`: the number of rows.
    Rows(usize),
}

impl IndexRange {
    /// # Errors
    ///
    /// An index that is out of range.
    pub(crate) fn check(self, index: i64) -> Result<()> {
        let (Self::Classes(end, _) | Self::Nll(end) | Self::Rows(end)) = self;
        let is_ignored = matches!(self, Self::Classes(_, ignored) if ignored == Some(index));
        if is_ignored || usize::try_from(index).is_ok_and(|index| index < end) {
            return Ok(());
        }
        match self {
            Self::Classes(..) => bail!("cross_entropy: label {index} is none of {end} classes"),
            Self::Nll(_) => bail!("nll: label {index} is none of {end} classes"),
            Self::Rows(_) => bail!("embedding: index {index} is none of {end} rows"),
        }
    }

    /// Checks all elements of a tensor, which is copied to the host unless it is a [known
    /// input](crate::known_inputs).
    ///
    /// # Errors
    ///
    /// The errors of [`check`](Self::check); a type other than `i64` or `u32`.
    pub(crate) fn check_all(self, indices: &Tensor) -> Result<()> {
        if crate::known_inputs::check(indices, self)? {
            return Ok(());
        }
        to_host(indices)?.into_iter().try_for_each(|index| self.check(index))
    }
}

/// All indices of any integer type, in order, for the operator `name`.
pub(crate) fn integers(name: &str, indices: &Tensor) -> Result<Vec<i64>> {
    if !indices.dtype().is_int() {
        bail!("{name}: indices must be integers, not {:?}", indices.dtype());
    }
    indices.flatten_all()?.to_dtype(DType::I64)?.to_vec1()
}

/// All indices, in order.
///
/// # Errors
///
/// A type other than `i64` or `u32`.
pub(crate) fn to_host(indices: &Tensor) -> Result<Vec<i64>> {
    match indices.dtype() {
        DType::I64 | DType::U32 => indices.flatten_all()?.to_dtype(DType::I64)?.to_vec1(),
        other => bail!("labels and indices must be i64 or u32, not {other:?}"),
    }
}
