//! Automatic mixed precision on slices: loss scaling, non-finite checks, casts between f32, f16 and
//! bf16, autocast lists.
//!
//! # Why scale the loss
//!
//! | | exponent bits | significant bits | smallest normal | largest | needs loss scaling |
//! |---|---|---|---|---|---|
//! | f32 | 8 | 24 | 1.2e-38 | 3.4e38 | no |
//! | f16 | 5 | 11 | 6.1e-5 | 65504 | yes |
//! | bf16 | 8 | 8 | 1.2e-38 | 3.4e38 | no |
//!
//! Many gradients are below 6e-8, the smallest positive f16, and underflow. Multiplying the loss by
//! a scale `S` multiplies every gradient by `S`, which moves them into range; the optimizer divides
//! by `S` again, in f32. The largest usable `S` changes during training, so [`LossScaler`] doubles
//! `S` after 2000 steps without overflow; if a gradient overflows to infinity, it halves `S` and
//! that step is skipped. bf16 has the range of f32: use [`LossScaler::disabled`].
//!
//! # Example
//!
//! ```
//! use amp::{LossScaler, LossScalerOptions, has_non_finite};
//! use half::f16;
//!
//! # fn backward(loss_scale: f32) -> Vec<f16> { vec![f16::from_f32(1e-6 * loss_scale); 4] }
//! let mut scaler = LossScaler::new(LossScalerOptions::default())?;
//! let mut weight = [1.0_f32; 4];
//! for _ in 0..3 {
//!     let grads = backward(scaler.scale()); // from the loss times S
//!     let found_inf = has_non_finite(&grads); // after the all-reduce: equal on all ranks
//!     if !found_inf {
//!         let inv_scale = scaler.inv_scale(); // the `grad_scale` of a fused optimizer
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
//! * [`LossScaler`] alone, as above: one optimizer, and gradients that are equal on all ranks. Also
//!   for an optimizer that checks for overflow itself and reports skipped steps.
//! * [`GradScaler`]: several optimizers, gradients unscaled in place to clip them, or checks of the
//!   order of calls. It has the stages and errors of `torch.amp.GradScaler`.
//! * [`OverflowSource`]: ranks with different gradients, or devices that saturate and report an
//!   overflow in a flag.
//! * [`Autocast`]: which operators run in half precision.
//! * [`cast`], [`unscale`], [`has_non_finite`]: functions on slices.
//!
//! # Differences from PyTorch
//!
//! [`Policy::Torch`] reproduces PyTorch's scaler bit for bit and call for call. The default,
//! [`Policy::Guarded`], differs in four edge cases, which its documentation lists. Casts to bf16
//! keep the sign of NaNs, which PyTorch's may lose.

// docs.rs notes at each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod autocast;
mod cast;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
mod error;
mod found_inf;
mod grad_scaler;
#[cfg(feature = "npu")]
pub mod npu;
mod overflow;
mod scaler;
mod unscale;

pub use autocast::{Autocast, Cast, CastRule};
pub use cast::{CastTo, cast};
pub use dtype::DType;
pub use error::{Error, Result};
pub use found_inf::{Element, has_non_finite};
pub use grad_scaler::GradScaler;
pub use overflow::{InValues, OverflowSource};
pub use scaler::{LossScaler, LossScalerOptions, Policy, ScaleChange, ScalerState};
pub use unscale::unscale;

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
