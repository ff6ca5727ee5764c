//! Launchers as threads and processes of the tests, with a shell as the ranks' program.

#![expect(clippy::unwrap_used, reason = "a test")]

mod command;
mod common;
mod failures;
mod files;
mod flags;
mod nodes;
mod processes;
mod ranks;
mod trace;
