//! The same networks, from the same parameters over the same batches, trained by candle's engine
//! and by libtorch's, both with our optimizers, and by tch alone with its own: the same losses, the
//! same tensors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use collective::{ProcessGroup, reducer::ReducerOptions};
use parking_lot::Mutex;
use runner::Result;
use runner::data::{Array, Batch};
use runner::engine::candle::candle_core::Result as CandleResult;
use runner::engine::candle::candle_nn::VarBuilder;
use runner::engine::candle::{CandleEngine, CandleModel, CandleOptions};
use runner::engine::{Engine, EngineState, GradSink, Model, SharedSink, StepContext, TensorSpec};
use runner::model::{DistributedDataParallel, ModelWrapper};
use runner::optim_wrapper::OptimWrapper;
use runner::zoo::{Mlp, MlpOptions, ResNet, ResNetOptions};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Tensor};
use tch_engine::{TchEngine, TchModel};
use train_step::fused_optim::{
    AdamW, AdamWHyper, Applied, DType, Optimizer, Sgd, SgdHyper, Slice, SliceMut,
};

use crate::engine::engine;
use crate::nets::{Classifier, Net};

const STEPS: usize = 12;
const BATCH: usize = 16;

pub const SGD: SgdHyper = SgdHyper {
    lr: 0.05,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 1e-2,
    nesterov: true,
    maximize: false,
};
const ADAMW: AdamWHyper = AdamWHyper {
    lr: 2e-3,
    betas: (0.9, 0.99),
    eps: 1e-6,
    weight_decay: 0.1,
    amsgrad: false,
    maximize: false,
};

/// How parameters are updated.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Sgd(SgdHyper),
    AdamW(AdamWHyper),
}

const RULES: [Rule; 2] = [Rule::Sgd(SGD), Rule::AdamW(ADAMW)];

impl Rule {
    fn ours(self, count: usize) -> Box<dyn Optimizer> {
        match self {
            Self::Sgd(hyper) => Box::new(Sgd::with_one_group(hyper, count).unwrap()),
            Self::AdamW(hyper) => Box::new(AdamW::with_one_group(hyper, count).unwrap()),
        }
    }

    fn of_tch(self, store: &VarStore) -> nn::Optimizer {
        match self {
            Self::Sgd(h) => {
                nn::sgd(h.momentum, h.dampening, h.weight_decay, h.nesterov).build(store, h.lr)
            }
            Self::AdamW(h) => {
                nn::adamw(h.betas.0, h.betas.1, h.weight_decay).eps(h.eps).build(store, h.lr)
            }
        }
        .unwrap()
    }
}

/// Every parameter and buffer, by name.
pub type State = BTreeMap<String, Vec<f32>>;

/// The result of a training.
#[derive(Debug, PartialEq)]
struct Outcome {
    losses: Vec<f64>,
    state: State,
}

impl Outcome {
    /// Fails on a loss or a tensor that differs by more than these bounds, relative to its length.
    fn is_near(&self, other: &Self, of_losses: f64, of_tensors: f64) -> Result<(), String> {
        assert!(self.state.keys().eq(other.state.keys()), "the same names");
        let off = |(name, values): (&String, &Vec<f32>)| {
            (distance(&wide(values), &wide(&other.state[name])), name.clone())
        };
        let (worst, name) = self.state.iter().map(off).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        let off = distance(&self.losses, &other.losses);
        let text = format!("losses are off by {off:.1e}, {name} by {worst:.1e}");
        println!("{text}");
        // Neither comparison holds of a NaN.
        if off < of_losses && worst < of_tensors { Ok(()) } else { Err(text) }
    }
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Length of the difference, relative to that of `b`.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let length = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    length(&mut a.iter().zip(b).map(|(a, b)| a - b)) / length(&mut b.iter().copied()).max(1e-3)
}

