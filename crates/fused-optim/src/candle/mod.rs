//! Optimizers for candle's variables (feature `candle`).
//!
//! [`VarOptimizer`] makes a `candle_nn::Optimizer` of this crate's optimizers. On the CPU a step
//! takes each variable's storage out of its tensor, leaves an empty storage of a type that candle's
//! operators reject, steps on plain slices, and always puts the storages back, also on errors and
//! panics. No weight is copied. Variables on a GPU (feature `cuda`, here and of `cuda-rt`) stay in
//! place and are updated through device pointers, in candle's stream. [`lend`], and `lend_on_gpu`
//! on a GPU, lend tensors to any caller's step.
//!
//! Limits:
//!
//! - Variables are of f32, f16 or bf16, on the CPU or all on one GPU.
//! - During a step on the CPU, candle operators on these variables fail in other threads.

#[cfg(feature = "cuda")]
mod cuda;
mod from_vars;
mod saved;

use std::cell::RefCell;
use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, Device, Error, InplaceOp1, Layout, Result, Shape, Storage, Tensor, Var, bail,
};
use candle_nn::VarMap;

#[cfg(feature = "cuda")]
pub use self::cuda::lend_on_gpu;
pub use self::from_vars::FromVars;
use crate::{Applied, DType, HyperParam, Optimizer, ParamMut, ParamSpec, Slice, SliceMut, StepCtl};

/// A `candle_nn::Optimizer` that updates variables in place with `O`: `VarOptimizer<AdamW>`,
/// `VarOptimizer<Lion>`, or a user-defined rule; on a GPU
/// `VarOptimizer<cuda::CudaDeviceOptimizer<AdamWHyper>>`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, VarBuilder, VarMap};
/// use fused_optim::candle::VarOptimizer;
/// use fused_optim::{AdamW, AdamWHyper, Clip, FoundInf, StepCtl};
///
/// let (vars, cpu) = (VarMap::new(), Device::Cpu);
/// let net = candle_nn::linear(4, 1, VarBuilder::from_varmap(&vars, DType::F32, &cpu))?;
/// let mut adamw = VarOptimizer::<AdamW>::from_var_map(&vars, AdamWHyper::default())?;
/// let loss = net.forward(&Tensor::ones((8, 4), DType::F32, &cpu)?)?.sqr()?.mean_all()?;
/// adamw.backward_step(&loss)?;
///
/// // With a check for infinities, and clipping by norm.
/// let ctl = StepCtl { found_inf: FoundInf::Check, clip: Some(Clip::norm(1.0)), ..StepCtl::PLAIN };
/// let _applied = adamw.step_with(&loss.backward()?, &ctl)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// As with candle's own optimizers, a variable without a gradient is not updated. The state of an
/// f16 or bf16 variable has an f32 master, unless the optimizer has other
/// [`HalfWeights`](crate::HalfWeights): after changing such variables outside the optimizer, call
/// [`refresh_masters`](VarOptimizer::refresh_masters).
///
/// State is saved and loaded by the variables' names, which
/// [`from_var_map`](VarOptimizer::from_var_map) and [`with_names`](VarOptimizer::with_names) know.
/// `new(map.all_vars(), ..)` does not: the order of `all_vars` differs between processes, and by
/// index a restart would load moments onto other variables.
#[derive(Debug)]
pub struct VarOptimizer<O> {
    optimizer: O,
    vars: Vec<Var>,
    /// Empty if the variables have no names.
    names: Vec<String>,
    /// Error of the last learning rate, if it was invalid.
    invalid_lr: Option<String>,
    /// The variables' GPU, if they are on one.
    #[cfg(feature = "cuda")]
    gpu: Option<cuda::OnGpu>,
}

impl<O: Optimizer> VarOptimizer<O> {
    /// Wraps an existing optimizer, for example with several parameter groups. `vars` are its
    /// parameters in this order. They have no names: its state cannot be saved, see
    /// [`with_names`](Self::with_names).
    ///
    /// # Errors
    ///
    /// If a variable is not of f32, f16 or bf16, or not on the optimizer's device.
    pub fn with_optimizer(vars: Vec<Var>, optimizer: O) -> Result<Self> {
        Self::build(vars, Vec::new(), optimizer)
    }

