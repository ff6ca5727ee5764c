//! The backend over HCCL, on the simulator of CANN's protocol: no NPU is needed.
//!
//! The simulator enforces the rules of CANN's documents, injects faults, and reports at the end
//! which rules were broken and what was not released; it does not show how real hardware behaves.

#[cfg_attr(
    all(feature = "npu", feature = "cuda"),
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
