//! Loom models of the shared segment's flags, counters and futexes.
//!
//! Built only with `--cfg loom`. A model has a real mapping, but replaces each word of the layout
//! by a loom atomic that all mappings of the model share. A futex is a lock and a condition
//! variable, without timeouts, so that a lost wake-up is a deadlock. All code above that is the
//! code that ships: [`Segment`](super::segment::Segment), [`Call`](super::call::Call) and
//! [`Host`](super::Host).
//!
//! Not modelled: data in stages and slots, which are published like the fingerprints.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::sys::Mapping;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, lock, wait};

/// The words of a mapping, each as a 64-bit and a 32-bit atomic, of which only one is used.
#[derive(Debug)]
pub(super) struct Words(Vec<OnceLock<(AtomicU64, AtomicU32)>>);

impl Words {
    pub(super) fn new(len: usize) -> Arc<Self> {
        Arc::new(Self((0..len / 8).map(|_| OnceLock::new()).collect()))
    }

    /// Creates the words of an area; loom requires that before there is a second thread.
    pub(super) fn make(&self, start: usize, bytes: usize) {
        (start..start + bytes).step_by(8).for_each(|at| {
            self.at(at);
        });
    }

    fn at(&self, offset: usize) -> &(AtomicU64, AtomicU32) {
        assert!(offset.is_multiple_of(8), "a word of the segment");
        self.0[offset / 8].get_or_init(|| (AtomicU64::new(0), AtomicU32::new(0)))
    }
}

impl Mapping {
    pub(in crate::backend) fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words.at(offset).0
    }

    pub(super) fn half_word(&self, offset: usize) -> &AtomicU32 {
        &self.words.at(offset).1
    }
}

/// The kernel's part of futexes.
#[derive(Debug, Default)]
struct Kernel {
    lock: Mutex<()>,
    /// Sleepers by address.
    sleepers: parking_lot::Mutex<HashMap<usize, Arc<Condvar>>>,
}

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel::default();
}

impl Kernel {
    fn sleepers(&self, word: &AtomicU32) -> Arc<Condvar> {
        let address = std::ptr::from_ref(word).addr();
        Arc::clone(self.sleepers.lock().entry(address).or_default())
    }
}

pub(super) fn futex_wait(word: &AtomicU32, value: u32, _: Duration) {
    let sleepers = KERNEL.sleepers(word);
    let guard = lock(&KERNEL.lock);
    // Relaxed: the lock orders this load, as the kernel's does.
    if word.load(Ordering::Relaxed) == value {
        drop(wait(&sleepers, guard));
    }
}

pub(super) fn futex_wake(word: &AtomicU32) {
    let sleepers = KERNEL.sleepers(word);
    let guard = lock(&KERNEL.lock);
    sleepers.notify_all();
    drop(guard);
}

#[cfg(test)]
mod loom_models {
    use super::super::segment::{Counter, Segment};
    use super::super::{DEFAULT_WAIT, Host};
    use super::*;
    use crate::backend::failure::{Cause, Failure};
    use crate::sync::thread;
    use crate::{BufferLocation, DType, Error, GroupOptions, OpDesc, Verb};

    /// Explores all interleavings with up to `preemptions` preemptions.
    fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 10_000;
        builder.check(body);
    }

    fn hosts(world: usize) -> Vec<Host> {
        let options = GroupOptions::default().with_timeout(Duration::MAX);
        let segments = Segment::for_model(world).unwrap().into_iter().enumerate();
        let host = |(rank, segment)| Host::new(Arc::new(segment), rank, &options, 0, None).unwrap();
        segments.map(host).collect()
    }

    fn pair() -> [Host; 2] {
        hosts(2).try_into().unwrap()
    }

    /// Both wake, and each reads the other's fingerprint of this operation, not of another.
    #[test]
    fn two_ranks_in_a_barrier_wake_each_other_and_read_the_fingerprints() {
        for (rounds, preemptions) in [(1, 5), (3, 3)] {
            model(preemptions, move || {
                let [one, two] = pair();
                let barriers = move |host: &Host| (0..rounds).try_for_each(|_| host.barrier());
                let thread = thread::spawn(move || {
                    barriers(&two).unwrap();
                    // Dropped after the other rank is done; leaving is another model.
                    two
                });
                barriers(&one).unwrap();
                drop((thread.join().unwrap(), one));
            });
        }
    }

    #[test]
    fn three_ranks_in_a_barrier_wake_each_other() {
        model(2, || {
            let mut ranks = hosts(3);
            let barrier = |host: Host| {
                host.barrier().unwrap();
                host
            };
            let one = ranks.remove(0);
            let others: Vec<_> =
                ranks.into_iter().map(|host| thread::spawn(move || barrier(host))).collect();
            let one = barrier(one);
            let others: Vec<_> = others.into_iter().map(|rank| rank.join().unwrap()).collect();
            drop((one, others));
        });
    }

    #[test]
    fn publishing_a_counter_wakes_its_waiter() {
        model(3, || {
            let [one, two] = pair();
            let op =
                OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
            let thread = thread::spawn(move || {
                let mut state = two.state.lock();
                two.call(&mut state, &op, BufferLocation::Private, DEFAULT_WAIT)
                    .publish(Counter::Staged, 1);
                drop(state);
                two
            });
            let mut state = one.state.lock();
            let call = one.call(&mut state, &op, BufferLocation::Private, DEFAULT_WAIT);
            call.wait_for(1..2, Counter::Staged, 1).unwrap();
            drop(state);
            drop((thread.join().unwrap(), one));
        });
    }

    #[test]
    fn an_abort_wakes_a_sleeper_which_reads_the_whole_reason() {
        model(3, || {
            let [one, two] = pair();
            let thread = thread::spawn(move || {
                crate::backend::Backend::abort(&two, "enough");
                two
            });
            let error = one.barrier().unwrap_err();
            assert!(matches!(&error, Error::Aborted { by: 1, reason } if reason == "enough"));
            drop((thread.join().unwrap(), one));
        });
    }

    #[test]
    fn a_rank_that_leaves_wakes_a_sleeper() {
        model(3, || {
            let [one, two] = pair();
            let thread = thread::spawn(move || drop(two));
            let error = one.barrier().unwrap_err();
            assert!(matches!(&error, Error::Aborted { by: 1, .. }));
            thread.join().unwrap();
        });
    }

    #[test]
    fn all_ranks_see_the_first_of_two_failures() {
        model(3, || {
            let [one, two] = pair();
            let thread = thread::spawn(move || {
                let cause = Cause::Died { rank: 0, pid: 7, how: None };
                two.segment.fail(1, &Failure { by: 1, cause });
                (two.segment.failure(), two)
            });
            let cause = Cause::Aborted { reason: "enough".into() };
            one.segment.fail(0, &Failure { by: 0, cause });
            let seen = one.segment.failure();
            let (others, two) = thread.join().unwrap();
            assert!(seen.is_some());
            assert_eq!(seen, others);
            drop((one, two));
        });
    }
}
