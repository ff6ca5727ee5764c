//! Optimizers and their wrappers by name.
//!
//! [`OptimWrapper`] runs a batch, and steps the optimizer when enough batches have been
//! accumulated. In configurations, as in MMEngine, `OptimWrapper` does just that; `AmpOptimWrapper`
//! adds autocast, or half parameters, and the dynamic loss scale. Both take any optimizer, also an
//! [`OptimizerDict`]; [`Paramwise`] creates groups with their own learning rates.

mod builtin;
mod optimizers;

use fused_optim::{Clip, DType, Optimizer, ParamSpec};

pub use builtin::OPTIM_WRAPPERS;
pub use optimizers::{OPTIMIZERS, OptimizerConfig};
pub use train_step::{
    Accumulation, BatchRole, Member, Multipliers, OptimWrapper, OptimWrapperState, OptimizerDict,
    Paramwise, PendingCounts, assign,
};

use crate::Result;
use crate::data::Batch;
use crate::engine::{Engine, EngineState, Losses, TensorSpec};
use crate::model::ModelWrapper;
use crate::placement::Placement;

/// Result of one batch.
pub type Update = train_step::Update<Losses>;

/// Trains on one batch as [`OptimWrapper::update_params`] does, by the engine's
/// [`train_step`](Engine::train_step). `state` is the engine's.
///
/// # Errors
///
/// Those of [`OptimWrapper::update_params`], and of the engine. After one of
/// [`loss_count`](Engine::loss_count) the wrapper is as before.
pub fn update_params<E: Engine + ?Sized>(
    optim: &mut OptimWrapper,
    (engine, model): (&mut E, &mut dyn ModelWrapper),
    batch: &Batch,
    state: &mut EngineState,
) -> Result<Update> {
    let count = engine.loss_count(batch)?;
    optim.update_params((engine, model), count, state, |engine, cx| engine.train_step(batch, cx))
}

/// Creates an optimizer of some of the model's parameters, by their indices.
pub type MemberFactory =
    Box<dyn FnOnce(Vec<usize>) -> fused_optim::Result<Box<dyn Optimizer>> + Send>;

/// Creates an optimizer wrapper with its optimizer on the device of the placement.
pub type BuildOptimWrapper =
    Box<dyn FnOnce(&[TensorSpec], &Placement) -> Result<OptimWrapper> + Send>;

/// Creates an optimizer wrapper when the parameters are known.
pub struct OptimWrapperFactory {
    /// Type of the model's parameters.
    pub dtype: DType,
    /// Creates the wrapper.
    pub build: BuildOptimWrapper,
}

impl OptimWrapperFactory {
    /// Creates an [`OptimWrapper`] that steps after each batch, with an optimizer on the host
    /// created by `make` for a number of parameters.
    #[must_use]
    pub fn fp32<O: Optimizer + 'static>(
        make: impl FnOnce(usize) -> fused_optim::Result<O> + Send + 'static,
    ) -> Self {
        let build: BuildOptimWrapper =
            Box::new(|params, _| Ok(OptimWrapper::new(Box::new(make(params.len())?), 1)));
        Self { dtype: DType::F32, build }
    }

    /// As [`fp32`](Self::fp32), in mixed precision: the engine runs under autocast to `dtype`,
    /// parameters and optimizer are in f32, and a step with non-finite gradients is skipped. With
    /// f16 the loss scale is dynamic; with bf16 there is none; with f32 there is no autocast
    /// either.
    #[must_use]
    pub fn amp<O: Optimizer + 'static>(
        dtype: DType,
        make: impl FnOnce(usize) -> fused_optim::Result<O> + Send + 'static,
    ) -> Self {
        let autocast = Some(dtype).filter(|dtype| *dtype != DType::F32);
        Self::fp32(make).map(move |wrapper, placement| {
            let wrapper = wrapper.with_mixed_precision(builtin::default_scaler(dtype)?);
            Ok(wrapper.with_autocast(autocast).with_overflows(placement.overflows()))
        })
    }

    /// Creates an [`OptimizerDict`] with one optimizer per part of the model: the parameters under
    /// a prefix of their names, by index. All parts step together, with gradients of the model's
    /// one loss.
    ///
    /// With several losses, as in a GAN, that loss is their sum, in which each loss uses the
    /// weights of the other parts
    /// [detached](https://docs.rs/candle-core/latest/candle_core/struct.Tensor.html#method.detach):
    /// its gradients are then those of its own part. The check of a run's first gradients by
    /// differences of the loss cannot take detached weights into account and warns: disable it with
    /// [`CandleOptions::check_gradients`](crate::engine::candle::CandleOptions::check_gradients).
    #[must_use]
    #[doc(alias = "OptimWrapperDict")]
    pub fn dict(parts: Vec<(&'static str, MemberFactory)>) -> Self {
        let build: BuildOptimWrapper = Box::new(move |params, _| {
            let names: Vec<_> = parts.iter().map(|(name, _)| *name).collect();
            let owned = assign(&names, params)?;
            let make = |((name, make), own): ((&str, MemberFactory), Vec<usize>)| {
                Ok(Member { name: name.to_owned(), optimizer: make(own)?, clip: None })
            };
            let members = parts.into_iter().zip(owned).map(make).collect::<Result<_>>()?;
            Ok(OptimWrapper::of_members(members, 1))
        });
        Self { dtype: DType::F32, build }
    }

    /// Steps every `counts` batches, with the mean of their gradients; 0 counts as 1.
    #[must_use]
    #[doc(alias = "accumulative_counts")]
    pub fn accumulate(self, counts: usize) -> Self {
        self.map(move |mut wrapper, _| {
            wrapper.accumulation().set_counts(counts);
            Ok(wrapper)
        })
    }

    /// Clips the gradients of each step, see [`OptimWrapper::with_clip_grad`].
    #[must_use]
    #[doc(alias = "clip_grad")]
    pub fn clip(self, clip: Clip) -> Self {
        self.map(move |wrapper, placement| {
            placement.check_clip(Some(clip))?;
            Ok(wrapper.with_clip_grad(Some(clip)))
        })
    }

    /// Ends the run after this number of skipped steps in a row, see
    /// [`OptimWrapper::with_max_consecutive_skips`].
    #[must_use]
    pub fn max_consecutive_skips(self, count: usize) -> Self {
        self.map(move |wrapper, _| Ok(wrapper.with_max_consecutive_skips(count)))
    }

    /// Changes the wrapper after its creation.
    fn map(
        self,
        change: impl FnOnce(OptimWrapper, &Placement) -> Result<OptimWrapper> + Send + 'static,
    ) -> Self {
        let Self { dtype, build } = self;
        let build: BuildOptimWrapper =
            Box::new(move |params, placement| change(build(params, placement)?, placement));
        Self { dtype, build }
    }

    /// Creates the wrapper for these parameters, and passes their names to its optimizer, which
    /// saves and loads state by name.
    pub(crate) fn make(self, params: &[TensorSpec], placement: &Placement) -> Result<OptimWrapper> {
        let mut optim = (self.build)(params, placement)?;
        let names = params.iter().map(|param| ParamSpec::new(&*param.name, &param.shape));
        optim.optimizer_mut().set_param_names(&names.collect::<Vec<_>>())?;
        Ok(optim)
    }
}

