//! The built-in hooks, and the default hooks of a run.
//!
//! Hooks run in the order of [`Priority`], those of equal priority in the order of registration. A
//! hook has access to the whole run through the [`Runner`](crate::Runner) passed to it, and may
//! save state in checkpoints. A checkpoint requested by a hook is saved after all hooks of that
//! stage, so it does not depend on their order. Stages and their order are MMEngine's, plus
//! `on_interrupt`. Of MMEngine's six default hooks, `RuntimeInfoHook` and `DistSamplerSeedHook` may
//! be named but do nothing: the runner does their work.

mod check_invalid_loss;
mod checkpoint;
mod early_stopping;
mod ema;
mod iter_timer;
mod logger;
mod monitor;
mod sync_buffers;

pub use check_invalid_loss::CheckInvalidLossHook;
pub use checkpoint::{CheckpointHook, SaveBest};
pub use early_stopping::EarlyStoppingHook;
pub use ema::{Average, EmaHook};
pub use iter_timer::IterTimerHook;
pub use logger::LoggerHook;
pub use sync_buffers::SyncBuffersHook;

use crate::Result;
use crate::config::Section;
use crate::evaluate::check_metric;
use crate::registry::{Builtin, Registry};
use crate::runner::RunnerBuilder;
pub use crate::runner::{Hook, ParamSchedulerHook, Priority};

/// Hooks that a configuration can name: `[default_hooks]`, `[[custom_hooks]]`.
pub static HOOKS: Registry<Box<dyn Hook>> = Registry::with("hook", BUILTIN);

impl RunnerBuilder {
    /// Adds the default hooks of a configuration: timer, synchronization of buffers, log lines
    /// every ten iterations, schedulers, a checkpoint every epoch.
    #[must_use]
    pub fn default_hooks(self) -> Self {
        self.hook(Box::new(IterTimerHook::default()))
            .hook(Box::new(SyncBuffersHook::default()))
            .hook(Box::new(LoggerHook::new(10)))
            .hook(Box::new(ParamSchedulerHook))
            .hook(Box::new(CheckpointHook::new(1)))
    }
}

/// Builds a hook with the `priority` of its section (a name or a number), or its own. `metrics` are
/// the names of the validation's metrics, if known.
pub(crate) fn build(
    mut section: Section,
    default_type: Option<&str>,
    metrics: Option<&[String]>,
) -> Result<(Priority, Box<dyn Hook>)> {
    let place = ["save_best", "monitor"].into_iter().find(|key| section.has(key));
    let place = section.offset_of(place.unwrap_or("type"));
    let priority = Priority::read(&mut section)?;
    let hook = match default_type {
        Some(default_type) => HOOKS.build_or(section, default_type)?,
        None => HOOKS.build(section)?,
    };
    for metric in hook.metrics() {
        check_metric(&metric, metrics, &place)?;
    }
    Ok((priority.unwrap_or_else(|| hook.priority()), hook))
}

const BUILTIN: Builtin<Box<dyn Hook>> = &[
    ("CheckInvalidLossHook", check_invalid_loss::read),
    ("CheckpointHook", checkpoint::read),
    ("DistSamplerSeedHook", |_| Ok(Box::new(NoopHook("DistSamplerSeedHook", Priority::NORMAL)))),
    ("EMAHook", ema::read),
    ("EarlyStoppingHook", early_stopping::read),
    ("IterTimerHook", |_| Ok(Box::new(IterTimerHook::default()))),
    ("LoggerHook", logger::read),
    ("ParamSchedulerHook", |_| Ok(Box::new(ParamSchedulerHook))),
    ("RuntimeInfoHook", |_| Ok(Box::new(NoopHook("RuntimeInfoHook", Priority::VERY_HIGH)))),
    ("SyncBuffersHook", |_| Ok(Box::new(SyncBuffersHook::default()))),
];

/// Default hooks of a run: key in `[default_hooks]`, and type.
pub(crate) const DEFAULTS: &[(&str, &str)] = &[
    ("timer", "IterTimerHook"),
    ("sync_buffers", "SyncBuffersHook"),
    ("logger", "LoggerHook"),
    ("param_scheduler", "ParamSchedulerHook"),
    ("checkpoint", "CheckpointHook"),
];

