//! One rank's turn at one operation: comparing fingerprints, waiting, failing.
//!
//! Every rank sends its fingerprint to every other and keeps receives posted for two operations
//! ahead, since a peer that has all fingerprints of one operation may begin the next while this
//! rank still moves data. So fingerprints are never held up by data, and cost one message each way
//! per pair.

use std::time::{Duration, Instant};

use super::control::{Cause, Control, Letter};
use super::mesh::{Buffer, Trouble, Way};
use super::{Gloo, State};
use crate::{Error, Fingerprint, OpDesc, Place, Rank, Result};

/// How long a wait sleeps before it looks what peers have said.
const SLICE: Duration = Duration::from_millis(1);
/// How long data may follow a goodbye, or a reason a broken connection: they come by another way.
const GRACE: Duration = Duration::from_secs(1);

/// The end of its timeout, at most a twentieth of it, in which a rank no longer waits for data but
/// for what its peers report: whom they wait for.
const ASKING: Duration = Duration::from_millis(100);

const PRINT_SLOT: u64 = 2 << 56;
const PRINT_BYTES: usize = 8 * (1 + Fingerprint::WORDS);

/// An operation under way on this rank.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    pub(super) gloo: &'a Gloo,
    pub(super) op: &'a OpDesc,
    /// Its number, if all ranks meet at it.
    pub(super) seq: Option<u64>,
    /// For each step of a peer; the rest of what the caller gave is for asking who is missing.
    pub(super) timeout: Duration,
    asking: Duration,
}

impl<'a> Turn<'a> {
    pub(super) fn new(gloo: &'a Gloo, op: &'a OpDesc, timeout: Duration) -> Self {
        let asking = (timeout / 20).min(ASKING);
        Self { gloo, op, seq: None, timeout: timeout - asking, asking }
    }

    pub(super) fn rank(&self) -> Rank {
        self.gloo.rank
    }

    pub(super) fn world(&self) -> usize {
        self.gloo.world
    }

