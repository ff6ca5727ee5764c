//! Each trap is named, wherever it is; whatever is right, or wrong on purpose, is left alone.

use std::sync::Arc;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use fused_optim::{Slice, SliceMut};
use parking_lot::Mutex;
use proptest::prelude::*;

use super::layers::{BatchNorm2d, BatchNorm2dOptions, Conv2d, Conv2dOptions};
use super::ops::{self, Window};
use super::{CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, init};
use crate::data::{Array, ArrayData, Batch};
use crate::engine::{Engine, GradSink, SharedSink};

type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send>;

fn layer(f: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static) -> Layer {
    Box::new(f)
}

/// Layers one after another, and the mean square of the last one's result as loss.
struct Chain(Vec<Layer>);

impl CandleModel for Chain {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let y = self.0.iter().try_fold(batch.get("x")?.clone(), |x, layer| layer(&x))?;
        Ok(Loss::new(y.to_dtype(DType::F32)?.sqr()?.mean_all()?))
    }

    fn predict(&self, _: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new())
    }
}

fn values(name: &str, shape: &[usize]) -> Vec<f32> {
    init::values(Init::Randn { mean: 0.0, stdev: 1.0 }, &shape.into(), 0, name)
}

fn batch(shape: &[usize]) -> Batch {
    let x = Array::new(shape.to_vec(), ArrayData::F32(values("x", shape))).unwrap();
    Batch::new().with("x", x)
}

