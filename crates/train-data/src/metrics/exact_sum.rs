//! `ExactSum`: the exact sum of numbers, as integers that ranks can add.

/// The exact sum of any `f64` numbers; only [`value`](Self::value) rounds. So it does not depend on
/// the order of the numbers or their distribution over ranks.
///
/// Its parts are integers, which count units of 2^1020, 2^990 and so on to 2^-1080: the whole range
/// of `f64`. The parts of several sums can be added element by element, in any order, and yield the
/// parts of the total, as long as fewer than 2^22 sums are added. A sum beyond the range of `f64`
/// is infinite only in [`value`](Self::value), so that later terms may bring it back. A NaN, or
/// infinities of both signs, make the value NaN; infinities of one sign make it infinite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExactSum {
    parts: [f64; Self::PARTS],
}

/// Bits of a part: units of a part per unit of the previous part are 2^`BITS`.
const BITS: i32 = 30;

const RADIX: f64 = (1 << BITS) as f64;

/// Exponent of the last part's unit: not above that of the smallest `f64`, 2^-1074.
const LAST_UNIT: i32 = -1080;

impl Default for ExactSum {
    fn default() -> Self {
        Self { parts: [0.0; Self::PARTS] }
    }
}

impl ExactSum {
    /// Number of parts.
    pub const PARTS: usize = 71;

    /// Creates a sum from its parts.
    #[must_use]
    pub fn from_parts(parts: [f64; Self::PARTS]) -> Self {
        Self { parts }
    }

    /// Returns the parts, which can be added to others.
    #[must_use]
    pub fn parts(self) -> [f64; Self::PARTS] {
        self.parts
    }

    /// Adds a number.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.parts[0] += value;
            return;
        }
        let bits = value.to_bits();
        let (exponent, fraction) = ((bits >> 52 & 0x7ff) as i32, bits & ((1 << 52) - 1));
        // The value is `integer` units of 2^(`exponent` - 1075); a subnormal has exponent 1, too.
        let integer = fraction | (u64::from(exponent > 0) << 52);
        let place = exponent.max(1) - 1075 - LAST_UNIT;
        let mut rest = u128::from(integer) << (place % BITS);
        let mut part = Self::PARTS - 1 - (place / BITS) as usize;
        while rest > 0 {
            let digits = (rest & ((1 << BITS) - 1)) as f64;
            self.add_to(part, digits.copysign(value));
            rest >>= BITS;
            part = part.saturating_sub(1);
        }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: Self) {
        for (part, more) in other.parts.into_iter().enumerate().filter(|(_, more)| *more != 0.0) {
            self.add_to(part, more);
        }
    }

    /// Adds units to a part, and carries over, so that all parts but the first stay below
    /// [`RADIX`].
    fn add_to(&mut self, mut part: usize, mut units: f64) {
        loop {
            let sum = self.parts[part] + units;
            if part == 0 || sum.abs() < RADIX || sum.is_nan() {
                self.parts[part] = sum;
                return;
            }
            // Truncation makes both differences exact, and avoids a borrow from all parts above.
            units = (sum / RADIX).trunc();
            self.parts[part] = sum - units * RADIX;
            part -= 1;
        }
    }

    /// Returns the sum, rounded to nearest.
    #[must_use]
    pub fn value(self) -> f64 {
        let first = self.parts[0];
        if !first.is_finite() {
            // One NaN, whatever its bits: they depend on the order of addition.
            return if first.is_nan() { f64::NAN } else { first };
        }
        let digits = self.parts.map(|part| part as i64);
        let carried = carry(digits);
        let (digits, sign) = match carried[0] < 0 {
            true => (carry(digits.map(|digit| -digit)), -1.0),
            false => (carried, 1.0),
        };
        let Some(first) = digits.iter().position(|digit| *digit != 0) else { return 0.0 };
        // At least 61 bits, of which the last one stands for all bits after them, so that they
        // round as the whole does.
        let last = (first + 2).min(Self::PARTS - 1);
        let leading =
            digits[first..=last].iter().fold(0, |sum, digit| (sum << BITS) | *digit as u128);
        let sticky = digits[last + 1..].iter().any(|digit| *digit != 0);
        let exponent = LAST_UNIT + BITS * (Self::PARTS - 1 - last) as i32;
        // In two steps, as 2^-1080 is no `f64`. A result below 2^-1022 has few enough bits to be
        // exact, so no bits are rounded twice.
        let leading = (leading | u128::from(sticky)) as f64;
        sign * leading * 2_f64.powi(exponent / 2) * 2_f64.powi(exponent - exponent / 2)
    }
}

