//! The least time for an all-reduce of ordinary buffers by two ranks on one machine.
//!
//! A rank cannot read the other's ordinary buffer, so each copies to memory that both can read,
//! waits, and adds what the other has copied. [`Exchange`] does only this, by two threads: no
//! group, no checks, no timeouts. Cache lines of the copies go to the other core to be read and
//! come back to be written again, and that is most of the time. With more memory for copies, so
//! that they come back from a larger cache, it takes longer.

#![expect(unsafe_code, reason = "memory that two threads use in turn")]

use std::cell::UnsafeCell;
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use collective::copy_slice;

use crate::ceiling::add;

/// How two ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Each copies all of its numbers and computes all sums.
    Whole,
    /// Each copies one half of its numbers, then computes and copies the sums of the other half.
    Halves,
}

impl Exchange {
    /// The mean time of an all-reduce of `count` numbers, in `calls` of them.
    #[must_use]
    pub fn time(self, count: usize, calls: u32) -> Duration {
        let run = |rank: &Rank<'_>| {
            let mut numbers = vec![0.0; count];
            self.all_reduce(rank, &mut numbers);
            let start = Instant::now();
            (0..calls).for_each(|_| self.all_reduce(rank, black_box(&mut numbers)));
            start.elapsed() / calls.max(1)
        };
        both(run)[0]
    }

    fn all_reduce(self, rank: &Rank<'_>, numbers: &mut [f32]) {
        if self == Self::Whole {
            // A chunk is copied before the one before it is added, so that no rank waits for long.
            let mut copied = numbers.len().min(CHUNK);
            rank.copy(&numbers[..copied]);
            for start in (0..numbers.len()).step_by(CHUNK) {
                let next = numbers.len().min(copied + CHUNK);
                if copied < next {
                    rank.copy(&numbers[copied..next]);
                }
                rank.with_copy(|other| add(&mut numbers[start..copied], other));
                copied = next;
            }
            return;
        }
        for chunk in numbers.chunks_mut(CHUNK) {
            let (first, second) = chunk.split_at_mut(chunk.len() / 2);
            let (own, others) = if rank.is_first { (first, second) } else { (second, first) };
            rank.copy(others);
            rank.with_copy(|other| add(own, other));
            rank.copy(own);
            rank.with_copy(|sums| copy_slice(others, &sums[..others.len()]));
        }
    }
}

/// Runs two ranks at once.
fn both<T: Send>(run: impl Fn(&Rank<'_>) -> T + Sync) -> [T; 2] {
    let [one, other] = [Copies::new(), Copies::new()];
    thread::scope(|scope| {
        let second = scope.spawn(|| run(&Rank::new(false, &other, &one)));
        [run(&Rank::new(true, &one, &other)), second.join().expect("the other rank runs")]
    })
}

struct Rank<'a> {
    is_first: bool,
    own: &'a Copies,
    other: &'a Copies,
    /// Copies that this rank has read.
    read: AtomicUsize,
}

impl<'a> Rank<'a> {
    const fn new(is_first: bool, own: &'a Copies, other: &'a Copies) -> Self {
        Self { is_first, own, other, read: AtomicUsize::new(0) }
    }

    fn copy(&self, numbers: &[f32]) {
        let count = self.own.written.load(Ordering::Relaxed);
        // SAFETY: see `Copies`. Only this rank writes, on one thread.
        let target = unsafe { &mut *self.own.copies[count % COPIES].get() };
        copy_slice(&mut target[..numbers.len()], numbers);
        self.own.written.store(count + 1, Ordering::Release);
    }

    /// Waits for the other rank's next copy.
    fn with_copy(&self, read: impl FnOnce(&[f32])) {
        let count = self.read.fetch_add(1, Ordering::Relaxed);
        while self.other.written.load(Ordering::Acquire) <= count {
            spin_loop();
        }
        // SAFETY: see `Copies`.
        read(unsafe { &*self.other.copies[count % COPIES].get() });
    }
}

/// Memory that one rank writes and the other reads.
struct Copies {
    copies: [UnsafeCell<Vec<f32>>; COPIES],
    written: AtomicUsize,
}

// SAFETY: a copy is read after `written` has counted it, and later written again: before a rank
// writes copy `n`, it has read the other's copy `n - 2`, before which the other had read copy
// `n - 4`, which was in the same place.
unsafe impl Sync for Copies {}

impl Copies {
    fn new() -> Self {
        let copies = std::array::from_fn(|_| UnsafeCell::new(vec![0.0; CHUNK]));
        Self { copies, written: AtomicUsize::new(0) }
    }
}

/// Numbers; 256 KiB.
const CHUNK: usize = 1 << 16;
const COPIES: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ranks_get_the_sums() {
        for how in [Exchange::Whole, Exchange::Halves] {
            for count in [0, 1, 2, 1001, CHUNK, 9 * CHUNK + 3] {
                let [one, other] = both(|rank| {
                    let scale = if rank.is_first { 1.0 } else { 100.0 };
                    let mut numbers: Vec<f32> =
                        (0..count).map(|i| scale * (i % 100) as f32).collect();
                    (0..3).for_each(|_| how.all_reduce(rank, &mut numbers));
                    numbers
                });
                assert_eq!(one, other);
                let sum = |i: usize| (4 * 101 * (i % 100)) as f32;
                assert!(one.iter().enumerate().all(|(i, x)| *x == sum(i)), "{how:?} {count}");
            }
        }
    }
}
