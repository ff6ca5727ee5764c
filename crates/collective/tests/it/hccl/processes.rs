//! Ranks as processes: killed, stopped, which backend `Auto` selects with NPUs, and which device a
//! rank uses.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use collective::hccl::{Config, connector};
use collective::{
    GroupOptions, ReduceOp, Result, TcpStore, Topology, Transport, init::Accelerator,
    init_process_group,
};

use super::fake::{Memory, Rank, Stream, libraries, play};
use crate::common::{Dir, Role, Workers, spawn, wait_for};

/// Joins in this process's simulator; the rank number is the device index.
fn join(role: &Role) -> Rank {
    let store = Arc::new(TcpStore::connect(&role.host, role.port, role.timeout).unwrap());
    let options = GroupOptions::default().with_timeout(role.timeout);
    let connect = connector(libraries(), Config::default());
    super::fake::join(store, (role.rank, role.world), options, connect).unwrap()
}

fn all_reduce(group: &collective::ProcessGroup, stream: &Stream) -> Result<()> {
    let mut memory = Memory::new(vec![1.0_f32; 1000]);
    let calls = group.device()?.all_reduce(memory.buf(), ReduceOp::Avg)?;
    let result = calls.enqueue(stream.raw())?.wait();
    match &result {
        Ok(()) => assert_eq!(memory.numbers(), vec![1.0; 1000]),
        Err(_) => stream.sync(),
    }
    result
}

/// Runs a process rank.
pub(crate) fn worker() {
    let Some(role) = Role::from_env() else { return };
    match &role.scenario[..] {
        "auto" => return auto(&role),
        "launched" => return launched(&role),
        "verbs" => {
            play(vec![join(&role)], |group, stream| {
                super::device::reductions::<i32>(&group, stream);
                super::device::moves::<f32>(&group, stream);
            });
            return;
        }
        _ => {}
    }
    play(vec![join(&role)], |group, stream| {
        for _ in 0..5 {
            all_reduce(&group, stream).unwrap();
        }
        role.ready();
        let error = loop {
            if role.scenario == "stop" && role.rank == 1 {
                // The parent stops this process; it makes no further calls.
                std::thread::sleep(Duration::from_secs(3600));
            }
            if let Err(error) = all_reduce(&group, stream) {
                break error;
            }
        };
        role.report(&error.to_string());
    });
}

/// Joins with the libraries that the environment names, and reports the backend and the device.
fn auto(role: &Role) {
    let store = Arc::new(TcpStore::connect(&role.host, role.port, role.timeout).unwrap());
    let options = GroupOptions::default().with_timeout(role.timeout);
    let index = role.rank as u32;
    let options = match role.transport.as_str() {
        "one" if role.rank == 1 => options,
        "host" => options.with_npu_device(index).with_transport(Transport::Host),
        "hccl" => options.with_npu_device(index).with_transport(Transport::Hccl),
        _ => options.with_npu_device(index),
    };
    let group = match collective::ProcessGroup::from_store(store, role.rank, role.world, options) {
        Ok(group) => group,
        Err(error) => return role.report(&error.to_string()),
    };
    let device = group.device().map(|device| device.device_name());
    role.report(&format!("{} {device:?} {}", group.backend_name(), group.backend_reason()));
    group.barrier().unwrap();
}

/// Joins as under a launcher: the topology, the device and the group come from the environment.
fn launched(role: &Role) {
    let topology = Topology::from_env(|name| std::env::var(name).ok()).unwrap();
    let device = topology.device(Accelerator::Npu).unwrap() as u32;
    let options = GroupOptions::default().with_timeout(role.timeout).with_npu_device(device);
    let group = init_process_group(&topology, options).unwrap();
    let name = group.device().unwrap().device_name();
    let (backend, rank) = (group.backend_name(), group.rank());
    role.report(&format!("{backend} rank {rank} {name}"));
    group.barrier().unwrap();
}

#[test]
fn verbs_match_the_host_across_processes() {
    let ranks = [0, 1, 2];
    Workers::start("hccl::verbs", 3, &ranks, Duration::from_secs(120)).finish();
}

#[test]
fn a_killed_rank_is_named_on_every_survivor() {
    for round in 0..3 {
        let timeout = Duration::from_secs(60);
        let mut workers = Workers::start("hccl::kill", 3, &[0, 1, 2], timeout);
        workers.all_ready(&[0, 1, 2]);
        std::thread::sleep(Duration::from_millis(7 * round));
        let pid = workers.children[1].id();
        workers.children[1].kill().unwrap();
        let start = Instant::now();
        for rank in [0, 2] {
            let report = workers.file(&format!("report-{rank}"));
            assert!(report.ends_with(&format!("rank 1 (pid {pid}) died")), "{report}");
            assert!(report.contains("group default"), "{report}");
            assert!(workers.wait(rank).success());
        }
        assert!(start.elapsed() < timeout / 2, "it took {:?}", start.elapsed());
    }
}

