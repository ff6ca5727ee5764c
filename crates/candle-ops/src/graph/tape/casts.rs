//! Casts on a tape. One of a leaf is done once per forward pass, within which the values of a leaf
//! do not change. One of a result may be prepared by the operator that computes the result.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor, TensorId};

#[cfg(feature = "cuda")]
use super::REPEATS;
use super::{RECORDING, Tape};

/// The casts on a tape.
#[derive(Default)]
pub(super) struct Casts {
    /// The casts by leaf and type.
    of_leaves: HashMap<(TensorId, DType), Tensor>,
    /// The leaf of each cast.
    leaves: HashMap<TensorId, Tensor>,
    /// The casts by result and type that [`prepare`] has made and nobody has used.
    prepared: HashMap<(TensorId, DType), Tensor>,
}

/// Casts `x` by `cast`, unless the cast is [prepared](prepare); a leaf only once per tape.
pub(crate) fn cast_once(
    x: &Tensor,
    dtype: DType,
    cast: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    let key = (x.id(), dtype);
    let known = RECORDING.with_borrow_mut(|tape| {
        let casts = &mut tape.as_mut()?.casts;
        casts.prepared.remove(&key).or_else(|| casts.of_leaves.get(&key).cloned())
    });
    if let Some(known) = known {
        return Ok(known);
    }
    let y = cast()?;
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape.as_mut().filter(|tape| tape.is_leaf(x)) {
            tape.casts.of_leaves.insert(key, y.clone());
            tape.casts.leaves.insert(y.id(), x.clone());
        }
    });
    Ok(y)
}

/// Whether operators are recorded: those of a forward pass whose gradients are wanted.
#[cfg(feature = "cuda")]
pub(crate) fn is_recording() -> bool {
    RECORDING.with_borrow(|tape| tape.as_ref().is_some_and(|tape| tape.repeats <= REPEATS))
}

/// Prepares the cast of a result for the first [`cast_once`] that wants it, by an operator of the
/// tape. Unlike other operators it may pass its gradient on in its own type: the result's operator
/// widens it, or its sum with others does. A second cast is one of its own, so that gradients are
/// never added in the narrower type. Without a tape there is none.
#[cfg(feature = "cuda")]
pub(crate) fn prepare(y: &Tensor, cast: impl FnOnce() -> Result<Tensor>) -> Result<()> {
    let is_made = || {
        RECORDING
            .with_borrow(|tape| tape.as_ref().is_some_and(|tape| tape.made.contains_key(&y.id())))
    };
    if !is_made() {
        return Ok(());
    }
    let half = cast()?;
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape.as_mut().filter(|tape| tape.made.contains_key(&half.id())) {
            tape.casts.prepared.insert((y.id(), half.dtype()), half);
        }
    });
    Ok(())
}

/// The leaf that [`cast_once`] cast to this tensor. An operator with the cast as input may use the
/// leaf as input instead, and return its gradient without another cast.
#[cfg(feature = "cuda")]
pub(crate) fn leaf_of_cast(cast: &Tensor) -> Option<Tensor> {
    RECORDING.with_borrow(|tape| tape.as_ref()?.casts.leaves.get(&cast.id()).cloned())
}

impl Tape {
    /// Whether the tensor is a [`Var`] or belongs to [`Sources`].
    fn is_leaf(&self, x: &Tensor) -> bool {
        let is_source = || self.root.is_some() && self.is_source(&x.sorted_nodes());
        x.is_variable() || (!self.made.contains_key(&x.id()) && x.track_op() && is_source())
    }
}
