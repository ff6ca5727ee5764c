//! Each trap is named, wherever it is; whatever is right, or wrong on purpose, is left alone.

use std::sync::Arc;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fused_optim::{Slice, SliceMut};
use parking_lot::Mutex;
use proptest::prelude::*;

use super::super::layers::{BatchNorm2d, BatchNorm2dOptions, Conv2d, Conv2dOptions};
use super::super::ops::{self, Window};
use super::super::{CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, init};
use super::Graph;
use crate::data::{Array, ArrayData, Batch};
use crate::engine::{Engine, EngineState, GradSink, SharedSink, StepContext};

pub(super) type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send>;

type Step = fn(&Tensor) -> Result<Tensor>;

pub(super) fn layer(f: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static) -> Layer {
    Box::new(f)
}

/// Layers one after another, and the mean square of the last one's result as loss.
pub(super) struct Chain(pub(super) Vec<Layer>);

impl CandleModel for Chain {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let y = self.0.iter().try_fold(batch.get("x")?.clone(), |x, layer| layer(&x))?;
        Ok(Loss::new(y.to_dtype(DType::F32)?.sqr()?.mean_all()?))
    }

    fn predict(&self, _: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new())
    }
}

pub(super) fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    init::values(Init::Randn { mean: 0.0, stdev: 1.0 }, &shape.into(), 0, name)
}

pub(super) fn batch(shape: &[usize]) -> Batch {
    let x = Array::new(shape.to_vec(), ArrayData::F32(values("x", shape))).unwrap();
    Batch::new().with("x", x)
}

/// Keeps all gradients as they came.
#[derive(Default)]
pub(super) struct Keep(pub(super) Vec<(usize, Vec<f32>)>);

impl GradSink for Keep {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> crate::Result<()> {
        let Slice::F32(grad) = grad else { return Ok(()) };
        self.0.push((index, grad.to_vec()));
        Ok(())
    }
}

fn conv(vb: VarBuilder<'static>, from: usize, to: usize) -> Result<Layer> {
    let conv = Conv2d::new(from, to, 3, Conv2dOptions { padding: 1, ..Default::default() }, vb)?;
    Ok(layer(move |x| conv.forward(x)))
}

fn max_pool(x: &Tensor, kernel: usize) -> Result<Tensor> {
    ops::max_pool2d(x, kernel, Window { stride: kernel, padding: 0 })
}

/// What the first step says of `middle` between two convolutions.
pub(super) fn between(
    shape: &[usize],
    middle: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static,
) -> std::result::Result<(), String> {
    let channels = shape[1];
    let mut engine = CandleEngine::new(CandleOptions::default(), |vb| {
        let first = conv(vb.pp("first"), channels, 4)?;
        Ok(Chain(vec![first, layer(middle), conv(vb.pp("last"), 4, 2)?]))
    })
    .unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    let step = crate::testing::train_step(&mut engine, &batch(shape), 1.0, &sink);
    step.map(drop).map_err(|e| e.to_string())
}

#[test]
fn a_pool_of_candles_is_named_with_the_first_parameter_behind_it() {
    let says = |error: std::result::Result<(), String>, what: &str| {
        let error = error.unwrap_err();
        assert!(error.contains("the gradient of `first.weight` and of one more"), "{error}");
        assert!(error.contains(what), "{error}");
    };
    says(between(&[2, 3, 8, 8], |x| x.max_pool2d(2)), "`max_pool2d` (2 x 2)");
    says(between(&[1, 1, 8, 8], |x| x.relu()?.max_pool2d(2)?.tanh()), "`max_pool2d` (2 x 2)");
    says(between(&[2, 3, 7, 5], |x| x.max_pool2d((2, 3))), "`max_pool2d` (2 x 3)");
    says(between(&[2, 3, 3, 3], |x| x.max_pool2d(2)), "`max_pool2d` (2 x 2)");
    says(between(&[2, 3, 6, 6], |x| x.max_pool2d(6)), "`max_pool2d` (6 x 6)");
    // Not a tensor that lies in memory as it is read.
    says(between(&[2, 3, 8, 6], |x| x.transpose(2, 3)?.max_pool2d(2)), "`max_pool2d` (2 x 2)");
    says(between(&[2, 3, 7, 7], |x| x.avg_pool2d(2)), "`avg_pool2d` (2 x 2)");
    says(between(&[2, 3, 6, 8], |x| x.avg_pool2d(3)), "`avg_pool2d` (3 x 3)");
}

