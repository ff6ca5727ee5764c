//! Maintains an average of the model's weights, which replaces the model in validations and
//! checkpoints.

use std::borrow::Cow;

use collective::{ProcessGroup, ReduceOp};
use serde_json::{Value, json};

use super::Hook;
use crate::checkpoint::{
    AVERAGES, Checkpoint, Contents, Position, TRAINED, Tensor, bad, copy_from_bytes, visit_model,
};
use crate::config::Section;
use crate::data::Batch;
use crate::engine::{Averaged, DeviceAverages, Engine, Losses, round_into, to_f32};
use crate::runner::{BUFFERS, Length, Runner};
use crate::{Error, Result};

/// Weight of the newest model in the average at update `n`, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Average {
    /// Constant weight.
    Exponential {
        /// The weight, 0.0002.
        momentum: f64,
    },
    /// `gamma / (gamma + n)`, but at least `momentum`.
    Annealing {
        /// Minimum weight, 0.0002.
        momentum: f64,
        /// Decay length in updates, 100.
        gamma: f64,
    },
    /// `1 / (n / interval + 1)`: the mean of all models.
    Stochastic,
}

impl Average {
    fn share(self, update: u64, interval: u64) -> f64 {
        match self {
            Self::Exponential { momentum } => momentum,
            Self::Annealing { momentum, gamma } => momentum.max(gamma / (gamma + update as f64)),
            Self::Stochastic => 1.0 / (update / interval + 1) as f64,
        }
    }
}

/// Maintains an average of the parameters, `average = (1 - share) * average + share * newest` after
/// each iteration, which replaces the model in validations, tests and checkpoints.
///
/// Follows: MMEngine 0.10.7, `hooks/ema_hook.py` and `model/averaged_model.py`. Differences: the
/// average is in f32 for any type of parameters (a share of 0.0002 is lost in half precision);
/// averaged buffers are averaged over the ranks before use; and the average is saved exactly,
/// beside the trained model (`ema.safetensors`), so a resumed run has the same bits.
///
/// Averages of a model on a GPU are in GPU memory, with the same bits as on the host.
#[derive(Debug)]
pub struct EmaHook {
    /// Kind of average.
    pub average: Average,
    /// Iterations between updates, 1.
    pub interval: u64,
    /// Whether buffers are averaged as well; otherwise they are copied from the model. False.
    pub update_buffers: bool,
    /// First iteration, counted from 1, that is averaged; before, the average equals the model; 0.
    pub begin_iter: usize,
    /// First epoch that is averaged, likewise; 0.
    pub begin_epoch: usize,
    updates: u64,
    averages: Averages,
    /// The trained model, while the average replaces it.
    shelved: Vec<Tensor>,
}

impl EmaHook {
    /// Averages the parameters from the first iteration on.
    #[must_use]
    pub fn new(average: Average) -> Self {
        Self {
            average,
            interval: 1,
            update_buffers: false,
            begin_iter: 0,
            begin_epoch: 0,
            updates: 0,
            averages: Averages::Host(Vec::new()),
            shelved: Vec::new(),
        }
    }

    /// Sets the average to the model.
    fn copy_model(&mut self, engine: &mut dyn Engine) -> Result<()> {
        if let Averages::Device(averages) = &mut self.averages {
            return Ok(averages.update(None)?);
        }
        if let Some(device) = engine.on_device() {
            let mut averages = device.averages(if self.update_buffers {
                Averaged::Model
            } else {
                Averaged::Params
            })?;
            averages.update(None)?;
            self.averages = Averages::Device(averages);
            return Ok(());
        }
        let mut averages = Vec::new();
        visit_model(engine, &mut |_, _, slice| {
            averages.push(to_f32(slice.as_slice()).into_owned());
            Ok(())
        })?;
        averages.truncate(self.count(engine));
        self.averages = Averages::Host(averages);
        Ok(())
    }

    fn update(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let update = self.updates;
        self.updates += 1;
        if update == 0 {
            return self.copy_model(engine);
        }
        if !update.is_multiple_of(self.interval) {
            return Ok(());
        }
        let share = self.average.share(update, self.interval) as f32;
        let averages = match &mut self.averages {
            Averages::Host(averages) => averages,
            Averages::Device(averages) => return Ok(averages.update(Some(share))?),
        };
        visit_model(engine, &mut |i, _, slice| {
            if let Some(average) = averages.get_mut(i) {
                lerp(average, &to_f32(slice.as_slice()), share);
            }
            Ok(())
        })
    }

