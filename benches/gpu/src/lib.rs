//! A C interface to our kernels, so that `times.py` and `nccl.py` can call them by ctypes beside
//! PyTorch's: in one process, on the same tensors, on PyTorch's stream.
//!
//! Every function returns 0, or -1 and sets the text of `gpu_error`. Types are 0 f32, 1 f16, 2
//! bf16. Optimizers are selected by name, see `rules`.

#![cfg(feature = "cuda")]
#![expect(unsafe_code, reason = "an interface for C")]

pub mod reduce;
pub mod reducer_step;
pub mod rules;

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::slice;

use fused_optim::cuda::{DType, DeviceParam, DeviceSlice, Gpu, LossScale};
use fused_optim::{Clip, FoundInf, ParamMut, Slice, SliceMut, StepCtl};
use half::{bf16, f16};

use rules::Any;

/// Errors become text.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// The error of the last failed call on this thread, valid until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_error() -> *const c_char {
    ERROR.with_borrow(|error| error.as_ptr())
}

fn status(call: impl FnOnce() -> Result<()>) -> c_int {
    let Err(error) = call() else { return 0 };
    let text = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
    ERROR.set(text);
    -1
}

/// A session, created by [`gpu_open`].
#[derive(Debug)]
pub struct Session {
    optim: Gpu,
    optimizer: Option<Any>,
}

/// Creates a session on a stream of device 0 and writes its pointer.
///
/// # Safety
///
/// `stream` must be a stream of the primary context, or null, and outlive the session; `session`
/// must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_open(stream: *mut c_void, session: *mut *mut Session) -> c_int {
    let open = || {
        // SAFETY: the caller guarantees the stream.
        let optim = unsafe { Gpu::with_stream(0, stream) }?;
        let made = Box::new(Session { optim, optimizer: None });
        // SAFETY: the caller guarantees that the pointer is writable.
        unsafe { session.write(Box::into_raw(made)) };
        Ok(())
    };
    status(open)
}

/// Creates an optimizer for `count` tensors and binds them.
///
/// # Safety
///
/// A valid session; `rule` is a C string; `weights`, `grads` and `lens` have `count` elements, the
/// device addresses and lengths of tensors of these types, which must stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_optimizer(
    session: *mut Session,
    rule: *const c_char,
    count: usize,
    weights: *const u64,
    grads: *const u64,
    lens: *const u64,
    weight_type: c_int,
    grad_type: c_int,
) -> c_int {
    // SAFETY: the caller's session, which nothing else uses meanwhile.
    let session = unsafe { &mut *session };
    // SAFETY: the caller's C string.
    let rule = unsafe { CStr::from_ptr(rule) };
    // SAFETY: the caller guarantees `count` numbers, also below.
    let weights = unsafe { slice::from_raw_parts(weights, count) };
    // SAFETY: as above.
    let grads = unsafe { slice::from_raw_parts(grads, count) };
    // SAFETY: as above.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let make = || {
        let mut optimizer = Any::new(rule.to_str()?, session.optim.clone(), count)?;
        let (weight_type, grad_type) = (dtype(weight_type)?, dtype(grad_type)?);
        let params: Vec<DeviceParam> = (0..count)
            .map(|i| {
                let len = lens[i] as usize;
                let weight = DeviceSlice { ptr: weights[i], len, dtype: weight_type };
                let grad = DeviceSlice { ptr: grads[i], len, dtype: grad_type };
                DeviceParam::new(weight, Some(grad))
            })
            .collect();
        // SAFETY: the caller guarantees the tensors.
        unsafe { optimizer.bind(&params) }?;
        session.optimizer = Some(optimizer);
        Ok(())
    };
    status(make)
}

/// Sets a loss scale on the device.
///
/// # Safety
///
/// A valid session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_loss_scale(session: *mut Session, scale: f32) -> c_int {
    // SAFETY: the caller's session, which nothing else uses meanwhile.
    let session = unsafe { &mut *session };
    let set = || {
        let optimizer = session.optimizer.as_mut().ok_or("no optimizer")?;
        let scale = LossScale { scale, ..Default::default() };
        Ok(optimizer.set_loss_scale(Some(scale))?)
    };
    status(set)
}

/// Runs a step; `max_norm` below 0 means no clipping.
///
/// # Safety
///
/// A valid session; its bound tensors must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_step(
    session: *mut Session,
    grad_scale: f32,
    check: c_int,
    max_norm: f64,
) -> c_int {
    // SAFETY: the caller's session, which nothing else uses meanwhile.
    let session = unsafe { &mut *session };
    let step = || {
        let optimizer = session.optimizer.as_mut().ok_or("no optimizer")?;
        // SAFETY: the caller guarantees the tensors.
        Ok(unsafe { optimizer.step(&ctl(grad_scale, check, max_norm)) }?)
    };
    status(step)
}

