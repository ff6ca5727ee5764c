//! Saves checkpoints every few epochs or iterations, and the best model.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use train_step::find_metric;

use super::monitor::rule_by;
use super::{Hook, Priority};
use crate::checkpoint::{Checkpoint, Position, check_name, failed};
use crate::config::{Section, choose, unknown};
use crate::data::Batch;
use crate::engine::Losses;
use crate::runner::{Length, Runner, Save};
use crate::schedulers::Comparison;
use crate::{Error, Result};

/// Saves `epoch_N` (or `iter_N`) every `interval` epochs (or iterations) and after the last, and
/// keeps at most `max_keep_ckpts`; `iter_N` if the run ends inside an epoch; and `best_F_epoch_N`,
/// weights only, whenever metric `F` of a validation improves. A checkpoint saved on an
/// interruption, or to record the best, does not count towards `max_keep_ckpts`; the next one
/// replaces it.
///
/// Follows: MMEngine 0.10.7, `hooks/checkpoint_hook.py`. Differences: the hook's counts are saved
/// in the checkpoint under the hook's name; old checkpoints are removed after the new one is on
/// disk; the hash in a published name is the CRC-32 of the model; with `by_epoch = false` a
/// configuration must set `interval`.
#[derive(Clone, Debug)]
pub struct CheckpointHook {
    /// Epochs, or iterations, between checkpoints; 0 saves only the last.
    pub interval: usize,
    /// Whether `interval` counts epochs, true; otherwise iterations.
    pub by_epoch: bool,
    /// Epoch, or iteration, from which `interval` is counted, 0.
    pub save_begin: usize,
    /// Maximum number of checkpoints, not counting those of interruptions and of best models; 0
    /// keeps all.
    pub max_keep_ckpts: usize,
    /// Whether the last epoch, or iteration, is always saved, true.
    pub save_last: bool,
    /// Whether the optimizer is saved, true; a run cannot resume without it.
    pub save_optimizer: bool,
    /// Whether the schedulers are saved, true.
    pub save_param_scheduler: bool,
    /// Template of names, with `{}` for the number; by default `epoch_{}` or `iter_{}`.
    pub filename_tmpl: Option<String>,
    /// Metrics whose best model is kept.
    pub save_best: Vec<SaveBest>,
    /// Parts (`model`, `optimizer`, `state`; `model` is required) of the last checkpoint that are
    /// published; empty: none.
    pub published_keys: Vec<String>,
    state: CheckpointHookState,
    /// Checkpoints in `written` that the last one has replaced.
    replaced: Vec<String>,
    /// Whether the run resumes from another work directory, whose checkpoints do not belong to this
    /// run.
    is_elsewhere: bool,
    /// Whether the last checkpoint will be published.
    publishes: bool,
    /// Whether the last validation, after an interruption, had the best metric.
    is_new_best: bool,
    /// Previous best models, removed after the new best is recorded.
    outdated: Vec<PathBuf>,
}

/// A metric whose best model is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveBest {
    /// Name of the metric; `auto` is the first metric of the validation.
    pub metric: String,
    /// Comparison of values; derived from the name if not set.
    pub rule: Option<Comparison>,
    /// Name parts that imply the rule `greater`, instead of MMEngine's.
    pub greater_keys: Vec<String>,
    /// Name parts that imply the rule `less`, instead of MMEngine's.
    pub less_keys: Vec<String>,
}

impl SaveBest {
    /// Creates a setting for `metric`, with the rule derived from its name.
    #[must_use]
    pub fn new(metric: &str) -> Self {
        let (greater_keys, less_keys) = (Vec::new(), Vec::new());
        Self { metric: metric.to_owned(), rule: None, greater_keys, less_keys }
    }
}

/// Reason for saving a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The interval has passed, or the run ends.
    Due,
    /// The run is interrupted.
    Interrupted,
    /// The best model so far must be recorded.
    Best,
}

/// State of the hook in a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct CheckpointHookState {
    /// Names of saved checkpoints, oldest first: those that this run may remove.
    written: Vec<String>,
    /// Those that do not count: saved on an interruption, or to record the best.
    #[serde(default)]
    extra: Vec<String>,
    /// Best value of each metric so far.
    best: Vec<Best>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Best {
    #[serde(rename = "figure")]
    metric: String,
    score: f64,
    /// Name of its checkpoint, if it is in this work directory.
    name: Option<String>,
}

