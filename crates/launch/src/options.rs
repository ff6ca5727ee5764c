//! The options of a launch.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};

/// A job to launch: the ranks of this node, and the other nodes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Number of ranks on this node.
    pub nproc_per_node: usize,
    /// Arguments of the program.
    pub args: Vec<OsString>,
    /// Program that each rank runs. Default: the current executable.
    pub program: Option<PathBuf>,
    /// Environment variables for the ranks, in addition to inherited ones and torchrun's.
    pub envs: Vec<(OsString, OsString)>,
    /// `TORCHELASTIC_RUN_ID`. Default: `none`, as in torchrun.
    pub run_id: String,
    /// Maximum number of restarts of all ranks after failures. Default: 0.
    pub max_restarts: u32,
    /// `ROLE_NAME`. Default: `default`, as in torchrun.
    pub role: String,
    /// Nodes of the job. Default: only this one.
    pub nodes: Nodes,
    /// Timeouts of the rendezvous with the other nodes.
    pub rdzv: RdzvConfig,
    /// Log files and console output of the ranks.
    pub logs: Logs,
    /// Time after the first failure for the other ranks to report errors. Default: 2 s.
    pub report_time: Duration,
    /// Time between SIGTERM and SIGKILL. Default: 30 s, as in torchrun.
    pub grace: Duration,
    /// Signals that are forwarded to the ranks and end the job. Default: SIGINT, SIGTERM, SIGHUP,
    /// SIGQUIT, and SIGUSR1 and SIGUSR2, which Slurm is usually configured to send before the time
    /// limit.
    pub signals: Vec<i32>,
    /// Name or address at which the other nodes of an elastic job reach the ranks of this node.
    /// Default: the local address of the connection to the control store.
    pub local_addr: Option<String>,
    /// Whether this process starts no other children during the launch, so that it can reap every
    /// child that has ended and that `launch` did not start. Otherwise an orphan of a rank that has
    /// ended within milliseconds may stay a zombie until this process ends. Default: false, but
    /// [`LaunchArgs`](crate::LaunchArgs) sets it.
    pub reap_all: bool,
}

impl LaunchOptions {
    /// Returns options that run `nproc_per_node` copies of this program with `args`.
    #[must_use]
    pub fn new(nproc_per_node: usize, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self {
            nproc_per_node,
            args: args.into_iter().map(Into::into).collect(),
            program: None,
            envs: Vec::new(),
            run_id: "none".to_owned(),
            max_restarts: 0,
            role: "default".to_owned(),
            nodes: Nodes::default(),
            rdzv: RdzvConfig::default(),
            logs: Logs::default(),
            report_time: Duration::from_secs(2),
            grace: Duration::from_secs(30),
            signals: vec![SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2],
            local_addr: None,
            reap_all: false,
        }
    }
}

/// The nodes of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Nodes {
    /// Only this node.
    #[default]
    One,
    /// A fixed number of nodes with given ranks; node 0 hosts the control store. Other nodes may
    /// run torchrun's agent (`--nnodes N --node-rank I --master-addr A --master-port P`).
    Fixed {
        /// Number of nodes.
        count: usize,
        /// Rank of this node.
        rank: usize,
        /// Host name or address of node 0, reachable from the others.
        master_addr: String,
        /// Port that node 0 listens on.
        master_port: u16,
    },
    /// An elastic number of nodes. The ranks are restarted when nodes join or are lost, so they
    /// have to resume from a checkpoint with a different world size. torchrun's agents cannot take
    /// part.
    Elastic {
        /// Minimum number of nodes of an attempt.
        min: usize,
        /// Maximum number of nodes of an attempt.
        max: usize,
        /// Host name or address of the control store, equal on all nodes.
        host: String,
        /// Port of the control store.
        port: u16,
    },
}

