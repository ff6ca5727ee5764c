//! Initial values of parameters, reproducible from a seed.
//!
//! candle's CPU generator cannot be seeded, so values are drawn here. Each tensor has its own
//! stream, keyed by seed and tensor name: adding a layer does not change the values of the others,
//! and every rank draws the same.

use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Draws the values of tensor `name`, in `f32`.
///
/// Uniform values lie in `[low, high)`; normal ones are made by the Box-Muller method in `f64`.
pub(super) fn values(init: Init, shape: &Shape, seed: u64, name: &str) -> Vec<f32> {
    let count = shape.elem_count();
    let mut rng = stream(seed, name);
    match init {
        Init::Const(value) => vec![value as f32; count],
        Init::Uniform { lo, up } => uniform(&mut rng, lo, up, count),
        Init::Randn { mean, stdev } => normal(&mut rng, mean, stdev, count),
        Init::Kaiming { dist, fan, non_linearity } => {
            let stdev = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => normal(&mut rng, 0.0, stdev, count),
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * stdev;
                    uniform(&mut rng, -bound, bound, count)
                }
            }
        }
    }
}

fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&fnv1a(name.as_bytes()).to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// FNV-1a hash: different names yield different streams; resistance to attacks is not needed.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Draws a uniform number in `[0, 1)` with 53 bits.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

fn uniform(rng: &mut ChaCha8Rng, low: f64, high: f64, count: usize) -> Vec<f32> {
    (0..count).map(|_| (low + (high - low) * unit(rng)) as f32).collect()
}

fn normal(rng: &mut ChaCha8Rng, mean: f64, stdev: f64, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| {
            // 1 - u is in (0, 1], where the logarithm is finite.
            let radius = (-2.0 * (1.0 - unit(rng)).ln()).sqrt();
            let angle = std::f64::consts::TAU * unit(rng);
            (mean + stdev * radius * angle.cos()) as f32
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use candle_nn::init::{DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM};

    use super::*;

    #[test]
    fn stream_depends_on_seed_and_name_only() {
        let shape = Shape::from((4, 5));
        let init = Init::Uniform { lo: -1.0, up: 1.0 };
        let drawn = values(init, &shape, 7, "a.weight");
        assert_eq!(drawn, values(init, &shape, 7, "a.weight"));
        assert_ne!(drawn, values(init, &shape, 8, "a.weight"));
        assert_ne!(drawn, values(init, &shape, 7, "b.weight"));
    }

    #[test]
    fn moments_match_the_distribution() {
        // With 40 000 draws the standard error of a mean is 0.005 deviations.
        let shape = Shape::from((200, 200));
        for (init, mean, stdev) in [
            (Init::Randn { mean: 3.0, stdev: 2.0 }, 3.0, 2.0),
            (Init::Uniform { lo: 1.0, up: 2.0 }, 1.5, (1f64 / 12.0).sqrt()),
            (DEFAULT_KAIMING_NORMAL, 0.0, (2f64 / 200.0).sqrt()),
            (DEFAULT_KAIMING_UNIFORM, 0.0, (2f64 / 200.0).sqrt()),
            (Init::Const(4.0), 4.0, 0.0),
        ] {
            let drawn = values(init, &shape, 1, "w");
            let count = drawn.len() as f64;
            let got = drawn.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
            let var = drawn.iter().map(|v| (f64::from(*v) - got).powi(2)).sum::<f64>() / count;
            assert!((got - mean).abs() <= 0.03 * stdev, "{init:?}: mean {got}");
            assert!((var.sqrt() - stdev).abs() <= 0.03 * stdev, "{init:?}: deviation {var}");
        }
    }
}
