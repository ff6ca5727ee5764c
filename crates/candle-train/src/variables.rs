//! A model's variables by name: trained ones and others.
//!
//! Invariant: both lists are sorted by name, the same order on every rank, unlike the order of a
//! `VarMap`.

use std::collections::HashSet;
use std::sync::PoisonError;

use candle_core::{DType, Tensor, Var, WithDType};
use candle_nn::VarMap;
use candle_ops::nn::lora::{adapter_of, fits, is_frozen};
use collective::{Element, ProcessGroup};
use half::{bf16, f16};
use train_step::{TensorSpec, is_reserved};

use crate::tensors::{ModelTensors, Tensors};
use crate::{Error, Result};

/// The variables of a `VarMap`.
#[derive(Clone, Debug)]
pub(crate) struct Variables {
    /// Trained variables: floating-point variables that are neither frozen nor buffers.
    pub(crate) params: Vec<(String, Var)>,
    /// Statistics of norm layers, which are changed by forward passes.
    pub(crate) buffers: Vec<(String, Var)>,
    /// Other variables, which are saved and broadcast, but never changed; and further names of
    /// trained ones.
    pub(crate) constants: Vec<(String, Var)>,
}

impl Variables {
    /// The variables that are in the map now. `frozen` are patterns of names, see [`fits`];
    /// adapters and the layers that have one are recognized by their names.
    pub(crate) fn of(map: &VarMap, frozen: &[String]) -> Result<Self> {
        let map = map.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = map.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        if let Some(pattern) =
            frozen.iter().find(|pattern| !all.iter().any(|(name, _)| fits(name, pattern)))
        {
            let names = all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
            let text = format!("frozen `{pattern}` is the name of no variable; there are {names}");
            return Err(Error::InvalidArgument(text));
        }
        if let Some((name, _)) = all.iter().find(|(name, _)| is_reserved(name)) {
            return Err(Error::InvalidArgument(format!(
                "variable `{name}`: `__metadata__` and names beginning with `train_step.` or `candle_train.` are \
                 reserved for checkpoints"
            )));
        }
        // A variable with two names is frozen if one of them is.
        let frozen: HashSet<_> = all
            .iter()
            .filter(|(name, _)| is_frozen(name, frozen))
            .map(|(_, var)| var.id())
            .collect();
        let mut variables = Self { params: Vec::new(), buffers: Vec::new(), constants: Vec::new() };
        // A variable with two names is trained, broadcast and averaged by the first of them.
        let mut known = HashSet::new();
        for (name, var) in all {
            let has_adapter = adapter_of(&name).is_some_and(|adapter| map.contains_key(&adapter));
            let is_constant = has_adapter || frozen.contains(&var.id()) || !var.dtype().is_float();
            let list = match () {
                () if is_buffer(&name) => &mut variables.buffers,
                () if is_constant || !known.insert(var.id()) => &mut variables.constants,
                () => &mut variables.params,
            };
            list.push((name, var));
        }
        if variables.params.is_empty() {
            let text = match variables.constants.is_empty() {
                true => "no variable to train: build the model from the VarMap first",
                false => "no variable to train: all are frozen, or none is of floating-point type",
            };
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        Ok(variables)
    }

    /// The trained variables, for a step. They have to be on one device.
    pub(crate) fn tensors(&self) -> Result<ModelTensors> {
        let mut params = Tensors::default();
        for (name, var) in &self.params {
            let Ok(dtype) = fused_optim::DType::try_from(var.dtype()) else {
                let other = var.dtype();
                let text = format!("`{name}` is of {other:?}; expected f32, f16 or bf16");
                return Err(Error::InvalidArgument(text));
            };
            let spec = TensorSpec { name: name.clone(), shape: var.dims().to_vec(), dtype };
            params.add(spec, var.as_tensor().clone());
        }
        ModelTensors::of_params(params)
    }

    /// The statistics of norm layers.
    #[cfg(feature = "cuda")]
    pub(crate) fn buffer_tensors(&self) -> Tensors {
        let mut buffers = Tensors::default();
        for (name, var) in &self.buffers {
            let dtype = var.dtype().try_into().unwrap_or(fused_optim::DType::F32);
            let spec = TensorSpec { name: name.clone(), shape: var.dims().to_vec(), dtype };
            buffers.add(spec, var.as_detached_tensor());
        }
        buffers
    }

    /// Returns an error for variables created after this trainer, which would be neither trained
    /// nor saved, and for variables that are no longer in the map.
    pub(crate) fn check_map(&self, map: &VarMap) -> Result<()> {
        let map = map.data().lock().unwrap_or_else(PoisonError::into_inner);
        for (name, var) in self.all() {
            let text = match map.get(name) {
                Some(now) if now.id() == var.id() => continue,
                Some(_) => {
                    format!("variable `{name}` has been replaced in the `VarMap`: use `Var::set`")
                }
                None => format!("variable `{name}` has been removed from the `VarMap`"),
            };
            return Err(Error::InvalidArgument(format!("{text}, or build a new trainer")));
        }
        if map.len() == self.all().count() {
            return Ok(());
        }
        let known: HashSet<&str> = self.all().map(|(name, _)| name.as_str()).collect();
        let mut new: Vec<_> = map.keys().filter(|name| !known.contains(name.as_str())).collect();
        new.sort();
        let text =
            format!("variables made after the trainer: {new:?}; build the whole model before it");
        Err(Error::InvalidArgument(text))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &(String, Var)> {
        self.params.iter().chain(&self.buffers).chain(&self.constants)
    }

    /// Descriptions that have to be equal on all ranks.
    pub(crate) fn described(&self) -> impl Iterator<Item = String> {
        let lists =
            [("trained", &self.params), ("buffer", &self.buffers), ("other", &self.constants)];
        lists.into_iter().flat_map(|(role, vars)| {
            let describe = move |(name, var): &(String, Var)| {
                format!("{role} variable `{name}` {:?} {:?}", var.dims(), var.dtype())
            };
            vars.iter().map(describe)
        })
    }

    /// Broadcasts the values of rank 0.
    pub(crate) fn broadcast(&self, group: &ProcessGroup) -> Result<()> {
        // One at a time: a copy of all of them would double the model's memory.
        let all = [&self.params, &self.buffers, &self.constants];
        all.into_iter().flat_map(|vars| vars.chunks(1)).try_for_each(|one| broadcast(one, group))
    }

    pub(crate) fn broadcast_buffers(&self, group: &ProcessGroup) -> Result<()> {
        let mut by_type = self.buffers.chunk_by(|(_, a), (_, b)| a.dtype() == b.dtype());
        by_type.try_for_each(|alike| broadcast(alike, group))
    }
}

/// The statistics of norm layers as they were before a batch. Their memory is used again for each
/// batch.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    copies: Vec<Var>,
    /// Whether the copies are of the present batch.
    is_complete: bool,
}

impl Statistics {
    /// Forgets the copies of an earlier batch.
    pub(crate) fn begin(&mut self) {
        self.is_complete = false;
    }

