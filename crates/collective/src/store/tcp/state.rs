//! The server's state, without I/O.
//!
//! A connection is a number. [`State::handle`] applies one request and passes each reply, with the
//! number of its connection, to a closure. A request of one connection may end the waits of others.
//!
//! Invariants, checked against a model by the tests:
//!
//! - a connection is in `waiting[event]` if and only if `event` is in its set of missing events;
//! - no connection waits for a key that exists, so no wake-up is lost;
//! - a wait is answered exactly once, when it ends or when it is cancelled.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::super::values::{Values, cost};
use super::codec::{
    CHECK_ABSENT, CHECK_PRESENT, MAGIC, MAX_MESSAGE_BYTES, MAX_STORE_BYTES, ProtocolError, Request,
    VALIDATE, WAIT_CANCELLED, WAIT_OVER, put_blob,
};

/// Number of a connection, never reused.
pub type ConnId = usize;

/// Receives replies: the connection, and the next bytes to send on it.
pub type Replies<'a> = &'a mut dyn FnMut(ConnId, Piece<'_>);

/// A reply, or part of one.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Bytes to copy.
    Bytes(&'a [u8]),
    /// A long value, to be shared with the store.
    Value(&'a Arc<Vec<u8>>),
}

impl Piece<'_> {
    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Value(value) => value,
        }
    }
}

/// A client to watch. It is present from when it sets `key` until its connection ends, and then
/// reported as disconnected unless it has added to `done`.
#[derive(Clone, Debug)]
pub struct Presence {
    /// The key that it sets when it starts.
    pub key: String,
    /// The counter that it adds to when it is done.
    pub done: String,
}

/// State of a watched client.
#[derive(Debug, Default, PartialEq, Eq)]
enum ClientState {
    /// Not started, or done.
    #[default]
    Absent,
    Present(ConnId),
    Disconnected,
}

/// Values, connections and waits.
#[derive(Debug, Default)]
pub struct State {
    values: Values,
    conns: HashMap<ConnId, Conn>,
    /// Connections that wait for an event, in order of arrival.
    waiting: HashMap<Condition, Vec<ConnId>>,
    /// Watched clients.
    clients: Vec<(Presence, ClientState)>,
    /// Approximate memory taken by waits, see [`wait_cost`].
    waits: usize,
    /// Memory of the connections' buffers, as reported by [`count_buffer`](State::count_buffer).
    buffers: usize,
}

#[derive(Debug, Default)]
struct Conn {
    validated: bool,
    /// The events that its wait needs; empty if it does not wait.
    missing: HashSet<Condition>,
}

/// A condition on which a connection can wait.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Condition {
    /// The key exists.
    Key(Vec<u8>),
    /// The barrier with this key is complete.
    Barrier(Vec<u8>),
}

impl Condition {
    fn key(&self) -> &[u8] {
        match self {
            Self::Key(key) | Self::Barrier(key) => key,
        }
    }
}

impl State {
    /// Makes an empty store without connections.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Same as [`new`](Self::new), and watches these clients.
    #[must_use]
    pub fn watching(clients: Vec<Presence>) -> Self {
        let clients = clients.into_iter().map(|client| (client, ClientState::default())).collect();
        Self { clients, ..Self::default() }
    }

    #[cfg(test)]
    pub(super) fn fill(&mut self, bytes: usize) {
        self.values.set_bytes(bytes);
    }

    /// Returns the keys of the clients whose connection ended before they were done.
    pub fn disconnected(&self) -> impl Iterator<Item = &str> {
        let lost = self.clients.iter().filter(|(_, state)| *state == ClientState::Disconnected);
        lost.map(|(client, _)| &client.key[..])
    }

    /// Adds a connection.
    pub fn connect(&mut self, id: ConnId) {
        self.conns.insert(id, Conn::default());
    }

    /// Removes a connection and its wait.
    pub fn disconnect(&mut self, id: ConnId) {
        self.cancel(id);
        self.conns.remove(&id);
        let present = ClientState::Present(id);
        for (_, state) in self.clients.iter_mut().filter(|(_, state)| *state == present) {
            *state = ClientState::Disconnected;
        }
    }

    /// Returns whether `id` may send a request that begins with `opcode`. Checked before the rest
    /// of a request is buffered, so that only store clients can make the server buffer data.
    #[must_use]
    pub fn admits(&self, id: ConnId, opcode: u8) -> bool {
        opcode == VALIDATE || self.conns.get(&id).is_some_and(|conn| conn.validated)
    }

