//! Integration tests, in one binary.
#![expect(clippy::unwrap_used, reason = "a failed test may panic")]

mod metrics;
