//! The command line: `runner launch`, `runner train`.
//!
//! A program of your own gets the same command line by registering its parts and calling
//! [`main`]:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     // runner::registry::MODELS.register("MyNet", ...)
//!     runner::cli::main()
//! }
//! ```

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use collective::Launcher;

use crate::config::{Config, parse_duration};
use crate::launch::flags::LaunchArgs;
use crate::launch::{launch, record_failure, record_panics, tie_to_parent};
use crate::runner::RunnerBuilder;
use crate::sinks::TERMINAL_VARIABLE;
use crate::{Error, Result};

/// Trains models on one or several processes.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start several ranks of this program on this machine, or this machine's part of a job of several.
    Launch(Box<LaunchArgs>),
    /// Train what a configuration describes, as the rank that the environment says.
    Train(TrainArgs),
}

#[derive(Debug, Args)]
struct TrainArgs {
    /// The configuration, a TOML file.
    config: PathBuf,
    /// Where checkpoints and logs go; otherwise the configuration's `work_dir`, otherwise
    /// `work_dirs/` and the configuration's name.
    #[arg(long, alias = "work_dir")]
    work_dir: Option<PathBuf>,
    /// Go on from the newest checkpoint of the work directory.
    #[arg(long)]
    resume: bool,
    /// Stop training after this long (`60s`, `15m`, `2h`); the last validation comes on top.
    #[arg(long, alias = "time_budget", value_parser = duration)]
    time_budget: Option<Duration>,
    /// Who started the ranks: none, pytorch, slurm or mpi; otherwise the environment tells.
    #[arg(long)]
    launcher: Option<Launcher>,
}

/// Runs the command line of this process and returns its exit code: 0, 1 for a failed run, 2 for a
/// wrong command line, or the code of the rank that failed first.
#[must_use]
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Launch(args) => start_ranks(args),
        Command::Train(args) => {
            record_panics();
            let trained = train(args).inspect_err(|error| record_failure(&error.to_string()));
            trained.map(|()| ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {error}");
        ExitCode::FAILURE
    })
}

fn start_ranks(args: Box<LaunchArgs>) -> Result<ExitCode> {
    let mut options = args.options().map_err(Error::Config)?;
    if std::io::stdout().is_terminal() {
        // The ranks write into pipes; a progress bar goes through them to our terminal.
        options.envs.push((TERMINAL_VARIABLE.into(), "1".into()));
    }
    Ok(ExitCode::from(u8::try_from(launch(options)?).unwrap_or(1)))
}

fn train(args: TrainArgs) -> Result<()> {
    tie_to_parent()?;
    let config = Config::from_file(&args.config)?;
    let mut builder = RunnerBuilder::from_config(config)?
        .work_dir_or(default_work_dir(&args.config))
        .time_budget(args.time_budget)
        .launcher(args.launcher)
        .resume(args.resume);
    if let Some(dir) = args.work_dir {
        builder = builder.work_dir(dir);
    }
    builder.build()?.train()?;
    Ok(())
}

fn default_work_dir(config: &Path) -> PathBuf {
    Path::new("work_dirs").join(config.file_stem().unwrap_or_default())
}

fn duration(text: &str) -> std::result::Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("`{text}` is not a duration such as 60s, 15m or 2h"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_dashes_goes_to_the_ranks() {
        let cli =
            ["runner", "launch", "--nproc_per_node", "2", "--", "train", "c.toml", "--resume"];
        let Command::Launch(args) = Cli::parse_from(cli).command else { panic!("not launch") };
        let options = args.options().unwrap();
        assert_eq!(options.nproc_per_node, 2);
        assert_eq!(options.args, ["train", "c.toml", "--resume"]);
    }

    #[test]
    fn the_launcher_is_one_of_those_there_are() {
        let train = ["runner", "train", "c.toml", "--launcher", "slurm"];
        let Command::Train(args) = Cli::parse_from(train).command else { panic!("not train") };
        assert_eq!(args.launcher, Some(Launcher::Slurm));
        assert!(Cli::try_parse_from(["runner", "train", "c.toml", "--launcher", "k8s"]).is_err());
        assert!(
            Cli::try_parse_from(["runner", "launch", "--nproc-per-node=many", "--", "x"]).is_err()
        );
    }
}
