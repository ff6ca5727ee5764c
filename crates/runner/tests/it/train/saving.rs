//! Contents and time of checkpoints: they do not depend on the order of hooks, non-finite weights
//! are not saved, and `last_checkpoint` always names a resumable one.

use parking_lot::Mutex;
use safetensors::SafeTensors;

use super::midway::{MIDWAY, assert_same_state, by_iters};
use super::overflow::{buffers, norm};
use super::*;

/// `MIDWAY` with schedulers, and with a checkpoint hook that runs before all other hooks.
fn early() -> (String, String) {
    let config = format!("{VALIDATION}{MIDWAY}{SCHEDULERS}");
    let early = config.replace("save_best =", "priority = \"HIGH\", save_best =");
    assert_ne!(config, early);
    (config, early)
}

#[test]
fn checkpoints_do_not_depend_on_the_order_of_hooks() {
    let dir = tempfile::tempdir().unwrap();
    let early = early();
    let [late, early] = [early.0, early.1].map(|config| config.replace(", max_keep_ckpts = 2", ""));
    let [a, b] = ["late", "early"].map(|name| dir.path().join(name));
    // Saved after an iteration, after a validation with a new best, by the time budget, and at the
    // end.
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
fn checkpoint_saved_in_a_validation_contains_the_trained_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let config = early().1;
    resume(&config, &whole, 2);
    killed(&config, &broken, 2, 13);
    assert_eq!(std::fs::read_to_string(broken.join("last_checkpoint")).unwrap(), "iter_12");
    resume(&config, &broken, 2);
    assert_same_state(&whole, &broken, "iter_24");
}

/// Checkpoints without optimizer, which cannot be resumed from.
fn weights_only() -> String {
    format!("default_hooks.checkpoint.save_optimizer = false\n{MLP}")
}

#[test]
fn checkpoints_of_weights_only_are_named_and_not_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(&weights_only(), dir.path(), 2, |builder, _| builder);
    assert!(outcome.iter().all(Result::is_ok));
    for outcome in run(&weights_only(), dir.path(), 2, |builder, _| builder.resume(true)) {
        let said = outcome.unwrap_err().to_string();
        assert!(said.contains("/epoch_2 "), "{said}");
        assert!(said.contains("no optimizer") && said.contains("`load_from`"), "{said}");
    }
    // A model can be loaded from them.
    let from = dir.path().join("epoch_2");
    let outcome = run(MLP, &dir.path().join("b"), 2, |builder, _| builder.load_from(from.clone()));
    assert!(outcome.iter().all(Result::is_ok));
}

#[test]
fn best_model_without_a_checkpoint_does_not_prevent_resume() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!(
        "default_hooks.checkpoint = {{ interval = 2, save_best = 'accuracy' }}\n{VALIDATION}{MLP}"
    );
    killed(&config, dir.path(), 2, 13);
    assert_eq!(checkpoints(dir.path()), ["best_accuracy_epoch_1"]);
    resume(&config, dir.path(), 2);
    let log = log(dir.path());
    assert!(log.contains("best_accuracy_epoch_1 is an exported model"), "{log}");
    assert!(checkpoints(dir.path()).contains(&"epoch_2".to_owned()));
}

#[test]
fn time_budget_exhausted_at_the_end_of_an_epoch_validates_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("default_hooks.checkpoint.interval = 5\n{VALIDATION}{MLP}");
    let outcome = out_of_time(&config, dir.path(), 2, 12);
    assert!(outcome.iter().all(|o| !o.as_ref().unwrap().is_empty()));
    assert_eq!(checkpoints(dir.path()), ["epoch_1"]);
    assert_eq!(log(dir.path()).matches("Epoch(val)").count(), 1, "{}", log(dir.path()));
}