/// Images of four kinds of stripes, in no order and with noise.
pub fn batch(step: usize) -> Batch {
    let noise = |at: usize| ((at * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
    let labels: Vec<_> = (0..BATCH).map(|i| ((step * 7 + i * 5) % 4) as i64).collect();
    let image = |i: usize| {
        let label = labels[i] as usize;
        (0..64).map(move |at| {
            let along = if label < 2 { at / 8 } else { at % 8 };
            let stripe = if along % (label % 2 + 2) == 0 { 1.0 } else { -0.5 };
            stripe + noise((step * BATCH + i) * 64 + at)
        })
    };
    let images: Vec<_> = (0..BATCH).flat_map(image).collect();
    Batch::new()
        .with("inputs", Array::new([BATCH, 1, 8, 8], images).unwrap())
        .with("labels", Array::new([BATCH], labels).unwrap())
}

fn in_candle(net: Net) -> CandleEngine {
    let build = move |vb: VarBuilder<'static>| -> CandleResult<Box<dyn CandleModel>> {
        Ok(match net {
            Net::Mlp => {
                let (in_features, hidden) = (64, vec![16]);
                let options =
                    MlpOptions { in_features, hidden, num_classes: 4, ..MlpOptions::default() };
                Box::new(Mlp::new(&options, vb)?)
            }
            Net::ResNet => {
                let (blocks, stem_max_pool) = (vec![1, 1], true);
                let options =
                    ResNetOptions { blocks, num_classes: 4, stem_max_pool, ..Default::default() };
                Box::new(ResNet::new(&options, vb)?)
            }
        })
    };
    CandleEngine::new(CandleOptions::default(), build).unwrap()
}

fn in_torch(net: Net) -> TchEngine<Classifier> {
    engine(|vs| net.build(vs, 4)).unwrap()
}

/// Gives `visit` each parameter and buffer.
fn each(engine: &mut dyn Engine, visit: &mut dyn FnMut(&str, &mut [f32])) {
    let mut zip = |specs: &[TensorSpec], slices: &mut [SliceMut<'_>]| {
        for (spec, slice) in specs.iter().zip(slices) {
            let SliceMut::F32(values) = slice else { panic!("{} is f32", spec.name) };
            visit(&spec.name, values);
        }
        Ok(())
    };
    let (params, buffers) = (engine.params().to_vec(), engine.buffers().to_vec());
    engine.with_params(&mut |slices| zip(&params, slices)).unwrap();
    engine.with_buffers(&mut |slices| zip(&buffers, slices)).unwrap();
}

fn state(engine: &mut dyn Engine) -> State {
    let mut state = State::new();
    each(engine, &mut |name, values| drop(state.insert(name.to_owned(), values.to_vec())));
    state
}

fn set_state(engine: &mut dyn Engine, state: &State) {
    each(engine, &mut |name, values| values.copy_from_slice(&state[name]));
}

/// The initial state of every training of `net`.
fn start(net: Net) -> State {
    state(&mut in_candle(net))
}

/// Stands before the true sink and gives the first parameter's gradients times `factor`.
struct Spoil {
    sink: SharedSink,
    factor: f32,
}

impl GradSink for Spoil {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        let Slice::F32(values) = grad else { panic!("gradients are f32") };
        let factor = if index == 0 { self.factor } else { 1.0 };
        let values: Vec<_> = values.iter().map(|v| v * factor).collect();
        self.sink.lock().ready(index, Slice::F32(&values))
    }
}

/// Trains as one of `group`, with an optimizer of ours, under autocast to `dtype` unless that is
/// `f32`; `factor` is [`Spoil`]'s.
fn train(
    engine: &mut dyn Engine,
    group: ProcessGroup,
    rule: Rule,
    dtype: DType,
    factor: f32,
) -> Outcome {
    let (rank, ranks) = (group.rank(), group.world_size());
    let options = ReducerOptions::default();
    let mut model = DistributedDataParallel::new(group, engine.params(), options).unwrap();
    let mut optim = OptimWrapper::new(rule.ours(engine.params().len()), 1);
    let sink: SharedSink = Arc::new(Mutex::new(Spoil { sink: model.sink(), factor }));
    let autocast = (dtype != DType::F32).then_some(dtype);
    let mut engine_state = EngineState::default();
    let step = |step| {
        let cx = StepContext::new(sink.clone(), &mut engine_state);
        let mut cx = StepContext { autocast, ..cx };
        model.prepare(Some(&mut *engine), &mut cx).unwrap();
        let losses = engine.train_step(&batch(step * ranks + rank), &mut cx).unwrap();
        model.finish().unwrap();
        assert_eq!(optim.step(engine, &model).unwrap(), Applied::Applied);
        model.zero_grad();
        losses.scalars().unwrap()[0].1
    };
    let losses = (0..STEPS).map(step).collect();
    Outcome { losses, state: state(engine) }
}