    /// As [`with_optimizer`](Self::with_optimizer), with the variables' names, by which state is
    /// saved and loaded.
    ///
    /// # Errors
    ///
    /// As [`with_optimizer`](Self::with_optimizer); the errors of [`Optimizer::set_param_names`].
    pub fn with_names(
        vars: impl IntoIterator<Item = (String, Var)>,
        mut optimizer: O,
    ) -> Result<Self> {
        let (names, vars): (Vec<_>, Vec<_>) = vars.into_iter().unzip();
        let specs = names.iter().zip(&vars).map(|(name, var)| ParamSpec::new(&**name, var.dims()));
        optimizer.set_param_names(&specs.collect::<Vec<_>>()).map_err(Error::wrap)?;
        Self::build(vars, names, optimizer)
    }

    fn build(vars: Vec<Var>, names: Vec<String>, optimizer: O) -> Result<Self> {
        #[cfg(feature = "cuda")]
        let mut optimizer = optimizer;
        #[cfg(feature = "cuda")]
        if optimizer.as_device().is_some() {
            let gpu = Some(cuda::OnGpu::new(&vars, &names)?);
            return Ok(Self { optimizer, vars, names, invalid_lr: None, gpu });
        }
        let mut all = vars.iter().enumerate();
        all.try_for_each(|(index, var)| check(var, &label(&names, index)))?;
        Ok(Self {
            optimizer,
            vars,
            names,
            invalid_lr: None,
            #[cfg(feature = "cuda")]
            gpu: None,
        })
    }

    /// Creates an optimizer for the float variables that are in the map now, in order of their
    /// names, which are saved in state dicts.
    ///
    /// # Errors
    ///
    /// The errors of `new`.
    pub fn from_var_map(map: &VarMap, hyper: O::Hyper) -> Result<Self>
    where
        O: FromVars,
    {
        let map = map.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut named: Vec<_> = map.iter().filter(|(_, var)| var.dtype().is_float()).collect();
        named.sort_by_key(|(name, _)| *name);
        let vars: Vec<_> = named.iter().map(|(_, var)| (*var).clone()).collect();
        let optimizer = O::from_vars(&vars, hyper)?;
        Self::with_names(named.into_iter().map(|(name, _)| name.clone()).zip(vars), optimizer)
    }

