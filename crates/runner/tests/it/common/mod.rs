//! What several modules need.

#[cfg(feature = "candle")]
pub(crate) mod shards;
#[cfg(feature = "candle")]
pub(crate) mod slurm;
#[cfg(feature = "candle")]
pub(crate) mod step;

/// This program with the one test of that name, for tests that need a process of their own.
#[cfg(feature = "candle")]
pub(crate) fn alone(test: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", test]);
    command
}

/// A run of a configuration that may name what is in the zoo.
#[cfg(feature = "candle")]
pub(crate) fn from_config(config: runner::config::Config) -> runner::Result<runner::RunnerBuilder> {
    zoo::register();
    runner::RunnerBuilder::from_config(config)
}
