//! One suite for every transport and world sizes 1 to 5: every verb, operator and type, against a
//! slow and obvious twin that computes the result from all ranks' inputs, bit for bit. Since every
//! rank compares with the twin, the ranks have the same bits.

#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "the fault tests use the rest")]
mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use collective::{
    Element, Error, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result, SharedBuf,
    object::{all_gather_object, broadcast_object},
};
use common::{Role, Workers};
use half::{bf16, f16};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Around vector widths, the largest payload of a slot, and the chunk size.
const COUNTS: [usize; 8] = [0, 1, 7, 33, 1000, 2049, 8191, 70_001];

/// What the twin needs of a type.
trait Number: Element {
    /// Any bits, infinities and NaN among them.
    fn any(bits: u64) -> Self;
    fn bits(self) -> u64;
    fn reduce(op: ReduceOp, ranks: &[Self]) -> Self;
}

/// The low bytes of a number.
fn low<const N: usize>(bits: u64) -> [u8; N] {
    std::array::from_fn(|i| bits.to_le_bytes()[i])
}

fn reduce_float(op: ReduceOp, ranks: &[f64], single: bool) -> f64 {
    // With `single` all steps are taken in f32.
    let round = |x: f64| if single { f64::from(x as f32) } else { x };
    let scaled = |x: f64| match op {
        ReduceOp::PreMulSum(factor) => round(x * round(factor.get())),
        _ => x,
    };
    let mut acc = scaled(ranks[0]);
    for x in ranks[1..].iter().copied().map(scaled) {
        acc = match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => round(acc + x),
            ReduceOp::Product => round(acc * x),
            ReduceOp::Min | ReduceOp::Max if acc.is_nan() || x.is_nan() => f64::NAN,
            ReduceOp::Min => {
                if x < acc {
                    x
                } else {
                    acc
                }
            }
            ReduceOp::Max => {
                if x > acc {
                    x
                } else {
                    acc
                }
            }
            _ => unreachable!("no operator of floats"),
        };
    }
    if op == ReduceOp::Avg {
        acc = round(acc * round(1.0 / ranks.len() as f64));
    }
    if acc.is_nan() { f64::NAN } else { acc }
}

