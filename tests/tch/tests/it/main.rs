//! Loops and the engine for tch, beside candle's and beside tch alone.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine;
mod examples;
mod nets;
mod numerics;
mod own_loop;
