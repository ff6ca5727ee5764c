//! The reducer on device memory: the same bits as the reducer on the host, without blocking the
//! host, with every memory access ordered.

#[path = "reducer_buckets.rs"]
mod buckets;
#[path = "reducer_failures.rs"]
mod failures;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use collective::nccl::Config;
use collective::reducer::{
    BucketKernels, BucketPlan, CommHook, DeviceReducer, Gradient, NoKernels, ParamInfo, Reducer,
    ReducerOptions,
};
use collective::{
    DType, Element, Error, GroupOptions, ProcessGroup, ReduceOp, Result,
    device::{DeviceBuf, DeviceStream},
};
use half::{bf16, f16};

use super::fake::{Fake, Memory, Stream, devices, numbers_mut};
use crate::common::{DEADLINE, play};

/// The epilogue's observations: bucket, sum of squares, whether all values are finite.
type Seen = Arc<Mutex<Vec<(usize, f64, bool)>>>;

/// Kernels of the test, which run in the fake's streams.
#[derive(Debug, Default)]
struct Kernels {
    seen: Seen,
    laid_out: Vec<usize>,
    /// The bucket at which the epilogue fails.
    fails: Option<usize>,
}

macro_rules! by_type {
    ($dtype:expr, $name:ident => $do:expr) => {
        match $dtype {
            DType::F16 => {
                type $name = f16;
                $do
            }
            DType::Bf16 => {
                type $name = bf16;
                $do
            }
            DType::F32 => {
                type $name = f32;
                $do
            }
            _ => {
                type $name = f64;
                $do
            }
        }
    };
}

/// The memory of a buffer, for a kernel of the test.
fn numbers<'a, T: Element>(buf: DeviceBuf) -> &'a mut [T] {
    #[expect(unsafe_code, reason = "kernels work on addresses")]
    // SAFETY: the fake ends the process if anything else uses the memory meanwhile.
    unsafe {
        numbers_mut(buf)
    }
}

impl BucketKernels for Kernels {
    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn add(&mut self, sum: DeviceBuf, term: DeviceBuf, stream: DeviceStream) -> Result<()> {
        Fake::get().run(stream, &[term], &[sum], move || {
            by_type!(sum.dtype(), T => T::accumulate(numbers(sum), numbers(term)));
        });
        Ok(())
    }

    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn cast(&mut self, to: DeviceBuf, from: DeviceBuf, stream: DeviceStream) -> Result<()> {
        Fake::get().run(stream, &[from], &[to], move || match (to.dtype(), from.dtype()) {
            (DType::F32, DType::F16) => wide_of(numbers::<f16>(from), numbers(to)),
            (DType::F32, _) => wide_of(numbers::<bf16>(from), numbers(to)),
            (DType::F16, _) => half_of(numbers::<f32>(from), numbers(to), f16::from_f32),
            _ => half_of(numbers::<f32>(from), numbers(to), bf16::from_f32),
        });
        Ok(())
    }

    fn laid_out(&mut self, plan: &BucketPlan, buckets: &[DeviceBuf]) -> Result<()> {
        let fits = plan.buckets().iter().zip(buckets).all(|(spec, buf)| spec.count == buf.count());
        assert!(fits && plan.buckets().len() == buckets.len());
        self.laid_out.push(buckets.len());
        Ok(())
    }

    #[expect(unsafe_code, reason = "the trait's contract")]
    unsafe fn averaged(
        &mut self,
        bucket: usize,
        buf: DeviceBuf,
        stream: DeviceStream,
    ) -> Result<()> {
        if self.fails == Some(bucket) {
            let (name, text) = ("CUDA_ERROR_LAUNCH_FAILED".into(), "the test's".into());
            let during = "cuLaunchKernel".into();
            return Err(Error::Backend { backend: "test", during, name, code: 719, text });
        }
        let seen = Arc::clone(&self.seen);
        Fake::get().run(stream, &[buf], &[], move || {
            let wide: Vec<f64> = by_type!(buf.dtype(), T => wide(numbers::<T>(buf)));
            let squares = wide.iter().map(|x| x * x).sum();
            seen.lock().unwrap().push((bucket, squares, wide.iter().all(|x| x.is_finite())));
        });
        Ok(())
    }
}

