//! [`Trainer::step_on`]: a step that is given its batch, and so can be one CUDA graph.

use candle_core::Tensor;
use train_data::Batch;
use train_step::StepContext;

use crate::Result;
use crate::data::Fields;
use crate::inputs::Inputs;
use crate::pass::Pass;
use crate::tensors::ModelTensors;
use crate::trainer::{Step, Trainer};

impl Trainer {
    /// Like [`step`](Self::step), with a batch of a loader: `forward` gets its fields as tensors on
    /// the variables' device, copied as by [`tensor`](Self::tensor). Labels and indices among them
    /// are checked on the host, without a copy from a GPU.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_ops::cross_entropy;
    /// # use candle_train::{AdamWHyper, Trainer};
    /// use candle_train::train_data::{Array, Batch};
    ///
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::linear(2, 4, vb)?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// let batch = Batch::new()
    ///     .with("x", Array::new([2, 2], vec![0_f32, 1.0, 2.0, 3.0])?)
    ///     .with("y", Array::new([2], vec![3_i64, 0])?);
    /// train.step_on(&batch, |fields| {
    ///     cross_entropy(&net.forward(fields.get("x")?)?, fields.get("y")?)
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Steps as CUDA graphs
    ///
    /// With [`compile`](crate::TrainerBuilder::compile) in the modes `ReduceOverhead` and
    /// `MaxAutotune`, on a GPU opened by [`cuda_device`](crate::cuda_device()), forward, backward
    /// and optimizer step are one CUDA graph for each set of shapes of the batch. `forward` is then
    /// called only for the first batches of each set: two steps run eagerly, the third is captured,
    /// the next one with other values is compared with the graph, bit for bit, and from then on the
    /// graph is launched. Several ranks and accumulation have a graph of forward and backward.
    ///
    /// * Each closure of the program has graphs of its own. Statistics of norm layers of another
    ///   trainer's model, which `forward` runs in training mode, are updated twice in the compared
    ///   step.
    /// * No other thread may use the device during a step: its work would become part of the graph.
    /// * All values that are not computed from fields, variables and statistics of norm layers stay
    ///   as captured: numbers of the host, random numbers, the text of a condition. The comparison
    ///   detects those that have changed by then.
    /// * Tensors that `forward` refers to, other than variables, have to live as long as the
    ///   trainer, such as a table of positions. A tensor made for this batch has to be a field.
    /// * Random numbers drawn on the host (by `rand`, `randn`, `gumbel_softmax`; dropout draws in
    ///   its kernel), copies to the host, and a device that tracks events prevent graphs: steps
    ///   stay eager, and [`compile_report`](Self::compile_report) has the reason, which is an error
    ///   with `fullgraph`.
    ///
    /// # Errors
    ///
    /// The errors of [`step`](Self::step); a type of the batch that candle does not have; with
    /// graphs, a tensor made by `forward` that outlives the step, and, with `fullgraph`, the reason
    /// why a step cannot be captured.
    #[doc(alias = "CUDA graph")]
    pub fn step_on(
        &mut self,
        batch: &Batch,
        forward: impl Fn(&Fields) -> candle_core::Result<Tensor>,
    ) -> Result<Step> {
        self.train(None, |pass, tensors, cx| pass.run_on(batch, forward, tensors, cx))
            .map_err(|error| self.failed("step_on", error))
    }

    /// Like [`step_on`](Self::step_on), for a loss that is the mean of `count` tokens or samples,
    /// see [`step_weighted`](Self::step_weighted).
    ///
    /// # Errors
    ///
    /// The errors of [`step_on`](Self::step_on); counts that are all 0.
    pub fn step_on_weighted(
        &mut self,
        count: usize,
        batch: &Batch,
        forward: impl Fn(&Fields) -> candle_core::Result<Tensor>,
    ) -> Result<Step> {
        self.train(Some(count), |pass, tensors, cx| pass.run_on(batch, forward, tensors, cx))
            .map_err(|error| self.failed("step_on_weighted", error))
    }
}