    /// Returns the oldest connection that has not sent [`Request::Validate`].
    #[must_use]
    pub fn oldest_unvalidated(&self) -> Option<ConnId> {
        let unvalidated = self.conns.iter().filter(|(_, conn)| !conn.validated);
        unvalidated.map(|(&id, _)| id).min()
    }

    /// Replaces the `counted` bytes of a connection's buffers by `bytes`.
    ///
    /// # Errors
    ///
    /// [`ProtocolError::Full`] if that is more and exceeds the store's limit. It is counted anyway;
    /// the caller must close the connection, and then count 0.
    pub fn count_buffer(&mut self, counted: &mut usize, bytes: usize) -> Result<(), ProtocolError> {
        let is_more = bytes > *counted;
        self.buffers = self.buffers - *counted + bytes;
        *counted = bytes;
        if is_more { self.check_room(0) } else { Ok(()) }
    }

    /// Checks that the store may take `more` bytes.
    fn check_room(&self, more: usize) -> Result<(), ProtocolError> {
        if self.values.bytes() + self.waits + self.buffers + more <= MAX_STORE_BYTES {
            return Ok(());
        }
        Err(ProtocolError::Full { limit: MAX_STORE_BYTES })
    }

    /// Maximum number of bytes that a request adds to the store.
    fn cost_of(&self, request: &Request<'_>) -> usize {
        let waits = match request {
            Request::Wait { keys } => {
                let missing = keys.iter().filter(|key| !self.values.contains(key));
                missing.map(|key| wait_cost(key)).sum()
            }
            Request::Barrier { key, .. } => wait_cost(key),
            _ => 0,
        };
        request.stores() + waits
    }

    /// Applies one request of `id`.
    ///
    /// # Errors
    ///
    /// The connection has violated the protocol. The caller must close it and
    /// [`disconnect`](Self::disconnect) it. The state is unchanged.
    pub fn handle(
        &mut self,
        id: ConnId,
        request: &Request<'_>,
        replies: Replies<'_>,
    ) -> Result<(), ProtocolError> {
        let more = self.cost_of(request);
        let room = if more > 0 { self.check_room(more) } else { Ok(()) };
        let conn = self.conns.get_mut(&id).ok_or(ProtocolError::NotValidated)?;
        match request {
            Request::Validate { magic } if *magic != MAGIC => {
                return Err(ProtocolError::NotValidated);
            }
            Request::Validate { .. } if conn.validated => {
                return Err(ProtocolError::ValidatedTwice);
            }
            Request::Validate { .. } => conn.validated = true,
            _ if !conn.validated => return Err(ProtocolError::NotValidated),
            _ if room.is_err() => return room,
            Request::Wait { .. } | Request::Barrier { .. } if !conn.missing.is_empty() => {
                return Err(ProtocolError::SecondWait);
            }
            Request::Wait { keys } => {
                let missing = keys.iter().filter(|key| !self.values.contains(key));
                let missing = missing.map(|key| Condition::Key(key.to_vec())).collect();
                self.start_wait(id, missing, replies);
            }
            Request::Barrier { key, world_size } => {
                let arrived = self.values.add(key, 1).ok_or(ProtocolError::NotANumber)?;
                // The counter is an ordinary key, so setting it also ends waits.
                self.wake(Condition::Key, key, replies);
                let mut missing = HashSet::new();
                if arrived < *world_size {
                    missing.insert(Condition::Barrier(key.to_vec()));
                } else {
                    self.wake(Condition::Barrier, key, replies);
                }
                self.start_wait(id, missing, replies);
            }
            Request::CancelWait => {
                self.cancel(id);
                replies(id, Piece::Bytes(&[WAIT_CANCELLED]));
            }
            Request::Ping { nonce } => replies(id, Piece::Bytes(&nonce.to_le_bytes())),
            Request::Get { key } => self.send_values(id, &[*key], replies)?,
            Request::MultiGet { keys } => self.send_values(id, keys, replies)?,
            Request::Check { keys } => {
                let all = keys.iter().all(|key| self.values.contains(key));
                replies(id, Piece::Bytes(&[if all { CHECK_PRESENT } else { CHECK_ABSENT }]));
            }
            Request::NumKeys => replies(id, Piece::Bytes(&count(self.values.len()))),
            Request::QueueLen { key } => {
                replies(id, Piece::Bytes(&count(self.values.queue_len(key))));
            }
            Request::ListKeys => {
                let mut reply = count(self.values.len()).to_vec();
                check_reply(self.values.keys().map(|key| 8 + key.len()).sum())?;
                self.values.keys().for_each(|key| put_blob(&mut reply, key));
                replies(id, Piece::Bytes(&reply));
            }
            other => self.write(id, other, replies)?,
        }
        Ok(())
    }

