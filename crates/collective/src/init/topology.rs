//! [`Topology`]: this process's rank, read from the launcher's environment.
//!
//! [`Topology::from_env`] detects the launcher; [`Topology::from_launcher`] takes it as an
//! argument. Both depend only on a lookup function. Each launcher's variables are read in its own
//! module; `reader` has the code they share (a checked number, a recorded fact).
//!
//! If several launchers have set variables, the innermost one is used, in this order: torchrun's
//! variables, which a script may also set by hand; those that only `mpirun` sets; a Slurm step;
//! those of PMI, which `srun --mpi=pmi2` also sets. So torchrun or `mpirun` within a Slurm step is
//! detected as itself.

use std::fmt;
use std::str::FromStr;

use super::device::{Accelerator, Devices};
use super::reader::{Lookup, Reader};
use super::{mpi, pytorch, slurm};
use crate::{Error, Rank, Result};

/// This process's rank in a job, and the address where the ranks meet.
///
/// `Display` prints one line with the source of each value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// The launcher.
    pub launcher: Launcher,
    /// This process's rank, `0..world_size`.
    pub rank: Rank,
    /// Number of processes.
    pub world_size: usize,
    /// This process's rank on its host; [`device`](Self::device) derives the rank's device from it.
    /// `None` if the launcher does not set it; [`locate`](Self::locate) then determines it through
    /// the store.
    pub local_rank: Option<usize>,
    /// Number of processes on this host; `None` as for `local_rank`.
    pub local_world_size: Option<usize>,
    /// This host's index in the job, if the launcher sets it.
    pub node_rank: Option<usize>,
    /// The store's host, a name or an address.
    pub master_addr: String,
    /// The store's port; 0 for a single process, which needs no store.
    pub master_port: u16,
    /// Whether the launcher hosts the store; if not, rank 0 does.
    pub agent_store: bool,
    /// The run's name.
    pub run_id: String,
    /// Number of times the launcher has restarted the ranks.
    pub restart_count: u64,
    /// Each of these values with its source.
    pub facts: Vec<Fact>,
    pub(super) devices: Devices,
}

/// One value of a [`Topology`] and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fact {
    /// The field's name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Its source: a variable, or the reason for a value that is derived or a default.
    pub origin: &'static str,
}

/// The launcher, which determines the variables to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// None: a single process.
    None,
    /// torchrun, `launch`, most cluster operators, or a script: `RANK`, `WORLD_SIZE`, ...
    Pytorch,
    /// `srun`.
    Slurm,
    /// `mpirun` of Open MPI, `mpiexec` of MPICH and derivatives (PMI).
    Mpi,
}

impl Topology {
    /// Reads the launcher's environment. `lookup` returns the value of a variable; `|name|
    /// std::env::var(name).ok()` reads the real ones. Without any launcher's variables, this is a
    /// single process.
    ///
    /// A script that starts ranks itself must set the variables of PyTorch's `env://` for each:
    ///
    /// | variable | value |
    /// |---|---|
    /// | `RANK` | this process's rank, from 0 |
    /// | `WORLD_SIZE` | the number of processes |
    /// | `MASTER_ADDR` | the host of rank 0, at an address that the other ranks can reach |
    /// | `MASTER_PORT` | a free port of that host; a single process needs neither port nor address |
    ///
    /// It may set `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which [`device`](Self::device) and
    /// [`dist::local_group`](crate::dist::local_group) use. Without them they are `RANK` and
    /// `WORLD_SIZE` if `MASTER_ADDR` is a loopback address, because then all ranks are on one host;
    /// otherwise they are unknown until [`locate`](Self::locate) determines them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] with the variable that is missing, malformed or contradicts
    /// another, and for a Slurm batch script that was not started with `srun`;
    /// [`Error::Unsupported`] for a heterogeneous Slurm job.
    ///
    /// # Examples
    ///
    /// ```
    /// use collective::Topology;
    ///
    /// let single = Topology::from_env(|_| None)?;
    /// assert_eq!((single.rank, single.world_size), (0, 1));
    /// # Ok::<(), collective::Error>(())
    /// ```
    #[doc(alias = "infer_launcher")]
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let (launcher, origin) = infer(&lookup)?;
        read(launcher, origin, &lookup)
    }

    /// Same as [`from_env`](Self::from_env), but reads the variables of `launcher` only.
    ///
    /// # Errors
    ///
    /// The errors of [`from_env`](Self::from_env).
    pub fn from_launcher(
        launcher: Launcher,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        read(launcher, "as chosen", &lookup)
    }

    /// A single process, as the base for the launchers' topologies.
    pub(super) fn single_process(launcher: Launcher) -> Self {
        Self {
            launcher,
            rank: 0,
            world_size: 1,
            local_rank: Some(0),
            local_world_size: Some(1),
            node_rank: None,
            master_addr: "127.0.0.1".to_owned(),
            master_port: 0,
            agent_store: false,
            run_id: "none".to_owned(),
            restart_count: 0,
            facts: Vec::new(),
            devices: Devices::default(),
        }
    }

    /// Returns the store's address, `host:port`.
    pub fn master(&self) -> String {
        match self.master_addr.contains(':') {
            true => format!("[{}]:{}", self.master_addr, self.master_port),
            false => format!("{}:{}", self.master_addr, self.master_port),
        }
    }

    /// Returns the index of this rank's device among the visible ones: 0 if the variable
    /// (`CUDA_VISIBLE_DEVICES`, `ASCEND_RT_VISIBLE_DEVICES`) lists one device, else the local rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the local rank is needed but unknown; if the variable shows no
    /// device, or is a list with too few for this local rank. A list ends where its library stops
    /// reading, as CANN does at a smaller number.
    pub fn device(&self, kind: Accelerator) -> Result<usize> {
        self.devices.index(kind, self.local_rank)
    }
}

