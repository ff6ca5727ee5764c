//! The slow and obvious reference: the input of every rank, and the result of every operation.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock};

use collective::{Element, F8E4M3, F8E5M2, ReduceOp};
use half::{bf16, f16};

use crate::common::Random;

/// A type of the reference.
pub(crate) trait Number: Element {
    /// Any bits, infinities and NaN among them.
    fn any(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn reduce(op: ReduceOp, ranks: &[Self]) -> Self;
}

/// The low bytes of a number. No closures here and below: their calls are slow under
/// AddressSanitizer.
fn low<const N: usize>(bits: u64) -> [u8; N] {
    *bits.to_le_bytes().first_chunk().unwrap()
}

/// With `single` all steps are computed in f32.
fn round(x: f64, single: bool) -> f64 {
    if single { f64::from(x as f32) } else { x }
}

fn scaled(op: ReduceOp, x: f64, single: bool) -> f64 {
    match op {
        ReduceOp::PreMulSum(factor) => round(x * round(factor.get(), single), single),
        _ => x,
    }
}

fn reduce_two(op: ReduceOp, acc: f64, x: f64, single: bool) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => round(acc + x, single),
        ReduceOp::Product => round(acc * x, single),
        ReduceOp::Min | ReduceOp::Max if acc.is_nan() || x.is_nan() => f64::NAN,
        ReduceOp::Min if x < acc => x,
        ReduceOp::Max if x > acc => x,
        ReduceOp::Min | ReduceOp::Max => acc,
        _ => unreachable!("no operator of floats"),
    }
}

fn finished(op: ReduceOp, acc: f64, world: usize, single: bool) -> f64 {
    let acc = match op {
        ReduceOp::Avg => round(acc * round(1.0 / world as f64, single), single),
        _ => acc,
    };
    if acc.is_nan() { f64::NAN } else { acc }
}

macro_rules! float {
    ($type:ty, $single:literal, $widen:expr, $narrow:expr) => {
        impl Number for $type {
            fn any(bits: u64) -> Self {
                // Mostly numbers of one magnitude, so that sums round; sometimes arbitrary bits.
                if bits % 16 == 0 {
                    Self::from_le_bytes(low(bits >> 8))
                } else {
                    $narrow((bits >> 40) as f64 / (1 << 20) as f64 - 8.0)
                }
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn reduce(op: ReduceOp, ranks: &[Self]) -> Self {
                let mut acc = scaled(op, $widen(ranks[0]), $single);
                for &x in &ranks[1..] {
                    acc = reduce_two(op, acc, scaled(op, $widen(x), $single), $single);
                }
                $narrow(finished(op, acc, ranks.len(), $single))
            }
        }
    };
}

// An f32 operation on f32 values equals the f64 operation rounded to f32: 53 >= 2 * 24 + 2.
float!(f32, true, f64::from, |x| x as f32);
float!(f64, false, |x: f64| x, |x: f64| x);
float!(f16, true, f64::from, |x| f16::from_f32(x as f32));
float!(bf16, true, f64::from, |x| bf16::from_f32(x as f32));

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn any(bits: u64) -> Self {
                Self::from_le_bytes(low(bits >> 7))
            }
            fn bits(self) -> u64 {
                let mut bytes = [0; 8];
                bytes[..size_of::<Self>()].copy_from_slice(&self.to_le_bytes());
                u64::from_le_bytes(bytes)
            }
            fn reduce(op: ReduceOp, ranks: &[Self]) -> Self {
                let fold = |f: fn(Self, Self) -> Self| ranks.iter().copied().reduce(f).unwrap();
                match op {
                    ReduceOp::Sum => fold(Self::wrapping_add),
                    ReduceOp::Product => fold(Self::wrapping_mul),
                    ReduceOp::Min => *ranks.iter().min().unwrap(),
                    ReduceOp::Max => *ranks.iter().max().unwrap(),
                    ReduceOp::BitAnd => fold(|a, b| a & b),
                    ReduceOp::BitOr => fold(|a, b| a | b),
                    ReduceOp::BitXor => fold(|a, b| a ^ b),
                    _ => unreachable!("no operator of integers"),
                }
            }
        }
    )*};
}

