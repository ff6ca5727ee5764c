//! The configuration that all ranks of a group must share, compared when they join.
//!
//! Each rank chooses an operation's algorithm, its chunks and the format of its messages
//! independently. Every input to that choice is a field here. Ranks exchange names and values
//! through the store, and no rank joins if one differs. Settings of one rank alone, such as
//! timeout, address and device, are not fields.

use std::collections::BTreeMap;
use std::fmt::Debug;

use crate::{Error, GroupOptions, Rank, Result};

/// Incremented with each change, within one version of this crate, of the messages between ranks or
/// of the choice of algorithms.
const PROTOCOL: u32 = 6;

/// This rank's fields, in the order in which they are compared.
#[derive(Clone, Debug)]
pub(crate) struct SharedConfig(Vec<(&'static str, String)>);

/// Fields as a rank of any version writes them to the store: values by name.
pub(crate) type Record = BTreeMap<String, String>;

impl SharedConfig {
    /// Returns the fields of a group over any backend.
    pub(crate) fn new(world_size: usize, options: &GroupOptions) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let order = if cfg!(target_endian = "little") { "little" } else { "big" };
        Self(vec![("version of collective", version), ("byte order", order.to_owned())])
            .with("protocol", PROTOCOL)
            .with("world_size", world_size)
            .with("GroupOptions::transport", options.transport)
            .with("GroupOptions::determinism", options.determinism)
    }

    /// Adds a field.
    pub(crate) fn with(mut self, name: &'static str, value: impl Debug) -> Self {
        self.0.push((name, format!("{value:?}")));
        self
    }

    pub(crate) fn record(&self) -> Record {
        self.0.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }

    /// Compares this rank's fields and `records`, which are those of ranks 0, 1, ..., with rank 0's
    /// record. `op` is for the error.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] with the first field that differs, rank 0's value and the other rank's.
    pub(crate) fn compare(&self, own: Rank, records: &[Record], op: &str) -> Result<()> {
        let Some(first) = records.first() else { return Ok(()) };
        let value =
            |record: &Record, name| record.get(name).map_or("unknown", String::as_str).to_owned();
        let mine = self.record();
        for (rank, record) in (1..).zip(&records[1..]).chain([(own, &mine)]) {
            for &(field, _) in &self.0 {
                let [expected, found] = [value(first, field), value(record, field)];
                if expected != found {
                    let (op, by_rank) = (op.to_owned(), vec![(0, expected), (rank, found)]);
                    return Err(Error::Mismatch { op, field, by_rank });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(changes: &[(&str, Option<&str>)]) -> Record {
        let mut record = SharedConfig::new(2, &GroupOptions::default()).record();
        for &(name, value) in changes {
            match value {
                Some(value) => record.insert(name.into(), value.into()),
                None => record.remove(name),
            };
        }
        record
    }

    fn refusal(own: Rank, all: &[Record]) -> String {
        let config = SharedConfig::new(2, &GroupOptions::default());
        config.compare(own, all, "joining").unwrap_err().to_string()
    }

    #[test]
    fn a_mismatch_names_the_first_field_that_differs_and_both_values() {
        let config = SharedConfig::new(2, &GroupOptions::default());
        assert!(config.compare(0, &[record(&[]), record(&[])], "joining").is_ok());
        // A later version may have further fields.
        assert!(
            config.compare(0, &[record(&[]), record(&[("new", Some("1"))])], "joining").is_ok()
        );
        let version = env!("CARGO_PKG_VERSION");
        let other = record(&[("version of collective", Some("9.9.9")), ("protocol", Some("7"))]);
        assert_eq!(
            refusal(0, &[record(&[]), record(&[]), other]),
            format!(
                "joining: ranks disagree on version of collective: rank 0: {version}; rank 2: 9.9.9"
            )
        );
        assert_eq!(
            refusal(0, &[record(&[]), record(&[("protocol", None)])]),
            "joining: ranks disagree on protocol: rank 0: 6; rank 1: unknown"
        );
        // Rank 0 does not wait for this rank.
        assert_eq!(
            refusal(1, &[record(&[("world_size", Some("1"))])]),
            "joining: ranks disagree on world_size: rank 0: 1; rank 1: 2"
        );
    }

    /// Numbers are sent as they are in memory.
    #[test]
    fn ranks_of_another_byte_order_do_not_join() {
        let [own, other] =
            if cfg!(target_endian = "little") { ["little", "big"] } else { ["big", "little"] };
        assert_eq!(
            refusal(0, &[record(&[]), record(&[("byte order", Some(other))])]),
            format!("joining: ranks disagree on byte order: rank 0: {own}; rank 1: {other}")
        );
    }
}
