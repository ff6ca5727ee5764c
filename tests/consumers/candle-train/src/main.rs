//! The first program of `candle-train`'s README.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_train::{AdamWHyper, Clip, Trainer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let x =
        Tensor::arange(0f32, 512.0, &Device::Cpu)?.affine(1.5, 0.0)?.sin()?.reshape((256, 2))?;
    let y = x.sum_keepdim(1)?;
    let vars = VarMap::new();
    let net = candle_nn::linear(2, 1, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;

    let path = "run.safetensors"; // remove it to begin again
    let hyper = AdamWHyper { lr: 0.05, ..Default::default() };
    // A rank of `launch`, torchrun, srun or mpirun joins the others here; started alone, it is the
    // only one.
    let mut train = Trainer::builder(&vars).clip(Clip::norm(1.0)).build(hyper)?;
    for epoch in train.resume(path)?..10 {
        for rows in train.batches(256, 32, epoch)? {
            // this rank's part of each batch of 32
            let rows = Tensor::new(rows, &Device::Cpu)?;
            let (x, y) = (x.index_select(&rows, 0)?, y.index_select(&rows, 0)?);
            let step = train.step(|| (net.forward(&x)? - &y)?.sqr()?.mean_all())?;
            println!("epoch {epoch}: loss {:.5}", train.mean(&step.loss)?); // of all ranks
        }
        train.save(path, epoch + 1)?; // run again after a kill, it goes on here with the same bits
    }
    let weight = net.weight().flatten_all()?.to_vec1::<f32>()?;
    println!("{} steps, weight {weight:?}", train.steps());
    assert!(weight.iter().all(|w| (w - 1.0).abs() < 0.1), "{weight:?}");
    Ok(())
}
