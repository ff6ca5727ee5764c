//! Views: tensors in buffers.

use std::fmt;

use super::{Buffer, argument};
#[expect(unused_imports, reason = "for the documentation")]
use crate::Error;
use crate::Result;
use crate::sys::AclDataType;

/// A contiguous tensor in a buffer, an argument of [`Operators`](super::Operators).
#[derive(Clone)]
pub struct View {
    pub(super) buffer: Buffer,
    pub(super) offset: usize,
    pub(super) dims: Vec<usize>,
    pub(super) dtype: AclDataType,
}

impl View {
    /// A tensor at `offset` bytes in a buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if it is not in the buffer, if `offset` is not a multiple of 32, as CANN
    /// requires, or for an unsupported type.
    pub fn new(buffer: &Buffer, offset: usize, dims: &[usize], dtype: AclDataType) -> Result<Self> {
        let Some(width) = width(dtype) else {
            return argument(format!("tensors of {dtype:?} are not supported"));
        };
        if !offset.is_multiple_of(32) {
            return argument(format!("tensor offset {offset} is not a multiple of 32 bytes"));
        }
        let bytes = dims.iter().try_fold(width, |bytes, dim| bytes.checked_mul(*dim));
        // An overflowing size is not in the buffer either.
        buffer.range(offset, bytes.unwrap_or(usize::MAX))?;
        Ok(Self { buffer: buffer.clone(), offset, dims: dims.to_vec(), dtype })
    }

    /// The elements `from..from + count` of this view, as a vector.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and if they are not in this view.
    pub fn part(&self, from: usize, count: usize) -> Result<Self> {
        let width = width(self.dtype).unwrap_or_default();
        match from.checked_add(count) {
            Some(end) if end <= self.count() => {
                Self::new(&self.buffer, self.offset + from * width, &[count], self.dtype)
            }
            _ => argument(format!(
                "{count} elements at {from} are not in a view of {}",
                self.count()
            )),
        }
    }

    /// The same elements with other dimensions.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the number of elements differs.
    pub fn shaped(&self, dims: &[usize]) -> Result<Self> {
        if dims.iter().product::<usize>() != self.count() {
            return argument(format!("cannot reshape {} elements to {dims:?}", self.count()));
        }
        Self::new(&self.buffer, self.offset, dims, self.dtype)
    }

    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.dims.iter().product()
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> AclDataType {
        self.dtype
    }

    /// The buffer.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Offset in the buffer in bytes.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.count() * width(self.dtype).unwrap_or_default()
    }
}

impl PartialEq for View {
    /// Whether they are the same memory, in the same dimensions.
    fn eq(&self, other: &Self) -> bool {
        (self.buffer.address(), self.offset, &self.dims, self.dtype)
            == (other.buffer.address(), other.offset, &other.dims, other.dtype)
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, dims, dtype, .. } = self;
        write!(f, "View({dims:?} of {dtype:?} at {offset})")
    }
}

/// Bytes of a number.
pub(super) fn width(dtype: AclDataType) -> Option<usize> {
    match dtype {
        AclDataType::BOOL | AclDataType::INT8 | AclDataType::UINT8 => Some(1),
        AclDataType::FLOAT16 | AclDataType::BF16 => Some(2),
        AclDataType::FLOAT | AclDataType::INT32 => Some(4),
        AclDataType::INT64 | AclDataType::DOUBLE => Some(8),
        _ => None,
    }
}
