//! How `[optim_wrapper]` and `[optim_wrapper.optimizer]` are written.

use ::amp::LossScalerOptions;
use fused_optim::{AdamW, AdamWHyper, DType, Sgd, SgdHyper};

use super::{AmpOptimWrapper, Fp32OptimWrapper, LossScale, OptimWrapperFactory, OptimizerFactory};
use crate::Result;
use crate::config::Section;
use crate::registry::{Builtin, OPTIMIZERS};

/// The wrappers a configuration can name.
pub(crate) const BUILTIN: Builtin<OptimWrapperFactory> =
    &[("OptimWrapper", fp32), ("AmpOptimWrapper", amp)];

/// The optimizers a configuration can name.
pub(crate) const BUILTIN_OPTIMIZERS: Builtin<OptimizerFactory> = &[("SGD", sgd), ("AdamW", adamw)];

fn fp32(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = accumulative_counts(section)?;
    let optimizer = OPTIMIZERS.build(section.section("optimizer")?)?;
    Ok(OptimWrapperFactory {
        dtype: DType::F32,
        build: Box::new(move |params| {
            Ok(Box::new(Fp32OptimWrapper::new(optimizer(params)?, counts)))
        }),
    })
}

fn amp(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = accumulative_counts(section)?;
    let dtypes = [("float16", DType::F16), ("bfloat16", DType::Bf16), ("float32", DType::F32)];
    let dtype = section.choice("dtype", "float16", &dtypes)?;
    let offset = section.offset_of("loss_scale");
    let loss_scale = loss_scale(section, dtype)?;
    loss_scale.scaler().map_err(|e| section.error_at(offset, e))?;
    let optimizer = OPTIMIZERS.build(section.section("optimizer")?)?;
    Ok(OptimWrapperFactory {
        dtype,
        build: Box::new(move |params| {
            Ok(Box::new(AmpOptimWrapper::new(optimizer(params)?, counts, loss_scale)?))
        }),
    })
}

fn accumulative_counts(section: &mut Section) -> Result<usize> {
    section.or_checked("accumulative_counts", 1, "at least 1", |n: &usize| *n >= 1)
}

/// `loss_scale = "dynamic"`, a number, or a table of the dynamic scaler's options.
fn loss_scale(section: &mut Section, dtype: DType) -> Result<LossScale> {
    let key = "loss_scale";
    if section.is_number(key) {
        let positive = |s: &f32| *s > 0.0 && s.is_finite();
        return section
            .or_checked(key, 1.0, "positive and finite", positive)
            .map(LossScale::Static);
    }
    if section.is_string(key) {
        let choices = [("dynamic", LossScale::Dynamic(LossScalerOptions::default()))];
        return section.choice(key, "dynamic", &choices);
    }
    let Some(mut table) = section.optional_section(key)? else {
        return Ok(AmpOptimWrapper::default_loss_scale(dtype));
    };
    let default = LossScalerOptions::default();
    let options = LossScalerOptions {
        init_scale: table.or("init_scale", default.init_scale)?,
        growth_factor: table.or("growth_factor", default.growth_factor)?,
        backoff_factor: table.or("backoff_factor", default.backoff_factor)?,
        growth_interval: table.or("growth_interval", default.growth_interval)?,
        ..default
    };
    table.finish()?;
    Ok(LossScale::Dynamic(options))
}

fn sgd(section: &mut Section) -> Result<OptimizerFactory> {
    let mut hyper = SgdHyper { lr: section.required("lr")?, ..SgdHyper::default() };
    hyper.momentum = section.or("momentum", hyper.momentum)?;
    hyper.dampening = section.or("dampening", hyper.dampening)?;
    hyper.weight_decay = section.or("weight_decay", hyper.weight_decay)?;
    hyper.nesterov = section.or("nesterov", hyper.nesterov)?;
    hyper.maximize = section.or("maximize", hyper.maximize)?;
    Sgd::with_one_group(hyper, 0).map_err(|e| section.error(e))?;
    Ok(Box::new(move |params| Ok(Box::new(Sgd::with_one_group(hyper, params.len())?))))
}

fn adamw(section: &mut Section) -> Result<OptimizerFactory> {
    let mut hyper = AdamWHyper::default();
    hyper.lr = section.or("lr", hyper.lr)?;
    let betas: Vec<f64> = section.or("betas", vec![hyper.betas.0, hyper.betas.1])?;
    hyper.betas = match betas[..] {
        [b1, b2] => (b1, b2),
        _ => return Err(section.error("`betas` must be two numbers")),
    };
    hyper.eps = section.or("eps", hyper.eps)?;
    hyper.weight_decay = section.or("weight_decay", hyper.weight_decay)?;
    hyper.amsgrad = section.or("amsgrad", hyper.amsgrad)?;
    hyper.maximize = section.or("maximize", hyper.maximize)?;
    AdamW::with_one_group(hyper, 0).map_err(|e| section.error(e))?;
    Ok(Box::new(move |params| Ok(Box::new(AdamW::with_one_group(hyper, params.len())?))))
}
