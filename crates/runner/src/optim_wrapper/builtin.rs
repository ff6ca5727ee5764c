//! How `[optim_wrapper]` and `[optim_wrapper.optimizer]` are written.

use ::amp::LossScalerOptions;
use fused_optim::{
    Adadelta, AdadeltaHyper, Adam, AdamHyper, AdamP, AdamPHyper, AdamW, AdamWHyper, BertAdam,
    BertAdamHyper, ClipScope, CosineEps, DType, Lamb, LambHyper, RmsProp, RmsPropHyper, RmsPropTf,
    RmsPropTfHyper, Schedule, Sgd, SgdHyper,
};

use super::{AmpOptimWrapper, Fp32OptimWrapper, LossScale, OptimWrapperFactory, OptimizerFactory};
use crate::Result;
use crate::config::{FromConfig, Section};
use crate::registry::{Builtin, OPTIMIZERS};

/// The wrappers a configuration can name.
pub(crate) const BUILTIN: Builtin<OptimWrapperFactory> =
    &[("OptimWrapper", fp32), ("AmpOptimWrapper", amp)];

/// The optimizers a configuration can name: Ascend's fused nine, with torch_npu's defaults, under the
/// names that their originals have and under Ascend's. They are the same, and fused, on any device.
pub(crate) const BUILTIN_OPTIMIZERS: Builtin<OptimizerFactory> = &[
    ("Adadelta", adadelta),
    ("NpuFusedAdadelta", adadelta),
    ("Adam", adam),
    ("NpuFusedAdam", adam),
    ("AdamP", adamp),
    ("NpuFusedAdamP", adamp),
    ("AdamW", adamw),
    ("NpuFusedAdamW", adamw),
    ("BertAdam", bert_adam),
    ("NpuFusedBertAdam", bert_adam),
    ("Lamb", lamb),
    ("NpuFusedLamb", lamb),
    ("RMSprop", rmsprop),
    ("NpuFusedRMSprop", rmsprop),
    ("RMSpropTF", rmsprop_tf),
    ("NpuFusedRMSpropTF", rmsprop_tf),
    ("SGD", sgd),
    ("NpuFusedSGD", sgd),
];

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

/// How an optimizer's table is read: each hyper-parameter under its own name, by one of the functions
/// below.
macro_rules! optimizer {
    ($build:ident, $optimizer:ident, $hyper:ident { $($field:ident: $read:ident),* }) => {
        fn $build(section: &mut Section) -> Result<OptimizerFactory> {
            let default = $hyper::default();
            let hyper = $hyper {
                $($field: $read(section, stringify!($field), default.$field)?),*
            };
            // A mistake is seen now, not when the parameters are known.
            $optimizer::with_one_group(hyper, 0).map_err(|e| section.error(e))?;
            Ok(Box::new(move |params| {
                Ok(Box::new($optimizer::with_one_group(hyper, params.len())?))
            }))
        }
    };
}

optimizer!(
    adadelta,
    Adadelta,
    AdadeltaHyper { lr: or, rho: or, eps: or, weight_decay: or, maximize: or }
);
optimizer!(
    adam,
    Adam,
    AdamHyper { lr: or, betas: or, eps: or, weight_decay: or, amsgrad: or, maximize: or }
);
optimizer!(
    adamp,
    AdamP,
    AdamPHyper {
        lr: or,
        betas: or,
        eps: or,
        weight_decay: or,
        delta: or,
        wd_ratio: or,
        nesterov: or,
        cos_eps: of_places,
        maximize: or
    }
);
optimizer!(
    adamw,
    AdamW,
    AdamWHyper { lr: or, betas: or, eps: or, weight_decay: or, amsgrad: or, maximize: or }
);
optimizer!(
    bert_adam,
    BertAdam,
    BertAdamHyper {
        lr: required,
        warmup: or,
        t_total: or,
        schedule: of_schedules,
        b1: or,
        b2: or,
        e: or,
        weight_decay: or,
        max_grad_norm: or,
        clip: of_scopes,
        maximize: or
    }
);
optimizer!(
    lamb,
    Lamb,
    LambHyper {
        lr: or,
        betas: or,
        eps: or,
        weight_decay: or,
        adam: or,
        use_global_grad_norm: or,
        maximize: or
    }
);
optimizer!(
    rmsprop,
    RmsProp,
    RmsPropHyper {
        lr: or,
        alpha: or,
        eps: or,
        weight_decay: or,
        momentum: or,
        centered: or,
        maximize: or
    }
);
optimizer!(
    rmsprop_tf,
    RmsPropTf,
    RmsPropTfHyper {
        lr: or,
        alpha: or,
        eps: or,
        weight_decay: or,
        momentum: or,
        centered: or,
        decoupled_decay: or,
        decoupled_lr: or,
        lr_in_momentum: or,
        maximize: or
    }
);
optimizer!(
    sgd,
    Sgd,
    SgdHyper {
        lr: required,
        momentum: or,
        dampening: or,
        weight_decay: or,
        nesterov: or,
        maximize: or
    }
);

