//! What is saved, and when: the order of hooks does not matter, and
//! what cannot be resumed is not called a checkpoint to resume from.

use super::midway::{MIDWAY, assert_same_state};
use super::*;

/// `MIDWAY` whose checkpoints are asked for before any other hook has had its turn, with schedulers.
fn early() -> (String, String) {
    let config = format!("{VALIDATION}{MIDWAY}{SCHEDULERS}");
    let early = config.replace("save_best =", "priority = \"HIGH\", save_best =");
    assert_ne!(config, early);
    (config, early)
}

#[test]
fn what_is_saved_does_not_depend_on_the_order_of_hooks() {
    let dir = tempfile::tempdir().unwrap();
    let (late, early) = early();
    let [a, b] = ["late", "early"].map(|name| dir.path().join(name));
    // Saved after an iteration, after a validation that was better than ever, by the time budget, at the end.
    for (at, names) in [(11, ["iter_10", "iter_11"]), (13, ["iter_12", "iter_13"])] {
        for (dir, config) in [(&a, &late), (&b, &early)] {
            assert!(out_of_time(config, dir, 2, at).iter().all(Result::is_ok));
        }
        for name in names {
            assert_same_state(&a, &b, name);
        }
        for name in checkpoints(&a).iter().filter(|name| name.starts_with("best")) {
            let read =
                |dir: &Path| std::fs::read(dir.join(name).join("model.safetensors")).unwrap();
            assert!(read(&a) == read(&b), "{name} differs");
        }
        assert_eq!(checkpoints(&a), checkpoints(&b));
        for dir in [&a, &b] {
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}

#[test]
fn a_checkpoint_written_in_a_validation_resumes_from_the_weights_in_training() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let config = early().1;
    resume(&config, &whole, 2);
    killed(&config, &broken, 2, 13);
    assert_eq!(std::fs::read_to_string(broken.join("last_checkpoint")).unwrap(), "iter_12");
    resume(&config, &broken, 2);
    assert_same_state(&whole, &broken, "iter_24");
}

/// Without an optimizer in its checkpoints a run cannot be resumed.
fn weights_only() -> String {
    format!("default_hooks.checkpoint.save_optimizer = false\n{MLP}")
}

#[test]
fn weights_alone_are_not_resumed_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(&weights_only(), dir.path(), 2, |builder, _| builder);
    assert!(outcome.iter().all(Result::is_ok));
    for outcome in run(&weights_only(), dir.path(), 2, |builder, _| builder.resume(true)) {
        let said = outcome.unwrap_err().to_string();
        assert!(said.contains("/epoch_2 "), "{said}");
        assert!(said.contains("no optimizer") && said.contains("`load_from`"), "{said}");
    }
    // They are as good as any to take a model from.
    let from = dir.path().join("epoch_2");
    let outcome = run(MLP, &dir.path().join("b"), 2, |builder, _| builder.load_from(from.clone()));
    assert!(outcome.iter().all(Result::is_ok));
}

#[test]
fn a_best_model_saved_before_any_checkpoint_does_not_stand_in_the_way() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!(
        "default_hooks.checkpoint = {{ interval = 2, save_best = 'accuracy' }}\n{VALIDATION}{MLP}"
    );
    killed(&config, dir.path(), 2, 13);
    assert_eq!(checkpoints(dir.path()), ["best_accuracy_epoch_1"]);
    resume(&config, dir.path(), 2);
    let log = log(dir.path());
    assert!(log.contains("best_accuracy_epoch_1 has no optimizer"), "{log}");
    assert!(checkpoints(dir.path()).contains(&"epoch_2".to_owned()));
}

#[test]
fn a_time_budget_that_leaves_no_checkpoint_says_so() {
    let dir = tempfile::tempdir().unwrap();
    for (name, config, is_saved) in [
        ("saved", MLP.to_owned(), true),
        ("weights", weights_only(), false),
        ("none", format!("default_hooks.checkpoint = false\n{MLP}"), false),
    ] {
        let dir = dir.path().join(name);
        assert!(out_of_time(&config, &dir, 1, 5).iter().all(Result::is_ok));
        let log = log(&dir);
        let told = log.contains("no checkpoint to resume from was written");
        assert_eq!(told, !is_saved, "{name}: {log}");
    }
}