    /// Returns the averages; those of buffers are averaged over the ranks.
    fn shared(&self, params: usize, group: &ProcessGroup) -> Result<Vec<Vec<f32>>> {
        let mut shared = self.averages.values()?.into_owned();
        if group.world_size() > 1 {
            for buffer in &mut shared[params..] {
                group.all_reduce(buffer, ReduceOp::Avg)?;
            }
        }
        Ok(shared)
    }

    /// Replaces the model by the average.
    fn shelve(&mut self, runner: &mut Runner) -> Result<()> {
        let group = runner.group().clone();
        let engine = runner.engine_mut();
        let shared = self.shared(engine.params().len(), &group)?;
        self.shelved.clear();
        visit_model(engine, &mut |i, spec, slice| {
            self.shelved.push(Tensor::copy(spec, slice));
            shared.get(i).into_iter().for_each(|average| round_into(slice, average));
            Ok(())
        })
    }

    /// Restores the trained model.
    fn unshelve(&mut self, runner: &mut Runner) -> Result<()> {
        let shelved = std::mem::take(&mut self.shelved);
        visit_model(runner.engine_mut(), &mut |i, _, slice| {
            copy_from_bytes(slice, &shelved[i].bytes);
            Ok(())
        })
    }

    /// Number of averaged tensors: the parameters, and the buffers if those are averaged.
    fn count(&self, engine: &dyn Engine) -> usize {
        let buffers = if self.update_buffers { engine.buffers().len() } else { 0 };
        engine.params().len() + buffers
    }

    /// Names and shapes, in the order of the averages.
    fn specs(&self, engine: &dyn Engine) -> Vec<(String, Vec<usize>)> {
        let all = engine.params().iter().chain(engine.buffers()).take(self.count(engine));
        all.map(|spec| (spec.name.clone(), spec.shape.clone())).collect()
    }
}

/// Averages of the parameters, and of the buffers if those are averaged.
#[derive(Debug)]
enum Averages {
    Host(Vec<Vec<f32>>),
    /// In the memory of the engine's device.
    Device(Box<dyn DeviceAverages>),
}

impl Averages {
    fn is_made(&self) -> bool {
        !matches!(self, Self::Host(averages) if averages.is_empty())
    }

    fn values(&self) -> Result<Cow<'_, [Vec<f32>]>> {
        Ok(match self {
            Self::Host(values) => Cow::Borrowed(values),
            Self::Device(averages) => Cow::Owned(averages.to_host()?),
        })
    }

    fn load(&mut self, values: Vec<Vec<f32>>) -> Result<()> {
        match self {
            Self::Host(averages) => *averages = values,
            Self::Device(averages) => averages.load(&values)?,
        }
        Ok(())
    }
}

/// Computes `average + share * (newest - average)`, with each operation rounded to f32.
fn lerp(average: &mut [f32], newest: &[f32], share: f32) {
    for (a, x) in average.iter_mut().zip(newest) {
        *a += share * (x - *a);
    }
}

pub(super) fn read(section: &mut Section) -> Result<Box<dyn Hook>> {
    let kinds = ["ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"];
    let kinds: Vec<_> = kinds.into_iter().zip(0..).collect();
    let kind = section.choice("ema_type", "ExponentialMovingAverage", &kinds)?;
    let share = |m: &f64| *m > 0.0 && *m < 1.0;
    let average = match kind {
        2 => Average::Stochastic,
        kind => {
            let momentum = section.or_checked("momentum", 2e-4, "between 0 and 1", share)?;
            match kind {
                0 => Average::Exponential { momentum },
                _ => {
                    let gamma =
                        section.or_checked("gamma", 100.0, "positive", |g: &f64| *g > 0.0)?;
                    Average::Annealing { momentum, gamma }
                }
            }
        }
    };
    let mut hook = EmaHook::new(average);
    hook.interval = section.count("interval", 1)?;
    hook.update_buffers = section.or("update_buffers", false)?;
    let both = section.offset_of("begin_epoch");
    hook.begin_iter = section.or("begin_iter", 0)?;
    hook.begin_epoch = section.or("begin_epoch", 0)?;
    if hook.begin_iter > 0 && hook.begin_epoch > 0 {
        section.note(both.error("`begin_epoch` and `begin_iter` cannot both be set"))?;
    }
    section.refuse("strict_load", "every tensor of a checkpoint must match")?;
    section.refuse("evaluate_on_ema", "validations always use the average")?;
    Ok(Box::new(hook))
}

