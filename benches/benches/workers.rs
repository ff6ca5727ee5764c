//! Cost of a job of `train_data::Workers`, compared with bare crossbeam channels.
//!
//! Jobs are no-ops. `bare` is the upper bound: one thread per worker passes numbers, out of order,
//! from one bounded channel to another of the same capacity.

use std::thread;

use criterion::{BenchmarkId, Criterion, Throughput};
use crossbeam_channel::bounded;
use train_data::Workers;

/// Passes `jobs` numbers through threads that only send them back; at most `ahead` are on their
/// way.
fn bare(jobs: u64, workers: usize, ahead: usize) -> u64 {
    let (queue, queue_in) = bounded(ahead);
    let (results_out, results) = bounded(ahead);
    thread::scope(|scope| {
        for _ in 0..workers {
            let (queue, results) = (queue_in.clone(), results_out.clone());
            scope.spawn(move || queue.iter().try_for_each(|job: u64| results.send(job)));
        }
        drop((queue_in, results_out));
        scope.spawn(move || (0..jobs).try_for_each(|job| queue.send(job)));
        results.iter().sum()
    })
}

fn main() {
    let mut criterion = Criterion::default().sample_size(20).configure_from_args();
    let mut group = criterion.benchmark_group("job");
    group.throughput(Throughput::Elements(1));
    for count in [0, 1, 2] {
        let workers = Workers::new(count).prefetch_factor(4);
        group.bench_function(BenchmarkId::new("ours", count), |b| {
            b.iter_custom(|jobs| {
                let start = std::time::Instant::now();
                let sum: u64 = workers.map(0..jobs, |job| job).filter_map(Result::ok).sum();
                let time = start.elapsed();
                assert_eq!(sum, (0..jobs).sum::<u64>());
                time
            });
        });
        if count > 0 {
            group.bench_function(BenchmarkId::new("bare", count), |b| {
                b.iter_custom(|jobs| {
                    let start = std::time::Instant::now();
                    let sum = bare(jobs, count, 4 * count);
                    let time = start.elapsed();
                    assert_eq!(sum, (0..jobs).sum::<u64>());
                    time
                });
            });
        }
    }
    group.finish();
    criterion.final_summary();
}
