//! Averages gradients over the ranks during the backward pass, for any optimizer.
//!
//! On the CPU a gradient is copied once, into its bucket, and the all-reduce of a full bucket
//! overlaps with the rest of the backward pass; optimizers read the buckets. On a GPU gradients
//! stay in device memory.
//!
//! Invariant: parameters have the same index on every rank, because they are sorted by name.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use candle_ops::Tape;
use collective::ProcessGroup;
use collective::reducer::ReducerOptions;
use fused_optim::candle::tensor;
use train_step::{Averages, Gradient, ModelWrapper};

use crate::Result;
use crate::backward::ParamIndex;
use crate::tensors::{ModelTensors, check_group, report};
use crate::variables::Variables;

/// Data parallelism for a training loop with any optimizer: every rank has the whole model, and
/// gradients are averaged over the ranks.
///
/// With candle's own `backward`:
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
/// use candle_train::{DataParallel, ReducerOptions};
/// use collective::{GroupOptions, Topology, init_process_group};
///
/// let vars = VarMap::new();
/// let net = candle_nn::linear(4, 1, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let topology = Topology::from_env(|name| std::env::var(name).ok())?;
/// let group = init_process_group(&topology, GroupOptions::default())?;
/// // Broadcasts rank 0's weights.
/// let mut averages = DataParallel::new(&vars, group, ReducerOptions::default())?;
/// let mut adamw = AdamW::new_lr(vars.all_vars(), 1e-3)?; // candle's own
///
/// let loss = net.forward(&Tensor::ones((8, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
/// let mut gradients = loss.backward()?;
/// averages.average(&mut gradients)?;
/// adamw.step(&gradients)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// With a [tape](candle_ops::record()), averaging overlaps with the backward pass:
/// [`backward`](Self::backward).
#[derive(Debug)]
#[doc(alias = "DistributedDataParallel")]
pub struct DataParallel {
    averages: Averages,
    tensors: ModelTensors,
    vars: Vec<Var>,
    index: ParamIndex,
}

impl DataParallel {
    /// Broadcasts the variables of rank 0, and averages the gradients of all floating-point
    /// variables that are in the map now.
    ///
    /// Every rank must call it, with variables of the same names and shapes, and the same options.
    /// Blocks until all ranks have called it.
    ///
    /// # Errors
    ///
    /// The first variable that differs between ranks; a failure of another rank; variables of types
    /// other than `f32`, `f16` and `bf16`.
    pub fn new(vars: &VarMap, group: ProcessGroup, options: ReducerOptions) -> Result<Self> {
        let variables = Variables::of(vars, &[])?;
        let mut tensors = variables.tensors()?;
        check_group(&group, &tensors)?;
        let averages = Averages::new(&mut tensors, group, options)?;
        variables.broadcast(averages.group())?;
        let vars: Vec<Var> = variables.params.iter().map(|(_, var)| var.clone()).collect();
        let index = ParamIndex::new(vars.iter().map(|var| var.id()));
        Ok(Self { averages, tensors, vars, index })
    }

    /// The process group.
    #[must_use]
    pub const fn group(&self) -> &ProcessGroup {
        self.averages.group()
    }

    /// Runs the backward pass of a recorded forward pass. `gradient` is that of the loss: 1, or a
    /// loss scale. With `sync` gradients are averaged during the pass; without it (PyTorch's
    /// `no_sync`) they accumulate on this rank until a pass with `sync`. Gradients accumulate over
    /// passes until [`take`](Self::take).
    ///
    /// Every rank must call it, with the same `sync`. Blocks until the averages are complete.
    ///
    /// # Errors
    ///
    /// [`UnusedParameters`](collective::Error::UnusedParameters) with the names of variables
    /// without a gradient since the last [`take`](Self::take), in a pass with `sync`, unless
    /// [`find_unused_parameters`](ReducerOptions::find_unused_parameters) allows it, or with all
    /// names, if the loss depends on no variable; errors of operators; a failure of another rank.
    /// This rank's gradients are dropped then. With several ranks, an error in a pass with `sync`
    /// aborts the group.
    #[doc(alias = "no_sync")]
    pub fn backward(
        &mut self,
        (tape, loss): (Tape, &Tensor),
        gradient: Tensor,
        sync: bool,
    ) -> Result<()> {
        self.averages.prepare(&mut self.tensors, sync)?;
        let ended = self.index.report((tape, loss), gradient, self.averages.sink());
        self.end(ended)
    }

    /// Ends a pass, or abandons it.
    fn end(&mut self, ended: Result<()>) -> Result<()> {
        let Self { averages, tensors, .. } = self;
        let ended = ended.and_then(|()| {
            averages.check()?;
            Ok(averages.finish(tensors)?)
        });
        ended.inspect_err(|error| averages.abandon(tensors, &error.to_string()))
    }

    /// Averages the gradients returned by candle's own `backward`, in place.
    ///
    /// Every rank must call it. Blocks until the averages are complete.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn average(&mut self, store: &mut GradStore) -> Result<()> {
        self.averages.prepare(&mut self.tensors, true)?;
        let reported = self.take_all(store);
        self.end(reported)?;
        let averages = self.take()?;
        for var in &self.vars {
            match averages.get(var) {
                Some(average) => store.insert(var, average.clone()),
                None => store.remove(var),
            };
        }
        Ok(())
    }

    /// Takes the gradients of a store.
    fn take_all(&self, store: &GradStore) -> Result<()> {
        let sink = self.averages.sink();
        for (index, var) in self.vars.iter().enumerate() {
            if let Some(gradient) = store.get(var) {
                report(&sink, index, gradient.contiguous()?)?;
            }
        }
        Ok(())
    }

    /// Returns the gradients accumulated since the last call, as new tensors, and clears them.
    ///
    /// # Errors
    ///
    /// Memory that cannot be allocated.
    pub fn take(&mut self) -> Result<GradStore> {
        let mut store = GradStore::default();
        self.averages.gradients().with_grads(&mut |gradients| {
            for (var, gradient) in self.vars.iter().zip(gradients) {
                if let Some(gradient) = gradient {
                    store.insert(var, copy(gradient, var)?);
                }
            }
            Ok(())
        })?;
        self.zero_grad();
        Ok(store)
    }

    /// Drops all gradients.
    pub fn zero_grad(&mut self) {
        self.averages.zero_grad();
    }
}

/// A gradient as a tensor in the variable's shape.
fn copy(gradient: &Gradient<'_>, var: &Var) -> train_step::Result<Tensor> {
    match gradient {
        Gradient::Host(slice) => {
            tensor(*slice, var.shape(), var.device()).map_err(train_step::Error::model)
        }
        #[cfg(feature = "cuda")]
        Gradient::Device(gradient) => crate::gpu::to_tensor(*gradient, var),
        #[cfg(not(feature = "cuda"))]
        Gradient::Device(gradient) => Ok(crate::tensors::own(*gradient)?.tensor()),
    }
}
