//! The unsafe part: variables' memory as slices, and `shim.cpp`.
//!
//! Invariants. A [`Variable`] is a leaf on the CPU, of f32, contiguous, not empty; its maker
//! vouches that nobody else touches its memory while it is lent. Hooks in libtorch, which point to
//! the stack of [`backward`], are gone when it returns.

#![expect(unsafe_code, reason = "C++ is called, and calls back")]

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use tch::{Device, Kind, TchError, Tensor};
use train_step::fused_optim::{DType, Slice};
use train_step::{Error, Result, SharedSink};

type Ready = unsafe extern "C" fn(*mut c_void, usize, *const f32, usize) -> c_int;

unsafe extern "C" {
    fn tch_engine_hook(
        tensor: *const c_void,
        ready: Option<Ready>,
        pass: *mut c_void,
        index: usize,
    ) -> c_int;
    // Safe with any numbers; it sets this thread's state and lets nothing out.
    safe fn tch_engine_autocast(on: c_int, f16: c_int);
}

/// A variable of a model, which can lend its memory.
pub(crate) struct Variable(Tensor);

impl Variable {
    /// Takes a handle of a variable called `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if it is not contiguous f32 in host memory, or empty.
    ///
    /// # Safety
    ///
    /// While a slice of [`lend`](Self::lend) lives, nobody else may read, write or free the
    /// tensor's memory; while [`backward`] runs, no other thread may run backward to it.
    pub(crate) unsafe fn new(name: &str, tensor: Tensor) -> Result<Self> {
        let variable = Self(tensor);
        if !variable.is_plain() {
            let (is, wanted) = (&variable.0, "contiguous f32 on the CPU, not empty");
            return Err(Error::model(format!("{name} is {is:?}: variables have to be {wanted}")));
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

    /// The elements, row-major.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if the tensor was given other data, of another kind, since.
    pub(crate) fn lend(&mut self) -> Result<&mut [f32]> {
        if !self.is_plain() {
            return Err(Error::model(format!("a variable has become {:?}", self.0)));
        }
        let (data, count) = (self.0.data_ptr().cast::<f32>(), self.0.numel());
        // SAFETY: `is_plain` was just asked: `count` floats lie at `data` in host memory, one after
        // the other. `self.0` keeps them allocated, and `new`'s caller promised that they are ours
        // alone as long as `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, count) })
    }

    /// Has each gradient reported to a [`Pass`]; without `ready`, no longer.
    fn hook(&self, ready: Option<Ready>, pass: *mut c_void, index: usize) -> Result<()> {
        // SAFETY: tch's handle is an `at::Tensor *`, alive as `self` is borrowed; `ready` is of the
        // type that `shim.cpp` calls it as, and does not unwind; nothing is thrown out of the call.
        match unsafe { tch_engine_hook(self.0.as_ptr().cast(), ready, pass, index) } {
            0 => Err(Error::model("libtorch takes no hook for a variable")),
            _ => Ok(()),
        }
    }
}

/// A backward pass.
struct Pass<'a> {
    sink: &'a SharedSink,
    error: Option<Error>,
}

/// Runs backward from `loss`, and `sink` on each gradient of `params` as it becomes ready.
///
/// On the CPU libtorch runs backward on the thread that asks for it, so that is where `sink` is
/// called.
///
/// # Errors
///
/// The sink's, which stops backward, or [`Error::Model`] with libtorch's.
pub(crate) fn backward(loss: &Tensor, params: &mut [Variable], sink: &SharedSink) -> Result<()> {
    let mut pass = Pass { sink, error: None };
    let to: *mut c_void = (&raw mut pass).cast();
    // Forgets gradients that somebody else's backward left.
    params.iter_mut().for_each(|param| param.0.zero_grad());
    let mut each = params.iter().enumerate();
    let hooked = each.try_for_each(|(index, param)| param.hook(Some(ready), to, index));
    let result = hooked.and_then(|()| loss.f_backward().map_err(|e| failed("backward", &e)));
    let left = params.iter().try_for_each(|param| param.hook(None, null_mut(), 0));
    // They would point to `pass`. Taking a hook away allocates nothing.
    left.expect("a hook can be taken away");
    pass.error.map_or(result, Err)
}

/// Reports the gradient of parameter `index`.
///
/// # Safety
///
/// `pass` is the one that [`backward`] has, and nobody else uses it meanwhile; `count` floats, more
/// than 0, lie at `gradient`.
unsafe extern "C" fn ready(
    pass: *mut c_void,
    index: usize,
    gradient: *const f32,
    count: usize,
) -> c_int {
    // SAFETY: the caller promises it.
    let pass = unsafe { &mut *pass.cast::<Pass<'_>>() };
    // SAFETY: the caller promises it.
    let gradient = Slice::F32(unsafe { std::slice::from_raw_parts(gradient, count) });
    // A panic that unwinds into C++ would abort the process.
    let taken = catch_unwind(AssertUnwindSafe(|| pass.sink.lock().ready(index, gradient)));
    pass.error = match taken {
        Ok(taken) => taken.err(),
        Err(_) => Some(Error::model("the receiver of a gradient panicked")),
    };
    c_int::from(pass.error.is_none())
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
    Error::model(format!("{what}: {error}"))
}