    /// The optimizer.
    #[must_use]
    pub const fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// The optimizer, to read and set hyper-parameters.
    pub const fn optimizer_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }

    /// As [`Optimizer::set_hyper_param`].
    ///
    /// # Errors
    ///
    /// As [`Optimizer::set_hyper_param`].
    pub fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()> {
        self.optimizer.set_hyper_param(group, param, value).map_err(Error::wrap)
    }

    /// As [`Optimizer::set_threads`].
    pub fn set_threads(&mut self, threads: usize) {
        self.optimizer.set_threads(threads);
    }

    /// As [`Optimizer::refresh_masters`].
    ///
    /// # Errors
    ///
    /// As [`Optimizer::refresh_masters`].
    pub fn refresh_masters(&mut self) -> Result<()> {
        self.optimizer.refresh_masters().map_err(Error::wrap)
    }

    /// The weights for evaluation of a variable of [`vars`](Self::vars), in its type; `None` unless
    /// the rule [has others](Optimizer::has_eval_weights) than those that it trains. A variable in
    /// no group keeps its own.
    ///
    /// # Errors
    ///
    /// The errors of [`Optimizer::eval_weights`]; a variable that is not on the CPU.
    ///
    /// # Panics
    ///
    /// If there is no such variable.
    pub fn eval_tensor(&self, index: usize) -> Result<Option<Tensor>> {
        if !self.optimizer.has_eval_weights() {
            return Ok(None);
        }
        let var = &self.vars[index];
        let (storage, layout) = var.storage_and_layout();
        let Some(weight) = slice(&storage, layout) else {
            bail!("{}: {TAKEN}", label(&self.names, index))
        };
        let mut values = vec![0.0; weight.len()];
        match self.optimizer.eval_weights(index, weight, &mut values) {
            Err(crate::Error::MissingParam { .. }) => {
                return var.as_detached_tensor().copy().map(Some);
            }
            result => result.map_err(Error::wrap)?,
        }
        Tensor::from_vec(values, var.shape(), var.device())?.to_dtype(var.dtype()).map(Some)
    }

    /// Calls `call` while the variables have their [weights for evaluation](Self::eval_tensor),
    /// and then gives them back those of training, bit for bit, also if it panics.
    ///
    /// # Errors
    ///
    /// The errors of [`eval_tensor`](Self::eval_tensor); a variable that another thread is
    /// updating.
    pub fn with_eval_weights<R>(&self, call: impl FnOnce() -> R) -> Result<R> {
        let weights = (0..self.vars.len()).map(|index| self.eval_tensor(index));
        let Some(weights) = weights.collect::<Result<Option<Vec<_>>>>()? else {
            return Ok(call());
        };
        let copies = self.vars.iter().map(|var| var.as_detached_tensor().copy());
        let trained = copies.collect::<Result<Vec<_>>>()?;
        let mut restored = Restored { vars: &self.vars, trained };
        set_all(&self.vars, &weights)?;
        let result = call();
        set_all(&self.vars, &std::mem::take(&mut restored.trained))?;
        Ok(result)
    }

    /// The variables, in the order of the optimizer's parameters.
    #[must_use]
    pub fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// A step with the options of [`Optimizer::step`]: unscaling, the check for infinities,
    /// clipping.
    ///
    /// # Errors
    ///
    /// The errors of [`Optimizer::step`]; a gradient of another shape than its variable; an invalid
    /// learning rate.
    pub fn step_with(&mut self, grads: &GradStore, ctl: &StepCtl) -> Result<Applied> {
        let grads: Vec<_> = self.vars.iter().map(|var| grads.get(var).cloned()).collect();
        self.step_tensors(&grads, ctl)
    }

    /// As [`step_with`](Self::step_with), on gradients by variable, in order of
    /// [`vars`](Self::vars).
    ///
    /// # Errors
    ///
    /// As there; another number of gradients than variables.
    pub fn step_tensors(&mut self, grads: &[Option<Tensor>], ctl: &StepCtl) -> Result<Applied> {
        self.check_step(grads.len())?;
        // Copy gradients while all storages are in place: a gradient can be a view of a variable.
        let grads = grads.iter().enumerate();
        let grads = grads
            .map(|(index, grad)| self.gradient(grad.as_ref(), index))
            .collect::<Result<Vec<_>>>()?;
        #[cfg(feature = "cuda")]
        if let (Some(gpu), Some(device)) = (&self.gpu, self.optimizer.as_device()) {
            return gpu.step(device, (&self.vars, &self.names), &grads, ctl);
        }
        self.lend(|optimizer, weights, vars, names| {
            let guards: Vec<_> =
                grads.iter().map(|grad| grad.as_ref().map(Tensor::storage_and_layout)).collect();
            let slices = guards.iter().enumerate().map(|(index, guard)| {
                let Some((storage, layout)) = guard else { return Ok(None) };
                slice(storage, layout).map(Some).ok_or_else(|| no_gradient(names, index))
            });
            let slices = slices.collect::<Result<Vec<_>>>()?;
            step(optimizer, weights, vars, &slices, ctl)
        })
    }

    /// As [`step_with`](Self::step_with), for variables on the CPU, on gradients in memory of the
    /// caller's, which no variable shares: buckets that were averaged, for example. `grads[i]` is
    /// that of variable `i`.
    ///
    /// # Errors
    ///
    /// As there; another number of gradients than variables; variables on a GPU.
    pub fn step_slices(&mut self, grads: &[Option<Slice<'_>>], ctl: &StepCtl) -> Result<Applied> {
        self.check_step(grads.len())?;
        self.lend(|optimizer, weights, vars, _| step(optimizer, weights, vars, grads, ctl))
    }

    fn lend(
        &mut self,
        call: impl FnOnce(&mut O, &mut [SliceMut<'_>], &[Var], &[String]) -> Result<Applied>,
    ) -> Result<Applied> {
        let Self { optimizer, vars, names, .. } = self;
        let tensors: Vec<_> = vars.iter().map(Var::as_tensor).collect();
        lend(
            &tensors,
            |index| label(names, index),
            |weights| call(optimizer, weights, vars, names),
        )?
    }

    /// As [`step_tensors`](Self::step_tensors), for variables on a GPU, on gradients in memory of
    /// the caller's there.
    ///
    /// # Errors
    ///
    /// As there; variables on the CPU.
    ///
    /// # Safety
    ///
    /// Each gradient is memory of the variables' GPU, complete in order of candle's stream of this
    /// thread, and written or freed only in order of it after the step.
    #[cfg(feature = "cuda")]
    #[expect(unsafe_code, reason = "the addresses are raw device pointers")]
    pub unsafe fn step_device_slices(
        &mut self,
        grads: &[Option<crate::cuda::DeviceSlice>],
        ctl: &StepCtl,
    ) -> Result<Applied> {
        self.check_step(grads.len())?;
        let (Some(gpu), Some(device)) = (&self.gpu, self.optimizer.as_device()) else {
            bail!("the variables are on the CPU, the gradients on a GPU");
        };
        // SAFETY: by this function's contract.
        unsafe { gpu.step_slices(device, (&self.vars, &self.names), grads, ctl) }
    }

    fn check_step(&self, grads: usize) -> Result<()> {
        if let Some(error) = &self.invalid_lr {
            bail!("set_learning_rate: {error}");
        }
        if grads != self.vars.len() {
            bail!("{grads} gradients for {} variables", self.vars.len());
        }
        Ok(())
    }

    /// A variable's gradient, contiguous.
    fn gradient(&self, grad: Option<&Tensor>, index: usize) -> Result<Option<Tensor>> {
        let var = &self.vars[index];
        let Some(grad) = grad else { return Ok(None) };
        if grad.shape() != var.shape() {
            let label = label(&self.names, index);
            bail!("{label} has shape {:?}, its gradient {:?}", var.shape(), grad.shape());
        }
        grad.contiguous().map(Some)
    }
}

impl<O: FromVars> candle_nn::Optimizer for VarOptimizer<O> {
    type Config = O::Hyper;

    /// Creates an optimizer with one parameter group of the float variables in `vars`. Its state
    /// cannot be saved, see [`from_var_map`](VarOptimizer::from_var_map).
    fn new(vars: Vec<Var>, hyper: O::Hyper) -> Result<Self> {
        let vars: Vec<_> = vars.into_iter().filter(|var| var.dtype().is_float()).collect();
        let optimizer = O::from_vars(&vars, hyper)?;
        Self::with_optimizer(vars, optimizer)
    }

    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.step_with(grads, &StepCtl::PLAIN).map(|_| ())
    }

    /// Learning rate of the first group; NaN if there is no group.
    fn learning_rate(&self) -> f64 {
        self.optimizer.lr(0).unwrap_or(f64::NAN)
    }

    /// Sets the learning rate of all groups. If it is invalid, steps return the error until another
    /// rate is set.
    fn set_learning_rate(&mut self, lr: f64) {
        let mut groups = 0..self.optimizer.group_count();
        let error = groups.find_map(|group| self.optimizer.set_lr(group, lr).err());
        self.invalid_lr = error.map(|e| e.to_string());
    }
}

impl From<DType> for candle_core::DType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::Bf16 => Self::BF16,
        }
    }
}

