//! The CPU's loops, compiled for each instruction set and dispatched at run time.
//!
//! Invariant: every instruction set compiles the loops of [`scalar`], so all give equal bits. F16C
//! and its fallback, the `half` crate, agree on every input.
//!
//! aarch64 needs no dispatch: NEON belongs to the target, so the compiler vectorizes the loops,
//! four elements at a time. f16 is converted by `half`, which detects `fp16` and uses `fcvtl` and
//! `fcvtn`; the intrinsics for these are not stable yet.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd_limit;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A loop that is compiled for each instruction set. Its methods must be `#[inline(always)]`.
trait Kernel: Sized {
    type Output;
    fn run(self) -> Self::Output;
}

/// Runs a loop with the widest vectors that the processor has and the environment allows.
fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(isa) = x86_64::Isa::detect() {
        return isa.run(kernel);
    }
    kernel.run()
}

/// Whether any element is infinite or NaN.
pub(crate) fn has_non_finite(input: &[f32]) -> bool {
    input.chunks(BLOCK).any(|input| dispatch(scalar::HasNonFinite { input }))
}

/// Whether any element without its sign bit is at least `least`.
pub(crate) fn any_at_least(input: &[u16], least: u16) -> bool {
    input.chunks(BLOCK).any(|input| dispatch(scalar::AnyAtLeast { input, least }))
}

/// Multiplies in place; returns whether any input was infinite or NaN.
pub(crate) fn unscale(values: &mut [f32], factor: f32) -> bool {
    dispatch(scalar::Unscale { values, factor })
}

/// Rounds to nearest even.
pub(crate) fn to_bf16(input: &[f32], output: &mut [bf16]) {
    dispatch(scalar::ToBf16 { input, output });
}

/// Exact.
pub(crate) fn from_bf16(input: &[bf16], output: &mut [f32]) {
    dispatch(scalar::FromBf16 { input, output });
}

/// Exact.
pub(crate) fn from_f16(input: &[f16], output: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    let done = x86_64::F16c::detect().map_or(0, |f16c| f16c.widen(input, output));
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    input[done..].convert_to_f32_slice(&mut output[done..]);
}

/// Rounds to nearest even.
pub(crate) fn to_f16(input: &[f32], output: &mut [f16]) {
    #[cfg(target_arch = "x86_64")]
    let done = x86_64::F16c::detect().map_or(0, |f16c| f16c.narrow(input, output));
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    output[done..].convert_from_f32_slice(&input[done..]);
}

/// Elements between two checks for an early return.
const BLOCK: usize = 4096;

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use half::slice::HalfBitsSliceExt;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_instruction_set_equals_the_scalar_loop(
            data in prop::collection::vec(any::<u32>(), 0..200),
            offset in 0..17_usize,
            factor in 1e-6_f32..8.0,
        ) {
            let data: Vec<f32> = data.into_iter().map(f32::from_bits).collect();
            let data = data.get(offset..).unwrap_or_default();
            let halves: Vec<u16> = data.iter().map(|x| (x.to_bits() >> 7) as u16).collect();
            // The payload of a product's NaN is unspecified.
            let bits = |values: &[f32]| -> Vec<Option<u32>> {
                values.iter().map(|x| (!x.is_nan()).then_some(x.to_bits())).collect()
            };
            let scaled = |run: &dyn Fn(scalar::Unscale<'_>) -> bool| {
                let mut values = data.to_vec();
                (run(scalar::Unscale { values: &mut values, factor }), bits(&values))
            };
            let narrowed = |run: &dyn Fn(scalar::ToBf16<'_>)| {
                let mut output = vec![bf16::ZERO; data.len()];
                run(scalar::ToBf16 { input: data, output: &mut output });
                output.iter().map(|x| x.to_bits()).collect::<Vec<u16>>()
            };
            for isa in x86_64::Isa::all() {
                prop_assert_eq!(scaled(&|k| k.run()), scaled(&|k| isa.run(k)));
                prop_assert_eq!(narrowed(&|k| k.run()), narrowed(&|k| isa.run(k)));
                let found = || scalar::HasNonFinite { input: data };
                prop_assert_eq!(found().run(), isa.run(found()));
                let found = || scalar::AnyAtLeast { input: &halves, least: 0x7c00 };
                prop_assert_eq!(found().run(), isa.run(found()));
            }
            let software: Vec<u16> =
                data.iter().map(|x| f16::from_f32_const(*x).to_bits()).collect();
            let halves: &[f16] = halves.reinterpret_cast();
            let wide: Vec<u32> = halves.iter().map(|x| x.to_f32_const().to_bits()).collect();
            for f16c in x86_64::F16c::all() {
                let mut narrow = vec![f16::ZERO; data.len()];
                let done = f16c.narrow(data, &mut narrow);
                let narrow: &[u16] = narrow.reinterpret_cast();
                prop_assert_eq!(&narrow[..done], &software[..done]);
                let mut output = vec![0.0_f32; data.len()];
                let done = f16c.widen(halves, &mut output);
                let output: Vec<u32> = output.iter().map(|x| x.to_bits()).collect();
                prop_assert_eq!(&output[..done], &wide[..done]);
                prop_assert!(data.len() - done < 16);
            }
            prop_assert_eq!(has_non_finite(data), data.iter().any(|x| !x.is_finite()));
        }
    }
}
