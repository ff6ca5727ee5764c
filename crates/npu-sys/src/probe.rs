//! The NPUs of this machine.

use std::fmt;

use crate::status::REPEAT_INITIALIZE;
use crate::sys::Acl;
use crate::{Error, Result, result};

/// The NPUs this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Number of devices, without those that `ASCEND_RT_VISIBLE_DEVICES` hides.
    pub count: usize,
    /// The SoC name, for example `Ascend910B2`; `None` if AscendCL returns none.
    pub soc: Option<String>,
    /// AscendCL's version.
    pub version: Version,
}

/// AscendCL's version, which differs from the toolkit's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major version: incompatible changes.
    pub major: i32,
    /// Minor version: additions.
    pub minor: i32,
    /// Patch version: other changes.
    pub patch: i32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let soc = self.soc.as_deref().unwrap_or("unnamed NPU");
        write!(f, "{} x {soc}, AscendCL {}", self.count, self.version)
    }
}

/// Returns this process's NPUs.
///
/// Loads and initializes AscendCL unless that has been done, and leaves it initialized, since not
/// every version can be initialized twice.
///
/// # Errors
///
/// [`Error::Load`] without CANN, [`Error::Status`] if one of its functions fails.
pub fn probe() -> Result<Devices> {
    probe_with(Acl::global()?)
}

/// As [`probe`], with a given AscendCL.
///
/// # Errors
///
/// [`Error::Status`].
pub fn probe_with(acl: &Acl) -> Result<Devices> {
    match result::init(acl) {
        // Already initialized, by torch_npu in this process or an earlier probe.
        Err(Error::Status { status, .. }) if status.code() == REPEAT_INITIALIZE => {}
        other => other?,
    }
    let count = result::device_count(acl)? as usize;
    let [major, minor, patch] = result::version(acl)?;
    let version = Version { major, minor, patch };
    Ok(Devices { count, soc: result::soc_name(acl)?, version })
}
