//! Functions that return what C writes through pointers.
//!
//! Each makes one call; callers must follow CANN's rules about order and threads.

#![expect(unsafe_code, reason = "calls C")]

use std::ffi::CStr;
use std::ptr;

use crate::Result;
use crate::sys::Acl;

/// `aclInit` without a configuration file.
pub(crate) fn init(acl: &Acl) -> Result<()> {
    // SAFETY: acl.h, `aclInit`: null means no configuration; a repeated call returns an error code.
    unsafe { acl.aclInit(ptr::null()) }
}

/// Finalizes AscendCL. Optional: the end of the process does it, too.
///
/// # Errors
///
/// [`Error::Status`](crate::Error::Status).
///
/// # Safety
///
/// CANN must not be in use in this process, and must not be used afterwards.
pub unsafe fn finalize(acl: &Acl) -> Result<()> {
    // SAFETY: the caller guarantees that it is the last call, as acl.h requires.
    unsafe { acl.aclFinalize() }
}

/// `aclrtGetDeviceCount`.
pub(crate) fn device_count(acl: &Acl) -> Result<u32> {
    let mut count = 0;
    // SAFETY: acl.h, `aclrtGetDeviceCount`: writes one `uint32_t`; the pointer is to a local.
    unsafe { acl.aclrtGetDeviceCount(&raw mut count) }?;
    Ok(count)
}

/// `aclrtGetSocName`; `None` if it returns null.
pub(crate) fn soc_name(acl: &Acl) -> Result<Option<String>> {
    // SAFETY: acl.h, `aclrtGetSocName`: has no parameters.
    let name = unsafe { acl.aclrtGetSocName() }?;
    if name.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so a static C string of the library, which is never closed.
    let name = unsafe { CStr::from_ptr(name) };
    Ok(Some(name.to_string_lossy().into_owned()))
}

/// `aclrtGetVersion`: major, minor, patch.
pub(crate) fn version(acl: &Acl) -> Result<[i32; 3]> {
    let [mut major, mut minor, mut patch] = [0; 3];
    // SAFETY: acl.h, `aclrtGetVersion`: writes three `int32_t`; the pointers are to locals.
    unsafe { acl.aclrtGetVersion(&raw mut major, &raw mut minor, &raw mut patch) }?;
    Ok([major, minor, patch])
}