#[test]
fn a_stopped_rank_is_named_at_the_timeout() {
    let workers = Workers::start("hccl::stop", 3, &[0, 1, 2], Duration::from_secs(2));
    workers.all_ready(&[0, 1, 2]);
    // SAFETY: a child of this process that has not been waited for.
    #[expect(unsafe_code, reason = "a signal")]
    let sent = unsafe { libc::kill(workers.children[1].id() as i32, libc::SIGSTOP) };
    assert_eq!(sent, 0);
    for rank in [0, 2] {
        let report = workers.file(&format!("report-{rank}"));
        assert!(report.contains("timed out after"), "{report}");
        assert!(report.ends_with("still missing rank 1"), "{report}");
    }
}

/// A directory with the layout of a CANN toolkit, in which every library is the simulator.
fn home(without: &str) -> Dir {
    let dir = Dir::new();
    let folder = dir.0.join("lib64");
    std::fs::create_dir(&folder).unwrap();
    let simulator: PathBuf = std::env::current_exe().unwrap().with_file_name("libnpu_sim.so");
    let names = ["libascendcl.so", "libnnopbase.so", "libopapi.so", "libhccl.so"];
    for name in names.iter().filter(|name| **name != without) {
        symlink(&simulator, folder.join(name)).unwrap();
    }
    dir
}

/// Runs two ranks with the CANN toolkit `home` and their own environments; returns their reports.
fn reports(
    scenario: &str,
    how: &str,
    home: &Dir,
    vars: &dyn Fn(usize) -> Vec<(String, String)>,
) -> Vec<String> {
    let store = collective::store::TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let dir = Dir::new();
    let start = |rank| {
        let (path, port) = (dir.0.display(), store.port());
        let role = format!("hccl::{scenario} {how} {rank} 2 60000 127.0.0.1 {port} {path}");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("ASCEND_HOME_PATH", &home.0).env("TMPDIR", &dir.0);
        command.env_remove("ASCEND_RT_VISIBLE_DEVICES").envs(vars(rank));
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
fn auto_selects_hccl_if_all_ranks_can_and_reports_why() {
    let none = |_| Vec::new();
    let cann = home("");
    for how in ["all", "hccl"] {
        let reason = match how {
            "all" => "all ranks have an NPU and HCCL",
            _ => "requested",
        };
        for (rank, report) in reports("auto", how, &cann, &none).iter().enumerate() {
            assert_eq!(*report, format!("hccl Ok(\"npu:{rank}\") {reason}"));
        }
    }
    for report in reports("auto", "one", &cann, &none) {
        let reason = "all ranks are on one machine; it is not HCCL because rank 1 gives no NPU";
        assert!(report.starts_with("host Err") && report.ends_with(reason), "{report}");
    }
    for report in reports("auto", "host", &cann, &none) {
        assert!(report.starts_with("host Err") && report.ends_with("requested"), "{report}");
    }
    let without = home("libhccl.so");
    for report in reports("auto", "all", &without, &none) {
        assert!(report.starts_with("host Err"), "{report}");
        assert!(
            report.contains("rank 0 cannot use HCCL") && report.contains("libhccl.so"),
            "{report}"
        );
    }
    // A requested backend is not replaced by another.
    for report in reports("auto", "hccl", &without, &none) {
        assert!(report.contains("libhccl.so") && report.contains("CANN toolkit"), "{report}");
    }
}

/// With the variables of a launcher that makes all devices, one device or some devices visible to
/// each rank.
#[test]
fn launched_ranks_use_their_local_or_only_visible_device() {
    let cann = home("");
    for (shown, devices) in
        [(None, [0, 1]), (Some(["3", "5"]), [0, 0]), (Some(["2,4", "2,4"]), [0, 1])]
    {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let vars = |rank: usize| {
            let number = rank.to_string();
            let mut vars = vec![
                ("RANK", number.clone()),
                ("LOCAL_RANK", number),
                ("WORLD_SIZE", "2".into()),
                ("LOCAL_WORLD_SIZE", "2".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
                ("MASTER_PORT", port.to_string()),
            ];
            vars.extend(shown.map(|shown| ("ASCEND_RT_VISIBLE_DEVICES", shown[rank].into())));
            vars.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
        };
        let reports = reports("launched", "auto", &cann, &vars);
        for (rank, report) in reports.iter().enumerate() {
            assert_eq!(*report, format!("hccl rank {rank} npu:{}", devices[rank]), "{shown:?}");
        }
    }
}
