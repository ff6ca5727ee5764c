//! Casts in cache and in memory, compared with `memcpy` and with the `half` crate.
//!
//! Each line reports bytes per second, read and written: 6 per element for a cast between f32 and a
//! half type, 4 between the half types, 8 for `memcpy`, which is the ceiling. `half` is that
//! crate's conversion of slices; between the half types, for which it has none, a loop over the
//! elements. At the end it prints the ratios of the best of interleaved samples.

use std::hint::black_box;
use std::time::{Duration, Instant};

use amp::{CastTo, cast};
use benches::memcpy_ceiling;
use criterion::{BenchmarkId, Criterion, Throughput};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

struct Buffers {
    wide: Vec<f32>,
    wide_copy: Vec<f32>,
    f16s: Vec<f16>,
    bf16s: Vec<bf16>,
}

impl Buffers {
    fn new(count: usize) -> Self {
        let wide: Vec<f32> = (0..count).map(|i| (i % 1999) as f32 - 999.5).collect();
        let (wide_copy, f16s, bf16s) =
            (wide.clone(), vec![f16::ONE; count], vec![bf16::ONE; count]);
        Self { wide, wide_copy, f16s, bf16s }
    }
}

/// Name, bytes per element, our cast, the `half` crate's.
type Case = (&'static str, usize, fn(&mut Buffers), fn(&mut Buffers));

const CASES: [Case; 5] = [
    (
        "f32 to f16",
        6,
        |b| run(&b.wide, &mut b.f16s),
        |b| black_box(&mut b.f16s[..]).convert_from_f32_slice(black_box(&b.wide)),
    ),
    (
        "f16 to f32",
        6,
        |b| run(&b.f16s, &mut b.wide),
        |b| black_box(&b.f16s[..]).convert_to_f32_slice(black_box(&mut b.wide)),
    ),
    (
        "f32 to bf16",
        6,
        |b| run(&b.wide, &mut b.bf16s),
        |b| black_box(&mut b.bf16s[..]).convert_from_f32_slice(black_box(&b.wide)),
    ),
    (
        "bf16 to f32",
        6,
        |b| run(&b.bf16s, &mut b.wide),
        |b| black_box(&b.bf16s[..]).convert_to_f32_slice(black_box(&mut b.wide)),
    ),
    ("f16 to bf16", 4, |b| run(&b.f16s, &mut b.bf16s), by_element),
];

const MEMCPY: fn(&mut Buffers) =
    |b| black_box(&mut b.wide_copy[..]).copy_from_slice(black_box(&b.wide));

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let places = [("cache", 4 << 10), ("memory", 33_000_000)];
    for (place, count) in places {
        let mut group = criterion.benchmark_group(format!("cast_{place}"));
        let mut buffers = Buffers::new(count);
        for (name, bytes, ours, half) in CASES {
            group.throughput(Throughput::Bytes((bytes * count) as u64));
            group.bench_function(name, |b| b.iter(|| ours(&mut buffers)));
            group.bench_function(format!("{name}, half"), |b| b.iter(|| half(&mut buffers)));
        }
        group.throughput(Throughput::Bytes(8 * count as u64));
        memcpy_ceiling(&mut group, BenchmarkId::from_parameter("ceiling: memcpy"), 4 * count);
        group.finish();
    }
    criterion.final_summary();
    if !std::env::args().any(|arg| arg == "--test") {
        for (place, count) in places {
            ratios(place, count);
        }
    }
}

fn run<S: CastTo<D>, D>(input: &[S], output: &mut [D]) {
    cast(black_box(input), black_box(output)).expect("buffers of one length");
}

fn by_element(buffers: &mut Buffers) {
    let (input, output) = (black_box(&buffers.f16s), black_box(&mut buffers.bf16s));
    for (x, y) in input.iter().zip(output) {
        *y = bf16::from_f32(x.to_f32());
    }
}

/// Prints ratios; the samples are interleaved.
#[expect(clippy::print_stdout, reason = "the result")]
fn ratios(place: &str, count: usize) {
    let mut buffers = Buffers::new(count);
    let repeats = (4 << 20) / count + 1;
    for (name, bytes, ours, half) in CASES {
        let mut best = [f64::INFINITY; 3];
        for _ in 0..20 {
            for (best, work) in best.iter_mut().zip([ours, half, MEMCPY]) {
                let start = Instant::now();
                (0..repeats).for_each(|_| work(&mut buffers));
                *best = best.min(start.elapsed().as_secs_f64());
            }
        }
        let [ours, half, memcpy] = best;
        let gigabytes = (bytes * count * repeats) as f64 / ours / 1e9;
        let copied = ours / bytes as f64 / (memcpy / 8.0);
        println!(
            "{place:>6}, {name:>11}: {:5.2} x half, {:4.2} x memcpy by bytes, {gigabytes:.1} GB/s",
            half / ours,
            1.0 / copied,
        );
    }
}
