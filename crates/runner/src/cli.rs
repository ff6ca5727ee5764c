//! The command line: `runner launch`, `store`, `train`, `val`, `test`, `check`, `config`, `plot`,
//! `publish`.
//!
//! Your own program gets the same command line by registering its components and calling [`main`]:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     // runner::model::MODELS.register("MyNet", ...)
//!     runner::cli::main()
//! }
//! ```

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use collective::init::Launcher;
use launch::{
    LaunchArgs, StoreArgs, label_lines, record_error, record_failure, record_panics, tie_to_parent,
};

use crate::checkpoint::{self, ExportOptions};
use crate::config::{Config, Mistakes, parse_duration};
use crate::runner::{EvalSplit, LoadOptions, RunnerBuilder, TERMINAL_VARIABLE};
use crate::sinks::plot;
use crate::{Error, Result, signals};

/// Trains models on one or several processes.
#[derive(Debug, Parser)]
#[command(name = "runner", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start several ranks of this program on this machine, alone or as one node of a multi-node
    /// job.
    #[command(
        mut_arg("no_python", |arg| arg.help(NO_PYTHON)),
        mut_arg("args", |arg| arg.help(ARGS))
    )]
    Launch(Box<LaunchArgs>),
    /// Host the control store of an elastic job on a machine that is not one of its nodes.
    Store(StoreArgs),
    /// Train the run of a configuration, as one rank.
    Train(TrainArgs),
    /// Validate a model on the configuration's validation set.
    Val(EvalArgs),
    /// Test a model on the configuration's test set.
    Test(EvalArgs),
    /// Report all errors in a configuration, and try a sample of its data on its model; create
    /// nothing.
    Check(CheckArgs),
    /// Print a configuration, merged with its bases and overrides.
    Config(ShowArgs),
    /// Draw the scalars of a run as an SVG.
    Plot(PlotArgs),
    /// Export the weights of a checkpoint as a .safetensors file for other programs.
    Publish(PublishArgs),
}

/// Help of `launch --no-python`.
const NO_PYTHON: &str =
    "The first argument is a program, looked up in PATH, even if it contains no `/`";
/// Help of the arguments after `launch`.
const ARGS: &str = "Command line of each rank: arguments of this program, for example `train config.toml`, or the \
                    path of another program, which must contain a `/`, with its arguments. Optionally \
                    after `--`";

#[derive(Debug, Args)]
struct ConfigArgs {
    /// Configuration, a TOML or JSON file.
    config: PathBuf,
    /// Overrides: `optim_wrapper.optimizer.lr=0.2 'custom_hooks=[{ type = "EMAHook" }]'`.
    #[arg(long, alias = "cfg_options", num_args = 1.., value_name = "KEY=VALUE")]
    cfg_options: Vec<String>,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Also compare the gradient of each parameter with differences of the loss.
    #[arg(long)]
    gradients: bool,
    /// Parameters whose gradients are not compared.
    #[arg(long, num_args = 1.., value_name = "NAME", requires = "gradients")]
    ignore: Vec<String>,
}

/// Arguments of every run.
#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Directory for checkpoints and logs [default: `work_dir` of the configuration, or
    /// `work_dirs/` and the configuration's name].
    #[arg(long, alias = "work_dir")]
    work_dir: Option<PathBuf>,
    /// Launcher that started the ranks: none, pytorch, slurm or mpi [default: detected from the
    /// environment].
    #[arg(long)]
    launcher: Option<Launcher>,
}

#[derive(Debug, Args)]
struct EvalArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Checkpoint to evaluate, a directory such as epoch_3 [default: `load_from` of the
    /// configuration, whose `revise_keys`, `transpose` and `strict` are for its own file alone].
    #[arg(long)]
    checkpoint: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Print the origin of each value behind it.
    #[arg(long, alias = "show_origin")]
    show_origin: bool,
}

#[derive(Debug, Args)]
struct PlotArgs {
    /// Runs to draw: a `scalars.json`, or a work directory with all parts of a resumed run.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Path of the SVG [default: `scalars.svg` in the first work directory, or beside the first
    /// file].
    #[arg(long, short)]
    out: Option<PathBuf>,
    /// Names of scalars to draw [default: all but times and counters].
    #[arg(long, num_args = 1..)]
    keys: Vec<String>,
}

