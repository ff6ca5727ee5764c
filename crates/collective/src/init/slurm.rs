//! The variables of `srun`.
//!
//! A step's variables take precedence over its job's: a step on part of an allocation has its own
//! node list and number of tasks. Rank 0, which hosts the store, is on the first host of the list.
//! The local rank is `SLURM_LOCALID` and never derived, because tasks may be distributed
//! cyclically. Without `MASTER_PORT` the port is derived from job and step, so jobs that share a
//! host use different ports.
//!
//! Without `srun`, Slurm's variables may still name several tasks, and the only process would wait
//! forever for the others. This is an error, detected by the missing step.

use super::nodelist::{hosts, tasks_per_node};
use super::reader::{Lookup, Reader, check_below, invalid, parse, port_from_seed};
use super::topology::Topology;
use crate::{Error, Result};

/// Set only in a step.
pub(super) const MARKER: &str = "SLURM_STEP_ID";

/// Returns whether this process is a task of a step started by `srun`.
pub(super) fn in_step(lookup: Lookup<'_>) -> bool {
    let step = lookup(MARKER).or_else(|| lookup("SLURM_STEPID"));
    // Ids from here on are Slurm's special steps without `srun`: batch, interactive, ...
    step.is_some_and(|text| text.trim().parse::<u32>().map_or(true, |id| id < 0xffff_fff0))
}

/// Returns an error if this process is not in a step but its job has several tasks.
pub(super) fn check_srun(lookup: Lookup<'_>) -> Result<()> {
    let many = ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES"]
        .into_iter()
        .find_map(|name| Some((name, lookup(name)?)).filter(|(_, text)| is_several(text)));
    match many {
        Some((name, text)) if lookup("SLURM_JOB_ID").is_some() => Err(invalid(format!(
            "{name}={text}: this Slurm job has several tasks, but {MARKER} is not set, so this \
             process is not one of them; start it with srun (for one process, choose launcher none)"
        ))),
        _ => Ok(()),
    }
}

fn is_several(text: &str) -> bool {
    text.trim().parse::<u64>().is_ok_and(|count| count > 1)
}

pub(super) fn read(reader: &mut Reader<'_>, topology: &mut Topology) -> Result<()> {
    reader.hint = "though the launcher is Slurm; start the ranks with srun";
    check_step(reader)?;
    let (of_world, world_size) = {
        let names = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
        (reader.required(&names)?.0, reader.value("world_size", &names, None)?)
    };
    let rank = reader.value("rank", &["SLURM_PROCID"], None)?;
    let local_rank = reader.value("local_rank", &["SLURM_LOCALID"], None)?;
    check_below(("SLURM_PROCID", rank), (of_world, world_size))?;
    check_rank(reader, rank, local_rank)?;

    let nodes = Nodes::read(reader, (of_world, world_size))?;
    let local_world_size = nodes.tasks[nodes.own];
    reader.note("node_rank", &nodes.own, "SLURM_NODEID");
    reader.note("local_world_size", &local_world_size, nodes.tasks_variable);
    check_below(("SLURM_LOCALID", local_rank), (nodes.tasks_variable, local_world_size))?;

    topology.master_addr = master_addr(reader, rank, &nodes)?;
    let (job, step) = job_and_step(reader)?;
    let port = port_from_seed(job.wrapping_mul(PORTS_PER_JOB).wrapping_add(step));
    topology.master_port = reader.master_port(world_size, Some((port, JOB_AND_STEP)))?;
    topology.run_id = format!("slurm-{job}.{step}");
    reader.note("run_id", &topology.run_id, JOB_AND_STEP);
    let requeued = Some((0, "not requeued"));
    topology.restart_count = reader.value("restart_count", &["SLURM_RESTART_COUNT"], requeued)?;
    reader.note("agent_store", &false, "rank 0 hosts the store");
    (topology.rank, topology.world_size) = (rank, world_size);
    (topology.local_rank, topology.local_world_size) = (Some(local_rank), Some(local_world_size));
    topology.node_rank = Some(nodes.own);
    Ok(())
}

