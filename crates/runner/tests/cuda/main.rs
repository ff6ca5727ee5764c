//! Tests of `device = "cuda"`, on a GPU or the fake one of `.ci/devices`. They are a separate
//! binary because only they are built with candle's CUDA.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod device;
mod gpu;
mod graph;
mod nccl;
#[path = "../it/common/step.rs"]
mod step;

/// Creates a builder from a configuration that may use the zoo.
fn from_config(config: runner::config::Config) -> runner::Result<runner::RunnerBuilder> {
    runner::zoo::register();
    runner::RunnerBuilder::from_config(config)
}
