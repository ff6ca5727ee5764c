//! The `runner` program: the library's command line, and the models and data sets of the example
//! configurations.

/// Same source as the crate `zoo`, which depends on this package and so cannot be its dependency.
#[cfg(feature = "candle")]
#[expect(dead_code, unreachable_pub, unused_imports, reason = "examples and tests use the rest")]
#[path = "../zoo/lib.rs"]
mod zoo;

fn main() -> std::process::ExitCode {
    #[cfg(feature = "candle")]
    zoo::register();
    runner::cli::main()
}
