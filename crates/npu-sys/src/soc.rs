//! Chips and their differences that matter to callers of operators.

use std::fmt;

use crate::sys::Acl;
use crate::{Result, result};

/// A chip, by AscendCL's SoC name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Soc {
    name: String,
}

impl Soc {
    /// A chip with this name, for example `Ascend910B2`.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// The chip of this AscendCL; one without a name counts as first generation.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status).
    pub fn of(acl: &Acl) -> Result<Self> {
        Ok(Self { name: result::soc_name(acl)?.unwrap_or_else(|| "unnamed".into()) })
    }

    /// The SoC name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the chip supports bf16, operators on tensor lists, and infinite f16: true for the
    /// second generation and later. `Ascend910B` without a digit after it is of the first
    /// generation.
    #[must_use]
    pub fn is_second_generation(&self) -> bool {
        let digit = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
        let later = ["Ascend910_93", "Ascend910_95", "Ascend950"];
        self.name.strip_prefix("Ascend910B").is_some_and(digit)
            || later.iter().any(|prefix| self.name.starts_with(prefix))
    }
}

impl fmt::Display for Soc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_follows_from_the_name() {
        for name in ["Ascend910B1", "Ascend910B4", "Ascend910_9391", "Ascend950"] {
            assert!(Soc::named(name).is_second_generation(), "{name}");
        }
        for name in ["Ascend910", "Ascend910A", "Ascend910B", "Ascend910ProB", "Ascend310P3", ""] {
            assert!(!Soc::named(name).is_second_generation(), "{name}");
        }
    }
}
