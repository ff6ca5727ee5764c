//! f16 in burn's own training loop: burn computes, differentiates and steps, `amp` scales the loss.
//!
//! ```sh
//! cargo run --manifest-path examples/burn/Cargo.toml --bin f16
//! ```
//!
//! Weights and burn's AdamW are in f32; each product is computed in f16, with weights that [`cast`]
//! casts. The loss is weighted so that its gradients are below 6e-8, the smallest f16, as happens
//! in large models. The program trains in f32, in f16 with [`LossScaler`], and in f16 without, and
//! fails if the second is not as good as the first, or the third learns anything.
//!
//! Backends: burn's flex backend computes f16 natively on the CPU, so this needs no GPU. burn's
//! ndarray backend has no f16. GPU backends (wgpu, cuda, rocm) need a device with f16; this program
//! has not run on one.
//!
//! Cost on a device: the check for infinities and the unscaling run there, as [one pass](Unscale)
//! over the gradients. Each step reads one boolean back, so the host waits for backward before it
//! enqueues the optimizer's step. Gradients and weights stay on the device; `full.rs`, which
//! averages gradients over ranks and resumes, copies both to the host and back.

use amp::{LossScaler, LossScalerOptions};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Bool, DType, Device, Tensor};
use burn_two_processes::lend::cast;
use burn_two_processes::mlp::{BATCH, LR, Mlp, samples};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const STEPS: usize = 100;
/// Makes the gradients too small for f16.
const LOSS_WEIGHT: f32 = 1e-8;

fn main() -> Result<()> {
    let f32 = train(DType::F32, LossScaler::disabled())?;
    // The scale that these gradients need is larger than the default's first one; it grows until
    // one overflows.
    let options = LossScalerOptions { growth_interval: 2, ..Default::default() };
    let f16 = train(DType::F16, LossScaler::new(options)?)?;
    let unscaled = train(DType::F16, LossScaler::disabled())?;
    println!("losses: f32 {f32:?}, f16 {f16:?}, f16 without scale {unscaled:?}");
    // f16 has 11 bits, and some steps at the beginning are lost to the search for the scale.
    if f16.1 > 1.5 * f32.1 {
        return Err(format!("f16 ends at a loss of {}, f32 at {}", f16.1, f32.1).into());
    }
    if unscaled.1 < 0.9 * unscaled.0 {
        return Err("without a loss scale the gradients should be 0 in f16".into());
    }
    Ok(())
}

/// The first and the last loss.
fn train(dtype: DType, mut scaler: LossScaler) -> Result<(f32, f32)> {
    let device = Device::flex().autodiff();
    let (mut model, batch) = (Mlp::new(&device), samples(0, 0..BATCH, &device));
    let mut adamw = AdamWConfig::new().with_epsilon(1e-20).with_weight_decay(0.0).init();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = cast(&model, dtype).loss(&batch);
        losses.push(loss.clone().into_scalar::<f32>());
        let scaled = loss.mul_scalar(LOSS_WEIGHT).mul_scalar(scaler.scale());
        let grads = GradientsParams::from_grads(scaled.backward(), &model);
        let mut unscale = Unscale { grads, inv_scale: scaler.inv_scale(), all_finite: None };
        model.visit(&mut unscale);
        let Unscale { grads, all_finite, .. } = unscale;
        // The only wait for the device.
        let found_inf = !all_finite.ok_or("no gradients")?.into_scalar::<bool>();
        if !found_inf {
            model = adamw.step(LR, model, grads);
        }
        scaler.update(found_inf)?;
    }
    Ok((losses[0], losses[STEPS - 1]))
}

/// Divides gradients by the loss scale, and notes on the device whether all are finite.
struct Unscale {
    grads: GradientsParams,
    inv_scale: f32,
    all_finite: Option<Tensor<1, Bool>>,
}

impl ModuleVisitor for Unscale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.remove::<D>(param.id) else { return };
        let finite = grad.clone().is_finite().all();
        self.all_finite = Some(match self.all_finite.take() {
            Some(others) => others.bool_and(finite),
            None => finite,
        });
        self.grads.register(param.id, grad.mul_scalar(self.inv_scale));
    }
}
