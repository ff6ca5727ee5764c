//! Labels and indices within their range, looked at on the host: a device ends the whole process's work for
//! one out of range.

use candle_core::{DType, Result, Tensor, bail};

#[cfg(feature = "cuda")]
use super::fields;

/// What numbers must be below, and whose limit that is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    /// Labels of `cross_entropy`, of so many classes.
    Classes(usize),
    /// Indices of `embedding`, of so many rows.
    Rows(usize),
}

impl Limit {
    /// # Errors
    ///
    /// For a number that is out of range.
    pub(super) fn check(self, number: i64) -> Result<()> {
        let (Self::Classes(limit) | Self::Rows(limit)) = self;
        if usize::try_from(number).is_ok_and(|number| number < limit) {
            return Ok(());
        }
        match self {
            Self::Classes(_) => bail!("cross_entropy: label {number} is none of {limit} classes"),
            Self::Rows(_) => bail!("embedding: index {number} is none of {limit} rows"),
        }
    }

    /// Looks at all of a tensor, which is copied to the host unless it is a field of the batch.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check); another type than `i64`.
    pub(super) fn check_all(self, numbers: &Tensor) -> Result<()> {
        if numbers.dtype() != DType::I64 {
            bail!("labels and indices are i64, not {:?}", numbers.dtype());
        }
        #[cfg(feature = "cuda")]
        if fields::look(numbers, self)? {
            return Ok(());
        }
        let numbers = numbers.flatten_all()?.to_vec1::<i64>()?;
        numbers.into_iter().try_for_each(|number| self.check(number))
    }

    /// Why a step cannot be captured whose numbers are computed.
    #[cfg(feature = "cuda")]
    pub(super) fn unknown(self) -> &'static str {
        match self {
            Self::Classes(_) => {
                "the labels of cross_entropy are looked at on the host: give it a field of the batch, or a view \
                 of one"
            }
            Self::Rows(_) => {
                "the indices of embedding are looked at on the host: give it a field of the batch, or a view of \
                 one"
            }
        }
    }
}
