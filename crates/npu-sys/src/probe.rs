//! What this machine has.

use std::fmt;

use crate::status::REPEAT_INITIALIZE;
use crate::sys::Acl;
use crate::{Error, Result, result};

/// The NPUs this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    /// How many; `ASCEND_RT_VISIBLE_DEVICES` may hide some.
    pub count: usize,
    /// The chip, for example `Ascend910B2`, if AscendCL names it.
    pub soc: Option<String>,
    /// AscendCL's version.
    pub version: Version,
}

/// AscendCL's version, which is not the toolkit's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes when the interface breaks.
    pub major: i32,
    /// Changes when the interface grows.
    pub minor: i32,
    /// Changes otherwise.
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

/// Asks this process's AscendCL what there is.
///
/// Loads and initialises AscendCL if nobody has, and leaves it initialised: a process that probes
/// goes on to use what it found, and not every version can be initialised twice.
///
/// # Errors
///
/// [`Error::Load`] without CANN, [`Error::Status`] if one of its functions fails.
pub fn probe() -> Result<Devices> {
    probe_with(Acl::global()?)
}

/// As [`probe`], with an AscendCL from elsewhere.
///
/// # Errors
///
/// [`Error::Status`].
pub fn probe_with(acl: &Acl) -> Result<Devices> {
    match result::init(acl) {
        // Somebody else was first: torch_npu in this process, or an earlier probe.
        Err(Error::Status { status, .. }) if status.code() == REPEAT_INITIALIZE => {}
        other => other?,
    }
    let count = result::device_count(acl)? as usize;
    let [major, minor, patch] = result::version(acl)?;
    let version = Version { major, minor, patch };
    Ok(Devices { count, soc: result::soc_name(acl)?, version })
}
