//! The backend over HCCL, on the simulator of CANN's protocol: no NPU is needed.
//!
//! The simulator enforces the rules of CANN's documents, takes faults, and says at the end which rules
//! were broken and what was not given back; it says nothing of real hardware.

#![cfg(feature = "hccl")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops there")]

#[expect(dead_code, reason = "shared with other tests, which use the rest")]
mod common;
#[path = "device/verbs.rs"]
mod device;
#[path = "hccl/failures.rs"]
mod failures;
#[path = "hccl/sim.rs"]
mod fake;
#[path = "hccl/faults.rs"]
mod faults;
#[path = "hccl/joining.rs"]
mod joining;
#[path = "hccl/processes.rs"]
mod processes;
#[path = "hccl/reducer.rs"]
mod reducer;
#[expect(dead_code, reason = "the conformance suite uses the rest")]
#[path = "conformance/twin.rs"]
mod twin;
#[path = "hccl/verbs.rs"]
mod verbs;

/// A rank that is a process of a test.
#[test]
fn worker() {
    processes::worker();
}
