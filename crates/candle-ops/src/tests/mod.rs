//! Tests that compare each operator with candle's own if that has a backward pass, with plain
//! loops, with central differences in `f64`, and in half precision with itself in `f32`.

mod composed_tests;
mod half_tests;
mod image_tests;
mod shape_tests;
mod transformer_tests;
mod width_tests;

use candle_core::{D, DType, Device, Result, Shape, Tensor, Var};
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::cpu::real::Real;
use crate::graph::operator::{Input, Operator, apply1};
use crate::*;

/// Standard normal values, seeded by `name`.
pub(crate) fn values(name: &str, shape: &[usize]) -> Tensor {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // In `[0, 1)`, with all 53 bits.
    let mut unit = || (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64);
    // The Box-Muller method; 1 - u is in (0, 1], where the logarithm is finite.
    let mut normal =
        || ((-2.0 * (1.0 - unit()).ln()).sqrt() * (std::f64::consts::TAU * unit()).cos()) as f32;
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| normal()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

pub(crate) fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The output, and the gradient of each input, for a fixed random gradient of the output.
pub(crate) fn run(
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let vars: Vec<_> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tensors: Vec<_> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = op(&tensors)?;
    let dy = values("dy", y.dims()).to_dtype(y.dtype())?;
    let grads = (&y * dy)?.sum_all()?.backward()?;
    let gradients = vars.iter().map(|v| grads.get(v).expect("a gradient").clone());
    Ok(std::iter::once(y.detach()).chain(gradients).collect())
}

fn flat_f64(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest difference, relative to the largest value.
pub(crate) fn distance(a: &Tensor, b: &Tensor) -> f64 {
    distance_within(a, b, 1e-3)
}

/// [`distance`], relative to `scale` if that is larger.
pub(crate) fn distance_within(a: &Tensor, b: &Tensor, scale: f64) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (flat_f64(a), flat_f64(b));
    let scale = b.iter().fold(scale.max(1e-3), |m, v| m.max(v.abs()));
    a.iter().zip(&b).fold(0f64, |m, (a, b)| m.max((a - b).abs())) / scale
}

/// Asserts that the output and all gradients of `ours` equal those of `stock`, except for the order
/// of summation.
pub(crate) fn assert_same(
    what: &str,
    inputs: &[Tensor],
    ours: impl Fn(&[Tensor]) -> Result<Tensor>,
    stock: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let (ours, stock) = (run(inputs, ours).unwrap(), run(inputs, stock).unwrap());
    for (i, (ours, stock)) in ours.iter().zip(&stock).enumerate() {
        let distance = distance(ours, stock);
        assert!(distance < 1e-4, "{what}: tensor {i} is off by {distance}");
    }
}

/// Asserts that in `f64` all gradients equal central differences, and that in `f32` output and
/// gradients equal those of `f64`, except for rounding. Steps of 2^-17 have a third-order error of
/// about 1e-10, and a rounding error of the same size: 1e-7 of the largest value is far from both,
/// and from the effect of any missing term.
///
/// This must hold for the loops and for the compositions, and both must agree.
pub(crate) fn assert_differentiates(
    what: &str,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    differentiates(what, inputs, &op);
    composed(|| differentiates(&format!("{what}, composed"), inputs, &op));
    let inputs: Vec<_> = inputs.iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect();
    let kernels = run(&inputs, &op).unwrap();
    let composed = composed(|| run(&inputs, &op).unwrap());
    for (i, (composed, kernels)) in composed.iter().zip(&kernels).enumerate() {
        let distance = distance(composed, kernels);
        assert!(distance < 1e-9, "{what}, composed: tensor {i} is off by {distance}");
    }
}

fn differentiates(what: &str, inputs: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let step = 1.0 / 131_072.0;
    let narrow = run(inputs, &op).unwrap();
    let inputs: Vec<_> = inputs.iter().map(|t| t.to_dtype(DType::F64).unwrap()).collect();
    let exact = run(&inputs, &op).unwrap();
    for (i, (narrow, exact)) in narrow.iter().zip(&exact).enumerate() {
        assert_eq!((narrow.dtype(), exact.dtype()), (DType::F32, DType::F64), "{what}: tensor {i}");
        let distance = distance(narrow, exact);
        assert!(distance < 1e-5, "{what}: tensor {i} in f32 is off by {distance}");
    }
    let dy = flat_f64(&values("dy", exact[0].dims()));
    let objective = |inputs: &[Tensor]| -> f64 {
        let y = flat_f64(&op(inputs).unwrap());
        y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
    };
    for (i, input) in inputs.iter().enumerate() {
        let start = flat_f64(input);
        let slope = |e: usize| {
            let at = |delta: f64| {
                let mut moved = start.clone();
                moved[e] += delta;
                let mut inputs = inputs.clone();
                inputs[i] = Tensor::from_vec(moved, input.dims(), &Device::Cpu).unwrap();
                objective(&inputs)
            };
            (at(step) - at(-step)) / (2.0 * step)
        };
        let numeric: Vec<f64> = (0..start.len()).map(slope).collect();
        let numeric = Tensor::from_vec(numeric, input.dims(), &Device::Cpu).unwrap();
        let distance = distance(&exact[i + 1], &numeric);
        assert!(distance < 1e-7, "{what}: gradient {i} is off by {distance}");
    }
}

/// Asserts that in half precision, output and gradients equal those of `f32` on the same values,
/// rounded once.
pub(crate) fn assert_rounds_once(
    what: &str,
    inputs: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    for dtype in [DType::F16, DType::BF16] {
        let cast = |tensors: &[Tensor], to| -> Vec<Tensor> {
            tensors.iter().map(|t| t.to_dtype(to).unwrap()).collect()
        };
        let halves = cast(inputs, dtype);
        let wide = cast(&halves, DType::F32);
        let half = run(&halves, &op).unwrap();
        // The same gradient of the output in both: rounded, if the output is rounded.
        let output = half[0].dtype();
        let wide = run(&wide, |t| op(t)?.apply_op1(RoundGradient(output))).unwrap();
        for (i, (half, wide)) in half.iter().zip(&wide).enumerate() {
            if half.dtype() == dtype {
                let wide = wide.to_dtype(dtype).unwrap();
                assert_eq!(flat(half), flat(&wide), "{what}: tensor {i} in {dtype:?}");
            }
        }
    }
}

/// The identity, with a backward pass that rounds.
struct RoundGradient(DType);

impl candle_core::CustomOp1 for RoundGradient {
    fn name(&self) -> &'static str {
        "round_gradient"
    }

    fn cpu_fwd(
        &self,
        x: &candle_core::CpuStorage,
        layout: &candle_core::Layout,
    ) -> Result<(candle_core::CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(dy.to_dtype(self.0)?.to_dtype(DType::F32)?))
    }
}

