//! Random tensors, with the random numbers of the entered [`Context`](crate::Context).
//!
//! candle's generators cannot be seeded on the CPU, and their state cannot be saved anywhere.

use std::f64::consts::TAU;

use candle_core::shape::Dim;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use crate::context::{self, Mode};
use crate::state::random::Random;

/// Uniform random numbers in `[low, high)`, drawn on the host and rounded to `f32` and to `dtype`:
/// in half precision, and for other bounds than 0 and 1, some are rounded to `high`.
/// Draws one random word per element from the entered [`Context`](crate::Context), in training and
/// in evaluation: a resumed run draws the same numbers.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_ops::{Context, rand};
///
/// let draw = || rand(-1.0, 1.0, (2, 3), DType::F32, &Device::Cpu)?.to_vec2::<f32>();
/// assert_eq!(Context::new(7).enter(draw)?, Context::new(7).enter(draw)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// No entered context; a dtype that is not a floating-point type; a failed copy to the device.
pub fn rand(
    low: f64,
    high: f64,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let of = |random: &mut Random| low + (high - low) * unit(random);
    draw("rand", shape.into(), (dtype, device), of)
}

/// Normally distributed random numbers, see [`rand`]; draws two random words per element. They are
/// made by the Box-Muller method in `f64`.
///
/// # Errors
///
/// As [`rand`].
pub fn randn(
    mean: f64,
    std: f64,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let of = |random: &mut Random| {
        // 1 - u is in (0, 1], where the logarithm is finite.
        let radius = (-2.0 * (1.0 - unit(random)).ln()).sqrt();
        mean + std * radius * (TAU * unit(random)).cos()
    };
    draw("randn", shape.into(), (dtype, device), of)
}

/// Draws indices along `dim` by the probabilities `softmax(logits / temperature)`; the largest
/// logits if the temperature is not positive. Draws one random word per logit from the entered
/// context, see [`rand`].
///
/// As candle-nn's function of this name, but reproducible. Ties go to the first index.
///
/// # Errors
///
/// As [`rand`]; no such dimension.
pub fn gumbel_softmax(logits: &Tensor, temperature: f64, dim: impl Dim) -> Result<Tensor> {
    if temperature <= 0.0 {
        return logits.argmax(dim);
    }
    let logits = logits.detach().to_dtype(DType::F32)?;
    let of = |random: &mut Random| {
        // In (0, 1), where both logarithms are finite.
        let unit = (f64::from(random.next()) + 0.5) / 4_294_967_296.0;
        -(-unit.ln()).ln() * temperature
    };
    let noise = draw("gumbel_softmax", logits.shape().clone(), (DType::F32, logits.device()), of)?;
    (logits + noise)?.argmax(dim)
}

/// A number in `[0, 1)` with 24 bits, as many as `f32` has.
fn unit(random: &mut Random) -> f64 {
    f64::from(random.next() >> 8) / 16_777_216.0
}

fn draw(
    name: &str,
    shape: Shape,
    (dtype, device): (DType, &Device),
    of: impl Fn(&mut Random) -> f64,
) -> Result<Tensor> {
    if !dtype.is_float() {
        bail!("{name}: {dtype:?} is not a floating-point type");
    }
    let values = context::with(|context| match context.mode {
        Mode::Outside => bail!(
            "{name}: no context has been entered: call it within a trainer's `step` or `evaluate`, or \
             `Context::new(seed).enter(..)`"
        ),
        Mode::Training | Mode::Evaluation => {
            let count = shape.elem_count();
            Ok((0..count).map(|_| of(&mut context.random) as f32).collect::<Vec<_>>())
        }
    })?;
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Context;

    const CPU: Device = Device::Cpu;

    fn moments(x: &Tensor) -> (f64, f64) {
        let x = x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
        (mean, var.sqrt())
    }

    #[test]
    fn moments_match_and_a_position_is_drawn_again() {
        let mut context = Context::new(3);
        let both = || {
            let shape = (200, 200);
            let uniform = rand(1.0, 3.0, shape, DType::F32, &CPU).unwrap();
            (uniform, randn(5.0, 2.0, shape, DType::F32, &CPU).unwrap())
        };
        let (uniform, normal) = context.enter(both);
        // With 40 000 draws the standard error of a mean is 0.005 deviations.
        let (mean, deviation) = moments(&uniform);
        assert!((mean - 2.0).abs() < 0.02 && (deviation - (1.0_f64 / 3.0).sqrt()).abs() < 0.02);
        let (mean, deviation) = moments(&normal);
        assert!((mean - 5.0).abs() < 0.05 && (deviation - 2.0).abs() < 0.05);
        assert_eq!(context.random_position(), 3 * 40_000);
        let later = context.evaluate(both).1;
        context.set_random_position(0);
        let again = context.enter(both).1;
        let bits = |x: &Tensor| x.to_vec2::<f32>().unwrap();
        assert_eq!(bits(&again), bits(&normal));
        assert_ne!(bits(&later), bits(&normal));
    }

    #[test]
    fn indices_are_drawn_by_their_probabilities() {
        let logits = Tensor::new(&[0_f32, 3_f32.ln()], &CPU).unwrap();
        let rows = logits.broadcast_as((10_000, 2)).unwrap();
        let share = |temperature| {
            let drawn = Context::new(1).enter(|| gumbel_softmax(&rows, temperature, 1).unwrap());
            moments(&drawn).0
        };
        // The binomial distribution has a deviation of 0.0043.
        assert!((share(1.0) - 0.75).abs() < 0.02);
        // At temperature 1/2 the odds are squared.
        assert!((share(0.5) - 0.9).abs() < 0.02);
        assert_eq!(share(0.0), 1.0);
    }

    #[test]
    fn numbers_outside_of_a_context_are_an_error() {
        let error = randn(0.0, 1.0, 2, DType::F32, &CPU).unwrap_err().to_string();
        assert!(error.contains("randn: no context has been entered"), "{error}");
        let error = Context::new(0).enter(|| rand(0.0, 1.0, 2, DType::I64, &CPU)).unwrap_err();
        assert!(error.to_string().contains("I64 is not a floating-point type"));
    }
}
