//! The first program of `train-step`'s README.

use train_step::fused_optim::{AdamW, AdamWHyper, Clip, DType, Slice, SliceMut};
use train_step::{Model, Result, TensorSpec, Trainer, Visit};

/// A line, `y = w x + b`, in memory of one's own.
struct Line {
    specs: [TensorSpec; 1],
    weights: [f32; 2],
}

impl Model for Line {
    fn params(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn with_params(&mut self, visit: &mut Visit<'_>) -> Result<()> {
        visit(&mut [SliceMut::F32(&mut self.weights)])
    }
}

fn main() -> Result<()> {
    let spec = TensorSpec { name: "line".into(), shape: vec![2], dtype: DType::F32 };
    let mut line = Line { specs: [spec], weights: [0.0; 2] };
    let hyper = AdamWHyper { lr: 0.05, weight_decay: 0.0, ..AdamWHyper::default() };
    let adamw = AdamW::with_one_group(hyper, 1)?;

    // Joins the other ranks, under a launcher, and begins with the weights of rank 0.
    let builder = Trainer::builder().clip(Clip::norm(1.0)).accumulate(2);
    let mut train = builder.build(&mut line, Box::new(adamw))?;
    for step in 0..2000 {
        let (x, y) = ((step % 5) as f32, (step % 5) as f32 * 2.0 + 1.0);
        train.step(&mut line, |line, cx| {
            let error = line.weights[0] * x + line.weights[1] - y;
            // The gradient of the squared error, times the loss scale.
            let slope = 2.0 * error * cx.loss_scale;
            cx.report(0, Slice::F32(&[slope * x, slope]))
        })?;
    }
    println!("y = {:.3} x + {:.3}", line.weights[0], line.weights[1]);
    // `train.save(&mut line, path, epoch)?`, and later `train.resume(&mut line, path)?`.
    assert!((line.weights[0] - 2.0).abs() < 0.01 && (line.weights[1] - 1.0).abs() < 0.01);
    Ok(())
}