#[derive(Debug, Args)]
struct PublishArgs {
    /// Checkpoint, a directory such as epoch_3; or a work directory or configuration, for its
    /// newest checkpoint.
    #[arg(value_name = "CHECKPOINT")]
    from: PathBuf,
    /// File to write.
    #[arg(value_name = "OUT.safetensors")]
    out: PathBuf,
    /// Export the trained weights if the checkpoint's model is an average of them (EMAHook).
    #[arg(long, alias = "in_training")]
    in_training: bool,
    /// Export only the LoRA adapters, by PEFT's names, with `adapter_config.json` beside them
    /// [default: merge adapters into the weights].
    #[arg(long)]
    adapter: bool,
}

#[derive(Debug, Args)]
struct TrainArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Resume from the newest checkpoint in the work directory. Without this, a directory with
    /// checkpoints is an error.
    #[arg(long)]
    resume: bool,
    /// Start from the model of this checkpoint, a directory such as epoch_3, without the rules of
    /// the configuration's `load_from`. With `--resume`,
    /// resume from it; when started again, from the newest checkpoint saved since.
    #[arg(long, alias = "load_from")]
    load_from: Option<PathBuf>,
    /// Stop training after this time (`60s`, `15m`, `2h`), measured from the end of the first step,
    /// which may compile kernels; a last validation is not included. The exit code is then 75, or
    /// 124 if no checkpoint was saved. To limit the whole process, use a signal: `sbatch --signal`,
    /// `timeout --preserve-status 1h runner ...`.
    #[arg(long, alias = "time_budget", value_parser = duration)]
    time_budget: Option<Duration>,
}

/// Runs the command line of this process and returns its exit code: 0; 1 for a failed run; 2 for an
/// invalid command line; [`signals::EXIT_CODE`] for a run that a signal or its time budget ended
/// after a checkpoint; 128 + the signal's number or [`signals::EXIT_TIMEOUT`] if they ended it
/// without one; or the code of the rank that failed first.
#[must_use]
pub fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let command = match parse(&args, "") {
        Ok(cli) => cli.command,
        Err(code) => return code,
    };
    let is_rank = matches!(command, Command::Train(_) | Command::Val(_) | Command::Test(_));
    let outcome = match command {
        Command::Launch(args) => start_ranks(args),
        Command::Store(args) => {
            launch::serve_store(&args).map(|()| ExitCode::SUCCESS).map_err(Error::from)
        }
        // An evaluation has no state to save: signals have their default actions.
        Command::Train(args) => as_rank(|| signals::catch().and_then(|()| train(args))),
        Command::Val(args) => as_rank(|| evaluate(args, EvalSplit::Val)),
        Command::Test(args) => as_rank(|| evaluate(args, EvalSplit::Test)),
        Command::Check(args) => check(&args),
        Command::Config(args) => load(&args.config).and_then(|c| print(&c.show(args.show_origin))),
        Command::Plot(args) => draw(args),
        Command::Publish(args) => publish(args),
    };
    outcome.unwrap_or_else(|error| {
        let text = lines("error", &error.to_string());
        let text = if is_rank { label_lines(&text) } else { Cow::Borrowed(&*text) };
        let _ = std::io::stderr().write_all(text.as_bytes());
        match error {
            Error::Interrupted { saved: true, .. } => ExitCode::from(signals::EXIT_CODE),
            Error::Interrupted { signal, .. } => {
                ExitCode::from(u8::try_from(128 + signal).unwrap_or(1))
            }
            _ => ExitCode::FAILURE,
        }
    })
}