impl CheckpointHook {
    /// Saves a checkpoint every `interval` epochs, and keeps all.
    #[must_use]
    pub fn new(interval: usize) -> Self {
        Self {
            interval,
            by_epoch: true,
            save_begin: 0,
            max_keep_ckpts: 0,
            save_last: true,
            save_optimizer: true,
            save_param_scheduler: true,
            filename_tmpl: None,
            save_best: Vec::new(),
            published_keys: Vec::new(),
            state: CheckpointHookState::default(),
            replaced: Vec::new(),
            is_elsewhere: false,
            publishes: false,
            is_new_best: false,
            outdated: Vec::new(),
        }
    }

    /// Returns whether to save after `count` epochs or iterations of `max`.
    fn is_due(&self, count: usize, max: usize) -> bool {
        let since = count.checked_sub(self.save_begin);
        let every = self.interval > 0 && since.is_some_and(|n| n.is_multiple_of(self.interval));
        every || self.save_last && count == max
    }

    /// Returns the name of a checkpoint at this position, and the position as text.
    fn name_of(&self, position: &Position) -> (String, String) {
        let template = |default: &str, count: usize| {
            let template = self.filename_tmpl.as_deref().unwrap_or(default);
            template.replacen("{}", &count.to_string(), 1)
        };
        if self.by_epoch && position.batch == 0 {
            let epoch = position.epoch;
            return (template("epoch_{}", epoch), format!("{epoch} epochs"));
        }
        let iter = position.configured_iter();
        // Inside an epoch, a template for epochs does not apply.
        let name = if self.by_epoch { format!("iter_{iter}") } else { template("iter_{}", iter) };
        (name, format!("{iter} iterations"))
    }

    fn save(&mut self, runner: &mut Runner, position: Position, why: Why) -> Result<()> {
        let (name, place) = self.name_of(&position);
        // The saved list still contains the checkpoints that this one replaces, so that the next
        // run removes them after a kill.
        let CheckpointHookState { mut written, mut extra, .. } = self.state.clone();
        written.retain(|n| !self.replaced.contains(n));
        extra.retain(|n| written.contains(n));
        let counts = why == Why::Due || written.contains(&name) && !extra.contains(&name);
        written.retain(|n| *n != name);
        extra.retain(|n| *n != name);
        let replaced = self.surplus(&written, &extra, usize::from(counts));
        written.push(name.clone());
        extra.extend((!counts).then(|| name.clone()));
        let save = Save {
            optimizer: self.save_optimizer,
            schedulers: self.save_param_scheduler,
            replaces: replaced.clone(),
            ..Save::resumable(&name, position)
        };
        if runner.save_checkpoint(save)? {
            if why != Why::Best {
                runner.logger().info(&format!("Saving checkpoint at {place}"));
            }
            (self.state.written, self.state.extra, self.replaced) = (written, extra, replaced);
        }
        Ok(())
    }

    /// Returns the checkpoints in `written` to remove when `one` (0 or 1) counting checkpoints are
    /// added.
    fn surplus(&self, written: &[String], extra: &[String], one: usize) -> Vec<String> {
        if self.max_keep_ckpts == 0 {
            return Vec::new();
        }
        let counted = written.len() - extra.len() + one;
        let mut too_many = counted.saturating_sub(self.max_keep_ckpts);
        let goes = |name: &&String| {
            let is_extra = extra.contains(name);
            let is_oldest = !is_extra && too_many > 0;
            too_many -= usize::from(is_oldest);
            is_extra || is_oldest
        };
        written.iter().filter(goes).cloned().collect()
    }

