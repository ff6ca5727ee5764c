//! How near are casts to a copy, in the cache and out of it?
//!
//! Each line reports bytes per second, read and written: 6 per element for a cast to a half type
//! and back, 8 for `memcpy`, which is the ceiling. `half` is that crate's own slice conversion, the
//! plain twin for bf16 (for f16 it is what we call).

use std::hint::black_box;
use std::time::Duration;

use amp::{CastTo, cast};
use benches::memcpy_ceiling;
use criterion::{BenchmarkId, Criterion, Throughput};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    for (place, count) in [("cache", 4 << 10), ("memory", 32 << 20)] {
        let mut group = criterion.benchmark_group(format!("cast_{place}"));
        let mut wide: Vec<f32> = (0..count).map(|i| (i % 1999) as f32 - 999.5).collect();
        let mut f16s = vec![f16::ZERO; count];
        let mut bf16s = vec![bf16::ZERO; count];

        group.throughput(Throughput::Bytes(6 * count as u64));
        group.bench_function("f32 to f16", |b| b.iter(|| run(&wide, &mut f16s)));
        group.bench_function("f16 to f32", |b| b.iter(|| run(&f16s, &mut wide)));
        group.bench_function("f32 to bf16", |b| b.iter(|| run(&wide, &mut bf16s)));
        group.bench_function("f32 to bf16, half", |b| {
            b.iter(|| black_box(&mut bf16s[..]).convert_from_f32_slice(black_box(&wide)));
        });
        group.bench_function("bf16 to f32", |b| b.iter(|| run(&bf16s, &mut wide)));
        group.throughput(Throughput::Bytes(4 * count as u64));
        group.bench_function("f16 to bf16", |b| b.iter(|| run(&f16s, &mut bf16s)));

        group.throughput(Throughput::Bytes(8 * count as u64));
        memcpy_ceiling(&mut group, BenchmarkId::from_parameter("ceiling: memcpy"), 4 * count);
        group.finish();
    }
    criterion.final_summary();
}

fn run<S: CastTo<D>, D>(input: &[S], output: &mut [D]) {
    cast(black_box(input), black_box(output)).expect("buffers of one length");
}
