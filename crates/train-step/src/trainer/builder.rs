//! [`TrainerBuilder`]: builds a [`Trainer`] from options, a process group and an optimizer.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::{self, Display};
use std::sync::atomic::{AtomicUsize, Ordering};

use amp::{LossScaler, LossScalerOptions};
use collective::object::all_gather_object;
use collective::reducer::ReducerOptions;
use collective::{GroupOptions, ProcessGroup, Topology, init_process_group};
use fused_optim::{Clip, DType, Optimizer, ParamSpec};

use super::buffers::Buffers;
use super::exchange::OpenStep;
use super::{Schedule, Trainer};
use crate::checkpoint::Places;
use crate::{
    Averages, EngineState, Error, Model, ModelWrapper, OptimWrapper, Result, RunLength,
    SchedulerConfig, Schedules, TensorSpec, broadcast,
};

/// Options of a [`Trainer`].
#[must_use = "nothing is made before `build`"]
pub struct TrainerBuilder {
    group: Option<ProcessGroup>,
    reducer: ReducerOptions,
    /// The lower precision of autocast.
    half: Option<DType>,
    scaler: Option<LossScaler>,
    clip: Option<Clip>,
    accumulate: usize,
    schedule: Option<Schedule>,
    schedulers: Option<(RunLength, Vec<SchedulerConfig>)>,
    max_consecutive_skips: usize,
    seed: u64,
    /// Descriptions of the program's tensors, which have to be equal on all ranks.
    described: Vec<String>,
    broadcasts: bool,
    part: Option<String>,
}

impl Trainer {
    /// Options for training a model.
    pub fn builder() -> TrainerBuilder {
        TrainerBuilder {
            group: None,
            reducer: ReducerOptions::default(),
            half: None,
            scaler: None,
            clip: None,
            accumulate: 1,
            schedule: None,
            schedulers: None,
            max_consecutive_skips: 100,
            seed: 0,
            described: Vec::new(),
            broadcasts: true,
            part: None,
        }
    }
}

impl TrainerBuilder {
    /// Trains in mixed precision with `f16`, by autocast or with parameters of `f16`: the loss is
    /// scaled dynamically, and steps with gradients that are not finite are skipped.
    pub fn f16(self) -> Self {
        self.mixed(DType::F16)
    }

    /// Trains in mixed precision with `bf16`, by autocast or with parameters of `bf16`: without a
    /// loss scale; steps with gradients that are not finite are skipped.
    pub fn bf16(self) -> Self {
        self.mixed(DType::Bf16)
    }

    fn mixed(mut self, dtype: DType) -> Self {
        self.half = Some(dtype);
        self
    }

    /// Scales the loss with this scaler. By default the loss scale is dynamic with `f16`, and
    /// absent otherwise.
    pub fn loss_scaler(mut self, scaler: LossScaler) -> Self {
        self.scaler = Some(scaler);
        self
    }

    /// Clips the averaged, unscaled gradients of each step.
    pub fn clip(mut self, clip: Clip) -> Self {
        self.clip = Some(clip);
        self
    }

    /// Number of steps skipped in a row, because gradients are not finite, after which the last one
    /// is an [error](Error::NonFinite). Default: 100. Steps are skipped in mixed precision or with
    /// a loss scale.
    pub fn max_consecutive_skips(mut self, steps: usize) -> Self {
        self.max_consecutive_skips = steps;
        self
    }

    /// Number of batches per step, 1 by default. The remaining batches at the end of an epoch
    /// ([`begin_epoch`](Trainer::begin_epoch)) are a smaller step. The loss of each batch is
    /// divided by this number, so that a step is the mean of its batches' losses. It is the mean of
    /// their samples or tokens only if each batch, on each rank, has equally many: otherwise a
    /// token of a short batch counts more than one of a long batch, as in PyTorch. Train such
    /// batches by [`step_weighted`](Trainer::step_weighted).
    #[doc(alias = "gradient_accumulation_steps")]
    pub fn accumulate(mut self, batches: usize) -> Self {
        self.accumulate = batches;
        self
    }

    /// Multiplies the optimizer's learning rates by a factor, a function of the number of steps
    /// taken so far.
    pub fn schedule(mut self, factor: impl Fn(u64) -> f64 + Send + 'static) -> Self {
        self.schedule = Some(Box::new(factor));
        self
    }

