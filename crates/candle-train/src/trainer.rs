//! [`Trainer`]: one call per batch.

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::PoisonError;

use amp::LossScaler;
use candle_core::{DType, Device, Tensor, TensorId};
use candle_nn::VarMap;
use candle_ops::Context;
use collective::{ProcessGroup, ReduceOp};
use fused_optim::candle::VarOptimizer;
use fused_optim::{Applied, Clip, FoundInf, HyperParam, Optimizer, StepCtl};
use tracing::debug_span;
use train_data::Accumulation;

use crate::averages::{DataParallel, View};
use crate::error::SAME_CALLS;
use crate::variables::Variables;
use crate::{Error, Result};

/// Trains a model's variables, with all parts of a training loop. Built by [`Trainer::builder`].
///
/// Every rank must call [`step`](Self::step), [`mean`](Self::mean), [`sum`](Self::sum),
/// [`save`](Self::save) and [`resume`](Self::resume) in the same order. On the CPU ranks compare
/// these calls, and an error names those that differ; on GPUs, where a step does not wait for the
/// other ranks' hosts, the error comes with the group's timeout.
pub struct Trainer {
    pub(crate) map: VarMap,
    pub(crate) variables: Variables,
    pub(crate) averages: DataParallel,
    pub(crate) optimizer: VarOptimizer<Box<dyn Optimizer>>,
    pub(crate) scaler: LossScaler,
    pub(crate) context: Context,
    pub(crate) device: Device,
    /// Whether steps with gradients that are not finite are skipped.
    pub(crate) is_mixed: bool,
    /// Whether an operator has run in half precision, or none has to.
    pub(crate) has_lowered: bool,
    pub(crate) clip: Option<Clip>,
    pub(crate) accumulation: Accumulation,
    /// Batches since the last step.
    pub(crate) pending: usize,
    /// The number of batches in the epoch and of those already trained, after a call of
    /// [`batches`](Self::batches).
    pub(crate) epoch: Option<(usize, usize)>,
    pub(crate) schedule: Option<Schedule>,
    /// The optimizer's learning rates, by parameter group, before the schedule.
    pub(crate) base_lrs: Vec<f64>,
    /// Number of applied steps.
    pub(crate) steps: u64,
    pub(crate) seed: u64,
}

/// Factor of the learning rates as a function of the number of steps taken.
pub(crate) type Schedule = Box<dyn Fn(u64) -> f64 + Send>;

impl Trainer {
    /// Trains on a batch: runs `forward`, which returns the mean loss, then the backward pass, and
    /// the optimizer step if it is due. Returns the loss of this rank's batch, in device memory.
    ///
    /// `forward` runs with dropout, under autocast, on a [tape](candle_ops::record()): it must not
    /// call `backward`. In mixed precision a step with gradients that are not finite is skipped,
    /// and the loss scale is reduced; changes by the last batch to the statistics of norm layers
    /// are undone then. Variables must not be changed elsewhere between steps: those of `f16` and
    /// `bf16` have `f32` master weights.
    ///
    /// # Errors
    ///
    /// Errors of `forward`; variables created after this trainer; a loss of several elements, or
    /// one created before this call; autocast without an operator to cast; a variable without a
    /// gradient, by name; a loss scale that has fallen to its minimum; a failure of another rank,
    /// or another rank that calls another method.
    pub fn step(
        &mut self,
        forward: impl FnOnce() -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let _span = debug_span!(target: "candle_train", "step", rank = self.rank()).entered();
        self.train(forward).map_err(|error| self.failed("step", error))
    }