impl Hook for EmaHook {
    fn name(&self) -> &'static str {
        "EMAHook"
    }

    fn warning(&self, length: Length, iters: usize) -> Option<String> {
        let epochs = if let Length::Epochs(epochs) = length { epochs } else { 1 };
        let Self { begin_epoch, begin_iter, .. } = self;
        (*begin_epoch > epochs || *begin_iter > iters).then(|| {
            format!(
                "EMAHook never starts (begin_epoch = {begin_epoch}, begin_iter = {begin_iter}) in this run of \
                 {iters} iterations and {epochs} epochs: the model in training is validated and saved; set an \
                 earlier begin"
            )
        })
    }

    fn before_run(&mut self, runner: &mut Runner) -> Result<()> {
        // Not repeated if a run continues, or is evaluated afterwards.
        if self.averages.is_made() { Ok(()) } else { self.copy_model(runner.engine_mut()) }
    }

    fn after_load_checkpoint(
        &mut self,
        runner: &mut Runner,
        checkpoint: &Checkpoint,
    ) -> Result<()> {
        self.copy_model(runner.engine_mut())?;
        // If only the model is loaded, it already is the average.
        if !runner.is_resuming() {
            return Ok(());
        }
        let Some(saved) = checkpoint.extra(AVERAGES)? else {
            runner
                .logger()
                .warning("EMAHook: the checkpoint has no averages; they begin with its model");
            return Ok(());
        };
        let own = checkpoint.own(runner.group().rank())?.unwrap_or_default();
        let find = |name: &str| {
            let both = own.iter().chain(&saved);
            both.into_iter().find(|tensor| tensor.spec.name == name).ok_or_else(|| {
                let path = checkpoint.path().join(format!("{AVERAGES}.safetensors"));
                bad(&path, format!("has no `{name}`"))
            })
        };
        let engine = runner.engine_mut();
        let mut averages = Vec::new();
        for (name, shape) in self.specs(engine) {
            let values = find(&format!("average.{name}"))?.to_f32();
            let (is, want) = (values.len(), shape.iter().product::<usize>());
            if is != want {
                let text = format!("the average of `{name}` has {is} elements, not {want}");
                return Err(Error::checkpoint(None, text));
            }
            averages.push(values);
        }
        self.averages.load(averages)?;
        checkpoint.load_trained(&saved, engine)
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let Position { epoch, iter, .. } = *runner.position();
        let position = Position { iter: iter + 1, ..runner.position().clone() };
        let iter = position.configured_iter();
        let engine = runner.engine_mut();
        if iter < self.begin_iter || epoch + 1 < self.begin_epoch {
            return self.copy_model(engine);
        }
        // With another number of ranks, updates are as many as in the first layout.
        position.completed().try_for_each(|_| self.update(engine))
    }

    fn before_val_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        self.shelve(runner)
    }

    fn after_val_epoch(&mut self, runner: &mut Runner, _: &[(String, f64)]) -> Result<()> {
        self.unshelve(runner)
    }

    fn on_interrupt(&mut self, runner: &mut Runner) -> Result<()> {
        // An interrupted validation leaves the average in place of the model.
        if self.shelved.is_empty() { Ok(()) } else { self.unshelve(runner) }
    }

    fn before_test_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        self.shelve(runner)
    }

    fn after_test_epoch(&mut self, runner: &mut Runner, _: &[(String, f64)]) -> Result<()> {
        self.unshelve(runner)
    }

    fn before_save_checkpoint(
        &mut self,
        runner: &mut Runner,
        contents: &mut Contents,
    ) -> Result<()> {
        let group = runner.group().clone();
        let engine = runner.engine_mut();
        let params = engine.params().len();
        let shared = self.shared(params, &group)?;
        let average = |((name, shape), values): ((String, Vec<usize>), &Vec<f32>)| {
            Tensor::f32(format!("average.{name}"), shape, values)
        };
        // In a validation the average replaces the model, which is in `shelved`.
        for trained in &self.shelved {
            let (name, own) = (&trained.spec.name, format!("{BUFFERS}{}", trained.spec.name));
            let model = contents.model.iter_mut().filter(|tensor| tensor.spec.name == *name);
            let both =
                model.chain(contents.own.iter_mut().filter(|tensor| tensor.spec.name == own));
            both.for_each(|tensor| tensor.bytes.clone_from(&trained.bytes));
        }
        let values = self.averages.values()?;
        let averages: Vec<_> = self.specs(engine).into_iter().zip(&*values).map(average).collect();
        contents.own.extend(averages.iter().skip(params).cloned());
        if contents.model.is_empty() {
            return Ok(());
        }
        let mut saved = averages;
        let trained = contents.model.iter().take(params + engine.buffers().len());
        saved.extend(trained.cloned().map(|mut tensor| {
            tensor.spec.name.insert_str(0, TRAINED);
            tensor
        }));
        contents.extra.push((AVERAGES.to_owned(), saved));
        // Rounded as the engine does, so that it equals the model of a validation.
        contents
            .model
            .iter_mut()
            .zip(&shared)
            .for_each(|(tensor, values)| tensor.round_from(values));
        Ok(())
    }

    fn state_dict(&self) -> Option<Value> {
        Some(json!({ "updates": self.updates }))
    }

    fn load_state_dict(&mut self, state: &Value) -> Result<()> {
        let none = || Error::checkpoint(None, format!("EMAHook: no number of updates in {state}"));
        self.updates = state["updates"].as_u64().ok_or_else(none)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use half::f16;
    use parking_lot::Mutex;
    use proptest::prelude::*;

    use fused_optim::SliceMut;

    use super::*;
    use crate::runner::{Save, TrainConfig};
    use crate::testing::{FakeEngine, Metrics, Values, blank, builder};

    fn engine(value: f32) -> FakeEngine {
        let half = |x| f16::from_f32(x);
        FakeEngine::new(
            &[("w", Values::F32(vec![value, -value])), ("h", Values::F16(vec![half(value)]))],
            &[("mean", Values::F32(vec![10.0 * value]))],
        )
    }

    /// Computes the average by its definition, in f64.
    fn twin(average: Average, interval: u64, values: &[f32]) -> f64 {
        let mut result = f64::from(values[0]);
        for (n, value) in values.iter().enumerate().skip(1) {
            let n = n as u64;
            if n.is_multiple_of(interval) {
                let share = match average {
                    Average::Exponential { momentum } => momentum,
                    Average::Annealing { momentum, gamma } => {
                        f64::max(momentum, gamma / (gamma + n as f64))
                    }
                    Average::Stochastic => 1.0 / ((n / interval) as f64 + 1.0),
                };
                result = (1.0 - share) * result + share * f64::from(*value);
            }
        }
        result
    }

    proptest! {
        #[test]
        fn average_matches_its_definition(
            values in prop::collection::vec(-8.0f32..8.0, 1..40),
            interval in 1u64..4,
            kind in 0..3,
            momentum in 0.001f64..0.9,
            update_buffers: bool,
        ) {
            let average = match kind {
                0 => Average::Exponential { momentum },
                1 => Average::Annealing { momentum, gamma: 3.0 },
                _ => Average::Stochastic,
            };
            let mut hook = EmaHook { interval, update_buffers, ..EmaHook::new(average) };
            for value in &values {
                hook.update(&mut engine(*value)).unwrap();
            }
            let averages = hook.averages.values().unwrap();
            prop_assert_eq!(averages.len(), if update_buffers { 3 } else { 2 });
            let expected = twin(average, interval, &values);
            // Each of up to forty updates is rounded to f32.
            prop_assert!((f64::from(averages[0][0]) - expected).abs() < 1e-4);
            prop_assert!((f64::from(averages[0][1]) + expected).abs() < 1e-4);
            let halves: Vec<_> = values.iter().map(|v| f16::from_f32(*v).to_f32()).collect();
            let expected = twin(average, interval, &halves);
            prop_assert!((f64::from(averages[1][0]) - expected).abs() < 1e-4);
        }
    }

    type Seen = Arc<Mutex<Vec<(&'static str, f32)>>>;

    /// Records the first parameter during and after validations.
    struct Look(Seen);

    fn first(runner: &mut Runner) -> f32 {
        let mut value = 0.0;
        let mut read = |slices: &mut [SliceMut<'_>]| {
            if let Some(SliceMut::F32(v)) = slices.first() {
                value = v[0];
            }
            Ok(())
        };
        runner.engine_mut().with_params(&mut read).unwrap();
        value
    }

    impl Hook for Look {
        fn name(&self) -> &'static str {
            "Look"
        }
        fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
            self.0.lock().push(("train", first(runner)));
            Ok(())
        }
        fn before_val_iter(&mut self, runner: &mut Runner, _: usize, _: &mut Batch) -> Result<()> {
            self.0.lock().push(("val", first(runner)));
            let position = runner.position().clone();
            runner.save_checkpoint(Save::resumable("within", position)).map(|_| ())
        }
        fn after_val(&mut self, runner: &mut Runner) -> Result<()> {
            self.0.lock().push(("after", first(runner)));
            let position = runner.position().clone();
            runner.save_checkpoint(Save::weights("weights", position)).map(|_| ())
        }
    }

    #[test]
    fn average_is_validated_and_saved_but_not_trained() {
        let dir = tempfile::tempdir().unwrap();
        let seen = Seen::default();
        let average = Average::Exponential { momentum: 0.25 };
        let hook = EmaHook { begin_iter: 2, ..EmaHook::new(average) };
        builder(dir.path(), 4)
            .train_cfg(TrainConfig::new(1))
            .validation(blank(1), Metrics::new([[]]))
            .hook(Box::new(hook))
            .hook(Box::new(Look(Arc::clone(&seen))))
            .build()
            .unwrap()
            .train()
            .unwrap();
        let seen = seen.lock().clone();
        let trained: Vec<_> = seen.iter().filter(|s| s.0 == "train").map(|s| s.1).collect();
        // Before the second iteration there is no average; then it starts from the model.
        let expected = twin(average, 1, &trained[1..]) as f32;
        let [(_, validated), (_, after)] = seen[4..] else { panic!("{seen:?}") };
        assert!((validated - expected).abs() < 1e-6, "{seen:?} {expected}");
        assert_eq!(after, trained[3]);
        let saved = crate::checkpoint::load(&dir.path().join("weights")).unwrap();
        let mut model = FakeEngine::new(&[("w", Values::F32(vec![0.0; 2]))], &[]);
        saved.load_model(&mut model).unwrap();
        assert_eq!(model.params, [Values::F32(vec![validated, validated + 1.0])]);
        // A checkpoint saved while the average replaces the model is the same.
        let within = crate::checkpoint::load(&dir.path().join("within")).unwrap();
        within.load_model(&mut model).unwrap();
        assert_eq!(model.params, [Values::F32(vec![validated, validated + 1.0])]);
        let saved = within.extra(AVERAGES).unwrap().unwrap();
        let trained = saved.iter().find(|tensor| tensor.spec.name == "source.w").unwrap();
        assert_eq!(trained.to_f32(), [after, after + 1.0]);
    }

    #[test]
    fn run_without_the_hook_resumes_from_the_trained_weights() {
        let dir = tempfile::tempdir().unwrap();
        let run = |with: bool| {
            let mut saves = super::super::CheckpointHook::new(0);
            saves.by_epoch = false;
            let run =
                builder(dir.path(), 9).train_cfg(TrainConfig::by_iters(3 - usize::from(with)));
            let run = run.hook(Box::new(saves)).resume(true);
            let hook = EmaHook::new(Average::Exponential { momentum: 0.25 });
            if with { run.hook(Box::new(hook)) } else { run }
        };
        run(true).build().unwrap().train().unwrap();
        let mut resumed = run(false).build().unwrap();
        resumed.train().unwrap();
        // Each iteration subtracts 0.1.
        assert!((first(&mut resumed) - 0.7).abs() < 1e-6, "{}", first(&mut resumed));
        run(true).train_cfg(TrainConfig::by_iters(4)).build().unwrap().train().unwrap();
        let logs = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let logs = logs.filter_map(|run| std::fs::read_dir(run).ok()).flatten();
        let logs = logs
            .map(|file| file.unwrap().path())
            .filter(|file| file.extension().is_some_and(|e| e == "log"));
        let says = |log: &std::path::PathBuf| {
            std::fs::read_to_string(log).unwrap().contains("the checkpoint has no averages")
        };
        assert_eq!(logs.filter(says).count(), 1);
    }
}
