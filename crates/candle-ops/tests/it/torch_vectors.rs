//! Tests that compare operators, and nearest upsampling, with PyTorch's results, recorded by the
//! scripts in `tests/vectors`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    ConvOptions, CrossEntropyOptions, PadMode, SdpaOptions, Window, adaptive_avg_pool2d,
    adaptive_max_pool2d, avg_pool2d, conv3d, cross_entropy_with, embedding, embedding_with_padding,
    gather, instance_norm, log_softmax, pad, pixel_shuffle, pixel_unshuffle, record, rms_norm,
    rope, rope_i, scaled_dot_product_attention, silu, swiglu, upsample_nearest2d,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Recorded {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    operator: String,
    options: Options,
    inputs: Vec<Numbers>,
    constants: Vec<Numbers>,
    dy: Numbers,
    y: Numbers,
    gradients: Vec<Numbers>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    eps: f32,
    scale: Option<f64>,
    causal: bool,
    ignore_index: Option<i64>,
    label_smoothing: f32,
    padding: Option<usize>,
    /// Kernel, stride and padding; height and width; or stride, padding, dilation and groups.
    sizes: Vec<usize>,
    mode: String,
}

#[derive(Deserialize)]
struct Numbers {
    r#type: String,
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Numbers {
    fn tensor(&self) -> Tensor {
        let dtype = match self.r#type.as_str() {
            "u8" => DType::U8,
            "i64" => DType::I64,
            _ => DType::F64,
        };
        let tensor = Tensor::from_slice(&self.values, &self.shape[..], &Device::Cpu);
        tensor.unwrap().to_dtype(dtype).unwrap()
    }
}

impl Case {
    fn apply(&self, t: &[Tensor]) -> Result<Tensor> {
        let constants: Vec<Tensor> = self.constants.iter().map(Numbers::tensor).collect();
        let Options { eps, scale, causal, ignore_index, label_smoothing, padding, .. } =
            self.options;
        let Options { sizes, mode, .. } = &self.options;
        match self.operator.as_str() {
            "rms_norm" => rms_norm(&t[0], &t[1], eps),
            "silu" => silu(&t[0]),
            "swiglu" => swiglu(&t[0], &t[1]),
            "rope" => rope(&t[0], &t[1], &t[2]),
            "rope_i" => rope_i(&t[0], &t[1], &t[2]),
            "scaled_dot_product_attention" => {
                let mask = t.get(3).or_else(|| constants.first());
                let options = SdpaOptions { mask, causal, scale, dropout: 0.0 };
                scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
            }
            "cross_entropy" => {
                let weight = constants.get(1);
                let options = CrossEntropyOptions { weight, ignore_index, label_smoothing };
                cross_entropy_with(&t[0], &constants[0], options)
            }
            "embedding" => match padding {
                Some(padding) => embedding_with_padding(&constants[0], &t[0], padding),
                None => embedding(&constants[0], &t[0]),
            },
            "log_softmax" => log_softmax(&t[0]),
            "avg_pool2d" => {
                let window = Window { stride: sizes[1], padding: sizes[2] };
                avg_pool2d(&t[0], sizes[0], window)
            }
            "adaptive_avg_pool2d" => adaptive_avg_pool2d(&t[0], sizes[0], sizes[1]),
            "adaptive_max_pool2d" => adaptive_max_pool2d(&t[0], sizes[0], sizes[1]),
            "pad" => {
                let mode = match mode.as_str() {
                    "constant" => PadMode::Constant(0.0),
                    "reflect" => PadMode::Reflect,
                    _ => PadMode::Replicate,
                };
                pad(&t[0], &[(2, 0), (1, 2)], mode)
            }
            "instance_norm" => instance_norm(&t[0], Some((&t[1], &t[2])), eps),
            "pixel_shuffle" => pixel_shuffle(&t[0], 2),
            "pixel_unshuffle" => pixel_unshuffle(&t[0], 2),
            "gather" => gather(&t[0], &constants[0], 1),
            "conv3d" => {
                let &[stride, padding, dilation, groups] = &sizes[..] else { panic!("{sizes:?}") };
                let options = ConvOptions { stride, padding, dilation, groups };
                conv3d(&t[0], &t[1], Some(&t[2]), options)
            }
            other => panic!("no operator called {other}"),
        }
    }
}

/// The distance relative to the largest value.
fn off(got: &Tensor, wanted: &Numbers) -> f64 {
    assert_eq!(got.dims(), wanted.shape);
    let got = got.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let largest = wanted.values.iter().fold(1e-3_f64, |m, v| m.max(v.abs()));
    got.iter().zip(&wanted.values).fold(0_f64, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// With candle's backward pass and with that of a tape.
#[test]
fn operators_are_pytorchs() {
    let recorded: Recorded =
        serde_json::from_str(include_str!("../vectors/operators.json")).unwrap();
    assert_eq!(recorded.cases.len(), 43);
    for (i, case) in recorded.cases.iter().enumerate() {
        let what = format!("case {i}, {}, {:?}", case.operator, case.options);
        let vars: Vec<Var> =
            case.inputs.iter().map(|input| Var::from_tensor(&input.tensor()).unwrap()).collect();
        let inputs: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let forward = || {
            let y = case.apply(&inputs)?;
            Ok::<_, candle_core::Error>((y.clone(), (y * case.dy.tensor())?.sum_all()?))
        };
        let (y, loss) = forward().unwrap();
        let (taped, tape) = record(forward);
        let both = [loss.backward().unwrap(), tape.backward(&taped.unwrap().1).unwrap()];
        assert!(off(&y, &case.y) < 1e-12, "{what}: {}", off(&y, &case.y));
        for gradients in both {
            for (var, wanted) in vars.iter().zip(&case.gradients) {
                let off = off(gradients.get(var).unwrap(), wanted);
                assert!(off < 1e-12, "{what}: a gradient is off by {off}");
            }
        }
    }
}

/// As in PyTorch, `i * (in / out)` is rounded to `f32`, which is below some integers.
#[test]
fn nearest_pixels_are_pytorchs() {
    #[derive(Deserialize)]
    struct Nearest {
        hashes: Vec<u64>,
    }
    let recorded: Nearest = serde_json::from_str(include_str!("../vectors/nearest.json")).unwrap();
    assert_eq!(recorded.hashes.len(), 300);
    for (size, wanted) in (1..).zip(recorded.hashes) {
        let x = Tensor::arange(0_f32, size as f32, &Device::Cpu).unwrap();
        let x = x.reshape((1, 1, 1, size)).unwrap();
        let mut hash = 0;
        for out in 1..=300 {
            let y = upsample_nearest2d(&x, 1, out).unwrap().flatten_all().unwrap();
            let pixels = y.to_vec1::<f32>().unwrap();
            hash = pixels.iter().fold(hash, |hash, at| (hash * 257 + *at as u64) % 2_147_483_647);
        }
        assert_eq!(hash, wanted, "from {size} pixels");
    }
}
