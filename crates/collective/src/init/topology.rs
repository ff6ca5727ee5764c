//! Who this process is: [`Topology`], read from the launcher's environment.
//!
//! [`Topology::from_env`] finds out which launcher it was; [`Topology::from_launcher`] is told. Both
//! are pure over a lookup function. What each launcher says is in a module of its own; what they
//! have in common (a checked number, a fact noted) is in `reader`.
//!
//! Which launcher, when several have left variables, goes by who stands nearest to the process:
//! torchrun's variables, which a script may also set by hand; those that only `mpirun` sets; a Slurm
//! step; those of PMI, which `srun --mpi=pmi2` sets too. So torchrun or `mpirun` within a Slurm step
//! are what they are.

use std::fmt;
use std::str::FromStr;

use super::device::{Accelerator, Devices};
use super::reader::{Lookup, Reader};
use super::{mpi, pytorch, slurm};
use crate::{Error, Rank, Result};

/// Who this process is among the ranks of a job, and where they meet.
///
/// Displays as one line that also says where each fact came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// Who started the ranks.
    pub launcher: Launcher,
    /// This process among all, `0..world_size`.
    pub rank: Rank,
    /// Number of processes.
    pub world_size: usize,
    /// This process among those of its host; which device is its own, see
    /// [`device`](Self::device). `None` if the launcher does not say; [`locate`](Self::locate) asks
    /// the store then.
    pub local_rank: Option<usize>,
    /// Number of processes of this host, likewise.
    pub local_world_size: Option<usize>,
    /// This host among those of the job, where the launcher says so.
    pub node_rank: Option<usize>,
    /// The host of the store, a name or an address.
    pub master_addr: String,
    /// The store's port; 0 for a single process, which needs no store.
    pub master_port: u16,
    /// Whether the launcher hosts the store; if not, rank 0 does.
    pub agent_store: bool,
    /// The run's name.
    pub run_id: String,
    /// How often the launcher has restarted the ranks.
    pub restart_count: u64,
    /// Each of these with where it came from.
    pub facts: Vec<Fact>,
    pub(super) devices: Devices,
}

/// One fact of a [`Topology`] and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fact {
    /// The field's name.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

/// Where a fact came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The environment variable of this name.
    Variable(&'static str),
    /// Made of variables, as the text says.
    Derived(&'static str),
    /// No variable; the reason why this value was taken.
    Default(&'static str),
}

/// Who starts the ranks, and so which variables say who is who.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// Nobody: a single process.
    None,
    /// torchrun, `runner launch`, most cluster operators, or a script: `RANK`, `WORLD_SIZE`, ...
    Pytorch,
    /// `srun`.
    Slurm,
    /// `mpirun` of Open MPI, `mpiexec` of MPICH and its kin (PMI).
    Mpi,
}

impl Topology {
    /// Reads what the launcher left in the environment. `lookup` is asked for each variable;
    /// `|name| std::env::var(name).ok()` reads the real ones. Without any launcher's variables, this
    /// is a single process.
    ///
    /// A script that starts ranks itself sets what PyTorch's `env://` needs, on each:
    ///
    /// | variable | value |
    /// |---|---|
    /// | `RANK` | this process among all, from 0 |
    /// | `WORLD_SIZE` | the number of processes |
    /// | `MASTER_ADDR` | the host where rank 0 runs, as the others reach it |
    /// | `MASTER_PORT` | a port of it that is free; not needed for one process, nor is the address |
    ///
    /// It may set `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which are of use for
    /// [`device`](Self::device) and [`dist::local_group`](crate::dist::local_group). Without them they
    /// are `RANK` and `WORLD_SIZE` if `MASTER_ADDR` is a loopback address, so that all ranks are on one
    /// host, and else unknown, until [`locate`](Self::locate) asks the store.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] naming the variable that is missing, cannot be read, or
    /// contradicts another, and for a Slurm batch script that was to be started with `srun`;
    /// [`Error::Unsupported`] for a heterogeneous Slurm job.
    ///
    /// # Examples
    ///
    /// ```
    /// use collective::Topology;
    ///
    /// let alone = Topology::from_env(|_| None)?;
    /// assert_eq!((alone.rank, alone.world_size), (0, 1));
    /// # Ok::<(), collective::Error>(())
    /// ```
    #[doc(alias = "infer_launcher")]
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let (launcher, origin) = infer(&lookup)?;
        read(launcher, origin, &lookup)
    }

    /// As [`from_env`](Self::from_env), with the variables of `launcher` and no others.
    ///
    /// # Errors
    ///
    /// Those of [`from_env`](Self::from_env).
    pub fn from_launcher(
        launcher: Launcher,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        read(launcher, Origin::Default("as chosen"), &lookup)
    }

    /// A single process, for launchers to put in what they know.
    pub(super) fn alone(launcher: Launcher, facts: Vec<Fact>) -> Self {
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
            facts,
            devices: Devices::default(),
        }
    }

    /// Where the store is, `host:port`.
    #[must_use]
    pub fn master(&self) -> String {
        match self.master_addr.contains(':') {
            true => format!("[{}]:{}", self.master_addr, self.master_port),
            false => format!("{}:{}", self.master_addr, self.master_port),
        }
    }

    /// The index of this rank's own device among those it sees: 0 if its variable
    /// (`CUDA_VISIBLE_DEVICES`, `ASCEND_RT_VISIBLE_DEVICES`) is one device, else the local rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the local rank is not known and needed; if the variable shows no
    /// device, or is a list that shows too few for
    /// this local rank; a list ends where its library stops reading, as CANN does at a smaller number.
    pub fn device(&self, kind: Accelerator) -> Result<usize> {
        self.devices.index(kind, self.local_rank)
    }
}

