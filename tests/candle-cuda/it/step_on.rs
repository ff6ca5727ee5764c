//! Steps of `candle_train::Trainer` as CUDA graphs: the bits of eager steps.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::nn::{BatchNorm, BatchNormConfig, Linear, batch_norm, linear};
use candle_ops::{cross_entropy, dropout, rand, relu};
use candle_train::train_data::{Array, Batch};
use candle_train::{
    AdamWHyper, Clip, CompileMode, CompileOptions, Fields, LossScaler, LossScalerOptions, Outcome,
    Trainer, TrainerBuilder, cuda_device,
};
use collective::{GroupOptions, MemoryStore, ProcessGroup, Store, Transport};

/// Number of eager steps before a capture.
const EAGER: usize = 2;

struct Net(Linear, BatchNorm, Linear);

impl Net {
    fn loss(&self, fields: &Fields) -> Result<Tensor> {
        let x = self.1.forward_t(&self.0.forward(fields.get("x")?)?, true)?;
        cross_entropy(&self.2.forward(&relu(&x)?)?, fields.get("y")?)
    }
}

fn model(device: &Device) -> Result<(VarMap, Net)> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    let norm = batch_norm(16, BatchNormConfig::default(), vb.pp("norm"))?;
    let net = Net(linear(8, 16, vb.pp("b"))?, norm, linear(16, 4, vb.pp("a"))?);
    for (name, var) in vars.data().lock().unwrap().iter() {
        if name.ends_with("weight") || name.ends_with("bias") {
            let value = |i: usize| ((i * 7 + name.len()) as f32 * 0.37).sin() * 0.3;
            let values: Vec<f32> = (0..var.elem_count()).map(value).collect();
            var.set(&Tensor::from_vec(values, var.shape(), device)?)?;
        }
    }
    Ok((vars, net))
}

/// A batch of `rows` samples.
fn batch(step: usize, rows: usize) -> Batch {
    let x = (0..rows * 8).map(|i| ((i + 31 * step) as f32 * 0.7).sin()).collect::<Vec<_>>();
    let y = (0..rows).map(|row| ((row + step) % 4) as i64).collect::<Vec<_>>();
    Batch::new()
        .with("x", Array::new([rows, 8], x).unwrap())
        .with("y", Array::new([rows], y).unwrap())
}

fn graphs(fullgraph: bool) -> impl Fn(TrainerBuilder) -> TrainerBuilder + Copy + Sync {
    move |builder| {
        let mode = CompileMode::ReduceOverhead;
        builder.compile(CompileOptions { mode, fullgraph, ..CompileOptions::default() })
    }
}

/// Results of a run.
#[derive(Debug, PartialEq)]
struct Left {
    losses: Vec<u32>,
    outcomes: Vec<Outcome>,
    /// Variables and statistics, by name.
    vars: Vec<(String, Vec<u32>)>,
    norms: Vec<Option<f64>>,
}

/// Options of a run's steps.
#[derive(Clone, Copy)]
struct Steps {
    count: usize,
    rows: fn(usize) -> usize,
    weighted: bool,
    /// Step before which the trainer is saved, and resumes from its file.
    resumed_at: Option<usize>,
    loss: fn(&Net, &Fields) -> Result<Tensor>,
}

impl Default for Steps {
    fn default() -> Self {
        Self { count: 8, rows: |_| 8, weighted: false, resumed_at: None, loss: Net::loss }
    }
}