fn or<T: FromConfig>(section: &mut Section, key: &'static str, default: T) -> Result<T> {
    section.or(key, default)
}

fn required<T: FromConfig>(section: &mut Section, key: &'static str, _: T) -> Result<T> {
    section.required(key)
}

fn of_schedules(section: &mut Section, key: &'static str, _: Schedule) -> Result<Schedule> {
    let schedules = [
        ("warmup_linear", Schedule::Linear),
        ("warmup_cosine", Schedule::Cosine),
        ("warmup_constant", Schedule::Constant),
        ("warmup_poly", Schedule::Poly),
    ];
    section.choice(key, "warmup_linear", &schedules)
}

fn of_scopes(section: &mut Section, key: &'static str, _: ClipScope) -> Result<ClipScope> {
    section.choice(key, "group", &[("group", ClipScope::Group), ("tensor", ClipScope::Tensor)])
}

fn of_places(section: &mut Section, key: &'static str, _: CosineEps) -> Result<CosineEps> {
    section.choice(key, "add", &[("add", CosineEps::Add), ("torch", CosineEps::Max)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn build(text: &str) -> Result<OptimizerFactory> {
        OPTIMIZERS.build(Config::from_text("c.toml", text)?.into_section())
    }

    #[test]
    fn the_nine_go_by_their_own_names_and_by_ascends() {
        let kinds = [
            ("Adadelta", "adadelta"),
            ("Adam", "adam"),
            ("AdamP", "adamp"),
            ("AdamW", "adamw"),
            ("BertAdam", "bert_adam"),
            ("Lamb", "lamb"),
            ("RMSprop", "rmsprop"),
            ("RMSpropTF", "rmsprop_tf"),
            ("SGD", "sgd"),
        ];
        assert_eq!(BUILTIN_OPTIMIZERS.len(), 2 * kinds.len());
        for (name, kind) in kinds {
            for name in [name.to_owned(), format!("NpuFused{name}")] {
                let optimizer =
                    build(&format!("type = '{name}'\nlr = 0.25")).unwrap()(&[]).unwrap();
                assert_eq!((optimizer.kind(), optimizer.lr(0).unwrap()), (kind, 0.25), "{name}");
            }
        }
    }

    #[test]
    fn every_mistake_has_its_place() {
        for (text, wanted) in [
            ("type = 'SGD'", "c.toml:1:1: missing key `lr`"),
            ("type = 'Adam'\nbetas = [0.9]", "c.toml:2:9: `betas` must be two numbers"),
            ("type = 'Adam'\nlr = -1.0", "c.toml:1:1: "),
            ("type = 'Adam'\nalpha = 1.0", "c.toml:2:1: unknown key `alpha`"),
            (
                "type = 'BertAdam'\nlr = 1\nschedule = 'warmup_linea'",
                "did you mean `warmup_linear`?",
            ),
            ("type = 'NpuFusedAdamw'", "did you mean `NpuFusedAdamW`?"),
        ] {
            let error = build(text).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
