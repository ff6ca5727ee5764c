//! Options of `compile`, and the report of the optimizations applied.
//!
//! The options are those of `torch.compile`, as in MMEngine's `compile`. Each program decides how
//! to implement them, and its [`CompileReport`] lists what was applied, and what was not and why.

use std::fmt;

/// Options of `compile`, by default those of `compile = true` in a configuration.
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

/// `torch.compile`'s modes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CompileMode {
    /// Optimizations without measurements.
    #[default]
    Default,
    /// In addition captures whole steps as one graph, on devices that support it: CUDA GPUs in
    /// `runner` and by `step_on` of `candle-train`. A model's own operators that use a stream other
    /// than the engine's must then order the two with events.
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

    /// All modes, in the order of their names.
    pub const ALL: [Self; 4] =
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