    fn train(&mut self, forward: impl FnOnce() -> candle_core::Result<Tensor>) -> Result<Tensor> {
        self.check_map()?;
        let buffers = self.begin_batch()?;
        let begin = Tensor::zeros((), DType::U8, &Device::Cpu)?;
        let forward = || (candle_ops::record(forward), candle_ops::lowered_operators());
        let span = debug_span!(target: "candle_train", "forward");
        let ((loss, tape), lowered) = span.in_scope(|| self.context.enter(forward));
        let loss = loss?;
        if age(loss.id()) < age(begin.id()) {
            let text = "the loss was made before `step`, without its autocast, dropout and averages: run the forward \
                        pass within the closure";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        if loss.elem_count() != 1 {
            let shape = loss.dims();
            let text =
                format!("the loss has shape {shape:?}; expected one element, the batch's mean");
            return Err(Error::InvalidArgument(text));
        }
        self.has_lowered |= lowered > 0;
        if !self.has_lowered {
            let text = "autocast is enabled, but no operator ran in half precision: candle-nn's own layers do not support \
                        autocast; use those of `candle_ops`";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        let role = self.accumulation.next_batch();
        let factor = f64::from(self.scaler.scale()) / role.divisor;
        let gradient =
            Tensor::full(factor as f32, loss.shape(), loss.device())?.to_dtype(loss.dtype())?;
        let averages = &mut self.averages;
        let backward = || averages.backward((tape, &loss), gradient, role.steps);
        let span = debug_span!(target: "candle_train", "backward");
        if let Err(error) = span.in_scope(|| self.context.enter(backward)) {
            // Gradients of this batch are incomplete. The epoch continues with the next batch.
            let epoch = self.epoch;
            self.zero_grad();
            self.epoch = epoch;
            self.count_batch();
            if let Some((len, seen)) = self.epoch {
                self.accumulation.initialize_count_status(seen, len);
            }
            return Err(error);
        }
        self.pending += 1;
        self.count_batch();
        let applied = role.steps.then(|| self.update()).transpose()?;
        self.end_batch(buffers, applied)?;
        Ok(loss.detach())
    }

    /// Counts a batch of the epoch. After the last one the same batches may be iterated again.
    fn count_batch(&mut self) {
        let Some((len, seen)) = &mut self.epoch else { return };
        *seen += 1;
        if seen == len {
            *seen = 0;
            self.accumulation.initialize_count_status(0, *len);
        }
    }

    /// Returns an error for variables created after this trainer: they would be neither trained nor
    /// saved.
    pub(crate) fn check_map(&self) -> Result<()> {
        let map = self.map.data().lock().unwrap_or_else(PoisonError::into_inner);
        if map.len() == self.variables.all().count() {
            return Ok(());
        }
        let known: HashSet<&str> = self.variables.all().map(|(name, _)| name.as_str()).collect();
        let mut new: Vec<_> = map.keys().filter(|name| !known.contains(name.as_str())).collect();
        new.sort();
        let text =
            format!("variables made after the trainer: {new:?}; build the whole model before it");
        Err(Error::InvalidArgument(text))
    }

    /// Compares the ranks' calls, and fails on all ranks if they differ.
    pub(crate) fn announce(&self, call: &str) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(());
        }
        let own = CALLS.iter().position(|name| *name == call).expect("a name of `CALLS`");
        let mut all = vec![0_u64; self.world_size()];
        self.group().all_gather(&mut all, &[own as u64])?;
        if all.iter().all(|other| *other == all[0]) {
            return Ok(());
        }
        let name = |call: &u64| usize::try_from(*call).ok().and_then(|call| CALLS.get(call));
        let called =
            |(rank, call)| format!("rank {rank}: `Trainer::{}`", name(call).unwrap_or(&"?"));
        let called: Vec<_> = all.iter().enumerate().map(called).collect();
        let text = format!("ranks called different methods: {}; {SAME_CALLS}", called.join(", "));
        Err(Error::InvalidArgument(text))
    }

    /// An error of one of the methods that all ranks call, with advice.
    pub(crate) fn failed(&self, call: &'static str, error: Error) -> Error {
        error.of_call(call, self.rank(), self.variables.params.len())
    }

