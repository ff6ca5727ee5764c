//! Undoing the loss scale in place.

use crate::{cpu, has_non_finite};

/// Multiplies f32 gradients by `inv_scale` in place, and says whether any was infinite or NaN.
///
/// One pass. The verdict is on the gradients as they came in; with `inv_scale` 1 nothing is
/// written. This is for optimizers that cannot take the factor themselves: handing it to a fused
/// step saves the pass, and half gradients should never be divided in their own type, where small
/// ones vanish.
///
/// With `inv_scale` above 1 a finite gradient can overflow in the product, which the verdict does
/// not see; ask [`has_non_finite`] afterwards.
///
/// Follows: `torch._amp_foreach_non_finite_check_and_unscale_`, bit for bit.
///
/// ```
/// let mut grads = [2.0_f32, -4.0];
/// assert!(!amp::unscale(&mut grads, 0.5));
/// assert_eq!(grads, [1.0, -2.0]);
/// ```
#[must_use = "a step with non-finite gradients must be skipped"]
pub fn unscale(grads: &mut [f32], inv_scale: f32) -> bool {
    if inv_scale == 1.0 { has_non_finite(grads) } else { cpu::unscale(grads, inv_scale) }
}
