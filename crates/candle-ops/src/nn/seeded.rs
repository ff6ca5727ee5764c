//! Initial values of parameters, reproducible from a seed.
//!
//! candle's CPU generator cannot be seeded, so values are drawn here. Each tensor has its own
//! stream, keyed by seed and tensor name: adding a layer does not change the values of the others,
//! and every rank draws the same.

use std::sync::PoisonError;

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::init::NormalOrUniform;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::check_size;

/// A builder like [`VarBuilder::from_varmap`], whose initial values depend only on `seed` and on
/// each variable's name, shape and [`Init`]: a model built twice has the same weights, also layers
/// of candle-nn. Values are drawn in `f32` and rounded to the variable's type; variables that are
/// in the map already are returned as they are.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_ops::nn::{VarMap, linear, seeded};
///
/// let weights = |seed| {
///     let vars = VarMap::new();
///     let layer = linear(8, 4, seeded(&vars, seed, DType::F32, &Device::Cpu).pp("fc"))?;
///     layer.weight().to_vec2::<f32>()
/// };
/// assert_eq!(weights(1)?, weights(1)?);
/// assert_ne!(weights(1)?, weights(2)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[must_use]
pub fn seeded(vars: &VarMap, seed: u64, dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Seeded::new(vars, seed)), dtype, device.clone())
}

/// Draws the variables that its map does not have.
pub(super) struct Seeded {
    vars: VarMap,
    seed: u64,
}

impl Seeded {
    pub(super) fn new(vars: &VarMap, seed: u64) -> Self {
        Self { vars: vars.clone(), seed }
    }

    /// Adds a variable to the map.
    pub(super) fn insert(&self, name: &str, values: &Tensor) -> Result<()> {
        let var = Var::from_tensor(values)?;
        let mut all = self.vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(name.to_owned(), var);
        Ok(())
    }
}

impl SimpleBackend for Seeded {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        if !self.contains_tensor(name) {
            // Values are drawn in host memory.
            check_size(name, &shape, dtype, &Device::Cpu)?;
            let values = initial_values(init, &shape, self.seed, name);
            let values = Tensor::from_vec(values, &shape, &Device::Cpu)?.to_dtype(dtype)?;
            self.insert(name, &values.to_device(device)?)?;
        }
        self.vars.get(shape, name, init, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        SimpleBackend::get_unchecked(&self.vars, name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vars.contains_tensor(name)
    }
}

/// Draws the initial values of the parameter `name`, in `f32`.
///
/// Uniform values lie in `[low, high)` before they are rounded to `f32`; normal ones are made by
/// the Box-Muller method in `f64`.
#[must_use]
pub fn initial_values(init: Init, shape: &Shape, seed: u64, name: &str) -> Vec<f32> {
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
    fn layers_of_candle_nn_are_seeded_by_name() {
        let build = |seed, names: &[&str]| {
            let vars = VarMap::new();
            let vb = seeded(&vars, seed, DType::BF16, &Device::Cpu);
            for name in names {
                candle_nn::linear(3, 2, vb.pp(name)).unwrap();
            }
            let all = vars.data().lock().unwrap();
            let of = |name: &str| {
                let var = all[name].to_dtype(DType::F32).unwrap();
                assert_eq!(all[name].dtype(), DType::BF16);
                var.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            };
            (of("b.weight"), of("b.bias"))
        };
        assert_eq!(build(1, &["a", "b"]), build(1, &["b"]));
        assert_ne!(build(1, &["b"]), build(2, &["b"]));
        // A variable that exists keeps its values, and its shape.
        let vars = VarMap::new();
        let kept = seeded(&vars, 1, DType::F32, &Device::Cpu).get(3, "x").unwrap();
        let vb = seeded(&vars, 2, DType::F32, &Device::Cpu);
        assert_eq!(vb.get(3, "x").unwrap().id(), kept.id());
        let error = vb.get(4, "x").unwrap_err().to_string();
        assert!(error.contains("shape mismatch on x"), "{error}");
    }

    #[test]
    fn stream_depends_on_seed_and_name_only() {
        let shape = Shape::from((4, 5));
        let init = Init::Uniform { lo: -1.0, up: 1.0 };
        let drawn = initial_values(init, &shape, 7, "a.weight");
        assert_eq!(drawn, initial_values(init, &shape, 7, "a.weight"));
        assert_ne!(drawn, initial_values(init, &shape, 8, "a.weight"));
        assert_ne!(drawn, initial_values(init, &shape, 7, "b.weight"));
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
            let drawn = initial_values(init, &shape, 1, "w");
            let count = drawn.len() as f64;
            let got = drawn.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
            let var = drawn.iter().map(|v| (f64::from(*v) - got).powi(2)).sum::<f64>() / count;
            assert!((got - mean).abs() <= 0.03 * stdev, "{init:?}: mean {got}");
            assert!((var.sqrt() - stdev).abs() <= 0.03 * stdev, "{init:?}: deviation {var}");
        }
    }
}
