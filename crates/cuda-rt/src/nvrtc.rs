//! NVRTC, NVIDIA's run-time compiler, loaded at run time: compiles source to machine code for one
//! architecture; to PTX, which the driver compiles, for a GPU that is newer than NVRTC.
//!
//! It is searched at `$NVRTC_LIBRARY`, else by name (`libnvrtc.so.13`, `.so.12`), in the CUDA
//! toolkit and in Python's packages. Of several, the newest that is not newer than the driver is
//! used. It needs no GPU and no driver.

#![expect(unsafe_code, reason = "calls C functions found by name")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{ptr, slice};

use crate::driver;
use crate::error::CudaError;
use crate::library::{Library, candidates};

/// `nvrtcResult`: 0 is success. Not an enum, since C may return any number.
type Status = c_int;
/// `nvrtcProgram`.
type Program = *mut c_void;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> Status;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> Status;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;

/// NVRTC's functions, with the prototypes of `nvrtc.h` of CUDA 12.1 and 13.
#[derive(Clone, Copy, Debug)]
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    arch_count: unsafe extern "C" fn(*mut c_int) -> Status,
    archs: unsafe extern "C" fn(*mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create: Create,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    log_size: SizeOf,
    log: BytesOf,
    cubin_size: SizeOf,
    cubin: BytesOf,
    ptx_size: SizeOf,
    ptx: BytesOf,
}

/// An NVRTC library.
#[derive(Debug)]
pub struct Nvrtc {
    functions: Functions,
    library: Library,
    version: (i32, i32),
    /// The architectures that it compiles for, for example 90.
    archs: Vec<i32>,
}

/// Machine code and the compiler's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// An ELF file for one architecture; or PTX, ended by a NUL, for a virtual one (`compute_90`).
    pub code: Vec<u8>,
    /// Warnings; registers and spills with `--ptxas-options=-v`.
    pub log: String,
}

