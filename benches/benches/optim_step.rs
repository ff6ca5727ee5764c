//! Optimizer steps compared with memory bandwidth.
//!
//! The tensors are ResNet-50's (161 with 25.6 M parameters), a transformer's (148 with 109 M) or,
//! to measure arithmetic, one of 32,768 elements, which fits the L2 cache; one thread unless said
//! otherwise. Every line reports the bytes that its algorithm must read and write, per second: 28
//! per parameter for AdamW (weight and two moments read and written, gradient read), also with f16
//! weights and gradients (the master instead of the weight, and two bytes each); 4 more if the
//! gradients are checked first. `ceiling` reads and writes the same streams with almost no
//! arithmetic ([`benches::ceiling`]). `plain loop` is the same rule as a simple loop, compiled for
//! the build's instruction set.

use std::time::Duration;

use benches::ceiling::{Pattern, Stream};
use benches::tensors::{resnet50, step, tensors, transformer};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use fused_optim::{
    Adadelta, AdadeltaHyper, Adam, AdamHyper, AdamP, AdamPHyper, AdamW, AdamWHyper, BertAdam,
    BertAdamHyper, Clip, FoundInf, Lamb, LambHyper, Optimizer, ParamMut, RmsProp, RmsPropHyper,
    RmsPropTf, RmsPropTfHyper, Sgd, SgdHyper, Slice, SliceMut, StepCtl,
};
use half::f16;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(4))
        .configure_from_args();
    let counts = resnet50();
    adamw(&mut criterion, &counts);
    others(&mut criterion, "resnet50", &counts);
    others(&mut criterion, "cache", &[32_768]);
    small(&mut criterion);
    large(&mut criterion);
    criterion.final_summary();
}

fn adamw(criterion: &mut Criterion, counts: &[usize]) {
    let count: usize = counts.iter().sum();
    let bytes = Pattern::TwoStates.bytes() * count;
    let hyper = AdamWHyper::default();
    let mut group = criterion.benchmark_group("adamw_resnet50");
    group.throughput(Throughput::Bytes(bytes as u64));
    ceiling(&mut group, Pattern::TwoStates, counts, 1);
    ceiling(&mut group, Pattern::TwoStates, counts, 2);

    let grads = tensors(counts);
    let mut weights = tensors(counts);
    let mut optimizer = AdamW::with_one_group(hyper, counts.len()).expect("valid defaults");
    group
        .bench_function("f32", |b| b.iter(|| step(&mut optimizer, &mut weights, &grads, &UNSCALE)));
    optimizer.set_threads(2);
    group.bench_function("f32, 2 threads", |b| {
        b.iter(|| step(&mut optimizer, &mut weights, &grads, &UNSCALE));
    });
    optimizer.set_threads(1);
    group.throughput(Throughput::Bytes((Pattern::CheckThenTwoStates.bytes() * count) as u64));
    ceiling(&mut group, Pattern::CheckThenTwoStates, counts, 1);
    let check = StepCtl { found_inf: FoundInf::Check, ..UNSCALE };
    group.bench_function("f32, check first", |b| {
        b.iter(|| step(&mut optimizer, &mut weights, &grads, &check));
    });
    let amp = StepCtl { clip: Some(Clip::norm(1.0)), ..check };
    group.bench_function("f32, check, clip by norm", |b| {
        b.iter(|| step(&mut optimizer, &mut weights, &grads, &amp));
    });
    group.throughput(Throughput::Bytes(bytes as u64));
    drop(optimizer);
    flat(&mut group, count);

    let (mut m, mut v) = (zeros(counts), zeros(counts));
    let mut t = 0;
    group.bench_function("plain loop", |b| {
        b.iter(|| {
            t += 1;
            for (i, weight) in weights.iter_mut().enumerate() {
                plain_adamw(&hyper, t, weight, &grads[i], &mut m[i], &mut v[i]);
            }
        });
    });
    drop((m, v));

    let halve = |all: &[Vec<f32>]| -> Vec<Vec<f16>> {
        all.iter().map(|x| x.iter().copied().map(f16::from_f32).collect()).collect()
    };
    let (mut half_weights, half_grads) = (halve(&weights), halve(&grads));
    drop((weights, grads));
    let mut optimizer = AdamW::with_one_group(hyper, counts.len()).expect("valid defaults");
    group.bench_function("f16 with master", |b| {
        b.iter(|| {
            let mut params: Vec<_> = (half_weights.iter_mut().zip(&half_grads))
                .map(|(w, g)| ParamMut::new(SliceMut::F16(w), Some(Slice::F16(g))))
                .collect();
            optimizer.step(&mut params, &UNSCALE).expect("valid tensors")
        });
    });
    group.finish();
}

/// AdamW on one tensor with the same number of elements.
fn flat(group: &mut BenchmarkGroup<'_, WallTime>, count: usize) {
    let grads = tensors(&[count]);
    let mut weights = tensors(&[count]);
    let mut adamw = optimizer(&[count], AdamW::with_one_group, AdamWHyper::default());
    group.bench_function("f32, one tensor of as many elements", |b| {
        b.iter(|| step(&mut *adamw, &mut weights, &grads, &UNSCALE));
    });
}