    /// Applies a request that changes values and may end waits. Waits are answered before the
    /// request.
    fn write(
        &mut self,
        id: ConnId,
        request: &Request<'_>,
        replies: Replies<'_>,
    ) -> Result<(), ProtocolError> {
        match request {
            Request::Set { key, value } => {
                let set = self.clients.iter_mut().filter(|(client, _)| is_wire(&client.key, key));
                set.for_each(|(_, state)| *state = ClientState::Present(id));
                self.values.set(key, value);
                self.wake(Condition::Key, key, replies);
            }
            Request::Append { key, value } => {
                self.values.append(key, value);
                self.wake(Condition::Key, key, replies);
            }
            Request::MultiSet { pairs } => {
                for (key, value) in pairs {
                    self.values.set(key, value);
                    self.wake(Condition::Key, key, replies);
                }
            }
            Request::Add { key, delta } => {
                let sum = self.values.add(key, *delta).ok_or(ProtocolError::NotANumber)?;
                let present = ClientState::Present(id);
                let own = self.clients.iter_mut().filter(|(_, state)| *state == present);
                let done = own.filter(|(client, _)| is_wire(&client.done, key));
                done.for_each(|(_, state)| *state = ClientState::Absent);
                self.wake(Condition::Key, key, replies);
                replies(id, Piece::Bytes(&sum.to_le_bytes()));
            }
            Request::CompareSet { key, expected, desired } => {
                let mut reply = Vec::new();
                let (value, stored) = self.values.compare_set(key, expected, desired);
                put_blob(&mut reply, value);
                if stored {
                    self.wake(Condition::Key, key, replies);
                }
                replies(id, Piece::Bytes(&reply));
            }
            Request::DeleteKey { key } => {
                replies(id, Piece::Bytes(&i64::from(self.values.delete(key)).to_le_bytes()));
            }
            Request::QueuePush { key, value } => {
                self.values.queue_push(key, value);
                self.wake(Condition::Key, key, replies);
            }
            Request::QueuePop { key } => {
                let mut reply = count(self.values.queue_len(key)).to_vec();
                if let Some(value) = self.values.queue_pop(key) {
                    put_blob(&mut reply, &value);
                }
                replies(id, Piece::Bytes(&reply));
            }
            other => unreachable!("{other:?} is handled before writes"),
        }
        Ok(())
    }

    /// Replies with a blob for each key. Long values are shared with the store.
    fn send_values(
        &self,
        id: ConnId,
        keys: &[&[u8]],
        replies: Replies<'_>,
    ) -> Result<(), ProtocolError> {
        let values = || keys.iter().map(|key| self.values.get_shared(key));
        check_reply(values().map(|value| 8 + value.map_or(0, |value| value.len())).sum())?;
        let mut bytes = Vec::new();
        for value in values() {
            match value {
                None => bytes.extend_from_slice(&count(0)),
                Some(value) if value.len() < SHARED_FROM => put_blob(&mut bytes, value),
                Some(value) => {
                    bytes.extend_from_slice(&count(value.len()));
                    replies(id, Piece::Bytes(&bytes));
                    replies(id, Piece::Value(value));
                    bytes.clear();
                }
            }
        }
        if !bytes.is_empty() {
            replies(id, Piece::Bytes(&bytes));
        }
        Ok(())
    }

    /// Replies at once if no event is missing.
    fn start_wait(&mut self, id: ConnId, missing: HashSet<Condition>, replies: Replies<'_>) {
        if missing.is_empty() {
            return replies(id, Piece::Bytes(&[WAIT_OVER]));
        }
        for event in &missing {
            self.waits += wait_cost(event.key());
            self.waiting.entry(event.clone()).or_default().push(id);
        }
        self.conns.get_mut(&id).expect("`handle` has found it").missing = missing;
    }