impl TryFrom<candle_core::DType> for DType {
    type Error = Error;

    fn try_from(dtype: candle_core::DType) -> Result<Self> {
        match dtype {
            candle_core::DType::F32 => Ok(Self::F32),
            candle_core::DType::F16 => Ok(Self::F16),
            candle_core::DType::BF16 => Ok(Self::Bf16),
            other => bail!("an optimizer steps f32, f16 or bf16, not {other:?}"),
        }
    }
}

/// Lends the elements of tensors on the CPU to `call`: takes the storages out of the tensors, and
/// puts them back however the call ends. Operators on these tensors fail meanwhile, in every
/// thread. `label` names a tensor in an error.
///
/// # Errors
///
/// A tensor that is listed twice, lent already, not on the CPU, not contiguous, or not of f32, f16
/// or bf16; nothing was called then.
pub fn lend<R>(
    tensors: &[&Tensor],
    label: impl Fn(usize) -> String,
    call: impl FnOnce(&mut [SliceMut<'_>]) -> R,
) -> Result<R> {
    let mut storages = TakenStorages { tensors, taken: Vec::with_capacity(tensors.len()) };
    for (index, tensor) in tensors.iter().enumerate() {
        let swap = Swap(RefCell::new(EMPTY));
        tensor.inplace_op1(&swap).map_err(|e| e.context(label(index)))?;
        storages.taken.push(swap.0.into_inner());
    }
    let taken = tensors.iter().zip(&mut storages.taken);
    let slices = taken.map(|(tensor, storage)| slice_mut(storage, tensor.layout()));
    let mut slices = slices.collect::<Option<Vec<_>>>().ok_or_else(|| Error::msg(TAKEN))?;
    Ok(call(&mut slices))
}

/// Variables that get these values back when it is dropped.
struct Restored<'a> {
    vars: &'a [Var],
    trained: Vec<Tensor>,
}

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        // An error is returned, or a panic goes on.
        let _ = set_all(self.vars, &self.trained);
    }
}