/// Keeps all gradients as they came.
#[derive(Default)]
struct Keep(Vec<(usize, Vec<f32>)>);

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
fn between(
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
    let step = engine.forward_backward(&batch(shape), 1.0, &sink);
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
    let says = |middle: fn(&Tensor) -> Result<Tensor>| {
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
    // The other way round candle comes to the upsampling first, and nothing is lost.
    let right = |x: &Tensor| x.tanh()?.upsample_nearest2d(8, 8)? + x.upsample_nearest2d(8, 8)?;
    between(&[2, 3, 4, 4], right).unwrap();
}

/// What the first step says of a convolution of sequences by a kernel of this shape, with another parameter
/// behind it or not.
fn of_sequences(
    (shape, kernel): (&[usize], &[usize]),
    dtype: fused_optim::DType,
    is_first: bool,
    op: fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> crate::Result<()> {
    let uniform = Init::Uniform { lo: -0.5, up: 0.5 };
    let mut engine = CandleEngine::new(CandleOptions { dtype, seed: 0 }, |vb| {
        let before = vb.get_with_hints((1, shape[1], 1), "before", uniform)?;
        let weight = vb.get_with_hints(kernel, "conv.weight", uniform)?;
        let bias = vb.get_with_hints((1, 1, 1), "conv.bias", uniform)?;
        Ok(Chain(vec![
            layer(move |x| if is_first { Ok(x.clone()) } else { x.broadcast_mul(&before) }),
            layer(move |x| op(x, &weight)),
            layer(move |x| x.broadcast_add(&bias)?.tanh()),
        ]))
    })
    .unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    engine.forward_backward(&batch(shape), 1.0, &sink).map(drop)
}

#[test]
fn a_conv1d_that_mixes_up_samples_is_named() {
    use fused_optim::DType::{F16, F32};
    let sizes: (&[usize], &[usize]) = (&[3, 4, 9], &[6, 4, 3]);
    for is_first in [true, false] {
        let says = |sizes, dtype, op| {
            let error = of_sequences(sizes, dtype, is_first, op).unwrap_err().to_string();
            assert!(error.contains("of `conv.weight` is wrong: candle's own `conv1d`"), "{error}");
        };
        for dtype in [F32, F16] {
            says(sizes, dtype, |x, w| x.conv1d(w, 0, 1, 1, 1));
            says(sizes, dtype, |x, w| x.conv1d(w, 1, 2, 1, 1));
        }
        says(sizes, F32, |x, w| x.conv1d(w, 2, 1, 2, 1));
        says((&[3, 4, 9], &[6, 2, 3]), F32, |x, w| x.conv1d(w, 1, 1, 1, 2));
        let fine = |sizes, op| of_sequences(sizes, F32, is_first, op).unwrap();
        fine((&[1, 4, 9], &[6, 4, 3]), |x, w| x.conv1d(w, 1, 1, 1, 1));
        fine((&[3, 4, 9], &[4, 1, 3]), |x, w| x.conv1d(w, 1, 1, 1, 4));
        // As the error says; and other uses of such a parameter.
        fine(sizes, |x, w| {
            let x = x.pad_with_zeros(2, 1, 1)?.unsqueeze(2)?;
            x.conv2d(&w.unsqueeze(2)?, 0, 1, 1, 1)?.squeeze(2)
        });
        fine((&[3, 4, 9], &[3, 4, 4]), |x, w| w.matmul(x));
        fine((&[4, 4, 9], &[4, 4, 9]), |x, w| x * w);
        fine((&[4, 4, 9], &[4, 4, 9]), |x, w| x + w.exp()?);
    }
}

#[test]
fn what_is_right_or_wrong_on_purpose_is_left_alone() {
    let fine = |shape: &[usize], middle: fn(&Tensor) -> Result<Tensor>| {
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
    // Nothing behind them has a gradient.
    fine(&[2, 3, 8, 8], |x| x + x.detach().max_pool2d(2)?.mean_all()?.broadcast_as(x.shape())?);
    // Gradients that are not the loss's, as people want them.
    fine(&[2, 3, 8, 8], |x| x + (x.round()? - x)?.detach());
    fine(&[2, 3, 8, 8], |x| (x * 2.0)? - x.detach());
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
    let step = |dtype, autocast, pool: fn(&Tensor) -> Result<Tensor>| {
        let mut engine = CandleEngine::new(CandleOptions { dtype, seed: 0 }, |vb| {
            let layers = [block(vb.pp("0"), 3, 6)?, layer(|x| x.relu()), layer(pool)];
            Ok(Chain(layers.into_iter().chain([block(vb.pp("1"), 6, 2)?]).collect()))
        })
        .unwrap();
        engine.set_autocast(autocast).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
        engine.forward_backward(&batch(&[4, 3, 8, 8]), 1024.0, &sink)
    };
    use fused_optim::DType::{Bf16, F16, F32};
    for (dtype, autocast) in [(F16, None), (Bf16, None), (F32, Some(F16)), (F32, Some(Bf16))] {
        let error = step(dtype, autocast, |x| x.max_pool2d(2)).unwrap_err().to_string();
        assert!(error.contains("`0.conv.weight` and of 3 more"), "{dtype:?} {autocast:?}: {error}");
        step(dtype, autocast, |x| max_pool(x, 2)).unwrap();
    }
}

/// A step looked through leaves everything as one that is not: random numbers, statistics, gradients.
#[test]
fn looking_changes_nothing() {
    let engine = || {
        CandleEngine::new(CandleOptions::default(), |vb| {
            let drop = layer(|x| ops::dropout(x, 0.3));
            let pool = layer(|x| max_pool(&x.relu()?, 2));
            let up =
                layer(|x| (x * 1.0)?.upsample_nearest2d(8, 8)? + x.upsample_nearest2d(8, 8)?);
            let (first, last) = (block(vb.pp("0"), 3, 6)?, block(vb.pp("1"), 6, 2)?);
            Ok(Chain(vec![first, drop, pool, up, last, layer(|x| x.tanh())]))
        })
        .unwrap()
    };
    let (mut looking, mut blind) = (engine(), engine());
    blind.checked = true;
    let run = |engine: &mut CandleEngine| {
        let keep = Arc::new(Mutex::new(Keep::default()));
        let sink: SharedSink = keep.clone();
        let losses = engine.forward_backward(&batch(&[4, 3, 8, 8]), 1.0, &sink);
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
        (losses.unwrap(), gradients, state, engine.random_position())
    };
    for _ in 0..3 {
        assert_eq!(run(&mut looking), run(&mut blind));
        assert!(looking.checked);
    }
}

/// How a network of one's own goes on: what is right, and last what is not.
const STEPS: [fn(&Tensor) -> Result<Tensor>; 13] = [
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
    |x| x.max_pool2d(2),
    |x| x.max_pool2d((2, 1)),
];

const RIGHT: usize = 11;
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
        let step = engine.forward_backward(&batch(&[images, 3, height, width]), 1.0, &sink);
        match trap {
            None => prop_assert!(step.is_ok(), "{step:?}"),
            Some((at, _)) => {
                let error = step.unwrap_err().to_string();
                let behind = format!("`0.conv.weight` and of {} more parameters", 4 * at + 3);
                prop_assert!(error.contains(&behind) && error.contains("max_pool2d"), "{error}");
            }
        }
    }
}

/// How far candle's gradients of `op` are from central differences in `f64`, relative to the largest.
fn off(shapes: &[&[usize]], op: fn(&[Tensor]) -> Result<Tensor>) -> Result<f64> {
    let var = |(i, shape): (usize, &&[usize])| {
        let values = Tensor::from_vec(values(&format!("x{i}"), shape), *shape, &Device::Cpu)?;
        Var::from_tensor(&values.to_dtype(DType::F64)?)
    };
    let vars: Vec<Var> = shapes.iter().enumerate().map(var).collect::<Result<_>>()?;
    let objective = |inputs: &[Tensor]| {
        let y = op(inputs)?;
        let weights = Tensor::from_vec(values("dy", y.dims()), y.dims(), &Device::Cpu)?;
        (y * weights.to_dtype(DType::F64)?)?.sum_all()
    };
    let inputs: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let gradients = objective(&inputs)?.backward()?;
    let (mut apart, mut largest) = (0f64, 1e-3f64);
    for (i, input) in inputs.iter().enumerate() {
        let gradient = gradients.get(input).expect("a gradient").flatten_all()?.to_vec1::<f64>()?;
        for (e, gradient) in gradient.iter().enumerate() {
            let at = |step: f64| -> Result<f64> {
                let mut moved = input.flatten_all()?.to_vec1::<f64>()?;
                moved[e] += step;
                let mut inputs = inputs.clone();
                inputs[i] = Tensor::from_vec(moved, input.dims(), &Device::Cpu)?;
                objective(&inputs)?.to_scalar()
            };
            let slope = (at(1e-6)? - at(-1e-6)?) / 2e-6;
            apart = apart.max((slope - gradient).abs());
            largest = largest.max(slope.abs());
        }
    }
    Ok(apart / largest)
}

fn indices(values: &[u32], shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)
}

