//! Variables as checked values, each noted with where it came from.
//!
//! Invariant: an error names the variable, its text, and what is wrong with it.

use std::fmt::Display;
use std::str::FromStr;

use super::topology::{Fact, Origin};
use crate::{Error, Result};

/// Where variables are looked up.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A value for a variable that is not there, and why.
pub(super) type Otherwise<T> = Option<(T, &'static str)>;

/// Reads variables and notes where each fact came from.
pub(super) struct Reader<'a> {
    pub(super) lookup: Lookup<'a>,
    pub(super) facts: Vec<Fact>,
    /// What to do about a missing variable.
    pub(super) hint: &'static str,
}

impl<'a> Reader<'a> {
    pub(super) fn new(lookup: Lookup<'a>) -> Self {
        Self { lookup, facts: Vec::new(), hint: "" }
    }

    /// The number in the first of `variables` that is set.
    pub(super) fn number<T: FromStr + Display>(
        &mut self,
        name: &'static str,
        variables: &[&'static str],
        otherwise: Otherwise<T>,
    ) -> Result<T> {
        let Some((variable, text)) = self.first(variables) else {
            return self.otherwise(name, variables, otherwise);
        };
        let value = number(variable, &text)?;
        self.note(name, &value, Origin::Variable(variable));
        Ok(value)
    }

    /// The number in the first of `variables` that is set, or else `otherwise`.
    pub(super) fn optional<T: FromStr + Display>(
        &mut self,
        name: &'static str,
        variables: &[&'static str],
        otherwise: Otherwise<T>,
    ) -> Result<Option<T>> {
        match otherwise.is_some() || self.first(variables).is_some() {
            true => self.number(name, variables, otherwise).map(Some),
            false => Ok(None),
        }
    }

    /// The text in the first of `variables` that is set, which may not be blank.
    pub(super) fn text(
        &mut self,
        name: &'static str,
        variables: &[&'static str],
        otherwise: Otherwise<String>,
    ) -> Result<String> {
        let Some((variable, text)) = self.first(variables) else {
            return self.otherwise(name, variables, otherwise);
        };
        let text = text.trim();
        if text.is_empty() {
            return Err(contradiction(format!("{variable} is set, but empty")));
        }
        self.note(name, &text, Origin::Variable(variable));
        Ok(text.to_owned())
    }

    /// The first of `variables` that is set, and its text.
    pub(super) fn first(&self, variables: &[&'static str]) -> Option<(&'static str, String)> {
        variables.iter().find_map(|&name| Some((name, (self.lookup)(name)?)))
    }

    /// As [`first`](Self::first), where there must be one.
    pub(super) fn required(&self, variables: &[&'static str]) -> Result<(&'static str, String)> {
        self.first(variables).ok_or_else(|| self.missing(variables))
    }

    pub(super) fn note(&mut self, name: &'static str, value: &dyn Display, origin: Origin) {
        self.facts.push(Fact { name, value: value.to_string(), origin });
    }

    fn otherwise<T: Display>(
        &mut self,
        name: &'static str,
        variables: &[&'static str],
        otherwise: Otherwise<T>,
    ) -> Result<T> {
        let (value, why) = otherwise.ok_or_else(|| self.missing(variables))?;
        self.note(name, &value, Origin::Default(why));
        Ok(value)
    }

    fn missing(&self, variables: &[&'static str]) -> Error {
        contradiction(format!("{} is not set, {}", variables[0], self.hint))
    }
}

/// `text` as a number, or an error that names `variable`.
pub(super) fn number<T: FromStr>(variable: &str, text: &str) -> Result<T> {
    let parsed = text.trim().parse();
    parsed.map_err(|_| contradiction(format!("{variable}={text:?} is not a number in range")))
}

/// Refuses a rank that is not below its count; each is a name and a value.
pub(super) fn less(rank: (&str, usize), count: (&str, usize)) -> Result<()> {
    if rank.1 < count.1 {
        return Ok(());
    }
    Err(contradiction(format!("{}={} is not below {}={}", rank.0, rank.1, count.0, count.1)))
}

/// Refuses more local ranks than ranks.
pub(super) fn at_most(local: (&str, usize), all: (&str, usize)) -> Result<()> {
    if local.1 <= all.1 {
        return Ok(());
    }
    Err(contradiction(format!("{}={} is more than {}={}", local.0, local.1, all.0, all.1)))
}

/// Refuses the port 0 where ranks must meet.
pub(super) fn agreeable(port: u16, world_size: usize) -> Result<()> {
    if port == 0 && world_size > 1 {
        let text = "MASTER_PORT=0 is no port that ranks can agree on";
        return Err(contradiction(text.to_owned()));
    }
    Ok(())
}

/// A port for whoever gives none, below those that the system hands out by itself.
pub(super) fn port_of(seed: u64) -> u16 {
    const FIRST: u16 = 16_384;
    const COUNT: u16 = 16_384;
    FIRST + u16::try_from(seed % u64::from(COUNT)).expect("below a u16")
}

pub(super) fn contradiction(text: String) -> Error {
    Error::InvalidArgument(text)
}