impl Nvrtc {
    /// Returns the NVRTC of this process: the newest that is not newer than the driver, else the
    /// oldest; without a driver the newest. The first call loads it.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotFound`] and [`CudaError::MissingSymbol`].
    pub fn global() -> Result<&'static Self, CudaError> {
        Self::all().map(|all| &all[0])
    }

    /// All usable NVRTCs of this process, the preferred first; at least one.
    pub(crate) fn all() -> Result<&'static [Self], CudaError> {
        static ALL: OnceLock<Result<Vec<Nvrtc>, CudaError>> = OnceLock::new();
        let load = || {
            let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
            let var = |name: &str| std::env::var_os(name);
            let packages = ["cu13", "cuda_nvrtc", "cu12"];
            let paths = candidates(&var, "NVRTC_LIBRARY", &names, &packages);
            // SAFETY: these are NVRTC's names, or the path that the user set.
            let all = unsafe { Self::load(&paths) }?;
            Ok(driver::loadable(all, Self::version, driver::version()))
        };
        ALL.get_or_init(load).as_deref().map_err(Clone::clone)
    }

    /// Loads one NVRTC of each version.
    ///
    /// # Safety
    ///
    /// The libraries at these paths must be NVRTC, or have initializers that are sound to run and
    /// no functions with NVRTC's names.
    unsafe fn load(paths: &[PathBuf]) -> Result<Vec<Self>, CudaError> {
        let (mut found, mut tried, mut unusable) = (Vec::<Self>::new(), Vec::new(), None);
        for path in paths {
            // SAFETY: the caller's promise.
            match unsafe { Self::open(path) } {
                Ok(one) if found.iter().any(|known| known.version == one.version) => {}
                Ok(one) => found.push(one),
                Err(CudaError::NotFound { tried: failed, .. }) => tried.extend(failed),
                Err(error) => unusable = unusable.or(Some(error)),
            }
        }
        let missing = CudaError::NotFound { library: NAME, tried, install: INSTALL };
        if found.is_empty() { Err(unusable.unwrap_or(missing)) } else { Ok(found) }
    }

    /// # Safety
    ///
    /// As [`load`](Self::load).
    unsafe fn open(path: &PathBuf) -> Result<Self, CudaError> {
        let paths = slice::from_ref(path);
        // SAFETY: the caller's promise.
        let library = unsafe { Library::open(NAME, paths, "libnvrtc-builtins.so", INSTALL) }?;
        let functions = Functions {
            version: function(&library, "nvrtcVersion")?,
            arch_count: function(&library, "nvrtcGetNumSupportedArchs")?,
            archs: function(&library, "nvrtcGetSupportedArchs")?,
            error_string: function(&library, "nvrtcGetErrorString")?,
            create: function(&library, "nvrtcCreateProgram")?,
            compile: function(&library, "nvrtcCompileProgram")?,
            destroy: function(&library, "nvrtcDestroyProgram")?,
            log_size: function(&library, "nvrtcGetProgramLogSize")?,
            log: function(&library, "nvrtcGetProgramLog")?,
            cubin_size: function(&library, "nvrtcGetCUBINSize")?,
            cubin: function(&library, "nvrtcGetCUBIN")?,
            ptx_size: function(&library, "nvrtcGetPTXSize")?,
            ptx: function(&library, "nvrtcGetPTX")?,
        };
        let mut nvrtc = Self { functions, library, version: (0, 0), archs: Vec::new() };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        let status = unsafe { (functions.version)(&raw mut major, &raw mut minor) };
        nvrtc.check("read NVRTC's version", status, String::new())?;
        nvrtc.version = (major, minor);
        let (during, mut count) = ("read NVRTC's architectures", 0);
        // SAFETY: writes one number.
        let status = unsafe { (functions.arch_count)(&raw mut count) };
        nvrtc.check(during, status, String::new())?;
        nvrtc.archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: writes as many numbers as it has just returned.
        let status = unsafe { (functions.archs)(nvrtc.archs.as_mut_ptr()) };
        nvrtc.check(during, status, String::new())?;
        Ok(nvrtc)
    }

    /// The architecture to compile for, for a GPU of `arch`: `sm_NN` for machine code, or, if this
    /// compiler is older than the GPU, `compute_NN` of the newest that it knows.
    ///
    /// # Errors
    ///
    /// [`CudaError::OldGpu`].
    pub(crate) fn target(&self, arch: i32) -> Result<String, CudaError> {
        let known = self.archs.iter().copied();
        match known.clone().filter(|known| *known <= arch).max() {
            Some(same) if same == arch => Ok(format!("sm_{arch}")),
            Some(older) => Ok(format!("compute_{older}")),
            None => Err(CudaError::OldGpu {
                arch,
                oldest: known.min().unwrap_or(0),
                nvrtc: self.version,
            }),
        }
    }

    /// Major and minor version.
    #[must_use]
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The path of the library.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        self.library.path()
    }

    /// Compiles `source` for the architecture in `options`, real or virtual.
    ///
    /// # Errors
    ///
    /// [`CudaError::Nvrtc`], with the compiler's log.
    pub fn compile(&self, source: &str, options: &[String]) -> Result<Cubin, CudaError> {
        let nul = |_| self.failure("compile source or options with a NUL", 0, String::new());
        let source = CString::new(source).map_err(nul)?;
        let options: Vec<CString> =
            options.iter().map(|o| CString::new(&o[..])).collect::<Result<_, _>>().map_err(nul)?;
        let mut program = ptr::null_mut();
        let (name, none) = (c"kernels.cu".as_ptr(), ptr::null());
        // SAFETY: source and name are C strings; there are no headers.
        let status = unsafe {
            (self.functions.create)(&raw mut program, source.as_ptr(), name, 0, none, none)
        };
        self.check("create an NVRTC program", status, String::new())?;
        let result = self.compile_program(program, &options);
        // SAFETY: the program was created above and is not used again. A failure leaks it.
        let _ = unsafe { (self.functions.destroy)(&raw mut program) };
        result
    }

    fn compile_program(&self, program: Program, options: &[CString]) -> Result<Cubin, CudaError> {
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).expect("a handful of options");
        // SAFETY: the program is alive; there are `count` options, C strings.
        let status = unsafe { (self.functions.compile)(program, count, pointers.as_ptr()) };
        let log = self.bytes(program, self.functions.log_size, self.functions.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        self.check("compile kernels", status, log.clone())?;
        let Functions { cubin_size, cubin, ptx_size, ptx, .. } = self.functions;
        let mut code = self.bytes(program, cubin_size, cubin)?;
        // NVRTC makes no machine code for a virtual architecture.
        if code.is_empty() {
            code = self.bytes(program, ptx_size, ptx)?;
        }
        Ok(Cubin { code, log })
    }

    fn bytes(&self, program: Program, size: SizeOf, get: BytesOf) -> Result<Vec<u8>, CudaError> {
        let mut count = 0;
        // SAFETY: the program is alive; writes one number.
        let status = unsafe { size(program, &raw mut count) };
        self.check("read from an NVRTC program", status, String::new())?;
        let mut bytes = vec![0_u8; count];
        // SAFETY: writes as many bytes as `size` returned.
        let status = unsafe { get(program, bytes.as_mut_ptr().cast()) };
        self.check("read from an NVRTC program", status, String::new())?;
        Ok(bytes)
    }

    fn check(&self, during: &'static str, status: Status, log: String) -> Result<(), CudaError> {
        if status == 0 { Ok(()) } else { Err(self.failure(during, status, log)) }
    }

    fn failure(&self, during: &'static str, code: Status, log: String) -> CudaError {
        // SAFETY: takes any number; returns a static string or null.
        let name = unsafe { (self.functions.error_string)(code) };
        let name = if name.is_null() {
            "unknown".into()
        } else {
            // SAFETY: not null, so a C string that lives as long as the library.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        CudaError::Nvrtc { during, name, code, log }
    }
}

/// Looks up a function; `T` is its type.
fn function<T: Copy>(library: &Library, symbol: &'static str) -> Result<T, CudaError> {
    // SAFETY: `T` is a function pointer with the prototype of `nvrtc.h`.
    unsafe { library.function(symbol) }
}

const NAME: &str = "NVRTC (libnvrtc)";
const INSTALL: &str = "install NVIDIA's CUDA toolkit 12.1 or later, or `pip install \
    nvidia-cuda-nvrtc`, or set NVRTC_LIBRARY to the path of libnvrtc.so";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_old_nvrtc_is_an_error_that_says_what_to_install() {
        let paths = ["/nonexistent/libnvrtc.so.13", "libnvrtc-of-nobody.so"].map(PathBuf::from);
        // SAFETY: there is nothing at these paths.
        let error = unsafe { Nvrtc::load(&paths) }.unwrap_err();
        let CudaError::NotFound { library: "NVRTC (libnvrtc)", tried, .. } = &error else {
            panic!("{error}")
        };
        assert!(tried.iter().map(|one| &one.path).eq(&paths));
        assert!(error.to_string().ends_with(INSTALL), "{error}");
        // SAFETY: the C library is already part of this process, and has none of the functions.
        let error = unsafe { Nvrtc::load(&["libc.so.6".into()]) }.unwrap_err();
        let text = format!("libc.so.6 has no function nvrtcVersion; {INSTALL}");
        assert_eq!(error.to_string(), text);
    }
}
