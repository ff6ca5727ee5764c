//! An optimizer on an NPU for a model that computes on the host.
//!
//! State and arithmetic are the device's, weights and gradients the host's: a step copies gradients
//! there, and weights there and back, each flat buffer in one piece. To who calls it, it is an
//! [`Optimizer`] as any other.

use npu_sys::safe::{Operators, View};

use super::NpuParam;
use super::flat::Entry;
use super::fused::{Flat, NpuOptimizer};
use super::numbers::{bytes, put};
use super::rules::NpuHyper;
use crate::rule::group_methods;
use crate::{
    Applied, Clip, Error, FoundInf, Grad, HalfWeights, Optimizer, ParamGroup, ParamMut, Result,
    Slice, StateDict, StepCtl,
};

/// An [`Optimizer`] that computes on an Ascend NPU, for weights and gradients in the host's memory; `H`
/// is the rule's hyper-parameters.
///
/// Per step it copies the gradients to the device, and the weights to it and back, unless they have a
/// master there, which is the truth: then only back. It waits for the device at the end of the step.
/// What [`NpuOptimizer`] refuses it refuses, and [moving averages](ParamMut::ema).
#[derive(Debug)]
pub struct HostFed<H> {
    npu: NpuOptimizer<H>,
    /// As they were combined.
    params: Vec<NpuParam>,
    grad_norm: Option<f64>,
}

#[expect(private_bounds, reason = "sealed: the nine rules, and nobody else's")]
impl<H: NpuHyper> HostFed<H> {
    /// An optimizer over these groups, whose work goes into the stream of `on`.
    ///
    /// # Errors
    ///
    /// As [`NpuOptimizer::new`].
    pub fn new(
        on: Operators,
        groups: impl IntoIterator<Item = ParamGroup<H>>,
        half_weights: HalfWeights,
    ) -> Result<Self> {
        let npu = NpuOptimizer::new(on, groups, half_weights)?;
        Ok(Self { npu, params: Vec::new(), grad_norm: None })
    }

    /// As [`NpuOptimizer::with_kernels`].
    #[must_use]
    pub fn with_kernels(mut self, used: bool) -> Self {
        self.npu = self.npu.with_kernels(used);
        self
    }

    /// Makes flat buffers if the tensors are not those of the step before. A gradient that is missing
    /// counts as of the type it had, or else of the weight's.
    fn combine(&mut self, params: &[ParamMut<'_>]) -> Result<()> {
        let known = |(at, param): (usize, &ParamMut<'_>)| {
            let (count, weight) = (param.weight.len(), param.weight.dtype());
            let was = self.params.get(at).map_or(weight, |known| known.grad);
            let grad = param.grad.as_ref().map_or(was, |grad| grad.as_slice().dtype());
            NpuParam { count, rows: param.rows, weight, grad }
        };
        let params: Vec<NpuParam> = params.iter().enumerate().map(known).collect();
        if params != self.params {
            self.npu.combine(&params)?;
            self.params = params;
        }
        Ok(())
    }

    /// Copies gradients, and weights that have no master yet, to the device.
    fn feed(&self, params: &[ParamMut<'_>]) -> Result<()> {
        for flat in &self.npu.flats {
            let has_grad = |entry: &&Entry| params[entry.index].grad.is_some();
            let mastered = |entry: &Entry| flat.master.is_some() && entry.mastered;
            if !flat.entries.iter().filter(has_grad).all(mastered) {
                let weight = |entry: &Entry| Some(params[entry.index].weight.as_slice());
                self.fill(flat, &flat.weight, weight)?;
            }
            if flat.entries.iter().any(|entry| has_grad(&entry)) {
                let grad = |entry: &Entry| params[entry.index].grad.as_ref().map(Grad::as_slice);
                self.fill(flat, &flat.grad, grad)?;
            }
        }
        Ok(())
    }

    /// Fills a flat buffer: zero where there is nothing.
    fn fill<'a>(
        &self,
        flat: &Flat,
        view: &View,
        of: impl Fn(&Entry) -> Option<Slice<'a>>,
    ) -> Result<()> {
        let width = view.bytes() / view.count().max(1);
        let mut all = vec![0; view.bytes()];
        for entry in &flat.entries {
            if let Some(values) = of(entry) {
                let start = entry.start * width;
                all[start..start + entry.count * width].copy_from_slice(&bytes(values));
            }
        }
        Ok(self.npu.on.write(view, &all)?)
    }

    /// Copies the weights of tensors that took the step back, and clears the gradients that ask for it.
    fn fetch(&self, params: &mut [ParamMut<'_>]) -> Result<()> {
        for flat in &self.npu.flats {
            let has_grad = |entry: &&Entry| params[entry.index].grad.is_some();
            let stepped: Vec<&Entry> = flat.entries.iter().filter(has_grad).collect();
            if stepped.is_empty() {
                continue;
            }
            let all = self.npu.on.read(&flat.weight)?;
            let width = flat.kind.weight.size();
            for entry in stepped {
                let param = &mut params[entry.index];
                let start = entry.start * width;
                put(&mut param.weight, &all[start..start + entry.count * width]);
                if let Some(Grad::Clear(grad)) = &mut param.grad {
                    grad.clear();
                }
            }
        }
        Ok(())
    }
}

impl<H: NpuHyper + std::fmt::Debug> Optimizer for HostFed<H> {
    fn kind(&self) -> &'static str {
        H::KIND
    }

    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        let ctl = &ctl.validated()?;
        self.npu.core.validate(params)?;
        if params.iter().any(|param| param.ema.is_some()) {
            return Err(Error::Unsupported { what: "a moving average beside a step" });
        }
        self.combine(params)?;
        if ctl.found_inf == FoundInf::Known(true) {
            return Ok(Applied::SkippedNonFinite);
        }
        self.feed(params)?;
        let has_grad: Vec<bool> = params.iter().map(|param| param.grad.is_some()).collect();
        let applied = self.npu.step(&has_grad, ctl)?;
        if applied == Applied::Applied {
            self.fetch(params)?;
            if let Some(Clip::Norm(_)) = ctl.clip {
                self.grad_norm = self.npu.grad_norm()?;
            }
        }
        Ok(applied)
    }

    fn state_dict(&self) -> Result<StateDict> {
        self.npu.state_dict()
    }

    fn device(&self) -> String {
        format!("npu:{}", self.npu.on.context().device())
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.npu.load_state_dict(dict)
    }

    group_methods!(npu.core);

    fn refresh_masters(&mut self) -> Result<()> {
        self.npu.refresh_masters();
        Ok(())
    }

    /// The device does not ask.
    fn set_threads(&mut self, _: usize) {}

    fn grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }
}