#[test]
fn exhausted_time_budget_without_a_checkpoint_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    for (name, config, is_saved) in [
        ("saved", MLP.to_owned(), true),
        ("weights", weights_only(), false),
        ("none", format!("default_hooks.checkpoint = false\n{MLP}"), false),
    ] {
        let dir = dir.path().join(name);
        assert!(out_of_time(&config, &dir, 1, 5).iter().all(Result::is_ok));
        let log = log(&dir);
        let told = log.contains("no checkpoint was saved");
        assert_eq!(told, !is_saved, "{name}: {log}");
    }
}

/// Full precision; each epoch and the best are saved, and one checkpoint is kept.
fn fp32() -> String {
    let start = MLP.find("type = \"AmpOptimWrapper\"").unwrap();
    let config = MLP.split_at(start).0.replace("max_epochs = 2", "max_epochs = 4");
    format!(
        "default_hooks.checkpoint = {{ max_keep_ckpts = 1, save_best = 'accuracy' }}\n\
         {VALIDATION}{config}optimizer = {{ type = 'SGD', lr = 0.05, momentum = 0.9 }}\n"
    )
}

/// Makes a weight infinite before iteration `iter`.
fn poison(iter: usize) -> Box<dyn Hook> {
    before_iter(iter, |runner| {
        let mut first = true;
        Ok(runner.engine_mut().with_params(&mut |params| {
            if let (true, fused_optim::SliceMut::F32(v)) = (first, &mut params[0]) {
                v.fill(f32::INFINITY);
                first = false;
            }
            Ok(())
        })?)
    })
}

#[test]
fn non_finite_weights_do_not_replace_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    // 12 batches per epoch: the second epoch's checkpoint is the last finite one.
    let outcome = run(&fp32(), dir.path(), 2, |builder, _| builder.hook(poison(29)));
    let says = format!(
        "is not finite at the end, iteration 48, the loss has not been finite since iteration 30; the last good \
         checkpoint is {}/epoch_2",
        dir.path().display()
    );
    for error in outcome {
        let error = error.unwrap_err();
        assert!(
            matches!(error, Error::Diverged { .. }) && error.to_string().contains(&says),
            "{error}"
        );
    }
    let (kept, log) = (checkpoints(dir.path()), log(dir.path()));
    assert_eq!(kept.len(), 2, "{kept:?}");
    assert!(kept[0].starts_with("best_accuracy_epoch_") && kept[1] == "epoch_2", "{kept:?}");
    assert_eq!(std::fs::read_to_string(dir.path().join("last_checkpoint")).unwrap(), "epoch_2");
    assert_eq!(log.matches("the loss is NaN at iteration 30 on rank 0").count(), 1, "{log}");
    assert_eq!(log.matches("the loss is ").count(), 1, "{log}");
    assert!(log.contains("epoch_4 is not saved: `"), "{log}");
    let model = std::fs::read(dir.path().join("epoch_2/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&model).unwrap();
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    assert!(tensors.iter().all(|(_, view)| numbers(view.data()).iter().all(|x| x.is_finite())));
}

#[test]
fn non_finite_accumulated_gradients_do_not_replace_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let config = fp32()
        .replace("optimizer =", "accumulative_counts = 8\noptimizer =")
        .replace("max_keep_ckpts = 1", "by_epoch = false, interval = 3, max_keep_ckpts = 1");
    // The weight is finite again before the step, but the accumulated gradients are not.
    let outcome = run(&config, dir.path(), 1, |builder, _| {
        let (mut saved, mut calls) = (Vec::new(), 0);
        builder.hook(Box::new(BeforeIter(Box::new(move |runner| {
            calls += 1;
            Ok(runner.engine_mut().with_params(&mut |params| {
                let fused_optim::SliceMut::F32(v) = &mut params[0] else { panic!("not f32") };
                match calls {
                    5 => {
                        saved = v.to_vec();
                        v.fill(f32::INFINITY);
                    }
                    6 => v.copy_from_slice(&saved),
                    8 => return Err(Error::data("killed").into()),
                    _ => {}
                }
                Ok(())
            })?)
        }))))
    });
    assert!(outcome.iter().all(Result::is_err));
    assert_eq!(checkpoints(dir.path()), ["iter_3"], "{}", log(dir.path()));
}