    /// Removes an event, which has happened, from the missing events of its waiters, and answers
    /// those that miss no other. If only a queue has the key, stops at the first answered; the
    /// others keep waiting.
    fn wake(&mut self, event: fn(Vec<u8>) -> Condition, key: &[u8], replies: Replies<'_>) {
        if self.waiting.is_empty() {
            return; // Saves a copy of the key.
        }
        let event = event(key.to_vec());
        let Some(mut ids) = self.waiting.remove(&event) else { return };
        let mut visited = 0;
        for &id in &ids {
            visited += 1;
            let conn = self.conns.get_mut(&id).expect("disconnect removes all waits");
            conn.missing.remove(&event);
            self.waits -= wait_cost(key);
            if conn.missing.is_empty() {
                replies(id, Piece::Bytes(&[WAIT_OVER]));
                if self.values.get(key).is_none() {
                    break;
                }
            }
        }
        ids.drain(..visited);
        if !ids.is_empty() {
            self.waiting.insert(event, ids);
        }
    }

    fn cancel(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        for event in std::mem::take(&mut conn.missing) {
            self.waits -= wait_cost(event.key());
            let ids = self.waiting.get_mut(&event).expect("a missing event has a list");
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.waiting.remove(&event);
            }
        }
    }
}

/// Returns the memory of one wait for a key, which is in two maps, with overhead.
fn wait_cost(key: &[u8]) -> usize {
    2 * cost(key, 0)
}

/// Returns whether `wire` is `key` with the prefix that clients add.
fn is_wire(key: &str, wire: &[u8]) -> bool {
    wire.strip_prefix(b"/") == Some(key.as_bytes())
}

/// Checks the total length of a reply.
fn check_reply(bytes: usize) -> Result<(), ProtocolError> {
    if bytes <= MAX_MESSAGE_BYTES {
        return Ok(());
    }
    Err(ProtocolError::TooLong { what: "reply", len: bytes as u64, limit: MAX_MESSAGE_BYTES })
}

/// Minimum length of a value that is shared with replies; copying shorter ones is cheaper.
const SHARED_FROM: usize = 4096;

