//! Non-finite checks, unscaling, casts and the overflow flag on an Ascend NPU (feature `npu`).
//!
//! The loss scale itself stays with the host, in a [`LossScaler`] or [`GradScaler`](crate::GradScaler): it
//! is one number, and the host must know the verdict anyway to skip a step. CANN's `aclnnAmpUpdateScale`,
//! which keeps a scale on the device, is therefore bound in npu-sys but not called here: it would be a
//! second copy of the policy, one without [the floor](crate::Policy::Guarded), and spare no copy to the host.
//!
//! * [`unscale`] divides f32 gradients by the scale and looks at them: by
//!   `aclnnForeachNonFiniteCheckAndUnscale` where CANN has it (8.1 does not declare it, 8.5 does) and the
//!   chip is of the second generation, else by plain operators; either way with one copy to the host.
//! * [`has_non_finite`] only looks, at any of the three types.
//! * [`DeviceOverflow`] is the [`OverflowSource`] for every chip. Those of the first generation (Ascend
//!   910A and older) turn an f16 that overflows into 65504, so values never show it; the device's overflow
//!   flag does, and since no infinity travels to other ranks either, the verdict goes through a hook
//!   that reduces it over all of them.
//! * [`cast`] is `aclnnCast`.
//!
//! ```no_run
//! use amp::npu::{DeviceOverflow, Operators, has_non_finite};
//! use amp::{Error, GradScaler, LossScaler, LossScalerOptions};
//! # fn all_reduce_max(_: &mut [u8]) -> Result<(), Error> { Ok(()) }
//!
//! let on = Operators::open(0)?;
//! let source = DeviceOverflow::new(on.clone(), |seen: Option<bool>| {
//!     let mut word = [seen.map_or(0, |seen| 1 + u8::from(seen))];
//!     all_reduce_max(&mut word)?;
//!     Ok::<_, Error>([None, Some(false), Some(true)][usize::from(word[0])])
//! });
//! let mut scaler = GradScaler::new(LossScaler::new(LossScalerOptions::default())?, source);
//! let loss_scale = scaler.scale()?; // clears the flag; then backward
//! # let grads = [];
//! let seen = has_non_finite(&on, &grads)?;
//! if let Some(grad_scale) = scaler.step(0, || seen)? {
//!     // the optimizer's step
//! #   let _ = (loss_scale, grad_scale);
//! }
//! scaler.update()?;
//! # Ok::<(), amp::Error>(())
//! ```
//!
//! **Nothing here has been run on Ascend hardware**: the tests use a simulator that enforces the rules
//! CANN's documents state.

use half::{bf16, f16};
use npu_sys::safe::Buffer;
pub use npu_sys::safe::{Operators, View};
use npu_sys::sys::AclDataType;

use crate::{Error, LossScaler, OverflowSource, Result};

/// Bytes from one number of a verdict to the next.
const APART: usize = 32;

/// Whether any number of any view is infinite or NaN; `None` if there is none at all. One copy to the
/// host, which waits for the stream.
///
/// Zero times all numbers, added up, is zero exactly if all are finite; nothing of this overflows.
///
/// # Errors
///
/// [`Error::Unsupported`] for a type that gradients do not come in; [`Error::Npu`].
pub fn has_non_finite(on: &Operators, grads: &[View]) -> Result<Option<bool>> {
    let grads: Vec<&View> = grads.iter().filter(|grad| grad.count() > 0).collect();
    let Some(most) = grads.iter().map(|grad| grad.bytes()).max() else { return Ok(None) };
    for grad in &grads {
        known(on, grad.dtype())?;
    }
    let scratch = Buffer::new(on.context(), most)?;
    let verdicts = Buffer::new(on.context(), APART * grads.len())?;
    on.stream().fill(&verdicts, 0, APART * grads.len(), 0)?;
    for (at, grad) in grads.iter().enumerate() {
        let nothing = View::new(&scratch, 0, &[grad.count()], grad.dtype())?;
        on.muls(&nothing, &grad.shaped(&[grad.count()])?, 0.0)?;
        on.row_sums(&View::new(&verdicts, APART * at, &[1], grad.dtype())?, &nothing)?;
    }
    let mut bytes = vec![0; APART * grads.len()];
    on.stream().download(&verdicts, 0, &mut bytes)?;
    let each = bytes.chunks(APART).zip(grads);
    Ok(each.map(|(bytes, grad)| !is_finite(bytes, grad.dtype())).max())
}

