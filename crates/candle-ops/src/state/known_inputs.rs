//! Integer inputs on a GPU with values known on the host, so that labels and indices are checked
//! without a copy from the device, and again before each launch of a captured step.
//!
//! [`KnownInputs::enter`] declares them for a call. An operator then checks its labels or indices
//! with the host's copy. An input is identified by its address, so its views (`narrow`, `reshape`)
//! are known as well; a tensor computed from an input is not, and is copied from the device, which
//! is not possible during a capture.
//!
//! Invariant: the declared tensors stay at their address until the call ends.

use candle_core::{Layout, Result, Tensor, bail};

use super::index_range::IndexRange;
use crate::context;

/// The integer inputs of a pass.
#[derive(Debug, Default)]
pub struct KnownInputs {
    inputs: Vec<KnownInput>,
    checks: Vec<IndexCheck>,
    is_capture: bool,
}

#[derive(Debug)]
struct KnownInput {
    /// Index of the input among all inputs.
    index: usize,
    address: u64,
    values: Vec<i64>,
}

/// A range check by an operator on an input or on a view of it. It is repeated with the values of
/// the next batch.
#[derive(Debug)]
pub struct IndexCheck {
    input: usize,
    layout: Layout,
    range: IndexRange,
}

impl KnownInputs {
    /// All inputs in order: each tensor, and its values if they are integers.
    pub fn new<'a>(inputs: impl IntoIterator<Item = (&'a Tensor, Option<&'a [i64]>)>) -> Self {
        let known = inputs.into_iter().enumerate().filter_map(|(index, (tensor, values))| {
            let (address, values) = (address_of(tensor)?, values?.to_vec());
            Some(KnownInput { index, address, values })
        });
        Self { inputs: known.collect(), ..Self::default() }
    }

    /// For a pass that is captured as a CUDA graph: unknown labels and indices are an error.
    #[must_use]
    pub fn for_capture(self) -> Self {
        Self { is_capture: true, ..self }
    }

    /// Runs `call`, a pass, with these known inputs. Also returns the checks of the operators.
    pub fn enter<R>(self, call: impl FnOnce() -> R) -> (R, Vec<IndexCheck>) {
        let (result, known) =
            context::replacing(|context| &mut context.known_inputs, Some(self), call);
        (result, known.map_or_else(Vec::new, |known| known.checks))
    }
}

impl IndexCheck {
    /// Repeats the check with the values of a batch, which are given by input.
    ///
    /// # Errors
    ///
    /// The operator's error for an index out of range.
    pub fn check(&self, inputs: &[Option<&[i64]>]) -> Result<()> {
        let values = inputs.get(self.input).copied().flatten().unwrap_or_default();
        check_view(&self.layout, values, self.range)
    }
}

/// Checks `indices` with the host's values; returns false if they are not a known input.
///
/// # Errors
///
/// The operator's error for an index out of range; in a capture, unknown indices.
pub(crate) fn check(indices: &Tensor, range: IndexRange) -> Result<bool> {
    context::with(|context| {
        let Some(known) = &mut context.known_inputs else { return Ok(false) };
        let address = address_of(indices);
        let Some(input) = known.inputs.iter().find(|input| Some(input.address) == address) else {
            if known.is_capture {
                let what = match range {
                    IndexRange::Classes(..) => "the labels of cross_entropy",
                    IndexRange::Nll(_) => "the labels of nll",
                    IndexRange::Rows(_) => "the indices of embedding",
                };
                bail!(
                    "{what} are checked on the host, which a capture cannot copy them to: pass an input of the step, \
                     or a view of one"
                );
            }
            return Ok(false);
        };
        let layout = indices.layout().clone();
        check_view(&layout, &input.values, range)?;
        known.checks.push(IndexCheck { input: input.index, layout, range });
        Ok(true)
    })
}

/// Address of the memory of an integer tensor or view on a GPU.
#[cfg(feature = "cuda")]
fn address_of(tensor: &Tensor) -> Option<u64> {
    use candle_core::cuda_backend::cudarc::driver::DevicePtr;
    let (storage, _) = tensor.storage_and_layout();
    let candle_core::Storage::Cuda(storage) = &*storage else { return None };
    if let Ok(slice) = storage.as_cuda_slice::<u32>() {
        return Some(slice.device_ptr(slice.stream()).0);
    }
    let slice = storage.as_cuda_slice::<i64>().ok()?;
    Some(slice.device_ptr(slice.stream()).0)
}

#[cfg(not(feature = "cuda"))]
const fn address_of(_: &Tensor) -> Option<u64> {
    None
}

/// Checks the values of a view with this layout.
fn check_view(layout: &Layout, values: &[i64], range: IndexRange) -> Result<()> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let whole = layout.contiguous_offsets().and_then(|(start, end)| values.get(start..end));
    if let Some(whole) = whole {
        return whole.iter().try_for_each(|index| range.check(*index));
    }
    let mut at = vec![0; dims.len()];
    for _ in 0..layout.shape().elem_count() {
        let offset: usize = at.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        let Some(index) = values.get(layout.start_offset() + offset) else {
            bail!("a view of shape {dims:?} exceeds an input of {} values", values.len());
        };
        range.check(*index)?;
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
