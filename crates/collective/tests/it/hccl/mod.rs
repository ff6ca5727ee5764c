//! The backend over HCCL, on the simulator of CANN's protocol: no NPU is needed.
//!
//! The simulator enforces the rules of CANN's documents, takes faults, and says at the end which rules
//! were broken and what was not given back; it says nothing of real hardware.

#[cfg_attr(
    all(feature = "hccl", feature = "nccl"),
    expect(clippy::duplicate_mod, reason = "the same tests over each library's fake")
)]
#[path = "../device_verbs.rs"]
mod device;
mod failures;
#[path = "sim.rs"]
mod fake;
mod faults;
mod joining;
mod processes;
mod reducer;
mod verbs;

pub(crate) use processes::worker;
