//! What the host knows of a batch on a device: its integer fields, so that labels and indices are looked at
//! without a copy back, and again before each launch of a step that was captured.
//!
//! An engine opens them on this thread for the length of a training step ([`open`]). An operator that must not
//! be given a number out of range says so ([`look`]). A field is known by where it lies, so a view of one
//! (`narrow`, `reshape`) is known, too, and a tensor computed from one is not: that is copied back, which a
//! capture cannot.
//!
//! Invariant: the fields that are open lie where they did when they were opened, until the call ends.

use std::cell::RefCell;

use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{Layout, Result, Storage, Tensor, bail};

use super::limit::Limit;

thread_local! {
    static OPEN: RefCell<Option<Fields>> = const { RefCell::new(None) };
}

/// What is open during a step.
#[derive(Debug, Default)]
struct Fields {
    known: Vec<Known>,
    asked: Vec<Asked>,
    is_capture: bool,
}

/// A field: where it lies, and what its numbers are.
#[derive(Debug)]
struct Known {
    index: usize,
    at: u64,
    numbers: Vec<i64>,
}

/// What an operator asked of a field, or of a view of it.
#[derive(Debug)]
pub struct Asked {
    field: usize,
    layout: Layout,
    limit: Limit,
}

impl Asked {
    /// Looks at another batch.
    ///
    /// # Errors
    ///
    /// The operator's, for a number that is out of range.
    pub fn check(&self, batch: &[Option<&[i64]>]) -> Result<()> {
        let numbers = batch.get(self.field).copied().flatten().unwrap_or_default();
        check(&self.layout, numbers, self.limit)
    }
}

/// Runs `call`, a training step on the fields of a batch, by number: tensors, and the numbers of those of
/// integers. Returns also what its operators asked of them.
pub fn open<R>(
    fields: &[(&Tensor, Option<&[i64]>)],
    is_capture: bool,
    call: impl FnOnce() -> R,
) -> (R, Vec<Asked>) {
    /// Closes them however the call ends.
    struct Open;
    impl Drop for Open {
        fn drop(&mut self) {
            OPEN.take();
        }
    }
    let known = fields.iter().enumerate().filter_map(|(index, (tensor, numbers))| {
        Some(Known { index, at: start_of(tensor)?, numbers: (*numbers)?.to_vec() })
    });
    OPEN.set(Some(Fields { known: known.collect(), asked: Vec::new(), is_capture }));
    let open = Open;
    let result = call();
    let asked = OPEN.take().map_or_else(Vec::new, |fields| fields.asked);
    drop(open);
    (result, asked)
}

/// Whether `numbers` are a field's and within the limit; false if they are no field's.
///
/// # Errors
///
/// The operator's, for a number that is out of range; numbers that are no field's in a capture.
pub(super) fn look(numbers: &Tensor, limit: Limit) -> Result<bool> {
    OPEN.with_borrow_mut(|open| {
        let Some(open) = open else { return Ok(false) };
        let at = start_of(numbers);
        let Some(known) = open.known.iter().find(|known| Some(known.at) == at) else {
            if open.is_capture {
                bail!("{}", limit.unknown());
            }
            return Ok(false);
        };
        let layout = numbers.layout().clone();
        check(&layout, &known.numbers, limit)?;
        open.asked.push(Asked { field: known.index, layout, limit });
        Ok(true)
    })
}

/// Where the memory begins that a tensor of integers is in or views.
fn start_of(tensor: &Tensor) -> Option<u64> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return None };
    let slice = storage.as_cuda_slice::<i64>().ok()?;
    Some(slice.device_ptr(slice.stream()).0)
}

/// Looks at the numbers that a view with this layout has.
fn check(layout: &Layout, numbers: &[i64], limit: Limit) -> Result<()> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let whole = layout.contiguous_offsets().and_then(|(start, end)| numbers.get(start..end));
    if let Some(whole) = whole {
        return whole.iter().try_for_each(|number| limit.check(*number));
    }
    let mut at = vec![0; dims.len()];
    for _ in 0..layout.shape().elem_count() {
        let offset: usize = at.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        let Some(number) = numbers.get(layout.start_offset() + offset) else {
            bail!("a view of {dims:?} lies behind a field of {} numbers", numbers.len());
        };
        limit.check(*number)?;
        for (i, extent) in at.iter_mut().zip(dims).rev() {
            *i += 1;
            if *i < *extent {
                break;
            }
            *i = 0;
        }
    }
    Ok(())
}
