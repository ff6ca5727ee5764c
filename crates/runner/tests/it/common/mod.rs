//! Helpers shared by several modules.

#[cfg(feature = "candle")]
#[path = "../../../../collective/tests/it/common/collector.rs"]
pub(crate) mod collector;
#[cfg(feature = "candle")]
pub(crate) mod shards;
#[cfg(feature = "candle")]
pub(crate) mod slurm;
#[cfg(feature = "candle")]
pub(crate) mod step;

/// Command that runs one ignored test of this program in its own process.
#[cfg(feature = "candle")]
pub(crate) fn alone(test: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", test]);
    command
}

/// Builder of a run of a configuration that may use the zoo.
#[cfg(feature = "candle")]
pub(crate) fn from_config(config: runner::config::Config) -> runner::Result<runner::RunnerBuilder> {
    runner::zoo::register();
    runner::RunnerBuilder::from_config(config)
}
