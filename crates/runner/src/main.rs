//! The `runner` program: the library's command line, and the models and data sets of the example
//! configurations.

fn main() -> std::process::ExitCode {
    #[cfg(feature = "candle")]
    runner::zoo::register();
    runner::cli::main()
}