    /// Broadcasts rank 0's statistics of norm layers, once per step, and returns copies in mixed
    /// precision.
    fn begin_batch(&self) -> Result<Vec<Tensor>> {
        if self.pending == 0 {
            if self.device.is_cpu() {
                self.announce("step")?;
            }
            self.variables.broadcast_buffers(self.averages.group())?;
        }
        if !self.is_mixed {
            return Ok(Vec::new());
        }
        let copies = self.variables.buffers.iter().map(|(_, var)| var.copy());
        Ok(copies.collect::<candle_core::Result<_>>()?)
    }

    /// Restores the statistics after a batch whose step was skipped, and those of an earlier batch
    /// of the step that are not finite.
    fn end_batch(&self, copies: Vec<Tensor>, applied: Option<Applied>) -> Result<()> {
        for ((_, var), copy) in self.variables.buffers.iter().zip(copies) {
            let is_lost = match applied {
                Some(applied) => applied == Applied::SkippedNonFinite,
                None => !is_finite(var)?,
            };
            if is_lost {
                var.set(&copy)?;
            }
        }
        Ok(())
    }

    /// Runs the optimizer step on the averages.
    fn update(&mut self) -> Result<Applied> {
        let _span = debug_span!(target: "candle_train", "optimizer").entered();
        let factor = self.schedule.as_ref().map_or(1.0, |schedule| schedule(self.steps));
        if self.schedule.is_some() {
            for (group, base) in self.base_lrs.iter().enumerate() {
                self.optimizer.set_hyper_param(group, HyperParam::Lr, base * factor)?;
            }
        }
        let found_inf = if self.is_mixed { FoundInf::Check } else { FoundInf::Known(false) };
        let ctl = StepCtl { grad_scale: self.scaler.inv_scale(), found_inf, clip: self.clip };
        let optimizer = &mut self.optimizer;
        let applied = self.averages.with(|gradients| match gradients {
            View::Host(slices) => Ok(optimizer.step_slices(slices, &ctl)?),
            #[cfg(feature = "cuda")]
            View::Device(gradients) => gradients.step(optimizer, &ctl),
        })?;
        self.averages.zero_grad();
        self.pending = 0;
        self.steps += u64::from(applied == Applied::Applied);
        self.scaler.update(applied == Applied::SkippedNonFinite)?;
        Ok(applied)
    }

    /// Runs a forward pass for evaluation: without dropout, under the same autocast, so results may
    /// be in half precision. Norm layers are switched to evaluation by their own flag
    /// (`forward_t(x, false)`).
    pub fn evaluate<R>(&mut self, forward: impl FnOnce() -> R) -> R {
        self.context.evaluate(forward)
    }

    /// Drops the gradients of the batches since the last step.
    pub fn zero_grad(&mut self) {
        self.averages.zero_grad();
        self.accumulation = Accumulation::new(self.accumulation.counts());
        self.pending = 0;
        self.epoch = None;
    }

    /// The mean over the ranks of one number per rank, such as a loss. Waits for the device. Every
    /// rank must call it.
    ///
    /// # Errors
    ///
    /// A tensor of several elements; a failure of another rank.
    pub fn mean(&self, value: &Tensor) -> Result<f64> {
        let value = value.to_dtype(DType::F64)?.flatten_all()?.squeeze(0)?.to_scalar::<f64>()?;
        let [sum] = self.total("mean", [value])?;
        Ok(sum / self.world_size() as f64)
    }