/// The square, with a gradient that is wrong by a millionth.
struct Off;

impl Operator<1> for Off {
    const NAME: &'static str = "off";

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        Ok((x.values::<T>()?.iter().map(|x| *x * *x).collect(), x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let slope = |(x, dy): (&T, &T)| T::of(2.000_002) * *x * *dy;
        Ok([Some(x.values::<T>()?.iter().zip(&*dy.values::<T>()?).map(slope).collect())])
    }
}

#[test]
#[should_panic(expected = "off: gradient 0 is off by")]
fn gradient_check_finds_an_error_of_a_millionth() {
    assert_differentiates("off", &[values("x", &[3, 5])], |t| apply1(Off, [t[0].clone()]));
}

#[test]
fn conv2d_is_candles() {
    for (size, kernel, stride, padding) in
        [(9, 3, 1, 1), (9, 3, 2, 1), (8, 3, 2, 1), (6, 1, 1, 0), (7, 1, 2, 0), (5, 5, 1, 2)]
    {
        let inputs = [
            values("x", &[3, 2, size, size]),
            values("w", &[4, 2, kernel, kernel]),
            values("b", &[4]),
        ];
        let window = Window { stride, padding };
        let what = format!("{size} {kernel} {window:?}");
        assert_same(
            &what,
            &inputs,
            |t| conv2d(&t[0], &t[1], Some(&t[2]), window),
            |t| {
                t[0].conv2d(&t[1], padding, stride, 1, 1)?
                    .broadcast_add(&t[2].reshape((1, 4, 1, 1))?)
            },
        );
        let op = |t: &[Tensor]| conv2d(&t[0], &t[1], None, window);
        assert_rounds_once(&what, &inputs[..2], op);
    }
}

#[test]
fn conv2d_differentiates() {
    let inputs = [values("x", &[2, 2, 4, 5]), values("w", &[3, 2, 3, 3]), values("b", &[3])];
    let window = Window { stride: 2, padding: 1 };
    assert_differentiates("by columns", &inputs, |t| conv2d(&t[0], &t[1], Some(&t[2]), window));
    // Enough channels for tiles; sizes that are not multiples of a tile.
    let inputs = [values("x", &[2, 16, 3, 5]), values("w", &[16, 16, 3, 3]), values("b", &[16])];
    let window = Window { stride: 1, padding: 1 };
    assert_differentiates("by tiles", &inputs, |t| conv2d(&t[0], &t[1], Some(&t[2]), window));
}

#[test]
fn conv2d_refuses_what_does_not_fit() {
    let x = values("x", &[1, 2, 4, 4]);
    let fails = |weight: &[usize], window| {
        conv2d(&x, &values("w", weight), None, window).unwrap_err().to_string()
    };
    let one = Window::default();
    assert!(fails(&[1, 3, 3, 3], one).contains("channels"));
    assert!(fails(&[1, 2, 5, 5], one).contains("does not fit"));
    assert!(fails(&[1, 2, 3, 3], Window { stride: 0, padding: 0 }).contains("does not fit"));
    assert!(fails(&[0, 2, 3, 3], one).contains("no channels"));
    let [x, weight] = [[1, 0, 4, 4], [2, 0, 3, 3]].map(|shape| values("x", &shape));
    let error = conv2d(&x, &weight, None, one).unwrap_err().to_string();
    assert!(error.contains("no channels"), "{error}");
}

/// Convolution and both gradients by definition.
fn conv2d_loops(x: &Tensor, w: &Tensor, dy: &Tensor, window: Window) -> [Vec<f32>; 3] {
    let (n, c, height, width) = x.dims4().unwrap();
    let (o, _, kh, kw) = w.dims4().unwrap();
    let (_, _, oh, ow) = dy.dims4().unwrap();
    let (x, w, dy) = (flat(x), flat(w), flat(dy));
    let mut y = vec![0.0; dy.len()];
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    for (i, o_, y_, x_) in itertools4(n, o, oh, ow) {
        for (c_, ky, kx, _) in itertools4(c, kh, kw, 1) {
            let row = (y_ * window.stride + ky).checked_sub(window.padding);
            let col = (x_ * window.stride + kx).checked_sub(window.padding);
            let (Some(row), Some(col)) = (row, col) else { continue };
            if row >= height || col >= width {
                continue;
            }
            let at_y = ((i * o + o_) * oh + y_) * ow + x_;
            let at_x = ((i * c + c_) * height + row) * width + col;
            let at_w = ((o_ * c + c_) * kh + ky) * kw + kx;
            y[at_y] += x[at_x] * w[at_w];
            dx[at_x] += dy[at_y] * w[at_w];
            dw[at_w] += dy[at_y] * x[at_x];
        }
    }
    [y, dx, dw]
}

fn itertools4(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    (0..a * b * c * d).map(move |i| (i / (b * c * d), i / (c * d) % b, i / d % c, i % d))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// By tiles and by columns, in groups of every size: both directions, several sizes and
    /// paddings.
    #[test]
    fn conv2d_is_the_same_by_every_algorithm(
        n in 1usize..6, c in 1usize..5, o in 1usize..5, height in 1usize..12, width in 1usize..40,
        padding in 0usize..4, with_bias in any::<bool>(),
    ) {
        prop_assume!(3 <= height + 2 * padding && 3 <= width + 2 * padding);
        let window = Window { stride: 1, padding };
        let (x, w) = (values("x", &[n, c, height, width]), values("w", &[o, c, 3, 3]));
        let b = flat(&values("b", &[o]));
        let b = with_bias.then_some(&b[..]);
        for (ours, loops) in conv::by_every_algorithm(&x, &w, b, window) {
            let scale = loops.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
            let off = ours.iter().zip(&loops).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            // A sum may be much smaller than its terms.
            prop_assert!(ours.len() == loops.len() && off < 1e-4 * scale, "{off} of {scale}");
        }
    }

    #[test]
    fn conv2d_equals_its_loops(
        n in 1usize..40, c in 1usize..4, o in 1usize..4, height in 1usize..9, width in 1usize..9,
        kh in 1usize..5, kw in 1usize..5, stride in 1usize..4, padding in 0usize..4,
    ) {
        let window = Window { stride, padding };
        prop_assume!(kh <= height + 2 * padding && kw <= width + 2 * padding);
        let inputs = [values("x", &[n, c, height, width]), values("w", &[o, c, kh, kw])];
        let ours = run(&inputs, |t| conv2d(&t[0], &t[1], None, window)).unwrap();
        let dy = values("dy", ours[0].dims());
        for (ours, loops) in ours.iter().zip(conv2d_loops(&inputs[0], &inputs[1], &dy, window)) {
            let loops = Tensor::from_vec(loops, ours.dims(), &Device::Cpu).unwrap();
            prop_assert!(distance(ours, &loops) < 1e-4);
        }
    }

    #[test]
    fn max_pool2d_equals_its_loops(
        n in 1usize..3, height in 1usize..9, width in 1usize..9,
        kernel in 1usize..5, stride in 1usize..4, padding in 0usize..3,
    ) {
        let window = Window { stride, padding };
        prop_assume!(padding <= kernel / 2);
        prop_assume!(kernel <= height + 2 * padding && kernel <= width + 2 * padding);
        let x = values("x", &[n, 2, height, width]);
        let ours = run(std::slice::from_ref(&x), |t| max_pool2d(&t[0], kernel, window)).unwrap();
        let (_, _, oh, ow) = ours[0].dims4().unwrap();
        let (x, dy) = (flat(&x), flat(&values("dy", ours[0].dims())));
        let (mut y, mut dx) = (Vec::new(), vec![0.0; x.len()]);
        for (i, c, y_, x_) in itertools4(n, 2, oh, ow) {
            let mut best: Option<usize> = None;
            for (ky, kx, _, _) in itertools4(kernel, kernel, 1, 1) {
                let row = (y_ * stride + ky).checked_sub(padding).filter(|r| *r < height);
                let col = (x_ * stride + kx).checked_sub(padding).filter(|c| *c < width);
                let (Some(row), Some(col)) = (row, col) else { continue };
                let at = ((i * 2 + c) * height + row) * width + col;
                if best.is_none_or(|best| x[at] > x[best]) {
                    best = Some(at);
                }
            }
            let best = best.expect("a window covers something");
            dx[best] += dy[y.len()];
            y.push(x[best]);
        }
        prop_assert_eq!(flat(&ours[0]), y);
        prop_assert_eq!(flat(&ours[1]), dx);
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "beside candle's own, whose gradient is a quarter")]
fn max_pool2d_differentiates() {
    let inputs = [values("x", &[2, 3, 6, 6])];
    let two = Window { stride: 2, padding: 0 };
    let ours = |t: &[Tensor]| max_pool2d(&t[0], 2, two);
    // The gradient of candle 0.11.1 is a quarter of the correct one, as documented in this module's
    // parent.
    let (whole, stock) =
        (run(&inputs, ours).unwrap(), run(&inputs, |t| t[0].max_pool2d(2)).unwrap());
    assert_eq!(flat(&whole[0]), flat(&stock[0]));
    assert_eq!(flat(&whole[1]), flat(&(&stock[1] * 4.0).unwrap()));
    assert_rounds_once("2 x 2", &inputs, ours);
    // Values far apart, so that no step changes the largest one.
    let x: Vec<f32> = (0..50).map(|i| ((i * 7) % 50) as f32).collect();
    let inputs = [Tensor::from_vec(x, (1, 2, 5, 5), &Device::Cpu).unwrap()];
    assert_differentiates("2 x 2", &inputs, ours);
    let stem = Window { stride: 2, padding: 1 };
    assert_differentiates("3 x 3 / 2", &inputs, |t| max_pool2d(&t[0], 3, stem));
}

#[test]
fn max_pool2d_keeps_nan_and_negative_infinity() {
    let pool = |values: Vec<f32>| {
        let x = Var::from_vec(values, (1, 1, 1, 2), &Device::Cpu).unwrap();
        let window = Window { stride: 1, padding: 1 };
        let y = max_pool2d(&x, 3, window).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        (flat(&y), flat(grads.get(&x).unwrap()))
    };
    assert!(pool(vec![f32::NAN, 1.0]).0.iter().all(|v| v.is_nan()));
    assert!(pool(vec![1.0, f32::NAN]).0.iter().all(|v| v.is_nan()));
    let (y, dx) = pool(vec![f32::NEG_INFINITY; 2]);
    assert_eq!(y, [f32::NEG_INFINITY; 2]);
    assert_eq!(dx, [2.0, 0.0]);
}

/// Batch normalization composed of candle's operators, each of which has a backward pass.
fn batch_norm_of_stock_ops(t: &[Tensor], eps: f64, relu: bool) -> Result<Tensor> {
    let mean = t[0].mean_keepdim((0, 2, 3))?;
    let centred = t[0].broadcast_sub(&mean)?;
    let var = centred.sqr()?.mean_keepdim((0, 2, 3))?;
    let normal = centred.broadcast_div(&(var + eps)?.sqrt()?)?;
    let channels = (1, t[1].elem_count(), 1, 1);
    let y =
        normal.broadcast_mul(&t[1].reshape(channels)?)?.broadcast_add(&t[2].reshape(channels)?)?;
    if relu { y.relu() } else { Ok(y) }
}

#[test]
fn batch_norm_is_candles() {
    // 5 x 7 pixels: whole vectors and a remainder.
    let x = (values("x", &[4, 3, 5, 7]) * 2.0).unwrap() + 5.0;
    let inputs = [x.unwrap(), values("gamma", &[3]), values("beta", &[3])];
    for relu in [false, true] {
        let options = BatchNormOptions { eps: 1e-5, relu };
        let ours = |t: &[Tensor]| Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0);
        assert_same("batch_norm", &inputs, ours, |t| batch_norm_of_stock_ops(t, 1e-5, relu));
        assert_rounds_once("batch_norm", &inputs, ours);
    }
}

