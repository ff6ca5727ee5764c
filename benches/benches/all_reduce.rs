//! All-reduce between two processes, compared with copying memory.
//!
//! Sums of `f32`, 4 B to 16 MiB, in an ordinary and in a shared buffer, and a `memcpy` of the same
//! bytes in one process. Bytes per second count the buffer, so the ratio to `memcpy` is the result.
//! The program starts itself again as rank 1, which executes the requests of rank 0.

use std::hint::black_box;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use benches::memcpy_ceiling;
use collective::{
    GroupOptions, ProcessGroup, ReduceOp, Result, SharedBuf, TcpStore, store::TcpStoreServer,
};
use criterion::{BenchmarkId, Criterion, Throughput};

const SIZES: [usize; 6] = [4, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20];
const LARGEST: usize = SIZES[SIZES.len() - 1] / 4;
const PORT_VARIABLE: &str = "BENCH_ALL_REDUCE_PORT";
const TIMEOUT: Duration = Duration::from_secs(60);

/// A request of rank 0: which buffer, how many elements, how many calls.
type Request = [u64; 3];
const STOP: u64 = 0;
const PLAIN: u64 = 1;
const SHARED: u64 = 2;

struct Bench {
    group: ProcessGroup,
    plain: Vec<f32>,
    shared: SharedBuf<f32>,
}

impl Bench {
    fn join(rank: usize, port: u16) -> Result<Self> {
        let store = Arc::new(TcpStore::connect("127.0.0.1", port, TIMEOUT)?);
        let options = GroupOptions::default().with_timeout(TIMEOUT);
        let group = ProcessGroup::from_store(store, rank, 2, options)?;
        let shared = group.alloc(LARGEST)?;
        Ok(Self { group, plain: vec![0.0; LARGEST], shared })
    }

    fn execute(&mut self, [which, count, times]: Request) -> Result<Duration> {
        let buffer = if which == PLAIN { &mut self.plain[..] } else { &mut self.shared };
        let buffer = &mut buffer[..count as usize];
        self.group.barrier()?;
        let start = Instant::now();
        for _ in 0..times {
            self.group.all_reduce(black_box(&mut *buffer), ReduceOp::Sum)?;
        }
        Ok(start.elapsed())
    }

    /// Rank 0: broadcasts a request and executes it.
    fn lead(&mut self, request: Request) -> Duration {
        let sent = self.group.broadcast(&mut request.clone(), 0);
        sent.and_then(|()| self.execute(request)).expect("rank 1 takes part")
    }

    /// Rank 1: executes requests until `STOP`.
    fn follow(&mut self) -> Result<()> {
        loop {
            let mut request = Request::default();
            self.group.broadcast(&mut request, 0)?;
            if request[0] == STOP {
                return Ok(());
            }
            self.execute(request)?;
        }
    }
}

/// Rank 1's process, killed on drop.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn measure(criterion: &mut Criterion, bench: &mut Bench) {
    let mut group = criterion.benchmark_group("all_reduce");
    for bytes in SIZES {
        let count = (bytes / 4) as u64;
        group.throughput(Throughput::Bytes(bytes as u64));
        for (name, which) in [("plain", PLAIN), ("shared", SHARED)] {
            group.bench_function(BenchmarkId::new(name, bytes), |bencher| {
                bencher.iter_custom(|times| bench.lead([which, count, times]));
            });
        }
        memcpy_ceiling(&mut group, BenchmarkId::new("memcpy", bytes), bytes);
    }
    group.finish();
}

fn main() {
    if let Ok(port) = std::env::var(PORT_VARIABLE) {
        let port = port.parse().expect("rank 0 passes a number");
        let mut bench = Bench::join(1, port).expect("rank 0 is there");
        bench.follow().expect("rank 0 sends requests until `STOP`");
        return;
    }
    let local = "127.0.0.1:0".parse().expect("an address");
    let server = TcpStoreServer::bind(local).expect("a free port");
    let program = std::env::current_exe().expect("this program's path");
    let mut command = Command::new(program);
    let child = command.env(PORT_VARIABLE, server.port().to_string()).spawn();
    let mut peer = Peer(child.expect("this program starts again"));
    let mut bench = Bench::join(0, server.port()).expect("rank 1 is there");

    let mut criterion = Criterion::default().configure_from_args();
    measure(&mut criterion, &mut bench);
    bench.group.broadcast(&mut [STOP; 3], 0).expect("rank 1 follows");
    let status = peer.0.wait().expect("our own child");
    assert!(status.success(), "rank 1: {status}");
    criterion.final_summary();
}
