//! The `runner` program; everything is in the library.

fn main() -> std::process::ExitCode {
    runner::cli::main()
}
