//! CANN's status numbers and their names, and this crate's error type.

use std::fmt;

use crate::LoadError;
use crate::types::{AclError, AclnnStatus, Constant, HcclResult};

/// An error number that a function of CANN returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// From AscendCL.
    Acl(AclError),
    /// From an operator.
    Aclnn(AclnnStatus),
    /// From HCCL.
    Hccl(HcclResult),
}

impl Status {
    /// The number.
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Self::Acl(AclError(code)) => code,
            Self::Aclnn(AclnnStatus(code)) => code,
            Self::Hccl(HcclResult(code)) => code,
        }
    }

    /// The constant's name in CANN's headers, for the common ones.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        let names = match self {
            Self::Acl(_) => ACL_NAMES,
            Self::Aclnn(_) => ACLNN_NAMES,
            Self::Hccl(_) => HCCL_NAMES,
        };
        let at = names.binary_search_by_key(&i64::from(self.code()), |name| name.value).ok()?;
        Some(names[at].name)
    }
}

/// Returns an error of `function` unless the status is success.
pub(crate) fn check(function: &'static str, status: Status) -> Result<()> {
    if status.code() == 0 { Ok(()) } else { Err(Error::Status { function, status }) }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = match self {
            Self::Acl(_) => "aclError",
            Self::Aclnn(_) => "aclnnStatus",
            Self::Hccl(_) => "HcclResult",
        };
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.code()),
            None => write!(f, "{family} {}", self.code()),
        }
    }
}

/// An error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// CANN is missing or too old.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A function of CANN failed.
    #[error("{function} failed: {status}")]
    Status {
        /// The function's C name.
        function: &'static str,
        /// The returned status.
        status: Status,
    },
    /// A function of CANN that creates an object returned null.
    #[error("{function} returned null")]
    Null {
        /// The function's C name.
        function: &'static str,
    },
    /// The installed CANN lacks an optional function.
    #[error("{} has no function {function}; CANN {} has it", origin.unwrap_or("the installed CANN"), since)]
    NoFunction {
        /// The function's C name.
        function: &'static str,
        /// The searched libraries and their version, as far as known.
        origin: Option<&'static str>,
        /// The first version of CANN that has it; only operators can be newer than 8.1.
        since: &'static str,
    },
    /// An invalid argument; no function of CANN was called.
    #[error("{what}")]
    Argument {
        /// The message.
        what: String,
    },
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) const REPEAT_INITIALIZE: i32 = 100_002;
pub(crate) const STREAM_SYNC_TIMEOUT: i32 = 507_046;

macro_rules! names {
    ($($(#[$doc:meta])* $list:ident: { $($value:literal $name:ident,)* })*) => {$(
        $(#[$doc])*
        pub(crate) const $list: &[Constant] =
            &[$(Constant { name: stringify!($name), value: $value },)*];
    )*};
}

names! {
    /// Numbers of AscendCL, sorted.
    ACL_NAMES: {
        100_000 ACL_ERROR_INVALID_PARAM,
        100_001 ACL_ERROR_UNINITIALIZE,
        100_002 ACL_ERROR_REPEAT_INITIALIZE,
        100_037 ACL_ERROR_REPEAT_FINALIZE,
        107_000 ACL_ERROR_RT_PARAM_INVALID,
        107_001 ACL_ERROR_RT_INVALID_DEVICEID,
        107_002 ACL_ERROR_RT_CONTEXT_NULL,
        107_003 ACL_ERROR_RT_STREAM_CONTEXT,
        107_017 ACL_ERROR_RT_INVALID_HANDLE,
        200_000 ACL_ERROR_BAD_ALLOC,
        207_000 ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
        207_001 ACL_ERROR_RT_MEMORY_ALLOCATION,
        207_004 ACL_ERROR_RT_NO_DEVICE,
        500_000 ACL_ERROR_INTERNAL_ERROR,
        507_006 ACL_ERROR_RT_EVENT_NOT_COMPLETE,
        507_015 ACL_ERROR_RT_AICORE_EXCEPTION,
        507_033 ACL_ERROR_RT_DEV_SETUP_ERROR,
        507_035 ACL_ERROR_RT_VECTOR_CORE_EXCEPTION,
        507_046 ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
        507_899 ACL_ERROR_RT_DRV_INTERNAL_ERROR,
    }
    /// Numbers of operators, sorted.
    ACLNN_NAMES: {
        161_001 ACLNN_ERR_PARAM_NULLPTR,
        161_002 ACLNN_ERR_PARAM_INVALID,
        361_001 ACLNN_ERR_RUNTIME_ERROR,
        561_002 ACLNN_ERR_INNER_TILING_ERROR,
        561_003 ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
    }
    /// Numbers of HCCL, sorted.
    HCCL_NAMES: {
        1 HCCL_E_PARA,
        2 HCCL_E_PTR,
        3 HCCL_E_MEMORY,
        4 HCCL_E_INTERNAL,
        5 HCCL_E_NOT_SUPPORT,
        6 HCCL_E_NOT_FOUND,
        7 HCCL_E_UNAVAIL,
        8 HCCL_E_SYSCALL,
        9 HCCL_E_TIMEOUT,
        10 HCCL_E_OPEN_FILE_FAILURE,
        11 HCCL_E_TCP_CONNECT,
        12 HCCL_E_ROCE_CONNECT,
        13 HCCL_E_TCP_TRANSFER,
        14 HCCL_E_ROCE_TRANSFER,
        15 HCCL_E_RUNTIME,
        16 HCCL_E_DRV,
        17 HCCL_E_PROFILING,
        18 HCCL_E_CCE,
        19 HCCL_E_NETWORK,
        20 HCCL_E_AGAIN,
        21 HCCL_E_REMOTE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_displays_its_name_or_family() {
        for names in [ACL_NAMES, ACLNN_NAMES, HCCL_NAMES] {
            assert!(names.is_sorted_by_key(|name| name.value));
        }
        let text = |code| Status::Acl(AclError(code)).to_string();
        assert_eq!(text(207_001), "ACL_ERROR_RT_MEMORY_ALLOCATION (207001)");
        assert_eq!(text(-5), "aclError -5");
        assert_eq!(Status::Hccl(HcclResult(9)).to_string(), "HCCL_E_TIMEOUT (9)");
        assert_eq!(Status::Aclnn(AclnnStatus(9)).to_string(), "aclnnStatus 9");
        assert_eq!(check("aclInit", Status::Acl(AclError::SUCCESS)), Ok(()));
    }
}
