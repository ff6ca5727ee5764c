//! The variables of `mpirun` and `mpiexec`: Open MPI's, and PMI's (MPICH and derivatives).
//!
//! Neither gives the host of rank 0. If all ranks are on one host it is not needed; otherwise
//! `MASTER_ADDR` must be set. Without `MASTER_PORT` the port is derived from the job's name if MPI
//! sets one, so that two jobs on one host use different ports; otherwise it is PyTorch's 29500.

use super::reader::{Reader, check_at_most, check_below, invalid, port_from_seed};
use super::topology::Topology;
use crate::Result;

/// Variables that only `mpirun` sets, even inside another launcher.
pub(super) const MARKERS: [&str; 4] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
];
/// Variables that `srun --mpi=pmi2` also sets.
pub(super) const PMI_MARKERS: [&str; 2] = ["PMI_RANK", "PMI_SIZE"];

/// Names of one MPI implementation's variables.
struct Names {
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// The launcher's flags that pass a variable to the ranks.
    forward_flags: &'static str,
}

const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    size: "OMPI_COMM_WORLD_SIZE",
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    forward_flags: "mpirun -x MASTER_ADDR=... -x MASTER_PORT=...",
};
const PMI: Names = Names {
    rank: "PMI_RANK",
    size: "PMI_SIZE",
    local_rank: "MPI_LOCALRANKID",
    local_size: "MPI_LOCALNRANKS",
    forward_flags: "mpiexec -genv MASTER_ADDR ... -genv MASTER_PORT ...",
};

pub(super) fn read(reader: &mut Reader<'_>, topology: &mut Topology) -> Result<()> {
    reader.hint = "though the launcher is MPI; start the ranks with mpirun, or with srun and the \
                   launcher slurm";
    let names = match reader.first(&MARKERS[..3]) {
        Some(_) => OPEN_MPI,
        None => PMI,
    };
    let world_size = reader.value("world_size", &[names.size], None)?;
    let rank = reader.value("rank", &[names.rank], None)?;
    let one = |value| (world_size == 1).then_some((value, "the only rank"));
    let local_rank = reader.value("local_rank", &[names.local_rank], one(0))?;
    let local_world_size = reader.value("local_world_size", &[names.local_size], one(1))?;
    check_below((names.rank, rank), (names.size, world_size))?;
    check_below((names.local_rank, local_rank), (names.local_size, local_world_size))?;
    check_at_most((names.local_size, local_world_size), (names.size, world_size))?;

    let all_here = local_world_size == world_size;
    let here = ("127.0.0.1".to_owned(), "all ranks are on this host");
    if !all_here && reader.first(&["MASTER_ADDR"]).is_none() {
        return Err(invalid(format!(
            "MASTER_ADDR is not set, and {local_world_size} of {world_size} ranks are on this host \
             ({}): MPI does not give the host of rank 0; start the job with {}",
            names.local_size, names.forward_flags
        )));
    }
    topology.master_addr =
        reader.value("master_addr", &["MASTER_ADDR"], all_here.then_some(here))?;
    let job = reader.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"]);
    let own =
        |(_, name): &(_, String)| (port_from_seed(fnv1a(name.as_bytes())), "from the job's name");
    let default = (29_500, "PyTorch's default");
    let port = job.as_ref().map_or(default, own);
    topology.master_port = reader.master_port(world_size, Some(port))?;
    let origin;
    (topology.run_id, origin) = match job {
        Some((name, text)) => (format!("mpi-{text}"), name),
        None => ("mpi".to_owned(), "MPI gives the job no name"),
    };
    reader.note("run_id", &topology.run_id, origin);
    reader.note("restart_count", &0, "MPI restarts nothing");
    reader.note("agent_store", &false, "rank 0 hosts the store");
    (topology.rank, topology.world_size) = (rank, world_size);
    (topology.local_rank, topology.local_world_size) = (Some(local_rank), Some(local_world_size));
    Ok(())
}

/// The hash FNV-1a: the same on every rank, unlike std's randomly keyed hashers.
fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MPICH, OPEN_MPI, from};
    use crate::Error;

    #[test]
    fn recorded_jobs_on_one_host_need_no_master_addr() {
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
    fn several_hosts_need_master_addr() {
        for (text, change, forward_flags) in [
            (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1", "mpirun -x"),
            (MPICH, "MPI_LOCALNRANKS=2\nMPI_LOCALRANKID=1", "mpiexec -genv"),
        ] {
            let error = from(&format!("{text}\n{change}")).unwrap_err().to_string();
            assert!(error.contains("MASTER_ADDR is not set, and 2 of 4 ranks"), "{error}");
            assert!(error.contains(forward_flags), "{error}");
            let named = from(&format!("{text}\n{change}\nMASTER_ADDR=n1\nMASTER_PORT=7")).unwrap();
            assert_eq!(named.master(), "n1:7");
        }
    }

    #[test]
    fn contradictions_are_errors_that_name_the_variable() {
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
        // Without MPI_LOCALRANKID, PMI gives no local rank, so no device can be chosen.
        let error = from("PMI_RANK=1\nPMI_SIZE=2").unwrap_err().to_string();
        assert!(error.contains("MPI_LOCALRANKID is not set"), "{error}");
        assert_eq!(from("PMI_RANK=0\nPMI_SIZE=1").unwrap().local_world_size, Some(1));
    }
}