    /// The sums over the ranks of several numbers per rank, such as the numbers of correct
    /// predictions and of samples; see [`eval_batches`](Self::eval_batches). Every rank must call
    /// it, with the same number of values.
    ///
    /// Takes an array, or a slice whose numbers are replaced with their sums, such as the states of
    /// `train-data`'s metrics:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_train::{AdamWHyper, Trainer};
    /// use train_data::metrics::{Accuracy, CrossEntropy, Evaluator};
    /// use train_data::{Array, Batch};
    ///
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::linear(2, 4, vb)?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// # let inputs = Tensor::ones((10, 2), DType::F32, &Device::Cpu)?;
    /// # let labels = Tensor::zeros(10, DType::I64, &Device::Cpu)?;
    /// let mut evaluator = Evaluator::new().with(Accuracy::new([1, 2])).with(CrossEntropy::new());
    /// for rows in train.eval_batches(10, 4)? {
    ///     let rows = Tensor::new(rows, &Device::Cpu)?;
    ///     let logits = train.evaluate(|| net.forward(&inputs.index_select(&rows, 0)?))?;
    ///     let logits = Array::new(logits.dims(), logits.flatten_all()?.to_vec1::<f32>()?)?;
    ///     let labels = labels.index_select(&rows, 0)?.to_vec1::<i64>()?;
    ///     let batch = Batch::new().with("labels", Array::new([labels.len()], labels)?);
    ///     evaluator.update(&batch, &[("logits".to_owned(), logits)])?;
    /// }
    /// evaluator.reduce(|states| train.sum(states).map(drop))?;
    /// for (name, value) in evaluator.compute()? {
    ///     println!("{name}: {value:.4}");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A failure of another rank.
    pub fn sum<V: AsMut<[f64]>>(&self, values: V) -> Result<V> {
        self.total("sum", values)
    }

    fn total<V: AsMut<[f64]>>(&self, call: &'static str, mut values: V) -> Result<V> {
        let all_reduce = |()| Ok(self.group().all_reduce(values.as_mut(), ReduceOp::Sum)?);
        self.announce(call).and_then(all_reduce).map_err(|error| self.failed(call, error))?;
        Ok(values)
    }

    /// The process group of all ranks.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        self.averages.group()
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.group().rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.group().world_size()
    }

    /// Whether this is rank 0, the one that prints.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Number of applied steps.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }

    /// The loss scale; 1 without one.
    #[must_use]
    pub fn loss_scale(&self) -> f32 {
        self.scaler.scale()
    }

    /// The device of the variables.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// On a GPU, version and path of the cuDNN used for convolutions of `f16` and `bf16`, or the
    /// reason why none is used, in which case convolutions are slower. `None` on the CPU.
    #[must_use]
    pub fn cudnn(&self) -> Option<std::result::Result<&str, &str>> {
        #[cfg(feature = "cuda")]
        return self.context.kernels().map(|kernels| kernels.cudnn());
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// The learning rate of the first parameter group in the last step.
    #[must_use]
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.optimizer().lr(0).unwrap_or(f64::NAN)
    }

    /// The optimizer, to read or set hyper-parameters. A [`schedule`](crate::Builder::schedule)
    /// sets learning rates again before each step.
    pub fn optimizer(&mut self) -> &mut VarOptimizer<Box<dyn Optimizer>> {
        &mut self.optimizer
    }
}

/// Methods that all ranks call together.
const CALLS: [&str; 5] = ["step", "mean", "sum", "save", "resume"];

/// A number that is larger for tensors created later: candle counts them.
fn age(id: TensorId) -> usize {
    #[derive(Default)]
    struct Count(usize);
    impl Hasher for Count {
        fn write(&mut self, _: &[u8]) {}
        fn write_usize(&mut self, count: usize) {
            self.0 = count;
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut count = Count::default();
    id.hash(&mut count);
    count.0
}

fn is_finite(var: &Tensor) -> Result<bool> {
    if !var.dtype().is_float() {
        return Ok(true);
    }
    // Infinity and NaN times 0 are NaN.
    let sum = var.to_dtype(DType::F32)?.affine(0.0, 0.0)?.sum_all()?.to_scalar::<f32>()?;
    Ok(sum == 0.0)
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("device", &self.device)
            .field("variables", &self.variables.params.len())
            .field("optimizer", self.optimizer.optimizer())
            .field("loss_scale", &self.loss_scale())
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}
