//! The connections that carry no data: what ranks call, and why they fail.
//!
//! Gloo has no abort and does not say who is missing, so every rank keeps a receive posted for a
//! note from every peer, over connections of their own that no data can hold up. A note is the last
//! thing a rank says: that it leaves, or why the group has failed. A connection that ends without
//! one is a death.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::mesh::{Buffer, Mesh, Trouble, Way};
use crate::span::Span;
use crate::{Error, Rank};

/// Why the group can do no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Cause {
    /// A rank's process ended.
    Died { rank: Rank, pid: u32 },
    /// A rank was needed after it had left.
    Left { rank: Rank },
    /// A rank gave the group up.
    Aborted { by: Rank, reason: String },
    /// A rank waited in vain.
    TimedOut { by: Rank, missing: Vec<Rank>, reason: String },
    /// A message was not what its receiver expected; what each of the two called.
    Mismatch { field: String, by_rank: Vec<(Rank, String)> },
}

/// The last a rank says to its peers.
#[derive(Debug, Serialize, Deserialize)]
enum Note {
    Leaving,
    Failed(Cause),
}

/// Memory of its own that messages of one length are sent from or received into.
#[derive(Debug)]
pub(super) struct Letter {
    // Freed first.
    buffer: Buffer<'static>,
    memory: Box<[u8]>,
}

impl Letter {
    pub(super) fn new(mesh: &Arc<Mesh>, len: usize) -> Result<Self, Trouble> {
        let mut memory = vec![0; len].into_boxed_slice();
        // SAFETY: the memory of the box does not move and is freed after the buffer; `write` and
        // `read` are called between messages.
        let span = unsafe { Span::new(memory.as_mut_ptr(), len) };
        Ok(Self { buffer: Buffer::new(mesh, span)?, memory })
    }

    /// Starts to send or receive it all.
    pub(super) fn start(&self, way: Way, peer: Rank, slot: u64) -> Result<(), Trouble> {
        self.buffer.start(way, peer, slot, (0, self.memory.len()))
    }

    pub(super) fn buffer(&self) -> &Buffer<'static> {
        &self.buffer
    }

    /// Puts in `bytes` and zeros up to the length. Nothing of it is being sent or received.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.memory.fill(0);
        self.memory[..bytes.len()].copy_from_slice(bytes);
    }

    /// What is in it. Nothing of it is being received.
    pub(super) fn read(&self) -> &[u8] {
        &self.memory
    }
}

/// This rank's end of the connections for notes.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) mesh: Arc<Mesh>,
    rank: Rank,
    pids: Vec<u32>,
    /// A receive for the note of every peer that has not said one.
    inbox: Mutex<Vec<Option<Letter>>>,
    /// For this rank's note, until it is said.
    outbox: Mutex<Outbox>,
    gone: Vec<AtomicBool>,
    /// Whom each rank, this one too, was waiting for when time was over.
    reports: Mutex<BTreeMap<Rank, Vec<Rank>>>,
    /// The first there was.
    cause: OnceLock<Cause>,
}

#[derive(Debug)]
struct Outbox {
    letter: Letter,
    said: bool,
    /// Sends to wait for.
    started: usize,
}

impl Control {
    /// Posts the receives; the mesh is connected.
    pub(super) fn new(mesh: Arc<Mesh>, rank: Rank, pids: Vec<u32>) -> Result<Self, Trouble> {
        let mut inbox = Vec::with_capacity(pids.len());
        for peer in 0..pids.len() {
            inbox.push(None);
            if peer != rank {
                let letter = Letter::new(&mesh, NOTE_BYTES)?;
                letter.start(Way::Receive, peer, NOTE_SLOT)?;
                inbox[peer] = Some(letter);
            }
        }
        let outbox = Outbox { letter: Letter::new(&mesh, NOTE_BYTES)?, said: false, started: 0 };
        Ok(Self {
            rank,
            gone: pids.iter().map(|_| AtomicBool::new(false)).collect(),
            pids,
            inbox: Mutex::new(inbox),
            outbox: Mutex::new(outbox),
            reports: Mutex::default(),
            cause: OnceLock::new(),
            mesh,
        })
    }

