//! Replays PyTorch's recorded messages: each request goes through our codec and state machine, then
//! through a live server, and every reply must have the recorded bytes.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use collective::store::TcpStoreServer;
use collective::store::tcp::codec::{MAGIC, Request, decode, put_blob};
use collective::store::tcp::state::{ConnId, State};

/// The connection of the second client of the recording, whose replies were not recorded.
const OTHER: ConnId = 1000;

/// One request, whose connection we chose, and the replies it causes.
struct Step {
    conn: ConnId,
    request: Vec<u8>,
    replies: Vec<(ConnId, Vec<u8>)>,
}

/// Runs a transcript through the state machine. Which connection a request came on is not
/// recorded; any choice in which no connection waits twice gives the same replies. Here a wait
/// gets a connection of its own, its cancel goes to that, and all else goes to the first.
struct Replay {
    state: State,
    steps: Vec<Step>,
    conns: ConnId,
    waiting: Vec<ConnId>,
    /// Actual and recorded replies, as one stream each.
    got: Vec<u8>,
    want: Vec<u8>,
    /// Positions in these streams of a list of keys, which is in any order.
    lists: Vec<Range<usize>>,
}

impl Replay {
    fn new() -> Self {
        let mut replay = Self {
            state: State::new(),
            steps: Vec::new(),
            conns: 0,
            waiting: Vec::new(),
            got: Vec::new(),
            want: Vec::new(),
            lists: Vec::new(),
        };
        replay.connect(0);
        replay.connect(OTHER);
        replay
    }

    fn connect(&mut self, id: ConnId) {
        self.state.connect(id);
        self.send(id, &Request::Validate { magic: MAGIC });
    }

    fn send(&mut self, conn: ConnId, request: &Request<'_>) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let mut replies = Vec::new();
        self.state
            .handle(conn, request, &mut |id, piece| replies.push((id, piece.bytes().to_vec())))
            .unwrap_or_else(|error| panic!("{request:?}: {error}"));
        for (id, reply) in &replies {
            self.waiting.retain(|waiting| waiting != id);
            if *id != OTHER {
                self.got.extend_from_slice(reply);
            }
        }
        self.steps.push(Step { conn, request: bytes, replies });
    }

    fn recorded_request(&mut self, bytes: &[u8]) {
        let Ok((request, len)) = decode(bytes) else { panic!("not a request: {bytes:02x?}") };
        assert_eq!(len, bytes.len(), "one request a line");
        let mut again = Vec::new();
        request.encode(&mut again);
        assert_eq!(again, bytes);
        match request {
            // Every connection is opened by `connect`.
            Request::Validate { .. } => {}
            Request::Wait { .. } | Request::Barrier { .. } => {
                self.conns += 1;
                let conn = self.conns;
                self.connect(conn);
                self.waiting.push(conn);
                self.send(conn, &request);
            }
            Request::CancelWait => {
                let conn = *self.waiting.last().expect("something waits");
                self.send(conn, &request);
            }
            Request::ListKeys => {
                let start = self.got.len();
                self.send(0, &request);
                self.lists.push(start..self.got.len());
            }
            _ => self.send(0, &request),
        }
    }

    /// Requests of the second client just before (`after` false) or after the request of a step.
    fn other(&mut self, step: &str, after: bool) {
        let request = match (step, after) {
            ("get torch's", false) => Request::Set { key: b"/t", value: b"from torch" },
            ("wait for two, one late", true) => Request::Set { key: b"/late", value: b"x" },
            ("wait on a queue", false) => Request::QueuePop { key: b"/q" },
            ("wait on a queue", true) => Request::QueuePush { key: b"/q2", value: b"x" },
            ("barrier of 2", true) => Request::Barrier { key: b"/bar", world_size: 2 },
            ("barrier with torch", false) => Request::Barrier { key: b"/bar2", world_size: 2 },
            _ => return,
        };
        self.send(OTHER, &request);
    }

    fn run(mut self, transcript: &str) -> Vec<Step> {
        let mut step = "";
        for line in transcript.lines() {
            match line.split_at(2) {
                ("# ", name) => step = name,
                ("> ", hex) => {
                    self.other(step, false);
                    self.recorded_request(&bytes(hex));
                    self.other(step, true);
                }
                ("< ", hex) => self.want.extend_from_slice(&bytes(hex)),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(self.got.len(), self.want.len());
        for list in self.lists {
            self.got[list.clone()].sort_unstable();
            self.want[list].sort_unstable();
        }
        let differs = self.got.iter().zip(&self.want).position(|(got, want)| got != want);
        assert_eq!(differs, None, "replies differ from that byte on");
        self.steps
    }
}

/// A line's bytes; the two lines that were too long to record are generated.
fn bytes(hex: &str) -> Vec<u8> {
    let value = vec![b'z'; 5_000_000];
    let mut out = Vec::new();
    match hex {
        "5000021 bytes" => Request::Set { key: b"/big", value: &value }.encode(&mut out),
        "5000008 bytes" => put_blob(&mut out, &value),
        _ => out.extend(hex.split(' ').map(|byte| u8::from_str_radix(byte, 16).unwrap())),
    }
    out
}

fn transcripts() -> HashMap<String, String> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/tcpstore");
    let mut found = HashMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            found.insert(name, fs::read_to_string(&path).unwrap());
        }
    }
    assert_eq!(found.len(), 8);
    found
}

#[test]
fn the_state_machine_answers_as_recorded() {
    for (name, text) in transcripts() {
        println!("{name}");
        let steps = Replay::new().run(&text);
        assert!(steps.len() > 20, "{name}: {} steps", steps.len());
    }
}

#[test]
fn a_live_server_answers_as_recorded() {
    for (name, text) in transcripts() {
        println!("{name}");
        let server = TcpStoreServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let mut conns = HashMap::new();
        for step in Replay::new().run(&text) {
            let open = || {
                let stream = TcpStream::connect(server.local_addr()).unwrap();
                stream.set_nodelay(true).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                stream
            };
            conns.entry(step.conn).or_insert_with(open).write_all(&step.request).unwrap();
            let is_list = matches!(decode(&step.request), Ok((Request::ListKeys, _)));
            for (conn, mut want) in step.replies {
                let mut got = vec![0; want.len()];
                conns.get_mut(&conn).unwrap().read_exact(&mut got).unwrap();
                if is_list {
                    got.sort_unstable();
                    want.sort_unstable();
                }
                assert!(got == want, "{name}: reply to {:02x?}", &step.request[..1]);
            }
            // The next request may be on another connection: wait until this one is processed.
            let conn = conns.get_mut(&step.conn).unwrap();
            let mut ping = Vec::new();
            Request::Ping { nonce: 7 }.encode(&mut ping);
            conn.write_all(&ping).unwrap();
            let mut pong = [0; 4];
            conn.read_exact(&mut pong).unwrap();
            assert_eq!(u32::from_le_bytes(pong), 7);
        }
    }
}
