//! A plain training loop in candle. `abcd.rs` is the same with a `Trainer`.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{
    AdamW, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear, loss::cross_entropy,
};

#[path = "points/mod.rs"]
mod points;
use points::{CLASSES, FEATURES, batch, data};

struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self(linear(FEATURES, 64, vb.pp("a"))?, linear(64, CLASSES, vb.pp("b"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.relu()?)
    }
}

fn main() -> Result<()> {
    let (x, y) = data(2048)?;
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut opt = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 1e-2, ..Default::default() })?;
    for epoch in 0..6 {
        let mut last = 0.0;
        for rows in (0..2048).collect::<Vec<u32>>().chunks(64) {
            let (xs, ys) = batch(&x, &y, rows)?;
            let loss = cross_entropy(&net.forward(&xs)?, &ys)?;
            opt.backward_step(&loss)?;
            last = loss.to_scalar::<f32>()?;
        }
        println!("epoch {epoch}: loss {last:.4}");
    }
    Ok(())
}
