//! `device = "cuda"`, for a GPU or the fake one of `.ci/devices`. A binary of its own: only these tests are built
//! with candle's CUDA.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod device;
mod gpu;
mod graph;
#[cfg(feature = "nccl")]
mod nccl;
#[path = "../it/common/step.rs"]
mod step;

/// Builds a run whose configuration may name what is in the zoo.
fn from_config(config: runner::config::Config) -> runner::Result<runner::RunnerBuilder> {
    zoo::register();
    runner::RunnerBuilder::from_config(config)
}