fn check_step(reader: &Reader<'_>) -> Result<()> {
    if !in_step(reader.lookup) {
        check_srun(reader.lookup)?;
        reader.required(&[MARKER])?;
    }
    match reader.first(&["SLURM_HET_SIZE", "SLURM_PACK_SIZE"]) {
        Some((name, text)) if is_several(&text) => Err(Error::Unsupported {
            backend: "slurm",
            what: format!(
                "heterogeneous jobs ({name}={text}): have the ranks set RANK, WORLD_SIZE, \
                 MASTER_ADDR and MASTER_PORT"
            ),
        }),
        _ => Ok(()),
    }
}

/// Checks that MPI's rank, or Slurm's list of this host's tasks, agrees with this task's rank.
fn check_rank(reader: &Reader<'_>, rank: usize, local_rank: usize) -> Result<()> {
    if let Some((name, text)) = reader.first(&["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
        && parse::<usize>(name, &text)? != rank
    {
        return Err(invalid(format!(
            "{name}={text} contradicts SLURM_PROCID={rank}; if mpirun started the ranks within a \
             Slurm job, choose the launcher mpi"
        )));
    }
    let Some((name, text)) = reader.first(&["SLURM_GTIDS"]) else { return Ok(()) };
    match text.split(',').nth(local_rank).and_then(|id| id.trim().parse::<usize>().ok()) {
        Some(listed) if listed != rank => Err(invalid(format!(
            "{name}={text} contradicts SLURM_PROCID={rank} with SLURM_LOCALID={local_rank}"
        ))),
        _ => Ok(()),
    }
}

/// The step's hosts.
struct Nodes {
    first: String,
    /// Number of tasks of each.
    tasks: Vec<usize>,
    tasks_variable: &'static str,
    /// Index of this host.
    own: usize,
}

impl Nodes {
    fn read(reader: &Reader<'_>, (of_world, world_size): (&str, usize)) -> Result<Self> {
        let wrong = |name: &str, text: &str, why: String| {
            invalid(format!("{name}={text:?} is wrong: {why}"))
        };
        let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        let (list_name, list) = reader.required(&lists)?;
        let (first, count) = hosts(list.trim()).map_err(|why| wrong(list_name, &list, why))?;
        let counts = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
        let (tasks_variable, counts) = reader.required(&counts)?;
        let tasks =
            tasks_per_node(counts.trim()).map_err(|why| wrong(tasks_variable, &counts, why))?;
        if tasks.len() != count {
            return Err(invalid(format!(
                "{tasks_variable}={counts} lists {} hosts, {list_name}={list} lists {count}",
                tasks.len()
            )));
        }
        if tasks.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count)) != Some(world_size)
        {
            return Err(invalid(format!(
                "the counts of {tasks_variable}={counts} do not add up to {of_world}={world_size}"
            )));
        }
        let (node_name, node) = reader.required(&["SLURM_NODEID"])?;
        let own = parse(node_name, &node)?;
        check_below((node_name, own), ("the number of hosts", count))?;
        Ok(Self { first, tasks, tasks_variable, own })
    }
}

fn master_addr(reader: &mut Reader<'_>, rank: usize, nodes: &Nodes) -> Result<String> {
    if reader.first(&["MASTER_ADDR"]).is_some() {
        return reader.value("master_addr", &["MASTER_ADDR"], None);
    }
    let (addr, origin) = match nodes.tasks[..] {
        [_] => ("127.0.0.1", "all ranks are on this host"),
        _ => (&nodes.first[..], "first of the step's node list"),
    };
    if rank == 0 && nodes.own != 0 {
        return Err(invalid(format!(
            "rank 0 runs on a host with SLURM_NODEID={}, not on {addr}, the first of the node list, \
             where the other ranks expect it; set MASTER_ADDR",
            nodes.own
        )));
    }
    reader.note("master_addr", &addr, origin);
    Ok(addr.to_owned())
}

