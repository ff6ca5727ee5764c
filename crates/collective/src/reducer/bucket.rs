//! One bucket: shared memory that is accessible or in flight.
//!
//! Buckets of different types are kept in one list as `dyn Bucket`; typed access goes through
//! [`slice`](fn@slice) and [`slice_mut`], which return `None` for another type, or while the bucket
//! is in flight. A [`Plain`] is sent uncompressed, on the host or through a device; a [`Cast`] is
//! sent as 16-bit floats; a `PowerSgdBucket` is sent as low-rank factors.

use std::any::Any;
use std::fmt::Debug;
use std::ops::{AddAssign, Range};
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::CommHook;
use super::plan::{BucketSpec, ParamInfo};
#[cfg(feature = "powersgd")]
use super::power_sgd::PowerSgdBucket;
use super::staging::{StagedBuf, Staging};
use crate::memory::copy::copy_slice;
use crate::{DType, Element, Error, ProcessGroup, ReduceOp, Result, SharedBuf, Work};

/// An [`Element`] type of gradients: `f16`, `bf16`, `f32` and `f64`.
pub trait Gradient: Element + AddAssign {
    /// `sum[i] += term[i]`, rounded once per element.
    #[doc(hidden)]
    fn accumulate(sum: &mut [Self], term: &[Self]) {
        for (sum, term) in sum.iter_mut().zip(term) {
            *sum += *term;
        }
    }
}

impl Gradient for f16 {}
impl Gradient for bf16 {}
impl Gradient for f32 {}
impl Gradient for f64 {}

/// A bucket's state from earlier passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BucketMemory {
    /// PowerSGD's right factors, from which the next pass starts.
    pub q: Vec<f32>,
    /// The error of PowerSGD's approximations, of the bucket's length; empty before the first.
    pub error: Vec<f32>,
}

/// A bucket of any type.
pub(super) trait Bucket: Any + Debug + Send {
    /// Starts the average over all ranks. `pass` counts averaged passes from 1.
    fn launch(&mut self, group: &ProcessGroup, pass: u64) -> Result<()>;

    /// Blocks until the average is complete.
    fn wait(&mut self) -> Result<()>;

    /// Zeroes a part, unless the bucket is in flight.
    fn clear(&mut self, range: Range<usize>) {
        if let Some(elements) = self.elements_mut() {
            elements.clear(range);
        }
    }

    /// Copies a part of `from`, a bucket of the same type, to `at`, unless one of them is in
    /// flight.
    fn copy_from(&mut self, at: usize, from: &dyn Bucket, range: Range<usize>) {
        if let (Some(elements), Some(from)) = (self.elements_mut(), from.elements()) {
            elements.copy_from(at, from, range);
        }
    }

    /// Multiplies what is added to the next pass's gradients by `factor`.
    fn rescale(&mut self, _factor: f32) {}

    /// Returns the state that it keeps between passes; the default if none.
    fn memory(&self) -> BucketMemory {
        BucketMemory::default()
    }

    /// Restores the state of a bucket of the same parameters.
    fn set_memory(&mut self, memory: &BucketMemory) -> Result<()> {
        match *memory == BucketMemory::default() {
            true => Ok(()),
            false => Err(Error::InvalidArgument("the bucket has no PowerSGD memory".to_owned())),
        }
    }

    /// Returns its elements; `None` while it is in flight.
    fn elements(&self) -> Option<&dyn Elements>;

    /// Same as [`elements`](Self::elements).
    fn elements_mut(&mut self) -> Option<&mut dyn Elements>;
}

/// The elements of a bucket, of any type: a `SharedBuf`.
pub(super) trait Elements: Any {
    /// Zeroes a part.
    fn clear(&mut self, range: Range<usize>);

    /// Copies a part of a buffer of the same type to `at`.
    fn copy_from(&mut self, at: usize, from: &dyn Elements, range: Range<usize>);
}

impl<T: Gradient> Elements for SharedBuf<T> {
    fn clear(&mut self, range: Range<usize>) {
        self[range].fill(T::default());
    }

    fn copy_from(&mut self, at: usize, from: &dyn Elements, range: Range<usize>) {
        let from: &dyn Any = from;
        if let Some(from) = from.downcast_ref::<Self>() {
            copy_slice(&mut self[at..at + range.len()], &from[range]);
        }
    }
}

/// Allocates a zeroed bucket that is sent in the format of `hook`, through a device if `via` is
/// set. Every rank must call it in the same order.
pub(super) fn alloc(
    group: &ProcessGroup,
    #[cfg_attr(
        not(feature = "powersgd"),
        expect(unused_variables, reason = "only PowerSGD reads the parameters' rows")
    )]
    params: &[ParamInfo],
    spec: &BucketSpec,
    hook: &CommHook,
    via: Option<&Arc<Staging>>,
) -> Result<Box<dyn Bucket>> {
    let (dtype, count) = (spec.dtype, spec.count);
    match (hook, dtype) {
        (CommHook::Fp16Compress, DType::F32) => return Cast::<f16>::alloc(group, count, via),
        (CommHook::Bf16Compress, DType::F32) => return Cast::<bf16>::alloc(group, count, via),
        #[cfg(feature = "powersgd")]
        (CommHook::PowerSgd(options), DType::F32) if via.is_none() => {
            return Ok(Box::new(PowerSgdBucket::new(group, params, spec, options)?));
        }
        // A cast would not shrink 16-bit types.
        (CommHook::Fp16Compress | CommHook::Bf16Compress, DType::F16 | DType::Bf16)
        | (CommHook::AllReduce, _) => {}
        _ => {
            let through = if via.is_some() { " through a device" } else { "" };
            let what = format!("{dtype} gradients under {hook:?}{through}");
            return Err(Error::Unsupported { backend: "reducer", what });
        }
    }
    Ok(match dtype {
        DType::F16 => Box::new(Plain::<f16>::alloc(group, count, via)?),
        DType::Bf16 => Box::new(Plain::<bf16>::alloc(group, count, via)?),
        DType::F32 => Box::new(Plain::<f32>::alloc(group, count, via)?),
        DType::F64 => Box::new(Plain::<f64>::alloc(group, count, via)?),
        other => {
            let what = format!("{other} gradients");
            return Err(Error::Unsupported { backend: "reducer", what });
        }
    })
}

