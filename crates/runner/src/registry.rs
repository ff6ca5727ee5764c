//! Names to builders: how `type = "SGD"` in a configuration becomes an optimizer.
//!
//! A builder only reads its [`Section`]; it creates nothing and sees nothing of the run. What it
//! returns is either the finished thing (a hook) or a factory that makes it once the run knows
//! the context (the model's parameters, the process group). So a whole configuration is checked
//! before the first side effect.
//!
//! The registries of this crate are statics; a program of your own adds to them before it starts
//! the runner:
//!
//! ```
//! use runner::hooks::Hook;
//! use runner::registry::HOOKS;
//!
//! struct Shout;
//! impl Hook for Shout {
//!     fn name(&self) -> &'static str {
//!         "Shout"
//!     }
//! }
//! HOOKS.register("Shout", |_section| Ok(Box::new(Shout))).unwrap();
//! assert!(HOOKS.register("Shout", |_section| Ok(Box::new(Shout))).is_err());
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, LazyLock};

use parking_lot::RwLock;

use crate::config::{Mistakes, Place, Section, unknown};
use crate::data::{self, DatasetFactory};
use crate::evaluate::{self, Metric};
use crate::hooks::{self, Hook};
use crate::model::{self, ModelFactory, WrapperFactory};
use crate::optim_wrapper::{self, OptimWrapperFactory, OptimizerFactory};
use crate::schedulers::{self, SchedulerConfig};
use crate::{Error, Result};

/// The components this crate itself offers.
pub(crate) type Builtin<T> = &'static [(&'static str, fn(&mut Section) -> Result<T>)];

const NO_SCOPES: &str =
    "names are not scoped; a program registers its own before it starts the runner";

/// Types of MMEngine's that have no meaning here, and what there is instead.
const LEFT_OUT: &[(&str, &str)] = &[
    ("MMFullyShardedDataParallel", "every rank holds the whole model"),
    ("FullyShardedDataParallel", "every rank holds the whole model"),
    ("EmptyCacheHook", "the engine keeps no memory between steps that it could give back"),
    ("NaiveVisualizationHook", "there is no visualizer of samples"),
    ("PrepareTTAHook", "a model's own `predict` may look at a sample several times"),
    ("ProfilerHook", "a profiler of the system, such as perf, sees the whole process"),
    ("NPUProfilerHook", "a profiler of the system, such as perf, sees the whole process"),
    ("ApexOptimWrapper", "AmpOptimWrapper is the one of mixed precision"),
    ("ZeroRedundancyOptimizer", "every rank holds the optimizer's whole state"),
];

fn left_out(section: &Section, place: Place, name: &str, why: &str) -> Error {
    section.error_at(place, format!("`{name}` is left out on purpose: {why}"))
}

type Builder<T> = Arc<dyn Fn(&mut Section) -> Result<T> + Send + Sync>;

/// A table of builders for one kind of component.
pub struct Registry<T> {
    kind: &'static str,
    builders: RwLock<BTreeMap<String, Builder<T>>>,
}

impl<T> Registry<T> {
    /// An empty registry for components called `kind` in messages.
    #[must_use]
    pub fn new(kind: &'static str) -> Self {
        Self { kind, builders: RwLock::default() }
    }

    /// Adds a builder under `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the name is taken: a component is never replaced silently.
    pub fn register(
        &self,
        name: &str,
        builder: impl Fn(&mut Section) -> Result<T> + Send + Sync + 'static,
    ) -> Result<()> {
        let mut builders = self.builders.write();
        if builders.contains_key(name) {
            return Err(Error::Config(format!("{} `{name}` is already registered", self.kind)));
        }
        builders.insert(name.to_owned(), Arc::new(builder));
        Ok(())
    }

    /// Builds what `section` describes: its `type` chooses the builder, the builder takes the rest.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for an unknown type (naming the nearest), an unknown key, or whatever the
    /// builder refuses.
    pub fn build(&self, mut section: Section) -> Result<T> {
        let offset = section.offset_of("type");
        let name: String = section.required("type")?;
        self.build_as(&name, offset, section)
    }

