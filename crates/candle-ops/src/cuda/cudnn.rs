//! Convolutions by NVIDIA's cuDNN, loaded at run time.
//!
//! cuDNN is searched at `$CUDNN_LIBRARY`, else by name (`libcudnn.so.9`, `.so.8`), in the CUDA
//! toolkit and in Python's packages. Without it convolutions use im2col and a product. (With
//! cudarc's bindings, linked at program start, a program would not start without cuDNN.)
//!
//! Images are channels-last, `[n, h, w, c]`, and weights `[o, kh, kw, c]`, the layout for which the
//! GPU's tensor cores have kernels. The algorithms for a convolution are requested at its first
//! call, which is before any capture: in the order of cuDNN's heuristics, or, if autotuning is
//! enabled in the entered context, of its timings.
//!
//! Invariant: every algorithm is deterministic according to cuDNN, so that a captured or resumed
//! step gives bitwise the same results. Timings differ: two runs that are autotuned from their
//! start may have other algorithms, and so other last bits.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaContext, result};
use candle_core::{CudaDevice, DType, Result, bail};
use cuda_rt::CudaError;
use cuda_rt::library::{Library, candidates};
use parking_lot::Mutex;

use super::Kernels;
use crate::allows_tf32;
use crate::error::{self, Error};
use crate::sizes::Grouped;
use crate::state::autotune::{self, Choice};

/// Maximum workspace of an algorithm, in bytes.
const WORKSPACE: usize = 1 << 30;

/// A `cudnnStatus_t`: 0 is success.
type Status = c_int;

/// A handle or descriptor of cuDNN.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Object(*mut c_void);

// SAFETY: cuDNN lets any thread use an object, one at a time; all use is under the lock of
// [`Cudnn`]'s state, but for the end of a descriptor that nothing else has.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

/// `cudnnConvolutionFwdAlgoPerf_t`, and its counterparts for gradients, which have the same layout.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Algorithm {
    number: c_int,
    status: Status,
    time: f32,
    workspace: usize,
    determinism: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// Finds algorithms for operands with three descriptors; the convolution's descriptor comes before
/// the last.
type Find = unsafe extern "C" fn(
    Object,
    Object,
    Object,
    Object,
    Object,
    c_int,
    *mut c_int,
    *mut Algorithm,
) -> Status;

/// Runs an algorithm: handle, factor, two operands, convolution, algorithm, workspace and its
/// bytes, factor, result.
type Run = unsafe extern "C" fn(
    Object,
    *const f32,
    Object,
    u64,
    Object,
    u64,
    Object,
    c_int,
    u64,
    usize,
    *const f32,
    Object,
    u64,
) -> Status;

type Create = unsafe extern "C" fn(*mut Object) -> Status;
type Destroy = unsafe extern "C" fn(Object) -> Status;

macro_rules! functions {
    ($($name:ident: $prototype:ty;)*) => {
        /// cuDNN's functions, with the prototypes in its headers of versions 8 and 9.
        #[expect(non_snake_case, reason = "the names are C's")]
        struct Functions {
            $($name: $prototype,)*
        }

        impl Functions {
            fn of(library: &Library) -> std::result::Result<Self, CudaError> {
                Ok(Self {
                    // SAFETY: the prototype of the function of this name.
                    $($name: unsafe { library.function(stringify!($name)) }?,)*
                })
            }
        }
    };
}
functions! {
    cudnnGetVersion: unsafe extern "C" fn() -> usize;
    cudnnGetErrorString: unsafe extern "C" fn(Status) -> *const c_char;
    cudnnCreate: Create;
    cudnnDestroy: Destroy;
    cudnnSetStream: unsafe extern "C" fn(Object, *mut c_void) -> Status;
    cudnnCreateTensorDescriptor: Create;
    cudnnDestroyTensorDescriptor: Destroy;
    cudnnSetTensor4dDescriptor: unsafe extern "C" fn(Object, c_int, c_int, c_int, c_int, c_int, c_int) -> Status;
    cudnnCreateFilterDescriptor: Create;
    cudnnDestroyFilterDescriptor: Destroy;
    cudnnSetFilter4dDescriptor: unsafe extern "C" fn(Object, c_int, c_int, c_int, c_int, c_int, c_int) -> Status;
    cudnnCreateConvolutionDescriptor: Create;
    cudnnDestroyConvolutionDescriptor: Destroy;
    cudnnSetConvolution2dDescriptor: unsafe extern "C" fn(
        Object, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_int
    ) -> Status;
    cudnnSetConvolutionGroupCount: unsafe extern "C" fn(Object, c_int) -> Status;
    cudnnSetConvolutionMathType: unsafe extern "C" fn(Object, c_int) -> Status;
    cudnnGetConvolutionForwardAlgorithm_v7: Find;
    cudnnGetConvolutionBackwardDataAlgorithm_v7: Find;
    cudnnGetConvolutionBackwardFilterAlgorithm_v7: Find;
    cudnnFindConvolutionForwardAlgorithm: Find;
    cudnnFindConvolutionBackwardDataAlgorithm: Find;
    cudnnFindConvolutionBackwardFilterAlgorithm: Find;
    cudnnConvolutionForward: Run;
    cudnnConvolutionBackwardData: Run;
    cudnnConvolutionBackwardFilter: Run;
}