fn job_and_step(reader: &Reader<'_>) -> Result<(u64, u64)> {
    let (job_name, job) = reader.required(&["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let (step_name, step) = reader.required(&[MARKER, "SLURM_STEPID"])?;
    Ok((parse(job_name, &job)?, parse(step_name, &step)?))
}

const JOB_AND_STEP: &str = "from SLURM_JOB_ID and SLURM_STEP_ID";
/// A job's first 31 steps have ports of their own. Odd, so that consecutive jobs have, too.
const PORTS_PER_JOB: u64 = 31;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::tests::{SLURM, from, from_launcher};
    use super::super::topology::Launcher;
    use super::*;

    #[test]
    fn every_value_of_a_recorded_step_has_its_source() {
        let topology = from(SLURM).unwrap();
        assert_eq!((topology.rank, topology.world_size), (3, 4));
        assert_eq!((topology.local_rank, topology.local_world_size), (Some(1), Some(2)));
        assert_eq!(topology.node_rank, Some(1));
        assert!(!topology.agent_store);
        assert_eq!(
            topology.to_string(),
            "launcher slurm (SLURM_STEP_ID), world_size 4 (SLURM_STEP_NUM_TASKS), rank 3 \
             (SLURM_PROCID), local_rank 1 (SLURM_LOCALID), node_rank 1 (SLURM_NODEID), \
             local_world_size 2 (SLURM_STEP_TASKS_PER_NODE), master_addr n1 (first of the step's \
             node list), master_port 16415 (from SLURM_JOB_ID and SLURM_STEP_ID), run_id slurm-1.0 \
             (from SLURM_JOB_ID and SLURM_STEP_ID), restart_count 0 (not requeued), agent_store \
             false (rank 0 hosts the store), cuda_device 1 (CUDA_VISIBLE_DEVICES)"
        );
    }

    #[test]
    fn master_addr_and_port_override_slurm() {
        let topology = from(&format!("{SLURM}\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=2950")).unwrap();
        assert_eq!(topology.master(), "10.0.0.1:2950");
        assert!(topology.to_string().contains("master_port 2950 (MASTER_PORT)"));
    }

    #[test]
    fn a_step_on_part_of_the_job_uses_its_own_first_host() {
        // `srun -N1 -n2 -w n2` in an allocation of n[1-2].
        let part = "SLURM_STEP_NODELIST=n2\nSLURM_STEP_NUM_TASKS=2\nSLURM_STEP_TASKS_PER_NODE=2\n\
                    SLURM_NODEID=0\nSLURM_PROCID=0\nSLURM_LOCALID=0\nSLURM_GTIDS=0,1";
        let topology = from(&format!("{SLURM}\n{part}")).unwrap();
        assert_eq!((topology.world_size, topology.local_world_size), (2, Some(2)));
        assert_eq!(topology.master_addr, "127.0.0.1");
        let two = part.replace("LIST=n2", "LIST=n[2-3]").replace("NODE=2", "NODE=1(x2)");
        let topology = from(&format!("{SLURM}\n{two}\nSLURM_GTIDS=0")).unwrap();
        assert_eq!(topology.master_addr, "n2", "{topology}");
    }

    #[test]
    fn cyclic_and_uneven_task_distributions_are_read() {
        let turns = "SLURM_PROCID=2\nSLURM_LOCALID=1\nSLURM_NODEID=0\nSLURM_GTIDS=0,2";
        let topology = from(&format!("{SLURM}\n{turns}")).unwrap();
        assert_eq!((topology.rank, topology.local_rank), (2, Some(1)));
        let uneven = "SLURM_STEP_TASKS_PER_NODE=3,1\nSLURM_LOCALID=0\nSLURM_GTIDS=3";
        let topology = from(&format!("{SLURM}\n{uneven}")).unwrap();
        assert_eq!((topology.local_rank, topology.local_world_size), (Some(0), Some(1)));
    }

    #[test]
    fn contradictions_are_errors_that_name_the_variable() {
        for (change, text) in [
            ("SLURM_PROCID=4", "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4"),
            ("SLURM_PROCID=x", "SLURM_PROCID=\"x\" is not a number"),
            ("SLURM_PROCID", "SLURM_PROCID is not set"),
            ("SLURM_LOCALID", "SLURM_LOCALID is not set"),
            ("SLURM_LOCALID=2", "SLURM_LOCALID=2 is not below SLURM_STEP_TASKS_PER_NODE=2"),
            ("SLURM_LOCALID=0", "SLURM_GTIDS=2,3 contradicts SLURM_PROCID=3"),
            ("SLURM_NODEID=2", "SLURM_NODEID=2 is not below the number of hosts=2"),
            ("SLURM_STEP_TASKS_PER_NODE=4", "lists 1 hosts, SLURM_STEP_NODELIST=n[1-2] lists 2"),
            ("SLURM_STEP_TASKS_PER_NODE=3,2", "do not add up to SLURM_STEP_NUM_TASKS=4"),
            ("SLURM_STEP_TASKS_PER_NODE=2(", "SLURM_STEP_TASKS_PER_NODE=\"2(\" is wrong"),
            ("SLURM_STEP_NODELIST=n[1-", "SLURM_STEP_NODELIST=\"n[1-\" is wrong"),
            ("SLURM_JOB_ID=a", "SLURM_JOB_ID=\"a\" is not a number"),
            ("MASTER_ADDR=", "MASTER_ADDR is set, but empty"),
            ("MASTER_PORT=0", "MASTER_PORT=0"),
            ("PMI_RANK=0", "PMI_RANK=0 contradicts SLURM_PROCID=3"),
            (
                "SLURM_PROCID=0\nSLURM_LOCALID=0\nSLURM_GTIDS=0,3",
                "rank 0 runs on a host with SLURM_NODEID=1, not on n1",
            ),
        ] {
            let error = from(&format!("{SLURM}\n{change}")).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{change}: {error}");
            assert!(error.to_string().contains(text), "{change}: {error}");
        }
        let both = from_launcher(Launcher::Slurm, &format!("{SLURM}\nOMPI_COMM_WORLD_RANK=0"));
        assert!(both.unwrap_err().to_string().contains("choose the launcher mpi"));
        let het = from(&format!("{SLURM}\nSLURM_HET_SIZE=2")).unwrap_err();
        assert!(matches!(het, Error::Unsupported { .. }), "{het}");
    }

    #[test]
    fn a_batch_script_without_srun_is_an_error() {
        let batch = "SLURM_STEP_ID\nSLURM_STEPID\nSLURM_PROCID=0\nSLURM_LOCALID=0";
        for step in ["", "\nSLURM_STEP_ID=4294967291"] {
            let text = format!("{SLURM}\n{batch}{step}");
            for result in [from(&text), from_launcher(Launcher::Slurm, &text)] {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("start it with srun"), "{error}");
                assert!(error.contains("SLURM_NTASKS=4"), "{error}");
            }
            assert_eq!(from_launcher(Launcher::None, &text).unwrap().world_size, 1);
        }
        let error = from_launcher(Launcher::Slurm, "").unwrap_err().to_string();
        assert!(error.contains("SLURM_STEP_ID is not set"), "{error}");
    }

    #[test]
    fn neighbouring_jobs_and_steps_have_distinct_ports() {
        let port = |job: u64, step: u64| {
            from(&format!("{SLURM}\nSLURM_JOB_ID={job}\nSLURM_STEP_ID={step}")).unwrap().master_port
        };
        let near = |first: u64| (first..first + 500).flat_map(|job| (0..31).map(move |s| (job, s)));
        let ports: HashSet<_> = near(123_456).map(|(job, step)| port(job, step)).collect();
        assert_eq!(ports.len(), 500 * 31);
        assert!(ports.iter().all(|port| (16_384..32_768).contains(port)));
    }
}
