//! torchrun's flags that are not supported. Using one is an error that names it, with the reason
//! and an alternative.

use std::ffi::OsString;

use clap::builder::FalseyValueParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};

/// Hidden command-line arguments that cause an error if given.
#[derive(Debug)]
pub(super) struct Refused;

struct Flag {
    /// Name with underscores.
    name: &'static str,
    long: &'static str,
    short: Option<char>,
    /// Whether the flag takes a value.
    value: bool,
    /// torchrun's environment variable for the flag.
    env: Option<&'static str>,
    reason: &'static str,
}

const FLAGS: &[Flag] = &[
    Flag {
        name: "module",
        long: "module",
        short: Some('m'),
        value: false,
        env: Some("PET_MODULE"),
        reason: "start Python as the program: `python3 -u -m MODULE`",
    },
    Flag {
        name: "run_path",
        long: "run-path",
        short: None,
        value: false,
        env: Some("PET_RUN_PATH"),
        reason: "start Python as the program: `python3 -u SCRIPT`",
    },
    Flag {
        name: "virtual_local_rank",
        long: "virtual-local-rank",
        short: None,
        value: false,
        env: Some("PET_VIRTUAL_LOCAL_RANK"),
        reason: "ranks need their own LOCAL_RANK; to give each rank one device, start \
                 `sh -c 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec PROGRAM'`",
    },
    Flag {
        name: "duplicate_stdout_filters",
        long: "duplicate-stdout-filters",
        short: None,
        value: true,
        env: Some("PET_DUPLICATE_STDOUT_FILTERS"),
        reason: FILTER,
    },
    Flag {
        name: "duplicate_stderr_filters",
        long: "duplicate-stderr-filters",
        short: None,
        value: true,
        env: Some("PET_DUPLICATE_STDERR_FILTERS"),
        reason: FILTER,
    },
    Flag {
        name: "logs_specs",
        long: "logs-specs",
        short: None,
        value: true,
        env: None,
        reason: "its value is a Python object; use --log-dir, --tee and --redirects",
    },
    Flag {
        name: "numa_binding",
        long: "numa-binding",
        short: None,
        value: true,
        env: None,
        reason: "start the program with numactl, for example \
                 `sh -c 'exec numactl --cpunodebind=$LOCAL_RANK PROGRAM'`",
    },
    Flag {
        name: "print_completion",
        long: "print-completion",
        short: None,
        value: true,
        env: None,
        reason: "shell completion is not available; --help lists all flags",
    },
];

/// Alternative to output filters.
const FILTER: &str = "filter the launcher's output, or the log files of --tee, with grep";

impl Flag {
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.name).long(self.long).hide(true);
        let arg = if let Some(short) = self.short { arg.short(short) } else { arg };
        let arg = if let Some(env) = self.env { arg.env(env) } else { arg };
        match self.value {
            true => arg.value_parser(value_parser!(OsString)),
            // A flag that is off, for example PET_MODULE=0, is no error.
            false => arg.action(ArgAction::SetTrue).value_parser(FalseyValueParser::new()),
        }
    }

    fn is_given(&self, matches: &ArgMatches) -> bool {
        match self.value {
            true => matches.contains_id(self.name),
            false => matches.get_flag(self.name),
        }
    }

    fn refuse(&self, matches: &ArgMatches) -> clap::Error {
        let by = match (matches.value_source(self.name), self.env) {
            (Some(ValueSource::EnvVariable), Some(env)) => format!(" (by {env})"),
            _ => String::new(),
        };
        let Self { long, reason, .. } = self;
        let text = format!("--{long}{by} is not supported: {reason}");
        clap::Error::raw(ErrorKind::UnknownArgument, text)
    }
}

impl Args for Refused {
    fn augment_args(command: Command) -> Command {
        FLAGS.iter().fold(command, |command, flag| command.arg(flag.arg()))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Refused {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = FLAGS.iter().find(|flag| flag.is_given(matches));
        given.map_or(Ok(Self), |flag| Err(flag.refuse(matches)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        Self::from_arg_matches(matches).map(|_| ())
    }
}
