//! The command line of `launch`: torchrun's flags in both spellings, with its `PET_*` variables as
//! defaults. Contradicting flags are an error that names them; torchrun flags that are not
//! supported are in `refused`. The README has a table of all flags.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{FalseyValueParser, Resettable, Str};
use clap::{Arg, Args};
use signal_hook::consts::SIGSYS;
use signal_hook::low_level::signal_name;

use super::nproc_per_node;
use super::refused::Refused;
use crate::address::split_host_port;
use crate::options::{LaunchOptions, Logs, Nodes, RdzvConfig, Streams};
use crate::{Error, Result};

/// Arguments of `launch`. Each flag has two spellings, as `--node-rank` and `--node_rank`.
#[derive(Debug, Args)]
#[command(mut_args(as_torchrun))]
pub struct LaunchArgs {
    /// Number of nodes, or MIN:MAX for an elastic job.
    #[arg(long, env = "PET_NNODES", default_value = "1", value_parser = nnodes)]
    nnodes: (usize, usize),
    /// Number of ranks on this node. `gpu`: one per visible CUDA device, or NPU if there are none;
    /// `npu`: one per NPU; `cpu`: one per processor; `auto`: `gpu` if there are devices, otherwise
    /// `cpu`.
    #[arg(long, env = "PET_NPROC_PER_NODE", default_value = "1", value_parser = nproc_per_node)]
    nproc_per_node: usize,
    /// Rank of this node, from 0 to nnodes - 1.
    #[arg(long, env = "PET_NODE_RANK")]
    node_rank: Option<usize>,
    /// Host name or address of node 0.
    #[arg(long, env = "PET_MASTER_ADDR")]
    master_addr: Option<String>,
    /// Port that node 0 listens on [default: 29500 on several nodes, otherwise a free port].
    #[arg(long, env = "PET_MASTER_PORT")]
    master_port: Option<u16>,
    /// Single-node job with its own store at a free port; other rendezvous flags are ignored.
    #[arg(long, env = "PET_STANDALONE", value_parser = FalseyValueParser::new())]
    standalone: bool,
    /// HOST:PORT of the control store, at which the nodes of an elastic job meet; the node on that
    /// host serves it. With --rdzv-backend static, or with --node-rank and no backend, it replaces
    /// --master-addr and --master-port.
    #[arg(long, env = "PET_RDZV_ENDPOINT")]
    rdzv_endpoint: Option<String>,
    /// Rendezvous backend: `static` (nodes have given ranks) or `c10d` (elastic, at
    /// --rdzv-endpoint).
    #[arg(long, env = "PET_RDZV_BACKEND", value_parser = backend)]
    rdzv_backend: Option<String>,
    /// Run id, equal on all nodes; `TORCHELASTIC_RUN_ID` of the ranks.
    #[arg(long, env = "PET_RDZV_ID", default_value = "none")]
    rdzv_id: String,
    /// Rendezvous timeouts in seconds: join_timeout=600 (or timeout), last_call_timeout=30,
    /// keep_alive_interval=5, keep_alive_max_attempt=3.
    #[arg(long, env = "PET_RDZV_CONF", default_value = "", value_parser = rdzv)]
    rdzv_conf: RdzvConfig,
    /// Maximum number of restarts of all ranks after failures.
    #[arg(long, env = "PET_MAX_RESTARTS", default_value_t = 0)]
    max_restarts: u32,
    /// Seconds, accepted for compatibility with torchrun; without effect, because exits of ranks
    /// are detected at once.
    #[arg(long, env = "PET_MONITOR_INTERVAL", default_value = "0.1", value_parser = seconds)]
    monitor_interval: Duration,
    /// Seconds between SIGTERM and SIGKILL [default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30].
    #[arg(long, env = "PET_SHUTDOWN_TIMEOUT", value_parser = seconds)]
    shutdown_timeout: Option<Duration>,
    /// Signals that are forwarded to the ranks and end the job [default:
    /// SIGINT,SIGTERM,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2].
    #[arg(long, env = "PET_SIGNALS_TO_HANDLE", value_delimiter = ',', value_parser = signal)]
    signals_to_handle: Option<Vec<i32>>,
    /// Accepted for compatibility with torchrun, where it has no effect on programs, either.
    #[arg(long, env = "PET_START_METHOD", value_parser = ["spawn", "fork", "forkserver"], hide = true)]
    start_method: Option<String>,
    /// Accepted for compatibility with torchrun, with its default value only.
    #[arg(long, env = "PET_EVENT_LOG_HANDLER", value_parser = event_log_handler, hide = true)]
    event_log_handler: Option<String>,
    /// Name or address at which the other nodes of an elastic job reach the ranks of this node
    /// [default: the local address of the connection to --rdzv-endpoint].
    #[arg(long, env = "PET_LOCAL_ADDR")]
    local_addr: Option<String>,
    /// Role of the ranks, `ROLE_NAME`.
    #[arg(long, env = "PET_ROLE", default_value = "default")]
    role: String,
    /// Log directory: `DIR/RUN_ID_xxx/attempt_N/LOCAL_RANK/{stdout,stderr}.log` and `error.json`.
    #[arg(long, env = "PET_LOG_DIR")]
    log_dir: Option<PathBuf>,
    /// Streams written to log files instead of the console: 1 stdout, 2 stderr, 3 both, 0 none; or
    /// by local rank, 0:3,1:1.
    #[arg(short, long, env = "PET_REDIRECTS", default_value = "0")]
    redirects: Streams,
    /// Streams written to log files and to the console, as for --redirects.
    #[arg(short, long, env = "PET_TEE", default_value = "0")]
    tee: Streams,
    /// Local ranks with console output, as in 0,2 [default: all].
    #[arg(long, env = "PET_LOCAL_RANKS_FILTER", value_delimiter = ',')]
    local_ranks_filter: Option<Vec<usize>>,
    /// Prefix of each line on the console, with ${role_name}, ${local_rank}, ${rank} and
    /// ${hostname} [default: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, or `[rank ${rank}] `].
    #[arg(long, env = "PET_LOG_LINE_PREFIX_TEMPLATE")]
    log_line_prefix_template: Option<String>,
    /// The first argument is a program, looked up in PATH; always the case for `launch`.
    #[arg(long, env = "PET_NO_PYTHON", value_parser = FalseyValueParser::new())]
    no_python: bool,
    #[command(flatten)]
    _refused: Refused,
    /// The program and its arguments, optionally after `--`.
    #[arg(trailing_var_arg = true, required = true)]
    args: Vec<OsString>,
}

