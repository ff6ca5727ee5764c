//! Reads `[optim_wrapper.optimizer]`: optimizers as data.

use std::fmt;

use fused_optim::{
    self as optim, AdadeltaHyper, AdafactorHyper, AdamHyper, AdamPHyper, AdamWHyper, AdjustLr,
    BertAdamHyper, ClipScope, CosineEps, CpuOptimizer, HyperParam, LambHyper, LionHyper, MuonHyper,
    Optimizer, ParamGroup, RmsPropHyper, RmsPropTfHyper, Schedule, SgdHyper,
};

use self::FusedOptimizer::{
    Adadelta, Adafactor, Adam, AdamP, AdamW, BertAdam, Lamb, Lion, Muon, RmsProp, RmsPropTf, Sgd,
};
use super::Multipliers;
use crate::config::Section;
use crate::engine::TensorSpec;
use crate::placement::{Placement, optimizer};
use crate::registry::{Builtin, Registry};
use crate::{Error, Result};

/// Optimizers that a configuration can name in `[optim_wrapper.optimizer]`.
pub static OPTIMIZERS: Registry<Box<dyn OptimizerConfig>> = Registry::with("optimizer", BUILTIN);

/// Description of an optimizer in a configuration.
pub trait OptimizerConfig: fmt::Debug + Send {
    /// Creates the optimizer over the given groups, which contain parameters by index and factors
    /// of learning rate and weight decay; on the device of the placement.
    ///
    /// # Errors
    ///
    /// Errors of the optimizer, for example of its device.
    fn build(
        &self,
        params: &[TensorSpec],
        groups: &[ParamGroup<Multipliers>],
        placement: &Placement,
    ) -> Result<Box<dyn Optimizer>>;
}

/// Ascend's nine fused optimizers, with torch_npu's defaults, by their original names and by
/// Ascend's: both are the same fused implementation on any device. The last ones run on the host
/// only: a device refuses them ([`Placement::check`]).
const BUILTIN: Builtin<Box<dyn OptimizerConfig>> = &[
    ("Adadelta", |s| FusedOptimizer::read("Adadelta", s)),
    ("NpuFusedAdadelta", |s| FusedOptimizer::read("Adadelta", s)),
    ("Adam", |s| FusedOptimizer::read("Adam", s)),
    ("NpuFusedAdam", |s| FusedOptimizer::read("Adam", s)),
    ("AdamP", |s| FusedOptimizer::read("AdamP", s)),
    ("NpuFusedAdamP", |s| FusedOptimizer::read("AdamP", s)),
    ("AdamW", |s| FusedOptimizer::read("AdamW", s)),
    ("NpuFusedAdamW", |s| FusedOptimizer::read("AdamW", s)),
    ("BertAdam", |s| FusedOptimizer::read("BertAdam", s)),
    ("NpuFusedBertAdam", |s| FusedOptimizer::read("BertAdam", s)),
    ("Lamb", |s| FusedOptimizer::read("Lamb", s)),
    ("NpuFusedLamb", |s| FusedOptimizer::read("Lamb", s)),
    ("RMSprop", |s| FusedOptimizer::read("RMSprop", s)),
    ("NpuFusedRMSprop", |s| FusedOptimizer::read("RMSprop", s)),
    ("RMSpropTF", |s| FusedOptimizer::read("RMSpropTF", s)),
    ("NpuFusedRMSpropTF", |s| FusedOptimizer::read("RMSpropTF", s)),
    ("SGD", |s| FusedOptimizer::read("SGD", s)),
    ("NpuFusedSGD", |s| FusedOptimizer::read("SGD", s)),
    ("Adafactor", |s| FusedOptimizer::read("Adafactor", s)),
    ("Lion", |s| FusedOptimizer::read("Lion", s)),
    ("Muon", |s| FusedOptimizer::read("Muon", s)),
];

/// Hyper-parameters of an optimizer of `fused-optim`.
#[derive(Clone, Copy, Debug)]
enum FusedOptimizer {
    Adadelta(AdadeltaHyper),
    Adafactor(AdafactorHyper),
    Adam(AdamHyper),
    AdamP(AdamPHyper),
    AdamW(AdamWHyper),
    BertAdam(BertAdamHyper),
    Lamb(LambHyper),
    Lion(LionHyper),
    Muon(MuonHyper),
    RmsProp(RmsPropHyper),
    RmsPropTf(RmsPropTfHyper),
    Sgd(SgdHyper),
}

/// Reads the hyper-parameters of a table: every one by its own name, with its default or with the
/// value given after it.
macro_rules! read {
    ($section:ident, $hyper:ident: $($field:ident $(= $value:expr)?),*) => {{
        let default = $hyper::default();
        $hyper { $($field: read!(@ $section, default.$field, $field $(, $value)?)),* }
    }};
    (@ $section:ident, $default:expr, $field:ident) => {
        $section.or(stringify!($field), $default)?
    };
    (@ $section:ident, $default:expr, $field:ident, $value:expr) => {
        $value
    };
}