fn wide<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| (*x).into()).collect()
}

fn wide_of<H: Copy + Into<f32>>(from: &[H], to: &mut [f32]) {
    from.iter().zip(to).for_each(|(from, to)| *to = (*from).into());
}

fn half_of<H>(from: &[f32], to: &mut [H], round: fn(f32) -> H) {
    from.iter().zip(to).for_each(|(from, to)| *to = round(*from));
}

/// Calls `rank` on every rank of a group of `world` ranks.
fn ranks<T: Send>(
    world: u32,
    timeout: Duration,
    rank: impl Fn(ProcessGroup) -> T + Sync,
) -> Vec<T> {
    let options = GroupOptions::default().with_timeout(timeout);
    let groups = Fake::get().groups(devices(world), &options, &Config::default());
    play(groups.into_iter().map(Result::unwrap).collect(), rank)
}

fn params(counts: &[usize]) -> Vec<ParamInfo> {
    let info = |(index, &count)| ParamInfo::new(format!("p{index}"), count, DType::F32);
    counts.iter().enumerate().map(info).collect()
}

fn options(caps: (usize, usize)) -> ReducerOptions {
    let mut options = ReducerOptions::default();
    (options.first_bucket_bytes, options.bucket_bytes) = caps;
    options
}

/// Each parameter has its own bucket once the buckets are rebuilt.
fn tiny() -> ReducerOptions {
    options((1, 1))
}

fn find_unused() -> ReducerOptions {
    let mut options = tiny();
    options.find_unused_parameters = true;
    options
}

/// A reducer of one rank, and the stream that computes its gradients.
struct Side<K> {
    reducer: DeviceReducer<K>,
    stream: Stream,
    /// Gradients that streams may still copy into buckets.
    grads: Vec<Box<dyn Send>>,
}

impl<K: BucketKernels> Side<K> {
    fn new(group: ProcessGroup, model: Vec<ParamInfo>, options: ReducerOptions, k: K) -> Self {
        let reducer = DeviceReducer::new(group, model, options, k).unwrap();
        Self { reducer, stream: Fake::get().stream(), grads: Vec::new() }
    }

    /// Reports a gradient that backward has computed in `stream`, outside of the buckets.
    fn ready_in<T: Element>(
        &mut self,
        index: usize,
        values: Vec<T>,
        stream: DeviceStream,
    ) -> Result<()> {
        let mut memory = Memory::new(vec![T::default(); values.len()]).watched();
        let buf = memory.0.buf();
        Fake::get().run(stream, &[], &[buf], move || numbers::<T>(buf).copy_from_slice(&values));
        self.grads.push(Box::new(memory));
        #[expect(unsafe_code, reason = "the reducer's contract")]
        // SAFETY: the memory stays until the side is dropped, after its streams are.
        unsafe {
            self.reducer.ready(index, buf, stream)
        }
    }

    fn ready<T: Element>(&mut self, index: usize, values: Vec<T>) -> Result<()> {
        self.ready_in(index, values, self.stream.raw())
    }

    /// Reports a gradient that backward has written to, or added in, its slot.
    fn ready_in_slot<T: Gradient>(&mut self, index: usize, values: Vec<T>) -> Result<()> {
        let (slot, add) = (self.reducer.slot(index), self.reducer.grad(index).is_some());
        let reads = if add { vec![slot] } else { Vec::new() };
        Fake::get().run(self.stream.raw(), &reads, &[slot], move || match add {
            true => T::accumulate(numbers(slot), &values),
            false => numbers::<T>(slot).copy_from_slice(&values),
        });
        #[expect(unsafe_code, reason = "the reducer's contract")]
        // SAFETY: its own slot.
        unsafe {
            self.reducer.ready(index, slot, self.stream.raw())
        }
    }

