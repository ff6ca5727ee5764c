//! Casts of leaves on a tape: each is done once per forward pass, within which the values of a leaf
//! do not change.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor, TensorId};

use super::{RECORDING, Tape};

/// The casts on a tape.
#[derive(Default)]
pub(super) struct Casts {
    /// The casts by leaf and type.
    of_leaves: HashMap<(TensorId, DType), Tensor>,
    /// The leaf of each cast.
    leaves: HashMap<TensorId, Tensor>,
}

/// Casts `x` by `cast`; a leaf only once per tape.
pub(crate) fn cast_once(
    x: &Tensor,
    dtype: DType,
    cast: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    let key = (x.id(), dtype);
    let known = RECORDING.with_borrow(|tape| tape.as_ref()?.casts.of_leaves.get(&key).cloned());
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
