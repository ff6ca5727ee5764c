//! The first program of `candle-ops`'s README.

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_ops::nn::{AdamW, Optimizer, VarBuilder, VarMap, layer_norm, linear};
use candle_ops::{Context, cross_entropy, dropout, gelu};

fn main() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (first, last) = (linear(2, 32, vb.pp("first"))?, linear(32, 2, vb.pp("last"))?);
    let norm = layer_norm(32, 1e-5, vb.pp("norm"))?;
    let forward =
        |x: &Tensor| last.forward(&dropout(&gelu(&norm.forward(&first.forward(x)?)?)?, 0.1)?);

    let points = Tensor::randn(0f32, 1.0, (256, 2), &Device::Cpu)?;
    let labels = points.sum(1)?.gt(0f32)?.to_dtype(DType::I64)?;
    let mut adamw = AdamW::new_lr(vars.all_vars(), 1e-2)?; // candle-nn's; any optimizer will do
    let mut context = Context::new(0); // dropout's random numbers, autocast, kernels on a GPU
    for _ in 0..100 {
        let loss = context.enter(|| cross_entropy(&forward(&points)?, &labels))?;
        let gradients = context.enter(|| loss.backward())?;
        // candle's own layer norm would have left all variables before it without a gradient.
        assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
        adamw.step(&gradients)?;
    }
    let predicted = context.evaluate(|| forward(&points))?.argmax(1)?.to_dtype(DType::I64)?;
    let right = predicted.eq(&labels)?.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
    println!("{right} of the points are right");
    assert!(right > 0.9);
    Ok(())
}
