//! Four ranks, undisturbed for half of `$SOAK_SECONDS`; then the same iterations again, killed at
//! random and restarted by the launcher. Both end with the same bits, and no process grows.

use std::ffi::OsString;
use std::fs::{read_dir, read_to_string};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Pid, Signal, kill_process};

use super::{DEADLINE, Job, Running, children, find_rank, has_ended};

const RANKS: usize = 4;
/// Deadline of the killed run for each second of `$SOAK_SECONDS`: it repeats iterations after each
/// kill.
const LIMIT: Duration = Duration::from_secs(4);

/// The job's launcher, for at most `iters` iterations and `restarts`.
fn start(job: &Job, name: &str, iters: usize, restarts: &str) -> Running {
    let ranks = RANKS.to_string();
    let (iters, work_dir) = (format!("train_cfg.max_iters={iters}"), job.work_dir(name));
    let launch = ["launch", "--nproc-per-node", &ranks, "--max-restarts", restarts, "--", "train"];
    let train =
        [job.config.to_str().unwrap(), "--resume", "--work-dir", work_dir.to_str().unwrap()];
    let options = ["--cfg-options", &iters, "default_hooks.checkpoint.interval=500"];
    Running::start(&[&launch[..], &train, &options].concat())
}

/// Resident memory in KiB; 0 for a process that has ended.
fn memory(pid: Pid) -> u64 {
    let status = read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
    let status = status.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse().unwrap())
}

/// Resident memory over time of a launcher, and of the largest of its ranks.
#[derive(Default)]
struct Samples(Vec<(u64, [u64; 2])>);

impl Samples {
    fn take(&mut self, second: u64, launcher: Pid) {
        if self.0.last().is_some_and(|last| last.0 == second) {
            return;
        }
        let rank = (0..RANKS).filter_map(|rank| find_rank(launcher, rank)).map(memory).max();
        self.0.push((second, [memory(launcher), rank.unwrap_or(0)]));
    }

    /// Prints twelve samples, and compares the medians of the second and of the last quarter.
    #[expect(clippy::print_stdout, reason = "the figures are a result of this test")]
    fn check(&self, what: &str) {
        let samples = &self.0;
        for (second, [launcher, rank]) in samples.iter().step_by(samples.len().div_ceil(12)) {
            println!("{what}, after {second} s: launcher {launcher} KiB, largest rank {rank} KiB");
        }
        for process in [0, 1] {
            let median = |part: &[(u64, [u64; 2])]| {
                let mut sizes: Vec<_> = part.iter().map(|sample| sample.1[process]).collect();
                sizes.sort_unstable();
                sizes[sizes.len() / 2]
            };
            let quarter = samples.len() / 4;
            let (before, after) =
                (median(&samples[quarter..2 * quarter]), median(&samples[3 * quarter..]));
            assert!(
                before > 0 && after > 0,
                "{what}: no process was seen for a quarter of the time"
            );
            assert!(after < before + before / 8 + 1024, "{what}: {before} KiB grew to {after}");
        }
    }
}

fn shared_memory() -> Vec<OsString> {
    read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

#[test]
#[ignore = "takes about SOAK_SECONDS, by default 600; SEED sets another seed"]
fn nightly_soak_of_four_ranks_killed_at_random() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let (seconds, seed) = (number("SOAK_SECONDS").unwrap_or(600), number("SEED").unwrap_or(1));
    assert!(seconds >= 40, "SOAK_SECONDS is {seconds}, below 40");
    let (job, before) = (Job::new(), shared_memory());

    let (clock, mut samples) = (Instant::now(), Samples::default());
    let whole = start(&job, "whole", 100_000_000, "0");
    while clock.elapsed().as_secs() < seconds / 2 {
        std::thread::sleep(Duration::from_millis(500));
        samples.take(clock.elapsed().as_secs(), whole.pid());
    }
    kill_process(whole.pid(), Signal::TERM).unwrap();
    assert_eq!(whole.end().code(), Some(runner::signals::EXIT_CODE.into()));
    let last = read_to_string(job.work_dir("whole").join("last_checkpoint")).unwrap();
    let iters: usize = last.strip_prefix("iter_").unwrap().parse().unwrap();
    samples.check("undisturbed");

    let (clock, mut samples) = (Instant::now(), Samples::default());
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut ranks, mut launchers) = (0, 0);
    let mut killed = start(&job, "killed", iters, "1000000");
    let mut next = Instant::now();
    while killed.0.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(10));
        assert!(clock.elapsed() < LIMIT * seconds as u32, "seed {seed}: the killed run hangs");
        samples.take(clock.elapsed().as_secs(), killed.pid());
        if Instant::now() < next {
            continue;
        }
        next = Instant::now() + Duration::from_secs_f64(10.0 * rng.random::<f64>());
        // One kill in sixteen is of the launcher, whose processes must then end, too.
        if rng.random_range(0..16) > 0 {
            let victim = find_rank(killed.pid(), rng.random_range(0..RANKS));
            ranks += usize::from(victim.is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok()));
            continue;
        }
        // Stopped, it starts no rank that is not in the list.
        kill_process(killed.pid(), Signal::STOP).unwrap();
        let left = children(killed.pid());
        kill_process(killed.pid(), Signal::KILL).unwrap();
        drop(killed);
        let since = Instant::now();
        while !left.iter().all(|pid| has_ended(*pid)) {
            assert!(since.elapsed() < DEADLINE, "processes outlive their launcher");
            std::thread::sleep(Duration::from_millis(10));
        }
        launchers += 1;
        killed = start(&job, "killed", iters, "1000000");
    }
    assert!(killed.end().success());
    assert!(ranks > 0, "seed {seed}: no rank was killed");
    println!(
        "seed {seed}: {iters} iterations; {ranks} ranks and {launchers} launchers were killed"
    );
    samples.check("killed");
    job.assert_equal("whole", "killed", &last);
    let left: Vec<_> = shared_memory().into_iter().filter(|name| !before.contains(name)).collect();
    assert!(left.is_empty(), "left in /dev/shm: {left:?}");
}