impl LaunchArgs {
    /// Returns the launch options. If neither `--no-python` nor `is_program` makes the first
    /// argument a program, all arguments are passed to the current executable.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] names the flags that contradict each other.
    pub fn options(self, is_program: impl Fn(&OsStr) -> bool) -> Result<LaunchOptions> {
        let is_program = |word: &&OsString| self.no_python || is_program(word);
        let program = self.args.first().filter(is_program).map(PathBuf::from);
        let args = self.args[usize::from(program.is_some())..].to_vec();
        let mut options = LaunchOptions::new(self.nproc_per_node, args);
        options.program = program;
        options.reap_all = true;
        let (nodes, ignored) = self.nodes()?;
        if let Some(ignored) = ignored {
            // Standard error may be closed; the message is not essential.
            let _ = writeln!(io::stderr(), "launch: {ignored}");
        }
        options.nodes = nodes;
        options.local_addr = self.local_addr;
        options.max_restarts = self.max_restarts;
        options.run_id = self.rdzv_id;
        options.role = self.role;
        options.rdzv = self.rdzv_conf;
        let timeout = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";
        let inherited = variable(timeout).map(|text| {
            seconds(&text).map_err(|error| Error::options(timeout, format!("{timeout}: {error}")))
        });
        options.grace = self.shutdown_timeout.or(inherited.transpose()?).unwrap_or(options.grace);
        options.signals = self.signals_to_handle.unwrap_or(options.signals);
        options.logs = Logs {
            dir: self.log_dir,
            redirects: self.redirects,
            tee: self.tee,
            shown: self.local_ranks_filter,
            prefix: self
                .log_line_prefix_template
                .or_else(|| variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")),
        };
        Ok(options)
    }

    /// Returns the nodes, and a message about ignored flags (those that torchrun ignores).
    fn nodes(&self) -> Result<(Nodes, Option<String>)> {
        let (min, max) = self.nnodes;
        let endpoint = self.rdzv_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
        // torchrun's default is `static`, with which --rdzv-endpoint is the address of the master.
        let is_static = match &self.rdzv_backend {
            Some(backend) => backend == "static",
            None => endpoint.is_none() || (self.node_rank.is_some() && min == max),
        };
        let master = [
            ("--master-addr", self.master_addr.is_some()),
            ("--master-port", self.master_port.is_some()),
        ];
        let rank = ("--node-rank", self.node_rank.is_some());
        if self.standalone {
            if (min, max) != (1, 1) {
                let text = format!("--standalone means one node, but --nnodes is {min}:{max}");
                return Err(Error::options("--standalone", text));
            }
            let [addr, port] = master;
            let backend = ("--rdzv-backend", self.rdzv_backend.is_some());
            let others = [backend, ("--rdzv-endpoint", endpoint.is_some()), rank, addr, port];
            return Ok((Nodes::One, ignored(&others, "--standalone means one node")));
        }
        if !is_static {
            let [addr, port] = master;
            let why = "with --rdzv-backend c10d, nodes meet at --rdzv-endpoint";
            return Ok((elastic((min, max), endpoint)?, ignored(&[rank, addr, port], why)));
        }
        if min != max {
            let text = format!(
                "--nnodes {min}:{max} is elastic and needs --rdzv-backend c10d with --rdzv-endpoint HOST:PORT"
            );
            return Err(Error::options("--nnodes", text));
        }
        let Some(endpoint) = endpoint else {
            return Ok((self.fixed(max, self.master_addr.clone(), self.master_port)?, None));
        };
        let (host, port) = host_port(endpoint)?;
        let nodes = self.fixed(max, Some(host), port)?;
        Ok((nodes, ignored(&master, "--rdzv-endpoint names the master")))
    }

    /// Returns a fixed number of nodes.
    fn fixed(
        &self,
        count: usize,
        master_addr: Option<String>,
        master_port: Option<u16>,
    ) -> Result<Nodes> {
        let rank = self.node_rank.unwrap_or(0);
        if rank >= count {
            let text = format!("--node-rank {rank} is not below --nnodes {count}");
            return Err(Error::options("--node-rank", text));
        }
        if count == 1 && master_addr.is_none() && master_port.is_none() {
            return Ok(Nodes::One);
        }
        if count > 1 && (self.node_rank.is_none() || master_addr.is_none()) {
            let text = format!(
                "--nnodes {count} needs --node-rank and --master-addr (or --rdzv-endpoint) on every node"
            );
            return Err(Error::options("--nnodes", text));
        }
        let master_addr = master_addr.unwrap_or_else(|| "127.0.0.1".to_owned());
        let free = if count == 1 { 0 } else { 29500 };
        let master_port = master_port.unwrap_or(free);
        if master_port == 0 && count > 1 {
            return Err(Error::options(
                "--master-port",
                "--master-port 0 needs --nnodes 1: other nodes cannot know which port is chosen",
            ));
        }
        Ok(Nodes::Fixed { count, rank, master_addr, master_port })
    }
}

/// Returns an elastic number of nodes that meet at `endpoint`.
fn elastic((min, max): (usize, usize), endpoint: Option<&str>) -> Result<Nodes> {
    let Some(endpoint) = endpoint else {
        return match max {
            1 => Ok(Nodes::One),
            _ => Err(Error::options(
                "--rdzv-backend",
                "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT",
            )),
        };
    };
    let (host, port) = host_port(endpoint)?;
    match port.unwrap_or(29400) {
        0 if max == 1 => Ok(Nodes::One),
        0 => Err(Error::options(
            "--rdzv-endpoint",
            format!(
                "--rdzv-endpoint {endpoint}: port 0 needs --nnodes 1: other nodes cannot know which port is chosen"
            ),
        )),
        port => Ok(Nodes::Elastic { min, max, host, port }),
    }
}

fn host_port(endpoint: &str) -> Result<(String, Option<u16>)> {
    let split = split_host_port(endpoint).map(|(host, port)| (host.to_owned(), port));
    split.ok_or_else(|| {
        let text =
            format!("--rdzv-endpoint {endpoint} is not HOST:PORT, nor [ADDRESS]:PORT for IPv6");
        Error::options("--rdzv-endpoint", text)
    })
}

/// Returns a message that names those of these flags that were given.
fn ignored(flags: &[(&str, bool)], why: &str) -> Option<String> {
    let given: Vec<_> = flags.iter().filter(|flag| flag.1).map(|flag| flag.0).collect();
    (!given.is_empty()).then(|| format!("{why}: ignored {}", given.join(", ")))
}

/// Returns an environment variable, unless it is empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Adds the spelling with underscores, which is the name of the field. An empty variable counts as
/// unset, because cluster operators often set empty variables.
fn as_torchrun(arg: Arg) -> Arg {
    let name = Str::from(arg.get_id().clone());
    let arg = match arg.get_env().and_then(std::env::var_os) {
        Some(value) if value.is_empty() => arg.env(Resettable::Reset),
        _ => arg,
    };
    if arg.get_long().is_some_and(|long| long.contains('-')) { arg.alias(name) } else { arg }
}

/// Parses a rendezvous backend.
fn backend(text: &str) -> Result<String, String> {
    let why = match text {
        "static" | "c10d" => return Ok(text.to_owned()),
        "etcd" | "etcd-v2" => "etcd is not supported; use `c10d`, which needs no server",
        _ => "not `static` or `c10d`",
    };
    Err(why.to_owned())
}

fn event_log_handler(text: &str) -> Result<String, String> {
    let refused = || "only `null` is supported: other handlers are Python objects".to_owned();
    (text == "null").then(|| text.to_owned()).ok_or_else(refused)
}

/// Parses the name of a signal.
fn signal(name: &str) -> Result<i32, String> {
    let found = (1..=SIGSYS).find(|&number| signal_name(number) == Some(name.trim()));
    found.ok_or_else(|| format!("`{name}` is not the name of a signal such as SIGTERM"))
}

/// Parses `N` or `MIN:MAX`.
fn nnodes(text: &str) -> Result<(usize, usize), String> {
    let number = |text: &str| text.parse().ok().filter(|&number: &usize| number > 0);
    let range = match text.split_once(':') {
        Some((min, max)) => number(min).zip(number(max)),
        None => number(text).map(|number| (number, number)),
    };
    range.filter(|(min, max)| min <= max).ok_or_else(|| {
        format!("`{text}` is not a positive number, or MIN:MAX with 1 <= MIN <= MAX")
    })
}

/// Parses seconds, possibly fractional.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|number| Duration::try_from_secs_f64(number).ok());
    seconds.ok_or_else(|| format!("`{text}` is not a number of seconds"))
}