    /// Reads what peers have said; returns why the group has failed, if it has. Does not wait.
    pub(super) fn look(&self) -> Option<&Cause> {
        if let Some(cause) = self.cause.get() {
            return Some(cause);
        }
        self.listen();
        self.cause.get()
    }

    /// Reads what peers have said.
    fn listen(&self) {
        for (peer, place) in self.inbox.lock().iter_mut().enumerate() {
            let Some(letter) = place else { continue };
            match letter.buffer().take(Way::Receive, Duration::ZERO) {
                Ok(false) => {}
                Ok(true) => {
                    self.hear(peer, letter.read());
                    *place = None;
                }
                Err(_) => {
                    self.cause.get_or_init(|| Cause::Died { rank: peer, pid: self.pids[peer] });
                    *place = None;
                }
            }
        }
    }

    fn hear(&self, peer: Rank, bytes: &[u8]) {
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        match serde_json::from_slice(&bytes[..end]) {
            // Relaxed: nothing else is published with it.
            Ok(Note::Leaving) => self.gone[peer].store(true, Ordering::Relaxed),
            Ok(Note::Failed(cause)) => {
                if let Cause::TimedOut { by, missing, .. } = &cause
                    && *by == peer
                {
                    self.reports.lock().insert(peer, missing.clone());
                }
                self.cause.get_or_init(|| cause);
            }
            Err(_) => {
                let reason = "it said something that is no note".into();
                self.cause.get_or_init(|| Cause::Aborted { by: peer, reason });
            }
        }
    }

    /// Whether the peer has left in order, as far as `look` knows.
    pub(super) fn is_gone(&self, peer: Rank) -> bool {
        self.gone[peer].load(Ordering::Relaxed)
    }

    /// Fails the group, unless it has failed already, and tells the peers. Does not wait for them.
    pub(super) fn fail(&self, cause: Cause) -> &Cause {
        let cause = self.cause.get_or_init(|| cause);
        self.say(&Note::Failed(cause.clone()));
        cause
    }