#[test]
fn an_upsampling_that_drops_gradients_is_named() {
    let says = |middle: Step| {
        let error = between(&[2, 3, 4, 4], middle).unwrap_err();
        assert!(
            error.contains("`first.weight`") && error.contains("`upsample_nearest`"),
            "{error}"
        );
    };
    says(|x| x.upsample_nearest2d(8, 8)? + x.tanh()?.upsample_nearest2d(8, 8)?);
    says(|x| {
        Tensor::cat(
            &[x.upsample_nearest2d(8, 8)?, x.pad_with_zeros(2, 2, 2)?.pad_with_zeros(3, 2, 2)?],
            2,
        )
    });
    says(|x| {
        let line = x.flatten_from(2)?;
        let twice = (line.upsample_nearest1d(32)? + Tensor::cat(&[&line, &line], 2)?)?;
        twice.reshape((2, 4, 4, 8))
    });
    // Used again together with what came of the upsampling only.
    fn down(x: &Tensor) -> Result<Tensor> {
        x.upsample_nearest2d(8, 8)?.avg_pool2d(2)?.tanh()
    }
    says(|x| x + down(x)?);
    says(|x| down(x)? * x);
    says(|x| down(x)? - x);
    says(|x| Tensor::cat(&[x, &down(x)?], 1)?.narrow(1, 2, 4));
    // Of one value, and to the same size.
    says(|x| {
        let mean = x.mean_keepdim((2, 3))?;
        mean.upsample_nearest2d(4, 4)? + mean.tanh()?.broadcast_as((2, 4, 4, 4))?
    });
    says(|x| x.upsample_nearest2d(4, 4)? + x.tanh()?);
    // The other way round candle comes to the upsampling first, and nothing is lost.
    let right = |x: &Tensor| x.tanh()?.upsample_nearest2d(8, 8)? + x.upsample_nearest2d(8, 8)?;
    between(&[2, 3, 4, 4], right).unwrap();
}

#[test]
fn a_pool_of_equal_values_is_named() {
    let step = |value: f64, pool: Step| {
        let mut engine = CandleEngine::new(CandleOptions::default(), |vb| {
            let bias = vb.get_with_hints((1, 4, 1, 1), "bias", Init::Const(value))?;
            let bias = layer(move |x| x.zeros_like()?.broadcast_add(&bias));
            Ok(Chain(vec![bias, layer(pool), conv(vb.pp("last"), 4, 2)?]))
        })
        .unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        crate::testing::train_step(&mut engine, &batch(&[2, 4, 8, 8]), 1.0, &sink).map(drop)
    };
    for value in [0.0, 0.5] {
        let error = step(value, |x| x.max_pool2d(2)).unwrap_err().to_string();
        assert!(error.contains("of `bias` is wrong: candle's own `max_pool2d`"), "{error}");
        step(value, |x| max_pool(x, 2)).unwrap();
        step(value, |x| x.avg_pool2d(2)).unwrap();
        step(value, |x| x.reshape((2, 4, 4, 2, 4, 2))?.max(5)?.max(3)).unwrap();
    }
}

/// Places along `dim` of `x` for `count` values in each line, no two alike if that many are there.
pub(super) fn places(x: &Tensor, dim: usize, count: usize) -> Result<Tensor> {
    let (mut dims, len) = (x.dims().to_vec(), x.dim(dim)?);
    dims[dim] = count;
    let right: usize = dims[dim + 1..].iter().product();
    let place = |i: usize| (i / right % count + i / (right * count) + i % right) % len;
    let places = (0..dims.iter().product()).map(|i| place(i) as u32);
    Tensor::from_iter(places, &Device::Cpu)?.reshape(dims)
}

pub(super) fn indices(values: &[u32], shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)
}

/// Random constants.
pub(super) fn noise(dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values("noise", dims), dims, &Device::Cpu)
}

/// `count` values for each line of `x` along `dim`, computed from it.
pub(super) fn derived(x: &Tensor, dim: usize, count: usize) -> Result<Tensor> {
    Tensor::cat(&[x, &x.tanh()?, &x.sin()?], dim)?.narrow(dim, 1, count)?.affine(0.7, 0.1)
}