/// Carries over from the last digit, so that all but the first are from 0 to 2^`BITS` - 1. The sign
/// of the first is that of the sum.
fn carry(mut digits: [i64; ExactSum::PARTS]) -> [i64; ExactSum::PARTS] {
    for place in (1..digits.len()).rev() {
        let over = digits[place] >> BITS;
        digits[place] -= over << BITS;
        digits[place - 1] += over;
    }
    digits
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sum(values: &[f64]) -> ExactSum {
        let mut sum = ExactSum::default();
        values.iter().for_each(|value| sum.add(*value));
        sum
    }

    /// Adds the sums of ranks as an all-reduce does: part by part.
    fn all_reduced(ranks: &[ExactSum]) -> ExactSum {
        let mut parts = [0.0; ExactSum::PARTS];
        for rank in ranks {
            parts.iter_mut().zip(rank.parts()).for_each(|(total, part)| *total += part);
        }
        ExactSum::from_parts(parts)
    }

    #[test]
    fn terms_of_any_size_are_summed() {
        let terms = [0.1, -0.1, 1e15, 0.25, -1e15, 3.0];
        assert_eq!(sum(&terms).value(), 3.25);
        assert_eq!(sum(&[]).value().to_bits(), 0);
        assert_eq!(sum(&[1e300, -1e300]).value().to_bits(), 0);
        assert_eq!(sum(&[-0.75, -0.5]).value(), -1.25);
        // Ten thousand times a number that f64 would round at each addition.
        assert_eq!(sum(&vec![0.1; 10_000]).value(), 1000.0);
    }

    #[test]
    fn sums_beyond_2_to_the_67_are_exact() {
        for (term, count) in [(1e30, 80), (1e22, 80), (2e19, 80), (3e38, 1), (1e300, 1 << 10)] {
            let terms = vec![term; count];
            let (up, down) =
                (sum(&terms), sum(&terms.iter().map(|term| -term).collect::<Vec<_>>()));
            assert_eq!(up.value() / count as f64, term, "{term}");
            assert_eq!(down.value() / count as f64, -term, "{term}");
            assert_eq!(all_reduced(&[up, up]).value(), 2.0 * up.value());
            let mut both = up;
            both.merge(down);
            assert_eq!(both.value(), 0.0);
        }
        assert_eq!(sum(&[1e30, 1.0, -1e30]).value(), 1.0);
    }

    #[test]
    fn a_sum_beyond_f64_is_infinite_until_it_is_back() {
        let mut huge = sum(&[f64::MAX; 3]);
        assert_eq!(huge.value(), f64::INFINITY);
        assert_eq!(all_reduced(&[huge, huge]).value(), f64::INFINITY);
        assert_eq!(sum(&[-f64::MAX; 3]).value(), f64::NEG_INFINITY);
        huge.add(-f64::MAX);
        huge.merge(sum(&[-f64::MAX]));
        assert_eq!(huge.value(), f64::MAX);
        // Rounds as any f64: half a unit of the last place is infinite, less is not.
        let half = 2_f64.powi(970);
        assert_eq!(sum(&[f64::MAX, half]).value(), f64::INFINITY);
        assert_eq!(sum(&[f64::MAX, half, -5e-324]).value(), f64::MAX);
    }

    #[test]
    fn small_terms_are_not_lost() {
        assert_eq!(sum(&[-1e-17]).value(), -1e-17);
        assert_eq!(sum(&[-5e-324; 1000]).value(), -1000.0 * 5e-324);
        assert_eq!(sum(&[f64::MIN_POSITIVE, -5e-324]).value(), f64::MIN_POSITIVE - 5e-324);
        assert_eq!(sum(&[1.0, -5e-324]).value(), 1.0);
        // Ties are to even, unless something is left after them.
        let half = f64::EPSILON / 2.0;
        assert_eq!(sum(&[1.0, half]).value(), 1.0);
        assert_eq!(sum(&[1.0, half, 5e-324]).value(), 1.0 + f64::EPSILON);
        assert_eq!(sum(&[-1.0, -half, -5e-324]).value(), -1.0 - f64::EPSILON);
    }

    #[test]
    fn nan_and_infinity_propagate() {
        assert!(sum(&[1.0, f64::NAN, 2.0]).value().is_nan());
        assert_eq!(sum(&[1.0, f64::INFINITY, 2.0]).value(), f64::INFINITY);
        assert_eq!(sum(&[f64::MAX, f64::NEG_INFINITY, f64::MAX]).value(), f64::NEG_INFINITY);
        assert!(sum(&[f64::NEG_INFINITY, f64::INFINITY]).value().is_nan());
        let [up, down] = [f64::INFINITY, f64::NEG_INFINITY].map(|infinity| sum(&[infinity, 1.0]));
        assert!(all_reduced(&[up, down]).value().is_nan());
        assert_eq!(all_reduced(&[sum(&[-1e300]), up]).value(), f64::INFINITY);
    }

    /// The sum in units of 2^-1074, in words of 32 bits, rounded bit by bit: the slow twin.
    fn plain(values: &[f64]) -> f64 {
        let mut words = [0_i128; 68];
        for value in values {
            let (bits, sign) = (value.abs().to_bits(), value.signum() as i128);
            let exponent = (bits >> 52) as usize;
            let integer = (bits & ((1 << 52) - 1)) | (u64::from(exponent > 0) << 52);
            let shift = exponent.max(1) - 1;
            let spread = i128::from(integer) << (shift % 32);
            words[shift / 32] += sign * (spread & 0xffff_ffff);
            words[shift / 32 + 1] += sign * ((spread >> 32) & 0xffff_ffff);
            words[shift / 32 + 2] += sign * (spread >> 64);
        }
        let carried = |mut words: [i128; 68]| {
            for at in 0..67 {
                let over = words[at] >> 32;
                words[at] -= over << 32;
                words[at + 1] += over;
            }
            words
        };
        let (up, down) = (carried(words), carried(words.map(|word| -word)));
        let (words, sign) = if up[67] < 0 { (down, -1.0) } else { (up, 1.0) };
        // Bits from the highest: 53 of them, the next one, and whether any is left.
        let bit = |at: usize| (words[at / 32] >> (at % 32)) & 1 == 1;
        let Some(top) = (0..68 * 32).rev().find(|at| bit(*at)) else { return 0.0 };
        let low = top.saturating_sub(52);
        let mut integer = (low..=top).rev().fold(0_u64, |sum, at| (sum << 1) | u64::from(bit(at)));
        let half = low > 0 && bit(low - 1);
        let left = low > 1 && (0..low - 1).any(bit);
        integer += u64::from(half && (left || integer % 2 == 1));
        // Doubling is exact until it overflows.
        sign * (0..low).fold(integer as f64 * 5e-324, |value, _| value * 2.0)
    }

    /// Numbers of all exponents, and of two that are near, so that sums cancel and round.
    fn any_finite() -> impl Strategy<Value = f64> {
        let bits = any::<u64>().prop_map(f64::from_bits);
        let near = (any::<f32>(), -60..60_i32).prop_map(|(x, e)| f64::from(x) * 2_f64.powi(e));
        let edges = prop::sample::select(vec![
            f64::MAX,
            f64::MIN,
            f64::MIN_POSITIVE,
            5e-324,
            -5e-324,
            0.0,
            -0.0,
            1.0,
            f64::EPSILON / 2.0,
            9_007_199_254_740_993.0,
        ]);
        prop_oneof![bits, near, edges].prop_filter("finite", |value| value.is_finite())
    }

    proptest! {
        /// Over the whole range of f64: exact or infinite, and the same bits on any number of
        /// ranks, in any order.
        #[test]
        fn a_sum_of_sums_is_the_exact_sum(
            values in prop::collection::vec(any_finite(), 0..60), ranks in 1usize..7,
            seed in any::<u64>(),
        ) {
            let mut sums = Vec::new();
            for rank in (0..ranks as u64).rev() {
                let is_mine = |at: usize| (seed.rotate_left(7 * at as u32) ^ at as u64) % ranks as u64 == rank;
                let mine: Vec<_> = values.iter().enumerate().filter(|(at, _)| is_mine(*at)).map(|(_, v)| *v).collect();
                sums.push(sum(&mine));
            }
            let whole = sum(&values).value();
            prop_assert_eq!(whole.to_bits(), plain(&values).to_bits(), "{} {}", whole, plain(&values));
            prop_assert_eq!(all_reduced(&sums).value().to_bits(), whole.to_bits());
            let mut merged = ExactSum::default();
            sums.iter().for_each(|sum| merged.merge(*sum));
            prop_assert_eq!(merged.value().to_bits(), whole.to_bits());
            let backwards: Vec<_> = values.iter().rev().copied().collect();
            prop_assert_eq!(sum(&backwards).value().to_bits(), whole.to_bits());
        }

        #[test]
        fn a_single_term_is_its_own_sum(value in any_finite(), count in 1i32..100) {
            prop_assert_eq!(sum(&[value]).value(), value);
            let many = sum(&vec![value; count as usize]).value();
            // A product of two f64 rounds once, as the sum.
            prop_assert_eq!(many, value * f64::from(count));
        }
    }
}