    /// Schedules learning rates and momentum by MMEngine's schedulers, chained in this order, over
    /// a run of this length. Steps are their iterations, and `length` is in steps; skipped ones do
    /// not count. Schedulers by epochs must be converted
    /// ([`convert_to_iter_based`](SchedulerConfig::convert_to_iter_based)), but a
    /// [`Plateau`](crate::Plateau), which [`step_metrics`](Trainer::step_metrics) steps. Their
    /// state is saved; a resumed run goes on with the saved schedulers, and warns by `tracing` if
    /// they were configured differently.
    pub fn schedulers(
        mut self,
        length: RunLength,
        schedulers: impl IntoIterator<Item = SchedulerConfig>,
    ) -> Self {
        self.schedulers = Some((length, schedulers.into_iter().collect()));
        self
    }

    /// Allows steps in which a parameter has no gradient on a rank. By default they are errors.
    pub fn find_unused_parameters(mut self) -> Self {
        self.reducer.find_unused_parameters = true;
        self
    }

    /// Options of the averaging: bucket sizes, compression to 16 bits.
    pub fn reducer(mut self, options: ReducerOptions) -> Self {
        let find_unused = self.reducer.find_unused_parameters;
        self.reducer = options;
        self.reducer.find_unused_parameters |= find_unused;
        self
    }

    /// Seed of the program's random numbers, which is saved in checkpoints. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Name of this trainer, one of several that have one checkpoint: see
    /// [`Parts`](crate::Parts). Letters, digits, `-` and `_`.
    pub fn part(mut self, name: impl Into<String>) -> Self {
        self.part = Some(name.into());
        self
    }