impl FusedOptimizer {
    /// Reads the hyper-parameters of an optimizer. An invalid value is reported now, before the
    /// parameters are known.
    fn read(name: &str, s: &mut Section) -> Result<Box<dyn OptimizerConfig>> {
        let config = match name {
            "Adadelta" => Adadelta(read!(s, AdadeltaHyper: lr, rho, eps, weight_decay, maximize)),
            "Adam" => Adam(read!(s, AdamHyper: lr, betas, eps, weight_decay, amsgrad, maximize)),
            "AdamP" => AdamP(read!(s, AdamPHyper:
                lr, betas, eps, weight_decay, delta, wd_ratio, nesterov, cos_eps = cos_eps(s)?,
                maximize
            )),
            "AdamW" => AdamW(read!(s, AdamWHyper: lr, betas, eps, weight_decay, amsgrad, maximize)),
            "BertAdam" => BertAdam(read!(s, BertAdamHyper:
                lr = s.required("lr")?, warmup, t_total, schedule = schedule(s)?, b1, b2, e,
                weight_decay, max_grad_norm, clip = clip(s)?, maximize
            )),
            "Lamb" => Lamb(read!(s, LambHyper:
                lr, betas, eps, weight_decay, adam, use_global_grad_norm, maximize
            )),
            "RMSprop" => RmsProp(read!(s, RmsPropHyper:
                lr, alpha, eps, weight_decay, momentum, centered, maximize
            )),
            "RMSpropTF" => RmsPropTf(read!(s, RmsPropTfHyper:
                lr, alpha, eps, weight_decay, momentum, centered, decoupled_decay, decoupled_lr,
                lr_in_momentum, maximize
            )),
            "SGD" => Sgd(read!(s, SgdHyper:
                lr = s.required("lr")?, momentum, dampening, weight_decay, nesterov, maximize
            )),
            "Adafactor" => Adafactor(read!(s, AdafactorHyper:
                lr, beta2_decay, eps, d, weight_decay, maximize
            )),
            "Lion" => Lion(read!(s, LionHyper: lr, betas, weight_decay, maximize)),
            "Muon" => Muon(read!(s, MuonHyper:
                lr, momentum, nesterov, weight_decay, eps, ns_steps,
                adjust_lr_fn = adjust_lr_fn(s)?, use_muon, betas, adamw_eps, maximize
            )),
            _ => return Err(s.error(format!("there is no optimizer `{name}`"))),
        };
        let groups = [ParamGroup::new(Multipliers::default(), [])];
        if let Err(Error::Optim(error)) = config.build(&[], &groups, &Placement::host()) {
            s.note(refused(s, &error))?;
        }
        Ok(Box::new(config))
    }
}

impl OptimizerConfig for FusedOptimizer {
    fn build(
        &self,
        _: &[TensorSpec],
        groups: &[ParamGroup<Multipliers>],
        placement: &Placement,
    ) -> Result<Box<dyn Optimizer>> {
        let mut optimizer: Box<dyn Optimizer> = match *self {
            Adadelta(hyper) => optimizer!(placement, AdadeltaHyper, over(groups, hyper)),
            Adam(hyper) => optimizer!(placement, AdamHyper, over(groups, hyper)),
            AdamP(hyper) => optimizer!(placement, AdamPHyper, over(groups, hyper)),
            AdamW(hyper) => optimizer!(placement, AdamWHyper, over(groups, hyper)),
            BertAdam(hyper) => optimizer!(placement, BertAdamHyper, over(groups, hyper)),
            Lamb(hyper) => optimizer!(placement, LambHyper, over(groups, hyper)),
            RmsProp(hyper) => optimizer!(placement, RmsPropHyper, over(groups, hyper)),
            RmsPropTf(hyper) => optimizer!(placement, RmsPropTfHyper, over(groups, hyper)),
            Sgd(hyper) => optimizer!(placement, SgdHyper, over(groups, hyper)),
            Adafactor(hyper) => Box::new(CpuOptimizer::new(over(groups, hyper))?),
            Lion(hyper) => Box::new(CpuOptimizer::new(over(groups, hyper))?),
            Muon(hyper) => Box::new(CpuOptimizer::new(over(groups, hyper))?),
        };
        for (index, ParamGroup { hyper: by, .. }) in groups.iter().enumerate() {
            for (param, by) in [(HyperParam::Lr, by.lr), (HyperParam::WeightDecay, by.weight_decay)]
            {
                if let Some(value) = optimizer.hyper_param(index, param)? {
                    optimizer.set_hyper_param(index, param, value * by)?;
                }
            }
        }
        Ok(optimizer)
    }
}

