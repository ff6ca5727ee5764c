//! The backend over NCCL, against a fake of it that the tests compile: no GPU is needed.
//!
//! The fake ([`fake`]) keeps NCCL's rules strictly and takes faults; it says nothing of NCCL itself,
//! which the tests of [`real`] ask if they are told where it is.

#![cfg(feature = "nccl")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops there")]

#[expect(dead_code, reason = "shared with other tests, which use the rest")]
mod common;
#[path = "device/verbs.rs"]
mod device;
#[path = "nccl/failures.rs"]
mod failures;
#[path = "nccl/fake.rs"]
mod fake;
#[path = "nccl/joining.rs"]
mod joining;
#[path = "nccl/processes.rs"]
mod processes;
#[path = "nccl/real.rs"]
mod real;
#[path = "nccl/reducer.rs"]
mod reducer;
#[expect(dead_code, reason = "the conformance suite uses the rest")]
#[path = "conformance/twin.rs"]
mod twin;
#[path = "nccl/verbs.rs"]
mod verbs;

/// A rank that is a process of a test.
#[test]
fn worker() {
    processes::worker();
}
