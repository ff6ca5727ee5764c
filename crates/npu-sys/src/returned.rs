//! Return types of C functions as a [`Result`].

use std::ffi::c_char;

use crate::status::{Status, check};
use crate::types::{
    AclError, AclIntArray, AclScalar, AclScalarList, AclTensor, AclTensorList, AclnnStatus,
    HcclResult,
};
use crate::{Error, Result};

/// A return type of a C function, and how to detect a failure.
pub trait Returned: sealed::Sealed {
    /// The value on success.
    type Value;

    /// Returns the value, or the error of `function`.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], [`Error::Null`].
    fn checked(self, function: &'static str) -> Result<Self::Value>;
}

mod sealed {
    #[expect(unnameable_types, reason = "sealed: only this crate implements it")]
    pub trait Sealed {}
}

macro_rules! statuses {
    ($($rust:ty: $status:path,)*) => {$(
        impl sealed::Sealed for $rust {}
        impl Returned for $rust {
            type Value = ();

            fn checked(self, function: &'static str) -> Result<()> {
                check(function, $status(self))
            }
        }
    )*};
}

statuses! { AclError: Status::Acl, AclnnStatus: Status::Aclnn, HcclResult: Status::Hccl, }

macro_rules! values {
    ($($rust:ty,)*) => {$(
        impl sealed::Sealed for $rust {}
        impl Returned for $rust {
            type Value = Self;

            fn checked(self, _: &'static str) -> Result<Self> {
                Ok(self)
            }
        }
    )*};
}

// Names may be null; the caller checks that.
values! { u32, *const c_char, }

macro_rules! objects {
    ($($rust:ty,)*) => {$(
        impl sealed::Sealed for *mut $rust {}
        impl Returned for *mut $rust {
            type Value = Self;

            fn checked(self, function: &'static str) -> Result<Self> {
                if self.is_null() { Err(Error::Null { function }) } else { Ok(self) }
            }
        }
    )*};
}

objects! { AclTensor, AclScalar, AclIntArray, AclTensorList, AclScalarList, }