/// MMEngine's default hooks that do nothing here: key and type, which a configuration may name, and
/// the reason for which they cannot be disabled.
pub(crate) const NOOP: &[(&str, &str, &str)] = &[
    ("runtime_info", "RuntimeInfoHook", "hooks read this information from the runner"),
    (
        "sampler_seed",
        "DistSamplerSeedHook",
        "the order of an epoch is a function of seed and epoch",
    ),
];

/// A default hook of MMEngine that does nothing here: the runner does its work.
struct NoopHook(&'static str, Priority);

impl Hook for NoopHook {
    fn name(&self) -> &'static str {
        self.0
    }

    fn priority(&self) -> Priority {
        self.1
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use serde_json::Value;

    use super::*;
    use crate::checkpoint::{Checkpoint, Contents};
    use crate::data::{Array, Batch};
    use crate::engine::Losses;
    use crate::runner::{Runner, TrainConfig};
    use crate::testing::{Metrics, blank, builder};

    /// Records the stages that it sees.
    struct Trace(&'static str, Priority, Arc<Mutex<Vec<String>>>);

    impl Trace {
        fn note(&self, stage: &str) -> Result<()> {
            self.2.lock().push(format!("{} {stage}", self.0));
            Ok(())
        }
    }

    impl Hook for Trace {
        fn name(&self) -> &'static str {
            self.0
        }
        fn priority(&self) -> Priority {
            self.1
        }
        fn before_run(&mut self, _: &mut Runner) -> Result<()> {
            self.note("before_run")
        }
        fn before_train(&mut self, _: &mut Runner) -> Result<()> {
            self.note("before_train")
        }
        fn before_train_epoch(&mut self, _: &mut Runner) -> Result<()> {
            self.note("before_train_epoch")
        }
        fn before_train_iter(&mut self, _: &mut Runner, _: &mut Batch) -> Result<()> {
            self.note("before_train_iter")
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            self.note(&format!("after_train_iter {}", runner.position().iter))
        }
        fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
            self.note(&format!("after_train_epoch {}", runner.position().epoch))
        }
        fn after_train(&mut self, _: &mut Runner) -> Result<()> {
            self.note("after_train")
        }
        fn after_run(&mut self, _: &mut Runner) -> Result<()> {
            self.note("after_run")
        }
    }

    #[test]
    fn stages_follow_mmengines_order_and_hooks_their_priority() {
        let dir = tempfile::tempdir().unwrap();
        let seen = Arc::default();
        let hook = |name, priority| Box::new(Trace(name, priority, Arc::clone(&seen)));
        builder(dir.path(), 2)
            .hook(hook("late", Priority::LOW))
            .hook(hook("first", Priority::NORMAL))
            .hook(hook("second", Priority::NORMAL))
            .hook(hook("early", Priority(49)))
            .build()
            .unwrap()
            .train()
            .unwrap();
        let stages = [
            "before_run",
            "before_train",
            "before_train_epoch",
            "before_train_iter",
            "after_train_iter 0",
            "before_train_iter",
            "after_train_iter 1",
            "after_train_epoch 0",
            "after_train",
            "after_run",
        ];
        let names = ["early", "first", "second", "late"];
        let expected: Vec<_> =
            stages.iter().flat_map(|stage| names.map(|name| format!("{name} {stage}"))).collect();
        assert_eq!(*seen.lock(), expected);
    }

    /// Records the stages that MMEngine's hook of this name has.
    struct Recorder {
        name: &'static str,
        priority: Priority,
        seen: Arc<Mutex<Vec<String>>>,
        stages: Arc<Vec<(String, String)>>,
    }

    impl Recorder {
        fn note(&self, runner: &Runner, stage: &str) -> Result<()> {
            if self.stages.iter().any(|(s, hook)| s == stage && hook == self.name) {
                let position = runner.position();
                let (epoch, iter) = (position.epoch, position.iter);
                self.seen.lock().push(format!("{stage} {} {epoch} {iter}", self.name));
            }
            Ok(())
        }
    }

    macro_rules! record {
        ($($stage:ident($($kind:ty),*);)*) => {$(
            fn $stage(&mut self, runner: &mut Runner $(, _: $kind)*) -> Result<()> {
                self.note(runner, stringify!($stage))
            }
        )*};
    }

    impl Hook for Recorder {
        fn name(&self) -> &'static str {
            "Recorder"
        }
        fn priority(&self) -> Priority {
            self.priority
        }
        record! {
            before_run();
            after_load_checkpoint(&Checkpoint);
            before_train();
            before_train_epoch();
            before_train_iter(&mut Batch);
            after_train_iter(&Batch, &Losses);
            after_train_epoch();
            before_val();
            before_val_epoch();
            before_val_iter(usize, &mut Batch);
            after_val_iter(usize, &Batch, &[(String, Array)]);
            after_val_epoch(&[(String, f64)]);
            after_val();
            before_save_checkpoint(&mut Contents);
            after_train();
            after_run();
        }
    }

    /// Runs 24 iterations per epoch and 5 per validation as in the recording, and compares every
    /// stage.
    fn check_trace(
        recorded: &str,
        train: TrainConfig,
        mut checkpoint: CheckpointHook,
        metrics: &[f64],
    ) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let seen = Arc::default();
        let words = |line: &str| {
            let mut words = line.split(' ').map(str::to_owned);
            (words.next().unwrap(), words.next().unwrap())
        };
        let stages = Arc::new(recorded.lines().map(words).collect());
        checkpoint.max_keep_ckpts = 2;
        checkpoint.save_best = vec![SaveBest::new("auto")];
        let row = |accuracy: &f64| [("digits/accuracy", *accuracy), ("digits/n", 297.0)];
        let metrics = Metrics::new(metrics.iter().map(row));
        let mut builder = builder(dir.path(), 24)
            .train_cfg(train)
            .validation(blank(5), metrics)
            .hook(Box::new(LoggerHook::new(10)));
        for (name, priority) in [
            ("RuntimeInfoHook", Priority::VERY_HIGH),
            ("IterTimerHook", Priority::NORMAL),
            ("DistSamplerSeedHook", Priority::NORMAL),
            ("EMAHook", Priority::NORMAL),
            ("LoggerHook", Priority::BELOW_NORMAL),
            ("ParamSchedulerHook", Priority::LOW),
            ("CheckpointHook", Priority::VERY_LOW),
        ] {
            let (seen, stages) = (Arc::clone(&seen), Arc::clone(&stages));
            builder = builder.hook(Box::new(Recorder { name, priority, seen, stages }));
        }
        builder.hook(Box::new(checkpoint)).build().unwrap().train().unwrap();
        for (index, (seen, recorded)) in seen.lock().iter().zip(recorded.lines()).enumerate() {
            assert_eq!(seen, recorded, "line {index}");
        }
        assert_eq!(seen.lock().len(), recorded.lines().count());
        dir
    }

    fn names(dir: &std::path::Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Lines of a log about checkpoints and validations, without times and metrics that depend on
    /// them.
    fn told(log: &str, dir: &std::path::Path) -> Vec<String> {
        let lines = log.lines().filter_map(|line| line.split_once(" - INFO - ")).map(|l| l.1);
        let lines = lines.filter(|l| {
            ["Saving", "The ", "Epoch(", "Iter(", "Exp name"].iter().any(|s| l.starts_with(s))
        });
        let known = |line: &str| {
            let line = line.replace(&format!("{}/", dir.display()), "").replace(".pth", "");
            // A count is an integer there, and a float like other metrics here.
            let line = line.replace("297.0000", "297");
            let line = line.split("  lr: ").next().unwrap_or_default().to_owned();
            let line = line.split("  data_time: ").next().unwrap_or_default().to_owned();
            line.split("Exp name: ").next().unwrap_or_default().to_owned()
        };
        lines.map(known).collect()
    }

    fn check_log(dir: &std::path::Path, recorded: &str, recorded_dir: &str) {
        let stamp = names(dir).into_iter().find(|n| n.starts_with("20")).unwrap();
        let log = dir.join(&stamp).join(format!("{stamp}.log"));
        let log = std::fs::read_to_string(log).unwrap();
        assert_eq!(told(&log, dir), told(recorded, std::path::Path::new(recorded_dir)));
        // Compare the keys of each line of the scalars, and the values of some.
        let vis = dir.join(&stamp).join("vis_data");
        assert_eq!(names(&vis), [format!("{stamp}.json"), "scalars.json".to_owned()]);
        let scalars = std::fs::read_to_string(vis.join("scalars.json")).unwrap();
        let lines = |text: &str| -> Vec<Value> {
            let lines = text.lines().filter(|l| l.starts_with('{'));
            lines.map(|l| serde_json::from_str(l).unwrap()).collect()
        };
        let (ours, mut theirs) = (lines(&scalars), lines(recorded));
        assert_eq!(ours.len(), theirs.len());
        // MMEngine records a validation of a run by iterations at step 0, this crate at its
        // iteration.
        for at in 1..theirs.len() {
            if theirs[at]["step"] == 0 {
                theirs[at]["step"] = theirs[at - 1]["iter"].clone();
            }
        }
        for (ours, theirs) in ours.iter().zip(&theirs) {
            for key in ["step", "epoch", "iter", "digits/accuracy", "digits/n"] {
                assert_eq!(ours[key].as_f64(), theirs[key].as_f64(), "{key}: {ours} {theirs}");
            }
            // This test's engine has no optimizer wrapper that reports norms, no `loss_cls`, and no
            // timer.
            let object = theirs.as_object().unwrap();
            for key in object.keys().filter(|k| !["grad_norm", "loss_cls"].contains(&k.as_str())) {
                let timed = key.ends_with("time") && theirs["lr"].is_number();
                assert!(timed || ours.get(key).is_some(), "{key}: {ours}");
            }
        }
    }

    #[test]
    fn run_by_epochs_has_mmengines_stages() {
        let recorded = include_str!("../../tests/vectors/hooks_epoch.txt");
        let metrics = [9.427_609_427_609_427, 9.427_609_427_609_427, 11.447_811_447_811_448];
        let dir = check_trace(recorded, TrainConfig::new(3), CheckpointHook::new(1), &metrics);
        let all = names(dir.path());
        let all: Vec<_> =
            all.iter().filter(|n| !n.starts_with("20") && *n != ".runner.lock").collect();
        assert_eq!(all, ["best_digits_accuracy_epoch_3", "epoch_2", "epoch_3", "last_checkpoint"]);
        let recorded = include_str!("../../tests/vectors/log_epoch.txt");
        check_log(dir.path(), recorded, "work_dirs/single_fp32");
    }

    #[test]
    fn run_by_iterations_has_mmengines_stages() {
        let recorded = include_str!("../../tests/vectors/hooks_iter.txt");
        let metrics = [40.067_340_067_340_07, 50.168_350_168_350_166, 73.063_973_063_973_07];
        let train = TrainConfig { val_interval: 20, ..TrainConfig::by_iters(60) };
        let mut checkpoint = CheckpointHook::new(20);
        checkpoint.by_epoch = false;
        let dir = check_trace(recorded, train, checkpoint, &metrics);
        let all = names(dir.path());
        let all: Vec<_> =
            all.iter().filter(|n| !n.starts_with("20") && *n != ".runner.lock").collect();
        assert_eq!(all, ["best_digits_accuracy_iter_60", "iter_40", "iter_60", "last_checkpoint"]);
        let recorded = include_str!("../../tests/vectors/log_iter.txt");
        check_log(dir.path(), recorded, "work_dirs/single_iter");
    }

    #[test]
    fn buffers_are_averaged_before_they_are_logged_or_saved() {
        let config = crate::config::Config::from_text("c.toml", "").unwrap().into_section();
        let hooks =
            DEFAULTS.iter().map(|(key, name)| HOOKS.build_or(config.empty(key), name).unwrap());
        let mut priorities: Vec<_> = hooks.map(|h| (h.priority().0, h.name())).collect();
        priorities.sort_by_key(|p| p.0);
        // MMEngine's numbers.
        let expected = [
            (50, "IterTimerHook"),
            (50, "SyncBuffersHook"),
            (60, "LoggerHook"),
            (70, "ParamSchedulerHook"),
            (90, "CheckpointHook"),
        ];
        assert_eq!(priorities, expected);
    }

    #[test]
    fn priority_is_a_number_or_a_name_in_any_case() {
        for (text, priority) in [("'very_low'", 90), ("'High'", 30), ("7", 7)] {
            let text = format!("type = 'SyncBuffersHook'\npriority = {text}");
            let section = crate::config::Config::from_text("c.toml", text).unwrap().into_section();
            assert_eq!(build(section, None, None).unwrap().0.0, priority);
        }
    }
}
