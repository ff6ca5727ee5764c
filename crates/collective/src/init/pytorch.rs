//! The variables of `torchrun`.
//!
//! `RANK` and `WORLD_SIZE` come together or not at all. With more than one rank there must be
//! `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` too: a guess would put two ranks on one device or
//! on two stores.

use std::fmt::Display;
use std::str::FromStr;

use super::{Fact, Origin, Topology};
use crate::{Error, Result};

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

pub(super) fn read(lookup: Lookup<'_>) -> Result<Topology> {
    let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
    let launched = names.iter().any(|name| lookup(name).is_some());
    if !launched {
        refuse_other_launchers(lookup)?;
    }
    let mut reader = Reader { lookup, alone: !launched, facts: Vec::new() };
    let single = "single process";

    let world_size =
        reader.number("world_size", "WORLD_SIZE", (!launched).then_some((1, single)))?;
    let rank = reader.number("rank", "RANK", (!launched).then_some((0, single)))?;
    let one = world_size == 1;
    let local_rank = reader.number("local_rank", "LOCAL_RANK", one.then_some((0, single)))?;
    let master_addr =
        reader.text("master_addr", "MASTER_ADDR", one.then_some(("127.0.0.1", single)))?;
    let all_here = one || is_loopback(&master_addr);
    let local_world_size = reader.number(
        "local_world_size",
        "LOCAL_WORLD_SIZE",
        all_here.then_some((world_size, "the world size: all ranks are on this host")),
    )?;
    let master_port = reader.number("master_port", "MASTER_PORT", one.then_some((0, single)))?;
    let restart_count =
        reader.number("restart_count", "TORCHELASTIC_RESTART_COUNT", Some((0, "first attempt")))?;
    let run_id =
        reader.text("run_id", "TORCHELASTIC_RUN_ID", Some(("none", "torchrun's default")))?;
    let agent_store = reader.agent_store();

    less("RANK", rank, "WORLD_SIZE", world_size)?;
    less("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)?;
    if local_world_size > world_size {
        return Err(contradiction(format!(
            "LOCAL_WORLD_SIZE={local_world_size} is more than WORLD_SIZE={world_size}"
        )));
    }
    if !one && master_port == 0 {
        return Err(contradiction("MASTER_PORT=0 is no port that ranks can agree on".to_owned()));
    }
    let facts = reader.facts;
    Ok(Topology {
        rank,
        world_size,
        local_rank,
        local_world_size,
        master_addr,
        master_port,
        agent_store,
        run_id,
        restart_count,
        facts,
    })
}

/// Reads variables and notes where each fact came from.
struct Reader<'a> {
    lookup: Lookup<'a>,
    /// No launcher: stray variables (a `MASTER_PORT` left in a shell) say nothing.
    alone: bool,
    facts: Vec<Fact>,
}

