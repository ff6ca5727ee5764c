//! Ranks for the tests: as threads, and as processes that run this test binary again.
//!
//! A process rank runs the test `worker` of the crate's root, which does nothing in an ordinary run
//! and calls the worker of the module that the role names. The ranks join through a store that the
//! parent serves, and report through a directory that it removes. Children are killed when their
//! handle is dropped, so none outlives a failed test.

pub(crate) mod collector;
pub(crate) mod refuse;

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use collective::{
    Determinism, GroupOptions, MemoryStore, Message, ProcessGroup, Rank, ReduceOp, Result,
    SharedBuf, Store as _, TcpStore, Transport, store::TcpStoreServer,
};

/// Longest time of anything in these tests, on a loaded machine and under a sanitizer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(240);

/// Time that counts as "at once", on a loaded machine and under a sanitizer; well below the
/// timeouts.
pub(crate) const SOON: Duration = Duration::from_secs(15);

/// Calls `rank` on every rank, as threads of this process, and returns the results.
pub(crate) fn threads<T: Send>(
    world: usize,
    timeout: Duration,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    play(ProcessGroup::threads(world, timeout).unwrap(), rank)
}

/// A group over a transport, see [`options`], whose ranks are in this process, each joined on its
/// own thread.
pub(crate) fn over(transport: &str, world: usize, timeout: Duration) -> Vec<ProcessGroup> {
    joined(world, |rank| options(transport, rank, timeout))
}

/// A rank's options for a transport. With `machines`, ranks alternate between two machines, and
/// those of one share memory; with `pairs`, two neighbours share a machine; with `namespaces`, a
/// machine is a network namespace.
pub(crate) fn options(transport: &str, rank: Rank, timeout: Duration) -> GroupOptions {
    let options = GroupOptions::default().with_timeout(timeout);
    match transport {
        "auto" => options,
        "host" => options.with_transport(Transport::Host),
        "tcp" => options.with_transport(Transport::Tcp),
        "machines" => {
            options.with_transport(Transport::Host).with_host_id(["even", "odd"][rank % 2])
        }
        "pairs" => {
            options.with_transport(Transport::Host).with_host_id(format!("pair {}", rank / 2))
        }
        "namespaces" => {
            let namespace = fs::read_link("/proc/self/ns/net").unwrap();
            options.with_transport(Transport::Host).with_host_id(namespace.display().to_string())
        }
        "gloo" => options.with_transport(Transport::Gloo),
        "gloo-fast" => options.with_transport(Transport::Gloo).with_determinism(Determinism::Fast),
        other => panic!("no transport {other}"),
    }
}

/// Checks that the store has as many keys after `body`, which all ranks run, as before.
pub(crate) fn leaves_no_keys(group: &ProcessGroup, store: &MemoryStore, body: impl FnOnce()) {
    let keys = || {
        group.barrier().unwrap();
        let keys = store.num_keys().unwrap();
        group.barrier().unwrap();
        keys
    };
    let before = keys();
    body();
    assert_eq!(keys(), before);
}