/// A trainer after some steps, with the number of calls of the closure in each.
fn run(
    device: &Device,
    steps: Steps,
    with: impl Fn(TrainerBuilder) -> TrainerBuilder,
) -> (Left, Trainer, Vec<usize>) {
    let (vars, net) = model(device).unwrap();
    // The check calls the closure four times more.
    let builder = Trainer::builder(&vars).clip(Clip::norm(0.5)).check_gradients(false);
    let builder = with(builder.schedule(|step| 1.0 / (step + 1) as f64));
    let mut train = builder.build(AdamWHyper { lr: 1e-2, ..AdamWHyper::default() }).unwrap();
    let (mut losses, mut outcomes, mut norms) = (Vec::new(), Vec::new(), Vec::new());
    let mut calls = Vec::new();
    for index in 0..steps.count {
        let rows = (steps.rows)(index);
        if steps.resumed_at == Some(index) {
            let path = std::env::temp_dir().join(format!("step-on-{}", std::process::id()));
            train.save(&path, 1).unwrap();
            train.resume(&path).unwrap();
            std::fs::remove_file(path).unwrap();
        }
        let batch = batch(index + 100 * train.rank(), rows);
        let called = Cell::new(0);
        let forward = |fields: &Fields| {
            called.set(called.get() + 1);
            (steps.loss)(&net, fields)
        };
        let step = match steps.weighted {
            true => train.step_on_weighted(rows, &batch, forward),
            false => train.step_on(&batch, forward),
        };
        let step = step.unwrap();
        losses.push(step.loss.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap().to_bits());
        outcomes.push(step.outcome);
        norms.push(train.grad_norm());
        calls.push(called.get());
    }
    let mut vars: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|(a, _), (b, _)| a.cmp(b));
    let bits = |var: &Tensor| {
        let values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    };
    let vars = vars.into_iter().map(|(name, var)| (name, bits(&var))).collect();
    (Left { losses, outcomes, vars, norms }, train, calls)
}

fn report(train: &Trainer) -> String {
    train.compile_report().unwrap().to_string()
}

const WHOLE: &str = "forward, backward and optimizer step as one CUDA graph, for batches of `x`";
const PART: &str = "forward and backward as one CUDA graph, for batches of `x`";

/// Compares a run with graphs with an eager one, and returns its outcomes and report.
fn same(
    steps: Steps,
    with: impl Fn(TrainerBuilder) -> TrainerBuilder + Copy,
) -> (Vec<Outcome>, String) {
    let device = cuda_device(0).unwrap();
    let (eager, ..) = run(&device, steps, with);
    let (graph, train, calls) = run(&device, steps, |builder| graphs(true)(with(builder)));
    assert_eq!(graph, eager);
    assert_eq!(calls[..EAGER], [1; EAGER]);
    assert_eq!(calls.last(), Some(&0), "{calls:?}");
    (graph.outcomes, report(&train))
}

#[test]
fn graphs_follow_a_first_step_whose_gradients_are_checked() {
    let device = cuda_device(0).unwrap();
    let (plain, ..) = run(&device, Steps::default(), graphs(true));
    let check = |builder| graphs(true)(builder).check_gradients(true);
    let (checked, train, calls) = run(&device, Steps::default(), check);
    assert_eq!(checked, plain);
    assert_eq!((calls[0], calls.last()), (5, Some(&0)));
    assert!(report(&train).contains(WHOLE), "{}", report(&train));
}

#[test]
fn graphs_have_the_bits_of_eager_steps() {
    let (_, text) = same(Steps::default(), |builder| builder);
    assert!(text.contains(WHOLE), "{text}");
    let device = cuda_device(0).unwrap();
    let (_, _, calls) = run(&device, Steps::default(), graphs(true));
    // A capture runs the closure twice, eagerly and captured; the comparison once.
    assert_eq!(calls, [1, 1, 2, 1, 0, 0, 0, 0]);
}

#[test]
fn graphs_skip_steps_of_mixed_precision() {
    let options = LossScalerOptions {
        init_scale: 65536.0,
        growth_factor: 4.0,
        growth_interval: 2,
        ..LossScalerOptions::default()
    };
    let scaled =
        |builder: TrainerBuilder| builder.f16().loss_scaler(LossScaler::new(options).unwrap());
    let (outcomes, text) = same(Steps { count: 16, ..Steps::default() }, scaled);
    assert!(text.contains(WHOLE), "{text}");
    let launched = &outcomes[EAGER + 2..];
    let skipped = launched.iter().filter(|outcome| matches!(outcome, Outcome::Skipped { .. }));
    let skipped = skipped.count();
    assert!(skipped > 0 && launched.contains(&Outcome::Updated), "{outcomes:?}");
}

