//! `collective`'s copy compared with `memcpy`, for several alignments.
//!
//! The target's offset within a cache line is 0, 4, 16 or 48 bytes more than the source's. glibc's
//! `memcpy` depends on it if it uses `rep movsb`; ours does not.

use std::hint::black_box;
use std::time::Duration;

use collective::copy_slice;
use criterion::{BenchmarkId, Criterion, Throughput};

/// A slice at `offset` within a page; large heap blocks start at 16.
fn from_page(memory: &mut [u8], offset: usize, len: usize) -> &mut [u8] {
    let start = memory.as_ptr().align_offset(4096) + offset;
    &mut memory[start..start + len]
}

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300))
        .configure_from_args();
    for size in [4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20] {
        let mut group = criterion.benchmark_group(format!("copy_{}_kib", size >> 10));
        group.throughput(Throughput::Bytes(size as u64));
        let (mut from, mut to) = (vec![1_u8; size + 8192], vec![2_u8; size + 8192]);
        for (source, target) in [(0, 0), (0, 4), (0, 16), (0, 48), (16, 0)] {
            let from = from_page(&mut from, source, size);
            let to = from_page(&mut to, target, size);
            let case = format!("{source} to {target}");
            group.bench_function(BenchmarkId::new("ours", &case), |b| {
                b.iter(|| copy_slice(black_box(&mut *to), black_box(from)));
            });
            group.bench_function(BenchmarkId::new("memcpy", &case), |b| {
                b.iter(|| black_box(&mut *to).copy_from_slice(black_box(from)));
            });
        }
        group.finish();
    }
    criterion.final_summary();
}
