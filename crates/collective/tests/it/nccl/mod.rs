//! The backend over NCCL, against a fake of it that the tests compile: no GPU is needed.
//!
//! The fake ([`fake`]) keeps NCCL's rules strictly and takes faults; it says nothing of NCCL itself,
//! which the tests of [`real`] ask if they are told where it is.

#[cfg_attr(
    all(feature = "hccl", feature = "nccl"),
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