    /// Fails the group because time is over on some rank, tells the peers whom this one waits for,
    /// and hears from those who are there whom they wait for: who waits is not missing, however
    /// long others wait for it. Takes as long as `patience` if it is not clear before. Returns whose
    /// note it was, and who is missing.
    pub(super) fn report(
        &self,
        missing: Vec<Rank>,
        reason: String,
        patience: Duration,
    ) -> (&Cause, Vec<Rank>) {
        let own = Cause::TimedOut { by: self.rank, missing: missing.clone(), reason };
        let cause = self.cause.get_or_init(|| own.clone());
        self.reports.lock().insert(self.rank, missing.clone());
        self.say(&Note::Failed(own));
        let deadline = Instant::now() + patience;
        loop {
            self.listen();
            let (culprits, complete) = self.culprits();
            if complete || Instant::now() >= deadline {
                // All wait for one another: each names whom it waits for.
                return (cause, if culprits.is_empty() { missing } else { culprits });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Who is waited for and does not wait; and whether nobody else can turn out to be waiting: of
    /// two who are missing, one may wait for the other and be about to say so.
    fn culprits(&self) -> (Vec<Rank>, bool) {
        let reports = self.reports.lock();
        let mut culprits: Vec<Rank> = reports.values().flatten().copied().collect();
        culprits.sort_unstable();
        culprits.dedup();
        culprits.retain(|rank| !reports.contains_key(rank));
        let complete = culprits.len() <= 1 && reports.len() + culprits.len() >= self.pids.len();
        (culprits, complete)
    }

    fn say(&self, note: &Note) {
        let mut outbox = self.outbox.lock();
        if outbox.said {
            return;
        }
        outbox.said = true;
        outbox.letter.write(&encode(note));
        for peer in (0..self.pids.len()).filter(|&peer| peer != self.rank) {
            // Who cannot be told sees the connection end.
            if outbox.letter.start(Way::Send, peer, NOTE_SLOT).is_ok() {
                outbox.started += 1;
            }
        }
    }

    /// Says goodbye, unless this rank has said why it failed, and gives both time to arrive: a
    /// connection closed while a peer still sends drops what has not been read at its other end.
    pub(super) fn leave(&self) {
        self.say(&Note::Leaving);
        let deadline = Instant::now() + GOODBYE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let outbox = self.outbox.lock();
        for _ in 0..outbox.started {
            let sent = outbox.letter.buffer().take(Way::Send, left());
            if !matches!(sent, Ok(true)) {
                break;
            }
        }
        for letter in self.inbox.lock().iter().flatten() {
            // Whatever it is: it is the last from there.
            drop(letter.buffer().take(Way::Receive, left()));
        }
    }

    /// The group's failure, as the operation `op` of this rank tells it.
    pub(super) fn error(&self, cause: &Cause, op: String, waited: Duration) -> Error {
        match cause.clone() {
            Cause::Died { rank, pid } => Error::PeerDied { op, rank, pid },
            Cause::Left { rank } => {
                Error::Aborted { by: rank, reason: format!("it left the group before {op}") }
            }
            Cause::Aborted { by, reason } => Error::Aborted { by, reason },
            // For the rank that came too late, the others have given up.
            Cause::TimedOut { by, missing, reason } if missing.contains(&self.rank) => {
                Error::Aborted { by, reason }
            }
            Cause::TimedOut { missing, .. } => Error::Timeout { op, waited, missing },
            Cause::Mismatch { field, by_rank } => {
                let known = ["verb", "dtype", "count"].into_iter().find(|known| *known == field);
                Error::Mismatch { op, field: known.unwrap_or("seq"), by_rank }
            }
        }
    }

    /// `error` for a rank that was not waiting when others ran out of time.
    pub(super) fn late_error(&self, cause: &Cause, op: String, waited: Duration) -> Error {
        self.listen();
        let mut cause = cause.clone();
        if let Cause::TimedOut { missing, .. } = &mut cause {
            let (culprits, _) = self.culprits();
            if !culprits.is_empty() {
                *missing = culprits;
            }
        }
        self.error(&cause, op, waited)
    }
}

/// A note in at most `NOTE_BYTES`.
fn encode(note: &Note) -> Vec<u8> {
    let json = |note| serde_json::to_vec(note).expect("a note is plain numbers and strings");
    let bytes = json(note);
    if bytes.len() <= NOTE_BYTES {
        return bytes;
    }
    // Six bytes for each of 320 and for each of 300 ranks, and the names.
    json(&match note {
        Note::Leaving => Note::Leaving,
        Note::Failed(Cause::Aborted { by, reason }) => {
            Note::Failed(Cause::Aborted { by: *by, reason: shorten(reason) })
        }
        Note::Failed(Cause::TimedOut { by, missing, reason }) => {
            let missing = missing.iter().copied().take(300).collect();
            Note::Failed(Cause::TimedOut { by: *by, missing, reason: shorten(reason) })
        }
        Note::Failed(cause) => Note::Failed(cause.clone()),
    })
}

fn shorten(text: &str) -> String {
    text[..text.floor_char_boundary(320)].to_owned()
}

const NOTE_BYTES: usize = 4096;
const NOTE_SLOT: u64 = 1 << 56;
/// How long a goodbye may take.
const GOODBYE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_fits_whatever_the_reason() {
        let reasons = [String::new(), "\u{1}".repeat(10_000), "ä".repeat(3000), "x".repeat(5000)];
        for reason in reasons {
            let missing = (700..1024).collect();
            let causes = [
                Cause::Aborted { by: 3, reason: reason.clone() },
                Cause::TimedOut { by: 1000, missing, reason: reason.clone() },
            ];
            for cause in causes {
                let bytes = encode(&Note::Failed(cause.clone()));
                assert!(bytes.len() <= NOTE_BYTES, "{}", bytes.len());
                let Ok(Note::Failed(read)) = serde_json::from_slice(&bytes) else { panic!() };
                if reason.is_empty() {
                    assert_eq!(read, cause);
                }
            }
        }
    }
}
