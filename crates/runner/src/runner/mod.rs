//! `Runner`: owns all parts of a run, and lends them to hooks.
//!
//! A [`RunnerBuilder`] collects the parts, from a configuration or in code, and
//! [`build`](RunnerBuilder::build) joins the process group and builds them. [`Runner::train`] then
//! runs the training loop; hooks access everything through the methods here.

mod agreement;
mod builder;
mod check;
mod elastic;
mod eval_weights;
mod evaluation;
mod finite;
mod hook;
mod loader_config;
mod loading;
mod log_lines;
mod output;
#[cfg(test)]
mod resume_tests;
mod saving;
mod scheduling;
mod state;
mod stream;
mod train_config;
mod train_loop;
mod work_dir;

use std::path::Path;
use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::Optimizer;
use tracing::info_span;

use agreement::Budget;
pub(crate) use agreement::Interrupt;
pub use builder::RunnerBuilder;
pub(crate) use check::PARTS;
pub(crate) use evaluation::EvalSplit;
use evaluation::Evaluation;
use finite::UncheckedLosses;
pub use hook::{Hook, Priority};
pub use loader_config::DataLoaderConfig;
pub use loading::LoadOptions;
use loading::Start;
pub(crate) use log_lines::{format_eval_line, format_eval_progress, format_train_line};
use output::Output;
pub(crate) use output::TERMINAL_VARIABLE;
pub use saving::Save;
use saving::{Configured, Status};
pub use scheduling::ParamSchedulerHook;
pub(crate) use state::BUFFERS;
use state::Seed;
use stream::TrainData;
pub use train_config::{Length, TrainConfig};
use train_step::Schedules;

use crate::checkpoint::{Position, visit_whole_model};
use crate::data::{Batch, DataLoader};
use crate::engine::{Engine, EngineState, Losses, broadcast};
use crate::error::without_backtrace;
use crate::model::ModelWrapper;
use crate::optim_wrapper::{OptimWrapper, update_params};
use crate::sinks::{Logger, Scalars};
use crate::{Error, Result};

/// A training run on this rank.
pub struct Runner {
    group: ProcessGroup,
    engine: Box<dyn Engine>,
    engine_state: EngineState,
    model: Box<dyn ModelWrapper>,
    optim: OptimWrapper,
    configured: Configured,
    schedules: Schedules,
    hooks: Vec<(Priority, Box<dyn Hook>)>,
    train_data: TrainData,
    /// Indexed by [`EvalSplit`].
    evaluations: [Option<Evaluation>; 2],
    train: TrainConfig,
    budget: Budget,
    start: Start,
    status: Status,
    losses: UncheckedLosses,
    seed: Seed,
    position: Position,
    output: Output,
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner")
            .field("rank", &self.group.rank())
            .field("world_size", &self.group.world_size())
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

impl Runner {
    /// Starts collecting the parts of a run.
    #[must_use]
    pub fn builder() -> RunnerBuilder {
        RunnerBuilder::default()
    }

    /// Trains to the last epoch or iteration, or until the time budget is exhausted (see
    /// [`is_interrupted`](Self::is_interrupted)), with validations in between. Every rank calls it;
    /// a second call continues after a stop, and loads nothing. Returns the metrics of the last
    /// validation.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`], on every rank, after a signal to any of them, with a checkpoint if a
    /// hook saves one. Otherwise the first error of any part: the process group is aborted with its
    /// text, so that the other ranks end as well and report it. [`Error::Diverged`] if weights are
    /// not finite at the end. After an error other than an interruption each later call is
    /// [`Error::Spent`]; [`Error::Config`] for a run without a training set changes nothing.
    pub fn train(&mut self) -> Result<Vec<(String, f64)>> {
        self.traced(Self::train_untraced)
    }

    fn train_untraced(&mut self) -> Result<Vec<(String, f64)>> {
        self.check_unspent()?;
        // Nothing has begun: a run without a training set can still be validated.
        self.check_has("train_dataloader", self.train_data.loader.is_some())?;
        self.train_loader()?;
        let (rank, world_size) = (self.group.rank(), self.group.world_size());
        let _span = info_span!(target: "runner", "train", rank, world_size).entered();
        let status = &mut self.status;
        (status.trains, status.stopped, status.interrupted) = (true, false, false);
        let trained = train_loop::train(self);
        let checked = self.check_all_losses();
        let trained = trained.and_then(|metrics| checked.map(|()| metrics));
        (self.status.trains, self.status.lock) = (false, None);
        self.or_abort(trained)
    }

