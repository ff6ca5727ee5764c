//! Real launchers: ranks join with the topologies of the environments that `srun`, `sbatch` and
//! `mpirun` set.
//!
//! Slurm needs root and Debian's slurm-wlm and munge; a cluster of two nodes, which are this
//! machine under two names, is started by `tests/testbed/slurm-up.sh`.

#![expect(clippy::print_stdout, reason = "a rank prints its topology")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use collective::{GroupOptions, ReduceOp, Topology, init::Accelerator, init_process_group};

/// Entry point of launched ranks: prints its topology and joins the others.
#[test]
#[ignore = "a rank for the tests below, nothing by itself"]
fn helper_rank() {
    if std::env::var_os("LAUNCHERS_TEST").is_none() {
        return;
    }
    let topology = match Topology::from_env(|name| std::env::var(name).ok()) {
        Ok(topology) => topology,
        Err(error) => {
            println!("REFUSED {error}");
            std::process::exit(3);
        }
    };
    let options = GroupOptions::default().with_timeout(Duration::from_secs(30));
    let group = init_process_group(&topology, options).unwrap();
    let mut sum = [topology.rank as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!(
        "RANK {}/{} local {}/{} node {} at {} sum {} cuda {}",
        topology.rank,
        topology.world_size,
        topology.local_rank.unwrap(),
        topology.local_world_size.unwrap(),
        topology.node_rank.map_or_else(|| "?".to_owned(), |node| node.to_string()),
        topology.master_addr,
        sum[0],
        topology.device(Accelerator::Cuda).unwrap(),
    );
}

/// The words of a command, with this test binary's rank in place of `RANK`.
fn words(line: &str) -> Vec<String> {
    let rank = std::env::current_exe().unwrap().display().to_string();
    let rank = [&rank[..], "--exact", "launchers::helper_rank", "--ignored", "--nocapture"];
    let word = |word| match word {
        "RANK" => rank.map(str::to_owned).to_vec(),
        other => vec![other.to_owned()],
    };
    line.split(' ').flat_map(word).collect()
}

/// Runs a command and returns the output of its ranks, sorted.
fn output(line: &str, envs: &[(&str, &str)]) -> Vec<String> {
    let words = words(line);
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).envs(envs.iter().copied()).env("LAUNCHERS_TEST", "1");
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"] {
        command.env_remove(name);
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    println!("{line}: {}\n{stdout}{stderr}", output.status);
    ranks_lines(&stdout)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The lines of ranks; the test harness may have written before them on the same line.
fn ranks_lines(text: &str) -> Vec<String> {
    let start = |line: &str| line.find("RANK ").or_else(|| line.find("REFUSED "));
    let lines = text.lines().filter_map(|line| Some(line[start(line)?..].to_owned()));
    let mut lines: Vec<_> = lines.collect();
    lines.sort();
    lines
}

/// A cluster for one test, removed on drop.
struct Cluster {
    dir: PathBuf,
}

impl Cluster {
    fn up() -> Self {
        let id = std::process::id();
        let dir = PathBuf::from(format!("/run/slurm-test-{id}"));
        // Three ports below the ephemeral range; other tests may have their own clusters.
        let port = (17_100 + id % 4000 * 3).to_string();
        let mut script = Command::new(testbed("slurm-up.sh"));
        script.args(["--nodes", "2", "--cpus", "4", "--gpus", "2", "--etc-hosts", "--dir"]);
        script.arg(&dir).args(["--base-port", &port]);
        let output = script.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        Self { dir }
    }

    fn output(&self, line: &str) -> Vec<String> {
        let conf = self.dir.join("slurm.conf");
        output(line, &[("SLURM_CONF", conf.to_str().unwrap())])
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(Command::new(testbed("slurm-down.sh")).arg("--dir").arg(&self.dir).status());
    }
}

fn testbed(script: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/testbed").join(script)
}

#[test]
#[ignore = "needs root, Slurm and munge"]
fn slurm_tasks_join() {
    let cluster = Cluster::up();
    let block = [
        "RANK 0/4 local 0/2 node 0 at n1 sum 6 cuda 0",
        "RANK 1/4 local 1/2 node 0 at n1 sum 6 cuda 1",
        "RANK 2/4 local 0/2 node 1 at n1 sum 6 cuda 0",
        "RANK 3/4 local 1/2 node 1 at n1 sum 6 cuda 1",
    ];
    let tasks = "srun --kill-on-bad-exit=1 --nodes=2 --ntasks=4 --ntasks-per-node=2";
    assert_eq!(cluster.output(&format!("{tasks} --gres=gpu:2 RANK")), block);
    // PMI's variables, which srun sets too, change nothing.
    assert_eq!(cluster.output(&format!("{tasks} --gres=gpu:2 --mpi=pmi2 RANK")), block);
    // Every task sees one device, as device 0.
    let own = cluster.output(&format!("{tasks} --gpus-per-task=1 RANK"));
    assert_eq!(own, block.map(|line| line.replace("cuda 1", "cuda 0")));
    let turns = cluster.output(&format!("{tasks} --gres=gpu:2 --distribution=cyclic RANK"));
    assert_eq!(
        turns,
        [
            "RANK 0/4 local 0/2 node 0 at n1 sum 6 cuda 0",
            "RANK 1/4 local 0/2 node 1 at n1 sum 6 cuda 0",
            "RANK 2/4 local 1/2 node 0 at n1 sum 6 cuda 1",
            "RANK 3/4 local 1/2 node 1 at n1 sum 6 cuda 1",
        ]
    );
    assert_eq!(
        cluster.output("srun --nodes=2 --ntasks=3 RANK"),
        [
            "RANK 0/3 local 0/2 node 0 at n1 sum 3 cuda 0",
            "RANK 1/3 local 1/2 node 0 at n1 sum 3 cuda 1",
            "RANK 2/3 local 0/1 node 1 at n1 sum 3 cuda 0",
        ]
    );
    // A step on the job's second node uses that node's address.
    assert_eq!(
        cluster.output(
            "salloc --nodes=2 --ntasks-per-node=2 srun --nodes=1 --ntasks=2 --nodelist=n2 RANK"
        ),
        [
            "RANK 0/2 local 0/2 node 0 at 127.0.0.1 sum 1 cuda 0",
            "RANK 1/2 local 1/2 node 0 at 127.0.0.1 sum 1 cuda 1",
        ]
    );

    // Without `srun`, joining is an error.
    let job = cluster.output("salloc --nodes=2 --ntasks-per-node=2 RANK");
    assert!(job.len() == 1 && job[0].contains("start it with srun"), "{job:?}");
    let out = cluster.dir.join("batch.out");
    let script = cluster.dir.join("batch.sh");
    std::fs::write(&script, format!("#!/bin/sh\nexec {}\n", words("RANK").join(" "))).unwrap();
    let (out_name, script) = (out.display(), script.display());
    cluster.output(&format!("sbatch --wait --output={out_name} --nodes=2 --ntasks=4 {script}"));
    let batch = ranks_lines(&std::fs::read_to_string(out).unwrap());
    assert!(batch.len() == 1 && batch[0].contains("start it with srun"), "{batch:?}");
}

#[test]
#[ignore = "needs Debian's openmpi-bin"]
fn open_mpi_ranks_join() {
    ranks_join_under("mpirun.openmpi --allow-run-as-root --oversubscribe -np 4 RANK");
}

#[test]
#[ignore = "needs Debian's mpich"]
fn mpich_ranks_join() {
    ranks_join_under("mpiexec.mpich -n 4 RANK");
}

fn ranks_join_under(mpi: &str) {
    let want = [0, 1, 2, 3]
        .map(|rank| format!("RANK {rank}/4 local {rank}/4 node ? at 127.0.0.1 sum 6 cuda {rank}"));
    assert_eq!(output(mpi, &[]), want);
}