#[test]
fn what_is_right_or_wrong_on_purpose_is_left_alone() {
    let fine = |shape: &[usize], middle: Step| {
        between(shape, middle).unwrap();
    };
    fine(&[2, 3, 8, 8], |x| max_pool(x, 2));
    fine(&[2, 3, 8, 8], |x| max_pool(&max_pool(&x.relu()?, 2)?, 2));
    fine(&[2, 3, 8, 8], |x| x.reshape((2, 4, 4, 2, 4, 2))?.max(5)?.max(3));
    fine(&[2, 3, 8, 8], |x| x.avg_pool2d(2));
    fine(&[2, 3, 7, 7], |x| x.narrow(2, 0, 6)?.narrow(3, 0, 6)?.avg_pool2d(2));
    fine(&[2, 3, 4, 4], |x| x.upsample_nearest2d(8, 8));
    fine(&[2, 3, 4, 4], |x| {
        let copy = (x * 1.0)?;
        copy.upsample_nearest2d(8, 8)? + x.tanh()?.contiguous()?.upsample_nearest2d(8, 8)?
    });
    // Few values that are another's, of nearly every line.
    fine(&[5, 3, 6, 6], |x| {
        let x = (x.abs()? - 0.03)?;
        candle_nn::ops::leaky_relu(&candle_nn::ops::leaky_relu(&x, 0.1)?, 0.1)
    });
    // Nothing behind them has a gradient.
    fine(&[2, 3, 8, 8], |x| x + x.detach().max_pool2d(2)?.mean_all()?.broadcast_as(x.shape())?);
    // Gradients that are not the loss's, as people want them.
    fine(&[2, 3, 8, 8], |x| x + (x.round()? - x)?.detach());
    fine(&[2, 3, 8, 8], |x| (x * 2.0)? - x.detach());
    // Equal scores, as those of an attention are whose weights are zeros at first.
    fine(&[2, 3, 8, 8], |x| candle_nn::ops::softmax(&(x - x.detach())?, 3)? * x);
    fine(&[2, 3, 8, 8], |x| candle_nn::ops::softmax(&(x - x.detach())?, 2)? * x);
    // Values that hide what made them.
    fine(&[2, 3, 8, 8], |x| max_pool(&(x * 0.0)?.relu()?.add(&(x - x)?)?, 2));
    fine(&[2, 3, 8, 8], |x| (x - x)?.avg_pool2d(2)? * 4.0);
    fine(&[2, 3, 8, 8], |x| max_pool(&(x * f64::NAN)?, 2));
}

/// A convolution and its norm layer.
fn block(vb: VarBuilder<'static>, from: usize, to: usize) -> Result<Layer> {
    let conv = conv(vb.pp("conv"), from, to)?;
    let norm = BatchNorm2d::new(to, BatchNorm2dOptions::default(), vb.pp("norm"))?;
    Ok(layer(move |x| norm.forward_t(&conv(x)?, true)))
}

#[test]
fn half_precision_hides_nothing() {
    let step = |dtype, autocast, pool: Step| {
        let mut engine = CandleEngine::new(CandleOptions { dtype, ..Default::default() }, |vb| {
            let layers = [block(vb.pp("0"), 3, 6)?, layer(|x| x.relu()), layer(pool)];
            Ok(Chain(layers.into_iter().chain([block(vb.pp("1"), 6, 2)?]).collect()))
        })
        .unwrap();
        engine.set_autocast(autocast).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        crate::testing::train_step(&mut engine, &batch(&[4, 3, 8, 8]), 1024.0, &sink)
    };
    use fused_optim::DType::{Bf16, F16, F32};
    for (dtype, autocast) in [(F16, None), (Bf16, None), (F32, Some(F16)), (F32, Some(Bf16))] {
        let error = step(dtype, autocast, |x| x.max_pool2d(2)).unwrap_err().to_string();
        assert!(error.contains("`0.conv.weight` and of 3 more"), "{dtype:?} {autocast:?}: {error}");
        step(dtype, autocast, |x| max_pool(x, 2)).unwrap();
    }
}