    /// Saves the model if the chosen metric has improved. Returns whether it did.
    fn keep_best(
        &mut self,
        runner: &mut Runner,
        wanted: &SaveBest,
        metrics: &[(String, f64)],
    ) -> Result<bool> {
        let metric = match (wanted.metric.as_str(), self.state.best.first()) {
            // `auto` keeps the metric that it chose first.
            ("auto", Some(best)) => best.metric.clone(),
            ("auto", None) => metrics.first().map_or("auto", |(name, _)| name).to_owned(),
            (name, _) => name.to_owned(),
        };
        let score = find_metric(metrics, &metric)
            .map_err(|why| Error::config(format!("save_best: {why}")))?;
        let rule = match wanted.rule {
            Some(rule) => rule,
            None => rule_by(&metric, &wanted.greater_keys, &wanted.less_keys)?,
        };
        let before = self.state.best.iter().position(|best| best.metric == metric);
        let improves = before.is_none_or(|i| rule.is_better(score, self.state.best[i].score));
        if !score.is_finite() || !improves {
            return Ok(false);
        }
        let position = runner.position().clone();
        let name = format!("best_{}_{}", metric.replace('/', "_"), self.name_of(&position).0);
        let mut save = Save::weights(&name, position.clone());
        let old = before.and_then(|i| self.state.best[i].name.clone());
        if let Some(old) = old.filter(|old| *old != name) {
            let path = runner.work_dir().join(&old);
            let text = format!("The previous best checkpoint {} is removed", path.display());
            if runner.is_interrupted() {
                // The checkpoint to resume from still names it.
                self.outdated.push(path);
            } else {
                save.log.push(text);
                save.replaces.push(old);
            }
        }
        let (count, unit) = match self.by_epoch {
            true => (position.epoch, "epoch"),
            false => (position.iter, "iter"),
        };
        save.log.push(format!(
            "The best checkpoint with {score:.4} {metric} at {count} {unit} is saved to {name}."
        ));
        if !runner.save_checkpoint(save)? {
            return Ok(false);
        }
        let fresh = Best { metric, score, name: Some(name) };
        match before {
            Some(i) => self.state.best[i] = fresh,
            None => self.state.best.push(fresh),
        }
        Ok(true)
    }
}

/// Valid names in `published_keys`.
const PARTS: [&str; 3] = ["model", "optimizer", "state"];

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    section.refuse("out_dir", "checkpoints are saved in the run's `work_dir`")?;
    section.refuse("file_client_args", "checkpoints are saved in a local directory")?;
    section.refuse("backend_args", "checkpoints are saved in a local directory")?;
    let at_least_1 = |n: &i64| *n >= 1 || *n == -1;
    let count = |n: i64| usize::try_from(n).unwrap_or(0);
    let (unset, by_epoch_at) = (!section.has("interval"), section.offset_of("by_epoch"));
    let interval = section.or_checked("interval", 1, "at least 1, or -1 for never", at_least_1)?;
    let mut hook = CheckpointHook::new(count(interval));
    hook.by_epoch = section.or("by_epoch", true)?;
    if unset && !hook.by_epoch {
        let text = "`by_epoch = false` needs `interval`: how many iterations lie between checkpoints, or -1 for the \
                    last one only";
        section.note(by_epoch_at.error(text))?;
    }
    hook.save_begin = section.or("save_begin", 0)?;
    let keep = section.or_checked("max_keep_ckpts", -1, "at least 1, or -1 for all", at_least_1)?;
    hook.max_keep_ckpts = count(keep);
    hook.save_last = section.or("save_last", true)?;
    hook.save_optimizer = section.or("save_optimizer", true)?;
    hook.save_param_scheduler = section.or("save_param_scheduler", true)?;
    let place = section.offset_of("filename_tmpl");
    hook.filename_tmpl = section.optional("filename_tmpl")?;
    if let Some(template) = &hook.filename_tmpl
        && (template.matches("{}").count() != 1
            || check_name(&template.replacen("{}", "1", 1)).is_err())
    {
        let text = format!(
            "`filename_tmpl` must have one `{{}}`, no `/` and no `.` at its beginning, got `{template}`"
        );
        section.note(place.error(text))?;
    }
    hook.save_best = read_best(section)?;
    let place = section.offset_of("published_keys");
    hook.published_keys = section.one_or_more("published_keys")?;
    if let Some(key) = hook.published_keys.iter().find(|k| !PARTS.contains(&k.as_str())) {
        section.note(place.error(unknown("part", key, &PARTS)))?;
    }
    if !hook.published_keys.is_empty() && !hook.published_keys.iter().any(|k| k == "model") {
        let text =
            "`published_keys` must contain `model`: a checkpoint cannot be loaded without it";
        section.note(place.error(text))?;
    }
    Ok(Box::new(hook))
}