    fn finish(&mut self) -> Result<()> {
        #[expect(unsafe_code, reason = "the reducer's contract")]
        // SAFETY: the stream outlives the reducer.
        unsafe {
            self.reducer.finish(self.stream.raw())
        }
    }

    /// The gradient as a kernel in the caller's stream reads it.
    fn grad<T: Element>(&self, index: usize) -> Option<Vec<T>> {
        let buf = self.reducer.grad(index)?;
        let found = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&found);
        let kernel = move || into.lock().unwrap().extend_from_slice(numbers::<T>(buf));
        Fake::get().run(self.stream.raw(), &[buf], &[], kernel);
        self.stream.sync();
        let found = found.lock().unwrap().clone();
        Some(found)
    }

    fn firsts(&self, all: usize) -> Vec<Option<f32>> {
        (0..all).map(|index| self.grad::<f32>(index).map(|grad| grad[0])).collect()
    }

    fn pass(&mut self, counts: &[usize], sync: bool, value: impl Fn(usize) -> f32) {
        self.reducer.prepare(sync).unwrap();
        for (index, &count) in counts.iter().enumerate().rev() {
            self.ready(index, vec![value(index); count]).unwrap();
        }
        self.finish().unwrap();
    }
}

/// A generator of numbers that look random, the same on all ranks.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

trait Value: Gradient {
    fn of(value: f64) -> Self;
}
macro_rules! values {
    ($($type:ty: $of:expr),*) => {$(impl Value for $type {
        fn of(value: f64) -> Self {
            ($of)(value)
        }
    })*};
}
values!(f16: f16::from_f64, bf16: bf16::from_f64, f32: |x| x as f32, f64: |x| x);

fn gradient<T: Value>(count: usize, seed: usize) -> Vec<T> {
    (0..count).map(|at| T::of(((seed * 31 + at * 7) % 1009) as f64 / 97.0 - 5.0)).collect()
}

/// Reports one gradient to both reducers; `manner` is its slot, another stream, or this stream.
fn report<T: Value>(
    (side, twin): (&mut Side<Kernels>, &mut Reducer),
    (index, count, seed): (usize, usize, usize),
    other: &Stream,
    manner: usize,
) {
    let values = gradient::<T>(count, seed);
    twin.ready(index, &values).unwrap();
    match manner {
        0 => side.ready_in_slot(index, values).unwrap(),
        1 => side.ready_in(index, values, other.raw()).unwrap(),
        _ => side.ready(index, values).unwrap(),
    }
}

fn same<T: Element + Debug>(side: &Side<Kernels>, twin: &Reducer, index: usize) {
    let (got, want) = (side.grad::<T>(index), twin.grad::<T>(index));
    assert_eq!(format!("{:?}", got.as_deref()), format!("{want:?}"), "parameter {index}");
}

