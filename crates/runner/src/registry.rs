//! `Registry`: maps the values of `type` in a configuration to builders.
//!
//! A builder only reads its [`Section`]; it creates nothing and has no access to the run. It
//! returns either the component itself (a hook) or a factory, which the run calls when the context
//! (the model's parameters, the process group) exists. So a whole configuration is checked before
//! the first side effect.
//!
//! Each registry is a static in the module of its components:
//! [`model::MODELS`](crate::model::MODELS) and [`MODEL_WRAPPERS`](crate::model::MODEL_WRAPPERS),
//! [`optim_wrapper::OPTIM_WRAPPERS`](crate::optim_wrapper::OPTIM_WRAPPERS) and
//! [`OPTIMIZERS`](crate::optim_wrapper::OPTIMIZERS),
//! [`schedulers::PARAM_SCHEDULERS`](crate::schedulers::PARAM_SCHEDULERS),
//! [`hooks::HOOKS`](crate::hooks::HOOKS), [`data::DATASETS`](crate::data::DATASETS),
//! [`STREAMS`](crate::data::STREAMS), [`TRANSFORMS`](crate::data::TRANSFORMS),
//! [`BATCH_TRANSFORMS`](crate::data::BATCH_TRANSFORMS) and
//! [`COLLATE_FUNCTIONS`](crate::data::COLLATE_FUNCTIONS),
//! [`evaluate::METRICS`](crate::evaluate::METRICS),
//! [`sinks::VIS_BACKENDS`](crate::sinks::VIS_BACKENDS). A program registers its own components
//! before it starts the runner:
//!
//! ```
//! use runner::hooks::{HOOKS, Hook};
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
use std::sync::Arc;

use parking_lot::RwLock;

use crate::config::{Mistakes, Section, Span, unknown};
use crate::{Error, Result};

/// Built-in components of this crate.
pub(crate) type Builtin<T> = &'static [(&'static str, fn(&mut Section) -> Result<T>)];

const NO_SCOPES: &str =
    "names have no scopes; register your own components before the runner starts";

/// MMEngine's types that are not supported, with the reason or the alternative.
const LEFT_OUT: &[(&str, &str)] = &[
    ("MMFullyShardedDataParallel", "every rank holds the whole model"),
    ("FullyShardedDataParallel", "every rank holds the whole model"),
    ("EmptyCacheHook", "the engine caches no memory between steps"),
    ("NaiveVisualizationHook", "there is no visualizer of samples"),
    ("PrepareTTAHook", "implement test-time augmentation in the model's `predict`"),
    ("ProfilerHook", "a profiler of the system, such as perf, sees the whole process"),
    ("NPUProfilerHook", "a profiler of the system, such as perf, sees the whole process"),
    ("ImageToTensor", "samples are arrays"),
    ("PILToTensor", "samples are arrays"),
    ("PackInputs", "samples are arrays"),
    ("ApexOptimWrapper", "use AmpOptimWrapper for mixed precision"),
    ("pseudo_collate", "use `default_collate`, or `pad_collate` if samples differ in length"),
    ("ZeroRedundancyOptimizer", "every rank holds the full optimizer state"),
    ("WandbVisBackend", FOLLOWED),
    ("MLflowVisBackend", FOLLOWED),
    ("ClearMLVisBackend", IN_SCALARS),
    ("NeptuneVisBackend", IN_SCALARS),
    ("DVCLiveVisBackend", IN_SCALARS),
    ("AimVisBackend", IN_SCALARS),
];

const FOLLOWED: &str = "`examples/trackers/follow.py` sends `scalars.json` there";
const IN_SCALARS: &str =
    "what it shows is in `scalars.json`; a program registers its own in `VIS_BACKENDS`";

type Builder<T> = Arc<dyn Fn(&mut Section) -> Result<T> + Send + Sync>;

/// A table of builders for one kind of component.
pub struct Registry<T: 'static> {
    kind: &'static str,
    builtin: Builtin<T>,
    registered: RwLock<BTreeMap<String, Builder<T>>>,
}

