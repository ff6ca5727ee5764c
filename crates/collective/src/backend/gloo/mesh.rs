//! A safe interface to gloo's connections and buffers, with `Result`s.
//!
//! Invariant: a [`Buffer`] is freed before its memory and before its [`Mesh`]; after that gloo no longer accesses the
//! memory. A `Buffer` is never leaked, because it never leaves this backend.

use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::marker::PhantomData;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Duration;

use super::sys;
use crate::backend::core::Direction;
use crate::span::Span;
use crate::{DType, Rank, ReduceOp, simd};

/// Error of a gloo call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GlooError {
    /// A connection failed.
    Io(String),
    /// Timed out waiting for this peer, or `should_continue` returned false while a collective waited for it.
    Late(Rank),
    /// Any other error.
    Refused(String),
}

impl From<GlooError> for std::io::Error {
    fn from(error: GlooError) -> Self {
        Self::other(match error {
            GlooError::Io(text) | GlooError::Refused(text) => text,
            GlooError::Late(rank) => format!("timed out waiting for rank {rank}"),
        })
    }
}

type Result<T> = std::result::Result<T, GlooError>;

/// Connections to all peers, and the gloo thread that serves them.
#[derive(Debug)]
pub(super) struct Mesh(NonNull<sys::Mesh>);

// SAFETY: gloo locks its contexts and pairs, which are designed for use concurrently with the device's thread.
unsafe impl Send for Mesh {}
// SAFETY: as for `Send`. The only unlocked field, the current collective, is used only by `reduce`, which the backend
// calls under its lock.
unsafe impl Sync for Mesh {}

impl Mesh {
    /// Creates a mesh that listens for every peer at an address of this machine. Connecting to a peer times out after
    /// `timeout`.
    pub(super) fn new(
        address: IpAddr,
        rank: Rank,
        world: usize,
        timeout: Duration,
    ) -> Result<Self> {
        let address = CString::new(address.to_string()).expect("an address has no NUL byte");
        let mut out = null_mut();
        let (rank, world, millis) = (narrow(rank), narrow(world), millis(timeout));
        // SAFETY: a NUL-terminated string, and a valid out pointer.
        check(unsafe {
            sys::gloo_shim_mesh_new(address.as_ptr(), rank, world, millis, &raw mut out)
        })?;
        Ok(Self(made(out)))
    }

    /// Returns the address to which a peer must connect.
    pub(super) fn address(&self, peer: Rank) -> Result<Vec<u8>> {
        // Gloo's `Address::kMaxByteSize`, transport/address.h.
        let (mut bytes, mut len) = (vec![0; 192], 0);
        let (out, capacity) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: `capacity` writable bytes, and a valid pointer for their number.
        let code = unsafe {
            sys::gloo_shim_mesh_address(self.0.as_ptr(), narrow(peer), out, capacity, &raw mut len)
        };
        check(code)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Connects to the peer at `address`; blocks until the peer has connected, too.
    pub(super) fn connect(&self, peer: Rank, address: &[u8]) -> Result<()> {
        let raw = self.0.as_ptr();
        // SAFETY: `address` is readable for its length. Gloo rejects an invalid address.
        check(unsafe {
            sys::gloo_shim_mesh_connect(raw, narrow(peer), address.as_ptr(), address.len())
        })
    }

    /// Runs gloo's all-reduce, or its reduce if there is a root; blocks. `memory` holds the result on ranks that get
    /// one, and is overwritten on all ranks. Calls the job's `should_continue` every millisecond.
    ///
    /// Only one call at a time per mesh.
    ///
    /// # Panics
    ///
    /// If a fold or `should_continue` panics.
    pub(super) fn reduce(
        &self,
        memory: Span<'_>,
        root: Option<Rank>,
        job: &Job<'_>,
        tag: u32,
        timeout: Duration,
    ) -> Result<()> {
        let mut reduction = sys::Reduction {
            count: memory.len() / job.dtype.size(),
            element_bytes: job.dtype.size(),
            tag,
            timeout_ms: millis(timeout),
            fold,
            check: should_stop,
            arg: (&raw const *job).cast_mut().cast(),
            peer: -1,
        };
        let (mesh, bytes) = (self.0.as_ptr(), memory.ptr().cast());
        let code = match root {
            // SAFETY: `memory` holds `count` elements and only this call uses it; `job` outlives it.
            None => unsafe { sys::gloo_shim_all_reduce(mesh, bytes, &raw mut reduction) },
            // SAFETY: as above.
            Some(root) => unsafe {
                sys::gloo_shim_reduce(mesh, bytes, narrow(root), &raw mut reduction)
            },
        };
        if let Some(panic) = job.panic.take() {
            resume_unwind(panic);
        }
        check(code).map_err(|error| match (error, Rank::try_from(reduction.peer)) {
            (GlooError::Late(_), Ok(peer)) => GlooError::Late(peer),
            (error, _) => error,
        })
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and every buffer of it holds an `Arc` of it.
        unsafe { sys::gloo_shim_mesh_free(self.0.as_ptr()) };
    }
}

/// The callbacks of one of gloo's collectives.
pub(super) struct Job<'a> {
    dtype: DType,
    op: ReduceOp,
    should_continue: &'a dyn Fn() -> bool,
    /// A panic of a callback, which must not unwind through gloo.
    panic: Cell<Option<Box<dyn Any + Send>>>,
}