macro_rules! float {
    ($type:ty, $single:literal, $widen:expr, $narrow:expr) => {
        impl Number for $type {
            fn any(bits: u64) -> Self {
                // Mostly numbers of one magnitude, so that sums round; sometimes any bits at all.
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
                let ranks: Vec<f64> = ranks.iter().map(|&x| $widen(x)).collect();
                $narrow(reduce_float(op, &ranks, $single))
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
                u64::from_le_bytes(std::array::from_fn(|i| self.to_le_bytes().get(i).map_or(0, |&b| b)))
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

integer!(i8, u8, i32, i64, u64);

/// The input of a rank: the same on every rank that computes it.
fn input<T: Number>(rank: usize, count: usize, seed: u64) -> Vec<T> {
    let mut state = seed << 32 | (rank as u64) << 24 | 0x9e37;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
    };
    (0..count).map(|_| T::any(next())).collect()
}

fn reduced<T: Number>(op: ReduceOp, world: usize, count: usize, seed: u64) -> Vec<T> {
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

fn same<T: Number>(got: &[T], expected: &[T], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.bits(), expected.bits(), "{what} of {} at {i}", T::DTYPE);
    }
}

fn reductions<T: Number>(group: &ProcessGroup, op: ReduceOp, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    for count in COUNTS {
        let what = format!("{op} of {count}");
        let expected = reduced::<T>(op, world, count, seed);
        // One element off the allocation's start, so not aligned to a vector.
        let mut buf = vec![T::default()];
        buf.extend(input::<T>(rank, count, seed));
        group.all_reduce(&mut buf[1..], op)?;
        same(&buf[1..], &expected, &what);
        assert_eq!(buf[0].bits(), T::default().bits());

        let buf = input::<T>(rank, count, seed);
        same(&group.all_reduce_async(buf, op)?.wait()?, &expected, &what);

        let block = count / world;
        let mut output = vec![T::default(); block];
        group.reduce_scatter(&mut output, &input::<T>(rank, count, seed)[..block * world], op)?;
        same(&output, &expected[rank * block..][..block], &what);
    }
    Ok(())
}

/// The same numbers at several offsets of a shared buffer have the bits they have in a plain one.
fn shared<T: Number>(group: &ProcessGroup, op: ReduceOp, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let mut buf: SharedBuf<T> = group.alloc(100_000)?;
    assert!(buf.iter().all(|x| x.bits() == 0));
    for (start, count) in [(0, 100_000), (1, 99_999), (13, 33_333), (77, 100), (5, 0)] {
        let part = &mut buf[start..][..count];
        part.copy_from_slice(&input(rank, count, seed));
        group.all_reduce(part, op)?;
        same(part, &reduced(op, world, count, seed), "in place");
    }
    buf.copy_from_slice(&input(rank, 100_000, seed + 1));
    let buf = group.all_reduce_async(buf, op)?.wait()?;
    same(&buf, &reduced(op, world, 100_000, seed + 1), "in place, asynchronously");
    Ok(())
}

fn moves<T: Number>(group: &ProcessGroup, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    for (i, count) in COUNTS.into_iter().enumerate() {
        let root = i % world;
        let mut buf = input::<T>(rank, count, seed);
        group.broadcast(&mut buf, root)?;
        same(&buf, &input(root, count, seed), "broadcast");

        let mut all = vec![T::default(); world * count];
        group.all_gather(&mut all, &input::<T>(rank, count, seed))?;
        let expected: Vec<T> = (0..world).flat_map(|rank| input(rank, count, seed)).collect();
        same(&all, &expected, "all_gather");
    }
    Ok(())
}

fn all_of<T: Number>(group: &ProcessGroup) -> Result<()> {
    let mut seed = T::DTYPE as u64 * 100;
    for op in ReduceOp::ALL {
        seed += 2;
        if op.supports(T::DTYPE) {
            reductions::<T>(group, op, seed)?;
            if matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::BitXor) {
                shared::<T>(group, op, seed)?;
            }
        } else {
            let error = group.all_reduce(&mut [T::default()], op).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        }
    }
    moves::<T>(group, seed)
}

/// A caller's mistakes are seen at once, on that rank, and leave the group usable.
fn mistakes(group: &ProcessGroup) -> Result<()> {
    let world = group.world_size();
    let mistakes = [
        group.broadcast(&mut [0_u8; 3], world),
        group.all_gather(&mut vec![0_u8; 3 * world + 1], &[0; 3]),
        group.reduce_scatter(&mut [0_u8; 3], &vec![0; 3 * world + 1], ReduceOp::Sum),
        group.alloc::<u64>(usize::MAX / 4).map(drop),
        group.all_reduce_async(vec![1_i32], ReduceOp::Avg).map(drop),
    ];
    for mistake in mistakes {
        assert!(matches!(mistake, Err(Error::InvalidArgument(_))), "{mistake:?}");
    }
    group.barrier()
}

/// Operations in flight keep their order among themselves and with blocking ones.
fn in_flight(group: &ProcessGroup) -> Result<()> {
    let sum = (0..group.world_size()).sum::<usize>() as i64;
    let mine = group.rank() as i64;
    let works: Vec<_> = (0..20)
        .map(|i| group.all_reduce_async(vec![mine * i; 5000], ReduceOp::Sum))
        .collect::<Result<_>>()?;
    drop(group.all_reduce_async(vec![mine; 100_000].into_boxed_slice(), ReduceOp::Max)?);
    let mut last = [mine];
    group.all_reduce(&mut last, ReduceOp::Sum)?;
    assert_eq!(last, [sum]);
    for (i, work) in works.into_iter().enumerate() {
        assert!(work.is_done());
        assert_eq!(work.wait()?, vec![sum * i as i64; 5000]);
    }
    forget(group.all_reduce_async(vec![mine; 10], ReduceOp::Sum)?);
    group.barrier()
}

/// Forgets a value as `std::mem::forget` does, but where a leak detector sees that it is meant.
fn forget(value: impl Send + 'static) {
    static FORGOTTEN: Mutex<Vec<Box<dyn Send>>> = Mutex::new(Vec::new());
    FORGOTTEN.lock().unwrap().push(Box::new(value));
}

fn objects(group: &ProcessGroup) -> Result<()> {
    let name = |rank: usize| (rank, "x".repeat(rank * 5000));
    let all = all_gather_object(group, &name(group.rank()))?;
    assert_eq!(all, (0..group.world_size()).map(name).collect::<Vec<_>>());

    let root = group.world_size() - 1;
    let object = (group.rank() == root).then(|| vec!["a".to_owned(), "b".to_owned()]);
    assert_eq!(broadcast_object(group, object, root)?, ["a", "b"]);

    // A root without an object is an error everywhere, not a wait.
    let error = broadcast_object::<u8>(group, None, root).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    group.barrier()
}

/// Shared buffers come and go at different times on the ranks, and outlive the group.
fn buffers(group: ProcessGroup) -> Result<SharedBuf<f32>> {
    let one: SharedBuf<f32> = group.alloc(5000)?;
    let mut two: SharedBuf<f32> = group.alloc(7000)?;
    if group.rank() == 0 {
        drop(one);
    }
    two.fill(1.0);
    group.all_reduce(&mut two, ReduceOp::Sum)?;
    let three: SharedBuf<f32> = group.alloc(0)?;
    assert!(three.is_empty());
    group.barrier()?;
    let world = group.world_size() as f32;
    drop(group);
    assert!(two.iter().all(|&x| x == world));
    Ok(two)
}

fn suite(group: ProcessGroup) -> Result<()> {
    all_of::<f16>(&group)?;
    all_of::<bf16>(&group)?;
    all_of::<f32>(&group)?;
    all_of::<f64>(&group)?;
    all_of::<i8>(&group)?;
    all_of::<u8>(&group)?;
    all_of::<i32>(&group)?;
    all_of::<i64>(&group)?;
    all_of::<u64>(&group)?;
    mistakes(&group)?;
    in_flight(&group)?;
    objects(&group)?;
    buffers(group).map(drop)
}

#[test]
fn ranks_as_threads() {
    for world in 1..=5 {
        for result in common::threads(world, TIMEOUT, suite) {
            result.unwrap();
        }
    }
}

/// The way processes join, but within one; and the same name twice.
#[test]
fn a_name_may_be_used_again_when_its_group_is_gone() {
    let store = Arc::new(MemoryStore::new());
    for round in 0..3 {
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let options = GroupOptions::default().with_timeout(TIMEOUT).with_name("again");
                let store = Arc::clone(&store);
                scope.spawn(move || {
                    let group = ProcessGroup::from_store(store, rank, 3, options).unwrap();
                    let mut x = [(rank + round) as u64];
                    group.all_reduce(&mut x, ReduceOp::Max).unwrap();
                    assert_eq!(x, [2 + round as u64]);
                });
            }
        });
    }
}

#[test]
fn ranks_as_processes() {
    for world in 1..=5 {
        let ranks: Vec<_> = (0..world).collect();
        Workers::start("suite", world, &ranks, TIMEOUT).finish();
    }
}

/// Not a test: what a process rank runs.
#[test]
fn worker() {
    if let Some(role) = Role::from_env() {
        suite(role.join().unwrap()).unwrap();
    }
}
