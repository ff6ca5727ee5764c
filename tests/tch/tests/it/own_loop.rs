//! A loop of one's own with `train_step::Trainer`: the averages are the gradient of the whole
//! batch, skipped steps leave no trace, and a resumed run has the bits of an undisturbed one.

use std::path::Path;
use std::thread;
use std::time::Duration;

use amp::{LossScaler, LossScalerOptions};
use collective::ProcessGroup;
use tch::nn::VarStore;
use tch::{Device, Tensor};
use tch_engine::{TchModel, Variables};
use train_step::fused_optim::{Clip, Sgd, SgdHyper};
use train_step::{
    Model, Outcome, Param, RunLength, SchedulerConfig, Shape, StepContext, Trainer, TrainerBuilder,
};

use crate::nets::{Classifier, Net};
use crate::numerics::{SGD, State, batch, distance, plain, wide};

/// The values of all variables.
fn values(store: &VarStore) -> State {
    let values = |tensor: Tensor| Vec::try_from(tensor.detach().reshape(-1)).unwrap();
    store.variables().into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}

/// Runs `rank` on each of two threads.
fn on_two_ranks<R: Send>(rank: impl Fn(ProcessGroup) -> R + Sync) -> [R; 2] {
    let (groups, rank) = (ProcessGroup::threads(2, Duration::from_secs(60)).unwrap(), &rank);
    thread::scope(|scope| {
        let ranks = groups.into_iter().map(|group| scope.spawn(move || rank(group)));
        let ranks: Vec<_> = ranks.collect();
        let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        ranks.try_into().ok().unwrap()
    })
}

/// A network, its variables and their trainer.
struct Run {
    store: VarStore,
    model: Classifier,
    vars: Variables,
    train: Trainer,
}

impl Run {
    #[expect(unsafe_code, reason = "the constructor of `Variables`")]
    fn new(net: Net, builder: TrainerBuilder, hyper: SgdHyper) -> Self {
        let (store, model) = plain(net);
        // SAFETY: the model keeps its variables to itself, and is not used by other threads.
        let mut vars = unsafe { Variables::new(&store) }.unwrap();
        let sgd = Sgd::with_one_group(hyper, vars.params().len()).unwrap();
        let train = builder.build(&mut vars, Box::new(sgd)).unwrap();
        Self { store, model, vars, train }
    }

    /// Trains on this rank's batch of a step.
    fn step(&mut self, step: usize) -> (f64, Outcome) {
        let batch = batch(2 * step + self.train.rank());
        let Self { model, vars, train, .. } = self;
        let run = |vars: &mut Variables, cx: &mut StepContext<'_>| {
            vars.pass(cx, || model.loss(&batch).unwrap())
        };
        let step = train.step(vars, run).unwrap();
        (step.loss.double_value(&[]), step.outcome)
    }
}

/// Steps by the gradient.
const BARE: SgdHyper =
    SgdHyper { lr: 1.0, momentum: 0.0, weight_decay: 0.0, nesterov: false, ..SGD };

#[test]
fn two_ranks_step_by_the_gradient_of_the_whole_batch() {
    let (store, model) = plain(Net::Mlp);
    let loss = (model.loss(&batch(0)).unwrap() + model.loss(&batch(1)).unwrap()) / 2.0;
    loss.backward();
    let ranks = on_two_ranks(|group| {
        let mut run = Run::new(Net::Mlp, Trainer::builder().group(group), BARE);
        let (loss, outcome) = run.step(0);
        assert_eq!(outcome, Outcome::Updated);
        let [mean] = run.train.mean([loss]).unwrap();
        (mean, values(&run.store))
    });
    assert!(ranks[0] == ranks[1]);
    assert!((ranks[0].0 - loss.double_value(&[])).abs() < 1e-6);
    let start = values(&store);
    for (name, variable) in store.variables() {
        let whole = Vec::<f32>::try_from(variable.grad().reshape(-1)).unwrap();
        let stepped = start[&name].iter().zip(&ranks[0].1[&name]).map(|(start, now)| start - now);
        let off = distance(&wide(&stepped.collect::<Vec<_>>()), &wide(&whole));
        assert!(off < 1e-5, "{name} is off by {off:.1e}");
    }
}