    /// Averages over this process group, instead of the one described by the launcher's
    /// environment.
    pub fn group(mut self, group: ProcessGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// Describes the program's tensors, of which not all are the [`Model`]'s: the lines have to be
    /// equal on all ranks. By default they are the model's names, shapes and types.
    pub fn described(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.described.extend(lines);
        self
    }

    /// Leaves the tensors as they are: the program has given all ranks the same ones.
    pub fn without_broadcast(mut self) -> Self {
        self.broadcasts = false;
        self
    }

    /// Initializes the process group, and broadcasts the model's tensors of rank 0 (so load
    /// pretrained weights before). `optimizer` is on the model's device, and has its parameters by
    /// their index.
    ///
    /// Every rank must call it, with the same options. Blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// On all ranks, the first option or hyper-parameter that differs between them, and an error of
    /// one rank: numbers out of range, parameters in no parameter group. Ranks that did not join,
    /// or have other tensors.
    pub fn build<M: Model + ?Sized>(
        self,
        model: &mut M,
        optimizer: Box<dyn Optimizer>,
    ) -> Result<Trainer> {
        let own = self.prepare(model, optimizer);
        // A rank that has failed joins as well: the others wait for it.
        let (own, group) = match (own, join(&self)) {
            (Err(error), Err(_)) => return Err(error),
            (own, group) => (own, group?),
        };
        let options = own.as_ref().map(|own| own.options.clone()).map_err(ToString::to_string);
        let compared = check_alike(&group, &options);
        let Prepared { mut model, optim, base_lrs, schedules, .. } = own?;
        compared?;
        let averages = Averages::new(&mut model, group, self.reducer)?;
        if !averages.gradients().state_dict()?.is_empty() {
            let text = "PowerSGD is not supported: its memory would be neither rescaled nor saved";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        if self.broadcasts {
            broadcast_all(&mut model, averages.group())?;
        }
        Ok(Trainer {
            averages,
            optim,
            buffers: Buffers::new(),
            on_host: model.on_device().is_none(),
            pending: 0,
            open: OpenStep::default(),
            mean_count: None,
            epoch: None,
            schedule: self.schedule,
            schedules,
            base_lrs,
            steps: 0,
            state: EngineState { seed: self.seed, ..EngineState::default() },
            saves: RefCell::<Places>::default(),
            part: self.part,
            torn: None,
        })
    }

    /// Tells the other ranks, which wait in [`build`](Self::build), that this one has failed before
    /// it, and why. Returns the error.
    pub fn refuse<E: Display>(self, error: E) -> E {
        if let Ok(group) = join(&self) {
            // This rank has its own error.
            let _ = check_alike(&group, &Err(error.to_string()));
        }
        error
    }

    /// Checks this rank's options.
    fn prepare<M: Model>(
        &self,
        mut model: M,
        mut optimizer: Box<dyn Optimizer>,
    ) -> Result<Prepared<M>> {
        check_tensors(&mut model)?;
        let params = model.params();
        let reserved = params.iter().chain(model.buffers()).chain(model.frozen());
        if let Some(spec) = reserved.into_iter().find(|spec| super::is_reserved(&spec.name)) {
            let text = format!("`{}`: this name is reserved for checkpoints", spec.name);
            return Err(Error::InvalidArgument(text));
        }
        let specs = params.iter().map(|spec| ParamSpec::new(&*spec.name, &spec.shape));
        optimizer.set_param_names(&specs.collect::<Vec<_>>())?;
        check_groups(&model, &*optimizer)?;
        let is_fit = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        // The beginnings of names that a checkpoint needs.
        let is_reserved = |name: &str| super::is_reserved(&format!("{name}."));
        let is_name =
            |name: &str| !name.is_empty() && name.chars().all(is_fit) && !is_reserved(name);
        if let Some(name) = self.part.as_ref().filter(|name| !is_name(name)) {
            let text = format!(
                "`part` is {name:?}; expected letters, digits, `-` and `_`, and not the name of this crate"
            );
            return Err(Error::InvalidArgument(text));
        }
        self.clip.map_or(Ok(()), Clip::validate)?;
        let (every, max_skips) = (self.accumulate, self.max_consecutive_skips);
        if every == 0 || max_skips == 0 {
            let option = if every == 0 { "accumulate" } else { "max_consecutive_skips" };
            let text = format!("`{option}` must be at least 1");
            return Err(Error::InvalidArgument(text));
        }
        let groups = 0..optimizer.group_count();
        let base_lrs = groups.map(|group| optimizer.lr(group)).collect::<Result<_, _>>()?;
        let schedules = self.make_schedules(&mut *optimizer)?;
        let scaler = match (&self.scaler, self.half) {
            (Some(scaler), _) => scaler.clone(),
            (None, Some(DType::F16)) => LossScaler::new(LossScalerOptions::default())?,
            (None, _) => LossScaler::disabled(),
        };
        let (half, clip, seed) = (self.half, self.clip, self.seed);
        let hyper = optimizer.state_dict()?.param_groups;
        let kind = optimizer.kind();
        let options = vec![
            format!("precision {half:?}, clip {clip:?}, accumulate {every}, seed {seed}"),
            format!("part {:?}", self.part.as_deref().unwrap_or_default()),
            format!("loss scale {:?}, max_consecutive_skips {max_skips}", scaler.state_dict()),
            format!("optimizer {kind} {hyper}"),
            format!("schedulers {:?}", schedules.as_ref().map(Schedules::all)),
        ];
        let options = [self.descriptions(&model), options];
        let optim = OptimWrapper::new(optimizer, every)
            .with_clip_grad(clip)
            .with_autocast(half)
            .with_max_consecutive_skips(max_skips);
        let optim = match half.is_some() || scaler.is_enabled() {
            true => optim.with_mixed_precision(scaler),
            false => optim,
        };
        Ok(Prepared { model, optim, base_lrs, schedules, options })
    }

    /// Descriptions of the tensors.
    fn descriptions(&self, model: &dyn Model) -> Vec<String> {
        if !self.described.is_empty() {
            return self.described.clone();
        }
        let tensors =
            [("trained", model.params()), ("buffer", model.buffers()), ("other", model.frozen())];
        let described = tensors.into_iter().flat_map(|(role, specs)| {
            specs.iter().map(move |TensorSpec { name, shape, dtype }| {
                format!("{role} `{name}` {shape:?} {dtype:?}")
            })
        });
        described.collect()
    }

    fn make_schedules(&self, optimizer: &mut dyn Optimizer) -> Result<Option<Schedules>> {
        let Some((length, configs)) = &self.schedulers else { return Ok(None) };
        let refused = |text: &str| Err(Error::InvalidArgument(text.to_owned()));
        if self.schedule.is_some() {
            return refused("`schedule` and `schedulers` cannot both be set");
        }
        if configs.iter().any(SchedulerConfig::counts_epochs) {
            return refused(
                "a trainer counts steps, and no epochs: use `SchedulerConfig::by_iters`, or `convert_to_iter_based`",
            );
        }
        Ok(Some(Schedules::new(configs.clone(), *length, &[], optimizer)?))
    }
}

/// Tensors and options that must be equal on all ranks, in words.
type Options = [Vec<String>; 2];

/// A rank's parts of a trainer, before ranks compare their options.
struct Prepared<M> {
    model: M,
    optim: OptimWrapper,
    base_lrs: Vec<f64>,
    schedules: Option<Schedules>,
    options: Options,
}

impl fmt::Debug for TrainerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainerBuilder")
            .field("half", &self.half)
            .field("clip", &self.clip)
            .field("accumulate", &self.accumulate)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// The group of a trainer, or that described by the launcher's environment.
fn join(builder: &TrainerBuilder) -> Result<ProcessGroup> {
    if let Some(group) = &builder.group {
        return Ok(group.clone());
    }
    // Each trainer of a program has its own process group.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: only a counter.
    let name = format!("train-step-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let topology = Topology::from_env(|name| std::env::var(name).ok())?;
    Ok(init_process_group(&topology, GroupOptions::default().with_name(name))?)
}

/// Broadcasts the tensors of rank 0.
fn broadcast_all(model: &mut dyn Model, group: &ProcessGroup) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let all = &mut |slices: &mut [fused_optim::SliceMut<'_>]| {
        slices.iter_mut().try_for_each(|slice| broadcast(group, slice))
    };
    model.with_params(all)?;
    model.with_buffers(all)?;
    model.with_frozen(all)
}

/// Returns an error for a name of two tensors, and for lent slices that are not those of the specs.
fn check_tensors(model: &mut dyn Model) -> Result<()> {
    let all =
        [("params", model.params()), ("buffers", model.buffers()), ("frozen", model.frozen())];
    let mut names = HashSet::new();
    if let Some(spec) = all.iter().flat_map(|(_, of)| *of).find(|spec| !names.insert(&*spec.name)) {
        let reason = format!("two tensors are named `{}`; names must be unique", spec.name);
        return Err(Error::WrongTensors { reason });
    }
    // A device lends copies.
    if model.on_device().is_some() {
        return Ok(());
    }
    let specs = [("params", model.params().to_vec()), ("buffers", model.buffers().to_vec())];
    let frozen = ("frozen", model.frozen().to_vec());
    for (kind, specs) in specs.into_iter().chain([frozen]) {
        let mut check = |slices: &mut [fused_optim::SliceMut<'_>]| {
            let reason = if slices.len() == specs.len() {
                let differs = specs.iter().zip(&*slices).find(|(spec, slice)| {
                    (spec.count(), spec.dtype) != (slice.len(), slice.dtype())
                });
                differs.map(|(spec, slice)| {
                    let (is, dtype) = (slice.len(), slice.dtype());
                    format!(
                        "`with_{kind}` lends {is} values of {dtype:?} for `{}`, which is {:?} of {:?}",
                        spec.name, spec.shape, spec.dtype
                    )
                })
            } else {
                let (is, has) = (slices.len(), specs.len());
                Some(format!("`with_{kind}` lends {is} tensors, and `{kind}` names {has}"))
            };
            reason.map_or(Ok(()), |reason| Err(Error::WrongTensors { reason }))
        };
        match kind {
            "params" => model.with_params(&mut check)?,
            "buffers" => model.with_buffers(&mut check)?,
            _ => model.with_frozen(&mut check)?,
        }
    }
    Ok(())
}

/// Returns an error for parameters that are in no parameter group: no step would train them.
fn check_groups(model: &dyn Model, optimizer: &dyn Optimizer) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Group {
        params: Vec<usize>,
    }
    let groups = optimizer.state_dict()?.param_groups;
    // An optimizer of the program's own may write its groups in another way.
    let Ok(groups) = serde_json::from_str::<Vec<Group>>(&groups) else { return Ok(()) };
    let grouped: HashSet<usize> = groups.into_iter().flat_map(|group| group.params).collect();
    let params = model.params().iter().enumerate();
    let missing = params.filter(|(index, _)| !grouped.contains(index));
    let missing: Vec<_> = missing.map(|(_, spec)| spec.name.as_str()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "variables in no parameter group of the optimizer: {}; add them to a group, or give their names to \
         `TrainerBuilder::frozen`",
        missing.join(", ")
    )))
}