    /// As [`build`](Self::build), with a type for sections that do not say one.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_or(&self, mut section: Section, default_type: &str) -> Result<T> {
        let offset = section.offset_of("type");
        let name: String = section.or("type", default_type.to_owned())?;
        self.build_as(&name, offset, section)
    }

    fn build_as(&self, name: &str, offset: Place, mut section: Section) -> Result<T> {
        section.refuse("_scope_", NO_SCOPES)?;
        let Some(builder) = self.builders.read().get(name).cloned() else {
            if let Some((_, why)) = LEFT_OUT.iter().find(|(known, _)| *known == name) {
                return Err(left_out(&section, offset, name, why));
            }
            if name.contains('.') {
                return Err(left_out(&section, offset, name, NO_SCOPES));
            }
            let names = self.names();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            return Err(section.error_at(offset, unknown(self.kind, name, &names)));
        };
        let built = builder(&mut section);
        // A builder that lacks a part whose mistake is listed has asked for all its keys.
        if built.as_ref().err().is_none_or(Mistakes::is_listed) {
            section.finish()?;
        }
        built
    }

    /// The registered names, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.builders.read().keys().cloned().collect()
    }

    /// A registry born with this crate's own components.
    fn with(kind: &'static str, builtin: Builtin<T>) -> Self
    where
        T: 'static,
    {
        let registry = Self::new(kind);
        for (name, builder) in builtin {
            registry.register(name, *builder).expect("built-in names are distinct");
        }
        registry
    }
}

impl<T> fmt::Debug for Registry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("kind", &self.kind).field("names", &self.names()).finish()
    }
}

/// The zoo's models need the candle engine; without it a program brings its own.
#[cfg(feature = "candle")]
const ZOO: Builtin<ModelFactory> = crate::zoo::BUILTIN;
#[cfg(not(feature = "candle"))]
const ZOO: Builtin<ModelFactory> = &[];

/// Models: `[model]`.
pub static MODELS: LazyLock<Registry<ModelFactory>> =
    LazyLock::new(|| Registry::with("model", ZOO));
/// What stands between a model and its gradients: `[model_wrapper_cfg]`.
pub static MODEL_WRAPPERS: LazyLock<Registry<WrapperFactory>> =
    LazyLock::new(|| Registry::with("model wrapper", model::BUILTIN));
/// Optimizers: `[optim_wrapper.optimizer]`.
pub static OPTIMIZERS: LazyLock<Registry<OptimizerFactory>> =
    LazyLock::new(|| Registry::with("optimizer", optim_wrapper::BUILTIN_OPTIMIZERS));
/// Optimizer wrappers: `[optim_wrapper]`.
pub static OPTIM_WRAPPERS: LazyLock<Registry<OptimWrapperFactory>> =
    LazyLock::new(|| Registry::with("optimizer wrapper", optim_wrapper::BUILTIN));
/// Schedulers: `param_scheduler`.
pub static PARAM_SCHEDULERS: LazyLock<Registry<SchedulerConfig>> =
    LazyLock::new(|| Registry::with("scheduler", schedulers::BUILTIN));
/// Hooks: `[default_hooks]`, `[[custom_hooks]]`.
pub static HOOKS: LazyLock<Registry<Box<dyn Hook>>> =
    LazyLock::new(|| Registry::with("hook", hooks::BUILTIN));
/// Data sets: `[train_dataloader.dataset]`.
pub static DATASETS: LazyLock<Registry<DatasetFactory>> =
    LazyLock::new(|| Registry::with("data set", data::BUILTIN));
/// Metrics: `[val_evaluator]`.
pub static METRICS: LazyLock<Registry<Box<dyn Metric>>> =
    LazyLock::new(|| Registry::with("metric", evaluate::BUILTIN));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn section(text: &str) -> Section {
        Config::from_text("c.toml", text).unwrap().into_section()
    }

    #[test]
    fn a_misspelt_name_gets_the_nearest() {
        let registry = Registry::new("optimizer");
        registry.register("AdamW", |_| Ok(1)).unwrap();
        registry.register("SGD", |_| Ok(2)).unwrap();
        let error = registry.build(section("type = \"AdmaW\"")).unwrap_err().to_string();
        assert_eq!(
            error,
            "c.toml:1:8: unknown optimizer `AdmaW`; did you mean `AdamW`? (valid: AdamW, SGD)"
        );
    }

    #[test]
    fn keys_the_builder_did_not_take_are_refused() {
        let registry = Registry::new("optimizer");
        registry.register("SGD", |s| s.required::<f64>("lr")).unwrap();
        assert_eq!(registry.build(section("type = \"SGD\"\nlr = 1")).unwrap(), 1.0);
        let error = registry.build(section("type = \"SGD\"\nlr = 1\nlrr = 2")).unwrap_err();
        assert!(error.to_string().contains("unknown key `lrr`; did you mean `lr`?"), "{error}");
    }

    #[test]
    fn a_taken_name_is_refused() {
        let registry = Registry::new("hook");
        registry.register("A", |_| Ok(())).unwrap();
        assert!(registry.register("A", |_| Ok(())).unwrap_err().to_string().contains("already"));
    }
}
