//! Options of `compile`, and the report of the optimizations applied.
//!
//! The options are those of `torch.compile`, as in MMEngine's `compile`. Each engine decides how to
//! implement them, and its [`CompileReport`] lists what was applied, and what was not and why.

use std::fmt;

use crate::Result;
use crate::config::Section;

/// Options of `compile`: `compile = true`, or a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileOptions {
    /// Compiler. Defaults to the engine itself.
    pub backend: CompileBackend,
    /// Optimization mode.
    pub mode: CompileMode,
    /// Whether it is an error if a step cannot be captured as one graph. Defaults to false.
    pub fullgraph: bool,
    /// Number of runs of each candidate in autotuning; the shortest time counts. Defaults to 2.
    pub search_rounds: usize,
}

/// Compiler of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompileBackend {
    /// The engine itself.
    #[default]
    Engine,
    /// PyTorch's default. The engine is used instead, and the report says so.
    Inductor,
    /// None: models run as written.
    Eager,
    /// Only captures whole steps as one graph, on devices that support it.
    Cudagraphs,
}

/// Names in configurations.
const BACKENDS: [(&str, CompileBackend); 4] = [
    ("cudagraphs", CompileBackend::Cudagraphs),
    ("eager", CompileBackend::Eager),
    ("engine", CompileBackend::Engine),
    ("inductor", CompileBackend::Inductor),
];

/// `torch.compile`'s modes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompileMode {
    /// Optimizations without measurements.
    #[default]
    Default,
    /// In addition captures whole steps as one graph, on devices that support it: CUDA GPUs, see
    /// `engine/candle/cuda/graph/mod.rs`. A model's own operators that use a stream other than the
    /// engine's must then order the two with events.
    ReduceOverhead,
    /// In addition autotunes kernels.
    MaxAutotune,
    /// The same without graphs.
    MaxAutotuneNoCudagraphs,
}

impl CompileMode {
    /// Returns the name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ReduceOverhead => "reduce-overhead",
            Self::MaxAutotune => "max-autotune",
            Self::MaxAutotuneNoCudagraphs => "max-autotune-no-cudagraphs",
        }
    }

    /// Returns whether the mode autotunes kernels.
    #[must_use]
    pub const fn searches(self) -> bool {
        matches!(self, Self::MaxAutotune | Self::MaxAutotuneNoCudagraphs)
    }

    const ALL: [Self; 4] =
        [Self::Default, Self::MaxAutotune, Self::MaxAutotuneNoCudagraphs, Self::ReduceOverhead];
}

impl Default for CompileOptions {
    /// The options of `compile = true`.
    fn default() -> Self {
        Self {
            backend: CompileBackend::default(),
            mode: CompileMode::default(),
            fullgraph: false,
            search_rounds: 2,
        }
    }
}

impl CompileOptions {
    /// Returns whether the engine itself compiles.
    #[must_use]
    pub fn is_engines(&self) -> bool {
        matches!(self.backend, CompileBackend::Engine | CompileBackend::Inductor)
    }

    /// Returns whether whole steps are captured as one graph.
    #[must_use]
    pub fn graphs(&self) -> bool {
        match self.backend {
            CompileBackend::Eager => false,
            CompileBackend::Cudagraphs => true,
            CompileBackend::Engine | CompileBackend::Inductor => {
                matches!(self.mode, CompileMode::ReduceOverhead | CompileMode::MaxAutotune)
            }
        }
    }