#[test]
fn batch_norm_differentiates() {
    let inputs = [values("x", &[2, 2, 2, 3]), values("gamma", &[2]), values("beta", &[2])];
    for relu in [false, true] {
        let options = BatchNormOptions { eps: 1e-5, relu };
        assert_differentiates("batch_norm", &inputs, |t| {
            Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0)
        });
        let given = |values: [f32; 2]| Tensor::new(&values, &Device::Cpu).unwrap();
        let given = Statistics { mean: given([0.5, -0.5]), var: given([2.0, 0.5]) };
        assert_differentiates("batch_norm_with", &inputs, |t| {
            batch_norm_with(&t[0], &t[1], &t[2], &given, options)
        });
    }
}

#[test]
fn batch_norm_measures_far_from_zero() {
    // Mean 1000, deviation 1: the mean square would lose all digits of the variance.
    let x = (values("x", &[8, 1, 16, 16]) + 1000.0).unwrap();
    let one = Tensor::ones(1, DType::F32, &Device::Cpu).unwrap();
    let options = BatchNormOptions { eps: 0.0, relu: false };
    let (_, statistics) = batch_norm(&x, &one, &one, options).unwrap();
    let exact = flat(&x).iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
    let mean = exact.iter().sum::<f64>() / 2048.0;
    let var = exact.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 2048.0;
    let (got_mean, got_var) = (flat_f64(&statistics.mean)[0], flat_f64(&statistics.var)[0]);
    assert!((got_mean - mean).abs() < 1e-4);
    assert!((got_var / var - 1.0).abs() < 1e-4);
}

