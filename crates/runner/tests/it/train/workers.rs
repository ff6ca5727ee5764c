//! Batches that load on worker threads.

use std::sync::atomic::AtomicUsize;

use runner::data::Workers;
use runner::engine::Losses;

use super::*;

/// Counts the iterations of all ranks.
#[derive(Clone, Default)]
struct Counter(Arc<AtomicUsize>);

impl Hook for Counter {
    fn name(&self) -> &'static str {
        "Counter"
    }

    fn after_train_iter(&mut self, _: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        // Relaxed: read after the threads were joined.
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Samples that hold a reference, to detect threads that outlive the run.
struct Held(Few, #[expect(dead_code, reason = "counted")] Arc<()>);

impl Dataset for Held {
    fn len(&self) -> usize {
        self.0.len
    }

    fn sample(&self, index: usize, random: &mut SampleRng) -> Result<Sample, BoxError> {
        self.0.sample(index, random)
    }
}

#[test]
fn workers_end_with_the_run() {
    let dir = tempfile::tempdir().unwrap();
    // Until the end, a failing sample, a failing step, or a time budget.
    for (case, broken, stop) in
        [("end", 99, 99), ("sample", 13, 99), ("step", 99, 3), ("time", 99, 99)]
    {
        let held = Arc::new(());
        let outcome = run(MLP, &dir.path().join(case), 2, |builder, _| {
            let data = || {
                let data = Held(Few { len: 30, broken }, Arc::clone(&held));
                DataLoaderConfig::new(data, 2).workers(Workers::new(3).persistent())
            };
            let stop = before_iter(stop, |_| Err(Error::data("stopped")));
            let builder = builder.train_dataloader(data()).validation(data(), Accuracy::default());
            match case {
                "time" => builder.hook(stop).time_budget(Some(Duration::ZERO)),
                _ => builder.hook(stop),
            }
        });
        let is_ok = ["end", "time"].contains(&case);
        assert!(outcome.iter().all(|o| o.is_ok() == is_ok), "{case}: {outcome:?}");
        assert_eq!(Arc::strong_count(&held), 1, "{case}");
    }
}

#[test]
fn failing_sample_on_one_rank_ends_all() {
    let dir = tempfile::tempdir().unwrap();
    for workers in [0, 2] {
        let data = |broken| few(30, broken, 2, false).workers(Workers::new(workers));
        let dir = dir.path().join(workers.to_string());
        let trained = Counter::default();
        let outcome = run(MLP, &dir, 3, |builder, _| {
            builder.train_dataloader(data(13)).hook(Box::new(trained.clone()))
        });
        assert_all_end_with(outcome, "data set `few`, sample 13: it is broken");
        // It is the fifth sample of rank 1.
        assert_eq!(trained.0.load(Ordering::Relaxed), 3 * 2, "batches before it are trained on");
        let outcome = run(MLP, &dir, 3, |builder, _| {
            builder.train_dataloader(data(99)).validation(data(13), Accuracy::default())
        });
        assert_all_end_with(outcome, "data set `few`, sample 13: it is broken");
    }
}
