//! The variables of `mpirun` and `mpiexec`: Open MPI's, and PMI's (MPICH and its kin).
//!
//! Neither says where rank 0 runs. If all ranks are on one host, that does not matter; otherwise
//! `MASTER_ADDR` must be given. Without a `MASTER_PORT` it is made of the job's name where MPI gives
//! one, so that two jobs on one host do not meet, and otherwise is PyTorch's 29500.

use super::reader::{Reader, agreeable, at_most, contradiction, less, port_of};
use super::topology::{Launcher, Origin, Topology};
use crate::Result;

/// What only `mpirun` itself sets, whatever it was started in.
pub(super) const MARKS: [&str; 4] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
];
/// What `srun --mpi=pmi2` sets too.
pub(super) const PMI_MARKS: [&str; 2] = ["PMI_RANK", "PMI_SIZE"];

/// One MPI's names for the same things.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// How its launcher hands on a variable.
    hand_on: &'static str,
}

const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    hand_on: "mpirun -x MASTER_ADDR=... -x MASTER_PORT=...",
};
const PMI: Names = Names {
    rank: "PMI_RANK",
    size: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_size: "MPI_LOCALNRANKS",
    hand_on: "mpiexec -genv MASTER_ADDR ... -genv MASTER_PORT ...",
};

pub(super) fn read(mut reader: Reader<'_>) -> Result<Topology> {
    reader.hint = "though the launcher is MPI; start the ranks with mpirun, or with srun and the \
                   launcher slurm";
    let names = match reader.first(&MARKS[..3]) {
        Some(_) => OPEN_MPI,
        None => PMI,
    };
    let world_size = reader.number("world_size", &[names.size], None)?;
    let rank = reader.number("rank", &[names.rank], None)?;
    let one = |value| (world_size == 1).then_some((value, "the only rank"));
    let local_rank = reader.number("local_rank", &[names.local_rank], one(0))?;
    let local_world_size = reader.number("local_world_size", &[names.local_size], one(1))?;
    less((names.rank, rank), (names.size, world_size))?;
    less((names.local_rank, local_rank), (names.local_size, local_world_size))?;
    at_most((names.local_size, local_world_size), (names.size, world_size))?;

    let all_here = local_world_size == world_size;
    let here = ("127.0.0.1".to_owned(), "all ranks are on this host");
    if !all_here && reader.first(&["MASTER_ADDR"]).is_none() {
        return Err(contradiction(format!(
            "MASTER_ADDR is not set, and {local_world_size} of {world_size} ranks are on this host \
             ({}): MPI does not say where rank 0 runs; start it with {}",
            names.local_size, names.hand_on
        )));
    }
    let master_addr = reader.text("master_addr", &["MASTER_ADDR"], all_here.then_some(here))?;
    let job = reader.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"]);
    let master_port = master_port(&mut reader, job.as_ref().map(|(_, text)| &text[..]))?;
    agreeable(master_port, world_size)?;
    let (run_id, origin) = match job {
        Some((name, text)) => (format!("mpi-{text}"), Origin::Variable(name)),
        None => ("mpi".to_owned(), Origin::Default("MPI gives the job no name")),
    };
    reader.note("run_id", &run_id, origin);
    reader.note("restart_count", &0, Origin::Default("MPI restarts nothing"));
    reader.note("agent_store", &false, Origin::Default("rank 0 hosts the store"));
    Ok(Topology {
        rank,
        world_size,
        local_rank: Some(local_rank),
        local_world_size: Some(local_world_size),
        master_addr,
        master_port,
        run_id,
        ..Topology::alone(Launcher::Mpi, reader.facts)
    })
}

fn master_port(reader: &mut Reader<'_>, job: Option<&str>) -> Result<u16> {
    let Some(job) = job.filter(|_| reader.first(&["MASTER_PORT"]).is_none()) else {
        return reader.number("master_port", &["MASTER_PORT"], Some((29_500, "PyTorch's default")));
    };
    let port = port_of(fnv1a(job.as_bytes()));
    reader.note("master_port", &port, Origin::Derived("from the job's name"));
    Ok(port)
}

/// Fowler, Noll and Vo's hash: the same on every rank, whatever compiled it.
fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MPICH, OPEN_MPI, from};
    use crate::Error;

    #[test]
    fn recorded_jobs_of_one_host_need_no_master() {
        for (text, master, run_id) in
            [(OPEN_MPI, "127.0.0.1:29193", "mpi-672399361"), (MPICH, "127.0.0.1:29500", "mpi")]
        {
            let topology = from(text).unwrap();
            assert_eq!((topology.rank, topology.world_size), (3, 4));
            assert_eq!((topology.local_rank, topology.local_world_size), (Some(3), Some(4)));
            assert_eq!(topology.master(), master);
            assert_eq!(topology.run_id, run_id);
            assert!(!topology.agent_store && topology.node_rank.is_none());
        }
        assert_eq!(
            from(MPICH).unwrap().to_string(),
            "launcher mpi (MPI_LOCALRANKID), world_size 4 (PMI_SIZE), rank 3 (PMI_RANK), local_rank \
             3 (MPI_LOCALRANKID), local_world_size 4 (MPI_LOCALNRANKS), master_addr 127.0.0.1 (all \
             ranks are on this host), master_port 29500 (PyTorch's default), run_id mpi (MPI gives \
             the job no name), restart_count 0 (MPI restarts nothing), agent_store false (rank 0 \
             hosts the store)"
        );
    }

    #[test]
    fn on_several_hosts_the_master_must_be_named() {
        for (text, change, hand_on) in [
            (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1", "mpirun -x"),
            (MPICH, "MPI_LOCALNRANKS=2\nMPI_LOCALRANKID=1", "mpiexec -genv"),
        ] {
            let error = from(&format!("{text}\n{change}")).unwrap_err().to_string();
            assert!(error.contains("MASTER_ADDR is not set, and 2 of 4 ranks"), "{error}");
            assert!(error.contains(hand_on), "{error}");
            let named = from(&format!("{text}\n{change}\nMASTER_ADDR=n1\nMASTER_PORT=7")).unwrap();
            assert_eq!(named.master(), "n1:7");
        }
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        for (change, text) in [
            (
                "OMPI_COMM_WORLD_RANK=4",
                "OMPI_COMM_WORLD_RANK=4 is not below OMPI_COMM_WORLD_SIZE=4",
            ),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK is not set"),
            ("OMPI_COMM_WORLD_LOCAL_RANK=4", "OMPI_COMM_WORLD_LOCAL_RANK=4 is not below"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE=5", "LOCAL_SIZE=5 is more than OMPI_COMM_WORLD_SIZE=4"),
            ("OMPI_COMM_WORLD_SIZE=many", "OMPI_COMM_WORLD_SIZE=\"many\""),
            ("MASTER_PORT=0", "MASTER_PORT=0"),
        ] {
            let error = from(&format!("{OPEN_MPI}\n{change}")).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{change}: {error}");
            assert!(error.to_string().contains(text), "{change}: {error}");
        }
        // PMI without MPI_LOCALRANKID does not say which device is whose.
        let error = from("PMI_RANK=1\nPMI_SIZE=2").unwrap_err().to_string();
        assert!(error.contains("MPI_LOCALRANKID is not set"), "{error}");
        assert_eq!(from("PMI_RANK=0\nPMI_SIZE=1").unwrap().local_world_size, Some(1));
    }
}
