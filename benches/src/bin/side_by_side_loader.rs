//! Our side of `loader.sh`: a training whose batch takes as long as its step, and the memory of an
//! epoch.
//!
//! ```text
//! # ms: a batch alone, a step alone, an iteration; and the slower of two threads that make batches
//! # and take steps
//! side_by_side_loader hide wait|spin WORKERS ITERATIONS
//! # MiB: the greatest growth in an epoch
//! side_by_side_loader memory WORKERS
//! ```

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the script reads the output")]

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use train_data::{
    Array, BoxError, DataLoader, Dataset, DefaultSampler, Sample, SampleRng, Workers,
};

/// Samples in a batch.
const BATCH: usize = 4;
/// Duration of one sample of `wait`; a step takes [`BATCH`] times as long.
const WAIT: Duration = Duration::from_millis(5);
/// Rounds of a sample of `spin`, a few milliseconds; a step has [`BATCH`] times as many.
const ROUNDS: u64 = 10_000_000;
/// Elements of a sample of `memory`: 4 MiB.
const ELEMENTS: usize = 1 << 20;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["hide", kind, workers, iterations] => {
            hide(kind == "spin", workers.parse().unwrap(), iterations.parse().unwrap());
        }
        ["memory", workers] => memory(workers.parse().unwrap()),
        _ => {
            eprintln!("see the head of this file");
            std::process::exit(2);
        }
    }
}

/// Computes or waits for as long as so many samples take.
fn take(samples: u64, spins: bool) {
    if spins {
        let seed = black_box(samples);
        black_box((0..samples * ROUNDS).fold(seed, |x, i| x.rotate_left(5) ^ black_box(i)));
    } else {
        thread::sleep(WAIT * samples as u32);
    }
}

struct Slow {
    len: usize,
    spins: bool,
}

impl Dataset for Slow {
    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        take(1, self.spins);
        Ok(Sample::new().with("index", Array::scalar(index as i64)))
    }
}

struct Large(usize);

impl Dataset for Large {
    fn len(&self) -> usize {
        self.0
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        Ok(Sample::new().with("input", Array::new([ELEMENTS], vec![index as f32; ELEMENTS])?))
    }
}

fn loader(dataset: impl Dataset + 'static, workers: usize) -> DataLoader {
    let len = dataset.len();
    let sampler =
        DefaultSampler { len, shuffle: true, seed: 1, rank: 0, world_size: 1, round_up: true };
    let builder = DataLoader::builder(Arc::new(dataset), sampler).batch_size(BATCH);
    builder.workers(Workers::new(workers)).build().unwrap()
}

/// Medians of five rounds' means, by turns, so that all meet the same machine.
fn hide(spins: bool, workers: usize, iterations: usize) {
    let mut rounds = [const { Vec::new() }; 4];
    for _ in 0..5 {
        let batches = |count: usize, workers| {
            loader(Slow { len: BATCH * count, spins }, workers).batches(0).map(Result::unwrap)
        };
        let steps = || (0..iterations).for_each(|_| take(BATCH as u64, spins));
        let mean = |work: &mut dyn FnMut()| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e3 / iterations as f64
        };
        rounds[0].push(mean(&mut || assert_eq!(batches(iterations, 0).count(), iterations)));
        rounds[1].push(mean(&mut || steps()));
        // The first batch cannot be hidden.
        let mut both = batches(iterations + 1, workers);
        both.next();
        rounds[2].push(mean(&mut || {
            for _ in 0..iterations {
                take(BATCH as u64, spins);
                both.next();
            }
        }));
        rounds[3].push(mean(&mut || {
            thread::scope(|scope| {
                scope.spawn(|| batches(iterations, 0).count());
                steps();
            });
        }));
    }
    let [batch, step, both, apart] = rounds.map(median);
    println!("{batch:.3} {step:.3} {both:.3} {apart:.3}");
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// An epoch of 64 batches of 16 MiB, with steps of 5 ms.
fn memory(workers: usize) {
    let loader = loader(Large(64 * BATCH), workers);
    let before = proportional_kib();
    let mut most = before;
    for batch in loader.batches(0) {
        let batch = batch.unwrap();
        thread::sleep(Duration::from_millis(5));
        most = most.max(proportional_kib());
        assert_eq!(batch.len(), BATCH);
    }
    println!("{:.0}", (most - before) / 1024.0);
}

/// Memory of this process.
fn proportional_kib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
