//! One bucket: shared memory that is either here or in flight.
//!
//! Buckets of different types stand in one list as `dyn Bucket`; typed access goes through
//! [`slice`] and [`slice_mut`], which give nothing for another type, or while the bucket is in
//! flight. A [`Slot`] travels as it is, on the host or through a device; [`Cast`] travels as 16-bit
//! numbers; `power_sgd.rs` has a third kind.

use std::any::Any;
use std::fmt::Debug;
use std::ops::{AddAssign, Range};
use std::sync::Arc;

use half::{bf16, f16};

use super::CommHook;
use super::detour::{Detour, Lane};
use super::plan::{BucketSpec, ParamInfo};
#[cfg(feature = "powersgd")]
use super::power_sgd::PowerSgdBucket;
use crate::copy::copy_slice;
use crate::{DType, Element, Error, ProcessGroup, ReduceOp, Result, SharedBuf, Work};

/// An [`Element`] that gradients are made of: `f16`, `bf16`, `f32` and `f64`.
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

/// What one bucket keeps of earlier passes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BucketMemory {
    /// PowerSGD's right factors, with which the next pass begins.
    pub q: Vec<f32>,
    /// What its approximations have left out, as long as the bucket; empty until there is some.
    pub error: Vec<f32>,
}

/// A bucket of any type.
pub(super) trait Bucket: Any + Debug + Send {
    /// Starts the average over all ranks, in the `pass`-th pass that averages, counted from 1.
    fn launch(&mut self, group: &ProcessGroup, pass: u64) -> Result<()>;

    /// Waits for the average.
    fn wait(&mut self) -> Result<()>;

    /// Sets a part to zero, unless the bucket is in flight.
    fn clear(&mut self, range: Range<usize>) {
        if let Some(home) = self.home_mut() {
            home.clear(range);
        }
    }

    /// Copies a part of `from`, a bucket of the same type, to `at`, unless one of them is in flight.
    fn copy_from(&mut self, at: usize, from: &dyn Bucket, range: Range<usize>) {
        if let (Some(home), Some(from)) = (self.home_mut(), from.home()) {
            home.copy_from(at, from, range);
        }
    }

    /// What it keeps from one pass to the next, if it does.
    fn memory(&self) -> BucketMemory {
        BucketMemory::default()
    }

    /// Goes on with another one's, of the same gradients.
    fn set_memory(&mut self, memory: &BucketMemory) -> Result<()> {
        match *memory == BucketMemory::default() {
            true => Ok(()),
            false => Err(Error::InvalidArgument("the reducer keeps no such memory".to_owned())),
        }
    }

    /// Its elements, unless it is in flight.
    fn home(&self) -> Option<&dyn Home>;

    /// As [`home`](Self::home).
    fn home_mut(&mut self) -> Option<&mut dyn Home>;
}

/// The elements of a bucket, of any type: a `SharedBuf`.
pub(super) trait Home: Any {
    /// Sets a part to zero.
    fn clear(&mut self, range: Range<usize>);

    /// Copies a part of others of the same type to `at`.
    fn copy_from(&mut self, at: usize, from: &dyn Home, range: Range<usize>);
}

impl<T: Gradient> Home for SharedBuf<T> {
    fn clear(&mut self, range: Range<usize>) {
        self[range].fill(T::default());
    }

    fn copy_from(&mut self, at: usize, from: &dyn Home, range: Range<usize>) {
        let from: &dyn Any = from;
        if let Some(from) = from.downcast_ref::<Self>() {
            copy_slice(&mut self[at..at + range.len()], &from[range]);
        }
    }
}

/// Allocates a bucket of zeros that travels as `hook` says, through a device if there is a lane; every
/// rank must call it in the same order.
pub(super) fn alloc(
    group: &ProcessGroup,
    #[cfg_attr(
        not(feature = "powersgd"),
        expect(unused_variables, reason = "PowerSGD asks for rows")
    )]
    params: &[ParamInfo],
    spec: &BucketSpec,
    hook: &CommHook,
    lane: Option<&Arc<Lane>>,
) -> Result<Box<dyn Bucket>> {
    let (dtype, count) = (spec.dtype, spec.count);
    match (hook, dtype) {
        (CommHook::Fp16Compress, DType::F32) => return Cast::<f16>::alloc(group, count, lane),
        (CommHook::Bf16Compress, DType::F32) => return Cast::<bf16>::alloc(group, count, lane),
        #[cfg(feature = "powersgd")]
        (CommHook::PowerSgd(options), DType::F32) if lane.is_none() => {
            return Ok(Box::new(PowerSgdBucket::new(group, params, spec, options)?));
        }
        // What has 16 bits is not made smaller by a cast.
        (CommHook::Fp16Compress | CommHook::Bf16Compress, DType::F16 | DType::Bf16)
        | (CommHook::AllReduce, _) => {}
        _ => {
            let through = if lane.is_some() { " through a device" } else { "" };
            let what = format!("{dtype} gradients under {hook:?}{through}");
            return Err(Error::Unsupported { backend: "reducer", what });
        }
    }
    Ok(match dtype {
        DType::F16 => Box::new(Slot::<f16>::alloc(group, count, lane)?),
        DType::Bf16 => Box::new(Slot::<bf16>::alloc(group, count, lane)?),
        DType::F32 => Box::new(Slot::<f32>::alloc(group, count, lane)?),
        DType::F64 => Box::new(Slot::<f64>::alloc(group, count, lane)?),
        other => {
            let what = format!("{other} gradients");
            return Err(Error::Unsupported { backend: "reducer", what });
        }
    })
}