impl Pass<'_> {
    /// Runs the passes on the fields of a batch, as a graph if `compile` asked for it.
    #[cfg(feature = "cuda")]
    fn run_on(
        mut self,
        batch: &Batch,
        forward: impl Fn(&Fields) -> candle_core::Result<Tensor>,
        tensors: &ModelTensors,
        cx: &mut StepContext<'_>,
    ) -> Result<Tensor> {
        let Some((graphs, buffers)) = self.graphs.take().filter(|_| self.counts) else {
            return self.run(|inputs| eager(inputs, batch, &forward), tensors, cx);
        };
        self.begin(tensors, &mut |inputs| eager(inputs, batch, &forward))?;
        let model = cuda::OnBatch { tensors, buffers, recorder: self.recorder, forward };
        let loss = self.context.enter(|| graphs.step(&model, batch, cx));
        if let Some(note) = cx.note.take() {
            tracing::info!(target: "candle_train", "{note}");
        }
        loss
    }

    #[cfg(not(feature = "cuda"))]
    fn run_on(
        self,
        batch: &Batch,
        forward: impl Fn(&Fields) -> candle_core::Result<Tensor>,
        tensors: &ModelTensors,
        cx: &StepContext<'_>,
    ) -> Result<Tensor> {
        self.run(|inputs| eager(inputs, batch, &forward), tensors, cx)
    }
}

/// Runs a forward pass on a batch.
fn eager(
    inputs: &Inputs,
    batch: &Batch,
    forward: impl Fn(&Fields) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let fields = inputs.fields(batch)?;
    fields.with_known(batch, || forward(&fields))
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::cell::RefCell;
    use std::rc::Rc;

    use candle_core::Tensor;
    use train_data::Batch;
    use train_step::{BoxError, StepContext};

    use super::eager;
    use crate::data::Fields;
    use crate::graph::{Computed, GraphModel, Scalars};
    use crate::inputs::Inputs;
    use crate::pass::Recorder;
    use crate::tensors::{ModelTensors, Tensors};
    use crate::{Error, Result};

    /// The variables, with the forward pass of a batch.
    pub(super) struct OnBatch<'a, F> {
        pub(super) tensors: &'a ModelTensors,
        pub(super) buffers: &'a Tensors,
        pub(super) recorder: Recorder<'a>,
        pub(super) forward: F,
    }

    fn call<F>(forward: &F, fields: &Fields) -> candle_core::Result<Tensor>
    where
        F: Fn(&Fields) -> candle_core::Result<Tensor>,
    {
        forward(fields)
    }

    impl<F: Fn(&Fields) -> candle_core::Result<Tensor>> GraphModel for OnBatch<'_, F> {
        type Error = Error;
        type Loss = Tensor;

        fn error(text: String, _: Option<BoxError>) -> Error {
            Error::Step(train_step::Error::model(text))
        }

        fn tensors(&self) -> &ModelTensors {
            self.tensors
        }

        fn buffers(&self) -> &Tensors {
            self.buffers
        }

        fn pass(&self) -> usize {
            // Its address differs between closures, unless they have the same code.
            let address: fn(&F, &Fields) -> candle_core::Result<Tensor> = call;
            address as usize
        }

        fn inputs(&self) -> &Inputs {
            self.recorder.inputs
        }

        fn step(&self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Tensor> {
            let forward = || eager(self.recorder.inputs, batch, &self.forward);
            let (loss, tape) = self.recorder.record(forward)?;
            self.recorder.report((tape, &loss), cx)?;
            Ok(loss)
        }

        fn compute(&self, fields: &Fields, scale: &Tensor) -> Result<Computed> {
            let (loss, tape) = self.recorder.record(|| call(&self.forward, fields))?;
            let gradient = scale.broadcast_as(loss.shape())?.to_dtype(loss.dtype())?;
            let grads = Rc::<RefCell<Vec<_>>>::default();
            let kept = Rc::clone(&grads);
            let ready = move |index, gradient| {
                kept.borrow_mut().push((index, gradient));
                Ok(())
            };
            self.recorder.index.backward((tape, &loss), gradient, ready, Error::Candle)?;
            let scalars = Scalars { names: vec!["loss".to_owned()], values: loss.detach() };
            Ok(Computed { scalars, grads: grads.take() })
        }

        fn losses(&self, scalars: &Scalars) -> Result<Tensor> {
            Ok(scalars.values.copy()?)
        }
    }
}
