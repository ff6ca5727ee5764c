//! All stores behave alike; the TCP store also with late servers, slow readers, other protocols,
//! and an answer to a wait that crosses its cancel.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use collective::store::exchange;
use collective::store::tcp::codec::{MAGIC, Request};
use collective::store::tcp::state::Presence;
use collective::{
    Error, MemoryStore, Store, TcpStore,
    store::{PrefixStore, TcpStoreServer},
};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(50);

fn server() -> TcpStoreServer {
    TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap()
}

fn client(server: &TcpStoreServer) -> TcpStore {
    TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap()
}

fn behaves(store: &Arc<dyn Store>) {
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
    store.set("bytes", &[0, 255, 10]).unwrap();
    assert_eq!(store.get("bytes", LONG).unwrap(), [0, 255, 10]);
    store.set("", b"").unwrap();
    assert_eq!(store.get("", LONG).unwrap(), b"");
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    assert_eq!(store.get("n", LONG).unwrap(), b"-2");
    assert_eq!(store.compare_set("cs", b"x", b"y").unwrap(), b"x");
    assert_eq!(store.compare_set("cs", b"", b"a").unwrap(), b"a");
    assert_eq!(store.compare_set("cs", b"a", b"b").unwrap(), b"b");
    assert_eq!(store.compare_set("cs", b"a", b"c").unwrap(), b"b");
    assert!(store.check(&["k", "n"]).unwrap());
    assert!(!store.check(&["k", "none"]).unwrap());
    assert_eq!(store.num_keys().unwrap(), 5);
    assert!(store.delete_key("k").unwrap());
    assert!(!store.delete_key("k").unwrap());
    store.multi_set(&[("m1", b"one"), ("m2", b"")]).unwrap();
    assert_eq!(store.multi_get(&["m2", "m1", "n"], LONG).unwrap(), [&b""[..], b"one", b"-2"]);
    assert!(matches!(store.multi_get(&["m1", "none"], SHORT), Err(Error::KeyTimeout { .. })));
    store.multi_set(&[]).unwrap();
    assert!(store.multi_get(&[], LONG).unwrap().is_empty());
    store.wait(&[], SHORT).unwrap();
    store.wait(&["n", "n", "cs"], SHORT).unwrap();

    let error = store.wait(&["n", "none", "never"], SHORT).unwrap_err();
    assert!(
        matches!(&error, Error::KeyTimeout { keys, .. } if keys.len() == 2),
        "{error}: names both, and only them"
    );
    assert!(matches!(store.get("none", Duration::ZERO), Err(Error::KeyTimeout { .. })));
    // After a timeout the store still works.
    assert_eq!(store.add("n", 0).unwrap(), -2);
    assert!(store.add("bytes", 1).is_err(), "not a number");
    assert_eq!(store.add("n", 0).unwrap(), -2);
}

/// A waiting thread does not block another, and each wait ends with its key.
fn wakes(store: &Arc<dyn Store>) {
    thread::scope(|scope| {
        for waiter in 0..8 {
            scope.spawn(move || {
                assert_eq!(store.get(&format!("late/{waiter}"), LONG).unwrap(), b"now");
                store.wait(&["late/all", &format!("late/{waiter}")], LONG).unwrap();
            });
        }
        thread::sleep(SHORT);
        for waiter in 0..8 {
            store.set(&format!("late/{waiter}"), b"now").unwrap();
        }
        store.add("late/all", 1).unwrap();
    });
}

#[test]
fn every_store_behaves_alike() {
    let server = server();
    let tcp: Arc<dyn Store> = Arc::new(client(&server));
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let under: Arc<dyn Store> =
        Arc::new(PrefixStore::new("/job/0/default", Arc::new(MemoryStore::new())));
    for store in [tcp, memory, under] {
        behaves(&store);
        wakes(&store);
    }
}

#[test]
fn concurrent_adds_lose_no_count() {
    let server = server();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let store = client(&server);
                for _ in 0..100 {
                    store.add("n", 1).unwrap();
                }
            });
        }
    });
    assert_eq!(client(&server).get("n", LONG).unwrap(), b"800");
}

#[test]
fn a_client_waits_for_a_server_that_starts_later() {
    let addr = server().local_addr();
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        TcpStoreServer::bind(addr).unwrap()
    });
    let store = TcpStore::connect("localhost", addr.port(), LONG).unwrap();
    store.set("k", b"v").unwrap();
    drop(late.join().unwrap());
    let error = store.set("k", b"v").unwrap_err().to_string();
    assert!(error.contains("set \"k\"") && error.contains("closed"), "{error}");
}