/// Joins all ranks in this process through a store.
pub(crate) fn joined(world: usize, options: impl Fn(Rank) -> GroupOptions) -> Vec<ProcessGroup> {
    let store = MemoryStore::new();
    std::thread::scope(|scope| {
        let join = |rank| {
            let (store, options) = (Arc::new(store.clone()), options(rank));
            scope.spawn(move || ProcessGroup::from_store(store, rank, world, options).unwrap())
        };
        let ranks: Vec<_> = (0..world).map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Calls `rank` with every group, each on its own thread, and returns the results.
pub(crate) fn play<T: Send>(
    groups: Vec<ProcessGroup>,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let mut returned: Vec<_> = groups.iter().map(|_| None).collect();
    let rank = &rank;
    let mut calls: Vec<Box<dyn FnOnce() + Send + '_>> = Vec::new();
    for (group, returned) in groups.into_iter().zip(&mut returned) {
        calls.push(Box::new(move || *returned = Some(rank(group))));
    }
    together(calls);
    returned.into_iter().map(Option::unwrap).collect()
}

/// Makes all calls at once, each on its own thread. Not generic, so that it is compiled once.
fn together(calls: Vec<Box<dyn FnOnce() + Send + '_>>) {
    std::thread::scope(|scope| {
        let threads: Vec<_> = calls.into_iter().map(|call| scope.spawn(call)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A directory for one test, removed on drop.
#[derive(Debug)]
pub(crate) struct Dir(pub(crate) PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("collective-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The task of a worker process.
#[derive(Debug)]
pub(crate) struct Role {
    pub(crate) scenario: String,
    /// A name that [`options`] accepts.
    pub(crate) transport: String,
    pub(crate) rank: Rank,
    pub(crate) world: usize,
    pub(crate) timeout: Duration,
    /// Port of the store.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) dir: PathBuf,
}

impl Role {
    /// This process's role; `None` in an ordinary test run.
    pub(crate) fn from_env() -> Option<Self> {
        let text = std::env::var("COLLECTIVE_TEST_ROLE").ok()?;
        let (_, text) = text.split_once("::").unwrap();
        let mut parts = text.splitn(8, ' ');
        let mut next = || parts.next().unwrap();
        Some(Self {
            scenario: next().to_owned(),
            transport: next().to_owned(),
            rank: next().parse().unwrap(),
            world: next().parse().unwrap(),
            timeout: Duration::from_millis(next().parse().unwrap()),
            host: next().to_owned(),
            port: next().parse().unwrap(),
            dir: next().into(),
        })
    }

    pub(crate) fn join(&self) -> Result<ProcessGroup> {
        let store = Arc::new(TcpStore::connect(&self.host, self.port, self.timeout)?);
        let options = options(&self.transport, self.rank, self.timeout);
        ProcessGroup::from_store(store, self.rank, self.world, options)
    }

    /// Writes a result for the parent.
    pub(crate) fn report(&self, text: &str) {
        self.write(&format!("report-{}", self.rank), text);
    }

    /// Tells the parent that this rank is ready.
    pub(crate) fn ready(&self) {
        self.write(&format!("ready-{}", self.rank), "");
    }

    /// Creates a file atomically.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.dir.join(name);
        fs::write(path.with_extension("new"), text).unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    }
}

/// Starts a worker; `command` runs this program. A role begins with a module of these tests, `::`,
/// and one of its scenarios.
pub(crate) fn spawn(mut command: Command, role: &str) -> Child {
    command.args(["--exact", "worker", "--nocapture", "--test-threads=1"]);
    command.env("COLLECTIVE_TEST_ROLE", role);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Rank processes; killed on drop.
#[derive(Debug)]
pub(crate) struct Workers {
    pub(crate) children: Vec<Child>,
    pub(crate) dir: Dir,
    /// The store through which they join.
    _store: TcpStoreServer,
}

impl Workers {
    /// Starts the given ranks. `scenario` is as in [`spawn`].
    pub(crate) fn start(scenario: &str, world: usize, ranks: &[Rank], timeout: Duration) -> Self {
        Self::start_over("auto", scenario, world, ranks, timeout)
    }

    /// Starts the given ranks over a transport.
    pub(crate) fn start_over(
        transport: &str,
        scenario: &str,
        world: usize,
        ranks: &[Rank],
        timeout: Duration,
    ) -> Self {
        let store = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let (dir, port) = (Dir::new(), store.port());
        let start = |rank: &Rank| {
            let (path, timeout) = (dir.0.display(), timeout.as_millis());
            let role =
                format!("{scenario} {transport} {rank} {world} {timeout} 127.0.0.1 {port} {path}");
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.env("COLLECTIVE_FLIGHT_DIR", dir.0.join("flight"));
            // The test finds files here that a rank leaves in its temporary directory.
            command.env("TMPDIR", &dir.0);
            spawn(command, &role)
        };
        Self { children: ranks.iter().map(start).collect(), dir, _store: store }
    }

    /// Waits until a file appears in the directory, and returns its contents.
    pub(crate) fn file(&self, name: &str) -> String {
        wait_for(|| fs::read_to_string(self.dir.0.join(name)).ok(), name)
    }

    /// Waits until these ranks are [`ready`](Role::ready).
    pub(crate) fn all_ready(&self, ranks: &[Rank]) {
        for rank in ranks {
            self.file(&format!("ready-{rank}"));
        }
    }

    pub(crate) fn wait(&mut self, index: usize) -> ExitStatus {
        let child = &mut self.children[index];
        wait_for(|| child.try_wait().unwrap(), "a rank to end")
    }

    /// Waits until all ranks have ended successfully.
    pub(crate) fn finish(mut self) {
        for index in 0..self.children.len() {
            let status = self.wait(index);
            let text = self.stderr(index);
            assert!(status.success(), "worker {index}: {status}\n{text}");
        }
    }

    /// Fails the test if this rank has ended.
    pub(crate) fn check_runs(&mut self, rank: Rank) {
        if let Some(status) = self.children[rank].try_wait().unwrap() {
            let report = fs::read_to_string(self.dir.0.join(format!("report-{rank}")));
            panic!("rank {rank}: {status}, report {report:?}\n{}", self.stderr(rank));
        }
    }

    /// The standard error of a rank that has ended.
    fn stderr(&mut self, index: usize) -> String {
        let mut text = String::new();
        self.children[index].stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs random operations on up to `count` elements until the group fails.
pub(crate) fn work_until_failure(
    group: &ProcessGroup,
    count: usize,
    ready: impl Fn(),
) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let mut shared: SharedBuf<f32> = group.alloc(100_000)?;
    let (mut small, mut large) = (vec![1_i32; 10], vec![1.0_f32; count]);
    for round in 0.. {
        group.all_reduce(&mut small, ReduceOp::Max)?;
        group.all_reduce(&mut large, ReduceOp::Avg)?;
        shared = group.all_reduce_async(shared, ReduceOp::Avg)?.wait()?;
        group.reduce(&mut large, ReduceOp::Avg, round % world)?;
        group.broadcast(&mut large, round % world)?;
        let mut into = [0_u8; 9];
        group.batch_isend_irecv(vec![
            Message::send(&[1_u8; 9], (rank + 1) % world),
            Message::recv(&mut into, (rank + world - 1) % world),
        ])?;
        group.barrier()?;
        if round == 0 {
            ready();
        }
    }
    Ok(())
}

/// Polls until there is a result.
pub(crate) fn wait_for<T>(mut poll: impl FnMut() -> Option<T>, what: &str) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = poll() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Random numbers, the same on every rank with the same seed.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    /// One of `0..end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 16) as usize % end
    }
}