/// Parses torchrun's list of `key=value`.
fn rdzv(text: &str) -> Result<RdzvConfig, String> {
    let mut rdzv = RdzvConfig::default();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (key, value) =
            part.split_once('=').ok_or_else(|| format!("`{part}` is not KEY=VALUE"))?;
        let time = || seconds(value).ok().filter(|time| !time.is_zero());
        let wrong = || format!("`{part}`: the value is not a positive number");
        match key {
            "timeout" | "join_timeout" => rdzv.join = time().ok_or_else(wrong)?,
            "last_call_timeout" => rdzv.last_call = seconds(value).map_err(|_| wrong())?,
            "keep_alive_interval" => rdzv.heartbeat = time().ok_or_else(wrong)?,
            "keep_alive_max_attempt" => {
                rdzv.missed_heartbeats = value.parse().ok().filter(|&n| n > 0).ok_or_else(wrong)?;
            }
            // Timeouts of steps that are immediate here or bounded by the heartbeat.
            "close_timeout" | "heartbeat_timeout" | "read_timeout" | "cas_backoff_max_seconds" => {
                seconds(value).map_err(|_| wrong())?;
            }
            "store_type" if value == "tcp" => {}
            _ => return Err(refused_key(key)),
        }
    }
    Ok(rdzv)
}

