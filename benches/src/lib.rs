//! Shared by the benchmarks: ceilings and tensors.

pub mod ceiling;
pub mod exchange;
pub mod tensors;

use std::hint::black_box;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId};

/// Measures, under `id`, a `memcpy` of `bytes` between two buffers in ordinary memory. The group's
/// throughput must be set.
pub fn memcpy_ceiling(group: &mut BenchmarkGroup<'_, WallTime>, id: BenchmarkId, bytes: usize) {
    let (source, mut target) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    group.bench_function(id, |b| {
        b.iter(|| black_box(&mut target[..]).copy_from_slice(black_box(&source)));
    });
}