fn set_all(vars: &[Var], values: &[Tensor]) -> Result<()> {
    vars.iter().zip(values).try_for_each(|(var, values)| var.set(values))
}

/// A step on variables whose weights are lent.
fn step(
    optimizer: &mut dyn Optimizer,
    weights: &mut [SliceMut<'_>],
    vars: &[Var],
    grads: &[Option<Slice<'_>>],
    ctl: &StepCtl,
) -> Result<Applied> {
    let weights = weights.iter_mut().zip(vars).zip(grads);
    let params = weights.map(|((weight, var), grad)| {
        ParamMut::new(weight.reborrow(), *grad).with_shape(var.dims())
    });
    optimizer.step(&mut params.collect::<Vec<_>>(), ctl).map_err(Error::wrap)
}

/// Storages taken out of the first of `tensors`; `drop` puts them back.
struct TakenStorages<'a> {
    tensors: &'a [&'a Tensor],
    taken: Vec<CpuStorage>,
}

impl Drop for TakenStorages<'_> {
    fn drop(&mut self) {
        for (tensor, storage) in self.tensors.iter().zip(self.taken.drain(..)) {
            // Cannot fail: the same operator has taken the storage out.
            let _ = tensor.inplace_op1(&Swap(RefCell::new(storage)));
        }
    }
}

/// Swaps a tensor's storage for this one.
struct Swap(RefCell<CpuStorage>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "lending a tensor"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let held = &mut *self.0.borrow_mut();
        // Either the tensor's storage is taken out, or the held one is put back.
        if elements(storage, layout).is_none() && elements(held, layout).is_none() {
            let is_taken = matches!(storage, CpuStorage::F4(_));
            return Err(Error::msg(if is_taken {
                TAKEN
            } else {
                "expected contiguous f32, f16 or bf16"
            }));
        }
        std::mem::swap(storage, held);
        Ok(())
    }
}

/// Returns an error for a variable that the CPU optimizers do not support.
fn check(var: &Var, label: &str) -> Result<()> {
    let (storage, layout) = var.storage_and_layout();
    if slice(&storage, layout).is_none() {
        let at = var.device().location();
        bail!("{label} is {:?} on {at:?}; expected f32, f16 or bf16 on Cpu", var.dtype());
    }
    Ok(())
}

