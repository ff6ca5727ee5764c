//! Our kernels with a C interface, so that `bench.py` can call them by ctypes beside PyTorch's: in one
//! process, on the same tensors, on PyTorch's stream.
//!
//! Every function gives 0, or -1 and leaves the reason to `gpu_error`. Types are 0 f32, 1 f16, 2 bf16.
//! Rules are by name, see `rules`.

#![cfg(feature = "cuda")]
#![expect(unsafe_code, reason = "an interface for C")]

pub mod joined;
pub mod reduce;
pub mod rules;

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::slice;

use amp::cuda::CudaScaler;
use amp::{LossScaler, LossScalerOptions};
use fused_optim::cuda::{DType, DeviceParam, DeviceSlice, Gpu, LossScale};
use fused_optim::{Clip, FoundInf, ParamMut, Slice, SliceMut, StepCtl};
use half::{bf16, f16};

use rules::Any;

/// Whatever goes wrong is text in the end.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// Why the last call on this thread failed; good until the next.
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

/// What a session works on; made by [`gpu_open`].
#[derive(Debug)]
pub struct Session {
    optim: Gpu,
    optimizer: Option<Any>,
    /// What is bound to it.
    params: Vec<DeviceParam>,
    scaler: Option<CudaScaler>,
}

/// Compiles every kernel that the benchmark needs on an architecture, into the cache; without a GPU.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_cubins(arch: c_int) -> c_int {
    status(|| {
        use DType::{Bf16, F16, F32};
        Any::compile_for(arch, &[(F32, F32), (F16, F16), (Bf16, Bf16), (F32, Bf16)])?;
        Ok(amp::cuda::compile_for(arch)?)
    })
}

/// Writes a session on a stream of device 0.
///
/// # Safety
///
/// `stream` must be a stream of the primary context, or null, and outlive the session; `session` a place
/// for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_open(stream: *mut c_void, session: *mut *mut Session) -> c_int {
    let open = || {
        // SAFETY: the caller vouches for the stream.
        let optim = unsafe { Gpu::with_stream(0, stream) }?;
        let made = Box::new(Session { optim, optimizer: None, params: Vec::new(), scaler: None });
        // SAFETY: the caller's place for a pointer.
        unsafe { session.write(Box::into_raw(made)) };
        Ok(())
    };
    status(open)
}

/// Makes an optimizer over `count` tensors and binds them.
///
/// # Safety
///
/// The session's; `rule` a C string; `weights`, `grads` and `lens` of `count` numbers, which are device
/// addresses and lengths of tensors of these types that stay where they are.
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
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &mut *session };
    // SAFETY: the caller's C string.
    let rule = unsafe { CStr::from_ptr(rule) };
    // SAFETY: so many numbers, by the caller's word; likewise below.
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
        // SAFETY: the caller vouches for the tensors.
        unsafe { optimizer.bind(&params) }?;
        (session.optimizer, session.params) = (Some(optimizer), params);
        Ok(())
    };
    status(make)
}

/// Has the optimizer search for its fastest launch, and writes it: blocks for each multiprocessor, elements of a
/// warp, elements of a thread.
///
/// # Safety
///
/// As [`gpu_step`]; `found` a place for three numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_tune(session: *mut Session, found: *mut [u32; 3]) -> c_int {
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &mut *session };
    let tune = || {
        let optimizer = session.optimizer.as_mut().ok_or("no optimizer")?;
        let tuned = optimizer.tune(&session.params)?;
        // SAFETY: the caller vouches for the tensors, as it did before.
        unsafe { optimizer.bind(&session.params) }?;
        let shape = tuned.first().ok_or("no tensors")?.shape;
        // SAFETY: the caller's place for three numbers.
        unsafe { found.write([shape.blocks, shape.sweep, shape.pack]) };
        Ok(())
    };
    status(tune)
}

/// Keeps a loss scale on the device from now on.
///
/// # Safety
///
/// The session's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_loss_scale(session: *mut Session, scale: f32) -> c_int {
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &mut *session };
    let set = || {
        let optimizer = session.optimizer.as_mut().ok_or("no optimizer")?;
        let scale = LossScale { scale, ..Default::default() };
        Ok(optimizer.set_loss_scale(Some(scale))?)
    };
    status(set)
}

/// A step; `max_norm` below 0 does not clip.
///
/// # Safety
///
/// The session's; its tensors must be where they were bound.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_step(
    session: *mut Session,
    grad_scale: f32,
    check: c_int,
    max_norm: f64,
) -> c_int {
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &mut *session };
    let step = || {
        let optimizer = session.optimizer.as_mut().ok_or("no optimizer")?;
        // SAFETY: the caller vouches for the tensors.
        Ok(unsafe { optimizer.step(&ctl(grad_scale, check, max_norm)) }?)
    };
    status(step)
}

