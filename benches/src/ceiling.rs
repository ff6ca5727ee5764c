//! The ceiling for optimizers: an in-place loop that is limited by memory bandwidth.
//!
//! [`Stream`] has as many streams of f32 as an optimizer (gradient, weight, up to two moments),
//! reads and writes them like the optimizer, and computes only one product and one sum per value,
//! in the widest registers available. The streams start at different offsets in a page, like the
//! optimizers' state, so that they do not compete for the same cache sets. Gradient and weight are
//! in ordinary pages, like a caller's, the moments in huge pages, like our state.

#![expect(unsafe_code, reason = "instructions detected at run time; advice on memory")]

use std::hint::black_box;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;
use std::thread;

/// The memory accesses of an optimizer, per parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Gradient read, weight and one state read and written: 20 bytes.
    OneState,
    /// Gradient read, weight and two states read and written: 28 bytes.
    TwoStates,
    /// All gradients read once, then [`TwoStates`](Self::TwoStates): 32 bytes.
    CheckThenTwoStates,
    /// For each tensor: gradient and weight read, two states read and written, then the states
    /// read, the weight read and written: 40 bytes, some of them from a cache.
    TwoSweeps,
}

impl Pattern {
    /// Bytes read and written per parameter.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::OneState => 20,
            Self::TwoStates => 28,
            Self::CheckThenTwoStates => 32,
            Self::TwoSweeps => 40,
        }
    }
}

/// Streams as long as the given tensors together, with a share for each thread.
#[derive(Debug)]
pub struct Stream {
    pattern: Pattern,
    shares: Vec<Share>,
}

impl Stream {
    /// Creates streams for tensors of `counts` elements.
    #[must_use]
    pub fn new(pattern: Pattern, counts: &[usize], threads: usize) -> Self {
        let threads = threads.max(1);
        let share = |at| {
            let part = |count: &usize| count * (at + 1) / threads - count * at / threads;
            Share::new(counts.iter().map(part).collect())
        };
        Self { pattern, shares: (0..threads).map(share).collect() }
    }

    /// Runs one step.
    pub fn run(&mut self) {
        let pattern = self.pattern;
        let Some((own, others)) = self.shares.split_first_mut() else { return };
        thread::scope(|scope| {
            for share in others {
                scope.spawn(|| share.run(pattern));
            }
            own.run(pattern);
        });
    }
}

#[derive(Debug)]
struct Share {
    counts: Vec<usize>,
    /// Gradient, weight, two states; stream `i` starts `i` quarters of a page later in its page.
    streams: [Vec<f32>; 4],
}

impl Share {
    fn new(counts: Vec<usize>) -> Self {
        let count: usize = counts.iter().sum();
        // With these values no sum or product below becomes subnormal or infinite.
        let streams = std::array::from_fn(|i| {
            let mut stream = vec![0.0; count + i * QUARTER];
            if i >= 2 {
                advise_huge_pages(&mut stream);
            }
            stream.fill(1.0);
            stream
        });
        Self { counts, streams }
    }

    fn run(&mut self, pattern: Pattern) {
        let [g, p, m, v] = &mut self.streams;
        let (p, m, v) = (&mut p[QUARTER..], &mut m[2 * QUARTER..], &mut v[3 * QUARTER..]);
        // Hidden from the compiler, which could otherwise remove the products.
        let factor = black_box(0.5);
        match pattern {
            Pattern::OneState => widest(One { factor, g, p, m }),
            Pattern::TwoStates => widest(Two { factor, g, p, m, v }),
            Pattern::CheckThenTwoStates => {
                widest(Check { g });
                widest(Two { factor, g, p, m, v });
            }
            Pattern::TwoSweeps => {
                let mut from = 0;
                for count in &self.counts {
                    let range = from..from + count;
                    let (g, p) = (&g[range.clone()], &mut p[range.clone()]);
                    let (m, v) = (&mut m[range.clone()], &mut v[range]);
                    widest(First { factor, g, p, m, v });
                    widest(Second { factor, p, m, v });
                    from += count;
                }
            }
        }
    }
}