impl<T> Registry<T> {
    /// Creates an empty registry for components called `kind` in messages.
    #[must_use]
    pub const fn new(kind: &'static str) -> Self {
        Self::with(kind, &[])
    }

    /// Creates a registry with this crate's built-in components.
    pub(crate) const fn with(kind: &'static str, builtin: Builtin<T>) -> Self {
        Self { kind, builtin, registered: RwLock::new(BTreeMap::new()) }
    }

    /// Adds a builder under `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if the name is taken: components are never replaced.
    pub fn register(
        &self,
        name: &str,
        builder: impl Fn(&mut Section) -> Result<T> + Send + Sync + 'static,
    ) -> Result<()> {
        let mut registered = self.registered.write();
        if registered.contains_key(name) || self.builtin.iter().any(|(known, _)| *known == name) {
            return Err(Error::config(format!("{} `{name}` is already registered", self.kind)));
        }
        registered.insert(name.to_owned(), Arc::new(builder));
        Ok(())
    }

    /// Builds the component of `section`: its `type` selects the builder, which reads the other
    /// keys.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for an unknown type (with the nearest known name) or key, and errors of
    /// the builder.
    pub fn build(&self, mut section: Section) -> Result<T> {
        let place = section.offset_of("type");
        let name: String = section.required("type")?;
        self.build_as(&name, place, section)
    }

    /// As [`build`](Self::build), with a default for `type`.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_or(&self, mut section: Section, default_type: &str) -> Result<T> {
        let place = section.offset_of("type");
        let name: String = section.or("type", default_type.to_owned())?;
        self.build_as(&name, place, section)
    }

    fn build_as(&self, name: &str, place: Span, mut section: Section) -> Result<T> {
        section.refuse("_scope_", NO_SCOPES)?;
        let builtin = self.builtin.iter().find(|(known, _)| *known == name);
        let registered = || self.registered.read().get(name).cloned();
        let built = match (builtin, registered()) {
            (Some((_, builder)), _) => builder(&mut section),
            (None, Some(builder)) => builder(&mut section),
            (None, None) => return Err(place.error(self.unknown(name))),
        };
        // A builder that failed with a listed mistake has asked for all its keys, so unknown keys
        // are reported as well.
        if built.as_ref().err().is_none_or(Mistakes::is_listed) {
            section.finish()?;
        }
        built
    }

    /// Returns whether there is a builder called `name`.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.builtin.iter().any(|(known, _)| *known == name)
            || self.registered.read().contains_key(name)
    }

    /// Error text for an unknown name.
    fn unknown(&self, name: &str) -> String {
        let left_out = LEFT_OUT.iter().find(|(known, _)| *known == name).map(|(_, why)| *why);
        if let Some(why) = left_out.or_else(|| name.contains('.').then_some(NO_SCOPES)) {
            return format!("`{name}` is not supported: {why}");
        }
        unknown(self.kind, name, &self.names())
    }

    /// Returns the names of all components, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let builtin = self.builtin.iter().map(|(name, _)| (*name).to_owned());
        let mut names: Vec<_> = builtin.chain(self.registered.read().keys().cloned()).collect();
        names.sort_unstable();
        names
    }
}

impl<T> fmt::Debug for Registry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("kind", &self.kind).field("names", &self.names()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn section(text: &str) -> Section {
        Config::from_text("c.toml", text).unwrap().into_section()
    }

    #[test]
    fn misspelt_name_suggests_the_nearest() {
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
    fn keys_not_read_by_the_builder_are_refused() {
        let registry = Registry::new("optimizer");
        registry.register("SGD", |s| s.required::<f64>("lr")).unwrap();
        assert_eq!(registry.build(section("type = \"SGD\"\nlr = 1")).unwrap(), 1.0);
        let error = registry.build(section("type = \"SGD\"\nlr = 1\nlrr = 2")).unwrap_err();
        assert!(error.to_string().contains("unknown key `lrr`; did you mean `lr`?"), "{error}");
    }

    #[test]
    fn registered_name_is_refused() {
        let registry = Registry::new("hook");
        registry.register("A", |_| Ok(())).unwrap();
        assert!(registry.register("A", |_| Ok(())).unwrap_err().to_string().contains("already"));
    }
}
