//! Kernels that the caller of a [`DeviceReducer`] provides.
//!
//! Invariant, as for streams: work enqueued into the given stream finds the memory as described,
//! and nothing else uses that memory until the stream has executed it.

#![expect(unsafe_code, reason = "declares functions on addresses")]

use super::BucketPlan;
#[cfg(doc)]
use super::DeviceReducer;
use crate::{DeviceBuf, DeviceStream, Error, Result};

/// Kernels for a [`DeviceReducer`], which has none of its own; see
/// [there](DeviceReducer#where-the-kernels-come-from).
///
/// Each function enqueues its work into `stream` and returns without waiting for the device. An
/// error fails the reducer, and the group on all ranks. The defaults return [`Error::Unsupported`],
/// except for the epilogue and `laid_out`, which do nothing.
pub trait BucketKernels {
    /// `sum[i] += term[i]`, rounded once per element; both of the same type and length, not
    /// overlapping.
    ///
    /// # Errors
    ///
    /// Any.
    ///
    /// # Safety
    ///
    /// Both are memory of the stream's device that nothing else uses until the stream has executed
    /// this.
    unsafe fn add(&mut self, sum: DeviceBuf, term: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _ = (sum, term, stream);
        Err(unsupported("adding gradients that are outside of their slots"))
    }

    /// `to[i] = from[i]`, rounded to nearest even; of the same length, not overlapping.
    ///
    /// # Errors
    ///
    /// Any.
    ///
    /// # Safety
    ///
    /// Same as [`add`](Self::add).
    unsafe fn cast(&mut self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        let _ = (to, from, stream);
        Err(unsupported("compressed buckets"))
    }

    /// Called with the buckets' memory, in the order of the plan: before the first pass, and when
    /// the plan changes, at the end of the first averaged pass.
    ///
    /// # Errors
    ///
    /// Any.
    fn laid_out(&mut self, plan: &BucketPlan, buckets: &[DeviceBuf]) -> Result<()> {
        let _ = (plan, buckets);
        Ok(())
    }

    /// The epilogue of a bucket: work enqueued into `stream` here runs after the bucket is averaged
    /// and before the next bucket. Called once for each bucket of an averaged pass, in order.
    ///
    /// # Errors
    ///
    /// Any.
    ///
    /// # Safety
    ///
    /// Same as [`add`](Self::add).
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

/// No kernels: for gradients that are written into their [slots](DeviceReducer::slot) or cleared
/// before each pass, with uncompressed buckets.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoKernels;

impl BucketKernels for NoKernels {}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { backend: "reducer", what: format!("{what}: no kernel provided") }
}
