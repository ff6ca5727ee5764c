//! One bucket: shared memory that is either here or in flight.
//!
//! Buckets of different types stand in one list as `dyn Bucket`; typed access goes through
//! [`slice`] and [`slice_mut`], which give nothing for another type, or while the bucket is in
//! flight.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;

use half::{bf16, f16};

use crate::{DType, Element, Error, ProcessGroup, ReduceOp, Result, SharedBuf, Work};

/// An [`Element`] that gradients are made of: `f16`, `bf16`, `f32` and `f64`.
pub trait Gradient: Element {
    /// `sum[i] += term[i]`, rounded once per element.
    #[doc(hidden)]
    fn accumulate(sum: &mut [Self], term: &[Self]);
}

macro_rules! gradients {
    ($($type:ty)*) => {$(
        impl Gradient for $type {
            fn accumulate(sum: &mut [Self], term: &[Self]) {
                for (sum, term) in sum.iter_mut().zip(term) {
                    *sum += *term;
                }
            }
        }
    )*};
}

gradients!(f16 bf16 f32 f64);

/// A bucket of any type.
pub(super) trait Bucket: Any + Debug + Send {
    /// Starts the average over all ranks.
    fn launch(&mut self, group: &ProcessGroup) -> Result<()>;

    /// Waits for the average.
    fn wait(&mut self) -> Result<()>;

    /// Sets a part to zero.
    fn clear(&mut self, range: Range<usize>);

    /// Copies the parts that `from`, a bucket of the same type, holds for this one.
    fn copy_from(&mut self, at: usize, from: &dyn Bucket, range: Range<usize>);
}

/// Allocates a bucket of `count` zeros; every rank must call it in the same order.
pub(super) fn alloc(group: &ProcessGroup, dtype: DType, count: usize) -> Result<Box<dyn Bucket>> {
    fn slot<T: Gradient>(group: &ProcessGroup, count: usize) -> Result<Box<dyn Bucket>> {
        Ok(Box::new(Slot::Here(group.alloc::<T>(count)?)))
    }
    match dtype {
        DType::F16 => slot::<f16>(group, count),
        DType::Bf16 => slot::<bf16>(group, count),
        DType::F32 => slot::<f32>(group, count),
        DType::F64 => slot::<f64>(group, count),
        other => Err(Error::Unsupported { backend: "reducer", what: format!("{other} gradients") }),
    }
}

/// The elements of `bucket`, if they are of type `T` and here.
pub(super) fn slice<T: Element>(bucket: &dyn Bucket) -> Option<&[T]> {
    let any: &dyn Any = bucket;
    match any.downcast_ref()? {
        Slot::Here(buf) => Some(buf),
        Slot::Flying(_) | Slot::Lost => None,
    }
}

/// The elements of `bucket`, if they are of type `T` and here.
pub(super) fn slice_mut<T: Element>(bucket: &mut dyn Bucket) -> Option<&mut [T]> {
    let any: &mut dyn Any = bucket;
    match any.downcast_mut()? {
        Slot::Here(buf) => Some(buf),
        Slot::Flying(_) | Slot::Lost => None,
    }
}

#[derive(Debug)]
enum Slot<T> {
    Here(SharedBuf<T>),
    Flying(Work<SharedBuf<T>>),
    /// An operation failed and kept the memory. The group is unusable from then on.
    Lost,
}

impl<T: Gradient> Bucket for Slot<T> {
    fn launch(&mut self, group: &ProcessGroup) -> Result<()> {
        *self = match std::mem::replace(self, Self::Lost) {
            Self::Here(buf) => Self::Flying(group.all_reduce_async(buf, ReduceOp::Avg)?),
            other => other,
        };
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        *self = match std::mem::replace(self, Self::Lost) {
            Self::Flying(work) => Self::Here(work.wait()?),
            other => other,
        };
        Ok(())
    }

    fn clear(&mut self, range: Range<usize>) {
        if let Self::Here(buf) = self {
            buf[range].fill(T::default());
        }
    }

    fn copy_from(&mut self, at: usize, from: &dyn Bucket, range: Range<usize>) {
        if let (Self::Here(buf), Some(from)) = (self, slice::<T>(from)) {
            buf[at..at + range.len()].copy_from_slice(&from[range]);
        }
    }
}

#[cfg(test)]
pub(super) fn is_done<T: Element>(bucket: &dyn Bucket) -> bool {
    let any: &dyn Any = bucket;
    matches!(any.downcast_ref::<Slot<T>>(), Some(Slot::Flying(work)) if work.is_done())
}
