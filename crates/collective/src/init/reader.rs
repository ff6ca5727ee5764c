//! Reads environment variables as checked values, and records the source of each.
//!
//! Invariant: an error names the variable, its text, and the problem.

use std::fmt::Display;
use std::str::FromStr;

use super::topology::Fact;
use crate::{Error, Result};

/// Looks up a variable.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A default for a variable that is not set, and the reason for it.
pub(super) type Fallback<T> = Option<(T, &'static str)>;

/// Reads variables and records each value with its source.
pub(super) struct Reader<'a> {
    pub(super) lookup: Lookup<'a>,
    pub(super) facts: Vec<Fact>,
    /// Ends the error for a missing variable: context, and what to do.
    pub(super) hint: &'static str,
}

impl<'a> Reader<'a> {
    pub(super) fn new(lookup: Lookup<'a>) -> Self {
        Self { lookup, facts: Vec::new(), hint: "" }
    }

    /// Parses the value of the first of `variables` that is set, or else takes `fallback`.
    pub(super) fn value<T: FromStr + Display>(
        &mut self,
        name: &'static str,
        variables: &[&'static str],
        fallback: Fallback<T>,
    ) -> Result<T> {
        let (value, origin) = match self.first(variables) {
            Some((variable, text)) => (parse(variable, &text)?, variable),
            None => fallback.ok_or_else(|| self.missing(variables))?,
        };
        self.note(name, &value, origin);
        Ok(value)
    }

    /// Same as [`value`](Self::value), but `None` if no variable is set and there is no fallback.
    pub(super) fn optional<T: FromStr + Display>(
        &mut self,
        name: &'static str,
        variables: &[&'static str],
        fallback: Fallback<T>,
    ) -> Result<Option<T>> {
        match fallback.is_some() || self.first(variables).is_some() {
            true => self.value(name, variables, fallback).map(Some),
            false => Ok(None),
        }
    }

    /// Returns the store's port: `MASTER_PORT`, else `fallback`.
    pub(super) fn master_port(
        &mut self,
        world_size: usize,
        fallback: Fallback<u16>,
    ) -> Result<u16> {
        let port = self.value("master_port", &["MASTER_PORT"], fallback)?;
        if port == 0 && world_size > 1 {
            let text = "MASTER_PORT=0 is not valid for several ranks; set a fixed port";
            return Err(invalid(text.to_owned()));
        }
        Ok(port)
    }

    /// Returns the first of `variables` that is set, and its text.
    pub(super) fn first(&self, variables: &[&'static str]) -> Option<(&'static str, String)> {
        variables.iter().find_map(|&name| Some((name, (self.lookup)(name)?)))
    }

    /// Same as [`first`](Self::first), but an error if none is set.
    pub(super) fn required(&self, variables: &[&'static str]) -> Result<(&'static str, String)> {
        self.first(variables).ok_or_else(|| self.missing(variables))
    }

    pub(super) fn note(&mut self, name: &'static str, value: &dyn Display, origin: &'static str) {
        self.facts.push(Fact { name, value: value.to_string(), origin });
    }

    fn missing(&self, variables: &[&'static str]) -> Error {
        invalid(format!("{} is not set, {}", variables[0], self.hint))
    }
}

/// Parses `text`, a number or a name; the error names `variable`.
pub(super) fn parse<T: FromStr>(variable: &str, text: &str) -> Result<T> {
    match text.trim() {
        "" => Err(invalid(format!("{variable} is set, but empty"))),
        trimmed => trimmed
            .parse()
            .map_err(|_| invalid(format!("{variable}={text:?} is not a number in range"))),
    }
}

/// Checks that a rank is below its count; each is a name and a value.
pub(super) fn check_below(rank: (&str, usize), count: (&str, usize)) -> Result<()> {
    if rank.1 < count.1 {
        return Ok(());
    }
    Err(invalid(format!("{}={} is not below {}={}", rank.0, rank.1, count.0, count.1)))
}

/// Checks that there are no more local ranks than ranks.
pub(super) fn check_at_most(local: (&str, usize), all: (&str, usize)) -> Result<()> {
    if local.1 <= all.1 {
        return Ok(());
    }
    Err(invalid(format!("{}={} is more than {}={}", local.0, local.1, all.0, all.1)))
}

/// Derives a default port, below the range of ephemeral ports.
pub(super) fn port_from_seed(seed: u64) -> u16 {
    const FIRST: u16 = 16_384;
    const COUNT: u16 = 16_384;
    FIRST + u16::try_from(seed % u64::from(COUNT)).expect("the remainder is below 2^14")
}

pub(super) fn invalid(text: String) -> Error {
    Error::InvalidArgument(text)
}
