//! Ranks as processes: killed, stopped, and which backend `Auto` selects with devices.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::nccl::{Config, connector};
use collective::{GroupOptions, ProcessGroup, ReduceOp, Result, TcpStore, Transport};

use super::fake::{Fake, Memory, build};
use crate::common::{Role, Workers, spawn, wait_for};

/// Joins over the fake; the rank number is the device index.
fn join(role: &Role) -> ProcessGroup {
    let store = Arc::new(TcpStore::connect(&role.host, role.port, role.timeout).unwrap());
    let options = GroupOptions::default().with_timeout(role.timeout);
    let options = options.with_cuda_device(role.rank as u32);
    let connect = connector(Fake::get().libraries, Config::default());
    ProcessGroup::from_store_with(store, role.rank, role.world, options, connect).unwrap()
}

fn all_reduce(group: &ProcessGroup) -> Result<()> {
    let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1.0_f32; 1000]));
    let calls = group.device()?.all_reduce(memory.buf(), ReduceOp::Sum)?;
    let result = calls.enqueue(stream.raw())?.wait();
    if result.is_ok() {
        assert_eq!(memory.numbers(), vec![group.world_size() as f32; 1000]);
    }
    result
}

/// Runs a process rank.
pub(crate) fn worker() {
    let Some(role) = Role::from_env() else { return };
    if role.scenario == "auto" {
        return auto(&role);
    }
    let group = join(&role);
    for _ in 0..5 {
        all_reduce(&group).unwrap();
    }
    role.ready();
    let error = loop {
        if role.scenario == "stop" && role.rank == 1 {
            // The parent stops this process; it makes no further calls.
            std::thread::sleep(Duration::from_secs(3600));
        }
        if let Err(error) = all_reduce(&group) {
            break error;
        }
    };
    let aborts = Fake::get().calls("ncclCommAbort", role.rank as u32);
    role.report(&format!("{aborts} {error}"));
}

fn auto(role: &Role) {
    if role.transport == "private" {
        crate::fault::memory::keep_private();
    }
    let store = Arc::new(TcpStore::connect(&role.host, role.port, role.timeout).unwrap());
    let options = GroupOptions::default().with_timeout(role.timeout);
    let options = match role.transport.as_str() {
        "one" if role.rank == 1 => options,
        "host" => options.with_cuda_device(0).with_transport(Transport::Host),
        "nccl-one" if role.rank == 1 => options.with_transport(Transport::Nccl),
        "nccl" | "nccl-one" => {
            options.with_cuda_device(role.rank as u32).with_transport(Transport::Nccl)
        }
        _ => options.with_cuda_device(role.rank as u32),
    };
    let group = match ProcessGroup::from_store(store, role.rank, role.world, options) {
        Ok(group) => group,
        Err(error) => return role.report(&error.to_string()),
    };
    let device = group.device().map(|device| device.device_name());
    role.report(&format!("{} {device:?} {}", group.backend_name(), group.backend_reason()));
    group.barrier().unwrap();
}

#[test]
fn a_killed_rank_is_named_on_every_survivor() {
    for round in 0..5 {
        let timeout = Duration::from_secs(60);
        Fake::get();
        let mut workers = Workers::start("nccl::kill", 3, &[0, 1, 2], timeout);
        workers.all_ready(&[0, 1, 2]);
        std::thread::sleep(Duration::from_millis(7 * round));
        let pid = workers.children[1].id();
        workers.children[1].kill().unwrap();
        let start = Instant::now();
        for rank in [0, 2] {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.starts_with("1 "), "{report}");
            assert!(report.ends_with(&format!("rank 1 (pid {pid}) died")), "{report}");
            assert!(report.contains("group default"), "{report}");
            assert!(workers.wait(rank).success());
        }
        assert!(start.elapsed() < timeout / 2, "it took {:?}", start.elapsed());
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_timeout() {
    Fake::get();
    let workers = Workers::start("nccl::stop", 3, &[0, 1, 2], Duration::from_secs(2));
    workers.all_ready(&[0, 1, 2]);
    // SAFETY: a child of this process that has not been waited for.
    #[expect(unsafe_code, reason = "a signal")]
    let sent = unsafe { libc::kill(workers.children[1].id() as i32, libc::SIGSTOP) };
    assert_eq!(sent, 0);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.starts_with("1 ") && report.contains("timed out after"), "{report}");
        assert!(report.ends_with("still missing rank 1"), "{report}");
    }
}

/// Runs two ranks that join with `Auto` or a given transport and this NCCL; returns their reports.
fn auto_reports(how: &str, nccl: &str) -> Vec<String> {
    let store = collective::store::TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let dir = crate::common::Dir::new();
    let start = |rank| {
        let (path, port) = (dir.0.display(), store.port());
        let role = format!("nccl::auto {how} {rank} 2 60000 127.0.0.1 {port} {path}");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("COLLECTIVE_NCCL_LIB", nccl).env("TMPDIR", &dir.0);
        command.env("COLLECTIVE_CUDA_LIB", build("fake", &[]));
        spawn(command, &role)
    };
    let mut children: Vec<_> = (0..2).map(start).collect();
    let report = |rank| {
        let path = dir.0.join(format!("report-{rank}"));
        wait_for(|| std::fs::read_to_string(&path).ok(), "a report")
    };
    let reports = (0..2).map(report).collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    reports
}

#[test]
fn auto_selects_nccl_if_all_ranks_can_and_reports_why() {
    let fake = build("fake", &[]);
    let fake = fake.to_str().unwrap();
    for how in ["all", "nccl"] {
        let reason = match how {
            "all" => "all ranks have a CUDA device and NCCL",
            _ => "requested",
        };
        for (rank, report) in auto_reports(how, fake).iter().enumerate() {
            assert_eq!(*report, format!("nccl Ok(\"cuda:{rank}\") {reason}"));
        }
    }
    for report in auto_reports("one", fake) {
        let reason =
            "all ranks are on one machine; it is not NCCL because rank 1 gives no CUDA device";
        assert!(report.starts_with("host Err") && report.ends_with(reason), "{report}");
    }
    for report in auto_reports("host", fake) {
        assert!(report.starts_with("host Err") && report.ends_with("requested"), "{report}");
    }
    for report in auto_reports("all", "/nonexistent/libnccl.so.2") {
        assert!(report.starts_with("host Err"), "{report}");
        assert!(
            report.contains("rank 0 cannot use NCCL") && report.contains("/nonexistent"),
            "{report}"
        );
    }
    // Their host side does not share memory.
    for (rank, report) in auto_reports("private", fake).iter().enumerate() {
        assert_eq!(
            *report,
            format!("nccl Ok(\"cuda:{rank}\") all ranks have a CUDA device and NCCL")
        );
    }
    // No rank waits for one that cannot join.
    for report in auto_reports("nccl-one", fake) {
        assert!(report.contains("rank 1 gives no device: a group over NCCL needs"), "{report}");
    }
    // A requested backend is not replaced by another.
    for report in auto_reports("nccl", "/nonexistent/libnccl.so.2") {
        assert!(report.contains("/nonexistent") && report.contains("pip install"), "{report}");
    }
}