#[test]
fn each_set_of_shapes_has_its_graph() {
    let rows = |index| if index % 2 == 0 { 8 } else { 4 };
    let (_, text) = same(Steps { count: 12, rows, ..Steps::default() }, |builder| builder);
    for shape in ["`x` [8, 8], `y` [8]", "`x` [4, 8], `y` [4]"] {
        assert!(text.contains(shape), "{text}");
    }
    // Counts that differ between the batches of a step.
    let steps = Steps { count: 12, rows, weighted: true, ..Steps::default() };
    let (_, text) = same(steps, |builder| builder);
    assert!(text.contains(WHOLE), "{text}");
}

#[test]
fn a_resumed_trainer_captures_again() {
    let steps = Steps { count: 14, resumed_at: Some(6), ..Steps::default() };
    let (_, text) = same(steps, |builder| builder);
    assert!(text.contains(WHOLE), "{text}");
}

#[test]
fn accumulated_steps_follow_a_graph() {
    for weighted in [false, true] {
        let steps = Steps { count: 12, weighted, ..Steps::default() };
        let (_, text) = same(steps, |builder| builder.accumulate(2));
        assert!(text.contains(PART) && !text.contains(WHOLE), "{text}");
    }
}

#[test]
fn averages_of_two_ranks_follow_a_graph() {
    let device = cuda_device(0).unwrap();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let rank = |rank: usize, name: &str, captured: bool| {
        let options = GroupOptions::default().with_timeout(Duration::from_secs(60)).with_name(name);
        let options = options.with_transport(Transport::Nccl).with_cuda_device(0);
        let group = ProcessGroup::from_store(store.clone(), rank, 2, options).unwrap();
        let device = cuda_device(0).unwrap();
        let (left, train, _) = run(&device, Steps::default(), |builder| {
            let builder = builder.group(group.clone());
            if captured { graphs(true)(builder) } else { builder }
        });
        (left, train.compile_report().map(|report| report.to_string()))
    };
    let both = |name: &str, captured| {
        std::thread::scope(|scope| {
            let rank = &rank;
            let ranks = [0, 1].map(|index| scope.spawn(move || rank(index, name, captured)));
            ranks.map(|rank| rank.join().unwrap())
        })
    };
    let (eager, graph) = (both("eager", false), both("graph", true));
    for (eager, (left, report)) in eager.into_iter().zip(graph) {
        assert_eq!(left, eager.0);
        assert!(report.unwrap().contains(PART));
    }
    drop(device);
}

#[test]
fn another_closure_on_batches_of_the_same_shapes_has_its_own_graph() {
    let device = cuda_device(0).unwrap();
    let train = |with: &dyn Fn(TrainerBuilder) -> TrainerBuilder| {
        let (vars, net) = model(&device).unwrap();
        let mut train = with(Trainer::builder(&vars)).build(AdamWHyper::default()).unwrap();
        let mut losses = Vec::new();
        for step in 0..20 {
            let loss = match step % 4 {
                3 => train.step_on(&batch(step, 8), |fields| {
                    net.loss(fields)? + net.0.weight().sqr()?.mean_all()?
                }),
                _ => train.step_on(&batch(step, 8), |fields| net.loss(fields)),
            };
            losses.push(loss.unwrap().loss.to_scalar::<f32>().unwrap().to_bits());
        }
        (losses, train.compile_report().map(|report| report.to_string()))
    };
    let (eager, _) = train(&|builder| builder);
    let (captured, report) = train(&graphs(false));
    assert_eq!(captured, eager);
    assert!(report.unwrap().contains("as one CUDA graph, for batches of"));
}