#[test]
fn batch_norm_refuses_what_does_not_fit() {
    let one = Tensor::ones(1, DType::F32, &Device::Cpu).unwrap();
    let options = BatchNormOptions { eps: 1e-5, relu: false };
    let fails = |shape: &[usize]| {
        batch_norm(&values("x", shape), &one, &one, options).unwrap_err().to_string()
    };
    let advice = "if the last batch of an epoch has a single sample, drop it (`drop_last`)";
    assert!(fails(&[1, 1, 1, 1]).contains("one value per channel"));
    assert!(fails(&[1, 1, 1, 1]).contains(advice), "{}", fails(&[1, 1, 1, 1]));
    assert!(fails(&[0, 1, 1, 1]).contains("no value per channel"));
    assert!(fails(&[2, 3, 2, 2]).contains("3 channels"));
}

#[test]
fn linear_is_candles() {
    let inputs = [values("x", &[5, 7]), values("w", &[3, 7]), values("b", &[3])];
    let ours = |t: &[Tensor]| linear(&t[0], &t[1], Some(&t[2]));
    assert_same("linear", &inputs, ours, |t| t[0].matmul(&t[1].t()?)?.broadcast_add(&t[2]));
    assert_rounds_once("linear", &inputs, ours);
    assert_differentiates("linear", &inputs, ours);
    // Leading dimensions are rows.
    let x = values("x", &[5, 2, 7]);
    let rows = linear(&x.reshape((10, 7)).unwrap(), &inputs[1], None).unwrap();
    let y = linear(&x, &inputs[1], None).unwrap();
    assert_eq!(y.dims(), [5, 2, 3]);
    assert_eq!(flat(&y), flat(&rows));
    assert!(linear(&values("x", &[5, 6]), &inputs[1], None).is_err());
}