/// Divides f32 gradients by the scale of `scaler`, in place, and says whether any was infinite or NaN;
/// `None` if there was none. One copy to the host, or two where a scale below 1 may overflow the
/// quotient ([`LossScaler::unscale`]); with a scale of 1 nothing is written.
///
/// # Errors
///
/// [`Error::Unsupported`] for half gradients, of which small ones would vanish; [`Error::Npu`], after
/// which gradients may be divided or not.
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
    for some in grads.chunks(Operators::NORMS) {
        on.non_finite_check_and_unscale(some, &found, &scale)?;
    }
    Ok(Some(on.read(&found)?.iter().any(|byte| *byte != 0)))
}

/// `to ← from` in `to`'s type, rounded to nearest even where it is narrower, in order of the stream.
///
/// # Errors
///
/// [`Error::LengthMismatch`]; [`Error::Unsupported`] for other types than f32, f16 and bf16, and for bf16
/// on chips of the first generation; [`Error::Npu`].
pub fn cast(on: &Operators, from: &View, to: &View) -> Result<()> {
    let (expected, got) = (from.count(), to.count());
    if got != expected {
        return Err(Error::LengthMismatch { expected, got });
    }
    known(on, from.dtype())?;
    known(on, to.dtype())?;
    Ok(on.cast(&to.shaped(&[got])?, &from.shaped(&[got])?)?)
}

/// Refuses what gradients do not come in here.
fn known(on: &Operators, dtype: AclDataType) -> Result<()> {
    match dtype {
        AclDataType::FLOAT | AclDataType::FLOAT16 => Ok(()),
        AclDataType::BF16 if on.soc().is_second_generation() => Ok(()),
        AclDataType::BF16 => Err(Error::Unsupported { what: "bf16 on this chip" }),
        _ => Err(Error::Unsupported { what: "numbers other than f32, f16 and bf16" }),
    }
}

/// Whether the first number is.
fn is_finite(bytes: &[u8], dtype: AclDataType) -> bool {
    let half = [bytes[0], bytes[1]];
    match dtype {
        AclDataType::FLOAT16 => f16::from_ne_bytes(half).is_finite(),
        AclDataType::BF16 => bf16::from_ne_bytes(half).is_finite(),
        _ => f32::from_ne_bytes([half[0], half[1], bytes[2], bytes[3]]).is_finite(),
    }
}

/// Overflow as a device shows it: in values, or, where f16 saturates, in the device's flag; and what all
/// ranks make of it.
///
/// The flag is cleared before the backward pass and read after it. torch_npu's authors remark that it is
/// often set without need, which costs a step.
#[derive(Clone, Debug)]
pub struct DeviceOverflow<R> {
    on: Operators,
    reduce: R,
}

impl<R> DeviceOverflow<R> {
    /// `reduce` is handed what this rank saw and gives what is so on all ranks, as the maximum does; for
    /// one rank it is `Ok`.
    pub const fn new(on: Operators, reduce: R) -> Self {
        Self { on, reduce }
    }

    /// Whether overflow is told by the flag.
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

    /// Also on error of the device the other ranks are not left waiting: they are told of an overflow.
    fn overflowed(&mut self, seen: Option<bool>) -> Result<Option<bool>, E> {
        if !self.is_flag() {
            return (self.reduce)(seen);
        }
        match self.on.overflowed() {
            // Also on a rank that had no gradient: its forward pass may have overflowed.
            Ok(true) => (self.reduce)(Some(true)),
            Ok(false) => (self.reduce)(seen),
            Err(error) => {
                (self.reduce)(Some(true))?;
                Err(Error::from(error).into())
            }
        }
    }
}