#[test]
fn dropout_in_a_graph_draws_the_numbers_of_eager_steps() {
    let loss = |net: &Net, fields: &Fields| {
        let x = dropout(&net.0.forward(fields.get("x")?)?, 0.5)?;
        // Not a whole number of the generator's blocks.
        let x = net.1.forward_t(&x.narrow(0, 0, x.dim(0)? - 1)?, true)?;
        cross_entropy(&net.2.forward(&dropout(&x, 0.1)?)?, &fields.get("y")?.narrow(0, 1, 7)?)
    };
    let (_, text) = same(Steps { loss, ..Steps::default() }, |builder| builder);
    assert!(text.contains(WHOLE), "{text}");
    let (_, text) = same(Steps { loss, ..Steps::default() }, TrainerBuilder::bf16);
    assert!(text.contains(WHOLE), "{text}");
    same(Steps { loss, count: 14, resumed_at: Some(6), ..Steps::default() }, |builder| builder);
}

#[test]
fn a_step_that_draws_on_the_host_is_refused_by_name() {
    let loss = |net: &Net, fields: &Fields| {
        let x = net.0.forward(fields.get("x")?)?;
        let x = (&x + rand(0.0, 0.1, x.shape(), x.dtype(), x.device())?)?;
        cross_entropy(&net.2.forward(&x)?, fields.get("y")?)
    };
    let steps = Steps { loss, ..Steps::default() };
    let device = cuda_device(0).unwrap();
    let unused = |builder: TrainerBuilder| builder.find_unused_parameters();
    let (eager, ..) = run(&device, steps, unused);
    let (left, train, calls) = run(&device, steps, |builder| graphs(false)(unused(builder)));
    assert_eq!(left, eager);
    assert_eq!(calls, [1; 8]);
    let why = "as one CUDA graph: random numbers are drawn on the host";
    assert!(report(&train).contains(why), "{}", report(&train));
}

#[test]
fn fullgraph_makes_a_refusal_an_error() {
    let device = cuda_device(0).unwrap();
    let (vars, net) = model(&device).unwrap();
    let builder = graphs(true)(Trainer::builder(&vars));
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    let loss = |fields: &Fields| {
        let noise = rand(0.0, 0.1, 1, DType::F32, fields.get("x")?.device())?;
        net.loss(fields)? + noise.mean_all()?
    };
    let errors = (0..4).find_map(|step| train.step_on(&batch(step, 8), loss).err());
    let error = errors.unwrap().to_string();
    let why = "`fullgraph` is set, but a step cannot be captured: random numbers";
    assert!(error.contains(why), "{error}");
    let x = Tensor::ones((8, 8), DType::F32, &device).unwrap();
    let error = train.step(|| net.0.forward(&x)?.mean_all()).unwrap_err().to_string();
    assert!(error.contains("call `Trainer::step_on`"), "{error}");
    let options = CompileOptions { fullgraph: true, ..CompileOptions::default() };
    let error = Trainer::builder(&vars).compile(options).build(AdamWHyper::default()).unwrap_err();
    assert!(error.to_string().contains("`fullgraph` needs mode `reduce-overhead`"), "{error}");
}

#[test]
fn a_device_that_tracks_events_is_refused_with_advice() {
    for device in [Device::new_cuda(0).unwrap(), Device::new_cuda_with_stream(0).unwrap()] {
        let (_, train, calls) = run(&device, Steps::default(), graphs(false));
        assert_eq!(calls, [1; 8]);
        let why = "open it by `candle_train::cuda_device`";
        assert!(report(&train).contains(why), "{}", report(&train));
    }
}

#[test]
fn a_wrong_label_is_an_error_before_the_launch() {
    let device = cuda_device(0).unwrap();
    let (vars, net) = model(&device).unwrap();
    let builder = graphs(true)(Trainer::builder(&vars));
    let mut train = builder.build(AdamWHyper::default()).unwrap();
    let mut step = |batch: &Batch| train.step_on(batch, |fields| net.loss(fields));
    for index in 0..6 {
        step(&batch(index, 8)).unwrap();
    }
    let labels = Array::new([8], vec![0_i64, 1, 2, 3, 4, 0, 0, 0]).unwrap();
    let error = step(&batch(6, 8).with("y", labels)).unwrap_err().to_string();
    assert!(error.contains("cross_entropy: label 4 is none of 4 classes"), "{error}");
    step(&batch(6, 8)).unwrap();
}
