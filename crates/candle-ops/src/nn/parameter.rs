//! Parameters of layers, whose size is checked before they are allocated.

use std::sync::OnceLock;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

/// Gets a parameter of the builder's type.
pub(super) fn parameter(
    shape: impl Into<Shape>,
    name: &str,
    init: Init,
    vb: &VarBuilder<'_>,
) -> Result<Tensor> {
    parameter_of(vb.dtype(), shape, name, init, vb)
}

/// Gets a parameter of this type.
pub(super) fn parameter_of(
    dtype: DType,
    shape: impl Into<Shape>,
    name: &str,
    init: Init,
    vb: &VarBuilder<'_>,
) -> Result<Tensor> {
    let shape = shape.into();
    let prefix = vb.prefix();
    let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
    check_size(&path, &shape, dtype, vb.device())?;
    vb.get_with_hints_dtype(shape, name, init, dtype)
}

/// Returns an error for a parameter that is larger than this machine's memory, before it is
/// allocated: an allocation that fails ends the process. On a GPU, whose allocations fail with an
/// error, only a size that does not fit an `isize` is refused.
///
/// All layers of [`nn`](super) do this; a builder's own backend may, too.
///
/// # Errors
///
/// The parameter's name, shape and size in bytes.
pub fn check_size(name: &str, shape: &Shape, dtype: DType, device: &Device) -> Result<()> {
    let width = dtype.size_in_bytes() as u128;
    let bytes = shape.dims().iter().fold(width, |bytes, len| bytes.saturating_mul(*len as u128));
    let elements = shape.dims().iter().try_fold(1_usize, |count, len| count.checked_mul(*len));
    let most = if device.is_cpu() { memory() } else { isize::MAX as u128 };
    if elements.is_none() || bytes > most {
        bail!(
            "parameter `{name}` of shape {:?} and type {} would have {bytes} bytes, and {most} are available: check \
             the sizes of its layer",
            shape.dims(),
            dtype.as_str()
        );
    }
    Ok(())
}

/// Number of bytes of memory and swap space, on Linux; elsewhere that of the address space.
fn memory() -> u128 {
    static BYTES: OnceLock<u128> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u128>().ok()
        };
        match (of("MemTotal:"), of("SwapTotal:")) {
            (Some(memory), swap) if memory > 0 => (memory + swap.unwrap_or(0)) << 10,
            _ => isize::MAX as u128,
        }
    })
}