#[test]
fn cross_entropy_is_candles() {
    let labels = Tensor::new(&[3i64, 0, 2], &Device::Cpu).unwrap();
    let inputs = [(values("x", &[3, 4]) * 5.0).unwrap()];
    let ours = |t: &[Tensor]| cross_entropy(&t[0], &labels);
    assert_same("cross_entropy", &inputs, ours, |t| candle_nn::loss::cross_entropy(&t[0], &labels));
    assert_rounds_once("cross_entropy", &inputs, |t| cross_entropy(&t[0], &labels));
    assert_differentiates("cross_entropy", &inputs, ours);
}

#[test]
fn cross_entropy_of_extremes() {
    let loss = |logits: [f32; 2], label: i64| {
        let logits = Tensor::new(&[logits], &Device::Cpu).unwrap();
        let labels = Tensor::new(&[label], &Device::Cpu).unwrap();
        cross_entropy(&logits, &labels).map(|loss| loss.to_scalar::<f32>().unwrap())
    };
    assert_eq!(loss([1e30, -1e30], 0).unwrap(), 0.0);
    assert_eq!(loss([3.0, f32::NEG_INFINITY], 0).unwrap(), 0.0);
    // ln(1 + e^-16), except for the rounding of the sum.
    let close = loss([30.0, 14.0], 0).unwrap();
    assert!((close - 1.125e-7).abs() < 1e-8, "{close}");
    assert_eq!(composed(|| loss([30.0, 14.0], 0).unwrap()), close);
    assert!(loss([f32::NAN, 0.0], 1).unwrap().is_nan());
    assert!(loss([f32::INFINITY, 0.0], 0).unwrap().is_nan());
    assert!(loss([0.0, 0.0], 2).unwrap_err().to_string().contains("label 2"));
    assert!(loss([0.0, 0.0], -1).is_err());
}