    /// Copies the statistics.
    pub(crate) fn copy(&mut self, buffers: &[(String, Var)]) -> Result<()> {
        for (index, (_, var)) in buffers.iter().enumerate() {
            match self.copies.get(index) {
                Some(copy) => copy.set(&var.as_detached_tensor())?,
                None => self.copies.push(Var::from_tensor(&var.as_detached_tensor())?),
            }
        }
        self.is_complete = true;
        Ok(())
    }

    /// Restores those for which `is_lost` returns true, if they were copied in this batch.
    pub(crate) fn restore(
        &self,
        buffers: &[(String, Var)],
        is_lost: impl Fn(&Var) -> Result<bool>,
    ) -> Result<()> {
        if !self.is_complete {
            return Ok(());
        }
        for ((_, var), copy) in buffers.iter().zip(&self.copies) {
            if is_lost(var)? {
                var.set(copy)?;
            }
        }
        Ok(())
    }
}

/// Whether all elements are finite; integers are.
pub(crate) fn is_finite(var: &Tensor) -> Result<bool> {
    if !var.dtype().is_float() {
        return Ok(true);
    }
    // Infinity and NaN times 0 are NaN.
    let sum = var.to_dtype(DType::F32)?.affine(0.0, 0.0)?.sum_all()?.to_scalar::<f32>()?;
    Ok(sum == 0.0)
}

/// Broadcasts the values of rank 0 of these variables, which have the same type, by one call.
fn broadcast(vars: &[(String, Var)], group: &ProcessGroup) -> Result<()> {
    let Some((name, first)) = vars.first().filter(|_| group.world_size() > 1) else {
        return Ok(());
    };
    match first.dtype() {
        DType::F32 => of_type::<f32>(vars, group),
        DType::F64 => of_type::<f64>(vars, group),
        DType::F16 => of_type::<f16>(vars, group),
        DType::BF16 => of_type::<bf16>(vars, group),
        DType::I64 => of_type::<i64>(vars, group),
        DType::I32 => of_type::<i32>(vars, group),
        DType::I16 => of_type::<i16>(vars, group),
        DType::U32 => of_type::<u32>(vars, group),
        DType::U8 => of_type::<u8>(vars, group),
        other => Err(Error::InvalidArgument(format!("`{name}` is of {other:?}"))),
    }
}

fn of_type<T: Element + WithDType>(vars: &[(String, Var)], group: &ProcessGroup) -> Result<()> {
    let mut all = Vec::new();
    for (_, var) in vars {
        all.extend(var.flatten_all()?.to_vec1::<T>()?);
    }
    group.broadcast(&mut all, 0)?;
    let mut rest = &all[..];
    for (_, var) in vars {
        let (values, others) = rest.split_at(var.elem_count());
        var.set(&Tensor::from_slice(values, var.shape(), var.device())?)?;
        rest = others;
    }
    Ok(())
}

/// Whether a variable with this name belongs to the model without being trained: PyTorch's names
/// for the statistics of norm layers.
pub fn is_buffer(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var" | "num_batches_tracked")
}
