//! Random numbers of a sample: plain functions, because checkpoints depend on the values.

use rand_chacha::rand_core::Rng;

use crate::SampleRng;
pub(super) use crate::sampler::{below, shuffle};

/// Draws a number from 0 to 1, exclusive.
pub(super) fn unit(random: &mut SampleRng) -> f64 {
    (random.next_u64() >> 11) as f64 * 2.0_f64.powi(-53)
}

/// Draws a number from `low` to `high`.
pub(super) fn uniform(random: &mut SampleRng, [low, high]: [f64; 2]) -> f64 {
    between([low, high], unit(random))
}

/// Returns the number at the fraction `part`, from 0 to 1, of a range.
pub(super) fn between([low, high]: [f64; 2], part: f64) -> f64 {
    low + (high - low) * part
}

/// Draws from Beta(`alpha`, `alpha`); `alpha` is positive and finite.
pub(super) fn beta(random: &mut SampleRng, alpha: f64) -> f64 {
    let [a, b] = [gamma(random, alpha), gamma(random, alpha)];
    // Both underflow to 0 only for tiny `alpha`, whose distribution is 0 or 1.
    if a + b > 0.0 { a / (a + b) } else { below(random, 2) as f64 }
}

/// Draws from Gamma(`shape`, 1).
///
/// Follows: Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables", 2000.
fn gamma(random: &mut SampleRng, shape: f64) -> f64 {
    if shape < 1.0 {
        let power = (1.0 - unit(random)).powf(1.0 / shape);
        return gamma(random, shape + 1.0) * power;
    }
    let d = shape - 1.0 / 3.0;
    loop {
        let x = normal(random);
        let v = (1.0 + x / (9.0 * d).sqrt()).powi(3);
        if v > 0.0 && (1.0 - unit(random)).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// Draws from the standard normal distribution (Box-Muller).
fn normal(random: &mut SampleRng) -> f64 {
    let radius = (-2.0 * (1.0 - unit(random)).ln()).sqrt();
    radius * (2.0 * std::f64::consts::PI * unit(random)).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draw;

    /// Mean and variance of 20 000 numbers.
    fn moments(mut number: impl FnMut(&mut SampleRng) -> f64) -> (f64, f64) {
        let mut random = Draw::from(1).random();
        let numbers: Vec<f64> = (0..20_000).map(|_| number(&mut random)).collect();
        let mean = numbers.iter().sum::<f64>() / 20_000.0;
        (mean, numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 20_000.0)
    }

    #[test]
    fn distributions_have_their_moments() {
        // Five standard errors of each mean and variance.
        let close = |(mean, variance): (f64, f64), m: f64, v: f64| {
            assert!((mean - m).abs() < 5.0 * (v / 20_000.0).sqrt(), "mean {mean}, not {m}");
            assert!((variance / v - 1.0).abs() < 0.1, "variance {variance}, not {v}");
        };
        close(moments(|r| uniform(r, [2.0, 4.0])), 3.0, 1.0 / 3.0);
        close(moments(|r| below(r, 5) as f64), 2.0, 2.0);
        close(moments(normal), 0.0, 1.0);
        for alpha in [0.2, 1.0, 3.5] {
            close(moments(|r| gamma(r, alpha)), alpha, alpha);
            close(moments(|r| beta(r, alpha)), 0.5, 0.25 / (2.0 * alpha + 1.0));
        }
    }
}