/// Timeouts of the rendezvous, torchrun's `--rdzv-conf`; the defaults are torchrun's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdzvConfig {
    /// Time for all nodes, or the minimum number of an elastic job, to join. Default: 600 s.
    pub join: Duration,
    /// Time for more nodes of an elastic job to join after the minimum has. Default: 30 s.
    pub last_call: Duration,
    /// Interval of heartbeats. Default: 5 s.
    pub heartbeat: Duration,
    /// Number of missed heartbeats after which a node counts as lost. Default: 3.
    pub missed_heartbeats: u32,
}

impl Default for RdzvConfig {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(600),
            last_call: Duration::from_secs(30),
            heartbeat: Duration::from_secs(5),
            missed_heartbeats: 3,
        }
    }
}

impl RdzvConfig {
    /// Time without a heartbeat after which a node counts as lost.
    pub(crate) fn lost_after(&self) -> Duration {
        self.heartbeat * self.missed_heartbeats
    }
}

/// Log files and console output of the ranks.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Logs {
    /// Parent of this run's log directory. Default with redirection: the system's temporary
    /// directory.
    pub dir: Option<PathBuf>,
    /// Streams written to a file and not to the console.
    pub redirects: Streams,
    /// Streams written to a file and to the console.
    pub tee: Streams,
    /// Local ranks with console output. Default: all.
    pub shown: Option<Vec<usize>>,
    /// Prefix of each line on the console, in which `${role_name}`, `${local_rank}`, `${rank}` and
    /// `${hostname}` are replaced. Default: `[rank ${rank}] `.
    pub prefix: Option<String>,
}

/// Output streams by rank, in torchrun's notation: `0` none, `1` standard output, `2` standard
/// error, `3` both; either for all ranks, or by local rank (`0:3,1:1`), with none for the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streams(BTreeMap<Option<usize>, u8>);

impl Streams {
    /// Returns whether `stream` (1 or 2) of the local rank is selected.
    pub(crate) fn has(&self, rank: usize, stream: u8) -> bool {
        let streams = self.0.get(&Some(rank)).or_else(|| self.0.get(&None));
        streams.is_some_and(|streams| streams & stream != 0)
    }

    pub(crate) fn is_none(&self) -> bool {
        self.0.values().all(|&streams| streams == 0)
    }

    /// Returns the largest local rank in the list.
    pub(crate) fn last(&self) -> Option<usize> {
        self.0.last_key_value().and_then(|(&rank, _)| rank)
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            || format!("`{text}` is not 0, 1, 2 or 3, or a list by local rank such as 0:3,1:1");
        let mut streams = BTreeMap::new();
        for part in text.split(',') {
            let (rank, which) = match part.split_once(':') {
                Some((rank, which)) => (Some(rank.parse().map_err(|_| invalid())?), which),
                None if part == text => (None, text),
                None => return Err(invalid()),
            };
            let which = ["0", "1", "2", "3"].iter().position(|known| *known == which);
            let which = which.ok_or_else(invalid)? as u8;
            if streams.insert(rank, which).is_some() {
                let rank = rank.unwrap_or_default();
                return Err(format!("`{text}` names local rank {rank} twice"));
            }
        }
        Ok(Self(streams))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_parse_torchruns_notation() {
        let streams = |text: &str| text.parse::<Streams>();
        let both = streams("3").unwrap();
        assert!(both.has(0, 1) && both.has(7, 2) && !both.is_none());
        let some = streams("0:3,2:1").unwrap();
        assert!(some.has(0, 1) && some.has(0, 2) && some.has(2, 1));
        assert!(!some.has(2, 2) && !some.has(1, 1));
        assert_eq!(some.last(), Some(2));
        assert!(streams("0").unwrap().is_none() && streams("1:0").unwrap().is_none());
        for wrong in ["", "4", "-1", "both", "0:4", "0:", ":1", "0:1,0:2", "0:1,"] {
            assert!(streams(wrong).is_err(), "{wrong}");
        }
    }
}
