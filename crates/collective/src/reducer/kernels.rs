//! What a [`DeviceReducer`] has others compute.
//!
//! The invariant is that of streams: whatever is put into the stream that is given finds the memory as
//! it is described, and nothing else uses it until the stream has come that far.

#![expect(unsafe_code, reason = "declares functions on addresses")]

use super::BucketPlan;
#[cfg(doc)]
use super::DeviceReducer;
use crate::{DeviceBuf, DeviceStream, Error, Result};

/// What a [`DeviceReducer`] has others compute, for it has no kernels; see
/// [there](DeviceReducer#where-the-kernels-come-from).
///
/// Each function puts its work into `stream` and returns without waiting for the device. An error
/// fails the reducer, and the group on all ranks. Those that are not implemented are
/// [`Error::Unsupported`] when needed, but for the epilogue, which does nothing.
pub trait BucketKernels {
    /// `sum[i] += term[i]`, rounded once per element; both of one type and length, apart.
    ///
    /// # Errors
    ///
    /// Any.
    ///
    /// # Safety
    ///
    /// Both are memory of the stream's device that nobody else uses until the stream has come this
    /// far.
    unsafe fn add(&mut self, sum: DeviceBuf, term: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _ = (sum, term, stream);
        Err(unsupported("gradients that are added up outside of their slots"))
    }

    /// `to[i] = from[i]`, rounded to nearest even; of the same length, apart.
    ///
    /// # Errors
    ///
    /// Any.
    ///
    /// # Safety
    ///
    /// As [`add`](Self::add).
    unsafe fn cast(&mut self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _ = (to, from, stream);
        Err(unsupported("compressed buckets"))
    }

    /// Told where the buckets are, in order of the plan: before the first pass, and when the plan
    /// changes, at the end of the first pass that is averaged.
    ///
    /// # Errors
    ///
    /// Any.
    fn laid_out(&mut self, plan: &BucketPlan, buckets: &[DeviceBuf]) -> Result<()> {
        let _ = (plan, buckets);
        Ok(())
    }

    /// The epilogue of a bucket: what is put into `stream` here finds it averaged, and comes before
    /// the next bucket. Once for each bucket in a pass that is averaged, in order.
    ///
    /// # Errors
    ///
    /// Any.
    ///
    /// # Safety
    ///
    /// As [`add`](Self::add).
    unsafe fn averaged(
        &mut self,
        bucket: usize,
        buf: DeviceBuf,
        stream: DeviceStream,
    ) -> Result<()> {
        let _ = (bucket, buf, stream);
        Ok(())
    }
}

/// No kernels: for gradients that are written into their [slots](DeviceReducer::slot) or cleared before
/// each pass, in buckets that travel as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoKernels;

impl BucketKernels for NoKernels {}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { backend: "reducer", what: format!("{what}: the kernels have none") }
}
