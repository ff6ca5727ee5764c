//! `acl/acl.h`: initialisation, and what is there.

use std::ffi::{c_char, c_int};

use crate::loader::table;

/// The libraries these functions are in, in the order they are tried.
pub const ACL_LIBRARIES: &[&str] = &["libascendcl.so"];

/// `aclError`: 4 bytes, 0 is success. A newtype and not an enum, since C may write any number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct AclError(pub c_int);

table! {
    /// AscendCL's functions, found in a library that is never closed.
    ///
    /// Prototypes as in CANN 8.1.RC1. A value exists only after every symbol was found.
    pub struct Acl {
        /// Once per process, before anything else; the argument is a configuration file or null.
        init = "aclInit": unsafe extern "C" fn(*const c_char) -> AclError,
        /// Undoes `aclInit`.
        finalize = "aclFinalize": unsafe extern "C" fn() -> AclError,
        /// Writes the number of devices this process may see.
        device_count = "aclrtGetDeviceCount": unsafe extern "C" fn(*mut u32) -> AclError,
        /// A string of the library's own, or null.
        soc_name = "aclrtGetSocName": unsafe extern "C" fn() -> *const c_char,
        /// Writes AscendCL's major, minor and patch version.
        version = "aclrtGetVersion": unsafe extern "C" fn(*mut i32, *mut i32, *mut i32) -> AclError,
    }
}
