//! Small networks: one for each of candle's wrong operators, and random ones of correct operators.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::candle_core::{
    D, DType, Device, IndexOp, Module, ModuleT, Result, Tensor,
};
use runner::engine::candle::candle_nn;
use runner::engine::candle::nn::{self, Conv2dConfig, Init, Linear, RNN, VarBuilder};
use runner::engine::candle::ops::{self, AttentionOptions, Window};
use runner::engine::candle::{CandleModel, Loss, Outputs, TensorBatch};

/// A function from one tensor to the next.
pub(crate) type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send>;
type Make = Box<dyn Fn(VarBuilder<'static>) -> Result<Layer>>;

/// Final part of a network.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    MeanSquare,
    CrossEntropy,
    Huber,
}

/// A network with its input and labels.
pub(crate) struct Net {
    names: Vec<String>,
    layers: Vec<Make>,
    shape: Vec<usize>,
    classes: usize,
    end: End,
    seed: u64,
}

struct Chain(Vec<Layer>, End);

impl CandleModel for Chain {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        let y = self.0.iter().try_fold(batch.get("x")?.clone(), |x, layer| layer(&x))?;
        let loss = match self.1 {
            End::MeanSquare => y.sqr()?.mean_all()?,
            End::CrossEntropy => ops::cross_entropy(&y.flatten_from(1)?, batch.get("labels")?)?,
            End::Huber => candle_nn::loss::huber(&y, &y.ones_like()?, 0.7)?,
        };
        // The loss is f32 also for half parameters.
        let narrow = matches!(loss.dtype(), DType::F16 | DType::BF16);
        Ok(Loss::new(if narrow { loss.to_dtype(DType::F32)? } else { loss }))
    }

    fn predict(&self, _: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new())
    }
}

impl Net {
    pub(crate) fn what(&self) -> String {
        format!("{:?} {} {:?}", self.shape, self.names.join(", "), self.end)
    }

    pub(crate) fn build(&self, vb: VarBuilder<'static>) -> Result<impl CandleModel + use<>> {
        let layers = self.layers.iter().enumerate().map(|(i, make)| make(vb.pp(i)));
        Ok(Chain(layers.collect::<Result<_>>()?, self.end))
    }

    pub(crate) fn batch(&self) -> Batch {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let x = (0..self.shape.iter().product()).map(|_| normal(&mut rng)).collect();
        let labels = (0..self.shape[0]).map(|_| rng.random_range(0..self.classes as i64)).collect();
        Batch::new()
            .with("x", Array::new(self.shape.clone(), ArrayData::F32(x)).unwrap())
            .with("labels", Array::new(vec![self.shape[0]], ArrayData::I64(labels)).unwrap())
    }
}

fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0
}

type Op = fn(&Tensor) -> Result<Tensor>;

fn op(f: impl Fn(&Tensor) -> Result<Tensor> + Send + Clone + 'static) -> Make {
    Box::new(move |_| Ok(Box::new(f.clone())))
}

/// An operator of an input and a parameter `weight` of this shape.
fn weighed(shape: &'static [usize], f: fn(&Tensor, &Tensor) -> Result<Tensor>) -> Make {
    Box::new(move |vb| {
        let weight = vb.get_with_hints(shape, "weight", Init::Randn { mean: 0.0, stdev: 0.5 })?;
        Ok(Box::new(move |x| f(x, &weight)))
    })
}

fn conv(from: usize, to: usize) -> Make {
    Box::new(move |vb| {
        let conv = nn::conv2d(from, to, 3, Conv2dConfig { padding: 1, ..Default::default() }, vb)?;
        Ok(Box::new(move |x| conv.forward(x)))
    })
}

/// Pseudo-random numbers that are always the same.
fn fixed(like: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| normal(&mut rng)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(like.dtype())
}

fn indices(values: &[u32], shape: &[usize]) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)
}

/// Indices along the last dimension of `x`, `count` in each line.
fn places(x: &Tensor, count: usize) -> Result<Tensor> {
    let (mut dims, len) = (x.dims().to_vec(), x.dim(D::Minus1)?);
    let last = dims.len() - 1;
    dims[last] = count;
    let place = |i: usize| ((i % count + i / count) % len) as u32;
    Tensor::from_iter((0..dims.iter().product()).map(place), &Device::Cpu)?.reshape(dims)
}

