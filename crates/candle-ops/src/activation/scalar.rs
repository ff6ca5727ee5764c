//! Activations that are simple functions of one number: tanh, sigmoid, GELU in its tanh form, leaky
//! ReLU, ELU, Mish, hard swish, ReLU6.

use candle_core::{Result, Tensor};

use super::pointwise::{self, Activation};
use super::silu::END;
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device::{self, widened};

/// Defines an operator by an activation, and for a GPU by a composition of candle's operators.
macro_rules! activation {
    ($(#[$doc:meta])* $name:ident($($param:ident)?), $kind:ident, $at:expr, $composed:expr) => {
        $(#[$doc])*
        ///
        /// Any shape; computed in `f32`, or in `f64` for `f64`. NaN is propagated.
        ///
        /// # Errors
        ///
        /// An unsupported dtype.
        pub fn $name(x: &Tensor $(, $param: f64)?) -> Result<Tensor> {
            let [x] = cast(stringify!($name), [x])?;
            if device::dispatches(&x) {
                let [wide] = widened([&x])?;
                let composed: fn(&Tensor $(, $param: f64)?) -> Result<Tensor> = $composed;
                return composed(&wide $(, $param)?)?.to_dtype(x.dtype());
            }
            pointwise::apply($kind { $($param)? }, x)
        }

        #[derive(Clone, Copy)]
        struct $kind {
            $($param: f64,)?
        }

        impl Activation for $kind {
            const NAME: &'static str = stringify!($name);

            #[inline(always)]
            fn at<T: Real>(self, x: T) -> (T, T) {
                $at(x $(, T::of(self.$param))?)
            }
        }
    };
}

activation!(
    /// The hyperbolic tangent. Has an error of at most 3 ulp in `f32`.
    tanh(), Tanh, tanh_at, |x| x.tanh()
);
activation!(
    /// `1 / (1 + exp(-x))`, the logistic function.
    sigmoid(), Sigmoid, sigmoid_at, |x| composed_sigmoid(x)
);
activation!(
    /// GELU in its tanh form, `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`: PyTorch's
    /// `gelu` with `approximate="tanh"`, as in GPT-2 and Gemma. Negative infinity returns the limit
    /// 0 (PyTorch returns NaN).
    gelu_tanh(), GeluTanh, gelu_tanh_at, |x| {
        let bounded = clamped(x, -12.0, 12.0)?;
        let inner = (bounded.powf(3.0)? * CUBE)?;
        let tanh = ((inner + &bounded)? * ROOT)?.tanh()?;
        (clamped(x, -40.0, f64::INFINITY)? * 0.5)? * (tanh + 1.0)?
    }
);
activation!(
    /// `x`, or `slope * x` where `x` is negative. The derivative at 0 is `slope`, as in PyTorch.
    leaky_relu(slope), LeakyRelu, leaky_relu_at, |x, slope| {
        let scaled = (x * slope)?;
        x.detach().le(&x.zeros_like()?)?.where_cond(&scaled, x)
    }
);
activation!(
    /// `x`, or `alpha * (exp(x) - 1)` where `x` is negative.
    elu(alpha), Elu, elu_at, |x, alpha| {
        // Beyond 0 it is not selected, and must be finite.
        let low = ((clamped(x, -END, 1.0)?.exp()? - 1.0)? * alpha)?;
        x.detach().le(&x.zeros_like()?)?.where_cond(&low, x)
    }
);
activation!(
    /// `x * tanh(ln(1 + exp(x)))`. Negative infinity returns the limit 0.
    mish(), Mish, mish_at, |x| {
        let e = clamped(x, -END, 20.0)?.exp()?;
        let n = (e.sqr()? + (&e * 2.0)?)?;
        clamped(x, -END, f64::INFINITY)? * (&n / (&n + 2.0)?)?
    }
);
activation!(
    /// `x * clamp(x + 3, 0, 6) / 6`: PyTorch's `hardswish`.
    hard_swish(), HardSwish, hard_swish_at, |x| {
        let low = clamped(x, -3.0, f64::INFINITY)?;
        (&low * (clamped(x, -3.0, 3.0)? + 3.0)?)? / 6.0
    }
);
activation!(
    /// `x` between 0 and 6, else the nearer of both. The derivative is 0 at both.
    relu6(), Relu6, relu6_at, |x| clamped(x, 0.0, 6.0)
);

#[inline(always)]
pub(crate) fn tanh_at<T: Real>(x: T) -> (T, T) {
    let y = x.quick_tanh();
    (y, T::ONE - y * y)
}

#[inline(always)]
pub(crate) fn sigmoid_at<T: Real>(x: T) -> (T, T) {
    let bounded = bound(x, -END, END);
    let y = (T::ONE + (T::ZERO - bounded).quick_exp()).recip();
    (y, y * (T::ONE - y))
}

/// `sqrt(2 / pi)`.
const ROOT: f64 = 0.797_884_560_802_865_4;
/// Factor of the cube in GELU's tanh form.
const CUBE: f64 = 0.044_715;

#[inline(always)]
fn gelu_tanh_at<T: Real>(x: T) -> (T, T) {
    let (root, cube, half) = (T::of(ROOT), T::of(CUBE), T::of(0.5));
    // Infinity times zero is NaN; the results do not change beyond.
    let bounded = bound(x, -12.0, 12.0);
    let square = bounded * bounded;
    let tanh = (root * bounded * (T::ONE + cube * square)).quick_tanh();
    let share = half * (T::ONE + tanh);
    let slope = root * (T::ONE + T::of(3.0) * cube * square);
    let low = if x < T::of(-12.0) { bounded } else { x };
    (low * share, share + half * bounded * (T::ONE - tanh * tanh) * slope)
}

#[inline(always)]
fn leaky_relu_at<T: Real>(x: T, slope: T) -> (T, T) {
    if x <= T::ZERO { (x * slope, slope) } else { (x, T::ONE) }
}

#[inline(always)]
fn elu_at<T: Real>(x: T, alpha: T) -> (T, T) {
    // exp(x) - 1 = 2 t / (1 - t), whose small values are exact.
    let t = (T::of(0.5) * bound(x, -END, 0.0)).quick_tanh();
    let low = alpha * (t + t) / (T::ONE - t);
    if x <= T::ZERO { (low, low + alpha) } else { (x, T::ONE) }
}

#[inline(always)]
fn mish_at<T: Real>(x: T) -> (T, T) {
    let (bounded, two) = (bound(x, -END, 20.0), T::of(2.0));
    let e = bounded.quick_exp();
    let (n, sum) = (e * e + two * e, e + T::ONE);
    let inverse = (n + two).recip();
    let share = n * inverse;
    let low = if x < T::of(-END) { bounded } else { x };
    (low * share, share + bounded * T::of(4.0) * e * sum * inverse * inverse)
}

#[inline(always)]
fn hard_swish_at<T: Real>(x: T) -> (T, T) {
    let (three, sixth) = (T::of(3.0), T::of(1.0 / 6.0));
    let low = if x < T::of(-3.0) { T::of(-3.0) } else { x };
    let share = (bound(x, -3.0, 3.0) + three) * sixth;
    let slope = if x <= T::of(-3.0) {
        T::ZERO
    } else if x >= three {
        T::ONE
    } else {
        (x + x + three) * sixth
    };
    (low * share, slope)
}

#[inline(always)]
fn relu6_at<T: Real>(x: T) -> (T, T) {
    let y = bound(x, 0.0, 6.0);
    let is_bound = x <= T::ZERO || x >= T::of(6.0);
    (y, if is_bound { T::ZERO } else { T::ONE })
}

/// Between two numbers; NaN stays.
#[inline(always)]
fn bound<T: Real>(x: T, low: f64, high: f64) -> T {
    let (low, high) = (T::of(low), T::of(high));
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// The same of a tensor: candle's `clamp` may lose a NaN.
fn clamped(x: &Tensor, low: f64, high: f64) -> Result<Tensor> {
    let mut x = x.clone();
    if low.is_finite() {
        let low = (x.zeros_like()? + low)?;
        x = x.detach().le(&low)?.where_cond(&low, &x)?;
    }
    if high.is_finite() {
        let high = (x.zeros_like()? + high)?;
        x = x.detach().ge(&high)?.where_cond(&high, &x)?;
    }
    Ok(x)
}

fn composed_sigmoid(x: &Tensor) -> Result<Tensor> {
    (clamped(x, -END, END)?.neg()?.exp()? + 1.0)?.recip()
}