fn count(len: usize) -> [u8; 8] {
    (len as u64).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const CONNS: usize = 4;
    const KEYS: [&[u8]; 3] = [b"a", b"b", b"c"];

    fn state() -> State {
        let mut state = State::new();
        for id in 0..CONNS {
            state.connect(id);
            handle(&mut state, id, &Request::Validate { magic: MAGIC }).unwrap();
        }
        state
    }

    fn handle(
        state: &mut State,
        id: ConnId,
        request: &Request<'_>,
    ) -> Result<Vec<(ConnId, Vec<u8>)>, ProtocolError> {
        let mut sent = Vec::new();
        state.handle(id, request, &mut |id, piece| sent.push((id, piece.bytes().to_vec())))?;
        Ok(sent)
    }

    #[test]
    fn requests_beyond_the_store_limit_are_refused() {
        let (mut state, value) = (state(), [0; 1000]);
        state.fill(MAX_STORE_BYTES - 2500);
        let grow = |key| Request::Append { key, value: &value };
        handle(&mut state, 0, &grow(b"a")).unwrap();
        let full = ProtocolError::Full { limit: MAX_STORE_BYTES };
        let push = Request::QueuePush { key: b"q", value: &value };
        handle(&mut state, 0, &push).unwrap();
        for refused in [grow(b"a"), grow(b"b"), push, Request::Set { key: b"c", value: &value }] {
            assert_eq!(handle(&mut state, 0, &refused), Err(full.clone()));
        }
        assert_eq!(state.values.len(), 1);
        handle(&mut state, 0, &Request::QueuePop { key: b"q" }).unwrap();
        handle(&mut state, 0, &Request::DeleteKey { key: b"a" }).unwrap();
        handle(&mut state, 0, &grow(b"b")).unwrap();
        assert!(handle(&mut state, 0, &Request::NumKeys).is_ok());
    }

    #[test]
    fn waits_count_towards_the_store_limit() {
        let (mut state, key) = (state(), [b'k'; 4000]);
        state.fill(MAX_STORE_BYTES - 13_000);
        let wait = Request::Wait { keys: vec![&key] };
        let full = Err(ProtocolError::Full { limit: MAX_STORE_BYTES });
        let set = Request::Set { key: b"a", value: &[0; 5000] };
        let end: [fn(&mut State, &[u8]); 3] = [
            |state, _| drop(handle(state, 0, &Request::CancelWait).unwrap()),
            |state, key| {
                handle(state, 1, &Request::Add { key, delta: 1 }).unwrap();
                handle(state, 1, &Request::DeleteKey { key }).unwrap();
            },
            |state, _| state.disconnect(0),
        ];
        for end in end {
            assert_eq!(handle(&mut state, 0, &wait), Ok(vec![]));
            assert_eq!(handle(&mut state, 2, &wait), full);
            assert_eq!(handle(&mut state, 2, &set), full);
            end(&mut state, &key);
            assert_eq!(handle(&mut state, 1, &wait), Ok(vec![]));
            handle(&mut state, 1, &Request::CancelWait).unwrap();
        }
        state.fill(MAX_STORE_BYTES - 12_000);
        let barrier = Request::Barrier { key: &key, world_size: 2 };
        assert_eq!(handle(&mut state, 1, &barrier), full);
        assert_eq!(handle(&mut state, 2, &set), Ok(vec![]));
    }

    #[test]
    fn a_client_that_disconnects_before_it_is_done_is_reported() {
        let presence = |name| Presence { key: format!("here/{name}"), done: "done".into() };
        let mut state = State::watching(["a", "b", "c"].map(presence).into());
        for id in 0..4 {
            state.connect(id);
            handle(&mut state, id, &Request::Validate { magic: MAGIC }).unwrap();
        }
        let keys: [&[u8]; 3] = [b"/here/a", b"/here/b", b"/here/c"];
        for (id, key) in keys[..2].iter().enumerate() {
            handle(&mut state, id, &Request::Set { key, value: b"" }).unwrap();
        }
        let lost = |state: &State| state.disconnected().map(str::to_owned).collect::<Vec<_>>();
        handle(&mut state, 0, &Request::Add { key: b"/done", delta: 1 }).unwrap();
        // A connection that is not watched.
        handle(&mut state, 3, &Request::Add { key: b"/done", delta: 1 }).unwrap();
        state.disconnect(3);
        assert!(lost(&state).is_empty());
        state.disconnect(0);
        assert!(lost(&state).is_empty(), "it was done");
        state.disconnect(1);
        assert_eq!(lost(&state), ["here/b"]);
        // It reconnects.
        handle(&mut state, 2, &Request::Set { key: keys[1], value: b"" }).unwrap();
        assert!(lost(&state).is_empty());
    }

    /// A naive implementation: every new key is checked against all waits.
    #[derive(Default)]
    struct Model {
        values: BTreeMap<Vec<u8>, Vec<u8>>,
        queues: BTreeMap<Vec<u8>, Vec<Vec<u8>>>,
        /// In order of arrival, because a queue wakes one.
        waits: Vec<(ConnId, HashSet<Vec<u8>>)>,
        barriers: Vec<(ConnId, Vec<u8>)>,
    }

    impl Model {
        fn present(&self, key: &[u8]) -> bool {
            self.values.contains_key(key) || self.queues.get(key).is_some_and(|q| !q.is_empty())
        }

        fn arrive(&mut self, key: &[u8], one: bool, sent: &mut Vec<(ConnId, Vec<u8>)>) {
            for (id, missing) in &mut self.waits {
                if missing.remove(key) && missing.is_empty() {
                    sent.push((*id, vec![WAIT_OVER]));
                    if one {
                        break;
                    }
                }
            }
            self.waits.retain(|(_, missing)| !missing.is_empty());
        }

        fn add(&mut self, key: &[u8], delta: i64) -> Option<i64> {
            let old = match self.values.get(key) {
                None => 0,
                Some(text) => std::str::from_utf8(text).unwrap().parse::<i64>().ok()?,
            };
            self.values.insert(key.to_vec(), (old + delta).to_string().into_bytes());
            Some(old + delta)
        }

        fn handle(&mut self, id: ConnId, request: &Request<'_>) -> Option<Vec<(ConnId, Vec<u8>)>> {
            let mut sent = Vec::new();
            let waits = self.waits.iter().map(|wait| wait.0);
            let waits: Vec<_> = waits.chain(self.barriers.iter().map(|wait| wait.0)).collect();
            match request {
                Request::Set { key, value } => {
                    self.values.insert(key.to_vec(), value.to_vec());
                    self.arrive(key, false, &mut sent);
                }
                Request::Add { key, delta } => {
                    let sum = self.add(key, *delta)?;
                    self.arrive(key, false, &mut sent);
                    sent.push((id, sum.to_le_bytes().to_vec()));
                }
                Request::DeleteKey { key } => {
                    let was = i64::from(self.values.remove(*key).is_some());
                    sent.push((id, was.to_le_bytes().to_vec()));
                }
                Request::QueuePush { key, value } => {
                    self.queues.entry(key.to_vec()).or_default().push(value.to_vec());
                    self.arrive(key, true, &mut sent);
                }
                Request::QueuePop { key } => {
                    let queue = self.queues.entry(key.to_vec()).or_default();
                    let mut reply = (queue.len() as i64).to_le_bytes().to_vec();
                    if !queue.is_empty() {
                        put_blob(&mut reply, &queue.remove(0));
                    }
                    sent.push((id, reply));
                }
                Request::Wait { keys } => {
                    if waits.contains(&id) {
                        return None;
                    }
                    let missing: HashSet<_> = keys
                        .iter()
                        .filter(|key| !self.present(key))
                        .map(|key| key.to_vec())
                        .collect();
                    if missing.is_empty() {
                        sent.push((id, vec![WAIT_OVER]));
                    } else {
                        self.waits.push((id, missing));
                    }
                }
                Request::Barrier { key, world_size } => {
                    if waits.contains(&id) {
                        return None;
                    }
                    let arrived = self.add(key, 1)?;
                    self.arrive(key, false, &mut sent);
                    self.barriers.push((id, key.to_vec()));
                    if arrived >= *world_size {
                        let there = self.barriers.iter().filter(|wait| wait.1 == *key);
                        sent.extend(there.map(|wait| (wait.0, vec![WAIT_OVER])));
                        self.barriers.retain(|wait| wait.1 != *key);
                    }
                }
                Request::CancelWait => {
                    self.waits.retain(|wait| wait.0 != id);
                    self.barriers.retain(|wait| wait.0 != id);
                    sent.push((id, vec![WAIT_CANCELLED]));
                }
                other => unreachable!("{other:?} is not generated"),
            }
            Some(sent)
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Request(ConnId, Request<'static>),
        Reconnect(ConnId),
    }

    fn step() -> impl Strategy<Value = Step> {
        let key = || prop::sample::select(&KEYS[..]);
        let request = prop_oneof![
            (key(), prop::sample::select(vec![&b"7"[..], b"x"]))
                .prop_map(|(key, value)| Request::Set { key, value }),
            (key(), -2..3_i64).prop_map(|(key, delta)| Request::Add { key, delta }),
            key().prop_map(|key| Request::DeleteKey { key }),
            key().prop_map(|key| Request::QueuePush { key, value: b"item" }),
            key().prop_map(|key| Request::QueuePop { key }),
            prop::collection::vec(key(), 0..4).prop_map(|keys| Request::Wait { keys }),
            (key(), 1..4_i64).prop_map(|(key, world_size)| Request::Barrier { key, world_size }),
            Just(Request::CancelWait),
        ];
        prop_oneof![
            20 => (0..CONNS, request).prop_map(|(id, request)| Step::Request(id, request)),
            1 => (0..CONNS).prop_map(Step::Reconnect),
        ]
    }

    fn check_indexes(state: &State) {
        for (event, ids) in &state.waiting {
            assert!(!ids.is_empty());
            for id in ids {
                assert!(state.conns[id].missing.contains(event));
            }
        }
        let listed: usize = state.waiting.values().map(Vec::len).sum();
        let missed = || state.conns.values().flat_map(|conn| &conn.missing);
        assert_eq!(listed, missed().count());
        let waits: usize = missed().map(|event| wait_cost(event.key())).sum();
        assert_eq!(state.waits, waits);
        for key in state.values.keys() {
            let event = Condition::Key(key.to_vec());
            assert!(!state.waiting.contains_key(&event), "lost wake-up of {key:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn replies_equal_those_of_the_model(steps in prop::collection::vec(step(), 0..60)) {
            let (mut state, mut model) = (state(), Model::default());
            for step in steps {
                let id = match step {
                    Step::Reconnect(id) => id,
                    Step::Request(id, request) => {
                        let (got, want) =
                            (handle(&mut state, id, &request).ok(), model.handle(id, &request));
                        // A queue wakes the connection that waited longest, as in the model.
                        // Otherwise the order among different connections does not matter.
                        let sorted = |sent: Option<Vec<_>>| sent.map(|mut sent| {
                            sent.sort_by_key(|(id, _): &(ConnId, Vec<u8>)| *id);
                            sent
                        });
                        let (got, want) = (sorted(got), sorted(want));
                        prop_assert_eq!(&got, &want, "{:?} of {}", request, id);
                        if got.is_some() {
                            check_indexes(&state);
                            continue;
                        }
                        id
                    }
                };
                // A connection that violated the protocol is replaced; the test reuses its number.
                model.waits.retain(|wait| wait.0 != id);
                model.barriers.retain(|wait| wait.0 != id);
                state.disconnect(id);
                state.connect(id);
                handle(&mut state, id, &Request::Validate { magic: MAGIC }).unwrap();
                check_indexes(&state);
            }
        }
    }

    #[test]
    fn only_validated_connections_are_served() {
        let mut state = State::new();
        state.connect(1);
        assert!(state.admits(1, VALIDATE) && !state.admits(1, 13));
        let ping = Request::Ping { nonce: 1 };
        assert_eq!(handle(&mut state, 1, &ping), Err(ProtocolError::NotValidated));
        let bad = Request::Validate { magic: 1 };
        assert_eq!(handle(&mut state, 1, &bad), Err(ProtocolError::NotValidated));
        let good = Request::Validate { magic: MAGIC };
        assert_eq!(handle(&mut state, 1, &good), Ok(vec![]));
        assert_eq!(handle(&mut state, 1, &good), Err(ProtocolError::ValidatedTwice));
        assert!(handle(&mut state, 1, &ping).is_ok());
    }

    #[test]
    fn a_push_to_a_queue_does_not_end_a_later_wait_for_another_key() {
        // PyTorch's server leaves a woken waiter on the queue's list.
        let mut state = state();
        let wait = |key| Request::Wait { keys: vec![key] };
        let push = Request::QueuePush { key: b"q", value: b"1" };
        handle(&mut state, 0, &wait(b"q")).unwrap();
        assert_eq!(handle(&mut state, 1, &push).unwrap(), [(0, vec![WAIT_OVER])]);
        handle(&mut state, 0, &Request::QueuePop { key: b"q" }).unwrap();
        handle(&mut state, 0, &wait(b"other")).unwrap();
        assert_eq!(handle(&mut state, 1, &push).unwrap(), []);
    }

    #[test]
    fn a_wait_for_a_filled_queue_and_a_key_ends_with_the_key() {
        let mut state = state();
        handle(&mut state, 1, &Request::QueuePush { key: b"q", value: b"1" }).unwrap();
        handle(&mut state, 0, &Request::Wait { keys: vec![b"q", b"k"] }).unwrap();
        let set = Request::Set { key: b"k", value: b"" };
        assert_eq!(handle(&mut state, 1, &set).unwrap(), [(0, vec![WAIT_OVER])]);
    }

    #[test]
    fn long_and_short_values_are_sent_completely_and_in_order() {
        let mut state = state();
        let [short, long] = [vec![1; SHARED_FROM - 1], vec![2; SHARED_FROM]];
        for (key, value) in [(&b"a"[..], &short), (b"b", &long)] {
            handle(&mut state, 0, &Request::Set { key, value }).unwrap();
        }
        let mut pieces = Vec::new();
        let keys = vec![&b"a"[..], b"b", b"none", b"a"];
        let get = Request::MultiGet { keys };
        state
            .handle(1, &get, &mut |_, piece| {
                pieces.push((matches!(piece, Piece::Value(_)), piece.bytes().to_vec()));
            })
            .unwrap();
        let shared: Vec<_> = pieces.iter().map(|piece| piece.0).collect();
        assert_eq!(shared, [false, true, false]);
        let mut want = Vec::new();
        for value in [&short, &long, &Vec::new(), &short] {
            put_blob(&mut want, value);
        }
        assert_eq!(pieces.into_iter().flat_map(|piece| piece.1).collect::<Vec<_>>(), want);
    }
}