fn read(launcher: Launcher, origin: &'static str, lookup: Lookup<'_>) -> Result<Topology> {
    let mut reader = Reader::new(lookup);
    reader.note("launcher", &launcher, origin);
    let mut topology = Topology::single_process(launcher);
    match launcher {
        Launcher::None => single(&mut reader),
        Launcher::Pytorch => pytorch::read(&mut reader, &mut topology)?,
        Launcher::Slurm => slurm::read(&mut reader, &mut topology)?,
        Launcher::Mpi => mpi::read(&mut reader, &mut topology)?,
    }
    topology.facts = reader.facts;
    topology.devices = Devices::read(lookup);
    topology.devices.note(topology.local_rank, &mut topology.facts);
    Ok(topology)
}

/// Detects the innermost launcher, see the module docs.
fn infer(lookup: Lookup<'_>) -> Result<(Launcher, &'static str)> {
    let first_set =
        |names: &[&'static str]| names.iter().copied().find(|name| lookup(name).is_some());
    if let Some(name) = first_set(&pytorch::MARKERS) {
        return Ok((Launcher::Pytorch, name));
    }
    if let Some(name) = first_set(&mpi::MARKERS) {
        return Ok((Launcher::Mpi, name));
    }
    if slurm::in_step(lookup) {
        return Ok((Launcher::Slurm, slurm::MARKER));
    }
    if let Some(name) = first_set(&mpi::PMI_MARKERS) {
        return Ok((Launcher::Mpi, name));
    }
    slurm::check_srun(lookup)?;
    Ok((Launcher::None, "no launcher's variables"))
}

fn single(reader: &mut Reader<'_>) {
    for (name, value) in [("world_size", 1), ("rank", 0), ("local_rank", 0)] {
        reader.note(name, &value, "single process");
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Fact { name, value, origin }) in self.facts.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {value} ({origin})")?;
        }
        Ok(())
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Pytorch => "pytorch",
            Self::Slurm => "slurm",
            Self::Mpi => "mpi",
        })
    }
}

impl FromStr for Launcher {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::None, Self::Pytorch, Self::Slurm, Self::Mpi];
        all.into_iter().find(|launcher| launcher.to_string() == text).ok_or_else(|| {
            let text = format!("unknown launcher {text:?}: expected none, pytorch, slurm or mpi");
            Error::InvalidArgument(text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MPICH, OPEN_MPI, SLURM, STATIC, from, from_launcher};
    use super::*;

    #[test]
    fn no_variables_is_a_single_process() {
        for stray in ["", "MASTER_PORT=nonsense\nTORCHELASTIC_RUN_ID=old\nSLURM_NTASKS=1"] {
            let topology = from(stray).unwrap();
            assert_eq!(topology.launcher, Launcher::None);
            assert_eq!((topology.rank, topology.world_size), (0, 1));
            assert_eq!((topology.local_rank, topology.local_world_size), (Some(0), Some(1)));
            assert!(!topology.agent_store);
            let single = topology.facts.iter().find(|fact| fact.name == "rank").unwrap();
            assert_eq!(single.origin, "single process");
        }
    }

    #[test]
    fn the_innermost_launcher_is_detected() {
        // torchrun within a step; mpirun within a step, which inherits the variables of its daemon;
        // and `srun --mpi=pmi2`.
        for (text, launcher, rank) in [
            (format!("{SLURM}\n{STATIC}"), Launcher::Pytorch, 1),
            (format!("{SLURM}\n{OPEN_MPI}\nSLURM_PROCID=0"), Launcher::Mpi, 3),
            (format!("{SLURM}\n{MPICH}\nSLURM_PROCID=0"), Launcher::Mpi, 3),
            (format!("{SLURM}\nPMI_RANK=3\nPMI_SIZE=4"), Launcher::Slurm, 3),
            (format!("{OPEN_MPI}\n{STATIC}"), Launcher::Pytorch, 1),
        ] {
            let topology = from(&text).unwrap();
            assert_eq!((topology.launcher, topology.rank), (launcher, rank), "{text}");
        }
    }

    #[test]
    fn the_chosen_launcher_overrides_detection() {
        let text = format!("{SLURM}\n{STATIC}");
        let rank = |launcher| from_launcher(launcher, &text).unwrap().rank;
        assert_eq!(rank(Launcher::Slurm), 3);
        assert_eq!(rank(Launcher::Pytorch), 1);
        assert_eq!(rank(Launcher::None), 0);
        let error = from_launcher(Launcher::Mpi, &text).unwrap_err().to_string();
        assert!(error.contains("PMI_SIZE is not set"), "{error}");
    }

    #[test]
    fn launcher_names_round_trip() {
        for name in ["none", "pytorch", "slurm", "mpi"] {
            assert_eq!(name.parse::<Launcher>().unwrap().to_string(), name);
        }
        let error = "k8s".parse::<Launcher>().unwrap_err().to_string();
        assert!(error.contains("\"k8s\"") && error.contains("slurm"), "{error}");
    }

    #[test]
    fn every_field_has_one_origin() {
        for text in [STATIC, SLURM, OPEN_MPI, MPICH] {
            let topology = from(text).unwrap();
            for name in [
                "launcher",
                "rank",
                "world_size",
                "local_rank",
                "local_world_size",
                "master_addr",
                "master_port",
                "agent_store",
                "run_id",
                "restart_count",
            ] {
                let facts = topology.facts.iter().filter(|fact| fact.name == name);
                assert_eq!(facts.count(), 1, "{name} of {topology}");
            }
        }
    }
}
