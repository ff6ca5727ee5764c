//! Heartbeats: each node increments a counter in the control store; a node whose counter stops is
//! lost.

use std::time::{Duration, Instant};

use collective::{Store, TcpStore};

use crate::options::RdzvConfig;

/// Counters of other nodes, with the time since which each has its value, by this process's clock.
/// Time in which the store does not answer does not count, because nobody can write then.
#[derive(Default)]
pub(super) struct Heartbeats {
    polled: Option<Instant>,
    counters: Vec<Counter>,
}

struct Counter {
    key: String,
    value: Vec<u8>,
    since: Instant,
    /// Whether the store did not answer when it was last asked.
    is_unknown: bool,
}

impl Heartbeats {
    /// Monitors the counters at `keys` from now on, and no others.
    pub(super) fn watch(&mut self, keys: Vec<String>) {
        self.counters.retain(|counter| keys.contains(&counter.key));
        for key in keys {
            if !self.counters.iter().any(|counter| counter.key == key) {
                let (value, since) = (Vec::new(), Instant::now());
                self.counters.push(Counter { key, value, since, is_unknown: false });
            }
        }
    }

    /// Returns whether a heartbeat interval has passed since the last poll.
    pub(super) fn is_due(&self, rdzv: &RdzvConfig) -> bool {
        self.polled.is_none_or(|polled| polled.elapsed() >= rdzv.heartbeat)
    }

    /// Reads the counters, at most once per heartbeat interval.
    pub(super) fn poll(&mut self, store: &TcpStore, rdzv: &RdzvConfig) {
        if !self.is_due(rdzv) {
            return;
        }
        for counter in &mut self.counters {
            counter.update(store.get(&counter.key, Duration::from_millis(1)));
        }
        self.polled = Some(Instant::now());
    }

    /// Returns whether the counter at `key` has been unchanged for too long.
    pub(super) fn is_lost(&self, key: &str, rdzv: &RdzvConfig) -> bool {
        let counter = self.counters.iter().find(|counter| counter.key == key);
        let since = counter.filter(|counter| !counter.is_unknown).map(|counter| counter.since);
        since.is_some_and(|since| since.elapsed() > rdzv.lost_after())
    }
}

impl Counter {
    fn update(&mut self, answer: collective::Result<Vec<u8>>) {
        let value = match answer {
            Ok(value) => value,
            // Its node has not written it yet.
            Err(collective::Error::KeyTimeout { .. }) => Vec::new(),
            Err(_) => {
                self.is_unknown = true;
                return;
            }
        };
        if self.is_unknown || value != self.value {
            (self.value, self.since, self.is_unknown) = (value, Instant::now(), false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_not_lost_while_the_store_does_not_answer() {
        let rdzv = RdzvConfig { heartbeat: Duration::from_millis(1), ..RdzvConfig::default() };
        let mut heartbeats = Heartbeats::default();
        heartbeats.watch(vec!["beat".to_owned()]);
        let answer = |heartbeats: &mut Heartbeats, answer| {
            std::thread::sleep(2 * rdzv.lost_after());
            heartbeats.counters[0].update(answer);
            heartbeats.is_lost("beat", &rdzv)
        };
        let no_answer = || {
            let [store, during, reason] = ["h:1", "get", "no answer"].map(str::to_owned);
            Err(collective::Error::Store { store, during, reason })
        };
        let no_key = || {
            let (store, keys) = ("h:1".to_owned(), Vec::new());
            Err(collective::Error::KeyTimeout { store, keys, waited: Duration::ZERO })
        };
        assert!(!answer(&mut heartbeats, Ok(b"1".to_vec())));
        assert!(!answer(&mut heartbeats, no_answer()));
        assert!(!answer(&mut heartbeats, Ok(b"1".to_vec())), "the node could not write either");
        assert!(answer(&mut heartbeats, Ok(b"1".to_vec())));
        assert!(!answer(&mut heartbeats, no_answer()));
        assert!(!answer(&mut heartbeats, no_key()));
        assert!(answer(&mut heartbeats, no_key()));
    }
}