fn net(shape: &[usize], names: &str, layers: Vec<Make>) -> Net {
    let names = vec![names.to_owned()];
    Net { names, layers, shape: shape.to_vec(), classes: 2, end: End::MeanSquare, seed: 3 }
}

/// Norms, whose statistics change in a step, and dropout, between convolutions; optionally a wrong
/// pool.
pub(crate) fn with_state(is_right: bool) -> Net {
    let norm: Make = Box::new(|vb| {
        let norm = nn::batch_norm(4, 1e-5, vb)?;
        Ok(Box::new(move |x| norm.forward_t(x, true)))
    });
    let pool = match is_right {
        true => op(|x| ops::max_pool2d(x, 2, Window { stride: 2, padding: 0 })),
        false => op(|x| x.max_pool2d(2)),
    };
    let dropout = op(|x| ops::dropout(x, 0.3));
    let layers = vec![conv(3, 4), norm, dropout, pool, conv(4, 2), op(Tensor::tanh)];
    net(&[4, 3, 8, 8], if is_right { "right" } else { "wrong" }, layers)
}

/// Name of an operator, a small network with it, and the parameters whose gradients are wrong.
type Wrong = (&'static str, Net, &'static [&'static str]);

/// Each of candle 0.11.1's wrong operators in a small network.
pub(crate) fn wrong() -> Vec<Wrong> {
    const BEFORE: &[&str] = &["0.weight", "0.bias"];
    const NORM: &[&str] = &["0.weight", "1.weight", "1.bias"];
    const BOTH: &[&str] = &["0.weight", "1.weight"];
    let images = |what, shape: &[usize], middle: Op| {
        let layers = vec![conv(3, 4), op(middle), conv(4, 2), op(Tensor::tanh)];
        (what, net(shape, what, layers), BEFORE)
    };
    let lines = |what, shape: &[usize], w: &'static [usize], middle| {
        let before = weighed(&[1, 4, 1], |x, w| x.broadcast_mul(w));
        let layers = vec![before, weighed(w, middle), op(|x| (x * 0.3)?.tanh())];
        (what, net(shape, what, layers), BOTH)
    };
    let norm = |what, f: fn(&Tensor, &candle_nn::LayerNorm) -> Result<Tensor>| {
        let before = weighed(&[1, 5, 4], |x, w| x.broadcast_mul(w));
        let norm: Make = Box::new(move |vb| {
            let norm = candle_nn::layer_norm(4, 1e-5, vb)?;
            Ok(Box::new(move |x| f(&x.contiguous()?, &norm)))
        });
        let after = weighed(&[1, 5, 4], |x, w| (x.broadcast_mul(w)? + 0.5)?.tanh());
        let layers = vec![before, norm, after];
        (what, net(&[3, 5, 4], what, layers), NORM)
    };
    vec![
        images("max_pool2d", &[2, 3, 8, 8], |x| x.max_pool2d(2)),
        images("avg_pool2d with a rest", &[2, 3, 7, 7], |x| x.avg_pool2d(2)),
        images("upsample_nearest2d", &[2, 3, 4, 4], |x| {
            x.upsample_nearest2d(8, 8)? + (x * 5.0)?.upsample_nearest2d(8, 8)?
        }),
        lines("conv1d of several samples", &[3, 4, 9], &[6, 4, 3], |x, w| x.conv1d(w, 0, 1, 1, 1)),
        lines("conv1d of a kernel that is not contiguous", &[1, 4, 9], &[4, 6, 3], |x, w| {
            x.conv1d(&w.transpose(0, 1)?, 1, 1, 1, 1)
        }),
        images("scatter", &[2, 3, 8, 8], |x| {
            x.scatter(&places(x, 7)?, &(x.narrow(3, 0, 7)? * 0.2)?, 3)
        }),
        images("scatter of constants", &[2, 3, 8, 8], |x| {
            x.scatter(&places(x, 3)?, &fixed(x, &[2, 4, 8, 3])?, 3)
        }),
        images("scatter_add", &[2, 3, 8, 8], |x| x.scatter_add(&places(x, 8)?, &x.tanh()?, 3)),
        lines("matmul of a transposed batch", &[3, 4, 5], &[6, 4], |x, w| {
            candle_nn::Linear::new(w.clone(), None).forward(&x.transpose(1, 2)?)
        }),
        norm("layer norm", |x, norm| norm.forward(x)),
        norm("layer norm beside a residual", |x, norm| x + norm.forward(&x.tanh()?)?),
    ]
}

/// A perceptron for 8 x 8 digits with a function applied to its 16 hidden values.
pub(crate) struct Digits {
    hidden: Linear,
    last: Linear,
    middle: Op,
}

impl Digits {
    pub(crate) fn new(vb: VarBuilder<'_>, middle: Op) -> Result<Self> {
        let hidden = nn::linear(64, 16, vb.pp("hidden"))?;
        Ok(Self { hidden, last: nn::linear(16, 10, vb.pp("last"))?, middle })
    }

    fn logits(&self, batch: &TensorBatch) -> Result<Tensor> {
        let x = batch.get("inputs")?.flatten_from(1)?.to_dtype(batch.dtype())?;
        self.last.forward(&(self.middle)(&self.hidden.forward(&(x / 255.0)?)?)?)
    }
}

impl CandleModel for Digits {
    fn loss(&self, batch: &TensorBatch) -> Result<Loss> {
        Ok(Loss::new(ops::cross_entropy(&self.logits(batch)?, batch.get("labels")?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// A network of correct operators.
pub(crate) fn random(seed: u64) -> Net {
    let rng = &mut ChaCha8Rng::seed_from_u64(seed);
    let is_image = rng.random::<bool>();
    let mut net = Net {
        names: Vec::new(),
        layers: Vec::new(),
        shape: Vec::new(),
        classes: 5,
        end: [End::MeanSquare, End::CrossEntropy, End::Huber][rng.random_range(0..3)],
        seed,
    };
    let depth = rng.random_range(1..6);
    if is_image {
        images(&mut net, rng, depth);
    } else {
        sequences(&mut net, rng, depth);
    }
    net
}

impl Net {
    fn push(&mut self, name: impl Into<String>, make: Make) {
        self.names.push(name.into());
        self.layers.push(make);
    }
}

fn images(net: &mut Net, rng: &mut ChaCha8Rng, depth: usize) {
    net.shape = vec![rng.random_range(2..6), 3, rng.random_range(6..14), rng.random_range(6..14)];
    let mut channels = 3;
    for _ in 0..depth {
        let to = rng.random_range(2..7);
        image_conv(net, rng, channels, to);
        channels = to;
        if rng.random::<bool>() {
            image_norm(net, rng, channels);
        }
        activation(net, rng);
        image_step(net, rng);
    }
    let classes = net.classes;
    let name = ["global_avg_pool", "mean"][rng.random_range(0..2)];
    net.push(
        name,
        op(if name == "mean" {
            |x: &Tensor| x.mean((2, 3))
        } else {
            |x: &Tensor| ops::global_avg_pool(x)
        }),
    );
    linear(net, rng, channels, classes);
}

fn image_conv(net: &mut Net, rng: &mut ChaCha8Rng, from: usize, to: usize) {
    match rng.random_range(0..3) {
        0 => {
            let bias = rng.random::<bool>();
            let config = Conv2dConfig { padding: 1, ..Default::default() };
            net.push(
                "conv",
                Box::new(move |vb| {
                    let conv = if bias { nn::conv2d } else { nn::conv2d_no_bias };
                    let conv = conv(from, to, 3, config, vb)?;
                    Ok(Box::new(move |x| conv.forward(x)))
                }),
            );
        }
        1 => net.push(
            "candle conv",
            Box::new(move |vb| {
                let config = Conv2dConfig { padding: 1, ..Default::default() };
                let conv = candle_nn::conv2d(from, to, 3, config, vb)?;
                Ok(Box::new(move |x| conv.forward(x)))
            }),
        ),
        _ => net.push(
            "zero bias conv",
            Box::new(move |vb| {
                let weight = vb.get_with_hints(
                    (to, from, 1, 1),
                    "weight",
                    candle_nn::init::DEFAULT_KAIMING_NORMAL,
                )?;
                let bias = vb.get_with_hints(to, "bias", Init::Const(0.0))?;
                Ok(Box::new(move |x| {
                    ops::conv2d(x, &weight, Some(&bias), Window { stride: 1, padding: 0 })
                }))
            }),
        ),
    }
}

fn image_norm(net: &mut Net, rng: &mut ChaCha8Rng, channels: usize) {
    if rng.random::<bool>() {
        let relu = rng.random::<bool>();
        net.push(
            "batch norm",
            Box::new(move |vb| {
                let norm = nn::batch_norm(channels, 1e-5, vb)?;
                let norm = if relu { norm.with_relu() } else { norm };
                Ok(Box::new(move |x| norm.forward_t(x, true)))
            }),
        );
    } else {
        net.push(
            "candle batch norm",
            Box::new(move |vb| {
                let norm = candle_nn::batch_norm(channels, 1e-5, vb)?;
                // Its statistics are not updated in place.
                Ok(Box::new(move |x| norm.forward_t(x, true)))
            }),
        );
    }
}

fn activation(net: &mut Net, rng: &mut ChaCha8Rng) {
    let all: [(&str, Op); 10] = [
        ("relu", Tensor::relu),
        ("ops::relu", ops::relu),
        ("ops::gelu", ops::gelu),
        ("gelu", Tensor::gelu),
        ("silu", Tensor::silu),
        ("tanh", Tensor::tanh),
        ("leaky relu", |x| candle_nn::ops::leaky_relu(x, 0.1)),
        ("elu", |x| x.elu(0.7)),
        ("abs", Tensor::abs),
        ("none", |x| Ok(x.clone())),
    ];
    let (name, f) = all[rng.random_range(0..all.len())];
    net.push(name, op(f));
}

fn image_step(net: &mut Net, rng: &mut ChaCha8Rng) {
    let narrow = |x: &Tensor| x.dims()[2..].iter().any(|extent| *extent < 4);
    let all: [(&str, Make); 11] = [
        (
            "max pool",
            op(move |x| {
                if narrow(x) {
                    Ok(x.clone())
                } else {
                    ops::max_pool2d(x, 2, Window { stride: 2, padding: 0 })
                }
            }),
        ),
        (
            "stem pool",
            op(move |x| {
                if narrow(x) {
                    Ok(x.clone())
                } else {
                    ops::max_pool2d(x, 3, Window { stride: 2, padding: 1 })
                }
            }),
        ),
        (
            "avg pool",
            op(|x| {
                let (h, w) = (x.dim(2)? / 2 * 2, x.dim(3)? / 2 * 2);
                if h * w == 0 {
                    return Ok(x.clone());
                }
                x.narrow(2, 0, h)?.narrow(3, 0, w)?.avg_pool2d(2)
            }),
        ),
        (
            "upsample",
            op(|x| {
                if x.dim(2)? > 12 {
                    Ok(x.clone())
                } else {
                    x.upsample_nearest2d(x.dim(2)? * 2, x.dim(3)? * 2)
                }
            }),
        ),
        ("dropout", op(|x| ops::dropout(x, 0.2))),
        ("dropout", op(|x| ops::dropout(x, 0.5))),
        ("residual", op(|x| x + x.tanh()?)),
        (
            "scatter_add",
            op(|x| {
                ops::scatter_add(x, &places(x, 3)?, &x.narrow(3, 0, 1)?.repeat((1, 1, 1, 3))?, 3)
            }),
        ),
        ("scatter", op(|x| ops::scatter(x, &places(x, 1)?, &x.narrow(3, 0, 1)?.contiguous()?, 3))),
        (
            "cat",
            op(|x| {
                let c = x.dim(1)?;
                Tensor::cat(&[x, &x.sin()?], 1)?.narrow(1, 1, c)
            }),
        ),
        ("none", op(|x| Ok(x.clone()))),
    ];
    let at = rng.random_range(0..all.len());
    let (name, make) = all.into_iter().nth(at).unwrap();
    net.push(name, make);
}

fn linear(net: &mut Net, rng: &mut ChaCha8Rng, from: usize, to: usize) {
    if rng.random::<bool>() {
        net.push(
            "linear",
            Box::new(move |vb| {
                let linear = nn::linear(from, to, vb)?;
                Ok(Box::new(move |x| linear.forward(x)))
            }),
        );
    } else {
        net.push(
            "candle linear",
            Box::new(move |vb| {
                let linear = candle_nn::linear(from, to, vb)?;
                Ok(Box::new(move |x| linear.forward(&x.contiguous()?)))
            }),
        );
    }
}

fn sequences(net: &mut Net, rng: &mut ChaCha8Rng, depth: usize) {
    let width = 4 * rng.random_range(1..5);
    net.shape = vec![rng.random_range(2..6), rng.random_range(3..9), rng.random_range(3..9)];
    let from = net.shape[2];
    if rng.random::<bool>() {
        linear(net, rng, from, width);
    } else {
        embedding(net, width);
    }
    for _ in 0..depth {
        match rng.random_range(0..9) {
            0 => self_attention(net, width),
            1 => candle_attention(net, width),
            2 => net.push(
                "layer norm",
                Box::new(move |vb| {
                    let norm = nn::layer_norm(width, 1e-5, vb)?;
                    Ok(Box::new(move |x| norm.forward(x)))
                }),
            ),
            3 => net.push(
                "slow layer norm",
                Box::new(move |vb| {
                    let weight = vb.get_with_hints(width, "weight", Init::Const(1.0))?;
                    let bias = vb.get_with_hints(width, "bias", Init::Const(0.0))?;
                    Ok(Box::new(move |x| candle_nn::ops::layer_norm_slow(x, &weight, &bias, 1e-5)))
                }),
            ),
            4 => feed_forward(net, width),
            5 => lstm(net, width),
            6 => {
                linear(net, rng, width, width);
                activation(net, rng);
            }
            7 => net.push("dropout", op(|x| ops::dropout(x, 0.1))),
            _ => net.push(
                "index_add, cumsum",
                op(|x| {
                    let at = indices(&[2, 0], &[2])?;
                    let y = x.index_add(&at, &x.narrow(1, 0, 2)?.tanh()?, 1)?;
                    (y.cumsum(1)? * 0.3)?
                        + x.index_select(&indices(&[1], &[1])?, 1)?.broadcast_as(x.shape())?
                }),
            ),
        }
    }
    net.push("last", op(|x| x.i((.., 0))? + x.mean(1)?));
    let classes = net.classes;
    linear(net, rng, width, classes);
}

fn embedding(net: &mut Net, width: usize) {
    net.push(
        "embedding",
        Box::new(move |vb| {
            let table = nn::embedding(7, width, vb)?;
            Ok(Box::new(move |x| {
                let ids = x.narrow(2, 0, 1)?.squeeze(2)?.abs()?.clamp(0.0, 2.0)?;
                table.forward(&(ids * 3.0)?.to_dtype(DType::I64)?)
            }))
        }),
    );
}

fn self_attention(net: &mut Net, width: usize) {
    net.push(
        "self attention",
        Box::new(move |vb| {
            let qkv = nn::linear(width, 3 * width, vb.pp("qkv"))?;
            let out = nn::linear(width, width, vb.pp("out"))?;
            Ok(Box::new(move |x| {
                let options = AttentionOptions { heads: 2, causal: true };
                x + out.forward(&ops::self_attention(&qkv.forward(x)?, options)?)?
            }))
        }),
    );
}

fn candle_attention(net: &mut Net, width: usize) {
    net.push(
        "candle attention",
        Box::new(move |vb| {
            let linear = |name: &str| candle_nn::linear(width, width, vb.pp(name));
            let (q, k, v) = (linear("q")?, linear("k")?, linear("v")?);
            Ok(Box::new(move |x| {
                let scores = (q.forward(x)?.matmul(&k.forward(x)?.t()?)? * 0.3)?;
                x + candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v.forward(x)?)?
            }))
        }),
    );
}

fn feed_forward(net: &mut Net, width: usize) {
    net.push(
        "feed forward",
        Box::new(move |vb| {
            let (up, down) = (
                nn::linear(width, 2 * width, vb.pp("up"))?,
                nn::linear(2 * width, width, vb.pp("down"))?,
            );
            Ok(Box::new(move |x| x + down.forward(&ops::gelu(&up.forward(x)?)?)?))
        }),
    );
}

fn lstm(net: &mut Net, width: usize) {
    net.push(
        "lstm",
        Box::new(move |vb| {
            let lstm = candle_nn::lstm(width, width, Default::default(), vb)?;
            Ok(Box::new(move |x| {
                let states = lstm.seq(x)?;
                Tensor::stack(&states.iter().map(|s| s.h()).collect::<Vec<_>>(), 1)
            }))
        }),
    );
}