/// Advises the kernel to use huge pages for memory that has not been written yet.
fn advise_huge_pages(values: &mut [f32]) {
    #[cfg(target_os = "linux")]
    {
        let (start, bytes) = (values.as_ptr().addr(), size_of_val(values));
        let from = start.next_multiple_of(HUGE);
        let whole = (start + bytes).saturating_sub(from) / HUGE * HUGE;
        let address = values.as_mut_ptr().wrapping_byte_add(from - start);
        // SAFETY: whole pages of the slice, or none. The advice changes the mapping, not the
        // content; a failure changes nothing.
        let _ = unsafe { libc::madvise(address.cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

/// Elements of a quarter of a page.
const QUARTER: usize = 256;
/// Elements of a cache line.
const LINE: usize = 16;
/// Bytes of a huge page.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

/// A loop over slices, compiled for each instruction set. `run` must be `#[inline(always)]`.
trait Loop {
    fn run(self);
}

fn widest(work: impl Loop) {
    #[cfg(target_arch = "x86_64")]
    {
        // As in the crates that are measured against it: `benches/side_by_side/optim.sh --isa
        // avx2`.
        static IS_ALLOWED: LazyLock<bool> = LazyLock::new(|| {
            std::env::var_os("GRADSTACK_SIMD").is_none_or(|simd| simd == "avx512")
        });
        if *IS_ALLOWED
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the processor has AVX-512 F and VL, as checked above.
            return unsafe { with_avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as checked above.
            return unsafe { with_avx2(work) };
        }
    }
    work.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl")]
fn with_avx512(work: impl Loop) {
    work.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2(work: impl Loop) {
    work.run();
}

struct One<'a> {
    factor: f32,
    g: &'a [f32],
    p: &'a mut [f32],
    m: &'a mut [f32],
}

impl Loop for One<'_> {
    #[inline(always)]
    fn run(self) {
        for ((g, p), m) in self.g.iter().zip(self.p).zip(self.m) {
            *m = *m * self.factor + g;
            *p = *p * self.factor + *m;
        }
    }
}

struct Two<'a> {
    factor: f32,
    g: &'a [f32],
    p: &'a mut [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
}

impl Loop for Two<'_> {
    #[inline(always)]
    fn run(self) {
        for (((g, p), m), v) in self.g.iter().zip(self.p).zip(self.m).zip(self.v) {
            *m = *m * self.factor + g;
            *v = *v * self.factor + g;
            *p = *p * self.factor + *m;
        }
    }
}

/// Adds numbers, which are often in another core's cache and so prefetched.
pub(crate) fn add(to: &mut [f32], from: &[f32]) {
    widest(Add { to, from });
}

struct Add<'a> {
    to: &'a mut [f32],
    from: &'a [f32],
}

impl Loop for Add<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, from) in self.to.chunks_mut(LINE).zip(self.from.chunks(LINE)) {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                // SAFETY: a hint, whatever the address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(QUARTER).cast()) };
            }
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
}

struct Check<'a> {
    g: &'a [f32],
}

impl Loop for Check<'_> {
    #[inline(always)]
    fn run(self) {
        let mut largest = 0;
        for g in self.g {
            largest = largest.max(g.to_bits());
        }
        black_box(largest);
    }
}

struct First<'a> {
    factor: f32,
    g: &'a [f32],
    p: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
}

impl Loop for First<'_> {
    #[inline(always)]
    fn run(self) {
        for (((g, p), m), v) in self.g.iter().zip(self.p).zip(self.m).zip(self.v) {
            *m = *m * self.factor + g;
            *v = *v * self.factor + p;
        }
    }
}

struct Second<'a> {
    factor: f32,
    p: &'a mut [f32],
    m: &'a [f32],
    v: &'a [f32],
}

impl Loop for Second<'_> {
    #[inline(always)]
    fn run(self) {
        for ((p, m), v) in self.p.iter_mut().zip(self.m).zip(self.v) {
            *p = *p * 0.25 + (*m + *v) * (self.factor * 0.25);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_values_stay_finite_and_normal() {
        for pattern in
            [Pattern::OneState, Pattern::TwoStates, Pattern::CheckThenTwoStates, Pattern::TwoSweeps]
        {
            let mut stream = Stream::new(pattern, &[1000, 0, 7], 2);
            (0..300).for_each(|_| stream.run());
            let total: usize = stream.shares.iter().flat_map(|share| &share.counts).sum();
            assert_eq!(total, 1007);
            let values = stream.shares.iter().flat_map(|share| share.streams.iter().flatten());
            assert!(values.copied().all(|x| x.is_normal() && x < 100.0), "{pattern:?}");
        }
    }
}