/// `CUDNN_TENSOR_NHWC`.
const NHWC: c_int = 1;
/// `CUDNN_CROSS_CORRELATION`.
const CROSS_CORRELATION: c_int = 1;
/// `CUDNN_DATA_FLOAT`.
const FLOAT: c_int = 0;
/// `CUDNN_DETERMINISTIC`.
const DETERMINISTIC: c_int = 1;

/// A pass of a convolution.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    /// Computes the result from the images and the weight.
    Forward,
    /// Computes the gradient of the images from the weight and the result's gradient.
    Images,
    /// Computes the gradient of the weight from the images and the result's gradient.
    Weight,
}

impl Pass {
    const ALL: [Self; 3] = [Self::Forward, Self::Images, Self::Weight];
}

/// A convolution of tensors of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Convolution {
    pub(super) of: Grouped,
    pub(super) dtype: DType,
}

/// cuDNN on a device, working in its stream.
pub(super) struct Cudnn {
    functions: Functions,
    name: String,
    /// The device's context, which must be current for all calls that allocate or free memory.
    context: Arc<CudaContext>,
    state: Mutex<State>,
}

struct State {
    handle: Object,
    /// At most [`PLANS`]: a full cache is cleared. An operator keeps its plan for backward.
    plans: HashMap<Convolution, Arc<Plan>>,
}

/// Maximum number of cached convolutions, of some kilobytes each.
pub(super) const PLANS: usize = 4096;

/// Descriptors of a convolution, and the algorithms for each pass, best first.
pub(super) struct Plan {
    of: Convolution,
    x: Descriptor,
    weight: Descriptor,
    y: Descriptor,
    convolution: Descriptor,
    algorithms: Mutex<[Vec<Algorithm>; 3]>,
    /// Whether autotuning was enabled when they were requested.
    is_tuned: bool,
}

/// An object that is destroyed when it is dropped.
struct Descriptor {
    object: Object,
    destroy: Destroy,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the function's counterpart, and used no more.
        unsafe { (self.destroy)(self.object) };
    }
}

impl fmt::Debug for Cudnn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cudnn").field(&self.name).finish()
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        // Not `bind_to_thread`, which would take an error that another `drop` has recorded. If this
        // fails, the context has freed everything.
        // SAFETY: the context is alive.
        let _ = unsafe { result::ctx::set_current(self.context.cu_ctx()) };
        let state = self.state.get_mut();
        state.plans.clear();
        // SAFETY: made by `cudnnCreate`, and used no more.
        unsafe { (self.functions.cudnnDestroy)(state.handle) };
    }
}

impl Cudnn {
    /// Loads cuDNN for a device and its stream.
    ///
    /// # Errors
    ///
    /// cuDNN cannot be loaded or initialized.
    pub(super) fn open(device: &CudaDevice) -> error::Result<Self> {
        let names = ["libcudnn.so.9", "libcudnn.so.8"];
        let var = |name: &str| std::env::var_os(name);
        let paths = candidates(&var, "CUDNN_LIBRARY", &names, &["cudnn"]);
        Self::load(device, &paths)
    }

