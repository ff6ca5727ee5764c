//! Calls with results: where C writes through a pointer, these return.
//!
//! Each of these is one call; rules about order and threads are the callers' to keep.

#![expect(unsafe_code, reason = "calls C")]

use std::ffi::CStr;
use std::ptr;

use crate::Result;
use crate::sys::Acl;

/// `aclInit` without a configuration file.
pub(crate) fn init(acl: &Acl) -> Result<()> {
    // SAFETY: acl.h, `aclInit`: null stands for no configuration; safe to repeat, which is an
    // error code.
    unsafe { acl.aclInit(ptr::null()) }
}

/// Ends AscendCL in this process; optional, since the end of the process does it too.
///
/// # Errors
///
/// [`Error::Status`](crate::Error::Status).
///
/// # Safety
///
/// Nothing of CANN may be in use in this process, nor be used afterwards.
pub unsafe fn finalize(acl: &Acl) -> Result<()> {
    // SAFETY: the caller keeps acl.h's rule that it is the last call.
    unsafe { acl.aclFinalize() }
}

/// `aclrtGetDeviceCount`.
pub(crate) fn device_count(acl: &Acl) -> Result<u32> {
    let mut count = 0;
    // SAFETY: acl.h, `aclrtGetDeviceCount`: writes one `uint32_t`; the pointer is to a local.
    unsafe { acl.aclrtGetDeviceCount(&raw mut count) }?;
    Ok(count)
}

/// `aclrtGetSocName`; `None` where it returns null.
pub(crate) fn soc_name(acl: &Acl) -> Result<Option<String>> {
    // SAFETY: acl.h, `aclrtGetSocName`: takes nothing.
    let name = unsafe { acl.aclrtGetSocName() }?;
    if name.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so a C string of the library's own that lives as long as the library,
    // which is never closed.
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