fn read_best(section: &mut Section) -> Result<Vec<SaveBest>> {
    let (place, rules_at) = (section.offset_of("save_best"), section.offset_of("rule"));
    let metrics: Vec<String> = section.one_or_more("save_best")?;
    let mut rules = Vec::new();
    for rule in section.one_or_more::<String>("rule")? {
        let rule = choose("rule", &rule, &Comparison::NAMES, &rules_at);
        rules.push(rule.or_else(|e| section.note(e).map(|()| Comparison::Less))?);
    }
    let (greater_keys, less_keys): (Vec<String>, Vec<String>) =
        (section.one_or_more("greater_keys")?, section.one_or_more("less_keys")?);
    if metrics.len() > 1 && metrics.iter().any(|f| f == "auto") {
        section.note(place.error("`auto` in `save_best` cannot be combined with other metrics"))?;
    }
    if rules.len() > 1 && rules.len() != metrics.len() {
        let text =
            format!("{} rules given for {} metrics of `save_best`", rules.len(), metrics.len());
        section.note(rules_at.error(text))?;
    }
    let mut best = Vec::new();
    for (index, metric) in metrics.into_iter().enumerate() {
        let rule = rules.get(index).or_else(|| rules.first()).copied();
        if rule.is_none() && metric != "auto" {
            let known = rule_by(&metric, &greater_keys, &less_keys);
            known.map(drop).or_else(|e| section.note(place.error(e)))?;
        }
        let (greater_keys, less_keys) = (greater_keys.clone(), less_keys.clone());
        best.push(SaveBest { metric, rule, greater_keys, less_keys });
    }
    Ok(best)
}