#[test]
fn who_does_not_ask_is_not_told() {
    for check_operators in [true, false] {
        let options = CandleOptions { check_operators, ..Default::default() };
        let mut engine = CandleEngine::new(options, |vb| {
            Ok(Chain(vec![conv(vb.pp("first"), 3, 4)?, layer(|x| x.max_pool2d(2))]))
        })
        .unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        let step = crate::testing::train_step(&mut engine, &batch(&[2, 3, 8, 8]), 1.0, &sink);
        assert_eq!(step.is_err(), check_operators);
    }
}

/// A step looked through leaves everything as one that is not: random numbers, statistics, gradients.
#[test]
fn looking_changes_nothing() {
    let engine = |check_operators| {
        CandleEngine::new(CandleOptions { check_operators, ..Default::default() }, |vb| {
            let drop = layer(|x| ops::dropout(x, 0.3));
            let pool = layer(|x| max_pool(&x.relu()?, 2));
            let up =
                layer(|x| (x * 1.0)?.upsample_nearest2d(8, 8)? + x.upsample_nearest2d(8, 8)?);
            let (first, last) = (block(vb.pp("0"), 3, 6)?, block(vb.pp("1"), 6, 2)?);
            Ok(Chain(vec![first, drop, pool, up, last, layer(|x| x.tanh())]))
        })
        .unwrap()
    };
    let (mut looking, mut blind) = (engine(true), engine(false));
    let run = |engine: &mut CandleEngine| {
        let keep = Arc::new(Mutex::new(Keep::default()));
        let sink: SharedSink = keep.clone();
        let mut own = EngineState::default();
        let mut cx = StepContext::new(sink, &mut own);
        let losses = engine.train_step(&batch(&[4, 3, 8, 8]), &mut cx);
        let mut state = Vec::new();
        let mut read = |slices: &mut [SliceMut<'_>]| {
            for slice in slices {
                let SliceMut::F32(values) = slice else { panic!("f32") };
                state.push(values.to_vec());
            }
            Ok(())
        };
        engine.with_params(&mut read).unwrap();
        engine.with_buffers(&mut read).unwrap();
        let gradients = std::mem::take(&mut keep.lock().0);
        (losses.unwrap(), gradients, state, own)
    };
    for _ in 0..3 {
        assert_eq!(run(&mut looking), run(&mut blind));
        assert!(looking.checked);
    }
}

/// GELU keeps large values and changes small ones, as if constants had been put there; a leaky ReLU does as if its
/// other operand had been; a softmax takes a maximum, as a pool does.
#[test]
fn looking_costs_as_many_backward_passes_however_deep_a_network_is() {
    use fused_optim::DType::{Bf16, F16, F32};
    let passes = |dtype, depth: usize, step: Step| {
        let engine = CandleEngine::new(CandleOptions { dtype, ..Default::default() }, |vb| {
            let uniform = Init::Uniform { lo: -9.0, up: 9.0 };
            let weight = vb.get_with_hints((6, 240), "weight", uniform)?;
            let mut layers = vec![layer(move |x| x.matmul(&weight)?.reshape((2, 4, 10, 12)))];
            layers.extend((0..depth).map(|_| layer(step)));
            Ok(Chain(layers))
        })
        .unwrap();
        let dtype = [DType::F32, DType::F16, DType::BF16][dtype as usize];
        let batch = TensorBatch::new(&batch(&[4, 6]), dtype, &Device::Cpu).unwrap();
        let loss = engine.forward(&batch).unwrap();
        let graph = Graph::new(loss.value(), &engine.params, &engine.slot);
        assert!(graph.trap().unwrap().is_none());
        graph.passes.get()
    };
    let steps: [Step; 10] = [
        |x| x.gelu_erf()? - 0.1,
        |x| (x.tanh()? * 9.0)?.elu(1.0)? + fixed(x, 12)?,
        |x| candle_nn::ops::leaky_relu(&(x.affine(0.9, -0.1)?), 0.1),
        |x| {
            x + candle_nn::ops::softmax(&x.affine(0.01, 0.0)?, 3)?.matmul(&x.t()?)?.matmul(x)?
                * 1e-4
        },
        |x| {
            let put =
                |x: Tensor, at| x.index_add(&indices(&[at, at + 2], &[2])?, &derived(&x, 3, 2)?, 3);
            put(put(x.affine(0.6, 0.1)?, 0)?, 3)
        },
        |x| x.affine(0.9, 0.1)?.slice_scatter(&derived(x, 3, 2)?, 3, 1),
        |x| ops::scatter(&x.affine(0.9, 0.1)?, &places(x, 3, 3)?, &derived(x, 3, 3)?, 3),
        |x| ops::scatter_add(&x.affine(0.7, 0.1)?, &places(x, 3, 3)?, &derived(x, 3, 3)?, 3),
        |x| ops::scatter(&x.affine(0.9, 0.1)?, &places(x, 3, 3)?, &fixed(x, 3)?, 3),
        |x| ops::scatter_add(&x.affine(0.7, 0.1)?, &places(x, 3, 3)?, &fixed(x, 3)?, 3),
    ];
    for (i, step) in steps.into_iter().enumerate() {
        for dtype in [F32, F16, Bf16] {
            // In a few layers there may be none to be asked.
            let (few, many) = (passes(dtype, 4, step), passes(dtype, 20, step));
            assert!(many <= few + 2, "step {i}, {dtype:?}: {few} and {many}");
        }
    }
}

