//! Heartbeats: each node increments a counter in the control store; a node whose counter stops is
//! lost.

use std::time::{Duration, Instant};

use collective::{Store, TcpStore};

use crate::options::RdzvConfig;

/// Counters of other nodes, with the time since which each has its value, by this process's clock.
#[derive(Default)]
pub(super) struct Heartbeats {
    polled: Option<Instant>,
    counters: Vec<Counter>,
}

struct Counter {
    key: String,
    value: Vec<u8>,
    since: Instant,
}

impl Heartbeats {
    /// Monitors the counters at `keys` from now on, and no others.
    pub(super) fn watch(&mut self, keys: Vec<String>) {
        self.counters.retain(|counter| keys.contains(&counter.key));
        for key in keys {
            if !self.counters.iter().any(|counter| counter.key == key) {
                let counter = Counter { key, value: Vec::new(), since: Instant::now() };
                self.counters.push(counter);
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
        for Counter { key, value, since } in &mut self.counters {
            if let Ok(now) = store.get(key, Duration::from_millis(1))
                && now != *value
            {
                (*value, *since) = (now, Instant::now());
            }
        }
        self.polled = Some(Instant::now());
    }

    /// Returns whether the counter at `key` has been unchanged for too long.
    pub(super) fn is_lost(&self, key: &str, rdzv: &RdzvConfig) -> bool {
        let counter = self.counters.iter().find(|counter| counter.key == key);
        counter.is_some_and(|counter| counter.since.elapsed() > rdzv.lost_after())
    }
}
