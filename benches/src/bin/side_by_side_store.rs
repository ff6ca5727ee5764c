//! The programs of `side_by_side/store.sh`: our store's server, and a load generator with many
//! clients for any server of PyTorch's protocol.
//!
//! `serve` prints its port and serves until standard input ends. `load PORT CLIENTS ROUNDS` drives
//! that many connections from one thread and prints, for each part, the best of its rounds in
//! milliseconds. A round: every client connects and sends the handshake; a barrier (a counter, then
//! a wait); the first client gathers 128 bytes of each client and sends each its own answer
//! (`hand out`); the first client gathers them and publishes all to all (`publish`).
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a program for a script")]

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::Instant;

use collective::store::TcpStoreServer;
use collective::store::tcp::codec::{MAGIC, Request};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

/// Bytes that each client sends: about the size of an address and a name.
const VALUE: usize = 128;
const PARTS: [&str; 4] = ["connect", "barrier", "hand out", "publish"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve"] => {
            let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
            println!("{}", server.port());
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        ["load", port, clients, rounds] => {
            load(port.parse().unwrap(), clients.parse().unwrap(), rounds.parse().unwrap());
        }
        _ => panic!("serve | load PORT CLIENTS ROUNDS"),
    }
}

fn load(port: u16, clients: usize, rounds: usize) {
    let mut best = [f64::INFINITY; PARTS.len()];
    for round in 0..rounds {
        let start = Instant::now();
        let mut clients = Clients::connect(port, clients);
        let mut times = vec![start.elapsed()];
        for part in [barrier, hand_out, publish] {
            let scripts = part(round, clients.all.len());
            let start = Instant::now();
            clients.run(scripts);
            times.push(start.elapsed());
        }
        for (best, time) in best.iter_mut().zip(times) {
            *best = best.min(time.as_secs_f64() * 1e3);
        }
    }
    for (part, best) in PARTS.iter().zip(best) {
        println!("{part}\t{best:.2}");
    }
}

/// Bytes to send, and the number of answer bytes to wait for before the next step.
struct Step {
    send: Vec<u8>,
    answer: usize,
    /// Sent only if the answer is the number of clients.
    if_last: Vec<u8>,
}

type Script = Vec<Step>;

