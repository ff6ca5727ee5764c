//! candle's CUDA backend and our crates on the fake GPU.

#![expect(clippy::unwrap_used, reason = "a test")]
#![expect(unsafe_code, reason = "tensors are lent by their addresses")]

mod graph;
mod operators;
mod several;
mod step_on;
mod strict;
mod trainer;
mod training;

use std::env;
use std::process::Command;

use candle_core::Result;

/// Runs `body` in a process of its own, which it may end; returns whether it came to its end, and
/// its output.
fn alone(test: &str, body: impl FnOnce() -> Result<()>) -> Option<(bool, String)> {
    alone_with(&[], test, body)
}

/// As [`alone`], with environment variables.
fn alone_with(
    variables: &[(&str, &str)],
    test: &str,
    body: impl FnOnce() -> Result<()>,
) -> Option<(bool, String)> {
    if env::var_os("ALONE").is_some() {
        body().unwrap();
        return None;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env("ALONE", "1");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

/// A function of the fake GPU by its name.
///
/// # Safety
///
/// It must have this type.
unsafe fn of_the_fake<F: Copy>(name: &str) -> F {
    let process = libloading::os::unix::Library::this();
    // SAFETY: the caller vouches for the type.
    let function = unsafe { process.get::<F>(name) };
    *function.unwrap()
}
