//! The flags of the shared segment as loom sees them, and what must hold of them.
//!
//! Only built with `--cfg loom`. A model has the mapping's bytes, but in the place of each word of the
//! layout an atomic of loom's, shared by all mappings of the model; and a futex made of a lock and
//! a condition variable, which sleeps without a time limit, so that a lost wake-up is a deadlock.
//! Everything above that is the code that ships: [`Segment`](super::segment::Segment),
//! [`Turn`](super::turn::Turn) and [`Host`](super::Host).
//!
//! Not modelled: data in stages and slots, which follow the same counters as the fingerprints do.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::sys::Mapping;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, lock, wait};

/// The words of a mapping, each as a whole and as halves; a rank uses it one way.
#[derive(Debug)]
pub(super) struct Words(Vec<OnceLock<(AtomicU64, AtomicU32)>>);

impl Words {
    pub(super) fn new(len: usize) -> Arc<Self> {
        Arc::new(Self((0..len / 8).map(|_| OnceLock::new()).collect()))
    }

    /// Makes the words of an area: loom wants that done before there is a second thread.
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

    pub(super) fn words<const N: usize>(&self, offset: usize) -> [&AtomicU64; N] {
        std::array::from_fn(|i| self.word(offset + 8 * i))
    }

    pub(super) fn half_word(&self, offset: usize) -> &AtomicU32 {
        &self.words.at(offset).1
    }
}

/// The kernel's side of futexes.
#[derive(Debug, Default)]
struct Kernel {
    lock: Mutex<()>,
    /// Who sleeps on which address.
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
    // The lock orders this look, as the kernel's does; of the word it needs no more than its value.
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
    use super::super::segment::{Counter, Poison, Segment};
    use super::super::turn::Who;
    use super::super::{DEFAULT_WAIT, Host};
    use super::*;
    use crate::sync::thread;
    use crate::{BufferLocation, DType, Error, GroupOptions, OpDesc, Verb};

    /// Every order of events with up to so many preemptions.
    fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 10_000;
        builder.check(body);
    }

    fn hosts(world: usize) -> Vec<Host> {
        let options = GroupOptions::default().with_timeout(Duration::MAX);
        let segments = Segment::of_model(world).unwrap().into_iter().enumerate();
        let host = |(rank, segment)| Host::new(Arc::new(segment), rank, &options, 0, None).unwrap();
        segments.map(host).collect()
    }

    fn pair() -> [Host; 2] {
        hosts(2).try_into().unwrap()
    }

    /// Both wake, and each reads the other's fingerprint of this operation, not of another.
    #[test]
    fn ranks_that_meet_wake_each_other_and_read_what_was_called() {
        for (rounds, preemptions) in [(1, 5), (3, 3)] {
            model(preemptions, move || {
                let [one, two] = pair();
                let meet = move |host: &Host| (0..rounds).try_for_each(|_| host.meet());
                let thread = thread::spawn(move || {
                    meet(&two).unwrap();
                    // To be dropped after the other is done, which is another model.
                    two
                });
                meet(&one).unwrap();
                drop((thread.join().unwrap(), one));
            });
        }
    }

    /// A third rank rings and sleeps beside the two.
    #[test]
    fn three_ranks_that_meet_wake_one_another() {
        model(2, || {
            let mut ranks = hosts(3);
            let meet = |host: Host| {
                host.meet().unwrap();
                host
            };
            let one = ranks.remove(0);
            let others: Vec<_> =
                ranks.into_iter().map(|host| thread::spawn(move || meet(host))).collect();
            let one = meet(one);
            let others: Vec<_> = others.into_iter().map(|rank| rank.join().unwrap()).collect();
            drop((one, others));
        });
    }

    #[test]
    fn whoever_waits_for_a_counter_wakes() {
        model(3, || {
            let [one, two] = pair();
            let op =
                OpDesc { verb: Verb::Barrier, dtype: DType::U8, op: None, root: None, count: 0 };
            let thread = thread::spawn(move || {
                let mut state = two.state.lock();
                two.turn(&mut state, &op, BufferLocation::Private, DEFAULT_WAIT)
                    .publish(Counter::Staged, 1);
                drop(state);
                two
            });
            let mut state = one.state.lock();
            let turn = one.turn(&mut state, &op, BufferLocation::Private, DEFAULT_WAIT);
            turn.wait_for(Who::One(1), Counter::Staged, 1).unwrap();
            drop(state);
            drop((thread.join().unwrap(), one));
        });
    }

    #[test]
    fn an_abort_wakes_whoever_sleeps_and_its_reason_is_complete() {
        model(3, || {
            let [one, two] = pair();
            let thread = thread::spawn(move || {
                super::super::Backend::abort(&two, "enough");
                two
            });
            let error = one.meet().unwrap_err();
            assert!(matches!(&error, Error::Aborted { by: 1, reason } if reason == "enough"));
            drop((thread.join().unwrap(), one));
        });
    }

    #[test]
    fn a_rank_that_leaves_wakes_whoever_sleeps() {
        model(3, || {
            let [one, two] = pair();
            let thread = thread::spawn(move || drop(two));
            let error = one.meet().unwrap_err();
            assert!(matches!(&error, Error::Aborted { by: 1, .. }));
            thread.join().unwrap();
        });
    }

    #[test]
    fn of_two_failures_all_ranks_see_the_first() {
        model(3, || {
            let [one, two] = pair();
            let thread = thread::spawn(move || {
                two.segment.set_poison(Poison::Died { rank: 0, pid: 7 });
                (two.segment.poison(), two)
            });
            one.segment.set_poison(Poison::Left { rank: 1 });
            let seen = one.segment.poison();
            let (others, two) = thread.join().unwrap();
            assert!(seen.is_some());
            assert_eq!(seen, others);
            drop((one, two));
        });
    }
}
