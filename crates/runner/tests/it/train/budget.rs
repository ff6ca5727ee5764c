//! Start of a time budget, and the cost of agreeing that it is exhausted.

use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::*;

/// Number of exchanges of rank 0, and their total time, in a run of 20 epochs of 12 iterations.
fn exchanges_within(budget: Option<Duration>) -> (u64, Duration) {
    let (dir, exchanges) = (tempfile::tempdir().unwrap(), Arc::new(AtomicU64::new(0)));
    let config = MLP.replace("max_epochs = 2", "max_epochs = 20");
    let start = Instant::now();
    let outcome = run(&config, dir.path(), 2, |builder, rank| {
        let (exchanges, mut next) = (Arc::clone(&exchanges), 0);
        let count = move |runner: &mut Runner| {
            let calls = runner.group().flight_record().calls;
            let fresh = calls.iter().filter(|call| call.seq >= next);
            let count = fresh.filter(|call| call.call == "all_reduce of 19 u8, max").count();
            if rank == 0 {
                exchanges.fetch_add(count as u64, Ordering::Relaxed);
            }
            next = calls.last().map_or(0, |call| call.seq + 1);
            Ok(())
        };
        builder.time_budget(budget).hook(Box::new(BeforeIter(Box::new(count))))
    });
    assert!(outcome.iter().all(Result::is_ok));
    (exchanges.load(Ordering::Relaxed), start.elapsed())
}

#[test]
fn ranks_need_no_exchange_per_iteration() {
    for budget in [None, Some(Duration::from_secs(3600))] {
        let (exchanges, took) = exchanges_within(budget);
        // About one every 20 ms; iterations on a loaded machine take as long.
        let most = 20 + took.as_millis() / 10;
        assert!(exchanges > 0 && u128::from(exchanges) < most, "{exchanges} in {took:?}");
    }
}

#[test]
fn first_exhausted_time_budget_ends_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(MLP, dir.path(), 2, |builder, rank| {
        builder.time_budget(Some(Duration::from_secs(3600 * (1 - rank as u64))))
    });
    assert!(outcome.iter().all(Result::is_ok));
    assert_eq!(checkpoints(dir.path()), ["iter_1"]);
}

#[test]
fn time_budget_counts_from_the_end_of_the_first_step() {
    let hour = Duration::from_secs(3600);
    for (budget, trained) in [(hour, "epoch_2"), (Duration::ZERO, "iter_1")] {
        let dir = tempfile::tempdir().unwrap();
        let outcome = run(MLP, dir.path(), 1, |builder, _| {
            let check = move |runner: &mut Runner| {
                let left = runner.budget_left().unwrap();
                // Compilation in the first step does not count.
                match runner.position().iter {
                    0 => assert_eq!(left, budget),
                    _ => assert!(left < budget),
                }
                Ok(())
            };
            builder.time_budget(Some(budget)).hook(Box::new(BeforeIter(Box::new(check))))
        });
        assert!(outcome.iter().all(Result::is_ok));
        assert_eq!(checkpoints(dir.path()).last().unwrap(), trained);
    }
}
