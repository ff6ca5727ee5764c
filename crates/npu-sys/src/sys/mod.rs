//! The C interface as it is: library names, types, function pointers. Nothing here calls anything.

mod acl;

pub use acl::{ACL_LIBRARIES, Acl, AclError};
