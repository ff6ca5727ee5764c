//! The report of what `compile` has done.

use super::CandleEngine;
use crate::engine::{CompileBackend, CompileMode, CompileOptions, CompileReport};

impl CandleEngine {
    pub(super) fn report(&self, options: &CompileOptions) -> CompileReport {
        let mut report = CompileReport::default();
        report.decline(
            "fusion of operators",
            "candle has no compiler; the layers of this engine are always fused",
        );
        if let Some(cuda) = &self.cuda {
            cuda.report(options, self.context.autotune_summary(), &mut report);
            return report;
        }
        if let Some(summary) = self.context.autotune_summary() {
            let (seen, better) = (summary.timed, summary.improved);
            report.applied.push(format!(
                "autotuning during training, at the first use of each shape: whether a convolution runs by \
                 columns or by tiles, and for how many images at once ({seen} shapes so far, {better} of \
                 them faster than the default); different choices may change the last bits of results, \
                 and a run resumed from a checkpoint keeps its choices"
            ));
        }
        match options.backend {
            CompileBackend::Engine => {}
            CompileBackend::Inductor => report.decline("backend `inductor`", NOT_INDUCTOR),
            CompileBackend::Eager => report.decline("autotuning", EAGER),
            CompileBackend::Cudagraphs => {
                let why = "backend `cudagraphs` only captures steps as graphs";
                report.decline("autotuning", why);
            }
        }
        if self.context.autotune_summary().is_none() && options.mode != CompileMode::Default {
            let mode = format!("mode `{}`", options.mode.name());
            report.decline(&mode, "this backend has no modes");
        }
        if options.graphs() {
            report.decline("steps as one graph", "the CPU has no kernel launches");
        }
        if options.fullgraph {
            report.decline("`fullgraph`", "there are no graphs on the CPU");
        }
        report
    }
}

pub(super) const NOT_INDUCTOR: &str = "it belongs to PyTorch; this engine is used instead";
pub(super) const EAGER: &str = "backend `eager` runs models as written";
