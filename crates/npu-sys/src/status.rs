//! `aclError` with a name, and this crate's error.

use std::fmt;

use crate::LoadError;
use crate::sys::AclError;

/// A number AscendCL returned that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(AclError);

impl Status {
    /// Success is `Ok`, anything else a status.
    pub(crate) const fn check(error: AclError) -> std::result::Result<(), Self> {
        if error.0 == 0 { Ok(()) } else { Err(Self(error)) }
    }

    /// The number.
    #[must_use]
    pub const fn code(self) -> i32 {
        self.0.0
    }

    /// The constant's name in AscendCL's headers, for the common ones.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        let at = NAMES.binary_search_by_key(&self.code(), |(code, _)| *code).ok()?;
        Some(NAMES[at].1)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.code()),
            None => write!(f, "aclError {}", self.code()),
        }
    }
}

/// A failure of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// CANN is not installed, or not usable.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A function of CANN failed.
    #[error("{function} failed: {status}")]
    Status {
        /// Its C name.
        function: &'static str,
        /// What it returned.
        status: Status,
    },
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;

pub(crate) const REPEAT_INITIALIZE: i32 = 100_002;

/// Sorted by number.
const NAMES: &[(i32, &str)] = &[
    (100_000, "ACL_ERROR_INVALID_PARAM"),
    (100_001, "ACL_ERROR_UNINITIALIZE"),
    (REPEAT_INITIALIZE, "ACL_ERROR_REPEAT_INITIALIZE"),
    (100_037, "ACL_ERROR_REPEAT_FINALIZE"),
    (107_000, "ACL_ERROR_RT_PARAM_INVALID"),
    (107_001, "ACL_ERROR_RT_INVALID_DEVICEID"),
    (107_002, "ACL_ERROR_RT_CONTEXT_NULL"),
    (107_003, "ACL_ERROR_RT_STREAM_CONTEXT"),
    (107_017, "ACL_ERROR_RT_INVALID_HANDLE"),
    (200_000, "ACL_ERROR_BAD_ALLOC"),
    (207_000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT"),
    (207_001, "ACL_ERROR_RT_MEMORY_ALLOCATION"),
    (207_004, "ACL_ERROR_RT_NO_DEVICE"),
    (500_000, "ACL_ERROR_INTERNAL_ERROR"),
    (507_015, "ACL_ERROR_RT_AICORE_EXCEPTION"),
    (507_033, "ACL_ERROR_RT_DEV_SETUP_ERROR"),
    (507_035, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION"),
    (507_046, "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT"),
    (507_899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_found() {
        assert!(NAMES.is_sorted_by_key(|(code, _)| *code));
        let text = |code| Status::check(AclError(code)).unwrap_err().to_string();
        assert_eq!(text(207_001), "ACL_ERROR_RT_MEMORY_ALLOCATION (207001)");
        assert_eq!(text(-5), "aclError -5");
        assert_eq!(Status::check(AclError(0)), Ok(()));
    }
}
