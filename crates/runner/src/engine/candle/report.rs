//! The report of what `compile` has done.

use super::CandleEngine;
use crate::engine::{CompileBackend, CompileMode, CompileOptions, CompileReport};

impl CandleEngine {
    pub(super) fn report(&self, options: &CompileOptions) -> CompileReport {
        let mut report = CompileReport::default();
        report.decline(
            "fusion of operators",
            "candle has no compiler; the layers of this engine are fused with and without",
        );
        if let Some(cuda) = &self.cuda {
            cuda.report(options, &mut report);
            return report;
        }
        if let Some(summary) = self.context.autotune_summary() {
            let (seen, better) = (summary.timed, summary.improved);
            report.applied.push(format!(
                "a search, in training, for whether a convolution of this engine goes by columns or \
                 by tiles, and for how many images at once, at the first use of each shape ({seen} so \
                 far, {better} of them faster another way); runs that find different ways may differ \
                 in the last bits, and one that goes on from a checkpoint keeps to those it had found"
            ));
        }
        match options.backend {
            CompileBackend::Engine => {}
            CompileBackend::Inductor => report.decline("backend `inductor`", NOT_INDUCTOR),
            CompileBackend::Eager => report.decline("a search", EAGER),
            CompileBackend::Cudagraphs => {
                let why = "backend `cudagraphs` asks for whole steps as one launch only";
                report.decline("a search", why);
            }
        }
        if self.context.autotune_summary().is_none() && options.mode != CompileMode::Default {
            let mode = format!("mode `{}`", options.mode.name());
            report.decline(&mode, "that backend has no modes");
        }
        if options.graphs() {
            report.decline("whole steps as one launch", "the CPU has no launches to save");
        }
        if options.fullgraph {
            report.decline("`fullgraph`", "there is no graph that could be broken");
        }
        report
    }
}

pub(super) const NOT_INDUCTOR: &str = "it is PyTorch's; this engine does what it says is applied";
pub(super) const EAGER: &str = "backend `eager` runs models as written";