/// With random models, orders, caps and streams; passes are averaged and zeroed at random.
#[test]
fn matches_the_host_reducer_bit_for_bit() {
    for seed in 0..8_u64 {
        let world = 1 + seed as u32 % 3;
        // The reference has its own group on the host, so each reducer has its own order of
        // operations.
        let twins = ProcessGroup::threads(world as usize, DEADLINE).unwrap();
        ranks(world, DEADLINE, |group| {
            let random = &mut Random(seed);
            let types = [DType::F16, DType::Bf16, DType::F32, DType::F64];
            let model: Vec<ParamInfo> = (0..random.below(7))
                .map(|i| ParamInfo::new(format!("p{i}"), random.below(300), types[random.below(4)]))
                .collect();
            let mut options = options((random.below(2000), random.below(2000)));
            options.find_unused_parameters = seed % 4 == 3;
            let unused_allowed = options.find_unused_parameters;
            let rank = group.rank();
            let twin = twins[rank].clone();
            let mut twin = Reducer::new(twin, model.clone(), options.clone()).unwrap();
            let other = Fake::get().stream();
            let mut side = Side::new(group, model.clone(), options, Kernels::default());
            for number in 0..4 {
                let (sync, zero) = (random.below(3) > 0, random.below(2) > 0);
                side.reducer.prepare(sync).unwrap();
                twin.prepare(sync).unwrap();
                let mut order: Vec<_> = (0..model.len()).collect();
                let salt = random.below(1000);
                order.sort_by_key(|index| (index * 7919 + salt + rank * 31 + number * 17) % 101);
                for index in order {
                    if unused_allowed && (index + salt + rank).is_multiple_of(3) {
                        continue;
                    }
                    let param = &model[index];
                    let one = (index, param.count, index + rank * 5 + number * 3);
                    let both = (&mut side, &mut twin);
                    by_type!(param.dtype, T => report::<T>(both, one, &other, (index + salt) % 3));
                }
                side.finish().unwrap();
                twin.finish().unwrap();
                assert_eq!(side.reducer.plan(), twin.plan());
                for (index, param) in model.iter().enumerate() {
                    by_type!(param.dtype, T => same::<T>(&side, &twin, index));
                }
                if zero {
                    side.reducer.zero_grad();
                    twin.zero_grad();
                }
            }
            side.reducer.wait().unwrap();
            assert!(matches!(side.reducer.settled(), Some(Ok(()))));
        });
    }
}

