//! Sources of `found_inf`: the gradients' values, a device's overflow flag, or a reduction over
//! ranks.

use crate::Error;

/// Decides whether an optimizer's gradients overflowed, from what this rank found in them.
/// [`GradScaler`](crate::GradScaler) calls it once per optimizer and iteration, before anything is
/// updated.
///
/// A result is `None` if the optimizer had no gradient, else whether one was infinite or NaN. Since
/// `None < Some(false) < Some(true)`, several results combine by their maximum.
///
/// # One rank
///
/// [`InValues`] returns this rank's result.
///
/// # Several ranks
///
/// With all-reduced gradients all ranks find the same, so [`InValues`] is enough. If each rank
/// holds different gradients (shards, or experts), all must skip the step if one must: use a
/// closure that reduces the result. Ranks without gradients call it, too:
///
/// ```
/// use amp::{Error, GradScaler, LossScaler};
/// # fn all_reduce_max(_: &mut [u8]) -> Result<(), Error> { Ok(()) }
///
/// let reduce = |local: Option<bool>| {
///     let mut word = [local.map_or(0, |found| 1 + u8::from(found))];
///     all_reduce_max(&mut word)?;
///     Ok::<_, Error>([None, Some(false), Some(true)][usize::from(word[0])])
/// };
/// let scaler = GradScaler::new(LossScaler::fixed(128.0)?, reduce);
/// # Ok::<(), Error>(())
/// ```
///
/// # Devices with saturating arithmetic
///
/// On Ascend 910A and older an overflow gives the largest finite number instead of infinity. The
/// device sets a flag, which is [cleared](Self::clear) before the backward pass and read after it:
///
/// ```
/// use amp::{Error, OverflowSource};
///
/// struct Status(/* a device */);
/// # impl Status { fn write(&self, _: u32) {} fn read(&self) -> u32 { 0 } }
///
/// impl OverflowSource for Status {
///     type Error = Error;
///     fn clear(&mut self) -> Result<(), Error> {
///         self.write(0);
///         Ok(())
///     }
///     fn overflowed(&mut self, local: Option<bool>) -> Result<Option<bool>, Error> {
///         Ok(local.map(|found| found || self.read() != 0))
///     }
/// }
/// ```
#[doc(alias = "found_inf")]
pub trait OverflowSource {
    /// The error of a failed reduction or device.
    type Error: From<Error>;

    /// Clears earlier overflows. The first [`scale`](crate::GradScaler::scale) of an iteration
    /// calls it, before the first backward pass.
    ///
    /// # Errors
    ///
    /// Depend on the source.
    fn clear(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Returns the result for all ranks; `local` is this rank's. With several ranks this is a
    /// collective call: all ranks must call it in the same order.
    ///
    /// # Errors
    ///
    /// Depend on the source.
    fn overflowed(&mut self, local: Option<bool>) -> Result<Option<bool>, Self::Error>;
}

/// Overflow is an infinity or a NaN in this rank's gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InValues;

impl OverflowSource for InValues {
    type Error = Error;

    fn overflowed(&mut self, local: Option<bool>) -> Result<Option<bool>, Error> {
        Ok(local)
    }
}

impl<F, E> OverflowSource for F
where
    F: FnMut(Option<bool>) -> Result<Option<bool>, E>,
    E: From<Error>,
{
    type Error = E;

    fn overflowed(&mut self, local: Option<bool>) -> Result<Option<bool>, E> {
        self(local)
    }
}
