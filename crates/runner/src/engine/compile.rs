//! `compile`: its options, and the report of what was done.
//!
//! The words are `torch.compile`'s, as MMEngine's `compile` takes them. What an engine does for them
//! is its own affair, and a [`CompileReport`] says it: what was applied, what was not and why.
//! Nothing that was not done is ever called done.

use std::fmt;

use crate::Result;
use crate::config::Section;

/// `compile = true`, or a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileOptions {
    /// Who compiles. Defaults to the engine itself.
    pub backend: CompileBackend,
    /// How far to go.
    pub mode: CompileMode,
    /// Whether a step that is to be one launch, and cannot be, is an error. Defaults to false.
    pub fullgraph: bool,
    /// How often a search runs each candidate; the best time counts. Defaults to 2.
    pub search_rounds: usize,
}

/// Who compiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CompileBackend {
    /// The engine itself.
    #[default]
    Engine,
    /// PyTorch's default. The engine stands in for it, and the report says so.
    Inductor,
    /// Nobody: models run as they are written.
    Eager,
    /// Whole steps as one launch and nothing else, where a device has such a thing.
    Cudagraphs,
}

/// As configurations call them.
const BACKENDS: [(&str, CompileBackend); 4] = [
    ("cudagraphs", CompileBackend::Cudagraphs),
    ("eager", CompileBackend::Eager),
    ("engine", CompileBackend::Engine),
    ("inductor", CompileBackend::Inductor),
];

/// `torch.compile`'s modes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CompileMode {
    /// What pays at once.
    #[default]
    Default,
    /// And whole steps as one launch, where a device has such a thing: a CUDA GPU has, as `engine/candle/cuda/graph/mod.rs`
    /// says. Operators of a model's own that use another stream than the engine's order
    /// the two by events then.
    ReduceOverhead,
    /// And a search among kernels.
    MaxAutotune,
    /// The same without whole steps as one launch.
    MaxAutotuneNoCudagraphs,
}

impl CompileMode {
    /// As configurations call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ReduceOverhead => "reduce-overhead",
            Self::MaxAutotune => "max-autotune",
            Self::MaxAutotuneNoCudagraphs => "max-autotune-no-cudagraphs",
        }
    }

    /// Whether it asks for a search among kernels.
    #[must_use]
    pub const fn searches(self) -> bool {
        matches!(self, Self::MaxAutotune | Self::MaxAutotuneNoCudagraphs)
    }

    const ALL: [Self; 4] =
        [Self::Default, Self::MaxAutotune, Self::MaxAutotuneNoCudagraphs, Self::ReduceOverhead];
}

impl Default for CompileOptions {
    /// What `compile = true` means.
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
    /// Whether the engine itself compiles.
    #[must_use]
    pub fn is_engines(&self) -> bool {
        matches!(self.backend, CompileBackend::Engine | CompileBackend::Inductor)
    }

    /// Whether whole steps are to be one launch.
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

    /// The key `compile` of a configuration; none if it is absent, `false`, or disabled.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an unknown backend, mode or option, with the valid
    /// ones; for both `mode` and `options`, which PyTorch refuses too; for `dynamic` shapes in steps that
    /// are one launch, where they are fixed.
    pub fn read(root: &mut Section) -> Result<Option<Self>> {
        let key = "compile";
        if !root.is_table(key) {
            return Ok(root.or(key, false)?.then(Self::default));
        }
        let mut table = root.section(key)?;
        let modes = CompileMode::ALL.map(|mode| (mode.name(), mode));
        if table.has("mode") && table.has("options") {
            return Err(table.error("either `mode` or `options` can be given, not both"));
        }
        let mut read = Self {
            backend: table.choice("backend", "engine", &BACKENDS)?,
            mode: table.choice("mode", "default", &modes)?,
            fullgraph: table.or("fullgraph", false)?,
            ..Self::default()
        };
        // Else shapes may always change: what is found for one is kept, another is looked at anew.
        let place = table.offset_of("dynamic");
        if table.optional::<bool>("dynamic")? == Some(true) && read.graphs() {
            let what = "shapes are fixed in steps that are one launch: `dynamic = true` goes with \
                        neither backend `cudagraphs` nor mode `reduce-overhead` nor `max-autotune`";
            return Err(place.error(what));
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

/// What compiling came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompileReport {
    /// What is in force.
    pub applied: Vec<String>,
    /// What was asked for and is not, with the reason.
    pub not_applied: Vec<String>,
}

impl CompileReport {
    /// Notes an option that was not applied, with the reason.
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
    fn a_switch_or_a_table() {
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
    fn every_mistake_lists_what_there_is() {
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
                "c.toml:1:49: shapes are fixed in steps that are one launch",
            ),
            ("compile = { backend = 'cudagraphs', dynamic = true }", "goes with neither"),
            ("compile = { dynamic = 'yes' }", "`dynamic` must be true or false"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
