//! Regions in which each operator runs in the precision that suits it, by `amp`'s lists.
//!
//! Inside a region ([`autocast`]) an operator of [`ops`](super) looks itself up under PyTorch's name
//! ([`cast`]) and casts its inputs: convolutions and products to the lower precision, losses to
//! `f32`, and what no list names runs in what it is given. The casts are candle's, which are
//! differentiable, so an `f32` parameter has an `f32` gradient whatever its operators ran in. Backward
//! runs each operator in the precision that its forward had, region or not.
//!
//! candle has no dispatcher: its own operators, and so candle-nn's layers, know of no region.
//!
//! Invariant: a region belongs to its thread and ends with its call, however that ends.

use std::cell::RefCell;

use amp::{Autocast, Cast};
use candle_core::{DType, Result, Tensor, bail};

thread_local! {
    static REGION: RefCell<Option<Region>> = const { RefCell::new(None) };
}

struct Region {
    policy: Autocast,
    /// Operators run in the lower precision so far.
    lowered: usize,
}

/// Runs `call` with `policy` in force on this thread, instead of the one around it; a policy that is
/// [switched off](Autocast::with_enabled) makes a region in which nothing is cast.
///
/// ```
/// use amp::Autocast;
/// use candle_core::{DType, Device, Tensor};
/// use candle_ops as ops;
///
/// let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let y = ops::autocast(&Autocast::cpu(), || ops::linear(&x, &x, None))?;
/// assert_eq!((y.dtype(), ops::linear(&x, &x, None)?.dtype()), (DType::BF16, DType::F32));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn autocast<R>(policy: &Autocast, call: impl FnOnce() -> R) -> R {
    counted(policy, call).0
}

/// As [`autocast`], and how many operators ran in the lower precision.
pub fn counted<R>(policy: &Autocast, call: impl FnOnce() -> R) -> (R, usize) {
    /// Brings the region around back, with the sum of both, however the call ends.
    struct Around(Option<Region>);
    impl Drop for Around {
        fn drop(&mut self) {
            let inner = REGION.replace(self.0.take()).map_or(0, |region| region.lowered);
            REGION.with_borrow_mut(|region| region.iter_mut().for_each(|r| r.lowered += inner));
        }
    }
    let region = Region { policy: policy.clone(), lowered: 0 };
    let around = Around(REGION.replace(Some(region)));
    let result = call();
    let lowered = REGION.with_borrow(|region| region.as_ref().map_or(0, |region| region.lowered));
    drop(around);
    (result, lowered)
}

/// The floating-point inputs of operator `op`, PyTorch's name, in the types that the region around
/// wants; without a region, as they are. For operators of one's own, too.
///
/// Where the list says that an operator computes and returns `f32`, its inputs are cast to `f32`.
/// Tensors of other types (indices, bytes) are left alone.
///
/// # Errors
///
/// An operator that the list [bans](amp::CastRule::Banned).
pub fn cast<const N: usize>(op: &str, inputs: [&Tensor; N]) -> Result<[Tensor; N]> {
    let mut types = [amp::DType::F32; N];
    let mut floats = 0;
    for dtype in inputs.iter().filter_map(|input| amp_dtype(input.dtype())) {
        types[floats] = dtype;
        floats += 1;
    }
    let asked = REGION.with_borrow_mut(|region| {
        let Some(region) = region else { return Ok(Cast::Keep) };
        let cast = region.policy.cast(op, &types[..floats])?;
        let lower = Cast::Inputs(region.policy.dtype());
        region.lowered += usize::from(cast == lower);
        Ok::<_, amp::Error>(cast)
    });
    let to = match asked {
        Ok(Cast::Keep) => return Ok(inputs.map(Clone::clone)),
        Ok(Cast::Inputs(dtype) | Cast::Output(dtype)) => Cast::Inputs(dtype),
        Err(e) => bail!("{e}"),
    };
    each(inputs, |input| match amp_dtype(input.dtype()) {
        Some(dtype) => input.to_dtype(candle_dtype(to.input(dtype))),
        None => Ok(input.clone()),
    })
}

/// Both in the narrowest type that holds the values of both: `f16` beside `bf16` is `f32`.
pub(super) fn promote([a, b]: [Tensor; 2]) -> Result<[Tensor; 2]> {
    if a.dtype() == b.dtype() {
        return Ok([a, b]);
    }
    let wide = if [a.dtype(), b.dtype()].contains(&DType::F64) { DType::F64 } else { DType::F32 };
    Ok([a.to_dtype(wide)?, b.to_dtype(wide)?])
}

/// Each of the inputs, cast.
pub(super) fn each<const N: usize>(
    inputs: [&Tensor; N],
    mut cast: impl FnMut(&Tensor) -> Result<Tensor>,
) -> Result<[Tensor; N]> {
    let mut outputs = inputs.map(Clone::clone);
    for output in &mut outputs {
        *output = cast(output)?;
    }
    Ok(outputs)
}

const fn amp_dtype(dtype: DType) -> Option<amp::DType> {
    match dtype {
        DType::F16 => Some(amp::DType::F16),
        DType::BF16 => Some(amp::DType::Bf16),
        DType::F32 => Some(amp::DType::F32),
        DType::F64 => Some(amp::DType::F64),
        _ => None,
    }
}

const fn candle_dtype(dtype: amp::DType) -> DType {
    match dtype {
        amp::DType::F16 => DType::F16,
        amp::DType::Bf16 => DType::BF16,
        amp::DType::F32 => DType::F32,
        amp::DType::F64 => DType::F64,
    }
}
