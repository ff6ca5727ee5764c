//! A plain training loop in tch. `trainer.rs` is the same with a `Trainer`.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use tch::nn::{self, Module, OptimizerConfig, VarStore};
use tch::{Device, Tensor};

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
    let mut opt = nn::adamw(0.9, 0.999, 0.01).build(&vs, 1e-2)?;
    for epoch in 0..6 {
        let mut last = 0.0;
        for first in (0..2048).step_by(64) {
            let (x, y) = (x.narrow(0, first, 64), y.narrow(0, first, 64));
            let loss = net.forward(&x).cross_entropy_for_logits(&y);
            opt.backward_step(&loss);
            last = loss.double_value(&[]);
        }
        println!("epoch {epoch}: loss {last:.4}");
    }
    Ok(())
}
