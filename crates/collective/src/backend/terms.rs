//! What all ranks of a group must have alike, compared when they join.
//!
//! Each rank decides by itself which algorithm an operation takes, how it is cut into chunks, and
//! what its messages look like. Every input to that which a rank is given is a *term*: its name and
//! its value are told to all ranks, and if one differs, no rank joins. The fingerprint of every
//! operation then has a digest of them. What concerns one rank alone is no term: its timeout, its
//! address, its device.

use std::collections::BTreeMap;
use std::fmt::Debug;

use crate::{Error, GroupOptions, Rank, Result};

/// Raised with each change, within one version of this crate, of what ranks send one another or of
/// how they choose an algorithm.
const PROTOCOL: u32 = 1;

/// What this rank has, in the order in which it is compared.
#[derive(Clone, Debug)]
pub(crate) struct Terms(Vec<(&'static str, String)>);

/// What a rank of any version tells: values by name.
pub(crate) type Told = BTreeMap<String, String>;

impl Terms {
    /// Of a group over any backend.
    pub(crate) fn new(world_size: usize, options: &GroupOptions) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self(vec![("version of collective", version)])
            .with("protocol", PROTOCOL)
            .with("world_size", world_size)
            .with("GroupOptions::transport", options.transport)
            .with("GroupOptions::determinism", options.determinism)
    }

    /// Adds one.
    pub(crate) fn with(mut self, name: &'static str, value: impl Debug) -> Self {
        self.0.push((name, format!("{value:?}")));
        self
    }

    pub(crate) fn told(&self) -> Told {
        self.0.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }

    /// Compares what the first ranks have told with what rank 0 has, and so, on every rank, does
    /// this rank's own; `op` is for the error.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] with the first term that differs, rank 0's value and the other rank's.
    pub(crate) fn compare(&self, own: Rank, told: &[Told], op: &str) -> Result<()> {
        let Some(first) = told.first() else { return Ok(()) };
        let value =
            |told: &Told, name| told.get(name).map_or("not told", String::as_str).to_owned();
        let mine = self.told();
        for (rank, told) in (1..).zip(&told[1..]).chain([(own, &mine)]) {
            for &(field, _) in &self.0 {
                let [expected, found] = [value(first, field), value(told, field)];
                if expected != found {
                    let (op, by_rank) = (op.to_owned(), vec![(0, expected), (rank, found)]);
                    return Err(Error::Mismatch { op, field, by_rank });
                }
            }
        }
        Ok(())
    }

    /// For the fingerprint: FNV-1a, folded to a byte.
    pub(crate) fn digest(&self) -> u8 {
        let bytes = self.0.iter().flat_map(|(name, value)| name.bytes().chain(value.bytes()));
        let hash = bytes
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        hash.to_le_bytes().into_iter().fold(0, |folded, byte| folded ^ byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Determinism;

    fn told(changes: &[(&str, Option<&str>)]) -> Told {
        let mut told = Terms::new(2, &GroupOptions::default()).told();
        for &(name, value) in changes {
            match value {
                Some(value) => told.insert(name.into(), value.into()),
                None => told.remove(name),
            };
        }
        told
    }

    fn refusal(own: Rank, all: &[Told]) -> String {
        let terms = Terms::new(2, &GroupOptions::default());
        terms.compare(own, all, "joining").unwrap_err().to_string()
    }

    #[test]
    fn the_first_difference_is_named_with_both_values() {
        let terms = Terms::new(2, &GroupOptions::default());
        assert!(terms.compare(0, &[told(&[]), told(&[])], "joining").is_ok());
        // A later version may tell more.
        assert!(terms.compare(0, &[told(&[]), told(&[("new", Some("1"))])], "joining").is_ok());
        let version = env!("CARGO_PKG_VERSION");
        let other = told(&[("version of collective", Some("9.9.9")), ("protocol", Some("7"))]);
        assert_eq!(
            refusal(0, &[told(&[]), told(&[]), other]),
            format!(
                "joining: ranks disagree on version of collective: rank 0: {version}; rank 2: 9.9.9"
            )
        );
        assert_eq!(
            refusal(0, &[told(&[]), told(&[("protocol", None)])]),
            "joining: ranks disagree on protocol: rank 0: 1; rank 1: not told"
        );
        // This rank is beyond those that rank 0 waits for.
        assert_eq!(
            refusal(1, &[told(&[("world_size", Some("1"))])]),
            "joining: ranks disagree on world_size: rank 0: 1; rank 1: 2"
        );
    }

    #[test]
    fn the_digest_depends_on_every_term() {
        let of = |world, options: &GroupOptions| Terms::new(world, options).digest();
        let options = GroupOptions::default();
        let fast = options.clone().with_determinism(Determinism::Fast);
        assert_eq!(of(2, &options), of(2, &options.clone().with_name("other")));
        assert_ne!(of(2, &options), of(2, &fast));
        assert_ne!(of(2, &options), of(3, &options));
    }
}