fn ctl(grad_scale: f32, check: c_int, max_norm: f64) -> StepCtl {
    let found_inf = if check == 0 { FoundInf::Known(false) } else { FoundInf::Check };
    let clip = (max_norm >= 0.0).then(|| Clip::norm(max_norm));
    StepCtl { grad_scale, found_inf, clip }
}

/// Runs `steps` steps of the same optimizer on the CPU from initial state, in place, on host
/// memory.
///
/// # Safety
///
/// As [`gpu_optimizer`], with host addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_reference(
    rule: *const c_char,
    steps: usize,
    count: usize,
    weights: *const u64,
    grads: *const u64,
    lens: *const u64,
    weight_type: c_int,
    grad_type: c_int,
    grad_scale: f32,
    check: c_int,
    max_norm: f64,
) -> c_int {
    // SAFETY: the caller's C string.
    let rule = unsafe { CStr::from_ptr(rule) };
    // SAFETY: the caller guarantees `count` numbers, also below.
    let weights = unsafe { slice::from_raw_parts(weights, count) };
    // SAFETY: as above.
    let grads = unsafe { slice::from_raw_parts(grads, count) };
    // SAFETY: as above.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let run = || {
        let mut optimizer = rules::on_cpu(rule.to_str()?, count)?;
        let (weight_type, grad_type) = (dtype(weight_type)?, dtype(grad_type)?);
        for _ in 0..steps {
            let mut params = Vec::new();
            for i in 0..count {
                let len = lens[i] as usize;
                // SAFETY: the caller's tensors of this type and length.
                let weight = unsafe { host(weights[i], len, weight_type) };
                // SAFETY: as above; nothing writes it.
                let grad = match unsafe { host(grads[i], len, grad_type) } {
                    SliceMut::F32(s) => Slice::F32(s),
                    SliceMut::F16(s) => Slice::F16(s),
                    SliceMut::Bf16(s) => Slice::Bf16(s),
                };
                params.push(ParamMut::new(weight, Some(grad)));
            }
            let _ = optimizer.step(&mut params, &ctl(grad_scale, check, max_norm))?;
        }
        Ok(())
    };
    status(run)
}

/// # Safety
///
/// `len` elements of this type must be valid at this address, and not be used elsewhere.
unsafe fn host<'a>(address: u64, len: usize, dtype: DType) -> SliceMut<'a> {
    // PyTorch's empty tensors have a null address.
    let at = match len {
        0 => std::ptr::NonNull::<u64>::dangling().as_ptr().cast(),
        _ => std::ptr::with_exposed_provenance_mut::<c_void>(address as usize),
    };
    match dtype {
        // SAFETY: guaranteed by the caller.
        DType::F32 => SliceMut::F32(unsafe { slice::from_raw_parts_mut(at.cast(), len) }),
        // SAFETY: guaranteed by the caller; every two bytes are a valid f16.
        DType::F16 => SliceMut::F16(unsafe { slice::from_raw_parts_mut(at.cast::<f16>(), len) }),
        // SAFETY: as above.
        DType::Bf16 => SliceMut::Bf16(unsafe { slice::from_raw_parts_mut(at.cast::<bf16>(), len) }),
    }
}

/// Casts `len` elements.
///
/// # Safety
///
/// A valid session; the device addresses of `len` elements of these types, which do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_cast(
    session: *mut Session,
    from: u64,
    from_type: c_int,
    to: u64,
    to_type: c_int,
    len: usize,
) -> c_int {
    // SAFETY: the caller's session, which nothing else uses meanwhile.
    let session = unsafe { &*session };
    let slice =
        |ptr, number| Ok::<_, Box<dyn Error>>(DeviceSlice { ptr, len, dtype: dtype(number)? });
    let cast = || {
        let (from, to) = (slice(from, from_type)?, slice(to, to_type)?);
        // SAFETY: the caller guarantees both.
        Ok(unsafe { amp::cuda::cast(&session.optim, from, to) }?)
    };
    status(cast)
}

fn dtype(number: c_int) -> Result<DType> {
    match number {
        0 => Ok(DType::F32),
        1 => Ok(DType::F16),
        2 => Ok(DType::Bf16),
        _ => Err("no such type".into()),
    }
}
