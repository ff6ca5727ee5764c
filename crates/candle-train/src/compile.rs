//! `compile` for a trainer: autotuning, steps as graphs, and its report.

use candle_core::Device;
use candle_ops::Context;
use fused_optim::Optimizer;
use train_step::{CompileBackend, CompileMode, CompileOptions, CompileReport};

use crate::tensors::ModelTensors;
use crate::variables::Variables;
use crate::{Error, Result};
#[cfg(feature = "cuda")]
use crate::{graph::Graphs, tensors::Tensors};

/// Optimizations of a trainer's steps.
#[derive(Debug)]
pub(crate) struct Compiled {
    options: CompileOptions,
    /// Result of autotuning the optimizer, or the reason for which it failed.
    tuned: Option<std::result::Result<String, String>>,
    /// Steps as CUDA graphs, and the statistics of norm layers, which they change.
    #[cfg(feature = "cuda")]
    pub(crate) graphs: Option<(Graphs, Tensors)>,
}

impl Compiled {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// `fullgraph` without graphs.
    pub(crate) fn check(options: &CompileOptions, device: &Device) -> Result<()> {
        if options.fullgraph && !device.is_cpu() && !options.graphs() {
            let text = "compile: `fullgraph` needs mode `reduce-overhead` or `max-autotune`, or backend `cudagraphs`: \
                        set one of these, or remove `fullgraph`";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        Ok(())
    }

    /// Enables what `options` ask for.
    pub(crate) fn new(
        options: CompileOptions,
        (context, core): (&mut Context, &mut train_step::Trainer),
        (tensors, variables): (&ModelTensors, &Variables),
    ) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = variables;
        let device = tensors.params.tensors[0].device();
        let searches = options.is_engines() && (device.is_cpu() || options.mode.searches());
        context.set_autotune(searches.then_some(options.search_rounds));
        let tunes = !device.is_cpu() && options.mode.searches();
        let tuned = tunes.then(|| tune(tensors, core.optimizer_mut()));
        Self {
            #[cfg(feature = "cuda")]
            graphs: (options.graphs() && !device.is_cpu())
                .then(|| (Graphs::new(options.fullgraph), variables.buffer_tensors())),
            options,
            tuned,
        }
    }

    pub(crate) fn report(&self, context: &Context, device: &Device) -> CompileReport {
        let options = &self.options;
        let mut report = CompileReport::default();
        report.decline("fusion of operators", "candle has no compiler; layers are always fused");
        match context.autotune_summary() {
            Some(summary) => report.applied.push(format!(
                "autotuning of convolutions during training, at the first use of each shape ({} shapes so far, {} of \
                 them faster than the default); a resumed run keeps its choices",
                summary.timed, summary.improved
            )),
            None if options.is_engines() => {
                let why = "on a GPU set mode `max-autotune` or `max-autotune-no-cudagraphs`";
                report.decline("autotuning", why);
            }
            None => report.decline("autotuning", "this backend runs models as written"),
        }
        match &self.tuned {
            Some(Ok(found)) => report.applied.push(found.clone()),
            Some(Err(why)) => report.decline("autotuning of the optimizer", why),
            None => {}
        }
        if options.backend == CompileBackend::Inductor {
            report
                .decline("backend `inductor`", "it belongs to PyTorch; this crate is used instead");
        }
        if device.is_cpu() && options.mode != CompileMode::Default {
            report.decline(&format!("mode `{}`", options.mode.name()), "the CPU has no modes");
        }
        #[cfg(feature = "cuda")]
        if let Some((graphs, _)) = &self.graphs {
            graphs.report(&mut report);
            report.decline(
                "graphs of `step` and `step_weighted`",
                "use `step_on`, which gets its batch",
            );
        }
        if options.graphs() && device.is_cpu() {
            report.decline("steps as one graph", "the CPU has no kernel launches");
        }
        if options.fullgraph && device.is_cpu() {
            report.decline("`fullgraph`", "there are no graphs on the CPU");
        }
        report
    }
}

#[cfg(feature = "cuda")]
fn tune(
    tensors: &ModelTensors,
    optimizer: &mut dyn Optimizer,
) -> std::result::Result<String, String> {
    crate::tune_optimizer(&tensors.params.specs, optimizer)
}

#[cfg(not(feature = "cuda"))]
fn tune(_: &ModelTensors, _: &mut dyn Optimizer) -> std::result::Result<String, String> {
    Err("there is no GPU without the feature `cuda`".to_owned())
}