/// Parses a command line; on an error prints it and returns its exit code. For a configuration
/// without a command, suggests `train`, after the arguments in `before`.
fn parse(args: &[OsString], before: &str) -> Result<Cli, ExitCode> {
    Cli::try_parse_from(args).map_err(|error| {
        let name = Path::new(args.first().map_or_else(|| OsStr::new("runner"), OsString::as_os_str));
        let name = name.file_name().unwrap_or_default().display().to_string();
        match args.get(1).filter(|arg| is_config(arg)) {
            Some(config) if error.kind() == ErrorKind::InvalidSubcommand => {
                let config = config.display();
                tell("error", &format!(
                    "`{config}` is a configuration, not a command: did you mean `{name} {before}train {config}`?"
                ));
            }
            _ => match error.print() {
                // `--help` and `--version`, which succeed otherwise.
                Err(e) if !error.use_stderr() && e.kind() != std::io::ErrorKind::BrokenPipe => {
                    tell("error", &format!("cannot write to standard output: {e}"));
                    return ExitCode::FAILURE;
                }
                _ if !before.is_empty() && error.kind() == ErrorKind::InvalidSubcommand => {
                    let path = "or give its path, as in `./program`";
                    tell("note", &format!("`{name} launch --no-python -- PROGRAM` starts another program; {path}"));
                }
                _ => {}
            },
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
    })
}

/// Writes to standard error, one line per error of a configuration.
fn tell(kind: &str, text: &str) {
    let _ = std::io::stderr().write_all(lines(kind, text).as_bytes());
}

/// Returns `text` with the kind as prefix of each line.
fn lines(kind: &str, text: &str) -> String {
    text.lines().map(|line| format!("{kind}: {line}\n")).collect()
}

/// Runs the rank; on failure writes the launcher's error file.
fn as_rank(work: impl FnOnce() -> Result<ExitCode>) -> Result<ExitCode> {
    // Must run first: it needs a process with a single thread.
    #[cfg(feature = "candle")]
    candle_train::process::limit_threads();
    record_panics();
    let done = tie_to_parent().map_err(Error::from).and_then(|()| work());
    done.inspect_err(|error| match error {
        Error::Interrupted { saved: true, .. } => {}
        Error::Collective(error) => record_error(error),
        error => record_failure(&error.to_string()),
    })
}

/// Writes the result of a command to standard output; ignores a reader that has gone.
fn print(text: &str) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(source) if source.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::Io { what: "cannot write to standard output".to_owned(), source })
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn load(args: &ConfigArgs) -> Result<Config> {
    let mut config = Config::from_file(&args.config)?;
    config.override_with(&args.cfg_options)?;
    Ok(config)
}

/// Reads a configuration; returns the builder of its run, and the errors found.
fn read(args: RunArgs) -> Result<(RunnerBuilder, Mistakes)> {
    let (mut builder, mistakes) = RunnerBuilder::read(load(&args.config)?);
    if let Some(dir) = args.work_dir {
        builder = builder.work_dir(dir);
    }
    if args.launcher.is_some() {
        builder = builder.launcher(args.launcher);
    }
    Ok((builder.work_dir_or(default_work_dir(&args.config.config)), mistakes))
}

fn check(args: &CheckArgs) -> Result<ExitCode> {
    let (warnings, checked) = RunnerBuilder::check(load(&args.config)?);
    warnings.iter().for_each(|text| tell("warning", text));
    checked?;
    if args.gradients
        && let Some(why) = RunnerBuilder::check_gradients(|| load(&args.config), &args.ignore)?
    {
        tell(
            "warning",
            &format!(
                "gradients were compared in f32, with a tolerance of 3%, because f64 failed: {why}"
            ),
        );
    }
    print(&format!("{}: ok\n", args.config.config.display()))
}

/// Returns whether an argument of `launch` is the path of a program, and not of a configuration.
fn is_program(word: &OsStr) -> bool {
    word.as_encoded_bytes().contains(&b'/') && !is_config(word)
}

/// Returns whether an argument is the name of a configuration.
fn is_config(word: &OsStr) -> bool {
    let extension = Path::new(word).extension();
    extension.is_some_and(|e| e.eq_ignore_ascii_case("toml") || e.eq_ignore_ascii_case("json"))
}

fn start_ranks(args: Box<LaunchArgs>) -> Result<ExitCode> {
    let mut options = args.options(is_program)?;
    if options.program.is_none() {
        // An error in the ranks' command line is reported once, here.
        let program = std::env::args_os().take(1);
        let words: Vec<_> = program.chain(options.args.iter().cloned()).collect();
        if let Err(code) = parse(&words, "launch ... ") {
            return Ok(code);
        }
    }
    if std::io::stdout().is_terminal() {
        // The ranks write to pipes; the launcher passes a progress bar on to the terminal.
        options.envs.push((TERMINAL_VARIABLE.into(), "1".into()));
    }
    Ok(ExitCode::from(u8::try_from(launch::launch(options)?).unwrap_or(1)))
}

fn train(args: TrainArgs) -> Result<ExitCode> {
    let (mut builder, mistakes) = read(args.run)?;
    builder = builder.untested().time_budget(args.time_budget);
    if args.resume {
        builder = builder.resume(true);
    }
    builder = load_from(builder, args.load_from);
    builder.refuse(&mistakes);
    mistakes.check()?;
    let mut runner = builder.build()?;
    runner.train()?;
    Ok(match (runner.is_interrupted(), runner.is_resumable()) {
        (false, _) => ExitCode::SUCCESS,
        (true, true) => ExitCode::from(signals::EXIT_CODE),
        (true, false) => {
            let text = match runner.has_hook("CheckpointHook") {
                true => {
                    "the time budget is exhausted, and no checkpoint to resume from was saved (see the log)"
                }
                false => {
                    "the time budget is exhausted, and no checkpoint was saved (add CheckpointHook to save one)"
                }
            };
            record_failure(text);
            tell("error", text);
            ExitCode::from(signals::EXIT_TIMEOUT)
        }
    })
}