#[test]
fn an_unreachable_store_is_an_error_in_time_with_its_address() {
    let addr = server().local_addr();
    let start = Instant::now();
    let error = TcpStore::connect("127.0.0.1", addr.port(), 4 * SHORT).unwrap_err().to_string();
    assert!(start.elapsed() < LONG);
    assert!(error.contains(&addr.to_string()) && error.contains("MASTER_ADDR"), "{error}");

    // Another server listens there, with another protocol.
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, is_over) = (stranger.local_addr().unwrap(), AtomicBool::new(false));
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let streams = stranger.incoming().take_while(|_| !is_over.load(Ordering::Relaxed));
            streams.for_each(|stream| stream.unwrap().write_all(b"SSH-2.0-x").unwrap());
        });
        let error = TcpStore::connect("127.0.0.1", addr.port(), 4 * SHORT).unwrap_err();
        is_over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(addr).unwrap());
        error.to_string()
    });
    assert!(error.contains("not a store"), "{error}");
}

#[test]
fn an_unresolvable_host_is_an_error_long_before_the_timeout() {
    let start = Instant::now();
    let error = TcpStore::connect("no-such-host.invalid", 29_500, 20 * LONG).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("no-such-host.invalid:29500") && text.contains("MASTER_ADDR"), "{text}");
    assert!(start.elapsed() < 10 * LONG, "{:?}", start.elapsed());
}

#[test]
fn a_port_in_use_is_named_in_the_error() {
    let server = server();
    let error = TcpStoreServer::bind(server.local_addr()).unwrap_err().to_string();
    assert!(error.contains(&server.port().to_string()) && error.contains("taken"), "{error}");
}

#[test]
fn values_above_the_limits_are_errors_of_the_client() {
    let server = server();
    let store = client(&server);
    store.set(&"k".repeat(8191), b"").unwrap();
    let error = store.set(&"k".repeat(8192), b"").unwrap_err().to_string();
    assert!(error.contains("key of length 8193 exceeds the limit of 8192"), "{error}");
    let value = vec![1; 8 << 20];
    store.set("k", &value).unwrap();
    assert!(store.get("k", LONG).unwrap() == value);
    let error = store.set("k", &vec![1; (8 << 20) + 1]).unwrap_err().to_string();
    assert!(error.contains("value of length 8388609 exceeds the limit of 8388608"), "{error}");
}

fn raw(server: &TcpStoreServer) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

fn send(stream: &mut TcpStream, requests: &[Request<'_>]) {
    let mut bytes = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    stream.write_all(&bytes).unwrap();
}

#[test]
fn other_protocols_are_closed_at_their_first_byte() {
    let server = server();
    for hello in [&b"GET / HTTP/1.0\r\n\r\n"[..], &[13, 1, 0, 0, 0], &[0, 1, 2, 3, 4], &[1]] {
        let mut stream = raw(&server);
        stream.write_all(hello).unwrap();
        let mut rest = Vec::new();
        // A reset or an end of file, but no answer.
        let _ = stream.read_to_end(&mut rest);
        assert_eq!(rest, b"", "{hello:?}");
    }
}

#[test]
fn partial_requests_and_unread_replies_do_not_delay_others() {
    let server = server();
    let store = client(&server);
    let value = vec![7; 1 << 20];
    store.set("big", &value).unwrap();

    let mut half = raw(&server);
    for byte in [0].iter().chain(&MAGIC.to_le_bytes()).chain(&[1, 200, 0]) {
        half.write_all(&[*byte]).unwrap();
    }
    // Requests 256 MiB without reading any of it.
    let mut greedy = raw(&server);
    send(&mut greedy, &[Request::Validate { magic: MAGIC }]);
    let requests = 256;
    for _ in 0..requests {
        send(&mut greedy, &[Request::Get { key: b"/big" }]);
    }
    for count in 1..100 {
        assert_eq!(store.add("n", 1).unwrap(), count);
    }
    // Then it reads, and gets every byte.
    let mut reply = vec![0; 8 + value.len()];
    for _ in 0..requests {
        greedy.read_exact(&mut reply).unwrap();
        assert!(reply[8..] == value);
    }
}

#[test]
fn a_wait_ends_with_its_connection() {
    let server = server();
    for _ in 0..3 {
        let mut waiter = raw(&server);
        let wait = Request::Wait { keys: vec![b"/k"] };
        send(&mut waiter, &[Request::Validate { magic: MAGIC }, wait]);
    }
    let store = client(&server);
    thread::sleep(SHORT);
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"v");
}

