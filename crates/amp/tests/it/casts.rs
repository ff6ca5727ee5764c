//! Casts of every half value and of f32 values around the rounding boundaries, compared with a
//! reference in f64 and with PyTorch's bits; `unscale`, compared with PyTorch's bits.

use std::fmt::Debug;

use amp::{CastTo, cast, unscale};
use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::common;

/// Properties of the two half types.
trait Half: CastTo<f32> + Copy + Debug + 'static
where
    f32: CastTo<Self>,
{
    /// Exponent of the smallest normal number, and number of significant bits.
    const FORMAT: (i32, i32);
    fn from_bits(bits: u16) -> Self;
    /// The `half` crate's software conversion, including the payloads of NaNs.
    fn software(x: f32) -> Self;
    fn bits(self) -> u16;
    fn all() -> Vec<Self> {
        (0..=u16::MAX).map(Self::from_bits).collect()
    }
    fn infinity() -> f64;
}

impl Half for f16 {
    const FORMAT: (i32, i32) = (-14, 11);
    fn from_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn software(x: f32) -> Self {
        Self::from_f32_const(x)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn infinity() -> f64 {
        2_f64.powi(16)
    }
}

impl Half for bf16 {
    const FORMAT: (i32, i32) = (-126, 8);
    fn from_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn software(x: f32) -> Self {
        Self::from_f32_const(x)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn infinity() -> f64 {
        2_f64.powi(128)
    }
}

/// The reference: the value that a finite `x` rounds to, computed exactly in f64.
fn rounded<H: Half>(x: f32) -> f64
where
    f32: CastTo<H>,
{
    let x = f64::from(x);
    let (min_exponent, significant) = H::FORMAT;
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let unit = 2_f64.powi(exponent.max(min_exponent) - (significant - 1));
    let rounded = (x / unit).round_ties_even() * unit;
    if rounded.abs() >= H::infinity() { f64::INFINITY.copysign(x) } else { rounded }
}

/// Casts to a half type and back, and checks each result.
fn check<H: Half + Default>(input: &[f32])
where
    f32: CastTo<H>,
{
    let mut output = vec![H::default(); input.len()];
    cast(input, &mut output).unwrap();
    let mut back = vec![0.0; input.len()];
    cast(&output, &mut back).unwrap();
    for (x, (half, wide)) in input.iter().zip(output.iter().zip(&back)) {
        assert_eq!(half.bits(), H::software(*x).bits(), "{:#x}", x.to_bits());
        assert_eq!(x.is_sign_negative(), wide.is_sign_negative(), "{:#x}", x.to_bits());
        if x.is_nan() {
            assert!(wide.is_nan(), "{:#x} became {half:?}", x.to_bits());
        } else {
            assert_eq!(f64::from(*wide), rounded::<H>(*x), "{x:e} ({:#x})", x.to_bits());
        }
    }
}

fn halves_and_boundaries<H: Half + Default>()
where
    f32: CastTo<H>,
{
    let all = H::all();
    let mut wide = vec![0.0_f32; all.len()];
    cast(&all, &mut wide).unwrap();
    // A round trip keeps every value, except that NaNs become quiet.
    let mut back = vec![H::default(); all.len()];
    cast(&wide, &mut back).unwrap();
    for ((before, wide), after) in all.iter().zip(&wide).zip(&back) {
        let quiet = u16::from(wide.is_nan()) << (H::FORMAT.1 - 2);
        assert_eq!(before.bits() | quiet, after.bits(), "{before:?}");
    }
    // Each value, the midpoint to the next one, and the f32s next to both.
    let mut inputs = Vec::new();
    for pair in wide.windows(2) {
        let middle = pair[0] / 2.0 + pair[1] / 2.0;
        for x in [pair[0], middle] {
            inputs.extend([x, x.next_up(), x.next_down()]);
        }
    }
    check::<H>(&inputs);
}

#[test]
fn casts_of_f16_are_exact_at_every_value_and_boundary() {
    halves_and_boundaries::<f16>();
}

#[test]
fn casts_of_bf16_are_exact_at_every_value_and_boundary() {
    halves_and_boundaries::<bf16>();
}

#[test]
fn casts_of_sampled_floats_equal_the_reference() {
    // A prime stride visits every exponent; all 2^32 floats take a minute, see the next test.
    let inputs: Vec<f32> = (0..=u32::MAX).step_by(4099).map(f32::from_bits).collect();
    check::<f16>(&inputs);
    check::<bf16>(&inputs);
}

#[test]
#[ignore = "all 2^32 floats: minutes; cargo test --release -p gradstack-amp --test it -- --ignored nightly"]
fn nightly_all_floats() {
    for high in 0..=u16::MAX {
        let inputs: Vec<f32> = (0..=u16::MAX)
            .map(|low| f32::from_bits(u32::from(high) << 16 | u32::from(low)))
            .collect();
        check::<f16>(&inputs);
        check::<bf16>(&inputs);
    }
}

#[test]
fn casts_between_f16_and_bf16_round_once() {
    let f16s = f16::all();
    let mut brains = vec![bf16::ZERO; f16s.len()];
    cast(&f16s, &mut brains).unwrap();
    for (x, y) in f16s.iter().zip(&brains) {
        assert_eq!(y.to_bits(), bf16::from_f32(x.to_f32()).to_bits(), "{x:?}");
    }
    let brains = bf16::all();
    let mut f16s = vec![f16::ZERO; brains.len()];
    cast(&brains, &mut f16s).unwrap();
    for (x, y) in brains.iter().zip(&f16s) {
        assert_eq!(y.to_bits(), f16::from_f32(x.to_f32()).to_bits(), "{x:?}");
    }
}

#[test]
fn casting_between_different_lengths_is_an_error() {
    let error = cast(&[1.0_f32; 3], &mut [f16::ZERO; 2]).unwrap_err();
    assert_eq!(error, amp::Error::LengthMismatch { expected: 3, got: 2 });
    cast::<f32, bf16>(&[], &mut []).unwrap();
}

proptest! {
    #[test]
    fn casts_of_any_bits_and_length_equal_the_reference(
        bits in prop::collection::vec(any::<u32>(), 0..70),
        skip in 0..9_usize,
    ) {
        let inputs: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        check::<f16>(inputs.get(skip..).unwrap_or_default());
        check::<bf16>(inputs.get(skip..).unwrap_or_default());
    }
}

#[test]
fn casts_equal_pytorch_bit_for_bit() {
    common::vectors("casts.safetensors").iter().for_each(|bytes| compare_casts(bytes));
}

fn compare_casts(bytes: &[u8]) {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let u32s = |key: &str| -> Vec<u32> {
        let view = file.tensor(key).unwrap();
        view.data().as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    };
    let u16s = |key: &str| -> Vec<u16> {
        let view = file.tensor(key).unwrap();
        view.data().as_chunks().0.iter().map(|word| u16::from_le_bytes(*word)).collect()
    };
    let floats = |key: &str| u32s(key).into_iter().map(f32::from_bits).collect::<Vec<f32>>();

    let input = floats("f32_bits");
    let mut f16s = vec![f16::ZERO; input.len()];
    cast(&input, &mut f16s).unwrap();
    assert_eq!(f16s.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), u16s("f16_bits"));
    let mut brains = vec![bf16::ZERO; input.len()];
    cast(&input, &mut brains).unwrap();
    assert_eq!(brains.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), u16s("bf16_bits"));

