//! Input and output tensors of a captured step, which have fixed addresses.

use std::sync::{Arc, Weak};

use candle_core::{Tensor, bail};
use candle_ops::context::{random_position, with_random_base};
use candle_ops::known_inputs::IndexCheck;
use parking_lot::Mutex;
use train_data::{ArrayData, Batch};
use train_step::SharedSink;

use super::{GraphModel, failed};
use crate::data::Fields;
use crate::tensors::{OnDevice, report, set};

/// Gradients by parameter index, in order of backward.
pub type Gradients = Vec<(usize, Tensor)>;

/// Scalars for the log, on the device that computed them: the loss, and others.
#[derive(Debug)]
pub struct Scalars {
    /// Their names.
    pub names: Vec<String>,
    /// Their values, in one tensor.
    pub values: Tensor,
}

/// Results of a forward and a backward pass.
#[derive(Debug)]
pub struct Computed {
    /// The loss and other scalars.
    pub scalars: Scalars,
    /// The gradients.
    pub grads: Gradients,
}

impl Computed {
    pub(super) fn report<M: GraphModel>(
        self,
        model: &M,
        sink: &SharedSink,
    ) -> Result<M::Loss, M::Error> {
        let losses = model.losses(&self.scalars)?;
        for (index, grad) in self.grads {
            report(sink, index, grad)?;
        }
        Ok(losses)
    }
}

/// Input tensors of a captured step.
#[derive(Debug)]
pub(super) struct Inputs {
    fields: Fields,
    scale: Tensor,
    /// The position of random numbers at the step's beginning.
    position: Tensor,
}

impl Inputs {
    pub(super) fn new<M: GraphModel>(
        model: &M,
        batch: &Batch,
        scale: f32,
    ) -> Result<Self, M::Error> {
        let to = model.inputs();
        let scale = Tensor::new(scale, to.device()).map_err(|e| failed::<M>("loss scale", e))?;
        let position = Tensor::new(&[position()], to.device());
        let position = position.map_err(|e| failed::<M>("random numbers", e))?;
        let fields = to.fields(batch).map_err(|e| failed::<M>("batch", e))?;
        Ok(Self { fields, scale, position })
    }

    pub(super) fn fill<M: GraphModel>(
        &self,
        model: &M,
        batch: &Batch,
        scale: f32,
    ) -> Result<(), M::Error> {
        let to = model.inputs();
        let mut pairs = self.fields.iter().zip(batch.iter());
        pairs
            .try_for_each(|((_, tensor), (_, array))| to.fill(tensor, array.data()))
            .and_then(|()| to.fill(&self.scale, &ArrayData::F32(vec![scale])))
            .and_then(|()| to.fill(&self.position, &ArrayData::I64(vec![position()])))
            .map_err(|e| failed::<M>("batch", e))
    }

    /// Runs forward and backward on these tensors, whose contents are those of `batch` and of the
    /// present position. Also returns the number of random words that kernels have drawn.
    pub(super) fn compute<M: GraphModel>(
        &self,
        model: &M,
        batch: &Batch,
    ) -> Result<(Computed, u64), M::Error> {
        let call = || model.compute(&self.fields, &self.scale);
        let call = || self.fields.with_known(batch, call);
        let (computed, drawn) = with_random_base(&self.position, call);
        Ok((computed?, drawn))
    }

    /// As [`compute`](Self::compute), in a capture.
    pub(super) fn capture<M: GraphModel>(
        &self,
        model: &M,
        batch: &Batch,
    ) -> Result<(Computed, Vec<IndexCheck>), M::Error> {
        let call = || model.compute(&self.fields, &self.scale);
        let call = || self.fields.in_capture(batch, call);
        let ((computed, checks), _) = with_random_base(&self.position, call);
        Ok((computed?, checks))
    }
}

/// The position of random numbers, as the kernels read it.
fn position() -> i64 {
    random_position().cast_signed()
}

/// Output tensors of a captured step.
#[derive(Debug)]
pub(super) struct Outputs {
    pub(super) own: Computed,
    /// Gradients that were reported.
    lent: Vec<(usize, Weak<Mutex<Tensor>>)>,
}

impl Outputs {
    pub(super) fn like(computed: &Computed) -> candle_core::Result<Self> {
        let own = |(index, grad): &(usize, Tensor)| Ok((*index, grad.zeros_like()?));
        let grads = computed.grads.iter().map(own).collect::<candle_core::Result<_>>()?;
        let Scalars { names, values } = &computed.scalars;
        let scalars = Scalars { names: names.clone(), values: values.zeros_like()? };
        let outputs = Self { own: Computed { scalars, grads }, lent: Vec::new() };
        outputs.take(computed)?;
        Ok(outputs)
    }

    /// Copies the results of a step.
    pub(super) fn take(&self, computed: &Computed) -> candle_core::Result<()> {
        let Self { own, .. } = self;
        let order = |of: &Computed| of.grads.iter().map(|(i, _)| *i).collect::<Vec<_>>();
        if order(own) != order(computed) || own.scalars.names != computed.scalars.names {
            bail!("the step computes different gradients each time");
        }
        set(&own.scalars.values, &computed.scalars.values)?;
        let mut pairs = own.grads.iter().zip(&computed.grads);
        pairs.try_for_each(|((_, to), (_, from))| set(to, from))
    }

    /// Copies gradients that are still in use, because the next launch overwrites them.
    pub(super) fn part(&mut self) -> candle_core::Result<()> {
        for (at, lent) in self.lent.drain(..) {
            let Some(kept) = lent.upgrade() else { continue };
            let mut kept = kept.lock();
            // A sum has its own memory already.
            if kept.id() == self.own.grads[at].1.id() {
                *kept = kept.copy()?;
            }
        }
        Ok(())
    }

    pub(super) fn report(&mut self, sink: &SharedSink) -> train_step::Result<()> {
        for (at, (index, grad)) in self.own.grads.iter().enumerate() {
            let grad = OnDevice::new(grad.clone());
            self.lent.push((at, Arc::downgrade(&grad.0)));
            sink.lock().ready_on_device(*index, Box::new(grad))?;
        }
        Ok(())
    }
}

pub(super) fn same_bits(a: &Tensor, b: &Tensor) -> candle_core::Result<bool> {
    let bytes = |tensor: &Tensor| {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).map(|()| bytes)
    };
    Ok(bytes(a)? == bytes(b)?)
}
