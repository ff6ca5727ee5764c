//! The backend over NCCL, against a fake NCCL that the tests compile: no GPU is needed.
//!
//! The fake ([`fake`]) enforces NCCL's rules strictly and injects faults; it does not show how NCCL
//! itself behaves. The tests of [`real`] use the real NCCL if its path is given.

#[cfg_attr(
    all(feature = "npu", feature = "cuda"),
    expect(clippy::duplicate_mod, reason = "the same tests over each library's fake")
)]
#[path = "../device_verbs.rs"]
mod device;
mod failures;
mod fake;
mod joining;
mod processes;
mod real;
mod reducer;
mod verbs;

pub(crate) use processes::worker;