impl<'a> Job<'a> {
    /// Creates a job that folds with `op` and continues while `should_continue` returns true.
    pub(super) fn new(dtype: DType, op: ReduceOp, should_continue: &'a dyn Fn() -> bool) -> Self {
        Self { dtype, op, should_continue, panic: Cell::new(None) }
    }

    /// Calls `body`, unless a callback has panicked before; catches a panic.
    fn guard<T>(&self, otherwise: T, body: impl FnOnce() -> T) -> T {
        let panic = self.panic.take();
        if panic.is_some() {
            self.panic.set(panic);
            return otherwise;
        }
        // After a panic nothing reads the state that `body` has changed.
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
            self.panic.set(Some(panic));
            otherwise
        })
    }
}

/// Folds two ranks' numbers, as in every other backend; gloo's own functions support neither bf16
/// nor the rules for NaN.
extern "C" fn fold(
    job: *mut c_void,
    out: *mut c_void,
    a: *const c_void,
    b: *const c_void,
    count: usize,
) {
    // SAFETY: the `Job` that `Mesh::reduce` passed, borrowed until gloo returns.
    let job = unsafe { &*job.cast::<Job<'_>>() };
    let len = count * job.dtype.size();
    // SAFETY: gloo passes `count` elements in its own or the caller's memory.
    let out = unsafe { Span::new(out.cast(), len) };
    // SAFETY: as above; only read.
    let a = unsafe { Span::new(a.cast_mut().cast(), len) };
    // SAFETY: as above; only read.
    let b = unsafe { Span::new(b.cast_mut().cast(), len) };
    job.guard((), || simd::fold(job.dtype, job.op, &[out], &[a, b]));
}

extern "C" fn should_stop(job: *mut c_void) -> c_int {
    // SAFETY: the `Job` that `Mesh::reduce` passed, borrowed until gloo returns.
    let job = unsafe { &*job.cast::<Job<'_>>() };
    c_int::from(!job.guard(false, || (job.should_continue)()))
}

/// Memory from which messages are sent or into which they are received.
#[derive(Debug)]
pub(super) struct Buffer<'a> {
    raw: NonNull<sys::Buffer>,
    _mesh: Arc<Mesh>,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: gloo locks its buffers, which its device's thread also uses.
unsafe impl Send for Buffer<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Buffer<'_> {}

impl<'a> Buffer<'a> {
    pub(super) fn new(mesh: &Arc<Mesh>, memory: Span<'a>) -> Result<Self> {
        let mut out = null_mut();
        let (raw, ptr) = (mesh.0.as_ptr(), memory.ptr().cast());
        // SAFETY: the span's memory lives for 'a, and this buffer does not outlive 'a.
        check(unsafe { sys::gloo_shim_buffer_new(raw, ptr, memory.len(), &raw mut out) })?;
        Ok(Self { raw: made(out), _mesh: Arc::clone(mesh), memory: PhantomData })
    }

    /// Starts to send or receive a part of the memory.
    pub(super) fn start(
        &self,
        direction: Direction,
        peer: Rank,
        slot: u64,
        (offset, len): (usize, usize),
    ) -> Result<()> {
        let (raw, peer) = (self.raw.as_ptr(), narrow(peer));
        check(match direction {
            // SAFETY: gloo checks the part against the buffer.
            Direction::Send => unsafe { sys::gloo_shim_send(raw, peer, slot, offset, len) },
            // SAFETY: as above.
            Direction::Receive => unsafe { sys::gloo_shim_receive(raw, peer, slot, offset, len) },
        })
    }

    /// Waits at most `time` until one message is complete; returns whether one is.
    pub(super) fn take(&self, direction: Direction, time: Duration) -> Result<bool> {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let received = c_int::from(direction == Direction::Receive);
        // SAFETY: `raw` is valid while `self` lives.
        match unsafe { sys::gloo_shim_wait(self.raw.as_ptr(), received, micros) } {
            sys::PENDING => Ok(false),
            code => check(code).map(|()| true),
        }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`. Waits until gloo's thread no longer uses the memory.
        unsafe { sys::gloo_shim_buffer_free(self.raw.as_ptr()) };
    }
}

fn made<T>(raw: *mut T) -> NonNull<T> {
    NonNull::new(raw).expect("the shim returns a pointer on success")
}

fn check(code: c_int) -> Result<()> {
    if code == sys::OK {
        return Ok(());
    }
    // SAFETY: a NUL-terminated string that stays valid until this thread's next failure.
    let text = unsafe { CStr::from_ptr(sys::gloo_shim_error()) };
    let text = text.to_string_lossy().into_owned();
    Err(match code {
        sys::IO => GlooError::Io(text),
        sys::STOPPED | sys::LATE => GlooError::Late(Rank::MAX),
        _ => GlooError::Refused(text),
    })
}

fn narrow(rank: Rank) -> c_int {
    c_int::try_from(rank).expect("a group has at most MAX_RANKS ranks")
}

/// Converts a timeout to milliseconds, at most a week, so that gloo's conversions do not overflow.
fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).min(7 * 24 * 3600 * 1000)
}
