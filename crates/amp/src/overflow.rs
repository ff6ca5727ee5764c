//! Who says whether gradients overflowed: their values, a device's status, all ranks together.

use crate::Error;

/// Turns what was seen in one optimizer's gradients into the verdict that its step and the scale
/// follow. [`GradScaler`](crate::GradScaler) asks it once per optimizer and iteration, before
/// anything is updated.
///
/// What was seen is `None` if the optimizer had no gradient, else whether one was infinite or NaN.
/// `None < Some(false) < Some(true)`, so the verdict of several is their maximum.
///
/// # One rank
///
/// [`InValues`]: what was seen is the verdict.
///
/// # Several ranks
///
/// Ranks that hold the same, reduced gradients see the same; [`InValues`] does. Where each holds a
/// part of its own (shards, or one rank's share of the experts), all must skip if one must. Any
/// closure that reduces is a source; a rank without gradients takes part:
///
/// ```
/// use amp::{Error, GradScaler, LossScaler};
/// # fn all_reduce_max(_: &mut [u8]) -> Result<(), Error> { Ok(()) }
///
/// let reduce = |seen: Option<bool>| {
///     let mut word = [seen.map_or(0, |seen| 1 + u8::from(seen))];
///     all_reduce_max(&mut word)?;
///     Ok::<_, Error>([None, Some(false), Some(true)][usize::from(word[0])])
/// };
/// let scaler = GradScaler::new(LossScaler::fixed(128.0)?, reduce);
/// # Ok::<(), Error>(())
/// ```
///
/// # Devices that saturate
///
/// Where arithmetic stops at the largest number (Ascend 910A and older), no infinity ever shows.
/// The device instead sets a flag, which is [cleared](Self::clear) before the backward pass and
/// read after it:
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
///     fn overflowed(&mut self, seen: Option<bool>) -> Result<Option<bool>, Error> {
///         Ok(seen.map(|seen| seen || self.read() != 0))
///     }
/// }
/// ```
#[doc(alias = "found_inf")]
pub trait OverflowSource {
    /// What can go wrong in asking: a peer is lost, a device does not answer.
    type Error: From<Error>;

    /// Forgets earlier overflows. Called by the first
    /// [`scale`](crate::GradScaler::scale) of an iteration, so before its first backward pass.
    ///
    /// # Errors
    ///
    /// The source's own.
    fn clear(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// The verdict. With several ranks this is a collective call, in the same order on all.
    ///
    /// # Errors
    ///
    /// The source's own.
    fn overflowed(&mut self, seen: Option<bool>) -> Result<Option<bool>, Self::Error>;
}

/// Overflow shows in the values: an infinity or a NaN that this rank sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InValues;

impl OverflowSource for InValues {
    type Error = Error;

    fn overflowed(&mut self, seen: Option<bool>) -> Result<Option<bool>, Error> {
        Ok(seen)
    }
}

impl<F, E> OverflowSource for F
where
    F: FnMut(Option<bool>) -> Result<Option<bool>, E>,
    E: From<Error>,
{
    type Error = E;

    fn overflowed(&mut self, seen: Option<bool>) -> Result<Option<bool>, E> {
        self(seen)
    }
}