fn alone() -> ProcessGroup {
    ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0)
}

fn train_alone(engine: &mut dyn Engine, net: Net, rule: Rule, dtype: DType) -> Outcome {
    set_state(engine, &start(net));
    train(engine, alone(), rule, dtype, 1.0)
}

/// A model of tch alone, without a word of ours.
pub fn plain(net: Net) -> (VarStore, Classifier) {
    tch::set_num_threads(1);
    let store = VarStore::new(Device::Cpu);
    let model = net.build(&store.root(), 4);
    let start = start(net);
    for (name, mut variable) in store.variables() {
        let values = Tensor::from_slice(&start[&name]).reshape(variable.size());
        tch::no_grad(|| variable.copy_(&values));
    }
    (store, model)
}

fn train_plain(net: Net, rule: Rule) -> Outcome {
    let (store, model) = plain(net);
    let mut optimizer = rule.of_tch(&store);
    let step = |step| {
        let loss = model.loss(&batch(step)).unwrap();
        optimizer.backward_step(&loss);
        loss.double_value(&[])
    };
    let losses = (0..STEPS).map(step).collect();
    let values = |tensor: Tensor| Vec::try_from(tensor.detach().reshape(-1)).unwrap();
    let state = store.variables().into_iter().map(|(name, t)| (name, values(t))).collect();
    Outcome { losses, state }
}

/// Bounds of losses and tensors. In f32 rounding errors, grown by twelve steps; in half types what
/// their last digits (2^-11, 2^-8) come to, of which a small tensor sees more.
const WIDE: (f64, f64) = (1e-5, 1e-3);
const HALVES: [(DType, f64, f64); 2] = [(DType::F16, 1e-3, 1e-1), (DType::Bf16, 5e-3, 2e-1)];

#[test]
fn candle_libtorch_and_tch_alone_come_to_the_same() {
    for (net, rule) in Net::ALL.iter().flat_map(|net| RULES.map(|rule| (*net, rule))) {
        println!("{net:?}, {rule:?}");
        let candle = train_alone(&mut in_candle(net), net, rule, DType::F32);
        let torch = train_alone(&mut in_torch(net), net, rule, DType::F32);
        let plain = train_plain(net, rule);
        assert!(plain.losses[STEPS - 1] < 0.9 * plain.losses[0], "learns: {:?}", plain.losses);
        candle.is_near(&torch, WIDE.0, WIDE.1).unwrap();
        torch.is_near(&plain, WIDE.0, WIDE.1).unwrap();
    }
}

#[test]
fn under_autocast_candle_and_libtorch_come_to_the_same() {
    // tch alone has no autocast on the CPU.
    let all = Net::ALL.iter().flat_map(|net| RULES.map(|rule| (*net, rule)));
    for ((net, rule), half) in all.flat_map(|job| HALVES.map(|half| (job, half))) {
        let (dtype, of_losses, of_tensors) = half;
        println!("{net:?}, {rule:?}, {dtype:?}");
        let wide = train_alone(&mut in_torch(net), net, rule, DType::F32);
        let torch = train_alone(&mut in_torch(net), net, rule, dtype);
        let candle = train_alone(&mut in_candle(net), net, rule, dtype);
        candle.is_near(&torch, of_losses, of_tensors).unwrap();
        for half in [torch, candle] {
            half.is_near(&wide, WIDE.0, WIDE.1).expect_err("it ran in a half type");
        }
    }
}

/// Keeps gradients.
#[derive(Default)]
struct Keep(BTreeMap<usize, Vec<f32>>);

impl GradSink for Keep {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        let Slice::F32(values) = grad else { panic!("gradients are f32") };
        assert!(self.0.insert(index, values.to_vec()).is_none(), "{index} comes once");
        Ok(())
    }
}