    /// Loads the first of `paths` that can be opened.
    pub(super) fn load(device: &CudaDevice, paths: &[PathBuf]) -> error::Result<Self> {
        // SAFETY: these are cuDNN's names, or the path that the user set.
        let library = unsafe { Library::open(NAME, paths, "", INSTALL) }?;
        let functions = Functions::of(&library)?;
        let stream = device.cuda_stream();
        let context = stream.context().clone();
        context.bind_to_thread().map_err(candle_core::Error::wrap)?;
        let mut handle = Object(null_mut());
        // SAFETY: writes a handle for the context that was just bound.
        let status = unsafe { (functions.cudnnCreate)(&raw mut handle) };
        functions.check(status, "cudnnCreate")?;
        // SAFETY: takes nothing.
        let version = unsafe { (functions.cudnnGetVersion)() };
        let name = format!("cuDNN {} ({})", version_of(version), library.path().display());
        let state = Mutex::new(State { handle, plans: HashMap::new() });
        let cudnn = Self { functions, name, context, state };
        // SAFETY: the handle's context is the stream's.
        let status = unsafe { (cudnn.functions.cudnnSetStream)(handle, stream.cu_stream().cast()) };
        cudnn.functions.check(status, "cudnnSetStream")?;
        Ok(cudnn)
    }

    /// Version and path.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The plan for a convolution; `None` if there is no algorithm for one of the passes. The
    /// gradient of the images is needed only if they are tracked.
    pub(super) fn plan(
        &self,
        convolution: &Convolution,
        are_tracked: bool,
    ) -> Result<Option<Arc<Plan>>> {
        // cuDNN's fast kernels for products in full f32 precision are channels-first.
        if convolution.dtype == DType::F32 && !allows_tf32() {
            return Ok(None);
        }
        let mut state = self.state.lock();
        let is_tuned = autotune::rounds().is_some();
        let known = state.plans.get(convolution).filter(|plan| plan.is_tuned || !is_tuned);
        let plan = match known {
            Some(plan) => plan.clone(),
            None => {
                self.context.bind_to_thread().map_err(candle_core::Error::wrap)?;
                let plan = Arc::new(self.functions.plan(state.handle, convolution, is_tuned)?);
                if state.plans.len() >= PLANS {
                    state.plans.clear();
                }
                state.plans.insert(*convolution, plan.clone());
                plan
            }
        };
        let needed = |pass: &Pass| are_tracked || !matches!(pass, Pass::Images);
        let mut passes = Pass::ALL.into_iter().filter(needed);
        let is_supported = passes.all(|pass| !plan.algorithms.lock()[pass as usize].is_empty());
        Ok(is_supported.then_some(plan))
    }

    /// Number of cached convolutions.
    #[cfg(test)]
    pub(super) fn plans(&self) -> usize {
        self.state.lock().plans.len()
    }

    /// Computes a pass of a convolution by its plan.
    ///
    /// # Safety
    ///
    /// The addresses must be those of channels-last tensors of the convolution: operands, and
    /// result.
    pub(super) unsafe fn run(
        &self,
        kernels: &Kernels,
        plan: &Plan,
        pass: Pass,
        [a, b, to]: [u64; 3],
    ) -> Result<()> {
        let state = self.state.lock();
        let functions = &self.functions;
        let run = match pass {
            Pass::Forward => functions.cudnnConvolutionForward,
            Pass::Images => functions.cudnnConvolutionBackwardData,
            Pass::Weight => functions.cudnnConvolutionBackwardFilter,
        };
        let [of_a, of_b, of_result] = plan.operands(pass);
        let descriptor = plan.convolution.object;
        let (one, zero, mut failed) = (1_f32, 0_f32, String::new());
        let (mut all, mut at) = (plan.algorithms.lock(), 0);
        let algorithms = &mut all[pass as usize];
        while let Some(best) = algorithms.get(at).copied() {
            // CUDA cannot allocate 0 bytes.
            let workspace = match kernels.empty(best.workspace.max(1), DType::U8) {
                Ok(workspace) => workspace,
                Err(error) => {
                    // The next call may have enough memory.
                    failed = format!("{failed} {}: {error};", best.number);
                    at += 1;
                    continue;
                }
            };
            // SAFETY: a live descriptor, and a number that cuDNN gave.
            let status = unsafe { (functions.cudnnSetConvolutionMathType)(descriptor, best.math) };
            functions.check(status, "cudnnSetConvolutionMathType")?;
            // SAFETY: live descriptors; the caller vouches for the tensors; the workspace is as
            // large as cuDNN asked for, and freed in order of the stream; factors are on the host,
            // and read before it returns.
            let status = unsafe {
                run(
                    state.handle,
                    &raw const one,
                    of_a,
                    a,
                    of_b,
                    b,
                    descriptor,
                    best.number,
                    workspace.at,
                    best.workspace,
                    &raw const zero,
                    of_result,
                    to,
                )
            };
            match functions.check(status, "an algorithm") {
                Err(error) if is_refusal(status) => {
                    failed = format!("{failed} {}: {error};", best.number);
                }
                done => return Ok(done?),
            }
            // An algorithm that cuDNN offered and then rejected is not tried again.
            algorithms.remove(at);
        }
        bail!(
            "cuDNN runs none of its algorithms for {:?}, {pass:?}:{failed} CUDNN_LIBRARY=off convolves without cuDNN",
            plan.of
        )
    }
}

