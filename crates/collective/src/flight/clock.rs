//! A clock that is cheaper to read than [`Instant`], for the flight recorder, which is always on.

#![expect(unsafe_code, reason = "reads the processor's counter")]

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// A clock and the time of its creation. Readings on different threads may differ by some
/// nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// Whether the processor has a constant-rate counter that never stops (invariant TSC).
    counter: bool,
    birth: Instant,
    birth_ticks: u64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let counter = has_counter();
        Self { counter, birth: Instant::now(), birth_ticks: ticks(counter) }
    }

    /// Returns the current time in ticks, the unit of [`since_birth`](Self::since_birth).
    pub(crate) fn ticks(&self) -> u64 {
        ticks(self.counter)
    }

    /// Returns a function from ticks to the time since the clock's creation. The rate is the number
    /// of ticks so far divided by the elapsed time.
    pub(crate) fn since_birth(&self) -> impl Fn(u64) -> Duration + use<> {
        let ticks = self.ticks().saturating_sub(self.birth_ticks);
        let time = self.birth.elapsed();
        let (birth, rate) = (self.birth_ticks, time.as_secs_f64() / (ticks.max(1) as f64));
        let time = move |ticks: u64| Duration::try_from_secs_f64(ticks as f64 * rate);
        move |at| time(at.saturating_sub(birth)).unwrap_or(Duration::MAX)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_counter() -> bool {
    use std::arch::x86_64::__cpuid;
    // Leaf 0x8000_0007, bit 8 of EDX: "invariant TSC".
    __cpuid(0x8000_0000).eax >= 0x8000_0007 && __cpuid(0x8000_0007).edx >> 8 & 1 != 0
}

#[cfg(target_arch = "x86_64")]
fn read_counter() -> u64 {
    // SAFETY: every x86-64 processor has it, and Linux lets programs read it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn has_counter() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn read_counter() -> u64 {
    unreachable!("`has_counter` is false on this architecture")
}

fn ticks(counter: bool) -> u64 {
    if counter {
        return read_counter();
    }
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_clocks_measure_elapsed_time() {
        for counter in [has_counter(), false] {
            let (birth_ticks, birth) = undisturbed(|| ticks(counter));
            let clock = Clock { counter, birth, birth_ticks };
            let (before, start) = undisturbed(|| clock.ticks());
            std::thread::sleep(Duration::from_millis(20));
            let (after, end) = undisturbed(|| clock.ticks());
            let (since, _) = undisturbed(|| clock.since_birth());
            let (measured, took) = (since(after) - since(before), end - start);
            assert!(measured < took * 2 && took < measured * 2, "{measured:?} instead of {took:?}");
            assert_eq!(since(0), Duration::ZERO);
        }
    }

    /// Migrating a virtual machine may set its counter back.
    #[test]
    fn a_counter_that_steps_back_does_not_panic() {
        let now = Instant::now();
        let birth = now.checked_sub(Duration::from_secs(9)).unwrap_or(now);
        for birth_ticks in [u64::MAX, 1 << 63] {
            let since = Clock { counter: false, birth, birth_ticks }.since_birth();
            assert_eq!(since(0), Duration::ZERO);
            since(u64::MAX);
        }
    }

    /// Returns the result of `read` and the time of reading; retries if this thread was preempted
    /// between the two.
    fn undisturbed<T>(read: impl Fn() -> T) -> (T, Instant) {
        loop {
            let (start, result, end) = (Instant::now(), read(), Instant::now());
            if end - start < Duration::from_millis(1) {
                return (result, end);
            }
        }
    }
}