#[test]
fn idle_connections_of_a_restarted_server_are_replaced() {
    let first = server();
    let addr = ([127, 0, 0, 1], first.port()).into();
    let store = client(&first);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| store.wait(&["k"], 4 * SHORT).unwrap_err());
        }
    });
    drop(first);
    let error = store.add("n", 1).unwrap_err().to_string();
    assert!(error.contains("the server closed the connection"), "at once: {error}");
    let second = TcpStoreServer::bind(addr).unwrap();
    for count in 1..5 {
        assert_eq!(store.add("n", 1).unwrap(), count);
    }
    drop(second);
}

/// A server whose answer to a wait crosses the client's cancel.
#[test]
fn an_answer_that_crosses_its_cancel_is_accepted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let fake = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 10];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello[6..]).unwrap();
        let mut wait = [0; 1 + 8 + 8 + 2];
        stream.read_exact(&mut wait).unwrap();
        let mut cancel = [0];
        stream.read_exact(&mut cancel).unwrap();
        assert_eq!(cancel, [12]);
        stream.write_all(&[0, 1]).unwrap();
        let mut num_keys = [0];
        stream.read_exact(&mut num_keys).unwrap();
        assert_eq!(num_keys, [7]);
        stream.write_all(&3_i64.to_le_bytes()).unwrap();
    });
    let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
    store.wait(&["k"], SHORT).unwrap();
    assert_eq!(store.num_keys().unwrap(), 3, "the connection is still usable");
    fake.join().unwrap();
}

/// A server that is stopped: the system still accepts bytes for it.
#[test]
fn a_wait_at_a_stopped_server_does_not_take_twice_its_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 10];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello[6..]).unwrap();
        stream
    });
    let timeout = LONG / 4;
    let store = TcpStore::connect("127.0.0.1", port, timeout).unwrap();
    let _stopped = server.join().unwrap();
    let start = Instant::now();
    let error = store.get("k", timeout).unwrap_err();
    let waited = start.elapsed();
    assert!(
        matches!(&error, Error::Store { reason, .. } if reason.starts_with("no answer within ")),
        "{error}"
    );
    assert!(timeout <= waited && waited < timeout * 9 / 5, "{waited:?}");
}

#[test]
fn an_add_to_text_is_an_error_that_says_so() {
    let server = server();
    let store = client(&server);
    store.set("word", b"abc").unwrap();
    for error in [store.add("word", 1).unwrap_err(), store.barrier("word", 2, LONG).unwrap_err()] {
        let Error::Store { reason, .. } = &error else { panic!("{error}") };
        assert_eq!(reason, "the value of \"word\" is not a number");
    }
    assert_eq!(store.get("word", LONG).unwrap(), b"abc");
    assert_eq!(store.add("number", 1).unwrap(), 1);
}

#[test]
fn a_watched_client_is_reported_when_its_connection_ends() {
    let client_of = |name: &str| Presence { key: format!("job/{name}"), done: "job/done".into() };
    let clients = ["a", "b"].map(client_of).to_vec();
    let server = TcpStoreServer::bind_watching("127.0.0.1:0".parse().unwrap(), clients).unwrap();
    let [through, lost] = ["a", "b"].map(|name| {
        let store = client(&server);
        store.set(&format!("job/{name}"), b"").unwrap();
        store
    });
    through.add("job/done", 1).unwrap();
    drop(through);
    assert!(server.disconnected().is_empty());
    drop(lost);
    let start = Instant::now();
    while server.disconnected() != ["job/b"] {
        assert!(start.elapsed() < LONG, "{:?}", server.disconnected());
        thread::sleep(SHORT);
    }
}

#[test]
fn dropping_the_server_ends_its_thread_and_its_connections() {
    let server = server();
    let addr = server.local_addr();
    let mut conn = raw(&server);
    send(&mut conn, &[Request::Validate { magic: MAGIC }]);
    // Joins the thread.
    drop(server);
    assert_eq!(conn.read(&mut [0]).unwrap_or(0), 0);
    let refused = TcpStream::connect_timeout(&addr, LONG).map(|_| ());
    assert!(refused.is_err());
}

#[test]
fn tcp_store_append_queue_and_barrier_methods_work() {
    let server = server();
    let store = client(&server);
    store.append("log", b"a").unwrap();
    store.append("log", &vec![b'b'; 10_000]).unwrap();
    assert_eq!(store.get("log", LONG).unwrap(), [&b"a"[..], &[b'b'; 10_000]].concat());
    store.append("log", b"c").unwrap();
    assert_eq!(store.get("log", LONG).unwrap().len(), 10_002);

    store.queue_push("q", b"1").unwrap();
    store.queue_push("q", b"").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 2);
    assert!(store.check(&["q"]).unwrap());
    assert_eq!(store.queue_pop("q", LONG).unwrap(), b"1");
    assert_eq!(store.queue_pop("q", LONG).unwrap(), b"");
    assert!(matches!(store.queue_pop("q", SHORT), Err(Error::KeyTimeout { .. })));
    assert_eq!(store.list_keys().unwrap(), ["log"]);

    let error = store.barrier("b", 2, SHORT).unwrap_err();
    assert!(matches!(&error, Error::KeyTimeout { keys, .. } if keys == &["b"]), "{error}");
    // It counts as arrived, so one more is enough.
    store.barrier("b", 2, LONG).unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| store.barrier("eight", 8, LONG).unwrap());
        }
    });
}