/// `count` constants for each line of `x`.
fn fixed(x: &Tensor, count: usize) -> Result<Tensor> {
    noise(&[x.dims()[..3].to_vec(), vec![count]].concat())?.to_dtype(x.dtype())
}

#[test]
fn a_scatter_behind_many_that_are_right_is_named() {
    let behind = |first: Step| {
        let middle = move |x: &Tensor| {
            let mut x = first(&x.tanh()?)?;
            for at in 0..3 {
                x = x.index_add(&indices(&[at, at + 2], &[2])?, &derived(&x, 3, 2)?, 3)?.tanh()?;
                x = x.slice_scatter(&derived(&x, 2, 2)?, 2, at as usize)?.sin()?;
                for dim in [2, 3] {
                    let i = places(&x, dim, 3)?;
                    let z = derived(&x, dim, 3)?;
                    x = ops::scatter_add(&ops::scatter(&x, &i, &z, dim)?, &i, &z, dim)?.tanh()?;
                }
                let (i, z) = (places(&x, 3, 3)?, fixed(&x, 3)?);
                x = ops::scatter_add(&ops::scatter(&x, &i, &z, 3)?, &i, &z, 3)?.sin()?;
            }
            Ok(x)
        };
        between(&[2, 3, 8, 8], middle)
    };
    behind(|x| x * 0.9).unwrap();
    let wrong: [(&str, Step); 4] = [
        ("scatter", |x| x.scatter(&places(x, 3, 3)?, &derived(x, 3, 3)?, 3)),
        ("scatter", |x| x.scatter(&places(x, 3, 3)?, &fixed(x, 3)?, 3)),
        ("scatter_add", |x| x.scatter_add(&places(x, 3, 8)?, &derived(x, 3, 8)?, 3)),
        ("scatter_add", |x| x.scatter_add(&places(x, 3, 8)?, &fixed(x, 8)?, 3)),
    ];
    for (operator, wrong) in wrong {
        let said = behind(wrong).unwrap_err();
        let operator = format!(
            "of `first.weight` and of one more parameter is wrong: candle's own `{operator}`"
        );
        assert!(said.contains(&operator), "{said}");
    }
}

