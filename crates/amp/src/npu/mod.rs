//! Non-finite checks, unscaling, casts and the overflow flag on an Ascend NPU (feature `npu`).
//!
//! The loss scale itself is on the host, in a [`LossScaler`] or [`GradScaler`](crate::GradScaler),
//! since the host needs `found_inf` anyway to skip a step. CANN's `aclnnAmpUpdateScale`, which
//! keeps the scale on the device, is bound in npu-sys but not called: it lacks [the
//! floor](crate::Policy::Guarded) and would save no copy to the host.
//!
//! * [`unscale`] checks f32 gradients and divides them by the scale: by
//!   `aclnnForeachNonFiniteCheckAndUnscale` if CANN has it (8.1 does not declare it, 8.5 does) and
//!   the chip is of the second generation, else by other operators; in both cases with one copy to
//!   the host.
//! * [`has_non_finite`] checks gradients of f32, f16 and bf16.
//! * [`DeviceOverflow`] is the [`OverflowSource`] for every chip. On chips of the first generation
//!   (Ascend 910A and older) f16 saturates at 65504, so an overflow is visible only in the device's
//!   overflow flag. An all-reduce passes no infinity to other ranks either, so `found_inf` is
//!   reduced by a closure.
//! * [`cast`] calls `aclnnCast`.
//!
//! ```no_run
//! use amp::npu::{DeviceOverflow, Operators, has_non_finite};
//! use amp::{Error, GradScaler, LossScaler, LossScalerOptions};
//! # fn all_reduce_max(_: &mut [u8]) -> Result<(), Error> { Ok(()) }
//!
//! let on = Operators::open(0)?;
//! let source = DeviceOverflow::new(on.clone(), |local: Option<bool>| {
//!     let mut word = [local.map_or(0, |found| 1 + u8::from(found))];
//!     all_reduce_max(&mut word)?;
//!     Ok::<_, Error>([None, Some(false), Some(true)][usize::from(word[0])])
//! });
//! let mut scaler = GradScaler::new(LossScaler::new(LossScalerOptions::default())?, source);
//! let loss_scale = scaler.scale()?; // clears the flag; then backward
//! # let grads = [];
//! let found = has_non_finite(&on, &grads)?;
//! if let Some(grad_scale) = scaler.step(0, || found)? {
//!     // the optimizer's step
//! #   let _ = (loss_scale, grad_scale);
//! }
//! scaler.update()?;
//! # Ok::<(), amp::Error>(())
//! ```
//!
//! **Not tested on Ascend hardware**: the tests use a simulator that enforces the rules of CANN's
//! documentation.

use half::{bf16, f16};
use npu_sys::safe::Buffer;
pub use npu_sys::safe::{Operators, View};
use npu_sys::sys::AclDataType;

use crate::{Error, LossScaler, OverflowSource, Result};

/// Bytes between the results of two gradients.
const STRIDE: usize = 32;

/// Returns whether any element of any view is infinite or NaN; `None` if all views are empty. One
/// copy to the host, which waits for the stream.
///
/// Sums the products of all elements and zero: the sum is finite exactly if all elements are.
///
/// # Errors
///
/// [`Error::Unsupported`] for other types than f32, f16 and bf16; [`Error::Npu`].
pub fn has_non_finite(on: &Operators, grads: &[View]) -> Result<Option<bool>> {
    let grads: Vec<&View> = grads.iter().filter(|grad| grad.count() > 0).collect();
    let Some(most) = grads.iter().map(|grad| grad.bytes()).max() else { return Ok(None) };
    for grad in &grads {
        known(on, grad.dtype())?;
    }
    let scratch = Buffer::new(on.context(), most)?;
    let sums = Buffer::new(on.context(), STRIDE * grads.len())?;
    on.stream().fill(&sums, 0, STRIDE * grads.len(), 0)?;
    for (at, grad) in grads.iter().enumerate() {
        let products = View::new(&scratch, 0, &[grad.count()], grad.dtype())?;
        on.muls(&products, &grad.shaped(&[grad.count()])?, 0.0)?;
        on.row_sums(&View::new(&sums, STRIDE * at, &[1], grad.dtype())?, &products)?;
    }
    let mut bytes = vec![0; STRIDE * grads.len()];
    on.stream().download(&sums, 0, &mut bytes)?;
    let each = bytes.chunks(STRIDE).zip(grads);
    Ok(each.map(|(bytes, grad)| !is_finite(bytes, grad.dtype())).max())
}