/// The elements of `bucket`, if they are of type `T` and here.
pub(super) fn slice<T: Element>(bucket: &dyn Bucket) -> Option<&[T]> {
    let home: &dyn Any = bucket.home()?;
    let buf: &SharedBuf<T> = home.downcast_ref()?;
    Some(buf)
}

/// The elements of `bucket`, if they are of type `T` and here.
pub(super) fn slice_mut<T: Element>(bucket: &mut dyn Bucket) -> Option<&mut [T]> {
    let home: &mut dyn Any = bucket.home_mut()?;
    let buf: &mut SharedBuf<T> = home.downcast_mut()?;
    Some(buf)
}

/// A bucket that travels as it is.
#[derive(Debug)]
struct Slot<T> {
    at: At<T>,
    /// Its way, if that is not the group's own for memory of the host.
    detour: Option<Detour>,
}

#[derive(Debug)]
enum At<T> {
    Here(SharedBuf<T>),
    Flying(Work<SharedBuf<T>>),
    /// Its numbers are on a device.
    Away(SharedBuf<T>),
    /// An operation failed and kept the memory. The group is unusable from then on.
    Lost,
}

impl<T: Gradient> Slot<T> {
    fn alloc(group: &ProcessGroup, count: usize, lane: Option<&Arc<Lane>>) -> Result<Self> {
        let detour = lane.map(|lane| Detour::new::<T>(lane, count)).transpose()?;
        Ok(Self { at: At::Here(group.alloc(count)?), detour })
    }

    fn here_mut(&mut self) -> Option<&mut SharedBuf<T>> {
        match &mut self.at {
            At::Here(buf) => Some(buf),
            At::Flying(_) | At::Away(_) | At::Lost => None,
        }
    }
}

impl<T: Gradient> Bucket for Slot<T> {
    fn launch(&mut self, group: &ProcessGroup, _: u64) -> Result<()> {
        if group.world_size() == 1 {
            // The average is here; the way through another thread would cost far more than it.
            return group.backend.health();
        }
        self.at = match (std::mem::replace(&mut self.at, At::Lost), &mut self.detour) {
            (At::Here(buf), Some(detour)) => {
                detour.begin(&buf)?;
                At::Away(buf)
            }
            (At::Here(buf), None) => At::Flying(group.all_reduce_async(buf, ReduceOp::Avg)?),
            (other, _) => other,
        };
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.at = match (std::mem::replace(&mut self.at, At::Lost), &mut self.detour) {
            (At::Flying(work), _) => At::Here(work.wait()?),
            (At::Away(mut buf), Some(detour)) => {
                detour.end(&mut buf)?;
                At::Here(buf)
            }
            (other, _) => other,
        };
        Ok(())
    }

    fn home(&self) -> Option<&dyn Home> {
        match &self.at {
            At::Here(buf) => Some(buf),
            At::Flying(_) | At::Away(_) | At::Lost => None,
        }
    }

    fn home_mut(&mut self) -> Option<&mut dyn Home> {
        let home: &mut dyn Home = self.here_mut()?;
        Some(home)
    }
}

/// A bucket of `f32` that travels as `T`: rounded to nearest even, averaged in `f32`, rounded again.
#[derive(Debug)]
struct Cast<T> {
    buf: SharedBuf<f32>,
    wire: Slot<T>,
}

impl<T: Half> Cast<T> {
    fn alloc(
        group: &ProcessGroup,
        count: usize,
        lane: Option<&Arc<Lane>>,
    ) -> Result<Box<dyn Bucket>> {
        let (buf, wire) = (group.alloc(count)?, Slot::alloc(group, count, lane)?);
        Ok(Box::new(Self { buf, wire }))
    }
}

impl<T: Half> Bucket for Cast<T> {
    fn launch(&mut self, group: &ProcessGroup, pass: u64) -> Result<()> {
        if let Some(wire) = self.wire.here_mut() {
            wire.iter_mut().zip(&*self.buf).for_each(|(half, wide)| *half = T::narrow(*wide));
        }
        self.wire.launch(group, pass)
    }

    fn wait(&mut self) -> Result<()> {
        self.wire.wait()?;
        if let Some(wire) = slice::<T>(&self.wire) {
            self.buf.iter_mut().zip(wire).for_each(|(wide, half)| *wide = half.widen());
        }
        Ok(())
    }

    fn home(&self) -> Option<&dyn Home> {
        let home: &dyn Home = &self.buf;
        self.wire.home().map(|_| home)
    }

    fn home_mut(&mut self) -> Option<&mut dyn Home> {
        let home: &mut dyn Home = &mut self.buf;
        self.wire.home().map(|_| home)
    }
}

/// What [`Cast`] can travel as.
trait Half: Gradient {
    fn narrow(wide: f32) -> Self;
    fn widen(self) -> f32;
}

macro_rules! halves {
    ($($type:ty)*) => {$(
        impl Half for $type {
            fn narrow(wide: f32) -> Self {
                Self::from_f32(wide)
            }

            fn widen(self) -> f32 {
                self.to_f32()
            }
        }
    )*};
}

halves!(f16 bf16);

#[cfg(test)]
pub(super) fn is_done<T: Element>(bucket: &dyn Bucket) -> bool {
    let any: &dyn Any = bucket;
    let slot = any.downcast_ref::<Slot<T>>();
    matches!(slot, Some(Slot { at: At::Flying(work), .. }) if work.is_done())
}