    let wide = |all: &[f32], expected: &[u32]| {
        for (x, expected) in all.iter().zip(expected) {
            let same = x.to_bits() == *expected;
            assert!(same || (x.is_nan() && f32::from_bits(*expected).is_nan()), "{expected:#x}");
        }
    };
    let mut output = vec![0.0; 65536];
    cast(&f16::all(), &mut output).unwrap();
    wide(&output, &u32s("f16_bits_to_f32_bits"));
    cast(&bf16::all(), &mut output).unwrap();
    wide(&output, &u32s("bf16_bits_to_f32_bits"));

    check::<f16>(&floats("nan_f32_bits"));
    check::<bf16>(&floats("nan_f32_bits"));
}

#[derive(Deserialize)]
struct Unscaled {
    inv_scale_bits: String,
    input_bits: Vec<u32>,
    output_bits: Vec<u32>,
    found_inf: f32,
}

#[test]
fn unscale_equals_pytorch_bit_for_bit() {
    let parse = |text: Vec<u8>| serde_json::from_slice::<Vec<Unscaled>>(&text).unwrap();
    let files: Vec<_> = common::vectors("unscale.json").into_iter().map(parse).collect();
    assert_eq!(files[0].len(), 28);
    for case in files.into_iter().flatten() {
        let inv_scale = f32::from_bits(u32::from_str_radix(&case.inv_scale_bits, 16).unwrap());
        let mut grads: Vec<f32> =
            case.input_bits.iter().map(|bits| f32::from_bits(*bits)).collect();
        assert_eq!(unscale(&mut grads, inv_scale), case.found_inf != 0.0);
        for (got, expected) in grads.iter().zip(&case.output_bits) {
            let nan = got.is_nan() && f32::from_bits(*expected).is_nan();
            assert!(nan || got.to_bits() == *expected, "{got:e} is not {expected:#x}");
        }
    }
}