impl Functions {
    fn check(&self, status: Status, call: &'static str) -> error::Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: any number has a text that lasts.
        let text = unsafe { (self.cudnnGetErrorString)(status) };
        if text.is_null() {
            return Err(Error::Cudnn { call, reason: format!("status {status}") });
        }
        // SAFETY: a C string.
        let reason = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Err(Error::Cudnn { call, reason })
    }

    fn make(&self, create: Create, destroy: Destroy) -> Result<Descriptor> {
        let mut object = Object(null_mut());
        // SAFETY: writes an object.
        let status = unsafe { create(&raw mut object) };
        self.check(status, "a descriptor")?;
        Ok(Descriptor { object, destroy })
    }

    /// The descriptor of channels-last images, `[n, c, h, w]`.
    fn images(&self, dtype: c_int, extents: [usize; 4]) -> Result<Descriptor> {
        let made =
            self.make(self.cudnnCreateTensorDescriptor, self.cudnnDestroyTensorDescriptor)?;
        let [n, c, h, w] = narrow(extents)?;
        // SAFETY: a tensor's descriptor.
        let status =
            unsafe { (self.cudnnSetTensor4dDescriptor)(made.object, NHWC, dtype, n, c, h, w) };
        self.check(status, "cudnnSetTensor4dDescriptor")?;
        Ok(made)
    }

    /// The descriptor of a channels-last weight, `[o, c, h, w]`.
    fn weight(&self, dtype: c_int, extents: [usize; 4]) -> Result<Descriptor> {
        let made =
            self.make(self.cudnnCreateFilterDescriptor, self.cudnnDestroyFilterDescriptor)?;
        let [o, c, h, w] = narrow(extents)?;
        // SAFETY: a filter's descriptor.
        let status =
            unsafe { (self.cudnnSetFilter4dDescriptor)(made.object, dtype, NHWC, o, c, h, w) };
        self.check(status, "cudnnSetFilter4dDescriptor")?;
        Ok(made)
    }

    /// The descriptor of the windows' movement; sums are in f32.
    fn windows(&self, of: &Convolution) -> Result<Descriptor> {
        let made = self
            .make(self.cudnnCreateConvolutionDescriptor, self.cudnnDestroyConvolutionDescriptor)?;
        let g = &of.of.one;
        let [p, s, d, groups] =
            narrow([g.window.padding, g.window.stride, g.dilation, of.of.groups])?;
        // SAFETY: a convolution's descriptor.
        let status = unsafe {
            (self.cudnnSetConvolution2dDescriptor)(
                made.object,
                p,
                p,
                s,
                s,
                d,
                d,
                CROSS_CORRELATION,
                FLOAT,
            )
        };
        self.check(status, "cudnnSetConvolution2dDescriptor")?;
        // SAFETY: as above.
        let status = unsafe { (self.cudnnSetConvolutionGroupCount)(made.object, groups) };
        self.check(status, "cudnnSetConvolutionGroupCount")?;
        let math = if of.dtype == DType::F32 { DEFAULT_MATH } else { TENSOR_OP_MATH };
        // SAFETY: as above.
        let status = unsafe { (self.cudnnSetConvolutionMathType)(made.object, math) };
        self.check(status, "cudnnSetConvolutionMathType")?;
        Ok(made)
    }