#[test]
fn averages_overlap_backward_without_blocking_the_host() {
    ranks(2, DEADLINE, |group| {
        let rank = group.rank() as f32;
        let kernels = Kernels::default();
        let seen = Arc::clone(&kernels.seen);
        let mut side = Side::new(group, params(&[3, 2]), tiny(), kernels);
        side.pass(&[3, 2], true, |_| 1.0);
        side.stream.sync();
        seen.lock().unwrap().clear();
        side.reducer.zero_grad();
        side.reducer.prepare(true).unwrap();
        side.ready(1, vec![rank; 2]).unwrap();
        assert_eq!((side.reducer.launched(), side.reducer.grad(1)), (1, None));
        // Stands for the rest of backward: later work in the stream does not start.
        side.stream.block();
        side.ready(0, vec![3.0 * rank; 3]).unwrap();
        assert_eq!(side.reducer.launched(), 2);
        side.finish().unwrap();
        let start = Instant::now();
        while seen.lock().unwrap().is_empty() {
            assert!(start.elapsed() < DEADLINE, "the first bucket waits for backward to end");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(*seen.lock().unwrap(), [(0, 0.5, true)]);
        assert!(side.reducer.settled().is_none());
        side.stream.unblock();
        assert_eq!(side.firsts(2), [Some(1.5), Some(0.5)]);
        assert_eq!(*seen.lock().unwrap(), [(0, 0.5, true), (1, 6.75, true)]);
    });
}

#[test]
fn without_sync_gradients_accumulate_locally() {
    ranks(2, DEADLINE, |group| {
        let (rank, other) = (group.rank() as f32, Fake::get().stream());
        let mut side = Side::new(group, params(&[3, 2]), tiny(), Kernels::default());
        assert_eq!(side.firsts(2), [None, None]);
        side.pass(&[3, 2], false, |_| rank);
        assert_eq!((side.firsts(2), side.reducer.launched()), (vec![Some(rank); 2], 0));
        side.pass(&[3, 2], false, |_| rank);
        side.pass(&[3, 2], true, |_| 4.0);
        assert_eq!(side.firsts(2), [Some(5.0), Some(5.0)]);
        // The gradients of an unfinished pass count, on any stream.
        side.reducer.prepare(true).unwrap();
        side.ready_in(0, vec![1.0_f32; 3], other.raw()).unwrap();
        side.pass(&[3, 2], true, |_| 1.0);
        assert_eq!(side.firsts(2), [Some(7.0), Some(6.0)]);
        side.reducer.zero_grad();
        assert_eq!(side.firsts(2), [None, None]);
        // First one bucket, then one for each parameter.
        assert_eq!(side.reducer.kernels().laid_out, [1, 2]);
    });
}

#[test]
fn the_epilogue_sees_each_averaged_bucket_once_in_order() {
    let counts = [5, 3, 8, 1];
    let all = ranks(2, DEADLINE, |group| {
        let rank = group.rank();
        let kernels = Kernels::default();
        let seen = Arc::clone(&kernels.seen);
        let mut side = Side::new(group, params(&counts), tiny(), kernels);
        for number in 0..3 {
            // One rank overflows in the last pass.
            let bad = number == 2 && rank == 1;
            // The buckets are rebuilt at the end of the first pass.
            let buckets = side.reducer.plan().buckets().len();
            side.pass(&counts, true, |i| if bad && i == 2 { f32::INFINITY } else { i as f32 });
            side.stream.sync();
            let seen = std::mem::take(&mut *seen.lock().unwrap());
            let order: Vec<usize> = seen.iter().map(|one| one.0).collect();
            assert_eq!(order, (0..buckets).collect::<Vec<_>>());
            let finite = seen.iter().all(|one| one.2);
            assert_eq!(finite, number < 2, "all ranks see the overflow");
            if finite {
                assert_eq!(seen.iter().map(|one| one.1).sum::<f64>(), 3.0 + 32.0 + 9.0);
            }
            side.reducer.zero_grad();
        }
        side.pass(&counts, false, |_| 1.0);
        side.stream.sync();
        seen.lock().unwrap().len()
    });
    assert_eq!(all, [0, 0], "no epilogue without an average");
}

#[test]
fn unused_parameters_count_as_zero_or_are_an_error_on_every_rank() {
    ranks(2, DEADLINE, |group| {
        let rank = group.rank();
        let mut side = Side::new(group, params(&[1; 4]), find_unused(), Kernels::default());
        for _ in 0..3 {
            side.reducer.prepare(true).unwrap();
            // 0: used by both, 1: by rank 0, 2: by rank 1, 3: by none.
            side.ready(0, vec![2.0_f32]).unwrap();
            side.ready(1 + rank, vec![4.0_f32]).unwrap();
            side.finish().unwrap();
            assert_eq!(side.firsts(4), [Some(2.0), Some(2.0), Some(2.0), None]);
            side.reducer.zero_grad();
        }
        side.reducer.prepare(false).unwrap();
        side.ready(3, vec![rank as f32]).unwrap();
        side.finish().unwrap();
        side.reducer.prepare(true).unwrap();
        side.finish().unwrap();
        assert_eq!(side.firsts(4), [None, None, None, Some(0.5)]);
        // Without new gradients, and none cleared, the accumulated ones are averaged.
        side.pass(&[1; 4], false, |_| rank as f32);
        side.reducer.prepare(true).unwrap();
        side.finish().unwrap();
        assert_eq!(side.firsts(4), [Some(0.5), Some(0.5), Some(0.5), Some(1.0)]);
    });
    let errors = ranks(3, DEADLINE, |group| {
        let rank = group.rank();
        let mut side = Side::new(group, params(&[1, 1, 1]), tiny(), Kernels::default());
        side.pass(&[1, 1, 1], true, |_| 1.0);
        wait_for_all_ranks(&side);
        side.reducer.zero_grad();
        // A rank may learn of the abort in any of these calls.
        let begun = side.reducer.prepare(true);
        for index in [2, 1, 0] {
            if rank != 1 || index != 1 {
                let _ = side.ready(index, vec![1.0_f32]);
            }
        }
        let ended = begun.and_then(|()| side.finish());
        let error = ended.and_then(|()| side.reducer.wait()).unwrap_err();
        check_poisoned(&mut side);
        error
    });
    let Error::UnusedParameters { rank: 1, names } = &errors[1] else { panic!("{}", errors[1]) };
    assert_eq!(names, &["p1"]);
    for rank in [0, 2] {
        let text = errors[rank].to_string();
        assert!(text.contains("by rank 1") && text.contains("p1"), "rank {rank}: {text}");
    }
}

/// Ends a pass on all ranks: a later failure would also fail it on a rank that has not completed
/// it.
fn wait_for_all_ranks<K: BucketKernels>(side: &Side<K>) {
    side.reducer.wait().unwrap();
    side.reducer.group().barrier().unwrap();
}

/// Checks that further calls are errors, the second one `Poisoned`.
fn check_poisoned<K: BucketKernels>(side: &mut Side<K>) {
    side.reducer.prepare(true).unwrap_err();
    let error = side.reducer.prepare(true).unwrap_err();
    assert!(matches!(error, Error::Poisoned(_)), "{error}");
}

/// Its memory is freed once the device no longer uses it.
#[test]
fn a_reducer_may_be_dropped_while_its_device_computes() {
    ranks(2, DEADLINE, |group| {
        let mut side = Side::new(group, params(&[4, 4]), tiny(), Kernels::default());
        side.pass(&[4, 4], true, |_| 1.0);
        side.stream.compute(50);
        side.pass(&[4, 4], true, |_| 1.0);
        let Side { reducer, stream, grads } = side;
        // The fake ends the process if the memory is freed while streams use it.
        drop(reducer);
        stream.sync();
        drop((grads, stream));
    });
}

#[test]
fn drop_waits_for_the_streams_of_an_unfinished_pass() {
    ranks(2, DEADLINE, |group| {
        let mut side = Side::new(group, params(&[4, 4]), tiny(), Kernels::default());
        side.reducer.prepare(true).unwrap();
        side.stream.compute(50);
        side.ready(0, vec![1.0_f32; 4]).unwrap();
        side.reducer.prepare(true).unwrap();
        let Side { reducer, stream, grads } = side;
        // The fake ends the process if the memory is freed while streams use it.
        drop(reducer);
        stream.sync();
        drop((grads, stream));
    });
}

/// The fake reports every unordered memory access, however the threads run, and no others.
#[test]
fn the_fake_detects_unordered_memory_accesses() {
    ranks(1, DEADLINE, |group| {
        let (one, two) = (Fake::get().stream(), Fake::get().stream());
        let mut memory = Memory::new(vec![0_u8; 64]).watched();
        let (whole, half) = (memory.0.buf(), memory.0.buf().part(0..32).unwrap());
        let races = |reads: &[DeviceBuf], writes: &[DeviceBuf], stream: &Stream| {
            Fake::get().races(true);
            Fake::get().run(stream.raw(), reads, writes, || {});
            Fake::get().races(false)
        };
        assert_eq!(races(&[], &[half], &one), 0);
        assert_eq!(races(&[whole.part(32..64).unwrap()], &[], &two), 0, "different ranges");
        assert_eq!(races(&[whole], &[], &two), 1, "a read races with a write");
        assert_eq!(races(&[half], &[], &one), 0, "a read after the stream's own write");
        assert_eq!(races(&[], &[whole], &one), 2, "a write races with reads");
        let mut reduced = Memory::new(vec![0_u8; 32]).watched();
        let half = reduced.0.buf();
        let work = group.device().unwrap().all_reduce(half, ReduceOp::Max).unwrap();
        let work = work.enqueue(one.raw()).unwrap();
        assert_eq!(races(&[half], &[], &two), 1, "a read races with NCCL's write");
        #[expect(unsafe_code, reason = "that is how streams are ordered")]
        // SAFETY: the stream lives until the end.
        unsafe {
            work.order(two.raw()).unwrap();
        }
        assert_eq!(races(&[], &[half, whole], &two), 0, "ordered by an event");
        // Memory that is freed while it is in use, and afterwards.
        two.block();
        assert_eq!(races(&[], &[whole], &two), 0);
        Fake::get().races(true);
        drop(memory);
        assert_eq!(Fake::get().races(false), 1, "the blocked stream still uses it");
        two.unblock();
        one.sync();
        two.sync();
        drop(reduced);
    });
}
