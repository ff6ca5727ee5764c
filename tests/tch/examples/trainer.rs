//! The loop of `base.rs`, data-parallel under any launcher, in f16 with a loss scale, clipped,
//! accumulated, with a schedule, checkpoints and exact resuming:
//! `launch --nproc-per-node 2 -- target/debug/examples/trainer`.

#![expect(clippy::print_stdout, unsafe_code, reason = "an example; tch's tensors share memory")]

use tch::nn::{self, Module, VarStore};
use tch::{Device, Tensor};
use tch_engine::Variables;
use train_step::fused_optim::{AdamW, AdamWHyper, Clip};
use train_step::{Floor, Param, RunLength, SchedulerConfig, Shape, Trainer};

mod points;
use points::{CLASSES, FEATURES, data};

fn net(vs: &nn::Path<'_>) -> nn::Sequential {
    let linear = |name, from, to| nn::linear(vs / name, from, to, Default::default());
    let hidden = nn::seq().add(linear("a", FEATURES, 64)).add_fn(Tensor::relu);
    hidden.add(linear("b", 64, CLASSES))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tch::manual_seed(1);
    let (x, y) = data(2048);
    let vs = VarStore::new(Device::Cpu);
    let net = net(&vs.root());
    // SAFETY: only this thread has tensors of `vs`, and only `pass` uses them.
    let mut vars = unsafe { Variables::new(&vs) }?;
    let hyper = AdamWHyper { lr: 1e-2, weight_decay: 0.01, ..Default::default() };
    let opt = AdamW::with_one_group(hyper, vs.trainable_variables().len())?;
    let cosine = Shape::CosineAnnealing { t_max: None, floor: Floor::Ratio(0.01) };
    let schedule = [SchedulerConfig::by_iters(Param::Lr, cosine)];
    let train = Trainer::builder().f16().clip(Clip::norm(1.0)).accumulate(2);
    let train = train.schedulers(RunLength::of_iters(96), schedule);
    let mut train = train.build(&mut vars, Box::new(opt))?;
    let (rank, each) = (train.rank() as i64, 64 / train.world_size() as i64);
    for epoch in train.resume(&mut vars, "points.safetensors")?..6 {
        let mut last = 0.0;
        for first in (rank * each..2048).step_by(64) {
            let (x, y) = (x.narrow(0, first, each), y.narrow(0, first, each));
            let step = train.step(&mut vars, |vars, cx| {
                vars.pass(cx, || net.forward(&x).cross_entropy_for_logits(&y))
            })?;
            [last] = train.mean([step.loss.double_value(&[])])?;
        }
        train.save(&mut vars, "points.safetensors", epoch + 1)?;
        if train.is_main() {
            println!("epoch {epoch}: loss {last:.4}, loss scale {}", train.loss_scale());
        }
    }
    Ok(())
}