    fn plan(&self, handle: Object, of: &Convolution, is_tuned: bool) -> Result<Plan> {
        let dtype = match of.dtype {
            DType::F32 => FLOAT,
            // `CUDNN_DATA_HALF` and `CUDNN_DATA_BFLOAT16`.
            DType::F16 => 2,
            DType::BF16 => 9,
            other => bail!("cuDNN: no convolution of {other:?}"),
        };
        let Grouped { one: g, groups } = of.of;
        let x = [g.images, g.channels * groups, g.height, g.width];
        let outputs = g.out_channels * groups;
        let mut plan = Plan {
            of: *of,
            x: self.images(dtype, x)?,
            weight: self.weight(dtype, [outputs, g.channels, g.kernel_height, g.kernel_width])?,
            y: self.images(dtype, [g.images, outputs, g.out_height, g.out_width])?,
            convolution: self.windows(of)?,
            algorithms: Mutex::default(),
            is_tuned,
        };
        for pass in Pass::ALL {
            let mut found = self.algorithms(handle, &plan, pass, self.expect(pass))?;
            if is_tuned {
                let key = || format!("cudnn {pass:?} {of:?}");
                let timed = |_| {
                    let timed = self.algorithms(handle, &plan, pass, self.time(pass));
                    let best = timed.ok()?.first()?.number;
                    let expected = found.first().map(|algorithm| algorithm.number);
                    let algorithm = usize::try_from(best).ok()?;
                    Some(Choice { algorithm, is_faster: expected != Some(best) })
                };
                if let Some(number) = autotune::chosen(key, timed) {
                    found.sort_by_key(|algorithm| algorithm.number as usize != number);
                }
            }
            plan.algorithms.get_mut()[pass as usize] = found;
        }
        Ok(plan)
    }

    /// The function that returns cuDNN's heuristic choice of algorithms.
    fn expect(&self, pass: Pass) -> Find {
        match pass {
            Pass::Forward => self.cudnnGetConvolutionForwardAlgorithm_v7,
            Pass::Images => self.cudnnGetConvolutionBackwardDataAlgorithm_v7,
            Pass::Weight => self.cudnnGetConvolutionBackwardFilterAlgorithm_v7,
        }
    }

    /// The function that runs and times all algorithms, on separate memory.
    fn time(&self, pass: Pass) -> Find {
        match pass {
            Pass::Forward => self.cudnnFindConvolutionForwardAlgorithm,
            Pass::Images => self.cudnnFindConvolutionBackwardDataAlgorithm,
            Pass::Weight => self.cudnnFindConvolutionBackwardFilterAlgorithm,
        }
    }

    /// The deterministic algorithms, the fastest first; none for a convolution cuDNN rejects.
    fn algorithms(
        &self,
        handle: Object,
        plan: &Plan,
        pass: Pass,
        find: Find,
    ) -> Result<Vec<Algorithm>> {
        let [a, b, to] = plan.operands(pass);
        let mut found = [Algorithm::default(); 16];
        let mut count = 0;
        let (most, convolution) = (found.len() as c_int, plan.convolution.object);
        // SAFETY: live descriptors, and room for as many algorithms as are asked for.
        let status = unsafe {
            find(handle, a, b, convolution, to, most, &raw mut count, found.as_mut_ptr())
        };
        if is_refusal(status) {
            return Ok(Vec::new());
        }
        self.check(status, "its algorithms")?;
        let usable = |one: &Algorithm| {
            one.status == 0 && one.determinism == DETERMINISTIC && one.workspace <= WORKSPACE
        };
        let count = usize::try_from(count).unwrap_or(0).min(found.len());
        Ok(found[..count].iter().copied().filter(usable).collect())
    }
}

impl Plan {
    /// The descriptors of a pass's operands and result.
    fn operands(&self, pass: Pass) -> [Object; 3] {
        let [x, weight, y] = [&self.x, &self.weight, &self.y].map(|one| one.object);
        match pass {
            Pass::Forward => [x, weight, y],
            Pass::Images => [weight, y, x],
            Pass::Weight => [x, y, weight],
        }
    }
}

fn narrow(extents: [usize; 4]) -> Result<[c_int; 4]> {
    let mut narrow = [0; 4];
    for (to, from) in narrow.iter_mut().zip(extents) {
        *to = c_int::try_from(from).map_err(candle_core::Error::wrap)?;
    }
    Ok(narrow)
}

/// Whether the status means "not supported", in general or on this GPU:
/// `CUDNN_STATUS_NOT_SUPPORTED` and `CUDNN_STATUS_ARCH_MISMATCH` of version 8, and all reasons for
/// the former in version 9.
const fn is_refusal(status: Status) -> bool {
    matches!(status, 6 | 9 | 3000..=3999)
}

/// Formats the number returned by `cudnnGetVersion`.
fn version_of(version: usize) -> String {
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

/// `CUDNN_DEFAULT_MATH`: TF32 for f32.
const DEFAULT_MATH: c_int = 0;
/// `CUDNN_TENSOR_OP_MATH`.
const TENSOR_OP_MATH: c_int = 1;

const NAME: &str = "libcudnn";
const INSTALL: &str = "install cuDNN 8 or later (pip install nvidia-cudnn-cu13, or nvidia-cudnn-cu12), or set \
                       CUDNN_LIBRARY to its path";