fn step(answer: usize, requests: &[Request<'_>]) -> Step {
    Step { send: bytes(requests), answer, if_last: Vec::new() }
}

fn bytes(requests: &[Request<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes
}

/// As PyTorch's: the last client sets the key for which all wait.
fn barrier(round: usize, clients: usize) -> Vec<Script> {
    let (count, last) = (format!("/b/{round}/count"), format!("/b/{round}/last"));
    let script = |_| {
        let mut add = step(8, &[Request::Add { key: count.as_bytes(), delta: 1 }]);
        add.if_last = bytes(&[Request::Set { key: last.as_bytes(), value: b"1" }]);
        vec![add, step(1, &[Request::Wait { keys: vec![last.as_bytes()] }])]
    };
    (0..clients).map(script).collect()
}

/// The first client's first two steps of an exchange: read the values of all others.
fn gather(keys: &[String]) -> Script {
    let wire: Vec<_> = keys.iter().map(String::as_bytes).collect();
    let own = Request::Set { key: wire[0], value: &[0; VALUE] };
    vec![
        step(1, &[own, Request::Wait { keys: wire.clone() }]),
        step(keys.len() * (8 + VALUE), &[Request::MultiGet { keys: wire }]),
    ]
}

/// Another client's steps: sets its own value, and reads `key` of `len` bytes when it is set.
fn say_and_read(own: &str, key: &str, len: usize) -> Script {
    let said = Request::Set { key: own.as_bytes(), value: &[1; VALUE] };
    let key = key.as_bytes();
    vec![
        step(1, &[said, Request::Wait { keys: vec![key] }]),
        step(8 + len, &[Request::Get { key }]),
    ]
}

fn hand_out(round: usize, clients: usize) -> Vec<Script> {
    let keys: Vec<_> = (0..clients).map(|client| format!("/h/{round}/said/{client}")).collect();
    let answers: Vec<_> = (0..clients).map(|client| format!("/h/{round}/own/{client}")).collect();
    let mut first = gather(&keys);
    let pairs = answers.iter().map(|key| (key.as_bytes(), &[2; VALUE][..])).collect();
    first.push(step(4, &[Request::MultiSet { pairs }, Request::Ping { nonce: 1 }]));
    let other = |client: usize| say_and_read(&keys[client], &answers[client], VALUE);
    std::iter::once(first).chain((1..clients).map(other)).collect()
}

fn publish(round: usize, clients: usize) -> Vec<Script> {
    let keys: Vec<_> = (0..clients).map(|client| format!("/p/{round}/said/{client}")).collect();
    let all = format!("/p/{round}/all");
    let value = vec![3; clients * VALUE];
    let mut first = gather(&keys);
    let set = Request::Set { key: all.as_bytes(), value: &value };
    first.push(step(4, &[set, Request::Ping { nonce: 1 }]));
    let other = |client: usize| say_and_read(&keys[client], &all, clients * VALUE);
    std::iter::once(first).chain((1..clients).map(other)).collect()
}

struct Clients {
    poll: Poll,
    all: Vec<Client>,
}

struct Client {
    stream: TcpStream,
    output: Vec<u8>,
    sent: usize,
    /// The first bytes of the current answer, and the number of bytes received.
    head: [u8; 8],
    came: usize,
}

impl Clients {
    fn connect(port: u16, count: usize) -> Self {
        let addr: SocketAddr = ([127, 0, 0, 1], port).into();
        let poll = Poll::new().unwrap();
        let client = |index| {
            let mut stream = TcpStream::connect(addr).unwrap();
            let both = Interest::READABLE | Interest::WRITABLE;
            poll.registry().register(&mut stream, Token(index), both).unwrap();
            Client { stream, output: Vec::new(), sent: 0, head: [0; 8], came: 0 }
        };
        let mut clients = Self { all: (0..count).map(client).collect(), poll };
        let hello = [Request::Validate { magic: MAGIC }, Request::Ping { nonce: 7 }];
        clients.run((0..count).map(|_| vec![step(4, &hello)]).collect());
        clients.all.iter().for_each(|client| client.stream.set_nodelay(true).unwrap());
        clients
    }

    /// Runs one script for each client.
    fn run(&mut self, scripts: Vec<Script>) {
        let count = self.all.len();
        let mut scripts: Vec<_> = scripts.into_iter().map(IntoIterator::into_iter).collect();
        let mut steps: Vec<_> = scripts.iter_mut().map(Iterator::next).collect();
        for (client, step) in self.all.iter_mut().zip(&steps) {
            client.send(&step.as_ref().unwrap().send);
        }
        let (mut left, mut events) = (count, Events::with_capacity(1024));
        let mut scratch = vec![0; 1 << 18];
        while left > 0 {
            self.poll.poll(&mut events, None).unwrap();
            for event in &events {
                let index = event.token().0;
                let client = &mut self.all[index];
                client.flush();
                client.receive(&mut scratch);
                while let Some(step) = &steps[index]
                    && client.came >= step.answer
                {
                    assert_eq!(client.came, step.answer, "an answer is longer than it can be");
                    if u64::from_le_bytes(client.head) == count as u64 {
                        client.send(&step.if_last);
                    }
                    client.came = 0;
                    steps[index] = scripts[index].next();
                    match &steps[index] {
                        Some(next) => client.send(&next.send),
                        None => left -= 1,
                    }
                }
            }
        }
    }
}

impl Client {
    fn send(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
        self.flush();
    }

    fn flush(&mut self) {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) =>
                {
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
        self.output.clear();
        self.sent = 0;
    }

    fn receive(&mut self, scratch: &mut [u8]) {
        loop {
            match self.stream.read(scratch) {
                Ok(0) => panic!("the server closed a connection"),
                Ok(len) => {
                    if self.came < self.head.len() {
                        let len = len.min(self.head.len() - self.came);
                        self.head[self.came..self.came + len].copy_from_slice(&scratch[..len]);
                    }
                    self.came += len;
                    if len < scratch.len() {
                        return;
                    }
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) =>
                {
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}
