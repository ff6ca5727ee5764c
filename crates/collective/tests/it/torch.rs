//! The store with a live PyTorch: its clients with our server, our client with its servers, and a
//! whole `torch.distributed` job that joins through our server.
//!
//! The environment variable `TORCH_PYTHON` names a Python interpreter that can import torch;
//! without it, it is `python3`.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use collective::{Store, TcpStore, store::TcpStoreServer};

/// On a busy machine the import of torch alone takes most of a minute.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Python programs; killed on drop.
struct Programs(Vec<Child>);

impl Drop for Programs {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails if it has ended.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Starts a program for each list of arguments.
fn start(program: &str, arguments: &[Vec<String>]) -> Programs {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let start = |arguments: &Vec<String>| {
        Command::new(&python).args(["-c", program]).args(arguments).spawn().unwrap()
    };
    Programs(arguments.iter().map(start).collect())
}

impl Programs {
    /// Waits until all have ended successfully.
    fn finish(mut self) {
        let end = Instant::now() + TIMEOUT;
        for child in &mut self.0 {
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(Instant::now() < end, "timed out waiting for a Python program to end");
                sleep(Duration::from_millis(5));
            };
            assert!(status.success(), "{status}");
        }
    }
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn pytorch_client_and_our_client_share_our_server() {
    let program = r#"
import sys, datetime, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False,
                      timeout=datetime.timedelta(seconds=30))
store.set("from torch", b"\x00\xffbytes")
assert store.get("from rust") == b"hello", store.get("from rust")
assert store.add("count", 5) == 12
assert store.check(["count"]) and not store.check(["count", "nothing"])
assert store.compare_set("swap", "old", "new") == b"new"
store.append("log", "a"); store.append("log", "b")
assert store.get("log") == b"ab"
store.multi_set(["one", "two"], ["1", "2"])
assert store.multi_get(["two", "one"]) == [b"2", b"1"]
assert store.delete_key("two") and not store.delete_key("two")
store.queue_push("to rust", "first"); store.queue_push("to rust", "second")
assert store.queue_pop("to torch") == b"third", "a queue"
assert store.queue_len("to torch") == 0
assert "one" in store.list_keys() and "two" not in store.list_keys()
try:
    store.wait(["nothing"], datetime.timedelta(milliseconds=100))
    raise SystemExit("it should have timed out")
except dist.DistStoreError:
    pass
store.wait(["the end"], datetime.timedelta(seconds=30))
"#;
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let ours = TcpStore::connect("127.0.0.1", server.port(), TIMEOUT).unwrap();
    ours.set("swap", b"old").unwrap();
    ours.add("count", 7).unwrap();
    let theirs = start(program, &[vec![server.port().to_string()]]);
    assert_eq!(ours.get("from torch", TIMEOUT).unwrap(), b"\x00\xffbytes");
    ours.set("from rust", b"hello").unwrap();
    ours.wait(&["one"], TIMEOUT).unwrap();
    assert_eq!(ours.queue_pop("to rust", TIMEOUT).unwrap(), b"first");
    assert_eq!(ours.queue_pop("to rust", TIMEOUT).unwrap(), b"second");
    ours.queue_push("to torch", b"third").unwrap();
    assert_eq!(ours.get("swap", TIMEOUT).unwrap(), b"new");
    assert_eq!(ours.add("count", 0).unwrap(), 12);
    ours.set("the end", b"").unwrap();
    theirs.finish();
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn our_client_works_with_both_pytorch_servers() {
    let program = r#"
import sys, datetime, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False,
                      use_libuv=sys.argv[2] == "libuv", timeout=datetime.timedelta(seconds=30))
store.set("from torch", "hello")
assert store.get("from rust") == b"\x00\xff"
assert store.add("count", 1) == 8
store.set("counted", "")
store.wait(["the end"], datetime.timedelta(seconds=30))
store.delete_key("the end")
store.wait(["gone"], datetime.timedelta(seconds=30))
"#;
    for backend in ["libuv", "legacy"] {
        // The system chose this port, so it was free a moment ago.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let arguments = vec![port.to_string(), backend.into()];
        let theirs = start(program, &[arguments]);
        let ours = TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap();
        assert_eq!(ours.get("from torch", TIMEOUT).unwrap(), b"hello");
        assert_eq!(ours.add("count", 7).unwrap(), 7);
        ours.set("from rust", b"\x00\xff").unwrap();
        ours.wait(&["counted"], TIMEOUT).unwrap();
        assert_eq!(ours.add("count", 0).unwrap(), 8);
        assert!(ours.check(&["count"]).unwrap() && !ours.check(&["nothing"]).unwrap());
        assert_eq!(ours.compare_set("count", b"8", b"9").unwrap(), b"9");
        assert!(ours.wait(&["nothing"], Duration::from_millis(100)).is_err());
        assert!(ours.num_keys().unwrap() >= 4);
        ours.append("log", b"a").unwrap();
        ours.multi_set(&[("log2", b"b"), ("empty", b"")]).unwrap();
        let several = ours.multi_get(&["log2", "log", "empty"], TIMEOUT).unwrap();
        assert_eq!(several, [&b"b"[..], b"a", b""]);
        if backend == "libuv" {
            ours.queue_push("q", b"x").unwrap();
            assert_eq!(ours.queue_len("q").unwrap(), 1);
            assert_eq!(ours.queue_pop("q", TIMEOUT).unwrap(), b"x");
            assert!(ours.queue_pop("q", Duration::from_millis(50)).is_err());
        }
        assert!(ours.list_keys().unwrap().contains(&"log2".to_owned()));
        ours.set("the end", b"").unwrap();
        let start = Instant::now();
        while ours.check(&["the end"]).unwrap() {
            assert!(start.elapsed() < TIMEOUT);
        }
        ours.set("gone", b"").unwrap();
        theirs.finish();
    }
}

/// The ranks get only the address of our server; `torch.distributed` with gloo joins through the
/// store and reduces.
#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn a_torch_distributed_job_joins_through_our_server() {
    let program = r#"
import sys, datetime, torch, torch.distributed as dist
port, rank, world = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, world, is_master=False,
                      timeout=datetime.timedelta(seconds=50))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
x = torch.full((1000,), float(rank + 1))
dist.all_reduce(x)
assert x.eq(6).all(), x
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
assert [o["rank"] for o in objects] == list(range(world))
dist.barrier()
dist.destroy_process_group()
"#;
    let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let rank = |rank: i32| vec![server.port().to_string(), rank.to_string(), "3".into()];
    let ranks: Vec<_> = (0..3).map(rank).collect();
    start(program, &ranks).finish();
}
