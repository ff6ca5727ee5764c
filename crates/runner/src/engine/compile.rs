//! `compile` in a configuration.

use crate::Result;
use crate::config::Section;

pub use train_step::{CompileBackend, CompileMode, CompileOptions, CompileReport};

/// Names in configurations.
const BACKENDS: [(&str, CompileBackend); 4] = [
    ("cudagraphs", CompileBackend::Cudagraphs),
    ("eager", CompileBackend::Eager),
    ("engine", CompileBackend::Engine),
    ("inductor", CompileBackend::Inductor),
];

/// Reads the key `compile` of a configuration; `None` if absent, `false`, or disabled.
///
/// # Errors
///
/// [`Error::Config`](crate::Error::Config) for an unknown backend, mode or option, with the
/// valid ones; for both `mode` and `options`, as in PyTorch; for `dynamic` shapes together with
/// graphs, which have fixed shapes.
pub fn read_compile(root: &mut Section) -> Result<Option<CompileOptions>> {
    let key = "compile";
    if !root.is_table(key) {
        return Ok(root.or(key, false)?.then(CompileOptions::default));
    }
    let mut table = root.section(key)?;
    let modes = CompileMode::ALL.map(|mode| (mode.name(), mode));
    if table.has("mode") && table.has("options") {
        table.note(table.error("set either `mode` or `options`, not both"))?;
    }
    let mut read = CompileOptions {
        backend: table.choice("backend", "engine", &BACKENDS)?,
        mode: table.choice("mode", "default", &modes)?,
        fullgraph: table.or("fullgraph", false)?,
        ..CompileOptions::default()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(text: &str) -> Result<Option<CompileOptions>> {
        let mut root = Config::from_text("c.toml", text)?.into_section();
        let read = read_compile(&mut root)?;
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