fn no_gradient(names: &[String], index: usize) -> Error {
    let expected = "expected f32, f16 or bf16 on the CPU, not sharing memory with a variable";
    Error::msg(format!("gradient of {}: {expected}", label(names, index)))
}

/// A tensor's elements, of its [`storage_and_layout`](Tensor::storage_and_layout); `None` if they
/// are not on the CPU, not of f32, f16 or bf16, not contiguous, or [lent](lend).
#[must_use]
pub fn slice<'a>(storage: &'a Storage, layout: &Layout) -> Option<Slice<'a>> {
    match storage {
        Storage::Cpu(storage) => elements(storage, layout),
        _ => None,
    }
}

/// A tensor of these elements.
///
/// # Errors
///
/// A shape of another number of elements; memory of the device that cannot be allocated.
pub fn tensor(elements: Slice<'_>, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    match elements {
        Slice::F32(v) => Tensor::from_slice(v, shape.into(), device),
        Slice::F16(v) => Tensor::from_slice(v, shape.into(), device),
        Slice::Bf16(v) => Tensor::from_slice(v, shape.into(), device),
    }
}

/// As [`slice`].
fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Option<Slice<'a>> {
    let (start, end) = layout.contiguous_offsets()?;
    match storage {
        CpuStorage::F32(all) => all.get(start..end).map(Slice::F32),
        CpuStorage::F16(all) => all.get(start..end).map(Slice::F16),
        CpuStorage::BF16(all) => all.get(start..end).map(Slice::Bf16),
        _ => None,
    }
}

/// As [`slice`].
fn slice_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Option<SliceMut<'a>> {
    let (start, end) = layout.contiguous_offsets()?;
    match storage {
        CpuStorage::F32(all) => all.get_mut(start..end).map(SliceMut::F32),
        CpuStorage::F16(all) => all.get_mut(start..end).map(SliceMut::F16),
        CpuStorage::BF16(all) => all.get_mut(start..end).map(SliceMut::Bf16),
        _ => None,
    }
}

fn label(names: &[String], index: usize) -> String {
    names.get(index).map_or_else(|| format!("variable {index}"), |name| format!("`{name}`"))
}

const TAKEN: &str = "the variable is listed twice, shares memory with another one, or another thread is updating it";

/// Storage of a tensor that is lent. candle's operators reject its type, so none reads out of
/// bounds.
const EMPTY: CpuStorage = CpuStorage::F4(Vec::new());

#[cfg(test)]
mod tests {
    use candle_core::{DType as CandleType, Device};

    use super::*;

    #[test]
    fn element_types_convert_both_ways() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            assert_eq!(DType::try_from(CandleType::from(dtype)).unwrap(), dtype);
        }
        let error = DType::try_from(CandleType::F64).unwrap_err().to_string();
        assert!(error.contains("f32, f16 or bf16, not F64"), "{error}");
    }

    #[test]
    fn operators_fail_during_a_step() {
        let var = Var::ones((3, 3), CandleType::F32, &Device::Cpu).unwrap();
        let label = |_| "`w`".to_owned();
        lend(&[&var], label, |_| {
            assert!(var.matmul(&var).is_err());
            assert!((var.as_tensor() + var.as_tensor()).is_err());
            assert!(var.set(&var.ones_like().unwrap()).is_err());
            assert!(var.sum_all().is_err());
            assert!(var.t().unwrap().contiguous().is_err());
            let error = lend(&[&var], label, |_| ()).unwrap_err().to_string();
            assert!(error.contains("`w`") && error.contains("listed twice"), "{error}");
        })
        .unwrap();
        let wide = var.to_dtype(CandleType::F64).unwrap();
        let error = lend(&[&var, &wide], label, |_| ()).unwrap_err().to_string();
        assert!(error.contains("`w`") && error.contains("expected contiguous f32"), "{error}");
        assert_eq!(var.sum_all().unwrap().to_scalar::<f32>().unwrap(), 9.0);
    }
}