/// The transformer's tensors.
fn large(criterion: &mut Criterion) {
    let counts = transformer();
    let sgd = SgdHyper { momentum: 0.9, ..SgdHyper::default() };
    let rules = [
        (Pattern::TwoStates, optimizer(&counts, AdamW::with_one_group, AdamWHyper::default())),
        (Pattern::OneState, optimizer(&counts, Sgd::with_one_group, sgd)),
    ];
    let grads = tensors(&counts);
    let mut weights = tensors(&counts);
    for (pattern, mut optimizer) in rules {
        let bytes = pattern.bytes() * counts.iter().sum::<usize>();
        let mut group = criterion.benchmark_group(format!("{}_transformer", optimizer.kind()));
        group.throughput(Throughput::Bytes(bytes as u64));
        ceiling(&mut group, pattern, &counts, 1);
        group.bench_function("f32", |b| {
            b.iter(|| step(&mut *optimizer, &mut weights, &grads, &UNSCALE));
        });
        group.finish();
    }
}

/// The other optimizers, each with its memory accesses.
fn others(criterion: &mut Criterion, tensors_of: &str, counts: &[usize]) {
    use Pattern::{CheckThenTwoStates, OneState, TwoStates, TwoSweeps};
    let sgd = SgdHyper { momentum: 0.9, ..SgdHyper::default() };
    let rules: [(Pattern, Box<dyn Optimizer>); 8] = [
        (TwoStates, optimizer(counts, Adadelta::with_one_group, AdadeltaHyper::default())),
        (TwoStates, optimizer(counts, Adam::with_one_group, AdamHyper::default())),
        (TwoSweeps, optimizer(counts, AdamP::with_one_group, AdamPHyper::default())),
        (CheckThenTwoStates, optimizer(counts, BertAdam::with_one_group, BertAdamHyper::default())),
        (TwoSweeps, optimizer(counts, Lamb::with_one_group, LambHyper::default())),
        (OneState, optimizer(counts, RmsProp::with_one_group, RmsPropHyper::default())),
        (OneState, optimizer(counts, RmsPropTf::with_one_group, RmsPropTfHyper::default())),
        (OneState, optimizer(counts, Sgd::with_one_group, sgd)),
    ];
    let grads = tensors(counts);
    let mut weights = tensors(counts);
    for (pattern, mut optimizer) in rules {
        let bytes = pattern.bytes() * counts.iter().sum::<usize>();
        let mut group = criterion.benchmark_group(format!("{}_{tensors_of}", optimizer.kind()));
        group.throughput(Throughput::Bytes(bytes as u64));
        ceiling(&mut group, pattern, counts, 1);
        group.bench_function("f32", |b| {
            b.iter(|| step(&mut *optimizer, &mut weights, &grads, &UNSCALE));
        });
        group.finish();
    }
}

fn optimizer<H, O: Optimizer + 'static>(
    counts: &[usize],
    new: impl Fn(H, usize) -> fused_optim::Result<O>,
    hyper: H,
) -> Box<dyn Optimizer> {
    Box::new(new(hyper, counts.len()).expect("valid values"))
}

/// Ten thousand tensors of 64 elements: the overhead for each tensor.
fn small(criterion: &mut Criterion) {
    let counts = [64; 10_000];
    let mut group = criterion.benchmark_group("adamw_10000_of_64");
    group.throughput(Throughput::Bytes((Pattern::TwoStates.bytes() * 640_000) as u64));
    ceiling(&mut group, Pattern::TwoStates, &counts, 1);
    for (name, counts) in [("tensors", &counts[..]), ("one of as many elements", &[640_000])] {
        let grads = tensors(counts);
        let mut weights = tensors(counts);
        let mut adamw = optimizer(counts, AdamW::with_one_group, AdamWHyper::default());
        group.bench_function(name, |b| {
            b.iter(|| step(&mut *adamw, &mut weights, &grads, &UNSCALE));
        });
    }
    group.finish();
}

fn ceiling(
    group: &mut BenchmarkGroup<'_, WallTime>,
    pattern: Pattern,
    counts: &[usize],
    threads: usize,
) {
    let mut stream = Stream::new(pattern, counts, threads);
    let name = format!("ceiling: {pattern:?}, {threads} threads");
    group.bench_function(name, |b| b.iter(|| stream.run()));
}

fn plain_adamw(
    hyper: &AdamWHyper,
    t: i32,
    weight: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    let (beta1, beta2) = (hyper.betas.0 as f32, hyper.betas.1 as f32);
    let decay = (1.0 - hyper.lr * hyper.weight_decay) as f32;
    let step_size = (hyper.lr / (1.0 - hyper.betas.0.powi(t))) as f32;
    let root = (1.0 - hyper.betas.1.powi(t)).sqrt() as f32;
    let eps = hyper.eps as f32;
    for (((w, g), m), v) in weight.iter_mut().zip(grad).zip(m).zip(v) {
        let g = g * UNSCALE.grad_scale;
        *m = *m * beta1 + g * (1.0 - beta1);
        *v = *v * beta2 + g * g * (1.0 - beta2);
        *w = *w * decay - step_size * (*m / (v.sqrt() / root + eps));
    }
}

fn zeros(counts: &[usize]) -> Vec<Vec<f32>> {
    counts.iter().map(|&count| vec![0.0; count]).collect()
}

const UNSCALE: StepCtl = StepCtl { grad_scale: 0.5, ..StepCtl::PLAIN };