#[test]
fn elementwise_ops_are_candles() {
    let inputs = [values("a", &[3, 5, 7]), values("b", &[3, 5, 7])];
    assert_same("relu", &inputs[..1], |t| relu(&t[0]), |t| t[0].relu());
    assert_same("add_relu", &inputs, |t| add_relu(&t[0], &t[1]), |t| (&t[0] + &t[1])?.relu());
    assert_rounds_once("relu", &inputs[..1], |t| relu(&t[0]));
    assert_rounds_once("add_relu", &inputs, |t| add_relu(&t[0], &t[1]));
    // So many terms that a half-precision sum saturates.
    for (a, b) in [([5000, 3], [1, 3]), ([1, 3], [5000, 1])] {
        let inputs = [values("a", &a), (values("b", &b) + 1.0).unwrap()];
        assert_rounds_once("add, broadcast", &inputs, |t| add(&t[0], &t[1]));
    }
    assert_differentiates("relu", &inputs[..1], |t| relu(&t[0]));
    assert_differentiates("add", &inputs, |t| add(&t[0], &t[1]));
    assert_differentiates("add_relu", &inputs, |t| add_relu(&t[0], &t[1]));
    let x = Tensor::new(&[f32::NAN, f32::NEG_INFINITY, f32::INFINITY], &Device::Cpu).unwrap();
    let y = flat(&relu(&x).unwrap());
    assert!(y[0].is_nan() && y[1] == 0.0 && y[2] == f32::INFINITY);
    assert!(add_relu(&inputs[0], &values("c", &[3, 5])).is_err());
}

