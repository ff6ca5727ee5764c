//! Limits the threads of candle's own operators if several ranks share a node.
//!
//! candle runs large operators on one thread per core: on rayon's threads, and on a pool whose
//! threads spin for up to a millisecond after each operator. `RAYON_NUM_THREADS` sizes both,
//! `CANDLE_NUM_THREADS` takes precedence for the pool. `launch` sets `RAYON_NUM_THREADS` to 1 for
//! several ranks on a node. Other launchers do not, and the threads of each rank would occupy the
//! cores of the others, so a rank sets it itself.

#![expect(unsafe_code, reason = "a process changes its own environment")]

use collective::Topology;

/// Sets `RAYON_NUM_THREADS` to 1 in a rank that shares its node with others, unless it is set. Does
/// nothing once this process has a second thread, or on systems other than Linux, where the number
/// of threads is unknown.
pub fn limit_threads() {
    if is_single_threaded() {
        // SAFETY: this is the only thread.
        unsafe { limit() };
    }
}

/// # Safety
///
/// No other thread reads or writes the environment meanwhile.
unsafe fn limit() {
    if is_shared(|name| std::env::var(name).ok()) {
        // SAFETY: no other thread reads or writes the environment, as the caller ensures.
        unsafe { std::env::set_var(THREADS, "1") };
    }
}

/// Whether other ranks are on this node, and the number of threads is not set.
fn is_shared(lookup: impl Fn(&str) -> Option<String>) -> bool {
    let of_node = || Topology::from_env(&lookup).ok()?.local_world_size;
    lookup(THREADS).is_none() && of_node().is_some_and(|ranks| ranks > 1)
}

fn is_single_threaded() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

const THREADS: &str = "RAYON_NUM_THREADS";

#[cfg(test)]
mod tests {
    use std::process::Command;

    use candle_core::{DType, Device, Tensor};

    use super::*;

    const TORCHRUN: [(&str, &str); 6] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn only_ranks_that_share_a_node_are_limited() {
        let shared = |set: &[(&str, &str)]| {
            let find = |name: &str| Some(set.iter().find(|(of, _)| *of == name)?.1.to_owned());
            is_shared(find)
        };
        assert!(shared(&TORCHRUN));
        assert!(!shared(&[&TORCHRUN[..], &[(THREADS, "8")]].concat()));
        assert!(!shared(&[]));
        let alone = TORCHRUN.map(|(name, value)| match name {
            "LOCAL_WORLD_SIZE" => (name, "1"),
            "LOCAL_RANK" => (name, "0"),
            _ => (name, value),
        });
        assert!(!shared(&alone));
    }

    /// Starts this test as a rank, which prints the number of threads of candle's pool.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_rank_of_any_launcher_has_no_pool_threads_unless_asked_for() {
        const RANK: &str = "A_RANK_PRINTS_ITS_POOL_THREADS";
        if std::env::var_os(RANK).is_some() {
            // SAFETY: there is only the harness' thread besides, which waits for this test.
            unsafe { limit() };
            let x = Tensor::ones(1 << 20, DType::F32, &Device::Cpu).unwrap();
            let _sum = (&x + &x).unwrap();
            let name = |task: std::io::Result<std::fs::DirEntry>| {
                std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap()
            };
            let names = std::fs::read_dir("/proc/self/task").unwrap().map(name);
            println!("pool: {}.", names.filter(|name| name.starts_with("candle-bp")).count());
            return;
        }
        let pool = |set: &[(&str, &str)]| {
            let mut rank = Command::new(std::env::current_exe().unwrap());
            let name = "process::threads::tests::a_rank_of_any_launcher_has_no_pool_threads_unless_asked_for";
            rank.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(RANK, "1");
            rank.env_remove(THREADS).env_remove("CANDLE_NUM_THREADS").envs(TORCHRUN);
            let output = rank.envs(set.iter().copied()).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let rest = text.split_once("pool: ").unwrap_or_else(|| panic!("{text}")).1;
            rest.split_once('.').unwrap().0.parse::<usize>().unwrap()
        };
        assert_eq!(pool(&[]), 0);
        assert_eq!(pool(&[(THREADS, "3")]), 2);
        assert_eq!(pool(&[("CANDLE_NUM_THREADS", "4")]), 3);
    }
}
