//! `ExactSum`: a sum that does not depend on the order of its terms, as three numbers that can be
//! added.

/// A sum of numbers, each rounded once to a multiple of 2^-60, without other rounding. So it does
/// not depend on the order of the numbers or their distribution over ranks.
///
/// Its parts are integers in units of 1, 2^-30 and 2^-60. The parts of several sums can be added
/// element by element, and yield the parts of the total. Exact as long as the integer part stays
/// below 2^53 and fewer than 2^23 sums are added. A non-finite number makes the value NaN or
/// infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExactSum {
    parts: [f64; 3],
}

/// Units of a part per unit of the previous part.
const RADIX: f64 = (1 << 30) as f64;

impl ExactSum {
    /// Number of parts.
    pub const PARTS: usize = 3;

    /// Creates a sum from its parts.
    #[must_use]
    pub fn from_parts(parts: [f64; 3]) -> Self {
        Self { parts }
    }

    /// Returns the parts, which can be added to others.
    #[must_use]
    pub fn parts(self) -> [f64; 3] {
        self.parts
    }

    /// Adds a number.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() {
            self.parts[0] += value;
            return;
        }
        // Truncation makes each difference exact.
        let whole = value.trunc();
        let rest = (value - whole) * RADIX;
        let units = [whole, rest.trunc(), (rest.fract() * RADIX).round()];
        for (part, unit) in self.parts.iter_mut().zip(units) {
            *part += unit;
        }
        self.carry();
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: Self) {
        for (part, more) in self.parts.iter_mut().zip(other.parts) {
            *part += more;
        }
        self.carry();
    }

    /// Carries over, so that the last parts are below [`RADIX`]: each sum has a unique form.
    fn carry(&mut self) {
        for part in [2, 1] {
            let over = (self.parts[part] / RADIX).floor();
            self.parts[part] -= over * RADIX;
            self.parts[part - 1] += over;
        }
    }

    /// Returns the sum, rounded to nearest.
    #[must_use]
    pub fn value(self) -> f64 {
        let [whole, middle, last] = self.parts;
        if !whole.is_finite() {
            return whole;
        }
        let units = ((whole as i128) << 60) + ((middle as i128) << 30) + last as i128;
        units as f64 / (RADIX * RADIX)
    }
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

    #[test]
    fn terms_of_any_size_are_summed() {
        let terms = [0.1, -0.1, 1e15, 0.25, -1e15, 3.0, -1e-30];
        assert_eq!(sum(&terms).value(), 3.25);
        assert_eq!(sum(&[]).value(), 0.0);
        assert_eq!(sum(&[-0.75, -0.5]).value(), -1.25);
        // Ten thousand times a number that f64 would round at each addition.
        assert_eq!(sum(&vec![0.1; 10_000]).value(), 1000.0);
    }

    #[test]
    fn small_negative_terms_are_not_lost() {
        let unit = 2_f64.powi(-60);
        assert_eq!(sum(&[-1e-17]).value(), -(1e-17 / unit).round() * unit);
        assert_eq!(sum(&[-unit; 1000]).value(), -1000.0 * unit);
        assert_eq!(ExactSum::from_parts([-1.0, RADIX - 1.0, RADIX - 1.0]).value(), -unit);
    }

    #[test]
    fn nan_and_infinity_propagate() {
        assert!(sum(&[1.0, f64::NAN, 2.0]).value().is_nan());
        assert_eq!(sum(&[1.0, f64::INFINITY, 2.0]).value(), f64::INFINITY);
        assert!(sum(&[f64::NEG_INFINITY, f64::INFINITY]).value().is_nan());
    }

    proptest! {
        #[test]
        fn a_sum_of_sums_is_the_sum(
            values in prop::collection::vec(-1e6..1e6_f64, 0..60), ranks in 1usize..7,
            seed in any::<u64>(),
        ) {
            let mut parts = [0.0; 3];
            for rank in (0..ranks as u64).rev() {
                let is_mine = |at: usize| (seed.rotate_left(7 * at as u32) ^ at as u64) % ranks as u64 == rank;
                let mine: Vec<_> = values.iter().enumerate().filter(|(at, _)| is_mine(*at)).map(|(_, v)| *v).collect();
                parts.iter_mut().zip(sum(&mine).parts()).for_each(|(total, part)| *total += part);
            }
            let whole = sum(&values).value();
            prop_assert_eq!(ExactSum::from_parts(parts).value().to_bits(), whole.to_bits());
            let plain: f64 = values.iter().sum();
            prop_assert!((whole - plain).abs() <= 1e-6, "{} {}", whole, plain);
        }
    }
}
