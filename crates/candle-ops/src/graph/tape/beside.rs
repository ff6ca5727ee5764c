//! Values that an operator's backward pass leaves beside a gradient for the next operator of the
//! tape.

use candle_core::Tensor;

use super::PASS;

/// Whether a tape's backward pass runs, in which [`take`] finds what was left.
pub(crate) fn is_taken() -> bool {
    PASS.with_borrow(Option::is_some)
}

/// Leaves a tensor that belongs to a gradient, until another is left or the pass ends. If the
/// gradient is added to another one, the sum is another tensor, for which nothing is left.
pub(crate) fn leave(gradient: &Tensor, with: Tensor) {
    PASS.with_borrow_mut(|pass| {
        if let Some(pass) = pass {
            pass.beside = Some((gradient.id(), with));
        }
    });
}

/// Takes what was left last, if it belongs to this gradient.
pub(crate) fn take(gradient: &Tensor) -> Option<Tensor> {
    PASS.with_borrow_mut(|pass| {
        let left = pass.as_mut()?.beside.take_if(|(id, _)| *id == gradient.id());
        left.map(|(_, with)| with)
    })
}
