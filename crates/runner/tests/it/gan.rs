//! Two losses and two optimizers in one training step: a GAN, compared with the same training by
//! hand.

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::VarBuilder;
use fused_optim::{Optimizer, ParamGroup, Sgd, SgdHyper, SliceMut};
use runner::data::{Array, BoxError, Dataset, Sample, SampleRng};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch,
};
use runner::optim_wrapper::{MemberFactory, OptimWrapperFactory};
use runner::{DataLoaderConfig, Result, Runner, TrainConfig};

const ROWS: usize = 64;
const HIDDEN: usize = 8;
const STEPS: usize = 300;
const LR: [f64; 2] = [0.05, 0.1];

/// Samples around 3, and noise as input of the generator.
struct Samples;

fn samples() -> [Vec<f32>; 2] {
    let wave = |step: f32| (0..ROWS).map(move |i| (i as f32 * step).sin());
    [wave(0.7).map(|x| 3.0 + 0.5 * x).collect(), wave(1.3).collect()]
}

impl Dataset for Samples {
    fn len(&self) -> usize {
        ROWS
    }

    fn sample(&self, row: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let [real, noise] = samples().map(|all| Array::new([1], vec![all[row]]));
        Ok(Sample::new().with("real", real?).with("noise", noise?))
    }
}

/// Weights and biases of two layers.
type Net = [Tensor; 4];

fn forward([w0, b0, w1, b1]: &Net, x: &Tensor) -> CandleResult<Tensor> {
    let hidden = x.matmul(w0)?.broadcast_add(b0)?.tanh()?;
    hidden.matmul(w1)?.broadcast_add(b1)
}

/// Loss of a score that should be high.
fn high(score: &Tensor) -> CandleResult<Tensor> {
    (score.neg()?.exp()? + 1.0)?.log()?.mean_all()
}

fn discriminator_loss(d: &Net, real: &Tensor, fake: &Tensor) -> CandleResult<Tensor> {
    high(&forward(d, real)?)? + high(&forward(d, &fake.detach())?.neg()?)?
}

fn generator_loss(d: &Net, fake: &Tensor) -> CandleResult<Tensor> {
    high(&forward(&d.each_ref().map(Tensor::detach), fake)?)
}

struct Gan {
    generator: Net,
    discriminator: Net,
}

impl Gan {
    fn new(vb: &VarBuilder<'static>) -> CandleResult<Self> {
        let random = candle_nn::Init::Randn { mean: 0.0, stdev: 0.5 };
        let net = |vb: VarBuilder<'static>| {
            Ok::<_, candle_core::Error>([
                vb.get_with_hints((1, HIDDEN), "w0", random)?,
                vb.get(HIDDEN, "b0")?,
                vb.get_with_hints((HIDDEN, 1), "w1", random)?,
                vb.get(1, "b1")?,
            ])
        };
        Ok(Self {
            generator: net(vb.pp("generator"))?,
            discriminator: net(vb.pp("discriminator"))?,
        })
    }
}

impl CandleModel for Gan {
    fn loss(&self, batch: &TensorBatch) -> CandleResult<Loss> {
        let fake = forward(&self.generator, batch.get("noise")?)?;
        let d = discriminator_loss(&self.discriminator, batch.get("real")?, &fake)?;
        let g = generator_loss(&self.discriminator, &fake)?;
        Ok(Loss::new((&d + &g)?).with("loss_d", d).with("loss_g", g))
    }

    fn predict(&self, batch: &TensorBatch) -> CandleResult<Outputs> {
        Ok(Outputs::new().with("samples", forward(&self.generator, batch.get("noise")?)?))
    }
}

