//! 8-bit quantization of state values.
//!
//! [`GROUP`] neighbours share an exponent, that of the power of two at or above the largest of
//! them. A value is stored as an 8-bit code relative to it: a float without exponent bias, with 4
//! mantissa bits and 16 binades, or, if signed, a sign, 3 mantissa bits and 16 binades. Code 0 is
//! zero.
//!
//! Rounding is stochastic, so that the expected value is exact: a moving average that changes by
//! less than a code per step still moves. Hence the error of a stored value is less than
//!
//! * 1/16 of itself for the unsigned (second moments), 1/8 for the signed (first moments), if it is
//!   not below 2⁻¹⁴ of its group's largest;
//! * below that, an unsigned value other than zero is stored as at least 2⁻¹⁶ of the largest (a
//!   second moment must not become zero if the first moment is not), and a signed one may become
//!   zero.
//!
//! In a group with an infinity or NaN all values become NaN. A value that is exactly a code is
//! stored as this code for any random bits, so that codes saved as f32 load unchanged.

use super::BLOCK;
use super::scalar::{loops, random};
use crate::param::split_off;

/// Values that share an exponent; a block is a whole number of groups.
const GROUP: usize = 256;
const _: () = assert!(BLOCK.is_multiple_of(GROUP));

/// A tensor's values of one slot.
#[derive(Clone)]
pub(crate) struct Codes {
    codes: Vec<u8>,
    exponents: Vec<u8>,
    signed: bool,
}

/// A mutable slice of [`Codes`] that starts at a group.
#[derive(Debug)]
pub(crate) struct CodesMut<'a> {
    codes: &'a mut [u8],
    exponents: &'a mut [u8],
    signed: bool,
    /// Seed of the random bits.
    key: u64,
}

impl Codes {
    /// Zeros.
    pub(crate) fn new(count: usize, signed: bool) -> Self {
        Self { codes: vec![0; count], exponents: vec![0; count.div_ceil(GROUP)], signed }
    }

    pub(crate) const fn len(&self) -> usize {
        self.codes.len()
    }

    pub(crate) fn view(&mut self, key: u64) -> CodesMut<'_> {
        let Self { codes, exponents, signed } = self;
        CodesMut { codes, exponents, signed: *signed, key }
    }

    /// The decoded values.
    pub(crate) fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        values_of(&self.codes, &self.exponents, self.signed, &mut values);
        values
    }
}

impl CodesMut<'_> {
    /// Splits off the first `count` values, whole groups or all.
    pub(crate) fn split_off(&mut self, count: usize) -> Self {
        let codes = split_off(&mut self.codes, count);
        let exponents = split_off(&mut self.exponents, count.div_ceil(GROUP));
        Self { codes, exponents, ..*self }
    }

    /// Reborrows `count` values from `start`, the first of a group.
    fn part(&mut self, start: usize, count: usize) -> CodesMut<'_> {
        let groups = start / GROUP..(start + count).div_ceil(GROUP);
        CodesMut {
            codes: &mut self.codes[start..start + count],
            exponents: &mut self.exponents[groups],
            signed: self.signed,
            key: self.key,
        }
    }

    /// Decodes the values from `start`, the first of a group.
    pub(crate) fn decode(&mut self, start: usize, values: &mut [f32]) {
        let part = self.part(start, values.len());
        values_of(part.codes, part.exponents, part.signed, values);
    }

    /// Encodes values from `start`, the first of a group; `key` derives the key of their position
    /// in the tensor.
    pub(crate) fn encode(&mut self, start: usize, values: &[f32], key: impl Fn(u64) -> u32) {
        let CodesMut { codes, exponents, signed, key: own } = self.part(start, values.len());
        let key = key(own);
        if signed {
            encode::<true>(values, codes, exponents, key);
        } else {
            encode::<false>(values, codes, exponents, key);
        }
    }
}

fn values_of(codes: &[u8], exponents: &[u8], signed: bool, values: &mut [f32]) {
    if signed {
        decode::<true>(codes, exponents, values);
    } else {
        decode::<false>(codes, exponents, values);
    }
}

/// Mantissa bits of a code.
const fn mantissa(signed: bool) -> u32 {
    if signed { 3 } else { 4 }
}

/// The largest code, which stands for the shared power of two.
const fn top(signed: bool) -> u32 {
    if signed { 127 } else { 255 }
}

/// Offset from a code to the leading bits of an f32, such that the top code stands for 1.
const fn base(signed: bool) -> u32 {
    (127 << mantissa(signed)) - top(signed)
}

/// The exponent byte of groups with an infinity or NaN.
const NON_FINITE: u32 = 255;