#[test]
fn global_avg_pool_is_candles() {
    let inputs = [values("x", &[2, 3, 5, 7])];
    let ours = |t: &[Tensor]| global_avg_pool(&t[0]);
    assert_same("mean", &inputs, ours, |t| t[0].mean((D::Minus1, D::Minus2)));
    assert_rounds_once("mean", &inputs, ours);
    assert_differentiates("mean", &inputs, ours);
}

#[test]
fn normalize_scales_each_channel() {
    let images = Tensor::from_vec(vec![0u8, 255, 51, 102], (1, 2, 1, 2), &Device::Cpu).unwrap();
    let by = Normalization { mean: vec![0.5, 0.2], std: vec![0.5] };
    let y = flat(&normalize(&images, &by, DType::F32).unwrap());
    let expected = [-1.0, 1.0, 0.0, 0.4];
    assert!(y.iter().zip(expected).all(|(y, e)| (y - e).abs() < 1e-6), "{y:?}");
    let three = Normalization { mean: vec![0.0; 3], std: vec![1.0] };
    assert!(normalize(&images, &three, DType::F32).is_err());
}

#[test]
fn a_frozen_weight_leaves_the_gradient_of_the_input_as_it_is() {
    let [x, weight, bias] = [values("x", &[4, 3]), values("w", &[5, 3]), values("b", &[5])];
    let linear_of = |inputs: &[Tensor]| linear(&inputs[0], &inputs[1], Some(&inputs[2]));
    let all = run(&[x.clone(), weight.clone(), bias.clone()], linear_of).unwrap();
    let frozen = run(std::slice::from_ref(&x), |x| linear(&x[0], &weight, Some(&bias))).unwrap();
    assert_eq!(flat(&all[1]), flat(&frozen[1]));
    let without = run(std::slice::from_ref(&x), |x| linear(&x[0], &weight, None)).unwrap();
    assert_eq!(flat(&all[1]), flat(&without[1]));
    let only_bias = run(&[bias], |bias| linear(&x, &weight, Some(&bias[0]))).unwrap();
    assert_eq!(flat(&all[3]), flat(&only_bias[1]));
}
