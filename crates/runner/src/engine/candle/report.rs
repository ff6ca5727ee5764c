//! What `compile` has come to.

use super::CandleEngine;
use crate::engine::{CompileBackend, CompileMode, CompileOptions, CompileReport, ComputeDevice};

impl CandleEngine {
    pub(super) fn report(&self, options: &CompileOptions) -> CompileReport {
        let mut report = CompileReport::default();
        not(
            &mut report,
            "fusion of operators",
            "candle has no compiler; the layers of this engine are fused with and without",
        );
        match self.at {
            ComputeDevice::Cpu => self.report_of_host(options, &mut report),
            ComputeDevice::Cuda(_) => self.report_of_gpu(options, &mut report),
        }
        report
    }

    fn report_of_host(&self, options: &CompileOptions, report: &mut CompileReport) {
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
            CompileBackend::Inductor => not(report, "backend `inductor`", NOT_INDUCTOR),
            CompileBackend::Eager => not(report, "a search", EAGER),
            CompileBackend::Cudagraphs => {
                let why = "backend `cudagraphs` asks for whole steps as one launch only";
                not(report, "a search", why);
            }
        }
        if self.context.autotune_summary().is_none() && options.mode != CompileMode::Default {
            let mode = format!("mode `{}`", options.mode.name());
            not(report, &mode, "that backend has no modes");
        }
        if options.graphs() {
            not(report, "whole steps as one launch", "the CPU has no launches to save");
        }
        if options.fullgraph {
            not(report, "`fullgraph`", "there is no graph that could be broken");
        }
    }

    fn report_of_gpu(&self, options: &CompileOptions, report: &mut CompileReport) {
        #[cfg(feature = "candle-cuda")]
        match &self.kernels {
            Some(Ok(_)) => report.applied.push(format!(
                "kernels of this engine's own for tensors of f32, f16 and bf16, forward and backward, in place \
                 of compositions of candle's operators: {}",
                super::ops::cuda::NAMES
            )),
            Some(Err(why)) => not(report, "kernels of this engine's own", why),
            None => {}
        }
        if options.mode.searches() {
            let why = "of each operator there is one on a GPU";
            not(report, "a search for the model's kernels", why);
        }
        match options.backend {
            CompileBackend::Engine | CompileBackend::Cudagraphs => {}
            CompileBackend::Inductor => not(report, "backend `inductor`", NOT_INDUCTOR),
            CompileBackend::Eager => not(report, "kernels of this engine's own", EAGER),
        }
        #[cfg(feature = "candle-cuda")]
        match &self.tuned {
            Some(Ok(found)) => report.applied.push(found.clone()),
            Some(Err(why)) => not(report, "a search for the optimizer's launches", why),
            None => {}
        }
        #[cfg(feature = "candle-cuda")]
        if let Some(graphs) = &self.graphs {
            graphs.report(report);
        }
    }
}

const NOT_INDUCTOR: &str = "it is PyTorch's; this engine does what it says is applied";
const EAGER: &str = "backend `eager` runs models as written";

fn not(report: &mut CompileReport, what: &str, why: &str) {
    report.not_applied.push(format!("{what}: {why}"));
}