/// Returns the reason for which a key of --rdzv-conf is refused.
fn refused_key(key: &str) -> String {
    let why = match key {
        "is_host" => "not needed: the node with the address of --rdzv-endpoint is the host",
        "rank" => "use --node-rank",
        "store_type" => "only `tcp` is supported",
        "protocol" | "cert" | "key" | "cacert" | "ssl_cert" | "ssl_cert_key" | "ca_cert"
        | "etcd_prefix" => "etcd is not supported",
        _ => "not join_timeout, last_call_timeout, keep_alive_interval or keep_alive_max_attempt",
    };
    format!("`{key}`: {why}")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use signal_hook::consts::{SIGTERM, SIGUSR2};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: LaunchArgs,
    }

    fn is_path(word: &OsStr) -> bool {
        word.as_encoded_bytes().contains(&b'/')
    }

    fn options(flags: &str) -> Result<LaunchOptions, String> {
        let words = ["launch"].into_iter().chain(flags.split_whitespace()).chain(["x"]);
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        cli.args.options(is_path).map_err(|error| error.to_string())
    }

    #[test]
    fn every_flag_has_both_spellings() {
        let flags = "--nproc-per-node=3 --nnodes=2 --node-rank=1 --master-addr=h --master-port=7 \
                     --rdzv-id=job --max-restarts=4 --monitor-interval=0.5 --shutdown-timeout=7 \
                     --role=r --log-dir=/l --redirects=1:2 -t=3 --local-ranks-filter=0,2 \
                     --rdzv-backend=static --no-python \
                     --signals-to-handle=SIGTERM,SIGUSR2 --local-addr=a --log-line-prefix-template=p \
                     --rdzv-conf=join_timeout=1,last_call_timeout=0,keep_alive_interval=0.1,read_timeout=9";
        let underscored = |flag: &str| match flag.strip_prefix("--") {
            None => flag.to_owned(),
            Some(rest) => {
                let (name, value) = rest.split_once('=').unwrap_or((rest, ""));
                let value = if value.is_empty() { String::new() } else { format!("={value}") };
                format!("--{}{value}", name.replace('-', "_"))
            }
        };
        let other: Vec<_> = flags.split_whitespace().map(underscored).collect();
        for flags in [flags, &other.join(" ")] {
            let options = options(flags).unwrap();
            assert_eq!(options.nproc_per_node, 3);
            assert_eq!(
                options.nodes,
                Nodes::Fixed { count: 2, rank: 1, master_addr: "h".into(), master_port: 7 }
            );
            assert_eq!((&options.run_id[..], &options.role[..]), ("job", "r"));
            assert_eq!((options.max_restarts, options.grace), (4, Duration::from_secs(7)));
            assert_eq!(options.logs.dir, Some("/l".into()));
            assert_eq!(options.logs.redirects, "1:2".parse().unwrap());
            assert_eq!(options.logs.tee, "3".parse().unwrap());
            assert_eq!(options.logs.shown, Some(vec![0, 2]));
            assert_eq!(options.logs.prefix, Some("p".into()));
            assert_eq!(options.signals, [SIGTERM, SIGUSR2]);
            assert_eq!(options.local_addr, Some("a".into()));
            assert_eq!(options.rdzv.join, Duration::from_secs(1));
            assert_eq!(options.rdzv.heartbeat, Duration::from_millis(100));
        }
    }

    #[test]
    fn path_is_the_program() {
        let started = |words: &[&str]| {
            let words = ["launch", "--nproc-per-node=2", "--"].into_iter().chain(words.to_vec());
            let options = Cli::try_parse_from(words).unwrap().args.options(is_path).unwrap();
            (options.program, options.args)
        };
        assert_eq!(started(&["./mine", "a/b"]), (Some("./mine".into()), vec!["a/b".into()]));
        let own = ["train", "a/b"];
        assert_eq!(started(&own), (None, own.map(OsString::from).to_vec()));
    }

    #[test]
    fn arguments_after_the_program_go_to_the_ranks() {
        let started = |words: &str| {
            let words = ["launch"].into_iter().chain(words.split(' '));
            let options = Cli::try_parse_from(words).unwrap().args.options(is_path).unwrap();
            (options.nproc_per_node, options.program, options.args)
        };
        let words = |words: &str| words.split(' ').map(OsString::from).collect::<Vec<_>>();
        // No `--` is needed, as in torchrun.
        assert_eq!(
            started("--nproc_per_node 2 train c.toml --resume --nnodes=3 -- x"),
            (2, None, words("train c.toml --resume --nnodes=3 -- x"))
        );
        assert_eq!(
            started("--no-python --nproc-per-node=2 python -u -m job"),
            (2, Some("python".into()), words("-u -m job"))
        );
        assert!(Cli::try_parse_from(["launch", "--nproc-per-node=2"]).is_err());
    }

    #[test]
    fn node_flags_mean_the_same_as_in_torchrun() {
        let nodes = |flags: &str| options(flags).unwrap().nodes;
        let elastic =
            |min, max, host: &str, port| Nodes::Elastic { min, max, host: host.into(), port };
        assert_eq!(nodes(""), Nodes::One);
        assert_eq!(nodes("--standalone --nnodes 1:1"), Nodes::One);
        assert_eq!(nodes("--nnodes=2:4 --rdzv-endpoint=h:1"), elastic(2, 4, "h", 1));
        assert_eq!(nodes("--nnodes=2 --rdzv-endpoint=h"), elastic(2, 2, "h", 29400));
        assert_eq!(nodes("--rdzv-endpoint=[::1]:5"), elastic(1, 1, "[::1]", 5));
        assert_eq!(nodes("--rdzv-endpoint=::1"), elastic(1, 1, "::1", 29400));
        assert_eq!(nodes("--rdzv-endpoint=[::1]"), elastic(1, 1, "[::1]", 29400));
        let fixed = |count, rank, host: &str, master_port| Nodes::Fixed {
            count,
            rank,
            master_addr: host.into(),
            master_port,
        };
        let master = "--node-rank 1 --master-addr h";
        assert_eq!(nodes(&format!("--nnodes 2 {master}")), fixed(2, 1, "h", 29500));
        // Flags that the backend does not use are ignored, and --rdzv-endpoint is the master of
        // `static`.
        assert_eq!(nodes(&format!("--standalone --rdzv-endpoint=h:1 {master}")), Nodes::One);
        assert_eq!(nodes("--rdzv-backend c10d"), Nodes::One);
        let at = "--nnodes 2 --rdzv-endpoint=e:1";
        assert_eq!(nodes(&format!("{at} {master}")), fixed(2, 1, "e", 1));
        assert_eq!(nodes(&format!("{at} {master} --rdzv-backend static")), fixed(2, 1, "e", 1));
        let c10d = format!("{master} --rdzv-backend c10d");
        assert_eq!(nodes(&format!("{at} {c10d}")), elastic(2, 2, "e", 1));
        assert_eq!(
            nodes(&format!("--nnodes 1:2 --rdzv-endpoint=e:1 {master}")),
            elastic(1, 2, "e", 1)
        );
    }

    #[test]
    fn ignored_flags_are_named() {
        let said = |flags: &str| {
            let words = ["launch"].into_iter().chain(flags.split_whitespace()).chain(["x"]);
            Cli::try_parse_from(words).unwrap().args.nodes().unwrap().1.unwrap()
        };
        let text = said("--standalone --rdzv-endpoint h:1 --master-port 3");
        assert_eq!(text, "--standalone means one node: ignored --rdzv-endpoint, --master-port");
        assert!(
            said("--rdzv-endpoint h:1 --rdzv-backend c10d --node-rank 0").contains("--node-rank")
        );
        let text = said("--nnodes 2 --rdzv-endpoint h:1 --node-rank 0 --master-addr h");
        assert_eq!(text, "--rdzv-endpoint names the master: ignored --master-addr");
    }

    #[test]
    fn errors_name_the_contradicting_flags() {
        for (flags, names) in [
            ("--nnodes 2", &["--nnodes", "--node-rank", "--master-addr"][..]),
            ("--nnodes 2 --node-rank 2 --master-addr h", &["--node-rank 2", "--nnodes 2"]),
            ("--nnodes 1:2", &["--nnodes", "--rdzv-endpoint"]),
            ("--nnodes 2:1", &["--nnodes", "2:1"]),
            ("--nnodes 0", &["--nnodes"]),
            ("--standalone --nnodes 2", &["--standalone", "--nnodes"]),
            ("--nnodes 1:2 --rdzv-endpoint h:1 --rdzv-backend static", &["--nnodes", "c10d"]),
            ("--rdzv-endpoint h:1 --node-rank 1", &["--node-rank 1", "--nnodes 1"]),
            ("--rdzv-endpoint h:x", &["--rdzv-endpoint h:x"]),
            ("--rdzv-endpoint h:0 --nnodes 2", &["--rdzv-endpoint h:0"]),
            ("--rdzv-backend c10d --nnodes 2", &["--rdzv-backend", "--rdzv-endpoint"]),
            ("--rdzv-backend etcd", &["--rdzv-backend", "etcd is not supported"]),
            ("--rdzv-conf colour=3", &["--rdzv-conf", "colour", "join_timeout"]),
            ("--rdzv-conf is_host=1", &["--rdzv-conf", "is_host", "--rdzv-endpoint"]),
            ("--rdzv-conf store_type=file", &["--rdzv-conf", "store_type", "tcp"]),
            ("--rdzv-conf close_timeout=x", &["--rdzv-conf", "close_timeout=x"]),
            ("--event-log-handler console", &["--event-log-handler", "null"]),
            ("--signals-to-handle SIGTERM,TERM", &["--signals-to-handle", "`TERM`"]),
            ("--rdzv-conf join_timeout=0", &["--rdzv-conf", "join_timeout=0"]),
            ("--redirects 4", &["--redirects"]),
            ("--tee both", &["--tee"]),
            ("--local-ranks-filter a", &["--local-ranks-filter"]),
            ("--monitor-interval=-1", &["--monitor-interval"]),
            ("--master-port 0 --nnodes 2 --node-rank 0 --master-addr h", &["--master-port"]),
            ("--no-such-flag", &["--no-such-flag"]),
        ] {
            let error = options(flags).unwrap_err();
            for name in names {
                assert!(error.contains(name), "{flags}: {error}");
            }
        }
    }

    #[test]
    fn errors_have_the_flag_as_a_field() {
        for (flags, named) in [
            ("--standalone --nnodes 2", "--standalone"),
            ("--nnodes 2", "--nnodes"),
            ("--nnodes 1:2", "--nnodes"),
            ("--nnodes 2 --node-rank 2 --master-addr h", "--node-rank"),
            ("--nnodes 2 --node-rank 0 --master-addr h --master-port 0", "--master-port"),
            ("--rdzv-endpoint h:x", "--rdzv-endpoint"),
            ("--rdzv-endpoint h:0 --nnodes 2", "--rdzv-endpoint"),
            ("--rdzv-backend c10d --nnodes 2", "--rdzv-backend"),
        ] {
            let words = ["launch"].into_iter().chain(flags.split(' ')).chain(["x"]);
            let error = Cli::try_parse_from(words).unwrap().args.options(is_path).unwrap_err();
            let Error::Options { option, message, source: None } = &error else {
                panic!("{flags}: {error:?}")
            };
            assert_eq!((*option, message), (named, &error.to_string()), "{flags}");
        }
    }
}
