//! The unsafe part: variables' memory as slices, and `shim.cpp`.
//!
//! Invariants. A [`Variable`] is a leaf on the CPU, of f32, contiguous, not empty; its maker
//! vouches that nobody else touches its memory while it is lent. A hook in libtorch holds no
//! pointer to anything here, only a tag: it asks the thread that runs backward whether it waits for
//! that tag's gradient, so a variable may outlive its engine.

#![expect(unsafe_code, reason = "C++ is called, and calls back")]

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use fused_optim::{DType, Slice};
use runner::engine::SharedSink;
use runner::{Error, Result};
use tch::{Device, Kind, TchError, Tensor};

type Ready = extern "C" fn(tag: usize, gradient: *const f32, count: usize) -> Answer;

unsafe extern "C" {
    fn tch_engine_report(tensor: *const c_void, ready: Ready, tag: usize) -> c_int;
    // Safe with any numbers; it sets this thread's state and lets nothing out.
    safe fn tch_engine_autocast(on: c_int, f16: c_int);
}

/// As in `shim.cpp`.
#[repr(i32)]
enum Answer {
    Elsewhere,
    Taken,
    Refused,
}

/// A variable of a model, which can lend its memory.
pub(crate) struct Variable(Tensor);

impl Variable {
    /// Takes a handle of a variable called `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if it is not contiguous f32 in host memory, or empty.
    ///
    /// # Safety
    ///
    /// While a slice of [`lend`](Self::lend) lives, nobody else may read, write or free the
    /// tensor's memory.
    pub(crate) unsafe fn new(name: &str, tensor: Tensor) -> Result<Self> {
        let variable = Self(tensor);
        if !variable.is_plain() {
            return Err(Error::Engine(format!(
                "{name} is {:?}: parameters and buffers are contiguous f32 on the CPU, not empty",
                variable.0
            )));
        }
        Ok(variable)
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        self.0.size().iter().map(|&extent| extent as usize).collect()
    }

    fn is_plain(&self) -> bool {
        let Self(tensor) = self;
        tensor.device() == Device::Cpu
            && tensor.kind() == Kind::Float
            && tensor.is_contiguous()
            && tensor.numel() > 0
    }

    /// Forgets a gradient that somebody else's backward left.
    pub(crate) fn zero_grad(&mut self) {
        self.0.zero_grad();
    }

    /// The elements, row-major.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if the tensor was given other data, of another kind, since.
    pub(crate) fn lend(&mut self) -> Result<&mut [f32]> {
        if !self.is_plain() {
            return Err(Error::Engine(format!("a variable has become {:?}", self.0)));
        }
        let (data, count) = (self.0.data_ptr().cast::<f32>(), self.0.numel());
        // SAFETY: `is_plain` was just asked: `count` floats lie at `data` in host memory, one after
        // the other. `self.0` keeps them allocated, and `new`'s caller promised that they are ours
        // alone as long as `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, count) })
    }
}

/// Names for as many gradients, of which each is reported under its own from now on.
///
/// # Errors
///
/// [`Error::Engine`] if libtorch refuses a hook.
pub(crate) fn report(variables: &[Variable]) -> Result<Range<usize>> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = NEXT.fetch_add(variables.len(), Ordering::Relaxed);
    let tags = first..first + variables.len();
    for (tag, Variable(tensor)) in tags.clone().zip(variables) {
        let tensor = tensor.as_ptr().cast();
        // SAFETY: tch's handle is an `at::Tensor *`, alive as `variables` is borrowed; `ready` is
        // of the type that `shim.cpp` calls it as, and does not unwind; nothing is thrown out of
        // the call.
        if unsafe { tch_engine_report(tensor, ready, tag) } == 0 {
            return Err(Error::Engine("libtorch takes no hook for a variable".to_owned()));
        }
    }
    Ok(tags)
}

/// The backward pass that this thread is in.
struct Pass {
    tags: Range<usize>,
    sink: SharedSink,
    error: Option<Error>,
}

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

/// Runs backward from `loss`, and `sink` on each gradient of those `tags` as it becomes ready.
///
/// On the CPU libtorch runs backward on the thread that asks for it, so that is where `sink` is
/// called.
///
/// # Errors
///
/// The sink's, which stops backward, or [`Error::Engine`] with libtorch's.
pub(crate) fn backward(loss: &Tensor, tags: &Range<usize>, sink: &SharedSink) -> Result<()> {
    let pass = Pass { tags: tags.clone(), sink: sink.clone(), error: None };
    let outer = PASS.replace(Some(pass));
    let result = loss.f_backward();
    match PASS.replace(outer).and_then(|pass| pass.error) {
        Some(error) => Err(error),
        None => result.map_err(|e| failed("backward", &e)),
    }
}

extern "C" fn ready(tag: usize, gradient: *const f32, count: usize) -> Answer {
    let waits = PASS.with_borrow(|pass| {
        let pass = pass.as_ref().filter(|pass| pass.tags.contains(&tag))?;
        Some((pass.sink.clone(), tag - pass.tags.start))
    });
    let Some((sink, index)) = waits else { return Answer::Elsewhere };
    // SAFETY: `shim.cpp` calls this with a tensor's `count` floats that lie one after the other in
    // host memory, and holds that tensor until we return; `count` is a variable's, so there are
    // some.
    let gradient = unsafe { std::slice::from_raw_parts(gradient, count) };
    // A panic that unwinds into C++ would abort the process.
    let taken = catch_unwind(AssertUnwindSafe(|| sink.lock().ready(index, Slice::F32(gradient))));
    let error = match taken {
        Ok(Ok(())) => return Answer::Taken,
        Ok(Err(error)) => error,
        Err(_) => Error::Engine("what takes gradients panicked".to_owned()),
    };
    PASS.with_borrow_mut(|pass| {
        if let Some(pass) = pass {
            pass.error = Some(error);
        }
    });
    Answer::Refused
}

/// Autocast on the CPU, on this thread, until this is dropped.
pub(crate) struct Autocast;

impl Autocast {
    /// Lowers to `dtype`, f16 or bf16.
    pub(crate) fn on(dtype: DType) -> Self {
        tch_engine_autocast(1, c_int::from(dtype == DType::F16));
        Self
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        tch_engine_autocast(0, 0);
    }
}

pub(crate) fn failed(what: &str, error: &TchError) -> Error {
    Error::Engine(format!("{what}: {error}"))
}
