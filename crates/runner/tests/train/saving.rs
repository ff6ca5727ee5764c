//! What is saved, and when: the order of hooks does not matter.

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
