//! Integration tests of `collective`, one module for each subject.

#![expect(clippy::unwrap_used, reason = "a test")]

mod asynchronous;
mod common;
mod conformance;
mod dist;
mod fault;
#[cfg(feature = "gloo")]
mod gloo;
#[cfg(feature = "npu")]
mod hccl;
mod init;
mod launchers;
#[cfg(feature = "cuda")]
mod nccl;
mod power_sgd;
mod rebuild;
mod reducer;
mod reducer_plan;
mod sim;
mod split;
mod store;
mod store_transcripts;
mod tag;
mod tcp;
mod torch;
mod trace;

/// Not a test: entry point of process ranks, see `common`.
#[test]
fn worker() {
    let Ok(role) = std::env::var("COLLECTIVE_TEST_ROLE") else { return };
    match role.split_once("::").map(|(module, _)| module) {
        Some("conformance") => conformance::worker(),
        Some("fault") => fault::worker(),
        #[cfg(feature = "gloo")]
        Some("gloo") => gloo::worker(),
        #[cfg(feature = "npu")]
        Some("hccl") => hccl::worker(),
        Some("init") => init::worker(),
        #[cfg(feature = "cuda")]
        Some("nccl") => nccl::worker(),
        Some("rebuild") => rebuild::worker(),
        Some("split") => split::worker(),
        Some("tcp") => tcp::worker(),
        _ => panic!("no module for {role}"),
    }
}