#[test]
fn what_the_sink_is_given_are_the_bits_of_tchs_own_gradients() {
    for net in Net::ALL {
        let mut engine = in_torch(net);
        set_state(&mut engine, &start(net));
        let (store, model) = plain(net);
        // Twice: what one pass leaves behind must not enter the next.
        for step in 0..2 {
            let keep = Arc::new(Mutex::new(Keep::default()));
            let sink: SharedSink = keep.clone();
            let mut state = EngineState::default();
            let cx = StepContext::new(sink, &mut state);
            engine.train_step(&batch(step), &mut StepContext { loss_scale: 2.0, ..cx }).unwrap();
            (model.loss(&batch(step)).unwrap() * 2.0).backward();
            let mut variables = store.variables();
            for (index, grad) in &keep.lock().0 {
                let mut variable = variables.remove(&engine.params()[*index].name).unwrap();
                let theirs = Vec::<f32>::try_from(variable.grad().reshape(-1)).unwrap();
                assert!(grad.iter().any(|v| *v != 0.0));
                assert!(*grad == theirs, "gradient of {}", engine.params()[*index].name);
                variable.zero_grad();
            }
            assert!(variables.values().all(|buffer| !buffer.requires_grad()), "all have come");
        }
    }
}

#[test]
fn a_wrong_number_is_noticed() {
    for (net, rule) in Net::ALL.iter().flat_map(|net| RULES.map(|rule| (*net, rule))) {
        let right = train_alone(&mut in_candle(net), net, rule, DType::F32);
        let notice = |what: &str, rule: Rule, factor: f32| {
            println!("{net:?}, {what}");
            let mut engine = in_torch(net);
            set_state(&mut engine, &start(net));
            let wrong = train(&mut engine, alone(), rule, DType::F32, factor);
            right.is_near(&wrong, WIDE.0, WIDE.1).expect_err(what);
        };
        match rule {
            Rule::Sgd(h) => {
                notice("lr", Rule::Sgd(SgdHyper { lr: 1.01 * h.lr, ..h }), 1.0);
                notice("momentum", Rule::Sgd(SgdHyper { momentum: 0.89, ..h }), 1.0);
                notice("weight decay", Rule::Sgd(SgdHyper { weight_decay: 0.0, ..h }), 1.0);
                notice("nesterov", Rule::Sgd(SgdHyper { nesterov: false, ..h }), 1.0);
                notice("a gradient", rule, 1.01);
            }
            Rule::AdamW(h) => {
                notice("lr", Rule::AdamW(AdamWHyper { lr: 1.01 * h.lr, ..h }), 1.0);
                notice("betas", Rule::AdamW(AdamWHyper { betas: (0.9, 0.999), ..h }), 1.0);
                notice("weight decay", Rule::AdamW(AdamWHyper { weight_decay: 0.0, ..h }), 1.0);
                // Its length says nothing to Adam, its sign does.
                notice("a gradient", rule, -1.0);
            }
        }
    }
}

#[test]
fn two_ranks_come_to_the_same() {
    for (net, rule) in Net::ALL.iter().flat_map(|net| RULES.map(|rule| (*net, rule))) {
        println!("{net:?}, {rule:?}");
        let job = |torch: [bool; 2]| {
            let groups = ProcessGroup::threads(2, Duration::from_secs(60)).unwrap();
            let rank = move |(group, torch)| {
                let mut engine: Box<dyn Engine> =
                    if torch { Box::new(in_torch(net)) } else { Box::new(in_candle(net)) };
                set_state(&mut *engine, &start(net));
                train(&mut *engine, group, rule, DType::F32, 1.0)
            };
            let ranks = groups.into_iter().zip(torch).map(|job| thread::spawn(move || rank(job)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        };
        let (candle, torch, mixed) = (job([false; 2]), job([true; 2]), job([false, true]));
        for rank in 0..2 {
            candle[rank].is_near(&torch[rank], WIDE.0, WIDE.1).unwrap();
            mixed[rank].is_near(&torch[rank], WIDE.0, WIDE.1).unwrap();
        }
        let params = in_torch(net).params().to_vec();
        for TensorSpec { name, .. } in params {
            for ranks in [&torch, &mixed] {
                assert!(ranks[0].state[&name] == ranks[1].state[&name], "{name} on both ranks");
            }
        }
        assert_ne!(torch[0].losses, torch[1].losses, "each has batches of its own");
    }
}