impl Hook for CheckpointHook {
    fn name(&self) -> &'static str {
        "CheckpointHook"
    }

    fn priority(&self) -> Priority {
        Priority::VERY_LOW
    }

    fn metrics(&self) -> Vec<String> {
        let named = self.save_best.iter().filter(|best| best.metric != "auto");
        named.map(|best| best.metric.clone()).collect()
    }

    fn warning(&self, length: Length, _: usize) -> Option<String> {
        let Length::Iters(iters) = length else { return None };
        let late = self.by_epoch || self.interval > iters;
        (self.interval > 0 && late).then(|| {
            let unit = if self.by_epoch { "epochs" } else { "iterations" };
            format!(
                "CheckpointHook: no checkpoint before the end of this run of {iters} iterations (by_epoch = {}, \
                 interval = {} {unit}): set default_hooks.checkpoint = {{ by_epoch = false, interval = N }}, or \
                 interval = -1 if only the last one is wanted",
                self.by_epoch, self.interval
            )
        })
    }

    fn before_train(&mut self, runner: &mut Runner) -> Result<()> {
        let text = format!("Checkpoints will be saved to {}.", runner.work_dir().display());
        runner.logger().info(&text);
        // Those that a run killed after its last save has not removed.
        if let Some((last, older)) = self.state.written.split_last() {
            let is_older = |name: &&String| *name != last;
            let extra: Vec<_> = self.state.extra.iter().filter(is_older).cloned().collect();
            let counts = usize::from(!self.state.extra.contains(last));
            let surplus = self.surplus(older, &extra, counts);
            let paths: Vec<_> = surplus.iter().map(|name| runner.work_dir().join(name)).collect();
            runner.remove_checkpoints(&paths);
        }
        Ok(())
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let position = runner.position().clone();
        let (iter, batch) = (position.iter + 1, position.batch + 1);
        let position = Position { iter, batch, ..position };
        let is_due = self.save_last && iter == runner.max_iters()
            || position.completed().any(|iter| self.is_due(iter, usize::MAX));
        if self.by_epoch || !is_due {
            return Ok(());
        }
        self.save(runner, position, Why::Due)
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        let position = runner.position().clone();
        let epoch = position.epoch + 1;
        // A run by iterations has one epoch, which ends with the run.
        let by_epoch = self.by_epoch && runner.is_by_epoch();
        if !by_epoch || !self.is_due(epoch, runner.max_epochs()) {
            return Ok(());
        }
        self.save(runner, Position { epoch, batch: 0, ..position }, Why::Due)
    }

    fn on_interrupt(&mut self, runner: &mut Runner) -> Result<()> {
        let position = runner.position().clone();
        if position.iter == 0 || self.state.written.contains(&self.name_of(&position).0) {
            return Ok(());
        }
        self.save(runner, position, Why::Interrupted)
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, metrics: &[(String, f64)]) -> Result<()> {
        // A run that only evaluates records no best.
        if !runner.is_training() || runner.position().iter == 0 {
            return Ok(());
        }
        let mut better = false;
        for wanted in self.save_best.clone() {
            better |= self.keep_best(runner, &wanted, metrics)?;
        }
        // Record the new best in a checkpoint to resume from, if one was saved. After an
        // interruption only this hook's state in it is replaced, because the validation has changed
        // the state of other hooks.
        self.is_new_best = better && runner.is_interrupted();
        if better && !runner.is_interrupted() && !self.state.written.is_empty() {
            self.save(runner, runner.position().clone(), Why::Best)?;
        }
        Ok(())
    }

    fn after_train(&mut self, runner: &mut Runner) -> Result<()> {
        // The run may have ended after an epoch that was not saved.
        let position = runner.position().clone();
        let (name, _) = self.name_of(&position);
        let is_saved = self.state.written.contains(&name);
        if self.save_last && position.iter > 0 && !is_saved {
            self.save(runner, position, Why::Due)?;
        } else if std::mem::take(&mut self.is_new_best) && is_saved && self.save_optimizer {
            runner.record_hook_state(&name, self.name(), serde_json::json!(self.state))?;
            runner.remove_checkpoints(&std::mem::take(&mut self.outdated));
        }
        self.publishes = !self.published_keys.is_empty();
        Ok(())
    }

    /// Publishes the last checkpoint, which is on disk by now.
    fn after_run(&mut self, runner: &mut Runner) -> Result<()> {
        match self.state.written.last() {
            Some(last) if std::mem::take(&mut self.publishes) => {
                runner.publish_checkpoint(last, &self.published_keys)
            }
            _ => Ok(()),
        }
    }

    fn after_load_checkpoint(&mut self, runner: &mut Runner, loaded: &Checkpoint) -> Result<()> {
        let whole = |path: &Path| path.canonicalize().ok();
        let parent = |path: PathBuf| path.parent().map(Path::to_owned);
        self.is_elsewhere = whole(loaded.path()).and_then(parent) != whole(runner.work_dir());
        Ok(())
    }

    fn state_dict(&self) -> Option<Value> {
        serde_json::to_value(&self.state).ok()
    }

    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        self.state =
            serde_json::from_value(state.clone()).map_err(|e| failed("CheckpointHook", e))?;
        self.replaced.clear();
        if self.is_elsewhere {
            self.state.written.clear();
            self.state.extra.clear();
            self.state.best.iter_mut().for_each(|best| best.name = None);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::HOOKS;
    use super::*;
    use crate::config::Config;
    use crate::runner::TrainConfig;
    use crate::testing::{Metrics, blank, builder};

    /// Metrics of five validations, starting `at` this index.
    fn metrics(at: usize) -> Box<Metrics> {
        let rows = [(1.0, 9.0), (5.0, 5.0), (5.0, 3.0), (2.0, 3.0), (4.0, 7.0)];
        let rows = rows.into_iter().skip(at);
        Metrics::new(rows.map(|(acc, mistakes)| [("acc", acc), ("a/mistakes", mistakes)]))
    }

    /// Trains five epochs of three iterations; returns the names of the checkpoints, and
    /// `last_checkpoint`.
    fn saved(dir: &Path, hook: &str) -> (Vec<String>, String) {
        let section = Config::from_text("c.toml", hook).unwrap().into_section();
        let run = builder(dir, 3)
            .train_cfg(TrainConfig::new(5))
            .validation(blank(1), metrics(0))
            .hook(HOOKS.build_or(section, "CheckpointHook").unwrap());
        run.build().unwrap().train().unwrap();
        (names(dir), std::fs::read_to_string(dir.join("last_checkpoint")).unwrap_or_default())
    }

    /// Names of the checkpoints in `dir`.
    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
        let dirs = entries.filter(|e| {
            e.path().join("state.json").is_file() || e.file_name().to_string_lossy().contains('-')
        });
        let mut names: Vec<_> = dirs.map(|e| e.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn checkpoints_are_saved_as_configured() {
        for (hook, expected) in [
            ("interval = 2", "epoch_2 epoch_4 epoch_5"),
            ("interval = 2\nsave_last = false", "epoch_2 epoch_4"),
            ("interval = 2\nsave_begin = 3", "epoch_3 epoch_5"),
            ("interval = -1", "epoch_5"),
            ("interval = -1\nsave_last = false", ""),
            ("max_keep_ckpts = 2", "epoch_4 epoch_5"),
            ("interval = 3\nfilename_tmpl = 'at {}.x'", "at 3.x at 5.x"),
            ("by_epoch = false\ninterval = 7", "iter_14 iter_15 iter_7"),
            ("by_epoch = false\ninterval = 4\nsave_last = false\nmax_keep_ckpts = 1", "iter_12"),
            ("interval = 5\nsave_best = 'auto'", "best_acc_epoch_2 epoch_5"),
            (
                "interval = 5\nsave_best = ['a/mistakes', 'acc']\nrule = ['less', 'greater']",
                "best_a_mistakes_epoch_3 best_acc_epoch_2 epoch_5",
            ),
            // A new best is recorded in a resumable checkpoint, if there is one.
            (
                "interval = 2\nsave_best = 'a/mistakes'\nrule = 'less'",
                "best_a_mistakes_epoch_3 epoch_2 epoch_3 epoch_4 epoch_5",
            ),
            (
                "interval = 5\nsave_best = 'a/mistakes'\nless_keys = ['mist']\nmax_keep_ckpts = 1",
                "best_a_mistakes_epoch_3 epoch_5",
            ),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let (names, last) = saved(dir.path(), hook);
            assert_eq!(names.join(" "), expected, "{hook}");
            // `last_checkpoint` can be resumed from.
            assert!(names.is_empty() || names.contains(&last), "{hook}: {last}");
        }
    }

    #[test]
    fn checkpoint_without_optimizer_is_not_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let (names, last) = saved(dir.path(), "interval = 5\nsave_optimizer = false");
        assert_eq!((names.join(" "), last.as_str()), ("epoch_5".into(), ""));
        assert!(!dir.path().join("epoch_5/optimizer.safetensors").exists());
    }

    #[test]
    fn evaluation_saves_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut hook = CheckpointHook::new(1);
        hook.save_best = vec![SaveBest::new("auto")];
        let run = builder(dir.path(), 3).hook(Box::new(hook));
        let run = run.validation(blank(1), metrics(0));
        run.build().unwrap().validate().unwrap();
        let names = || {
            let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
            let names = names.map(|name| name.into_string().unwrap());
            names.filter(|name| !name.starts_with("20")).collect::<Vec<_>>()
        };
        assert!(names().is_empty(), "{:?}", names());
        // The same for the model of an earlier run.
        builder(dir.path(), 3)
            .hook(Box::new(CheckpointHook::new(1)))
            .build()
            .unwrap()
            .train()
            .unwrap();
        let mut hook = CheckpointHook::new(1);
        hook.save_best = vec![SaveBest::new("auto")];
        let run = builder(dir.path(), 3).hook(Box::new(hook)).resume(true);
        let run = run.validation(blank(1), metrics(0));
        run.build().unwrap().validate().unwrap();
        assert!(names().iter().all(|name| !name.starts_with("best")), "{:?}", names());
    }

    #[test]
    fn last_checkpoint_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let (names, _) = saved(dir.path(), "interval = 5\npublished_keys = ['model']");
        let [whole, published] = &names[..] else { panic!("{names:?}") };
        let hash = published.strip_prefix("epoch_5-").unwrap();
        assert!(whole == "epoch_5" && hash.len() == 8, "{names:?}");
        let without = "published_keys = ['optimizer', 'state']";
        let section = Config::from_text("c.toml", without).unwrap().into_section();
        let error = HOOKS.build_or(section, "CheckpointHook").err().unwrap().to_string();
        assert!(error.contains("c.toml:1") && error.contains("`model`"), "{error}");
    }

    #[test]
    fn published_checkpoint_with_optimizer_is_an_exported_model() {
        let dir = tempfile::tempdir().unwrap();
        let (names, _) = saved(dir.path(), "interval = 5\npublished_keys = ['model', 'optimizer']");
        let other = tempfile::tempdir().unwrap();
        std::fs::rename(dir.path().join(&names[1]), other.path().join(&names[1])).unwrap();
        builder(other.path(), 1).resume(true).build().unwrap().train().unwrap();
        let log = log(other.path());
        assert!(log.contains(&format!("{} is an exported model", names[1])), "{log}");
    }

    /// Ends the run after this many iterations.
    struct Stop(usize);

    impl Hook for Stop {
        fn name(&self) -> &'static str {
            "Stop"
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            if runner.position().iter + 1 == self.0 {
                runner.stop_training();
            }
            Ok(())
        }
    }

    #[test]
    fn best_of_the_last_validation_of_a_time_budget_is_resumed() {
        let dir = tempfile::tempdir().unwrap();
        let run = |at| {
            let mut hook = CheckpointHook::new(0);
            (hook.by_epoch, hook.save_best) = (false, vec![SaveBest::new("acc")]);
            let run = builder(dir.path(), 9).hook(Box::new(hook)).resume(true);
            let run = run.validation(blank(1), metrics(at));
            run.train_cfg(TrainConfig { val_interval: 3, ..TrainConfig::by_iters(9) })
        };
        // Validates after three iterations, saves after four.
        run(0).hook(Box::new(Stop(4))).build().unwrap().train().unwrap();
        // Ends after one step, with a validation that no later run repeats.
        run(1).time_budget(Some(std::time::Duration::ZERO)).build().unwrap().train().unwrap();
        let saved = crate::checkpoint::load(&dir.path().join("iter_5")).unwrap();
        let best = &saved.meta.hooks["CheckpointHook"]["best"][0]["name"];
        assert_eq!(best, "best_acc_iter_5");
        assert!(!dir.path().join("best_acc_iter_3").exists());
        // An equal value is not better.
        run(2).build().unwrap().train().unwrap();
        crate::checkpoint::load(&dir.path().join("best_acc_iter_5")).unwrap();
    }

    #[test]
    fn second_training_continues_after_a_stop() {
        let dir = tempfile::tempdir().unwrap();
        let run = builder(dir.path(), 3).train_cfg(TrainConfig::new(2)).hook(Box::new(Stop(3)));
        let mut run = run.build().unwrap();
        run.train().unwrap();
        assert_eq!((run.position().epoch, run.is_stopped()), (1, true));
        run.train().unwrap();
        assert_eq!((run.position().epoch, run.is_stopped()), (2, false));
    }

    #[test]
    fn resume_from_another_work_dir_removes_no_old_checkpoint() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let run = |dir: &Path, epochs| {
            let mut hook = CheckpointHook::new(1);
            (hook.max_keep_ckpts, hook.save_best) = (1, vec![SaveBest::new("acc")]);
            let run = builder(dir, 1).train_cfg(TrainConfig::new(epochs)).hook(Box::new(hook));
            run.validation(blank(1), Metrics::new([[("acc", epochs as f64)]]))
        };
        run(first.path(), 1).build().unwrap().train().unwrap();
        // Left by an earlier run.
        for name in ["epoch_1", "best_acc_epoch_1"] {
            std::fs::create_dir(second.path().join(name)).unwrap();
        }
        let next = run(second.path(), 2).resume(true).load_from(first.path().join("epoch_1"));
        next.build().unwrap().train().unwrap();
        for dir in [first.path(), second.path()] {
            assert!(dir.join("epoch_1").is_dir() && dir.join("best_acc_epoch_1").is_dir());
        }
        assert!(second.path().join("best_acc_epoch_2/state.json").is_file());
    }

    /// Replaces the first checkpoint by a file, which cannot be removed as a checkpoint.
    struct Spoil(PathBuf);

    impl Hook for Spoil {
        fn name(&self) -> &'static str {
            "Spoil"
        }
        fn before_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
            if runner.position().epoch == 1 {
                std::fs::remove_dir_all(&self.0).unwrap();
                std::fs::write(&self.0, "").unwrap();
            }
            Ok(())
        }
    }

    /// Log of the only run in `dir`.
    fn log(dir: &Path) -> String {
        let mut dirs = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let dir = dirs.find(|path| path.to_string_lossy().contains("/20")).unwrap();
        let name = format!("{}.log", dir.file_name().unwrap().to_string_lossy());
        std::fs::read_to_string(dir.join(name)).unwrap()
    }

    #[test]
    fn failure_to_remove_a_replaced_checkpoint_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        // A file cannot be removed as a directory.
        std::fs::write(dir.path().join(".epoch_1.old"), "").unwrap();
        // Saves, and saves again with the best.
        saved(dir.path(), "save_best = 'acc'");
        assert!(log(dir.path()).contains("WARNING - cannot remove"), "{}", log(dir.path()));
        let saved = crate::checkpoint::load(&dir.path().join("epoch_1")).unwrap();
        assert_eq!(saved.meta.hooks["CheckpointHook"]["best"][0]["name"], "best_acc_epoch_1");
        assert!(!dir.path().join("..epoch_1.old.old").exists());
    }

    #[test]
    fn failure_to_remove_a_surplus_checkpoint_is_a_warning() {
        let dir = tempfile::tempdir().unwrap();
        let mut hook = CheckpointHook::new(1);
        hook.max_keep_ckpts = 1;
        let run = builder(dir.path(), 1).train_cfg(TrainConfig::new(4)).hook(Box::new(hook));
        let mut run = run.hook(Box::new(Spoil(dir.path().join("epoch_1")))).build().unwrap();
        run.train().unwrap();
        run.flush().unwrap();
        let entries = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap());
        let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names[2..], ["epoch_1", "epoch_4", "last_checkpoint"]);
        let log = log(dir.path());
        assert_eq!(log.matches("WARNING - cannot remove").count(), 1, "{log}");
    }

    /// Interrupts the run after these iterations, as an exhausted time budget does.
    struct Interrupt(Vec<usize>);

    impl Hook for Interrupt {
        fn name(&self) -> &'static str {
            "Interrupt"
        }
        fn before_train_iter(&mut self, runner: &mut Runner, _: &mut Batch) -> Result<()> {
            if self.0.contains(&runner.position().iter) {
                runner.end_early()?;
            }
            Ok(())
        }
    }

    #[test]
    fn checkpoints_of_interruptions_and_the_best_do_not_count() {
        for (hook, at, expected) in [
            // Two interruptions in the third epoch of three iterations.
            ("max_keep_ckpts = 2", vec![7, 8], "epoch_1 epoch_2 iter_8"),
            // The next regular checkpoint replaces it.
            ("max_keep_ckpts = 2", vec![4], "epoch_1 epoch_2 iter_8"),
            ("interval = 2\nmax_keep_ckpts = 1", vec![], "epoch_2 iter_8"),
            // The third epoch had the best metric.
            (
                "interval = 2\nmax_keep_ckpts = 1\nsave_best = 'a/mistakes'\nrule = 'less'",
                vec![10],
                "best_a_mistakes_epoch_3 epoch_2 iter_10",
            ),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let section = Config::from_text("c.toml", hook).unwrap().into_section();
            let stops = at.last().is_none_or(|last| *last < 8);
            let at = at.into_iter().chain(stops.then_some(8)).collect::<Vec<_>>();
            let last = *at.last().unwrap();
            let run = builder(dir.path(), 3)
                .train_cfg(TrainConfig::new(5))
                .validation(blank(1), metrics(0))
                .hook(HOOKS.build_or(section, "CheckpointHook").unwrap())
                .hook(Box::new(Interrupt(at)))
                .hook(Box::new(Kill(last)));
            run.build().unwrap().train().unwrap_err();
            assert_eq!(names(dir.path()).join(" "), expected, "{hook}");
        }
    }

    /// Fails before this iteration.
    struct Kill(usize);

    impl Hook for Kill {
        fn name(&self) -> &'static str {
            "Kill"
        }
        fn priority(&self) -> Priority {
            Priority::LOWEST
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            if runner.position().iter == self.0 {
                return Err(Error::data("killed"));
            }
            Ok(())
        }
    }

    #[test]
    fn checkpoint_of_an_interruption_is_replaced_after_resume() {
        let dir = tempfile::tempdir().unwrap();
        let run = |interrupt: Option<usize>| {
            let mut hook = CheckpointHook::new(1);
            hook.max_keep_ckpts = 2;
            let run = builder(dir.path(), 3).train_cfg(TrainConfig::new(4)).resume(true);
            let mut run = run.hook(Box::new(hook));
            if let Some(at) = interrupt {
                run = run.hook(Box::new(Interrupt(vec![at]))).hook(Box::new(Kill(at)));
            }
            run.build().unwrap().train()
        };
        run(Some(7)).unwrap_err();
        assert_eq!(names(dir.path()), ["epoch_1", "epoch_2", "iter_7"]);
        run(Some(8)).unwrap_err();
        assert_eq!(names(dir.path()), ["epoch_1", "epoch_2", "iter_8"]);
        run(None).unwrap();
        assert_eq!(names(dir.path()), ["epoch_3", "epoch_4"]);
    }

    #[test]
    fn by_iterations_requires_an_interval() {
        let read = |hook: &str| {
            let section = Config::from_text("c.toml", hook).unwrap().into_section();
            HOOKS.build_or(section, "CheckpointHook").map(drop).map_err(|e| e.to_string())
        };
        let said = read("save_last = true\nby_epoch = false").unwrap_err();
        assert!(said.starts_with("c.toml:2") && said.contains("needs `interval`"), "{said}");
        assert_eq!(read("by_epoch = false\ninterval = -1"), Ok(()));
        assert_eq!(read("by_epoch = true"), Ok(()));
    }
}