integer!(i8, u8, i16, u16, i32, u32, i64, u64);

impl Number for bool {
    fn any(bits: u64) -> Self {
        bits >> 7 & 1 == 1
    }
    fn bits(self) -> u64 {
        self.into()
    }
    fn reduce(op: ReduceOp, ranks: &[Self]) -> Self {
        match op {
            ReduceOp::Max => ranks.contains(&true),
            ReduceOp::Min => !ranks.contains(&false),
            _ => unreachable!("no operator of bools"),
        }
    }
}

macro_rules! moved_only {
    ($($type:ident),*) => {$(
        impl Number for $type {
            fn any(bits: u64) -> Self {
                Self((bits >> 7) as u8)
            }
            fn bits(self) -> u64 {
                self.0.into()
            }
            fn reduce(_: ReduceOp, _: &[Self]) -> Self {
                unreachable!("no reduction")
            }
        }
    )*};
}

moved_only!(F8E4M3, F8E5M2);

/// The input of a rank: the same on every rank that computes it.
pub(crate) fn input<T: Number>(rank: usize, count: usize, seed: u64) -> Vec<T> {
    let mut random = Random(seed << 32 | (rank as u64) << 24 | 0x9e37);
    (0..count).map(|_| T::any(random.next())).collect()
}

/// Expected result of a reduction. Computed once per process: ranks that are threads share it.
pub(crate) fn reduced<T: Number>(
    op: ReduceOp,
    world: usize,
    count: usize,
    seed: u64,
) -> Arc<Vec<T>> {
    type Slot = Arc<OnceLock<Arc<dyn Any + Send + Sync>>>;
    static LATEST: Mutex<VecDeque<(String, Slot)>> = Mutex::new(VecDeque::new());
    let key = format!("{op:?} of {count} {} on {world}, seed {seed}", T::DTYPE);
    let mut latest = LATEST.lock().unwrap();
    let slot = match latest.iter().find(|(of, _)| *of == key) {
        Some((_, slot)) => Arc::clone(slot),
        None => {
            latest.truncate(63);
            latest.push_front((key, Slot::default()));
            Arc::clone(&latest[0].1)
        }
    };
    drop(latest);
    let reduced = slot.get_or_init(|| Arc::new(fold::<T>(op, world, count, seed)));
    Arc::clone(reduced).downcast().unwrap()
}

fn fold<T: Number>(op: ReduceOp, world: usize, count: usize, seed: u64) -> Vec<T> {
    let ranks: Vec<Vec<T>> = (0..world).map(|rank| input(rank, count, seed)).collect();
    let mut column = vec![T::default(); world];
    let mut reduce = |i: usize| {
        for (x, rank) in column.iter_mut().zip(&ranks) {
            *x = rank[i];
        }
        T::reduce(op, &column)
    };
    (0..count).map(&mut reduce).collect()
}

pub(crate) fn same<T: Number>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.bits(), expected.bits(), "{what} of {} at {i}", T::DTYPE);
    }
}

/// A slice one element behind the start of its allocation, so not aligned to a vector.
#[derive(Debug)]
pub(crate) struct Off<T>(Vec<T>);

impl<T: Number> Off<T> {
    pub(crate) fn new(slice: &[T]) -> Self {
        Self([&[T::default()], slice].concat())
    }

    pub(crate) fn zeros(count: usize) -> Self {
        Self(vec![T::default(); count + 1])
    }
}

impl<T> std::ops::Deref for Off<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0[1..]
    }
}

impl<T> std::ops::DerefMut for Off<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0[1..]
    }
}