#[test]
fn overflow_skipped_by_the_loss_scale_is_no_warning() {
    let dir = tempfile::tempdir().unwrap();
    let config = MLP.replace("init_scale = 256.0", "init_scale = 1e30");
    let outcome = run(&config, dir.path(), 2, |builder, _| builder);
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
    assert_eq!(checkpoints(dir.path()), ["epoch_1", "epoch_2"]);
    assert!(!log(dir.path()).contains("WARNING"), "{}", log(dir.path()));
}

#[test]
fn check_invalid_loss_hook_ends_the_run_at_its_interval() {
    let dir = tempfile::tempdir().unwrap();
    let check = "[[custom_hooks]]\ntype = 'CheckInvalidLossHook'\ninterval = 8\n";
    let config = format!("{}{check}", fp32());
    let outcome = run(&config, dir.path(), 2, |builder, _| builder.hook(poison(29)));
    for outcome in outcome {
        let error = outcome.unwrap_err();
        let said = error.to_string();
        assert!(said.contains("the loss is NaN at iteration 32 on rank "), "{said}");
        assert!(matches!(error, Error::InvalidLoss { loss, iter: 32, .. } if loss.is_nan()));
    }
    assert!(checkpoints(dir.path()).contains(&"epoch_2".to_owned()));
}

/// Records the buffers of each validation, by iteration.
type Seen = Arc<Mutex<Vec<(usize, Vec<Vec<f32>>)>>>;

struct NoteBuffers(Seen);

impl Hook for NoteBuffers {
    fn name(&self) -> &'static str {
        "NoteBuffers"
    }

    fn before_val_iter(&mut self, runner: &mut Runner, index: usize, _: &mut Batch) -> Result<()> {
        if index == 0 {
            let seen = (runner.position().iter, buffers(runner)?);
            self.0.lock().push(seen);
        }
        Ok(())
    }
}

#[test]
fn saved_buffers_equal_validated_ones_in_a_run_by_iterations() {
    let ema = "[[custom_hooks]]\ntype = \"EMAHook\"";
    // With an average of the buffers and without, in both orders of the hooks, and without any
    // average.
    let with = by_iters(&norm(1)).replace("interval = 5, max_keep_ckpts = 2", "interval = 9");
    let late = with.replace(ema, &format!("{ema}\npriority = \"HIGH\""));
    let raw = with.replace("update_buffers = true", "update_buffers = false");
    let (head, tail) = with.split_once("[[custom_hooks]]").unwrap();
    let none = format!("{head}{}", &tail[tail.find("[[custom_hooks]]").unwrap()..]);
    for (name, config) in [("with", &with), ("late", &late), ("raw", &raw), ("none", &none)] {
        let dir = tempfile::tempdir().unwrap();
        let seen = Seen::default();
        let outcome = run(config, dir.path(), 2, |builder, rank| match rank {
            0 => builder.hook(Box::new(NoteBuffers(Arc::clone(&seen)))),
            _ => builder,
        });
        assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
        let seen = seen.lock();
        assert_eq!(seen.iter().map(|(iter, _)| *iter).collect::<Vec<_>>(), [9, 18, 24], "{name}");
        for (iter, validated) in seen.iter() {
            let bytes = std::fs::read(dir.path().join(format!("iter_{iter}/model.safetensors")));
            let bytes = bytes.unwrap();
            let saved = SafeTensors::deserialize(&bytes).unwrap();
            let first = ["bn1.running_mean", "bn1.running_var"].map(|name| {
                let all = saved.tensor(name).unwrap().data().as_chunks().0.iter();
                all.map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
            });
            assert_eq!(first, validated[..2], "{name}: iteration {iter}");
        }
    }
}