#[test]
fn a_skipped_step_leaves_no_trace_in_weights_and_statistics() {
    let scaler = LossScalerOptions { init_scale: 2_f32.powi(40), ..Default::default() };
    let ranks = on_two_ranks(|group| {
        let builder = Trainer::builder().group(group).f16();
        let builder = builder.loss_scaler(LossScaler::new(scaler).unwrap());
        let mut run = Run::new(Net::ResNet, builder, BARE);
        let before = values(&run.store);
        let (_, outcome) = run.step(0);
        assert_eq!(outcome, Outcome::Skipped { loss_scale: 2_f32.powi(39) });
        assert!(values(&run.store) == before);
        while run.step(0).1 != Outcome::Updated {}
        values(&run.store)
    });
    assert!(ranks[0] == ranks[1], "statistics are those of rank 0 after a step");
}

/// The state after so many batches of a run that goes on from `path`, if that exists, and saves to
/// it.
fn train(group: ProcessGroup, half: bool, path: &Path, batches: usize) -> (Vec<f64>, State) {
    let builder = Trainer::builder().group(group).clip(Clip::norm(1.0)).accumulate(2);
    let fall = Shape::Linear { start_factor: 1.0, end_factor: 0.1 };
    let schedule = [SchedulerConfig::by_iters(Param::Lr, fall)];
    let builder = builder.schedulers(RunLength::of_iters(8), schedule);
    // It overflows first, and grows on the way.
    let scaler =
        LossScalerOptions { init_scale: 2_f32.powi(22), growth_interval: 3, ..Default::default() };
    let builder = match half {
        true => builder.f16().loss_scaler(LossScaler::new(scaler).unwrap()),
        false => builder.bf16(),
    };
    let mut run = Run::new(Net::ResNet, builder, SGD);
    let first = run.train.resume(&mut run.vars, path).unwrap();
    let mut log: Vec<_> = (first..batches).map(|step| run.step(step).0).collect();
    run.train.save(&mut run.vars, path, batches).unwrap();
    let rates = [run.train.learning_rate(), run.train.loss_scale().into()];
    log.extend(rates.into_iter().chain([run.train.steps() as f64]));
    (log, values(&run.store))
}

#[test]
fn a_resumed_run_has_the_bits_of_an_undisturbed_one() {
    for half in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let [whole, parts] = ["whole", "parts"].map(|name| dir.path().join(name));
        let undisturbed = on_two_ranks(|group| train(group, half, &whole, 16));
        on_two_ranks(|group| train(group, half, &parts, 6));
        let resumed = on_two_ranks(|group| train(group, half, &parts, 16));
        for (undisturbed, resumed) in undisturbed.iter().zip(&resumed) {
            assert_eq!(undisturbed.0[6..], resumed.0);
            assert!(undisturbed.1 == resumed.1);
        }
        assert!(undisturbed[0].1 == undisturbed[1].1, "ranks have the same bits");
        assert!(std::fs::read(whole).unwrap() == std::fs::read(parts).unwrap());
        let taken = undisturbed[0].0[18];
        assert!(
            if half { taken > 0.0 && taken < 8.0 } else { taken == 8.0 },
            "{:?}",
            undisturbed[0].0
        );
    }
}

#[test]
#[expect(unsafe_code, reason = "the constructor of `Variables`")]
fn frozen_variables_are_neither_trained_nor_buffers() {
    let mut store = VarStore::new(Device::Cpu);
    let _net = Net::ResNet.build(&store.root(), 4);
    let count = store.trainable_variables().len();
    store.freeze();
    let head = store.root() / "fc";
    drop(head.get("weight").unwrap().set_requires_grad(true));
    // SAFETY: nobody uses the variables.
    let vars = unsafe { Variables::new(&store) }.unwrap();
    let names: Vec<_> = vars.params().iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["fc.weight"]);
    assert_eq!(vars.frozen().len(), count - 1);
    assert!(vars.buffers().iter().all(|spec| spec.name.contains("running_")));
}
