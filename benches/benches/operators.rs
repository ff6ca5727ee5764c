//! Operators of transformers whose loops are arithmetic: GELU, softmax, layer normalisation.
//!
//! Each line reports elements of the input per second. `plain loop` is the same formula with the
//! system's functions, compiled for the build's instruction set; `copy` reads and writes as many
//! elements.

use std::hint::black_box;
use std::time::Duration;

use benches::memcpy_ceiling;
use candle_core::{Device, Result, Tensor, Var};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let (rows, width) = (1024, 64);
    operator(&mut criterion, "gelu", (rows, width), candle_ops::gelu, plain_gelu);
    operator(&mut criterion, "softmax", (rows, width), candle_ops::softmax, plain_softmax);
    let parameters = [1.0_f32, 0.0].map(|v| Tensor::full(v, width, &Device::Cpu).expect("a shape"));
    let layer_norm = |x: &Tensor| candle_ops::layer_norm(x, &parameters[0], &parameters[1], 1e-5);
    operator(&mut criterion, "layer_norm", (rows, width), layer_norm, plain_layer_norm);
    criterion.final_summary();
}

/// Forward beside a plain loop over rows, then forward and backward.
fn operator(
    criterion: &mut Criterion,
    name: &str,
    (rows, width): (usize, usize),
    ours: impl Fn(&Tensor) -> Result<Tensor>,
    plain: fn(&mut [f32]),
) {
    let count = rows * width;
    let values: Vec<f32> = (0..count).map(|i| ((i * 7919) % 1999) as f32 / 256.0 - 3.9).collect();
    let x = Tensor::from_vec(values.clone(), (rows, width), &Device::Cpu).expect("a shape");
    let mut group: BenchmarkGroup<'_, WallTime> = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(count as u64));
    memcpy_ceiling(&mut group, BenchmarkId::from_parameter("copy"), count * size_of::<f32>());
    group.bench_function("plain loop", |b| {
        b.iter(|| {
            let mut y = black_box(&values).clone();
            y.chunks_exact_mut(width).for_each(plain);
            y
        });
    });
    group.bench_function("ours", |b| b.iter(|| ours(black_box(&x)).expect("a valid input")));
    let var = Var::from_tensor(&x).expect("a tensor");
    group.bench_function("ours, with backward", |b| {
        b.iter(|| ours(black_box(&var)).and_then(|y| y.backward()).expect("a valid input"));
    });
    group.finish();
}

/// By the tangent, since the standard library has no error function.
fn plain_gelu(row: &mut [f32]) {
    for v in row {
        let inner = (2.0 / std::f32::consts::PI).sqrt() * (*v + 0.044_715 * *v * *v * *v);
        *v *= 0.5 * (1.0 + inner.tanh());
    }
}

fn plain_softmax(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|v| *v = (*v - largest).exp());
    let sum: f32 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= sum);
}

fn plain_layer_norm(row: &mut [f32]) {
    let count = row.len() as f32;
    let mean = row.iter().sum::<f32>() / count;
    let var = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / count;
    let inverse = (var + 1e-5).sqrt().recip();
    row.iter_mut().for_each(|v| *v = (*v - mean) * inverse);
}