/// Divides f32 gradients by the scale of `scaler`, in place, and returns whether any was infinite
/// or NaN; `None` if there are none. One copy to the host, or two if a scale below 1 may overflow
/// the quotient ([`LossScaler::unscale`]); with a scale of 1 nothing is written.
///
/// # Errors
///
/// [`Error::Unsupported`] for half gradients, of which small ones would underflow; [`Error::Npu`],
/// after which some gradients may be divided.
pub fn unscale(on: &Operators, grads: &[View], scaler: &LossScaler) -> Result<Option<bool>> {
    if grads.iter().any(|grad| grad.dtype() != AclDataType::FLOAT) {
        return Err(Error::Unsupported { what: "unscaling half gradients in place" });
    }
    let inv_scale = scaler.inv_scale();
    if inv_scale == 1.0 || !inv_scale.is_finite() {
        return has_non_finite(on, grads);
    }
    let operator = "aclnnForeachNonFiniteCheckAndUnscale";
    let seen = if on.soc().is_second_generation() && on.has(operator) {
        unscale_lists(on, grads, inv_scale)?
    } else {
        let seen = has_non_finite(on, grads)?;
        grads.iter().try_for_each(|grad| on.muls(grad, grad, inv_scale))?;
        seen
    };
    if seen == Some(false) && inv_scale > 1.0 && scaler.is_guarded() {
        return has_non_finite(on, grads);
    }
    Ok(seen)
}

fn unscale_lists(on: &Operators, grads: &[View], inv_scale: f32) -> Result<Option<bool>> {
    let grads: Vec<View> = grads.iter().filter(|grad| grad.count() > 0).cloned().collect();
    if grads.is_empty() {
        return Ok(None);
    }
    let (found, scale) = (on.alloc(1, AclDataType::FLOAT)?, on.alloc(1, AclDataType::FLOAT)?);
    on.zero(&found)?;
    on.fill(&scale, inv_scale)?;
    for some in grads.chunks(Operators::MAX_NORMS) {
        on.non_finite_check_and_unscale(some, &found, &scale)?;
    }
    Ok(Some(on.read(&found)?.iter().any(|byte| *byte != 0)))
}

/// Casts `from` to the type of `to`, rounded to nearest even; enqueued on the stream.
///
/// # Errors
///
/// [`Error::LengthMismatch`]; [`Error::Unsupported`] for other types than f32, f16 and bf16, and
/// for bf16 on chips of the first generation; [`Error::Npu`].
pub fn cast(on: &Operators, from: &View, to: &View) -> Result<()> {
    let (expected, got) = (from.count(), to.count());
    if got != expected {
        return Err(Error::LengthMismatch { expected, got });
    }
    known(on, from.dtype())?;
    known(on, to.dtype())?;
    Ok(on.cast(&to.shaped(&[got])?, &from.shaped(&[got])?)?)
}

/// Rejects types that the chip's operators do not support.
fn known(on: &Operators, dtype: AclDataType) -> Result<()> {
    match dtype {
        AclDataType::FLOAT | AclDataType::FLOAT16 => Ok(()),
        AclDataType::BF16 if on.soc().is_second_generation() => Ok(()),
        AclDataType::BF16 => Err(Error::Unsupported { what: "bf16 on this chip" }),
        _ => Err(Error::Unsupported { what: "a type other than f32, f16 and bf16" }),
    }
}

/// Whether the first element is finite.
fn is_finite(bytes: &[u8], dtype: AclDataType) -> bool {
    let half = [bytes[0], bytes[1]];
    match dtype {
        AclDataType::FLOAT16 => f16::from_ne_bytes(half).is_finite(),
        AclDataType::BF16 => bf16::from_ne_bytes(half).is_finite(),
        _ => f32::from_ne_bytes([half[0], half[1], bytes[2], bytes[3]]).is_finite(),
    }
}

/// Overflow in the gradients' values or, on chips whose f16 saturates, in the device's overflow
/// flag; reduced over all ranks.
///
/// The flag is cleared before the backward pass and read after it. According to torch_npu's authors
/// it is sometimes set without an overflow, which then skips a step.
#[derive(Clone, Debug)]
pub struct DeviceOverflow<R> {
    on: Operators,
    reduce: R,
}

impl<R> DeviceOverflow<R> {
    /// `reduce` returns the maximum over all ranks of this rank's result; for one rank it is `Ok`.
    pub const fn new(on: Operators, reduce: R) -> Self {
        Self { on, reduce }
    }

    /// Whether overflow is read from the device's flag.
    #[must_use]
    pub fn is_flag(&self) -> bool {
        !self.on.soc().is_second_generation()
    }
}

impl<R, E> OverflowSource for DeviceOverflow<R>
where
    R: FnMut(Option<bool>) -> Result<Option<bool>, E>,
    E: From<Error>,
{
    type Error = E;

    fn clear(&mut self) -> Result<(), E> {
        if self.is_flag() {
            self.on.clear_overflow().map_err(Error::from)?;
        }
        Ok(())
    }

    /// If the device fails, the other ranks do not wait: this rank reports an overflow to them.
    fn overflowed(&mut self, local: Option<bool>) -> Result<Option<bool>, E> {
        if !self.is_flag() {
            return (self.reduce)(local);
        }
        match self.on.overflowed() {
            // Also on a rank without gradients: its forward pass may have overflowed.
            Ok(true) => (self.reduce)(Some(true)),
            Ok(false) => (self.reduce)(local),
            Err(error) => {
                (self.reduce)(Some(true))?;
                Err(Error::from(error).into())
            }
        }
    }
}