/// Returns the initial weights, and those after one step of both optimizers per epoch, by
/// parameter.
fn trained_by_the_runner(dir: &std::path::Path) -> Result<[Vec<Vec<f32>>; 2]> {
    let sgd = |lr: f64| -> MemberFactory {
        let hyper = SgdHyper { lr, ..SgdHyper::default() };
        Box::new(move |own| {
            let sgd: Box<dyn Optimizer> = Box::new(Sgd::new([ParamGroup::new(hyper, own)])?);
            Ok(sgd)
        })
    };
    let options = CandleOptions { check_gradients: false, ..CandleOptions::default() };
    let model = Box::new(|_: &_| {
        let engine = CandleEngine::new(options, |vb: VarBuilder<'static>| Gan::new(&vb))?;
        let engine: Box<dyn runner::engine::Engine> = Box::new(engine);
        Ok(engine)
    });
    let mut runner = Runner::builder()
        .model(model)
        .optim_wrapper(OptimWrapperFactory::dict(vec![
            ("generator", sgd(LR[0])),
            ("discriminator", sgd(LR[1])),
        ]))
        .train_dataloader(DataLoaderConfig::new(Samples, ROWS))
        .train_cfg(TrainConfig::new(STEPS))
        .seed(0)
        .work_dir(dir)
        .build()?;
    let weights = |runner: &mut Runner| {
        let mut all = Vec::new();
        runner.engine_mut().with_params(&mut |params| {
            let copy = |param: &SliceMut<'_>| match param {
                SliceMut::F32(values) => values.to_vec(),
                other => panic!("{other:?}"),
            };
            all = params.iter().map(copy).collect();
            Ok(())
        })?;
        Ok::<_, runner::Error>(all)
    };
    let first = weights(&mut runner)?;
    runner.train()?;
    Ok([first, weights(&mut runner)?])
}

/// The same by hand: each loss has its own backward pass, and each optimizer only its own
/// gradients.
fn trained_by_hand(first: &[Vec<f32>]) -> CandleResult<Vec<Vec<f32>>> {
    let shapes = [vec![1, HIDDEN], vec![HIDDEN], vec![HIDDEN, 1], vec![1]];
    let var = |(values, shape): (&Vec<f32>, &Vec<usize>)| {
        Var::from_slice(values, &shape[..], &Device::Cpu)
    };
    let vars: Vec<Var> =
        first.iter().zip(shapes.iter().cycle()).map(var).collect::<CandleResult<_>>()?;
    let column = |values: Vec<f32>| Tensor::from_vec(values, (ROWS, 1), &Device::Cpu);
    let [real, noise] = samples();
    let (real, noise) = (column(real)?, column(noise)?);
    for _ in 0..STEPS {
        let net = |from: usize| std::array::from_fn(|at| vars[from + at].as_tensor().clone());
        let (g, d): (Net, Net) = (net(0), net(4));
        let fake = forward(&g, &noise)?;
        let of_g = high(&forward(&d, &fake)?)?.backward()?;
        let of_d = discriminator_loss(&d, &real, &fake)?.backward()?;
        for (at, var) in vars.iter().enumerate() {
            let (grads, lr) = if at < 4 { (&of_g, LR[0]) } else { (&of_d, LR[1]) };
            var.set(&(var.as_tensor() - (grads.get(var).unwrap() * lr)?)?)?;
        }
    }
    vars.iter().map(|var| var.flatten_all()?.to_dtype(DType::F32)?.to_vec1()).collect()
}

#[test]
fn each_loss_trains_its_own_part() {
    let dir = tempfile::tempdir().unwrap();
    let [first, last] = trained_by_the_runner(dir.path()).unwrap();
    let by_hand = trained_by_hand(&first).unwrap();
    for (ours, theirs) in last.iter().flatten().zip(by_hand.iter().flatten()) {
        // Tolerance of rounding errors over all steps.
        assert!((ours - theirs).abs() < 1e-3, "{ours} {theirs}");
    }
    // The generated samples have moved from around 0 towards the real ones around 3.
    let mean = |weights: &[Vec<f32>]| {
        let noise = Tensor::from_slice(&samples()[1], (ROWS, 1), &Device::Cpu)?;
        let shapes = [vec![1, HIDDEN], vec![HIDDEN], vec![HIDDEN, 1], vec![1]];
        let tensor = |at: usize| Tensor::from_slice(&weights[at], &shapes[at][..], &Device::Cpu);
        let net = [tensor(0)?, tensor(1)?, tensor(2)?, tensor(3)?];
        forward(&net, &noise)?.mean_all()?.to_scalar::<f32>()
    };
    let (before, after) = (mean(&first).unwrap(), mean(&last).unwrap());
    assert!((after - 3.0).abs() < (before - 3.0).abs() / 2.0, "{before} {after}");
}
