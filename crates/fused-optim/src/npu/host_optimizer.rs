//! `HostOptimizer`: an optimizer on an NPU for a model that computes on the host.
//!
//! State and arithmetic are on the device, weights and gradients on the host. A step copies
//! gradients to the device, and weights to it and back, one copy per flat buffer.

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

/// An [`Optimizer`] that computes on an Ascend NPU, for weights and gradients in host memory; `H`
/// is the rule's hyper-parameters.
///
/// A step copies the gradients to the device, and the weights from it. Weights without a master on
/// the device are also copied to it. The step waits for the device at its end. [Moving
/// averages](ParamMut::ema) and everything that [`NpuOptimizer`] does not support are errors.
#[derive(Debug)]
pub struct HostOptimizer<H> {
    npu: NpuOptimizer<H>,
    /// The tensors that are combined.
    params: Vec<NpuParam>,
    grad_norm: Option<f64>,
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: NpuHyper> HostOptimizer<H> {
    /// An optimizer over these groups, in the stream of `on`.
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

    /// Creates flat buffers if the tensors differ from those of the previous step. A missing
    /// gradient has its previous type, or else the weight's.
    fn combine(&mut self, params: &[ParamMut<'_>]) -> Result<()> {
        let npu_param = |(at, param): (usize, &ParamMut<'_>)| {
            let (count, weight) = (param.weight.len(), param.weight.dtype());
            let previous = self.params.get(at).map_or(weight, |previous| previous.grad);
            let grad = param.grad.as_ref().map_or(previous, |grad| grad.as_slice().dtype());
            NpuParam { count, rows: param.rows, weight, grad }
        };
        let params: Vec<NpuParam> = params.iter().enumerate().map(npu_param).collect();
        if params != self.params {
            self.npu.combine(&params)?;
            self.params = params;
        }
        Ok(())
    }

    /// Copies gradients, and weights that have no master yet, to the device.
    fn upload(&self, params: &[ParamMut<'_>]) -> Result<()> {
        for flat in &self.npu.flats {
            let has_grad = |entry: &&Entry| params[entry.index].grad.is_some();
            let has_master = |entry: &Entry| flat.master.is_some() && entry.has_master;
            if !flat.entries.iter().filter(has_grad).all(has_master) {
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

    /// Fills a flat buffer, with zeros for tensors without values.
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
                all[start..start + entry.count * width].copy_from_slice(bytes(values));
            }
        }
        Ok(self.npu.on.write(view, &all)?)
    }

    /// Copies updated weights to the host, and clears gradients if requested.
    fn download(&self, params: &mut [ParamMut<'_>]) -> Result<()> {
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

impl<H: NpuHyper + std::fmt::Debug> Optimizer for HostOptimizer<H> {
    fn kind(&self) -> &'static str {
        H::KIND
    }

    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        let ctl = &ctl.validated()?;
        ctl.max_norm_on_device()?;
        ctl.host_total_norm()?;
        self.npu.core.validate(params)?;
        if params.iter().any(|param| param.ema.is_some()) {
            return Err(Error::Unsupported { what: "`ParamMut::ema`" });
        }
        self.combine(params)?;
        if ctl.found_inf == FoundInf::Known(true) {
            return Ok(Applied::SkippedNonFinite);
        }
        self.upload(params)?;
        let has_grad: Vec<bool> = params.iter().map(|param| param.grad.is_some()).collect();
        let applied = self.npu.step(&has_grad, ctl)?;
        if applied == Applied::Applied {
            self.download(params)?;
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

    /// Has no effect on a device.
    fn set_threads(&mut self, _: usize) {}

    fn grad_norm(&self) -> Option<f64> {
        self.grad_norm
    }
}