fn evaluate(args: EvalArgs, split: EvalSplit) -> Result<ExitCode> {
    let (mut builder, mistakes) = read(args.run)?;
    mistakes.check()?;
    builder = builder.resume(false).only(split);
    builder = load_from(builder, args.checkpoint);
    let mut runner = builder.build()?;
    match split {
        EvalSplit::Val => runner.validate()?,
        EvalSplit::Test => runner.test()?,
    };
    Ok(ExitCode::SUCCESS)
}

/// Sets the path given on the command line. The configuration's rules for renaming and transposing
/// tensors are for its own file.
fn load_from(builder: RunnerBuilder, path: Option<PathBuf>) -> RunnerBuilder {
    match path {
        Some(path) if builder.load_from.as_ref() != Some(&path) => {
            builder.load_from(path).load_options(LoadOptions::default())
        }
        _ => builder,
    }
}

fn draw(args: PlotArgs) -> Result<ExitCode> {
    let svg = plot(&args.runs, &args.keys)?;
    let beside = |run: &PathBuf| match run.is_dir() {
        true => run.join("scalars.svg"),
        false => run.with_extension("svg"),
    };
    let out = args.out.or_else(|| args.runs.first().map(beside)).unwrap_or_default();
    if out.is_file() && out.extension().is_none_or(|end| end != "svg") {
        let text = format!("{}: exists and is no .svg: choose another --out", out.display());
        return Err(Error::config(text));
    }
    checkpoint::write_output(&out, svg.as_bytes())?;
    print(&format!("{}\n", out.display()))
}

fn publish(args: PublishArgs) -> Result<ExitCode> {
    let PublishArgs { from, out, in_training, adapter } = args;
    let path = match from.join("state.json").is_file() {
        true => from,
        false => newest_checkpoint(from)?,
    };
    let count = checkpoint::export(&path, &out, ExportOptions { in_training, adapter })?;
    print(&format!("{}: {count} tensors of {}\n", out.display(), path.display()))
}

/// Returns the newest checkpoint of a work directory, given by path or by a configuration.
fn newest_checkpoint(from: PathBuf) -> Result<PathBuf> {
    let work_dir = if is_config(from.as_os_str()) {
        let named = Config::from_file(&from)?.into_section().optional::<String>("work_dir")?;
        named.map_or_else(|| default_work_dir(&from), PathBuf::from)
    } else {
        from
    };
    let none = || checkpoint::bad(&work_dir, "has no checkpoint");
    if !work_dir.is_dir() {
        return Err(none());
    }
    checkpoint::newest(&work_dir)?.path.ok_or_else(none)
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
    fn rules_of_the_configurations_file_are_not_for_another_one() {
        let text = "load_from = { checkpoint = 'a', strict = false, transpose = ['w'] }";
        let read = |path: Option<&str>| {
            let config = Config::from_text("c.toml", text.to_owned()).unwrap();
            let builder = load_from(RunnerBuilder::read(config).0, path.map(PathBuf::from));
            let LoadOptions { strict, transpose, .. } = builder.load_options;
            (builder.load_from.unwrap(), strict, transpose.len())
        };
        for path in [None, Some("a")] {
            assert_eq!(read(path), ("a".into(), Some(false), 1));
        }
        assert_eq!(read(Some("b")), ("b".into(), None, 0));
    }

    #[test]
    fn command_line_definition_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_after_the_dashes_are_the_ranks() {
        let cli =
            ["runner", "launch", "--nproc_per_node", "2", "--", "train", "c.toml", "--resume"];
        let Command::Launch(args) = Cli::parse_from(cli).command else { panic!("not launch") };
        let options = args.options(is_program).unwrap();
        assert_eq!(options.nproc_per_node, 2);
        assert_eq!(options.args, ["train", "c.toml", "--resume"]);
    }

    #[test]
    fn launcher_must_be_a_known_name() {
        let train = ["runner", "train", "c.toml", "--launcher", "slurm"];
        let Command::Train(args) = Cli::parse_from(train).command else { panic!("not train") };
        assert_eq!(args.run.launcher, Some(Launcher::Slurm));
        assert!(Cli::try_parse_from(["runner", "train", "c.toml", "--launcher", "k8s"]).is_err());
        assert!(
            Cli::try_parse_from(["runner", "launch", "--nproc-per-node=many", "--", "x"]).is_err()
        );
    }
}
