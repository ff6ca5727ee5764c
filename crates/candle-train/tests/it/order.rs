//! Tests of ranks that call different methods, or a different number of times: errors name them.

use std::time::Duration;

use candle_core::Module;
use candle_ops::cross_entropy;
use candle_train::{AdamWHyper, Trainer};
use collective::ProcessGroup;

use super::{Net, batch, model};

/// Runs two ranks with a timeout of two seconds, and returns the texts of their errors.
fn errors(
    run: impl Fn(&mut Trainer, &Net, usize) -> candle_train::Result<()> + Sync,
) -> Vec<String> {
    let groups = ProcessGroup::threads(2, Duration::from_secs(2)).unwrap();
    std::thread::scope(|scope| {
        let run = &run;
        let rank = |group: ProcessGroup| {
            let (vars, net) = model(1);
            let rank = group.rank();
            let mut train =
                Trainer::builder(&vars).group(group).build(AdamWHyper::default()).unwrap();
            format!("{:?}", run(&mut train, &net, rank).unwrap_err())
        };
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn step(train: &mut Trainer, net: &Net) -> candle_train::Result<candle_train::Step> {
    let (x, y) = batch(&[0, 1, 2, 3]);
    train.step(|| cross_entropy(&net.forward(&x)?, &y))
}

#[test]
fn a_mean_on_one_rank_alone_names_both_calls() {
    let errors = errors(|train, net, rank| {
        let loss = step(train, net)?;
        if rank == 0 {
            train.mean(&loss.loss)?;
        }
        step(train, net)?;
        step(train, net).map(drop)
    });
    for error in &errors {
        assert!(error.contains("rank 0: ") && error.contains("`Trainer::mean`"), "{error}");
        assert!(error.contains("rank 1: ") && error.contains("`Trainer::step`"), "{error}");
        assert!(error.contains("`save` and `resume` equally often"), "{error}");
    }
}

#[test]
fn fewer_steps_on_one_rank_name_both_calls() {
    let directory = tempfile::tempdir().unwrap();
    let errors = errors(|train, net, rank| {
        for _ in 0..3 - rank {
            step(train, net)?;
        }
        train.save(directory.path().join("run"), 1)
    });
    for error in &errors {
        assert!(error.contains("rank 0: ") && error.contains("`Trainer::step`"), "{error}");
        assert!(error.contains("rank 1: ") && error.contains("`Trainer::save`"), "{error}");
    }
}

#[test]
fn a_rank_that_makes_no_call_is_named_with_what_waits_for_it() {
    let errors = errors(|train, net, rank| {
        step(train, net)?;
        if rank == 1 {
            // Longer than the timeout.
            std::thread::sleep(Duration::from_secs(3));
        }
        step(train, net).map(drop)
    });
    assert!(
        errors[0].contains("`Trainer::step`") && errors[0].contains("missing rank 1"),
        "{errors:?}"
    );
    assert!(errors[0].contains("`save` and `resume` equally often"), "{errors:?}");
}
