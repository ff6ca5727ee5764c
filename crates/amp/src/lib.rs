//! Automatic mixed precision: dynamic loss scaling, non-finite checks, casts between f32, f16 and
//! bf16. No tensor type: slices and numbers.
//!
//! # Why scale the loss
//!
//! | | exponent bits | significant bits | smallest normal | largest | needs loss scaling |
//! |---|---|---|---|---|---|
//! | f32 | 8 | 24 | 1.2e-38 | 3.4e38 | no |
//! | f16 | 5 | 11 | 6.1e-5 | 65504 | yes |
//! | bf16 | 8 | 8 | 1.2e-38 | 3.4e38 | no |
//!
//! Gradients of a trained network are small; many lie below 6e-8, the least f16 can hold, and
//! vanish. Multiplying the loss by a scale `S` multiplies every gradient by `S` and lifts them into
//! range; the optimizer divides by `S` again, in f32. How large `S` may be changes during
//! training, so [`LossScaler`] probes: it doubles `S` after 2000 good steps, and when a gradient
//! overflows to infinity it halves `S`, and that step is skipped. bf16 has the range of f32: use
//! [`LossScaler::disabled`].
//!
//! # The step in six lines
//!
//! ```
//! use amp::{LossScaler, LossScalerOptions, has_non_finite};
//! use half::f16;
//!
//! # fn backward(loss_scale: f32) -> Vec<f16> { vec![f16::from_f32(1e-6 * loss_scale); 4] }
//! let mut scaler = LossScaler::new(LossScalerOptions::default())?;
//! let mut weight = [1.0_f32; 4];
//! for _ in 0..3 {
//!     let grads = backward(scaler.scale()); // the loss, and so every gradient, times S
//!     let found_inf = has_non_finite(&grads); // after the all-reduce: the same on every rank
//!     if !found_inf {
//!         let inv_scale = scaler.inv_scale(); // a fused optimizer takes it as `grad_scale`
//!         weight.iter_mut().zip(&grads).for_each(|(w, g)| *w -= 0.1 * g.to_f32() * inv_scale);
//!     }
//!     scaler.update(found_inf)?;
//! }
//! assert!(weight[0] < 1.0);
//! # Ok::<(), amp::Error>(())
//! ```
//!
//! # Which to use
//!
//! * [`LossScaler`] alone, as above: one optimizer, and gradients that are the same on every rank.
//!   An optimizer that looks by itself and reports whether it skipped fits, too.
//! * [`GradScaler`] around it: several optimizers, gradients unscaled in place to clip them, or
//!   calls that come from someone else's code in some order. It keeps the stages of
//!   `torch.amp.GradScaler` and refuses what PyTorch refuses.
//! * An [`OverflowSource`] in it: where each rank sees only its part of the gradients, and where a
//!   device saturates and shows overflow in a flag instead of the values.
//! * [`Autocast`]: which operators are to run in half precision at all.
//! * [`cast`], [`unscale`], [`has_non_finite`]: the passes over memory.
//!
//! # Where we differ from PyTorch
//!
//! The rules and the numbers are PyTorch's, and [`Policy::Torch`] reproduces its scaler bit for bit
//! and call for call. The default, [`Policy::Guarded`], differs at four edges; its documentation is
//! the table of them. bf16 NaNs keep their sign, which PyTorch's cast may lose.

mod autocast;
mod cast;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod found_inf;
mod grad_scaler;
#[cfg(feature = "npu")]
pub mod npu;
mod overflow;
mod scaler;
mod unscale;

pub use autocast::{Autocast, Cast, CastRule, DType};
pub use cast::{CastTo, cast};
pub use error::{Error, Result};
pub use found_inf::{Element, has_non_finite};
pub use grad_scaler::GradScaler;
pub use overflow::{InValues, OverflowSource};
pub use scaler::{LossScaler, LossScalerOptions, Policy, ScaleChange, ScalerState};
pub use unscale::unscale;
