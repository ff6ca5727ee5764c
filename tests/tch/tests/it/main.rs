//! The engine for tch, beside candle's and beside tch alone.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine;
mod nets;
mod numerics;