impl std::fmt::Debug for OptimWrapperFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OptimWrapperFactory").field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use fused_optim::{Sgd, SgdHyper};

    use super::*;
    use crate::engine::Model as _;
    use crate::testing::{FakeEngine, Values};

    #[test]
    fn factory_sets_precision_accumulation_and_clipping() {
        let engine = FakeEngine::new(&[("w", Values::F32(vec![1.0; 2]))], &[]);
        let sgd = |count| Sgd::with_one_group(SgdHyper::default(), count);
        let make = |factory: OptimWrapperFactory| {
            assert_eq!(factory.dtype, DType::F32);
            factory.make(engine.params(), &Placement::host()).unwrap()
        };
        let mut f16 = make(OptimWrapperFactory::amp(DType::F16, sgd).accumulate(3));
        assert_eq!((f16.autocast(), f16.loss_scale()), (Some(DType::F16), 65536.0));
        assert_eq!(f16.accumulation().counts(), 3);
        assert!(f16.skips_non_finite());
        let clipped = make(OptimWrapperFactory::amp(DType::Bf16, sgd).clip(Clip::Value(0.5)));
        assert_eq!((clipped.autocast(), clipped.loss_scale()), (Some(DType::Bf16), 1.0));
        assert_eq!(clipped.clip(), Some(Clip::Value(0.5)));
        let mut f32 = make(OptimWrapperFactory::amp(DType::F32, sgd));
        assert_eq!((f32.autocast(), f32.loss_scale()), (None, 1.0));
        assert_eq!((f32.accumulation().counts(), f32.clip()), (1, None));
        assert!(f32.skips_non_finite());
    }

    /// Compares every recorded step of MMEngine's `OptimWrapper`.
    #[test]
    fn accumulation_matches_mmengine() {
        let text = include_str!("../../tests/vectors/optim_wrapper.json");
        let cases: serde_json::Value = serde_json::from_str(text).unwrap();
        let mut rows = 0;
        for case in cases.as_array().unwrap() {
            let number = |key: &str| case[key].as_i64().unwrap();
            let mut accumulation = Accumulation::new(number("accumulative_counts") as usize);
            // -1: MMEngine was not given the length of the run.
            if let Ok(max) = usize::try_from(number("max_counts")) {
                accumulation.initialize_count_status(number("init_counts") as usize, max);
            }
            for row in case["rows"].as_array().unwrap() {
                let role = accumulation.next_batch();
                assert_eq!(role.divisor as u64, row[0].as_u64().unwrap(), "{case}");
                assert_eq!(u64::from(role.steps), row[1].as_u64().unwrap(), "{case}");
                assert_eq!(u64::from(role.steps), row[2].as_u64().unwrap(), "{case}");
                rows += 1;
            }
        }
        assert!(rows > 0);
    }
}