    /// Reads the key `compile` of a configuration; `None` if absent, `false`, or disabled.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an unknown backend, mode or option, with the
    /// valid ones; for both `mode` and `options`, as in PyTorch; for `dynamic` shapes together with
    /// graphs, which have fixed shapes.
    pub fn read(root: &mut Section) -> Result<Option<Self>> {
        let key = "compile";
        if !root.is_table(key) {
            return Ok(root.or(key, false)?.then(Self::default));
        }
        let mut table = root.section(key)?;
        let modes = CompileMode::ALL.map(|mode| (mode.name(), mode));
        if table.has("mode") && table.has("options") {
            table.note(table.error("set either `mode` or `options`, not both"))?;
        }
        let mut read = Self {
            backend: table.choice("backend", "engine", &BACKENDS)?,
            mode: table.choice("mode", "default", &modes)?,
            fullgraph: table.or("fullgraph", false)?,
            ..Self::default()
        };
        // Without graphs, shapes may always change: results of autotuning are kept per shape.
        let place = table.offset_of("dynamic");
        if table.optional::<bool>("dynamic")? == Some(true) && read.graphs() {
            let what = "graphs have fixed shapes: `dynamic = true` is not supported with \
                        backend `cudagraphs` and modes `reduce-overhead` and `max-autotune`";
            table.note(place.error(what))?;
        }
        let disable = table.or("disable", false)?;
        if let Some(mut options) = table.optional_section("options")? {
            read.search_rounds = options.count("search_rounds", read.search_rounds)?;
            options.finish()?;
        }
        table.finish()?;
        Ok((!disable).then_some(read))
    }
}

/// Optimizations that were applied, and that were not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompileReport {
    /// Optimizations in effect.
    pub applied: Vec<String>,
    /// Requested optimizations that are not in effect, with the reason.
    pub not_applied: Vec<String>,
}

impl CompileReport {
    /// Records an option that was not applied, with the reason.
    pub fn decline(&mut self, what: &str, why: &str) {
        self.not_applied.push(format!("{what}: {why}"));
    }
}

impl fmt::Display for CompileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let none = || vec!["nothing".to_owned()];
        let list = |lines: &[String]| if lines.is_empty() { none() } else { lines.to_vec() };
        write!(f, "compile: applied: {}", list(&self.applied).join("; "))?;
        write!(f, ". Not applied: {}", list(&self.not_applied).join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(text: &str) -> Result<Option<CompileOptions>> {
        let mut root = Config::from_text("c.toml", text)?.into_section();
        let read = CompileOptions::read(&mut root)?;
        root.finish()?;
        Ok(read)
    }

    #[test]
    fn compile_is_a_boolean_or_a_table() {
        let default = CompileOptions::default();
        let tuned = CompileOptions {
            backend: CompileBackend::Inductor,
            mode: CompileMode::MaxAutotune,
            ..default.clone()
        };
        for (text, wanted) in [
            ("", None),
            ("compile = false", None),
            ("compile = true", Some(default.clone())),
            ("compile = {}", Some(default.clone())),
            ("compile = { mode = 'max-autotune', disable = true }", None),
            ("compile = { backend = 'inductor', mode = 'max-autotune' }", Some(tuned)),
            (
                "compile = { backend = 'eager', dynamic = true, mode = 'reduce-overhead' }",
                Some(CompileOptions {
                    backend: CompileBackend::Eager,
                    mode: CompileMode::ReduceOverhead,
                    ..default.clone()
                }),
            ),
            ("compile = { dynamic = true }", Some(default.clone())),
            (
                "compile = { options = { search_rounds = 5 } }",
                Some(CompileOptions { search_rounds: 5, ..default }),
            ),
        ] {
            assert_eq!(read(text).unwrap(), wanted, "{text}");
        }
    }

    #[test]
    fn errors_list_the_valid_values() {
        for (text, wanted) in [
            ("compile = 1", "c.toml:1:11: `compile` must be true or false"),
            (
                "compile = { backend = 'inductr' }",
                "unknown value `inductr`; did you mean `inductor`? (valid: cudagraphs, eager, \
                 engine, inductor)",
            ),
            (
                "compile = { mode = 'max-autotun' }",
                "did you mean `max-autotune`? (valid: default, max-autotune, \
                 max-autotune-no-cudagraphs, reduce-overhead)",
            ),
            ("compile = { mod = 'default' }", "unknown key `mod`; did you mean `mode`?"),
            (
                "compile = { options = { triton = true } }",
                "unknown key `triton` (valid: search_rounds) in [compile.options]",
            ),
            ("compile = { mode = 'default', options = {} }", "not both"),
            (
                "compile = { mode = 'reduce-overhead', dynamic = true }",
                "c.toml:1:49: graphs have fixed shapes: `dynamic = true`",
            ),
            ("compile = { backend = 'cudagraphs', dynamic = true }", "not supported with"),
            ("compile = { dynamic = 'yes' }", "`dynamic` must be true or false"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