loops! {
    fn encode<const SIGNED: bool>(
        values: &'a [f32], codes: &'a mut [u8], exponents: &'a mut [u8], key: u32
    ) -> () {
        let groups = values.chunks(GROUP).zip(codes.chunks_mut(GROUP));
        for (at, ((values, codes), exponent)) in groups.zip(exponents).enumerate() {
            let mut largest = 0;
            for x in values {
                largest = largest.max(x.to_bits() & 0x7fff_ffff);
            }
            // The power of two at or above, as an f32's exponent; with it and with its inverse
            // every code is a normal number.
            let above = ((largest + 0x7f_ffff) >> 23).clamp(33, 253);
            *exponent = if largest < 0x7f80_0000 { above as u8 } else { NON_FINITE as u8 };
            let inverse = f32::from_bits((254 - above) << 23);
            for (i, (x, code)) in values.iter().zip(codes).enumerate() {
                let bits = (x * inverse).to_bits() & 0x7fff_ffff;
                let dropped = 23 - mantissa(SIGNED);
                let noise = random(key, at * GROUP + i) >> (32 - dropped);
                let magnitude = ((bits + noise) >> dropped).saturating_sub(base(SIGNED));
                let magnitude = magnitude.min(top(SIGNED));
                let sign = x.to_bits() >> 31 << 7;
                let some = u32::from(x.to_bits() << 1 != 0);
                *code = if SIGNED { sign | magnitude } else { magnitude.max(some) } as u8;
            }
        }
    }

    fn decode<const SIGNED: bool>(
        codes: &'a [u8], exponents: &'a [u8], values: &'a mut [f32]
    ) -> () {
        let groups = codes.chunks(GROUP).zip(values.chunks_mut(GROUP));
        for ((codes, values), exponent) in groups.zip(exponents) {
            let exponent = u32::from(*exponent);
            // Infinity's exponent with a mantissa is a NaN.
            let scale = f32::from_bits((exponent << 23) | u32::from(exponent == NON_FINITE));
            for (code, x) in codes.iter().zip(values) {
                let code = u32::from(*code);
                let magnitude = code & top(SIGNED);
                let bits = (magnitude + base(SIGNED)) << (23 - mantissa(SIGNED));
                let bits = if magnitude == 0 { 0 } else { bits };
                let sign = if SIGNED { code >> 7 << 31 } else { 0 };
                *x = f32::from_bits(bits | sign) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Encodes and decodes values.
    fn round_trip(values: &[f32], signed: bool, key: u32) -> Vec<f32> {
        let mut codes = Codes::new(values.len(), signed);
        codes.view(0).encode(0, values, |_| key);
        codes.values()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn quantization_error_is_within_the_documented_bounds(
            spread in prop::collection::vec((-40.0_f32..1.0, 1.0_f32..2.0, any::<bool>()), 0..700),
            shift in -60_i32..60,
            key: u32,
        ) {
            for signed in [false, true] {
                let value = |(exponent, mantissa, minus): &(f32, f32, bool)| {
                    let x = mantissa * 2.0_f32.powi(*exponent as i32 + shift);
                    if signed && *minus { -x } else { x }
                };
                let values: Vec<f32> = spread.iter().map(value).collect();
                let all = super::super::tests::on_each_isa(|| round_trip(&values, signed, key));
                prop_assert!(all.iter().all(|one| *one == all[0]));
                let stored = &all[0];
                for (group, stored) in values.chunks(GROUP).zip(stored.chunks(GROUP)) {
                    let largest = group.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
                    for (x, y) in group.iter().zip(stored) {
                        let off = (x - y).abs();
                        let unit = if signed { x.abs() / 8.0 } else { x / 16.0 };
                        if x.abs() >= largest / 16384.0 {
                            prop_assert!(off < unit * 1.0001, "{} {}", x, y);
                        } else {
                            prop_assert!(y.abs() <= largest / 8192.0 && (signed || *y > 0.0));
                        }
                        prop_assert!(*y == 0.0 || y.signum() == x.signum());
                    }
                }
                // A value that is exactly a code is kept.
                prop_assert_eq!(&round_trip(stored, signed, !key), stored);
            }
        }
    }

    #[test]
    fn rounding_is_unbiased_and_zero_and_nan_are_kept() {
        for signed in [false, true] {
            let mut values = vec![0.3137_f32; 1 << 16];
            values.iter_mut().step_by(GROUP).for_each(|x| *x = 0.9);
            let stored = round_trip(&values, signed, 5);
            let others = stored.iter().enumerate().filter(|(i, _)| i % GROUP != 0);
            let (count, sum) =
                others.fold((0.0, 0.0), |(n, sum), (_, y)| (n + 1.0, sum + f64::from(*y)));
            // A code's distance is 1/32 at most; five deviations of half of that over √65280.
            assert!((sum / count - 0.3137).abs() < 5.0 / 64.0 / 255.0, "{}", sum / count);

            assert_eq!(round_trip(&[0.0; 300], signed, 1), [0.0; 300]);
            let mut values = vec![1.0; 300];
            values[7] = f32::NAN;
            let stored = round_trip(&values, signed, 1);
            assert!(stored[..GROUP].iter().all(|x| x.is_nan()));
            assert_eq!(stored[GROUP..], [1.0; 300 - GROUP]);
            values[7] = f32::INFINITY;
            assert!(round_trip(&values, signed, 1)[0].is_nan());
        }
    }
}