/// Compares the options of all ranks. If one has failed, all have its reason.
fn check_alike(group: &ProcessGroup, own: &Result<Options, String>) -> Result<()> {
    let named = |(rank, options): (usize, Result<Options, String>)| {
        options.map_err(|reason| {
            Error::InvalidArgument(format!("rank {rank} cannot build its trainer: {reason}"))
        })
    };
    let all = all_gather_object(group, own)?.into_iter().enumerate().map(named);
    let all = all.collect::<Result<Vec<_>>>()?;
    for (rank, other) in all.iter().enumerate() {
        for (first, other) in all[0].iter().zip(other) {
            let differs = |index: &usize| first.get(*index) != other.get(*index);
            let Some(index) = (0..first.len().max(other.len())).find(differs) else { continue };
            let nothing = "nothing".to_owned();
            let first = first.get(index).unwrap_or(&nothing);
            let other = other.get(index).unwrap_or(&nothing);
            let text =
                format!("ranks differ in their options: rank 0 has {first}; rank {rank} {other}");
            return Err(Error::InvalidArgument(text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fused_optim::{Sgd, SgdHyper};

    use super::*;
    use crate::testing::{FakeModel, Values, group};

    fn build(model: &mut FakeModel) -> Result<Trainer> {
        let sgd = Sgd::with_one_group(SgdHyper::default(), 1)?;
        Trainer::builder().group(group()).build(model, Box::new(sgd))
    }

    fn model(buffer: &str) -> FakeModel {
        FakeModel::new(&[("w", Values::F32(vec![1.0; 2]))], &[(buffer, Values::F32(vec![1.0; 3]))])
    }

    #[test]
    fn tensors_other_than_those_named_are_refused_at_build() {
        build(&mut model("mean")).unwrap();
        let error = build(&mut model("w")).unwrap_err().to_string();
        assert_eq!(error, "two tensors are named `w`; names must be unique");
        let mut other = model("mean");
        other.buffers.clear();
        let error = build(&mut other).unwrap_err().to_string();
        assert_eq!(error, "`with_buffers` lends 0 tensors, and `buffers` names 1");
        let mut other = model("mean");
        other.buffers[0] = Values::F32(vec![1.0; 2]);
        let error = build(&mut other).unwrap_err().to_string();
        assert_eq!(error, "`with_buffers` lends 2 values of F32 for `mean`, which is [3] of F32");
    }

    #[test]
    fn invalid_clipping_is_refused_at_build_by_name() {
        for (clip, said) in [
            (Clip::norm(f64::NAN), "invalid max_norm: NaN"),
            (Clip::norm(-1.0), "invalid max_norm: -1"),
            (Clip::Value(f32::NAN), "invalid clip_value: NaN"),
        ] {
            let sgd = Sgd::with_one_group(SgdHyper::default(), 1).unwrap();
            let builder = Trainer::builder().group(group()).clip(clip);
            let error = builder.build(&mut model("mean"), Box::new(sgd)).unwrap_err().to_string();
            assert_eq!(error, said);
        }
    }

    #[test]
    fn gradient_of_no_parameter_is_an_error_and_the_next_step_is_right() {
        let mut model = model("mean");
        let mut train = build(&mut model).unwrap();
        let grad = fused_optim::Slice::F32(&[1.0; 2]);
        let error = train.step(&mut model, |_, cx| cx.report(1, grad)).unwrap_err().to_string();
        assert_eq!(error, "a gradient was reported for parameter 1; there are 1 parameters");
        train.step(&mut model, |_, cx| cx.report(0, grad)).unwrap();
        assert!(train.begin_epoch(3, 4).is_err());
        assert_eq!(train.steps(), 1);
    }

    #[test]
    fn damaged_optimizer_state_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        let mut model = model("mean");
        build(&mut model).unwrap().save(&mut model, &path, 1).unwrap();
        crate::optimizer_state(&path).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = crate::optimizer_state(&path).unwrap_err().to_string();
        assert!(error.contains("its checksum does not match"), "{error}");
    }

    #[test]
    fn save_of_a_tensor_that_has_grown_leaves_the_last_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        let mut model = model("mean");
        let mut train = build(&mut model).unwrap();
        train.save(&mut model, &path, 1).unwrap();
        model.buffers[0] = Values::F32(vec![1.0; 4]);
        let error = train.save(&mut model, &path, 2).unwrap_err().to_string();
        assert!(error.contains("the tensors' shapes tell"), "{error}");
        model.buffers[0] = Values::F32(vec![1.0; 3]);
        assert_eq!(train.resume(&mut model, &path).unwrap(), 1);
    }
}
