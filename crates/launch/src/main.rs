//! The `launch` program: torchrun for any program, and `launch store`, the control store of an
//! elastic job.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use launch::{LaunchArgs, Result, StoreArgs, launch, serve_store};

/// Start the ranks of a distributed job on this machine, as torchrun does, for any program.
#[derive(Debug, Parser)]
#[command(
    name = "launch",
    version,
    about,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(flatten)]
    launch: LaunchArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Host the control store of an elastic job, on a machine that is not one of its nodes.
    Store(StoreArgs),
}

fn main() -> ExitCode {
    run(Cli::parse()).unwrap_or_else(|error| {
        // Standard error may be closed; the exit code still reports the failure.
        let _ = writeln!(std::io::stderr(), "error: {error}");
        ExitCode::FAILURE
    })
}

fn run(cli: Cli) -> Result<ExitCode> {
    if let Some(Command::Store(args)) = cli.command {
        return serve_store(&args).map(|()| ExitCode::SUCCESS);
    }
    let options = cli.launch.options(|_| true)?;
    Ok(ExitCode::from(u8::try_from(launch(options)?).unwrap_or(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn only_the_first_argument_can_be_a_subcommand() {
        let parse = |words: &str| Cli::try_parse_from(words.split(' '));
        assert!(parse("launch store").unwrap().command.is_some());
        for words in ["launch ./store", "launch -- store", "launch python store"] {
            assert!(parse(words).unwrap().command.is_none(), "{words}");
        }
        assert!(parse("launch").is_err());
    }
}