    /// Validates the model of `load_from` or of the newest checkpoint; after
    /// [`train`](Self::train), the current model. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] without a validation set; otherwise as [`train`](Self::train).
    pub fn validate(&mut self) -> Result<Vec<(String, f64)>> {
        self.evaluate(EvalSplit::Val)
    }

    /// As [`validate`](Self::validate), on the test set.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] without a test set; otherwise as [`train`](Self::train).
    pub fn test(&mut self) -> Result<Vec<(String, f64)>> {
        self.evaluate(EvalSplit::Test)
    }

    fn evaluate(&mut self, split: EvalSplit) -> Result<Vec<(String, f64)>> {
        self.check_unspent()?;
        // Nothing has begun: a run without this set can still train.
        let has_set = self.evaluations[split as usize].is_some();
        self.check_has(&format!("{}_dataloader", split.name()), has_set)?;
        self.eval_parts(split)?;
        let metrics = self.traced(|runner| evaluation::evaluate_only(runner, split));
        self.or_abort(metrics)
    }

    /// Returns an error on every rank if only some have a part of a run.
    fn check_has(&self, part: &str, has: bool) -> Result<()> {
        let own = (part.to_owned(), if has { "present" } else { "absent" }.to_owned());
        agreement::compare(&self.group, "parts of the run", &[own])
    }

    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| {
            // All ranks end at an interruption; and a group that has failed keeps its first reason.
            if !matches!(error, Error::Interrupted { .. }) {
                self.group.abort(&error.to_string());
                self.status.failed = Some(error.to_string());
            }
        })
    }

    /// Returns the process group of this run.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the engine of the model.
    pub fn engine_mut(&mut self) -> &mut dyn Engine {
        &mut *self.engine
    }

    /// Returns the engine of the model, and the optimizer.
    pub(crate) fn engine_and_optimizer(&mut self) -> (&mut dyn Engine, &dyn Optimizer) {
        (&mut *self.engine, self.optim.optimizer())
    }

    /// Returns the optimizer wrapper.
    pub fn optim_wrapper_mut(&mut self) -> &mut OptimWrapper {
        &mut self.optim
    }

    /// Returns the optimizer wrapper.
    #[must_use]
    pub fn optim_wrapper(&self) -> &OptimWrapper {
        &self.optim
    }

    /// Returns the progress of the run.
    #[must_use]
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Number of epochs of the run; 1 if it counts iterations.
    #[must_use]
    pub fn max_epochs(&self) -> usize {
        match self.train.length {
            Length::Epochs(epochs) => epochs,
            Length::Iters(_) => 1,
        }
    }

    /// Number of iterations of the run.
    #[must_use]
    pub fn max_iters(&self) -> usize {
        match self.train.length {
            Length::Epochs(epochs) => epochs.saturating_mul(self.batches_per_epoch()),
            Length::Iters(iters) => self.position.begun.scale.to_present(iters),
        }
    }

    /// Returns whether the run counts epochs; otherwise iterations.
    #[must_use]
    pub fn is_by_epoch(&self) -> bool {
        matches!(self.train.length, Length::Epochs(_))
    }

    /// Number of batches in an epoch.
    #[must_use]
    pub fn batches_per_epoch(&self) -> usize {
        self.train_data.loader.as_ref().map_or(0, DataLoader::batches_per_epoch)
    }

    /// Epoch at which a validation is logged: the last one, or the one in which a time budget
    /// ended; 0 in a run by iterations.
    pub(crate) fn val_epoch(&self) -> usize {
        self.position.epoch + usize::from(self.is_by_epoch() && self.position.batch > 0)
    }

    /// Returns the directory of checkpoints and logs.
    #[must_use]
    pub fn work_dir(&self) -> &Path {
        self.output.work_dir()
    }

    /// Returns the log. Only rank 0's writes anything.
    pub fn logger(&mut self) -> &mut Logger {
        self.output.logger()
    }

    /// Returns the scalars logged so far.
    #[must_use]
    pub fn scalars(&self) -> &Scalars {
        &self.output.scalars
    }

    /// Returns the scalars logged so far, to add values.
    pub fn scalars_mut(&mut self) -> &mut Scalars {
        &mut self.output.scalars
    }

    /// Returns the learning rate of the first group.
    #[must_use]
    pub fn lr(&self) -> f64 {
        self.optim.optimizer().lr(0).unwrap_or(f64::NAN)
    }

    /// Learning rates for the log: `lr`; for an optimizer with parts `PART.lr`, the rate of each
    /// part's first group.
    pub(crate) fn rates(&self) -> Vec<(String, f64)> {
        let parts = self.optim.parts();
        if parts.is_empty() {
            return vec![("lr".to_owned(), self.lr())];
        }
        let mut first = 0;
        let rate = |(part, count): &(String, usize)| {
            let rate = self.optim.optimizer().lr(first).unwrap_or(f64::NAN);
            first += count;
            (format!("{part}.lr"), rate)
        };
        parts.iter().map(rate).collect()
    }

    /// Returns the estimated time until the end of the run.
    #[must_use]
    pub fn eta(&self) -> Duration {
        self.output.eta
    }

    /// Sets the estimated time until the end of the run.
    pub fn set_eta(&mut self, eta: Duration) {
        self.output.eta = eta;
    }

    /// Returns the remaining time budget, if there is one: all of it until the first step is
    /// completed.
    #[must_use]
    pub fn budget_left(&self) -> Option<Duration> {
        self.budget.left()
    }

    /// Ends training after the current epoch. Every rank calls it.
    pub fn stop_training(&mut self) {
        self.status.stopped = true;
    }

    /// Returns whether [`stop_training`](Self::stop_training) was called.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.status.stopped
    }

    /// Returns whether [`train`](Self::train) is running; otherwise the model is only evaluated.
    #[must_use]
    pub fn is_training(&self) -> bool {
        self.status.trains
    }

    /// Returns whether the run has a hook of this name.
    pub(crate) fn has_hook(&self, name: &str) -> bool {
        self.hooks.iter().any(|(_, hook)| hook.name() == name)
    }

    /// Returns whether the run ends early, see [`Hook::on_interrupt`].
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.status.interrupted
    }

    /// Returns whether a checkpoint of the current position was saved, from which a run can resume.
    #[must_use]
    pub fn is_resumable(&self) -> bool {
        self.status.resumable == Some(self.position.configured_iter())
    }

    /// Broadcasts rank 0's parameters and buffers.
    pub(crate) fn broadcast_model(&mut self) -> Result<()> {
        let group = &self.group;
        visit_whole_model(&mut *self.engine, &mut |_, _, slice| Ok(broadcast(group, slice)?))
    }

    /// Returns whether the run ends now, see [`Budget::interrupt`]; an error if learning rates
    /// differ between ranks.
    pub(crate) fn interrupt(&mut self) -> Result<Option<Interrupt>> {
        let optimizer = self.optim.optimizer();
        let agreed = self.budget.interrupt(&self.group, || scheduling::digest(optimizer))?;
        if !agreed.is_same {
            self.compare_rates()?;
        }
        Ok(agreed.interrupt)
    }

    pub(crate) fn train_loader(&self) -> Result<&DataLoader> {
        self.train_data.loader()
    }

    /// Trains on one batch and records the scalars reported by the model.
    pub(crate) fn train_step(&mut self, batch: &Batch) -> Result<Losses> {
        if !std::mem::replace(&mut self.status.compared_counts, true) {
            let count = match self.engine.loss_count(batch)? {
                Some(_) => "known",
                None => "not known",
            };
            let own = ("`loss_count` of the first batch".to_owned(), count.to_owned());
            agreement::compare(&self.group, "losses", &[own])?;
        }
        let update = update_params(
            &mut self.optim,
            (&mut *self.engine, &mut *self.model),
            batch,
            &mut self.engine_state,
        )?;
        if let Some(warning) = &update.warning {
            self.output.logger().warning(&without_backtrace(warning));
        }
        if let Some(note) = &update.note {
            self.output.logger().info(&without_backtrace(note));
        }
        // In MMEngine's order: the optimizer wrapper's scalars come first.
        for (name, value) in self.optim.log_scalars() {
            self.output.scalars.push(name, value);
        }
        self.output.scalars.push_losses(&update.losses);
        self.check_losses(&update)?;
        Ok(update.losses)
    }
}