fn read(launcher: Launcher, origin: Origin, lookup: Lookup<'_>) -> Result<Topology> {
    let mut reader = Reader::new(lookup);
    reader.note("launcher", &launcher, origin);
    let mut topology = match launcher {
        Launcher::None => single(reader),
        Launcher::Pytorch => pytorch::read(reader)?,
        Launcher::Slurm => slurm::read(reader)?,
        Launcher::Mpi => mpi::read(reader)?,
    };
    topology.devices = Devices::read(lookup);
    topology.devices.note(topology.local_rank, &mut topology.facts);
    Ok(topology)
}

/// The launcher that stands nearest to this process, see the head of this file.
fn infer(lookup: Lookup<'_>) -> Result<(Launcher, Origin)> {
    let first_set =
        |names: &[&'static str]| names.iter().copied().find(|name| lookup(name).is_some());
    if let Some(name) = first_set(&pytorch::MARKS) {
        return Ok((Launcher::Pytorch, Origin::Variable(name)));
    }
    if let Some(name) = first_set(&mpi::MARKS) {
        return Ok((Launcher::Mpi, Origin::Variable(name)));
    }
    if slurm::in_step(lookup) {
        return Ok((Launcher::Slurm, Origin::Variable(slurm::MARK)));
    }
    if let Some(name) = first_set(&mpi::PMI_MARKS) {
        return Ok((Launcher::Mpi, Origin::Variable(name)));
    }
    slurm::refuse_without_srun(lookup)?;
    Ok((Launcher::None, Origin::Default("no launcher's variables")))
}

fn single(mut reader: Reader<'_>) -> Topology {
    const WHY: Origin = Origin::Default("single process");
    for (name, value) in [("world_size", 1), ("rank", 0), ("local_rank", 0)] {
        reader.note(name, &value, WHY);
    }
    Topology::alone(Launcher::None, reader.facts)
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

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(name) => f.write_str(name),
            Self::Derived(reason) | Self::Default(reason) => f.write_str(reason),
        }
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
            let text = format!("{text:?} is no launcher: none, pytorch, slurm or mpi");
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
            assert_eq!(single.origin, Origin::Default("single process"));
        }
    }

    #[test]
    fn the_nearest_launcher_counts() {
        // torchrun within a step; mpirun within a step, whose daemon's variables it inherits; and
        // `srun --mpi=pmi2`.
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
    fn the_chosen_launcher_beats_the_nearest() {
        let text = format!("{SLURM}\n{STATIC}");
        let rank = |launcher| from_launcher(launcher, &text).unwrap().rank;
        assert_eq!(rank(Launcher::Slurm), 3);
        assert_eq!(rank(Launcher::Pytorch), 1);
        assert_eq!(rank(Launcher::None), 0);
        let error = from_launcher(Launcher::Mpi, &text).unwrap_err().to_string();
        assert!(error.contains("PMI_SIZE is not set"), "{error}");
    }

    #[test]
    fn a_launchers_name_is_read_as_written() {
        for name in ["none", "pytorch", "slurm", "mpi"] {
            assert_eq!(name.parse::<Launcher>().unwrap().to_string(), name);
        }
        let error = "k8s".parse::<Launcher>().unwrap_err().to_string();
        assert!(error.contains("\"k8s\"") && error.contains("slurm"), "{error}");
    }

    #[test]
    fn every_field_has_its_origin() {
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