type Case = (&'static str, &'static [&'static [usize]], fn(&[Tensor]) -> Result<Tensor>);

const SMALL: &[&[usize]] = &[&[1, 2, 4, 4]];

/// Differentiated wrongly: the traps, and the two that the module's docs say are not seen.
const WRONG_ONES: &[Case] = &[
    ("conv1d", &[&[2, 2, 7], &[3, 2, 3]], |t| t[0].conv1d(&t[1], 1, 2, 1, 1)),
    ("max_pool2d", SMALL, |t| t[0].max_pool2d(2)),
    ("max_pool2d, a rest", SMALL, |t| t[0].max_pool2d(3)),
    ("avg_pool2d, a rest", &[&[1, 2, 5, 5]], |t| t[0].avg_pool2d(2)),
    ("upsample_nearest2d and more", SMALL, |t| {
        t[0].upsample_nearest2d(8, 8)? + t[0].sum_all()?.broadcast_as((1, 2, 8, 8))?
    }),
    ("upsample_nearest1d and more", &[&[1, 2, 4]], |t| {
        t[0].upsample_nearest1d(8)? + t[0].sum_all()?.broadcast_as((1, 2, 8))?
    }),
    ("scatter", &[&[2, 3], &[2, 2]], |t| t[0].scatter(&indices(&[0, 2, 1, 0], &[2, 2])?, &t[1], 1)),
    ("scatter_add", &[&[2, 3], &[2, 3]], |t| {
        t[0].scatter_add(&indices(&[0, 2, 2, 1, 1, 0], &[2, 3])?, &t[1], 1)
    }),
];

const RIGHT_ONES: &[Case] = &[
    ("conv1d, one sample", &[&[1, 2, 7], &[3, 2, 3]], |t| t[0].conv1d(&t[1], 0, 1, 1, 1)),
    ("conv1d, depthwise", &[&[2, 3, 7], &[3, 1, 3]], |t| t[0].conv1d(&t[1], 1, 2, 1, 3)),
    ("conv2d", &[&[2, 2, 5, 5], &[3, 2, 3, 3]], |t| t[0].conv2d(&t[1], 1, 2, 1, 1)),
    ("conv2d, dilated", &[&[1, 2, 6, 6], &[2, 2, 2, 2]], |t| t[0].conv2d(&t[1], 1, 1, 2, 1)),
    ("conv2d, groups", &[&[1, 4, 4, 4], &[4, 2, 3, 3]], |t| t[0].conv2d(&t[1], 1, 1, 1, 2)),
    ("conv_transpose2d", &[&[1, 2, 3, 3], &[2, 3, 3, 3]], |t| {
        t[0].conv_transpose2d(&t[1], 1, 1, 2, 1)
    }),
    ("avg_pool2d", SMALL, |t| t[0].avg_pool2d(2)),
    ("upsample_nearest2d", SMALL, |t| t[0].upsample_nearest2d(8, 8)),
    ("upsample_nearest1d", &[&[1, 2, 4]], |t| t[0].upsample_nearest1d(8)),
    ("matmul", &[&[2, 3, 4], &[2, 4, 2]], |t| t[0].matmul(&t[1])),
    ("broadcast", &[&[3, 1, 2], &[4, 1]], |t| {
        t[0].broadcast_mul(&t[1])?.broadcast_div(&t[1])?.broadcast_sub(&t[1])
    }),
    ("gather", &[&[2, 3]], |t| t[0].gather(&indices(&[0, 0, 2, 1], &[2, 2])?, 1)),
    ("index_select", &[&[4, 2]], |t| t[0].index_select(&indices(&[1, 1, 3], &[3])?, 0)),
    ("index_add", &[&[4, 2], &[3, 2]], |t| t[0].index_add(&indices(&[1, 1, 3], &[3])?, &t[1], 0)),
    ("slice_scatter", &[&[4, 2], &[2, 2]], |t| t[0].slice_scatter(&t[1], 0, 1)),
    ("slice_assign", &[&[4, 3], &[2, 1]], |t| t[0].slice_assign(&[1..3, 0..1], &t[1])),
    ("cat, narrow, permute", &[&[2, 3], &[2, 1]], |t| {
        Tensor::cat(&[&t[0], &t[1]], 1)?.narrow(1, 1, 3)?.permute((1, 0))
    }),
    ("flip, roll", &[&[2, 5]], |t| t[0].flip(&[1])?.roll(2, 1)),
    ("cumsum", &[&[2, 5]], |t| t[0].cumsum(1)),
    ("where_cond", &[&[5], &[5]], |t| t[0].gt(&t[1])?.where_cond(&t[0], &t[1])),
    ("maximum, minimum", &[&[5], &[5]], |t| t[0].maximum(&t[1])? * t[0].minimum(&t[1])?),
    ("max, min", &[&[3, 5]], |t| t[0].max(1)? * t[0].min(1)?),
    ("mean, var", &[&[3, 5]], |t| t[0].mean(1)? * t[0].var(1)?),
    ("log_sum_exp", &[&[3, 5]], |t| t[0].log_sum_exp(1)),
    ("exp, sin, cos, tanh, erf", &[&[7]], |t| t[0].exp()?.sin()?.cos()?.tanh()?.erf()),
    ("sqrt, log, recip, powf", &[&[7]], |t| (t[0].sqr()? + 1.0)?.sqrt()?.log()?.recip()?.powf(1.5)),
    ("pow", &[&[7], &[7]], |t| (t[0].sqr()? + 1.0)?.pow(&t[1])),
    ("abs, relu, elu, silu", &[&[7]], |t| {
        ((t[0].abs()? * t[0].relu()?)? + t[0].elu(0.7)?)? + t[0].silu()?
    }),
    ("gelu", &[&[7]], |t| t[0].gelu()? + t[0].gelu_erf()?),
    ("sigmoid", &[&[7]], |t| candle_nn::ops::sigmoid(&t[0])),
    ("softmax, log_softmax", &[&[2, 4]], |t| {
        candle_nn::ops::softmax(&t[0], 1)? + candle_nn::ops::log_softmax(&t[0], 1)?
    }),
];

/// If candle mends or breaks one, this is where it shows.
#[test]
fn these_of_candles_operators_are_wrong_and_no_others() {
    // candle's constants of GELU have six digits.
    let measure = |(what, shapes, op): &Case| (*what, off(shapes, *op).unwrap());
    let odd: Vec<_> = (WRONG_ONES.iter().map(measure).filter(|(_, off)| *off < 0.1))
        .chain(RIGHT_ONES.iter().map(measure).filter(|(_, off)| *off > 1e-5))
        .collect();
    assert!(odd.is_empty(), "not as it was in candle 0.11.1: {odd:?}");
}