    /// The other ranks, from the next one round, so that not all go to the same one first.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |step| (rank + step) % world)
    }

    /// Meets all ranks at this operation and compares what they call.
    pub(super) fn enter(&mut self, state: &mut State) -> Result<()> {
        let seq = state.seq;
        state.seq += 1;
        self.seq = Some(seq);
        if let Some(cause) = self.gloo.control.look() {
            return Err(self.failure(cause, Duration::ZERO));
        }
        let own = self.op.fingerprint(seq, Place::Own).with_config(self.gloo.config_digest);
        let mut prints = vec![own; self.world()];
        if self.world() > 1 {
            self.swap_prints(state, &own, &mut prints)?;
        }
        match prints.iter().find_map(|print| own.difference(print)) {
            None => Ok(()),
            Some(field) => {
                let by_rank = prints.iter().map(ToString::to_string).enumerate().collect();
                Err(Error::Mismatch { op: self.name(), field, by_rank })
            }
        }
    }

    fn swap_prints(
        &self,
        state: &mut State,
        own: &Fingerprint,
        prints: &mut [Fingerprint],
    ) -> Result<()> {
        let State { own: letter, prints: posted, .. } = state;
        let letter = letter.as_mut().expect("a group of several ranks has one");
        let posted = &mut posted[(own.seq % 2) as usize];
        letter.write(&to_bytes(own));
        for peer in self.peers() {
            letter.start(Way::Send, peer, PRINT_SLOT).map_err(|why| self.broken(peer, why))?;
        }
        let mut missing: Vec<Rank> = self.peers().collect();
        while let Some(&peer) = missing.first() {
            let print = posted[peer].as_ref().expect("one for every peer");
            self.wait(print.buffer(), Way::Receive, peer, Duration::ZERO, &|| false, &|| {
                let absent = |late: &Rank| {
                    let print = posted[*late].as_ref().expect("one for every peer");
                    *late == peer
                        || !matches!(print.buffer().take(Way::Receive, Duration::ZERO), Ok(true))
                };
                let mut absent: Vec<Rank> = missing.iter().copied().filter(absent).collect();
                absent.sort_unstable();
                absent
            })?;
            prints[peer] = from_bytes(print.read());
            print.start(Way::Receive, peer, PRINT_SLOT).map_err(|why| self.broken(peer, why))?;
            missing.remove(0);
        }
        for peer in self.peers() {
            self.wait_one(letter.buffer(), Way::Send, peer)?;
        }
        Ok(())
    }

    /// Waits for a message to or from `peer`.
    pub(super) fn wait_one(&self, buffer: &Buffer<'_>, way: Way, peer: Rank) -> Result<()> {
        self.wait_unless(buffer, way, peer, &|| false).map(|_| ())
    }

    /// Waits for a message to or from `peer`; false if there is none once `instead` holds.
    pub(super) fn wait_unless(
        &self,
        buffer: &Buffer<'_>,
        way: Way,
        peer: Rank,
        instead: &dyn Fn() -> bool,
    ) -> Result<bool> {
        self.wait(buffer, way, peer, GRACE, instead, &|| vec![peer])
    }

    /// Waits for a message to or from `peer`, and for `grace` after its goodbye; false if there is
    /// none once `instead` holds. `missing` says who has not come when time is over; it is called
    /// once.
    fn wait(
        &self,
        buffer: &Buffer<'_>,
        way: Way,
        peer: Rank,
        grace: Duration,
        instead: &dyn Fn() -> bool,
        missing: &dyn Fn() -> Vec<Rank>,
    ) -> Result<bool> {
        let start = Instant::now();
        let mut goodbye = None;
        loop {
            // Before looking: what held before comes after what is waited for.
            let instead = instead();
            let slice = SLICE.min(self.timeout.saturating_sub(start.elapsed()));
            if buffer.take(way, slice).map_err(|why| self.broken(peer, why))? {
                return Ok(true);
            }
            if instead {
                return Ok(false);
            }
            let failure = self.look(peer, &mut goodbye, grace);
            if failure.is_none() && start.elapsed() < self.timeout {
                continue;
            }
            // Whoever failed or left may have done its part of this before.
            if matches!(buffer.take(way, Duration::ZERO), Ok(true)) {
                return Ok(true);
            }
            return Err(self.end(failure.as_ref(), start.elapsed(), missing));
        }
    }

    /// Why to wait for `peer` no longer.
    pub(super) fn look(
        &self,
        peer: Rank,
        goodbye: &mut Option<Instant>,
        grace: Duration,
    ) -> Option<Cause> {
        let control = &self.gloo.control;
        if let Some(cause) = control.look() {
            return Some(cause.clone());
        }
        let gone =
            control.is_gone(peer) && goodbye.get_or_insert_with(Instant::now).elapsed() >= grace;
        gone.then_some(Cause::Left { rank: peer })
    }

    /// Fails the group because a connection did. Why comes, if it does, by another one.
    pub(super) fn broken(&self, peer: Rank, why: Trouble) -> Error {
        let start = Instant::now();
        while start.elapsed() < GRACE {
            if let Some(cause) = self.look(peer, &mut None, Duration::ZERO) {
                return self.end(Some(&cause), start.elapsed(), &|| vec![peer]);
            }
            std::thread::sleep(SLICE);
        }
        let what = format!("{}: connection to rank {peer}", self.name());
        let text = why.text();
        let cause = Cause::Aborted { by: self.rank(), reason: format!("{what}: {text}") };
        self.fail_with(cause, Error::Io { what, text, kind: std::io::ErrorKind::BrokenPipe })
    }

    /// Ends a wait for `missing`, for a cause or because time is over.
    pub(super) fn end(
        &self,
        cause: Option<&Cause>,
        waited: Duration,
        missing: &dyn Fn() -> Vec<Rank>,
    ) -> Error {
        if let Some(cause) = cause
            && !matches!(cause, Cause::TimedOut { .. })
        {
            return self.failure(cause, waited);
        }
        let error = |missing| Error::Timeout { op: self.name(), waited, missing };
        let missing = missing();
        let reason = error(missing.clone()).to_string();
        let (control, start) = (&self.gloo.control, Instant::now());
        let (cause, missing) = control.report(missing, reason, self.asking);
        let waited = waited + start.elapsed();
        match cause {
            Cause::TimedOut { by, reason, .. } => {
                let (by, reason) = (*by, reason.clone());
                control.error(&Cause::TimedOut { by, missing, reason }, self.name(), waited)
            }
            cause => control.error(cause, self.name(), waited),
        }
    }

    /// The group's failure, as a rank tells it that was not waiting.
    pub(super) fn failure(&self, cause: &Cause, waited: Duration) -> Error {
        let control = &self.gloo.control;
        control.late_error(control.fail(cause.clone()), self.name(), waited)
    }

    /// Fails the group for a cause of this rank's own, whose error says more.
    pub(super) fn fail_with(&self, cause: Cause, error: Error) -> Error {
        self.gloo.control.fail(cause);
        error
    }

    /// For example `all_reduce #17 of group default`.
    pub(super) fn name(&self) -> String {
        let Gloo { name, .. } = self.gloo;
        match self.seq {
            Some(seq) => format!("{} #{seq} of group {name}", self.op.verb),
            None => format!("{} of group {name}", self.op.verb),
        }
    }
}

/// What a peer has entered the next operation of all ranks with, if it has.
pub(super) fn entered(state: &State, peer: Rank) -> Option<Fingerprint> {
    let print = state.prints[(state.seq % 2) as usize][peer].as_ref()?;
    print.buffer().has(Way::Receive).then(|| from_bytes(print.read()))
}

/// Receives for the fingerprints of the next two operations, and what to send one from.
pub(super) fn letters(
    control: &Control,
    rank: Rank,
    world: usize,
    state: &mut State,
) -> Result<(), Trouble> {
    let mesh = &control.mesh;
    for posted in &mut state.prints {
        for peer in (0..world).filter(|&peer| peer != rank) {
            let letter = Letter::new(mesh, PRINT_BYTES)?;
            letter.start(Way::Receive, peer, PRINT_SLOT)?;
            posted[peer] = Some(letter);
        }
    }
    state.own = Some(Letter::new(mesh, PRINT_BYTES)?);
    Ok(())
}

fn to_bytes(print: &Fingerprint) -> Vec<u8> {
    std::iter::once(print.seq).chain(print.words()).flat_map(u64::to_le_bytes).collect()
}

fn from_bytes(bytes: &[u8]) -> Fingerprint {
    let (words, _) = bytes.as_chunks();
    let word = |i: usize| u64::from_le_bytes(words[i]);
    Fingerprint::from_words(word(0), std::array::from_fn(|i| word(i + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, ReduceOp, Verb};

    #[test]
    fn a_fingerprint_arrives_as_it_was() {
        let op = Some(ReduceOp::pre_mul_sum(0.3));
        let op = OpDesc { verb: Verb::Reduce, dtype: DType::F64, op, root: Some(3), count: 12_345 };
        let print = op.fingerprint(1 << 40, Place::Own);
        let bytes = to_bytes(&print);
        assert_eq!(bytes.len(), PRINT_BYTES);
        assert_eq!(from_bytes(&bytes), print);
    }
}