fn ctl(grad_scale: f32, check: c_int, max_norm: f64) -> StepCtl {
    let found_inf = if check == 0 { FoundInf::Known(false) } else { FoundInf::Check };
    let clip = (max_norm >= 0.0).then(|| Clip::norm(max_norm));
    StepCtl { grad_scale, found_inf, clip }
}

/// The same rule on the CPU: `steps` steps from fresh state, in place, on host memory.
///
/// # Safety
///
/// As [`gpu_optimizer`], with addresses of the host.
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
    // SAFETY: so many numbers, by the caller's word; likewise below.
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
                // SAFETY: as above; nobody writes it.
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
/// So many elements of this type must lie there, used by nobody else.
unsafe fn host<'a>(address: u64, len: usize, dtype: DType) -> SliceMut<'a> {
    // PyTorch's empty tensors have no address.
    let at = match len {
        0 => std::ptr::NonNull::<u64>::dangling().as_ptr().cast(),
        _ => std::ptr::with_exposed_provenance_mut::<c_void>(address as usize),
    };
    match dtype {
        // SAFETY: the caller's word.
        DType::F32 => SliceMut::F32(unsafe { slice::from_raw_parts_mut(at.cast(), len) }),
        // SAFETY: the caller's word; f16 is two bytes, any of which are one.
        DType::F16 => SliceMut::F16(unsafe { slice::from_raw_parts_mut(at.cast::<f16>(), len) }),
        // SAFETY: as above.
        DType::Bf16 => SliceMut::Bf16(unsafe { slice::from_raw_parts_mut(at.cast::<bf16>(), len) }),
    }
}

/// Casts `len` elements.
///
/// # Safety
///
/// The session's; device addresses of as many elements of these types, apart from one another.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_cast(
    session: *mut Session,
    from: u64,
    from_type: c_int,
    to: u64,
    to_type: c_int,
    len: usize,
) -> c_int {
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &*session };
    let slice =
        |ptr, number| Ok::<_, Box<dyn Error>>(DeviceSlice { ptr, len, dtype: dtype(number)? });
    let cast = || {
        let (from, to) = (slice(from, from_type)?, slice(to, to_type)?);
        // SAFETY: the caller vouches for both.
        Ok(unsafe { amp::cuda::cast(&session.optim, from, to) }?)
    };
    status(cast)
}

/// Binds `count` gradients to a loss scale of 65536 that [`gpu_unscale`] uses.
///
/// # Safety
///
/// The session's; `grads` and `lens` as in [`gpu_optimizer`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_scaler(
    session: *mut Session,
    count: usize,
    grads: *const u64,
    lens: *const u64,
    grad_type: c_int,
) -> c_int {
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &mut *session };
    // SAFETY: so many numbers, by the caller's word.
    let grads = unsafe { slice::from_raw_parts(grads, count) };
    // SAFETY: as above.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let make = || {
        let scaler = LossScaler::new(LossScalerOptions::default())?;
        let mut scaler = CudaScaler::new(session.optim.clone(), &scaler)?;
        let dtype = dtype(grad_type)?;
        let slices: Vec<_> = grads.iter().zip(lens).collect();
        let slice = |(ptr, len): (&u64, &u64)| DeviceSlice { ptr: *ptr, len: *len as usize, dtype };
        let slices: Vec<_> = slices.into_iter().map(slice).collect();
        // SAFETY: the caller vouches for the gradients.
        unsafe { scaler.bind(&slices) }?;
        session.scaler = Some(scaler);
        Ok(())
    };
    status(make)
}

/// Divides the gradients of [`gpu_scaler`] by the scale and looks at them.
///
/// # Safety
///
/// The session's; the gradients must be where they were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_unscale(session: *mut Session) -> c_int {
    // SAFETY: the caller's session, used by nobody else meanwhile.
    let session = unsafe { &mut *session };
    let unscale = || {
        let scaler = session.scaler.as_mut().ok_or("no scaler")?;
        // SAFETY: the caller vouches for the gradients.
        Ok(unsafe { scaler.unscale() }?)
    };
    status(unscale)
}

fn dtype(number: c_int) -> Result<DType> {
    match number {
        0 => Ok(DType::F32),
        1 => Ok(DType::F16),
        2 => Ok(DType::Bf16),
        _ => Err("no such type".into()),
    }
}
