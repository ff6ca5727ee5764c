//! Tests that cross crates or processes, in one binary: one link, and
//! `cargo test -p tests launch::` still selects.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod book;
mod config;
mod configs;
mod corpus;
mod fault;
mod layering;
mod lockstep;
mod overlap;
mod parity;
mod resume;
mod tidy;

/// The program each rank runs.
const WORKER: &str = env!("CARGO_BIN_EXE_worker");