#[test]
fn each_queued_value_goes_to_one_waiter() {
    let server = server();
    let store = client(&server);
    let mut taken = thread::scope(|scope| {
        let pop = |_| scope.spawn(|| store.queue_pop("q", LONG).unwrap());
        let waiting: Vec<_> = (0..16).map(pop).collect();
        for value in 0..16_u8 {
            store.queue_push("q", &[value]).unwrap();
        }
        waiting.into_iter().map(|thread| thread.join().unwrap()[0]).collect::<Vec<_>>()
    });
    taken.sort_unstable();
    assert_eq!(taken, (0..16).collect::<Vec<_>>());
    assert_eq!(store.queue_len("q").unwrap(), 0);
}

#[test]
fn exchange_returns_all_values_on_every_rank() {
    let server = server();
    let tcp: Arc<dyn Store> = Arc::new(client(&server));
    let prefixed: Arc<dyn Store> = Arc::new(PrefixStore::new("p", tcp.clone()));
    let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
    for store in [tcp, prefixed, memory] {
        let value = |rank: usize| vec![rank as u8; rank * 1000];
        thread::scope(|scope| {
            for rank in 0..6 {
                let store = &store;
                scope.spawn(move || {
                    let all = exchange(&**store, "x", rank, 6, &value(rank), LONG).unwrap();
                    assert_eq!(all, (0..6).map(value).collect::<Vec<_>>());
                });
            }
        });
        let error = exchange(&*store, "y", 0, 2, b"", SHORT).unwrap_err().to_string();
        assert!(error.contains("y/1") && !error.contains("y/0"), "{error}");
    }
}

/// Values of the maximum length and slow readers: the server holds each value once, and every byte
/// is right.
#[test]
fn long_values_reach_slow_readers_completely() {
    let server = server();
    let store = client(&server);
    let value: Vec<u8> = (0..8 << 20).map(|at| (at % 251) as u8).collect();
    store.set("long", &value).unwrap();
    let mut readers: Vec<_> = (0..32)
        .map(|_| {
            let mut reader = raw(&server);
            let get = Request::Get { key: b"/long" };
            send(
                &mut reader,
                &[Request::Validate { magic: MAGIC }, get, Request::Ping { nonce: 5 }],
            );
            reader
        })
        .collect();
    let mut len = [0; 8];
    for reader in &mut readers {
        reader.read_exact(&mut len).unwrap();
        assert_eq!(u64::from_le_bytes(len), value.len() as u64);
    }
    // The value changes while the replies are sent.
    store.set("long", b"short").unwrap();
    store.append("long", b"er").unwrap();
    assert_eq!(store.get("long", LONG).unwrap(), b"shorter");
    let mut rest = vec![0; value.len() + 4];
    for reader in &mut readers {
        reader.read_exact(&mut rest).unwrap();
        assert!(rest[..value.len()] == value && rest[value.len()..] == 5_u32.to_le_bytes());
    }
}

/// The server's end of a connection sends keepalive probes to a silent peer.
#[test]
fn a_silent_client_gets_keepalive_probes() {
    let server = server();
    let mut silent = raw(&server);
    let ping = Request::Ping { nonce: 1 };
    send(&mut silent, &[Request::Validate { magic: MAGIC }, ping]);
    silent.read_exact(&mut [0; 4]).unwrap();
    let local = format!(":{:04X}", server.port());
    let probed = || {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let own = |line: &&str| {
            let mut columns = line.split_whitespace().skip(1);
            let is_servers = columns.next().is_some_and(|column| column.ends_with(&local));
            is_servers && columns.nth(1) == Some("01")
        };
        let line = table.lines().find(own).expect("the server's end of the connection");
        // `tr`: which timer runs; 02 is the keepalive's.
        line.split_whitespace().nth(5).unwrap().starts_with("02:")
    };
    let start = Instant::now();
    // Another timer may run for a moment.
    while !probed() {
        assert!(start.elapsed() < LONG, "no keepalive timer runs for the connection");
        thread::sleep(SHORT);
    }
}
