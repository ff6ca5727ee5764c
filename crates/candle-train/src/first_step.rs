//! The check of gradients in a trainer's first step, and that of all of them.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use amp::Autocast;
use candle_core::{DType, Device, Tensor};
use candle_ops::context::{random_position, set_random_position};
use collective::{ProcessGroup, ReduceOp};
use tracing::warn;
use train_step::WrongGradient;

use crate::age::check_age;
use crate::backward::ParamIndex;
use crate::gradient_check::{Compared, Repeatable, check, compare, number};
use crate::tensors::{ModelTensors, Tensors};
use crate::variables::{Statistics, Variables};
use crate::{Error, Result};

/// A forward pass of a program, without autocast, from the same state each time.
struct Repeated<'a> {
    params: &'a Tensors,
    variables: &'a Variables,
    index: &'a ParamIndex,
    statistics: Statistics,
    random_position: u64,
    forward: &'a mut dyn FnMut() -> candle_core::Result<Tensor>,
}

impl<'a> Repeated<'a> {
    fn new(
        (tensors, variables, index): (&'a ModelTensors, &'a Variables, &'a ParamIndex),
        forward: &'a mut dyn FnMut() -> candle_core::Result<Tensor>,
    ) -> Result<Self> {
        let mut statistics = Statistics::default();
        statistics.copy(&variables.buffers)?;
        let params = &tensors.params;
        let random_position = random_position();
        Ok(Self { params, variables, index, statistics, random_position, forward })
    }
}

impl Repeatable for Repeated<'_> {
    type Error = Error;

    fn params(&self) -> &Tensors {
        self.params
    }

    fn restore(&self) -> candle_core::Result<()> {
        set_random_position(self.random_position);
        let restored = self.statistics.restore(&self.variables.buffers, |_| Ok(true));
        restored.map_err(candle_core::Error::wrap)
    }

    fn loss(&mut self) -> Result<Tensor> {
        let none = Autocast::cpu().with_enabled(false);
        let loss = candle_ops::autocast(&none, &mut self.forward)?;
        if loss.elem_count() != 1 {
            return Err(candle_core::Error::msg("a loss of several elements").into());
        }
        Ok(loss)
    }

    fn gradients(&mut self) -> Result<(Tensor, Vec<(usize, Tensor)>)> {
        let begin = Tensor::zeros((), DType::U8, &Device::Cpu)?;
        let (loss, tape) = candle_ops::record(|| self.loss());
        let loss = loss?;
        check_age(&loss, &tape, &begin)?;
        let gradients = Rc::<RefCell<Vec<_>>>::default();
        let kept = Rc::clone(&gradients);
        let ready = move |index, gradient| {
            kept.borrow_mut().push((index, gradient));
            Ok(())
        };
        self.index.backward((tape, &loss), loss.ones_like()?, ready, Error::Candle)?;
        Ok((loss.detach(), gradients.take()))
    }

    fn failed(error: candle_core::Error) -> Error {
        error.into()
    }
}

/// Checks the gradients of a forward pass of all ranks, if it can be repeated: its values are equal
/// when it runs again. Each rank calls `forward` equally often, whether its batch counts or not,
/// and the number of calls depends on the model alone. Must be called within the context of
/// training.
pub(crate) fn check_first_step(
    model: (&ModelTensors, &Variables, &ParamIndex),
    group: &ProcessGroup,
    counts: bool,
    forward: &mut dyn FnMut() -> candle_core::Result<Tensor>,
) -> Result<()> {
    let params = &model.0.params;
    let elements: usize = params.specs.iter().map(train_step::TensorSpec::count).sum();
    let is_wide = params.tensors.iter().all(|tensor| tensor.dtype() == DType::F32);
    if elements > MAX_ELEMENTS || !is_wide {
        return Ok(());
    }
    let mut pass = Repeated::new(model, forward)?;
    let begin = Instant::now();
    let differs = differs(&mut pass)? && counts;
    if agree(group, u8::from(differs).into(), ReduceOp::Max)? == 0.0 {
        return Ok(());
    }
    // Each parameter takes four passes, like the comparison.
    let seconds = agree(group, begin.elapsed().as_secs_f64(), ReduceOp::Max)?;
    let limit = (MAX_SECONDS_TO_NAME / seconds) as usize + 1;
    let wrong = check(&mut pass, |index, _| index < limit);
    match wrong.map(|wrong| if differs { wrong } else { Vec::new() }) {
        Ok(wrong) if !wrong.is_empty() => Err(Error::WrongGradients(wrong)),
        // The larger check allows for kinks of the loss.
        Ok(_) if limit >= params.tensors.len() => Ok(()),
        Ok(_) => {
            warn!(
                "gradients may not match the loss; `Trainer::check_gradients` checks all of them"
            );
            Ok(())
        }
        Err(_) => Ok(()),
    }
}

/// Whether the loss changes otherwise than the gradients say, in four passes. False if they fail or
/// cannot be repeated.
fn differs(pass: &mut Repeated<'_>) -> Result<bool> {
    let first = pass.gradients();
    pass.restore()?;
    let Ok((loss, gradients)) = first else { return Ok(false) };
    let loss = number(&loss)?;
    let again = pass.loss().and_then(|loss| Ok(number(&loss)?));
    pass.restore()?;
    let precision = match pass.params.tensors[0].device().is_cuda() && candle_ops::allows_tf32() {
        true => (3e-2, 2f64.powi(-11)),
        false => (3e-4, 2f64.powi(-24)),
    };
    let compared = compare(pass, (loss, 1.0), &gradients, precision)?;
    if compared == Compared::NotFinite {
        // As many passes as on the other ranks.
        let _unused = [pass.loss(), pass.loss()];
        pass.restore()?;
    }
    let is_same = again.is_ok_and(|again| again.to_bits() == loss.to_bits());
    Ok(is_same && matches!(compared, Compared::Different { .. }))
}

/// Checks the gradient of each trained variable.
pub(crate) fn check_all(
    model: (&ModelTensors, &Variables, &ParamIndex),
    forward: &mut dyn FnMut() -> candle_core::Result<Tensor>,
) -> Result<Vec<WrongGradient>> {
    let mut params = model.1.params.iter();
    if let Some((name, var)) = params.find(|(_, var)| var.dtype() != DType::F32) {
        let text = format!("`{name}` is of {:?}: gradients are checked in f32", var.dtype());
        return Err(Error::InvalidArgument(text));
    }
    check(&mut Repeated::new(model, forward)?, |_, _| true)
}

/// Combines a number of each rank.
fn agree(group: &ProcessGroup, own: f64, op: ReduceOp) -> Result<f64> {
    let mut all = [own];
    group.all_reduce(&mut all, op)?;
    Ok(all[0])
}

/// Number of elements up to which gradients are checked without being asked for. Not a time: the
/// number of passes, which may change more than they restore, has to be equal in each run.
const MAX_ELEMENTS: usize = 5_000_000;

/// Time to find the names of parameters with wrong gradients.
const MAX_SECONDS_TO_NAME: f64 = 10.0;