/// Returns the elements of `bucket`, if they are of type `T` and not in flight.
pub(super) fn slice<T: Element>(bucket: &dyn Bucket) -> Option<&[T]> {
    let elements: &dyn Any = bucket.elements()?;
    let buf: &SharedBuf<T> = elements.downcast_ref()?;
    Some(buf)
}

/// Returns the elements of `bucket`, if they are of type `T` and not in flight.
pub(super) fn slice_mut<T: Element>(bucket: &mut dyn Bucket) -> Option<&mut [T]> {
    let elements: &mut dyn Any = bucket.elements_mut()?;
    let buf: &mut SharedBuf<T> = elements.downcast_mut()?;
    Some(buf)
}

/// A bucket that is sent uncompressed.
#[derive(Debug)]
struct Plain<T> {
    data: Data<T>,
    /// Its copy on a device, if it is averaged there.
    staged: Option<StagedBuf>,
}

#[derive(Debug)]
enum Data<T> {
    Idle(SharedBuf<T>),
    InFlight(Work<SharedBuf<T>>),
    /// In flight on a device.
    OnDevice(SharedBuf<T>),
    /// An operation failed and kept the memory. The group is unusable from then on.
    Lost,
}

impl<T: Gradient> Plain<T> {
    fn alloc(group: &ProcessGroup, count: usize, staging: Option<&Arc<Staging>>) -> Result<Self> {
        let staged = staging.map(|staging| StagedBuf::new::<T>(staging, count)).transpose()?;
        Ok(Self { data: Data::Idle(group.alloc(count)?), staged })
    }

    fn buf_mut(&mut self) -> Option<&mut SharedBuf<T>> {
        if let Data::Idle(buf) = &mut self.data { Some(buf) } else { None }
    }
}

impl<T: Gradient> Bucket for Plain<T> {
    fn launch(&mut self, group: &ProcessGroup, _: u64) -> Result<()> {
        if group.world_size() == 1 {
            // Nothing to average; the communication thread would only add latency.
            return group.backend.health();
        }
        self.data = match (std::mem::replace(&mut self.data, Data::Lost), &mut self.staged) {
            (Data::Idle(buf), Some(staged)) => {
                staged.begin(&buf)?;
                Data::OnDevice(buf)
            }
            (Data::Idle(buf), None) => Data::InFlight(group.all_reduce_async(buf, ReduceOp::Avg)?),
            (other, _) => other,
        };
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.data = match (std::mem::replace(&mut self.data, Data::Lost), &mut self.staged) {
            (Data::InFlight(work), _) => Data::Idle(work.wait()?),
            (Data::OnDevice(mut buf), Some(staged)) => {
                staged.end(&mut buf)?;
                Data::Idle(buf)
            }
            (other, _) => other,
        };
        Ok(())
    }

    fn elements(&self) -> Option<&dyn Elements> {
        if let Data::Idle(buf) = &self.data { Some(buf) } else { None }
    }

    fn elements_mut(&mut self) -> Option<&mut dyn Elements> {
        let elements: &mut dyn Elements = self.buf_mut()?;
        Some(elements)
    }
}

/// A bucket of `f32` sent as `T`: rounded to nearest even, averaged in `f32`, rounded again.
#[derive(Debug)]
struct Cast<T> {
    buf: SharedBuf<f32>,
    wire: Plain<T>,
}

impl<T: Gradient> Cast<T>
where
    [T]: HalfFloatSliceExt,
{
    fn alloc(
        group: &ProcessGroup,
        count: usize,
        staging: Option<&Arc<Staging>>,
    ) -> Result<Box<dyn Bucket>> {
        let (buf, wire) = (group.alloc(count)?, Plain::alloc(group, count, staging)?);
        Ok(Box::new(Self { buf, wire }))
    }
}

impl<T: Gradient> Bucket for Cast<T>
where
    [T]: HalfFloatSliceExt,
{
    fn launch(&mut self, group: &ProcessGroup, pass: u64) -> Result<()> {
        if let Some(wire) = self.wire.buf_mut() {
            wire.convert_from_f32_slice(&self.buf);
        }
        self.wire.launch(group, pass)
    }

    fn wait(&mut self) -> Result<()> {
        self.wire.wait()?;
        if let Some(wire) = slice::<T>(&self.wire) {
            wire.convert_to_f32_slice(&mut self.buf);
        }
        Ok(())
    }

    fn elements(&self) -> Option<&dyn Elements> {
        let elements: &dyn Elements = &self.buf;
        self.wire.elements().map(|_| elements)
    }

    fn elements_mut(&mut self) -> Option<&mut dyn Elements> {
        let elements: &mut dyn Elements = &mut self.buf;
        self.wire.elements().map(|_| elements)
    }
}

#[cfg(test)]
pub(super) fn is_done<T: Element>(bucket: &dyn Bucket) -> bool {
    let any: &dyn Any = bucket;
    let slot = any.downcast_ref::<Plain<T>>();
    matches!(slot, Some(Plain { data: Data::InFlight(work), .. }) if work.is_done())
}
