//! Unscales gradients in place.

use crate::{cpu, has_non_finite};

/// Multiplies f32 gradients by `inv_scale` in place, and returns whether any was infinite or NaN.
///
/// One pass, which checks the gradients before the multiplication; with `inv_scale` 1 it writes
/// nothing. For optimizers that take no factor: passing it to a fused step saves this pass. Half
/// gradients should never be unscaled in their own type, where small ones underflow.
///
/// With `inv_scale` above 1 the product of a finite gradient can overflow, which the result does
/// not include; call [`has_non_finite`] afterwards.
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