/// How a network of one's own goes on: what is right, and last what is not.
const STEPS: [Step; 28] = [
    |x| x.relu(),
    |x| x.silu(),
    |x| x.gelu_erf(),
    |x| x.tanh(),
    |x| ops::relu(x),
    |x| ops::dropout(x, 0.2),
    |x| x + x.detach(),
    |x| if narrow(x) { Ok(x.clone()) } else { max_pool(x, 2) },
    |x| if narrow(x) { Ok(x.clone()) } else { ops::max_pool2d(x, 3, STEM) },
    |x| {
        let (h, w) = (x.dim(2)? / 2 * 2, x.dim(3)? / 2 * 2);
        if narrow(x) { Ok(x.clone()) } else { x.narrow(2, 0, h)?.narrow(3, 0, w)?.avg_pool2d(2) }
    },
    |x| {
        if x.dim(2)? > 16 {
            Ok(x.clone())
        } else {
            x.upsample_nearest2d(x.dim(2)? * 2, x.dim(3)? * 2)
        }
    },
    |x| candle_nn::ops::leaky_relu(x, 0.1),
    |x| x.index_add(&indices(&[2, 0], &[2])?, &derived(x, 1, 2)?, 1),
    |x| if x.dim(3)? < 2 { Ok(x.clone()) } else { x.slice_scatter(&derived(x, 3, 1)?, 3, 1) },
    |x| x.gt(&x.roll(1, 2)?)?.where_cond(x, &x.affine(0.5, 0.0)?),
    |x| x.contiguous()?.gather(&places(x, 1, 4)?, 1),
    |x| x.contiguous()?.index_select(&indices(&[3, 1, 1, 0], &[4])?, 1),
    |x| Tensor::cat(&[x, &noise(x.dims())?], 1)?.narrow(1, 2, 4),
    |x| ops::scatter(x, &places(x, 1, 3)?, &derived(x, 1, 3)?, 1),
    |x| ops::scatter_add(x, &places(x, 1, 7)?, &derived(x, 1, 7)?, 1),
    |x| {
        // Of less than three its backward counts below zero.
        let line = x.flatten_from(2)?;
        if narrow(x) {
            Ok(x.clone())
        } else {
            line.conv1d(&noise(&[4, 4, 3])?, 1, 1, 1, 1)?.reshape(x.shape())
        }
    },
    |x| x.flatten_from(2)?.conv1d(&noise(&[4, 1, 1])?, 0, 1, 1, 4)?.reshape(x.shape()),
    |x| x.max_pool2d(2),
    |x| x.max_pool2d((2, 1)),
    |x| x.scatter(&places(x, 1, 3)?, &derived(x, 1, 3)?, 1),
    |x| x.scatter_add(&places(x, 1, 4)?, &derived(x, 1, 4)?, 1),
    |x| x.flatten_from(2)?.conv1d(&noise(&[4, 4, 1])?, 0, 1, 1, 1)?.reshape(x.shape()),
    |x| {
        let line = x.flatten_from(2)?.pad_with_zeros(2, 1, 1)?;
        line.conv1d(&noise(&[4, 2, 3])?, 0, 1, 1, 2)?.reshape(x.shape())
    },
];

const RIGHT: usize = 22;
const TRAPS: [&str; 6] = ["max_pool2d", "max_pool2d", "scatter", "scatter_add", "conv1d", "conv1d"];
const STEM: Window = Window { stride: 2, padding: 1 };

fn narrow(x: &Tensor) -> bool {
    x.dims()[2..].iter().any(|extent| *extent < 4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Random networks: nothing is said of right ones, and a pool of candle's is said to be behind what it is
    /// behind, wherever it stands.
    #[test]
    fn a_random_network_is_judged_rightly(
        seed in any::<u64>(), images in 2usize..6, height in 6usize..14, width in 6usize..14,
        steps in proptest::collection::vec((0..RIGHT, 0..RIGHT), 1..4),
        trap in proptest::option::of((0usize..3, RIGHT..STEPS.len())),
    ) {
        let trap = trap.map(|(at, trap)| (at.min(steps.len() - 1), trap));
        let mut engine = CandleEngine::new(
            CandleOptions { seed, ..Default::default() },
            |vb| {
                let mut layers = Vec::new();
                for (i, (one, two)) in steps.iter().enumerate() {
                    layers.push(block(vb.pp(i), if i == 0 { 3 } else { 4 }, 4)?);
                    layers.extend(trap.filter(|(at, _)| *at == i).map(|(_, trap)| layer(STEPS[trap])));
                    layers.extend([layer(STEPS[*one]), layer(STEPS[*two])]);
                }
                layers.push(conv(vb.pp("last"), 4, 2)?);
                Ok(Chain(layers))
            },
        ).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        let step = crate::testing::train_step(&mut engine, &batch(&[images, 3, height, width]), 1.0, &sink);
        match trap {
            None => prop_assert!(step.is_ok(), "{step:?}"),
            Some((at, trap)) => {
                let error = step.unwrap_err().to_string();
                let behind = format!("`0.conv.weight` and of {} more parameters", 4 * at + 3);
                let trap = format!("candle's own `{}`", TRAPS[trap - RIGHT]);
                prop_assert!(error.contains(&behind) && error.contains(&trap), "{error}");
            }
        }
    }
}