/// Returns the groups with these hyper-parameters.
fn over<H: Copy>(
    groups: &[ParamGroup<Multipliers>],
    hyper: H,
) -> impl Iterator<Item = ParamGroup<H>> {
    groups.iter().map(move |group| ParamGroup::new(hyper, group.params.iter().copied()))
}

/// Reports an invalid hyper-parameter at its key.
pub(super) fn refused(section: &Section, error: &optim::Error) -> Error {
    match error {
        // `betas[1]` is a part of `betas`.
        optim::Error::InvalidHyper { name, .. } => {
            section.error_about(name.split('[').next().unwrap_or(name), error)
        }
        _ => section.error(error),
    }
}

fn schedule(s: &mut Section) -> Result<Schedule> {
    let schedules = [
        ("warmup_linear", Schedule::Linear),
        ("warmup_cosine", Schedule::Cosine),
        ("warmup_constant", Schedule::Constant),
        ("warmup_poly", Schedule::Poly),
    ];
    s.choice("schedule", "warmup_linear", &schedules)
}

fn clip(s: &mut Section) -> Result<ClipScope> {
    s.choice("clip", "group", &[("group", ClipScope::Group), ("tensor", ClipScope::Tensor)])
}

fn cos_eps(s: &mut Section) -> Result<CosineEps> {
    s.choice("cos_eps", "add", &[("add", CosineEps::Add), ("torch", CosineEps::Max)])
}

fn adjust_lr_fn(s: &mut Section) -> Result<AdjustLr> {
    let adjustments = [
        ("original", AdjustLr::Original),
        ("match_rms_adamw", AdjustLr::MatchRmsAdamW),
        ("spectral_unclamped", AdjustLr::SpectralUnclamped),
    ];
    s.choice("adjust_lr_fn", "original", &adjustments)
}

#[cfg(test)]
mod tests {
    use super::super::Paramwise;
    use super::*;
    use crate::config::Config;

    fn read(text: &str) -> Result<Box<dyn OptimizerConfig>> {
        OPTIMIZERS.build(Config::from_text("c.toml", text)?.into_section())
    }

    #[test]
    fn nine_optimizers_have_their_own_and_ascends_names() {
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
        assert_eq!(BUILTIN.len(), 2 * kinds.len() + 3);
        let groups = Paramwise::default().groups(&[]);
        for (text, kind) in [
            ("type = 'Adafactor'\neps = [1e-6, 0.01]", "adafactor"),
            ("type = 'Lion'\nbetas = [0.9, 0.98]", "lion"),
            ("type = 'Muon'\nadjust_lr_fn = 'match_rms_adamw'", "muon"),
        ] {
            let made = read(text).unwrap().build(&[], &groups, &Placement::host()).unwrap();
            assert_eq!(made.kind(), kind);
        }
        for name in ["NpuFusedAdafactor", "NpuFusedLion", "NpuFusedMuon"] {
            let error = read(&format!("type = '{name}'")).err().unwrap().to_string();
            assert!(error.contains(name), "{error}");
        }
        for (name, kind) in kinds {
            for name in [name.to_owned(), format!("NpuFused{name}")] {
                let config = read(&format!("type = '{name}'\nlr = 0.25")).unwrap();
                let optimizer = config.build(&[], &groups, &Placement::host()).unwrap();
                assert_eq!((optimizer.kind(), optimizer.lr(0).unwrap()), (kind, 0.25), "{name}");
            }
        }
    }

    #[test]
    fn errors_have_a_position() {
        for (text, wanted) in [
            ("type = 'SGD'", "c.toml:1:1: missing key `lr`"),
            ("type = 'Adam'\nbetas = [0.9]", "c.toml:2:9: `betas` must be two numbers"),
            ("type = 'Adam'\nlr = -1.0", "c.toml:2:6: invalid learning rate: -1"),
            ("type = 'BertAdam'\nlr = 1\nb2 = 1", "c.toml:3:6: invalid beta parameter at index 1"),
            ("type = 'Adam'\nbetas = [0.9, -1]", "c.toml:2:9: invalid beta parameter at index 1"),
            ("type = 'SGD'\nlr = 1\nmomentum = -1", "c.toml:3:12: invalid momentum value: -1"),
            ("type = 'Adadelta'\nrho = -1", "c.toml:2:7: invalid rho value: -1"),
            ("type = 'Adam'\nalpha = 1.0", "c.toml:2:1: unknown key `alpha`"),
            (
                "type = 'BertAdam'\nlr = 1\nschedule = 'warmup_linea'",
                "did you mean `warmup_linear`?",
            ),
            ("type = 'Muon'\nns_steps = 100", "c.toml:2:12: invalid ns_steps value: 100"),
            ("type = 'Muon'\neps = 1e-8\nadamw_eps = -1", "c.toml:3:13: invalid epsilon value: -1"),
            ("type = 'NpuFusedAdamw'", "did you mean `NpuFusedAdamW`?"),
        ] {
            let error = read(text).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