impl Reader<'_> {
    fn number<T: FromStr + Display>(
        &mut self,
        name: &'static str,
        variable: &'static str,
        default: Option<(T, &'static str)>,
    ) -> Result<T> {
        let Some(text) = self.variable(variable) else {
            return self.default(name, variable, default);
        };
        let Ok(value) = text.trim().parse() else {
            return Err(contradiction(format!("{variable}={text:?} is not a number in range")));
        };
        self.note(name, &value, Origin::Variable(variable));
        Ok(value)
    }

    fn text(
        &mut self,
        name: &'static str,
        variable: &'static str,
        default: Option<(&str, &'static str)>,
    ) -> Result<String> {
        match self.variable(variable) {
            None => self.default(name, variable, default.map(|(text, why)| (text.to_owned(), why))),
            Some(text) if text.trim().is_empty() => {
                Err(contradiction(format!("{variable} is set, but empty")))
            }
            Some(text) => {
                let text = text.trim().to_owned();
                self.note(name, &text, Origin::Variable(variable));
                Ok(text)
            }
        }
    }

    /// Only the literal `True` counts: it is what Python compares with.
    fn agent_store(&mut self) -> bool {
        let variable = "TORCHELASTIC_USE_AGENT_STORE";
        let text = self.variable(variable);
        let value = text.as_deref() == Some("True");
        let origin = match text {
            Some(_) => Origin::Variable(variable),
            None => Origin::Default("rank 0 hosts the store"),
        };
        self.note("agent_store", &value, origin);
        value
    }

    fn default<T: Display>(
        &mut self,
        name: &'static str,
        variable: &'static str,
        default: Option<(T, &'static str)>,
    ) -> Result<T> {
        let Some((value, why)) = default else {
            return Err(contradiction(format!(
                "{variable} is not set, though other variables of a launcher are; start the \
                 ranks with `runner launch` or torchrun, or set it"
            )));
        };
        self.note(name, &value, Origin::Default(why));
        Ok(value)
    }

    fn variable(&self, variable: &str) -> Option<String> {
        if self.alone { None } else { (self.lookup)(variable) }
    }

    fn note(&mut self, name: &'static str, value: &dyn Display, origin: Origin) {
        self.facts.push(Fact { name, value: value.to_string(), origin });
    }
}

/// One of several tasks of a launcher whose variables are not read: each would believe itself
/// alone, and all would write the same files.
fn refuse_other_launchers(lookup: Lookup<'_>) -> Result<()> {
    let many = |name: &str| {
        lookup(name).and_then(|text| text.trim().parse::<u64>().ok()).is_some_and(|n| n > 1)
    };
    let found = [
        ("Slurm", "SLURM_STEP_NUM_TASKS"),
        ("Open MPI", "OMPI_COMM_WORLD_SIZE"),
        ("MPI", "PMI_SIZE"),
    ]
    .into_iter()
    .find(|(_, name)| many(name));
    match found {
        None => Ok(()),
        Some((launcher, name)) => Err(Error::Unsupported {
            backend: "env",
            what: format!(
                "ranks started by {launcher} ({name} says there are several, RANK is not set); \
                 have each host's task start `runner launch`, or set RANK, WORLD_SIZE, LOCAL_RANK, \
                 MASTER_ADDR and MASTER_PORT"
            ),
        }),
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn less(name: &str, value: usize, limit_name: &str, limit: usize) -> Result<()> {
    if value < limit {
        return Ok(());
    }
    Err(contradiction(format!("{name}={value} is not below {limit_name}={limit}")))
}

fn contradiction(text: String) -> Error {
    Error::InvalidArgument(text)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const STATIC: &str =
        include_str!("../../tests/vectors/launch-env/torchrun-2.11-static-rank1.txt");
    const STANDALONE: &str =
        include_str!("../../tests/vectors/launch-env/torchrun-2.11-standalone-rank1.txt");
    const SLURM: &str = include_str!("../../tests/vectors/launch-env/slurm-22.05-procid3.txt");
    const OPEN_MPI: &str = include_str!("../../tests/vectors/launch-env/openmpi-4.1.4-rank3.txt");
    const MPICH: &str = include_str!("../../tests/vectors/launch-env/mpich-4.0.2-rank3.txt");

    /// The topology of the variables in `text`, one a line; later ones win, and `NAME` alone
    /// takes one away.
    fn from(text: &str) -> Result<Topology> {
        let mut variables = HashMap::new();
        for line in text.lines() {
            match line.split_once('=') {
                Some((name, value)) => variables.insert(name, value.to_owned()),
                None => variables.remove(line),
            };
        }
        Topology::from_env(|name| variables.get(name).cloned())
    }

    #[test]
    fn a_recorded_static_job() {
        let topology = from(STATIC).unwrap();
        assert_eq!((topology.rank, topology.world_size), (1, 2));
        assert_eq!((topology.local_rank, topology.local_world_size), (1, 2));
        assert_eq!(topology.master(), "127.0.0.1:29500");
        assert!(topology.agent_store);
        assert_eq!((&topology.run_id[..], topology.restart_count), ("none", 0));
        assert_eq!(
            topology.to_string(),
            "world_size 2 (WORLD_SIZE), rank 1 (RANK), local_rank 1 (LOCAL_RANK), master_addr \
             127.0.0.1 (MASTER_ADDR), local_world_size 2 (LOCAL_WORLD_SIZE), master_port 29500 \
             (MASTER_PORT), restart_count 0 (TORCHELASTIC_RESTART_COUNT), run_id none \
             (TORCHELASTIC_RUN_ID), agent_store true (TORCHELASTIC_USE_AGENT_STORE)"
        );
    }

    #[test]
    fn a_recorded_standalone_job() {
        let topology = from(STANDALONE).unwrap();
        assert_eq!(topology.master(), "localhost:33797");
        assert_eq!(topology.run_id, "3836b47b-7221-4ed1-b4a7-1f1dab4907b1");
    }

    #[test]
    fn no_variables_is_a_single_process() {
        for stray in ["", "MASTER_PORT=nonsense\nTORCHELASTIC_RUN_ID=old"] {
            let topology = from(stray).unwrap();
            assert_eq!((topology.rank, topology.world_size), (0, 1));
            assert_eq!((topology.local_rank, topology.local_world_size), (0, 1));
            assert!(!topology.agent_store);
            let single = topology.facts.iter().find(|fact| fact.name == "rank").unwrap();
            assert_eq!(single.origin, Origin::Default("single process"));
        }
    }

    #[test]
    fn other_launchers_are_refused_by_name() {
        for (text, name) in [(SLURM, "Slurm"), (OPEN_MPI, "Open MPI"), (MPICH, "PMI_SIZE")] {
            let error = from(text).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("runner launch"), "{error}");
        }
        // With torchrun's variables on top, those count.
        assert!(from(&format!("{SLURM}\n{STATIC}")).is_ok());
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        for (change, text) in [
            ("RANK=2", "RANK=2 is not below WORLD_SIZE=2"),
            ("RANK=-1", "RANK=\"-1\" is not a number"),
            ("RANK=", "RANK=\"\" is not a number"),
            ("RANK", "RANK is not set"),
            ("WORLD_SIZE", "WORLD_SIZE is not set"),
            ("WORLD_SIZE=0", "RANK=1 is not below WORLD_SIZE=0"),
            ("WORLD_SIZE=two", "WORLD_SIZE=\"two\""),
            ("LOCAL_RANK", "LOCAL_RANK is not set"),
            ("LOCAL_RANK=2", "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
            ("LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3 is more than WORLD_SIZE=2"),
            ("MASTER_ADDR", "MASTER_ADDR is not set"),
            ("MASTER_ADDR= ", "MASTER_ADDR is set, but empty"),
            ("MASTER_PORT", "MASTER_PORT is not set"),
            ("MASTER_PORT=0", "MASTER_PORT=0"),
            ("MASTER_PORT=65536", "MASTER_PORT=\"65536\" is not a number in range"),
            ("MASTER_ADDR=node1\nLOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE is not set"),
            ("TORCHELASTIC_RESTART_COUNT=x", "TORCHELASTIC_RESTART_COUNT=\"x\""),
        ] {
            let error = from(&format!("{STATIC}\n{change}")).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{change}: {error}");
            assert!(error.to_string().contains(text), "{change}: {error}");
        }
    }

    #[test]
    fn only_the_literal_true_is_an_agents_store() {
        for (text, agent_store) in [
            ("TORCHELASTIC_USE_AGENT_STORE=True", true),
            ("TORCHELASTIC_USE_AGENT_STORE=true", false),
            ("TORCHELASTIC_USE_AGENT_STORE=1", false),
            ("TORCHELASTIC_USE_AGENT_STORE", false),
        ] {
            let topology = from(&format!("{STATIC}\n{text}")).unwrap();
            assert_eq!(topology.agent_store, agent_store, "{text}");
        }
    }

    #[test]
    fn ranks_of_one_host_need_not_be_counted() {
        let topology = from(&format!("{STATIC}\nLOCAL_WORLD_SIZE")).unwrap();
        assert_eq!(topology.local_world_size, 2);
        let alone = from("RANK=0\nWORLD_SIZE=1").unwrap();
        assert_eq!((alone.local_rank, alone.local_world_size), (0, 1));
    }
}
