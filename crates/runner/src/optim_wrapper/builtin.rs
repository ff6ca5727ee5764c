//! Reads `[optim_wrapper]` and `[optim_wrapper.optimizer]`.

use ::amp::{LossScaler, LossScalerOptions};
use fused_optim::{
    Adadelta, AdadeltaHyper, Adafactor, AdafactorHyper, Adam, AdamHyper, AdamP, AdamPHyper, AdamW,
    AdamWHyper, AdjustLr, BertAdam, BertAdamHyper, Clip, ClipNorm, ClipScope, CosineEps, DType,
    Lamb, LambHyper, Lion, LionHyper, Muon, MuonHyper, Optimizer, ParamGroup, RmsProp,
    RmsPropHyper, RmsPropTf, RmsPropTfHyper, Schedule, Sgd, SgdHyper, clip_grad_norm,
    clip_grad_value,
};

use super::dict::assign;
use super::{
    BuildOptimWrapper, Member, Multipliers, OptimWrapper, OptimWrapperFactory, OptimizerDict,
    OptimizerFactory, Paramwise,
};
use crate::config::{Mistakes, Section};
use crate::engine::TensorSpec;
use crate::placement::{self, Placement};
use crate::registry::{Builtin, Registry};
use crate::{Error, Result};

/// Wrappers that a configuration can name in `[optim_wrapper]`.
pub static OPTIM_WRAPPERS: Registry<OptimWrapperFactory> = Registry::with(
    "optimizer wrapper",
    &[("OptimWrapper", plain), ("AmpOptimWrapper", amp), ("OptimWrapperDict", dict)],
);

/// Optimizers that a configuration can name in `[optim_wrapper.optimizer]`.
pub static OPTIMIZERS: Registry<OptimizerFactory> = Registry::with("optimizer", FUSED);

fn plain(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = section.count("accumulative_counts", 1)?;
    Ok(factory("OptimWrapper", None, one(counts, Part::read(section)?)))
}

fn amp(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = section.count("accumulative_counts", 1)?;
    let precision = Precision::read(section)?;
    Ok(factory("AmpOptimWrapper", Some(precision), one(counts, Part::read(section)?)))
}

/// Builds a wrapper with one optimizer for the whole model.
fn one(counts: usize, part: Part) -> BuildOptimWrapper {
    Box::new(move |params, placement| {
        let clip = part.clip;
        Ok(OptimWrapper::new(part.make(params, placement)?, counts).with_clip_grad(clip))
    })
}

/// Builds a wrapper with one optimizer per part of the model. There is one loss, so accumulation,
/// precision and loss scale are set for all parts together.
fn dict(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = section.count("accumulative_counts", 1)?;
    let mixed = ["dtype", "half_parameters", "loss_scale"].iter().any(|key| section.has(key));
    let precision = mixed.then(|| Precision::read(section)).transpose()?;
    let mut parts = Vec::new();
    for (name, mut table) in section.named_sections()? {
        table.choice("type", "OptimWrapper", &[("OptimWrapper", ())])?;
        let part = Part::read(&mut table)?;
        table.finish()?;
        parts.push((name, part));
    }
    if parts.is_empty() {
        return Err(section.error("an OptimWrapperDict needs at least one part"));
    }
    let build: BuildOptimWrapper = Box::new(move |params, placement| {
        let dict = make_dict(parts, params, placement)?;
        let names = dict.members().iter().map(|m| (m.name.clone(), m.optimizer.group_count()));
        let names = names.collect();
        Ok(OptimWrapper::new(Box::new(dict), counts).with_parts(names))
    });
    Ok(factory("OptimWrapperDict", precision, build))
}

/// Sets the precision of a wrapper: the given one, or mixed precision on a device that trains only
/// in it.
fn factory(
    name: &'static str,
    precision: Option<Precision>,
    build: BuildOptimWrapper,
) -> OptimWrapperFactory {
    let dtype = precision.as_ref().map_or(DType::F32, |precision| precision.dtype);
    let build: BuildOptimWrapper = Box::new(move |params, placement| {
        let wrapper = build(params, placement)?;
        let (autocast, scaler) = match precision {
            Some(precision) => (precision.autocast, precision.scaler),
            // Same as `AmpOptimWrapper` without options.
            None if placement.switches_to_amp(name) => {
                (Some(DType::F16), default_scaler(DType::F16)?)
            }
            None => return Ok(wrapper),
        };
        let wrapper = wrapper.with_mixed_precision(scaler).with_autocast(autocast);
        Ok(wrapper.with_overflows(placement.overflows()))
    });
    OptimWrapperFactory { dtype, build }
}

fn make_dict(
    parts: Vec<(String, Part)>,
    params: &[TensorSpec],
    placement: &Placement,
) -> Result<OptimizerDict> {
    let names: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
    let owned = assign(&names, params)?;
    let make = |((name, part), own): ((String, Part), Vec<usize>)| {
        let mut groups = part.paramwise.groups(params);
        groups.iter_mut().for_each(|group| group.params.retain(|index| own.contains(index)));
        groups.retain(|group| !group.params.is_empty());
        placement.check_clip(part.clip)?;
        let optimizer = (part.optimizer)(params, &groups, placement)?;
        Ok(Member { name, optimizer, clip: part.clip })
    };
    let members = parts.into_iter().zip(owned).map(make).collect::<Result<_>>()?;
    Ok(OptimizerDict::new(members))
}

/// An optimizer with its parameter groups and gradient clipping.
struct Part {
    optimizer: OptimizerFactory,
    paramwise: Paramwise,
    clip: Option<Clip>,
}

impl Part {
    fn read(section: &mut Section) -> Result<Self> {
        let only = "DefaultOptimWrapperConstructor";
        section.choice("constructor", only, &[(only, ())])?;
        let paramwise = section.optional_section("paramwise_cfg")?;
        let paramwise = section.attempt(|_| paramwise.map(read_paramwise).transpose())?;
        let clip = section.optional_section("clip_grad")?;
        let clip = section.attempt(|_| clip.map(read_clip).transpose())?;
        let optimizer = section.attempt(|s| OPTIMIZERS.build(s.section("optimizer")?))?;
        let optimizer = optimizer.ok_or_else(Mistakes::listed)?;
        let paramwise = paramwise.flatten().unwrap_or_default();
        Ok(Self { optimizer, paramwise, clip: clip.flatten() })
    }

    fn make(self, params: &[TensorSpec], placement: &Placement) -> Result<Box<dyn Optimizer>> {
        placement.check_clip(self.clip)?;
        (self.optimizer)(params, &self.paramwise.groups(params), placement)
    }
}

fn read_paramwise(mut section: Section) -> Result<Paramwise> {
    let mut paramwise = Paramwise {
        custom_keys: Vec::new(),
        bias_lr_mult: factor(&mut section, "bias_lr_mult")?,
        bias_decay_mult: factor(&mut section, "bias_decay_mult")?,
        norm_decay_mult: factor(&mut section, "norm_decay_mult")?,
        dwconv_decay_mult: factor(&mut section, "dwconv_decay_mult")?,
        flat_decay_mult: factor(&mut section, "flat_decay_mult")?,
    };
    // Accepted: an engine lists a parameter shared by two layers only once.
    section.or("bypass_duplicate", false)?;
    section.refuse("dcn_offset_lr_mult", "there are no deformable convolutions")?;
    if let Some(mut keys) = section.optional_section("custom_keys")? {
        for (key, mut table) in keys.named_sections()? {
            let multipliers = Multipliers {
                lr: factor(&mut table, "lr_mult")?.unwrap_or(1.0),
                weight_decay: factor(&mut table, "decay_mult")?.unwrap_or(1.0),
            };
            table.finish()?;
            paramwise.custom_keys.push((key, multipliers));
        }
    }
    section.finish()?;
    Ok(paramwise)
}

fn factor(section: &mut Section, key: &'static str) -> Result<Option<f64>> {
    if !section.has(key) {
        // Read anyway, so that it is listed as a valid key.
        return section.optional(key);
    }
    let valid = |by: &f64| *by >= 0.0 && by.is_finite();
    section.or_checked(key, 1.0, "finite and not negative", valid).map(Some)
}

/// Reads `clip_grad`: the arguments of PyTorch's `clip_grad_norm_`, or, with `type = "value"`, of
/// `clip_grad_value_`.
fn read_clip(mut section: Section) -> Result<Clip> {
    let by_value = section.choice("type", "norm", &[("norm", false), ("value", true)])?;
    let clip = if by_value {
        Clip::Value(section.required("clip_value")?)
    } else {
        let mut clip = ClipNorm::new(section.required("max_norm")?);
        clip.norm_type = match section.is_string("norm_type") {
            true => section.choice("norm_type", "inf", &[("inf", f64::INFINITY)])?,
            false => section.or("norm_type", clip.norm_type)?,
        };
        clip.error_if_nonfinite = section.or("error_if_nonfinite", false)?;
        Clip::Norm(clip)
    };
    // The clipping functions validate their options; without gradients they do nothing else.
    let checked = match clip {
        Clip::Norm(norm) => clip_grad_norm(&mut [], norm).map(|_| ()),
        Clip::Value(value) => clip_grad_value(&mut [], value),
        _ => Ok(()),
    };
    checked.or_else(|e| section.note(refused(&section, &e)))?;
    section.finish()?;
    Ok(clip)
}

/// Reports an invalid hyper-parameter at the key that sets it.
fn refused(section: &Section, error: &fused_optim::Error) -> Error {
    let fused_optim::Error::InvalidHyper { name, .. } = error else { return section.error(error) };
    match *name {
        "learning rate" => section.error_about(&["lr"], error),
        "epsilon value" => section.error_about(&["eps", "e"], error),
        "beta parameter at index 0" => section.error_about(&["betas", "b1"], error),
        "beta parameter at index 1" => section.error_about(&["betas", "b2"], error),
        // Names such as `momentum value`.
        name => section.error_about(&[name.split(' ').next().unwrap_or(name)], error),
    }
}

/// Precision set by `dtype`, `half_parameters` and `loss_scale`.
struct Precision {
    /// Type of the parameters.
    dtype: DType,
    /// Type of operators under autocast.
    autocast: Option<DType>,
    scaler: LossScaler,
}

impl Precision {
    /// Reads the keys. `dtype = "None"`, Python's value in MMEngine's configurations, is the
    /// default.
    fn read(section: &mut Section) -> Result<Self> {
        section.refuse("use_fsdp", "FSDP is not available: every rank holds the whole model")?;
        let dtypes = [
            ("float16", DType::F16),
            ("bfloat16", DType::Bf16),
            ("float32", DType::F32),
            ("None", DType::F16),
        ];
        let asked = section.choice("dtype", "float16", &dtypes)?;
        let (dtype, autocast) = match (asked, section.or("half_parameters", false)?) {
            (DType::F32, _) => (DType::F32, None),
            (half, true) => (half, None),
            (half, false) => (DType::F32, Some(half)),
        };
        Ok(Self { dtype, autocast, scaler: loss_scale(section, asked)? })
    }
}

/// Returns the default: dynamic scaling for f16, none for types with f32's range.
pub(super) fn default_scaler(dtype: DType) -> Result<LossScaler> {
    match dtype {
        DType::F16 => Ok(LossScaler::new(LossScalerOptions::default())?),
        DType::Bf16 | DType::F32 => Ok(LossScaler::disabled()),
    }
}

/// Reads `loss_scale = "dynamic"`, a number, or a table of the dynamic scaler's options.
fn loss_scale(section: &mut Section, dtype: DType) -> Result<LossScaler> {
    let key = "loss_scale";
    if section.is_number(key) {
        let positive = |s: &f32| *s > 0.0 && s.is_finite();
        let scale = section.or_checked(key, 1.0, "positive and finite", positive)?;
        return LossScaler::fixed(scale).or_else(|e| {
            section.note(section.error_about(&[key], e))?;
            Ok(LossScaler::disabled())
        });
    }
    if section.is_string(key) {
        section.choice(key, "dynamic", &[("dynamic", ())])?;
        return default_scaler(DType::F16);
    }
    let Some(mut table) = section.optional_section(key)? else {
        return default_scaler(dtype);
    };
    let default = LossScalerOptions::default();
    let options = LossScalerOptions {
        init_scale: table.or("init_scale", default.init_scale)?,
        growth_factor: table.or("growth_factor", default.growth_factor)?,
        backoff_factor: table.or("backoff_factor", default.backoff_factor)?,
        growth_interval: table.or("growth_interval", default.growth_interval)?,
        ..default
    };
    let enabled = table.or("enabled", true)?;
    let made = if enabled { LossScaler::new(options) } else { Ok(LossScaler::disabled()) };
    let scaler = made.or_else(|error| {
        let key = match &error {
            ::amp::Error::Invalid { name: "scale", .. } => "init_scale",
            ::amp::Error::Invalid { name, .. } => name,
            _ => "",
        };
        section.note(table.error_about(&[key], error))?;
        Ok::<_, Error>(LossScaler::disabled())
    })?;
    table.finish()?;
    Ok(scaler)
}

/// Defines the reader of each optimizer's table: every hyper-parameter by its own name, with its
/// default or with the function given after it. Optimizers after `host` run on the host only: a
/// device refuses them ([`Placement::check`]).
macro_rules! optimizers {
    (
        $($name:literal $build:ident($optimizer:ident, $hyper:ident $fields:tt);)*
        host $($host:literal $build_host:ident($on_host:ident, $host_hyper:ident $host_fields:tt);)*
    ) => {
        /// Ascend's nine fused optimizers, with torch_npu's defaults, by their original names and
        /// by Ascend's: both are the same fused implementation on any device. Then those of the
        /// host.
        const FUSED: Builtin<OptimizerFactory> =
            &[
                $(($name, $build), (concat!("NpuFused", $name), $build),)*
                $(($host, $build_host)),*
            ];

        $(maker!($build, $optimizer, $hyper, $fields, placement::optimizer);)*
        $(maker!($build_host, $on_host, $host_hyper, $host_fields, on_host);)*
    };
}

macro_rules! maker {
    (
        $build:ident, $optimizer:ident, $hyper:ident, { $($field:ident $(: $read:ident)?),* },
        $($place:ident)::+
    ) => {
        fn $build(section: &mut Section) -> Result<OptimizerFactory> {
            let default = $hyper::default();
            let hyper = $hyper { $($field: read!(section, default, $field $($read)?)),* };
            // An invalid value is reported now, before the parameters are known.
            let made = $optimizer::with_one_group(hyper, 0).map(drop);
            made.or_else(|e| section.note(refused(section, &e)))?;
            Ok(Box::new(move |_, groups, placement| {
                let groups = groups.iter().map(|group| {
                    let mut hyper = hyper;
                    hyper.lr *= group.hyper.lr;
                    hyper.weight_decay *= group.hyper.weight_decay;
                    ParamGroup::new(hyper, group.params.iter().copied())
                });
                Ok($($place)::+!(placement, $optimizer, $hyper, groups))
            }))
        }
    };
}

macro_rules! on_host {
    ($placement:expr, $optimizer:ident, $hyper:ident, $groups:expr) => {{
        let _: &Placement = $placement;
        Box::new($optimizer::new($groups)?)
    }};
}

/// Reads a hyper-parameter.
macro_rules! read {
    ($section:ident, $default:ident, $field:ident) => {
        $section.or(stringify!($field), $default.$field)?
    };
    ($section:ident, $default:ident, $field:ident $read:ident) => {
        $read($section, stringify!($field))?
    };
}

optimizers! {
    "Adadelta" adadelta(Adadelta, AdadeltaHyper { lr, rho, eps, weight_decay, maximize });
    "Adam" adam(Adam, AdamHyper { lr, betas, eps, weight_decay, amsgrad, maximize });
    "AdamP" adamp(AdamP, AdamPHyper {
        lr, betas, eps, weight_decay, delta, wd_ratio, nesterov, cos_eps: of_places, maximize
    });
    "AdamW" adamw(AdamW, AdamWHyper { lr, betas, eps, weight_decay, amsgrad, maximize });
    "BertAdam" bert_adam(BertAdam, BertAdamHyper {
        lr: required, warmup, t_total, schedule: of_schedules, b1, b2, e, weight_decay,
        max_grad_norm, clip: of_scopes, maximize
    });
    "Lamb" lamb(Lamb, LambHyper {
        lr, betas, eps, weight_decay, adam, use_global_grad_norm, maximize
    });
    "RMSprop" rmsprop(RmsProp, RmsPropHyper {
        lr, alpha, eps, weight_decay, momentum, centered, maximize
    });
    "RMSpropTF" rmsprop_tf(RmsPropTf, RmsPropTfHyper {
        lr, alpha, eps, weight_decay, momentum, centered, decoupled_decay, decoupled_lr,
        lr_in_momentum, maximize
    });
    "SGD" sgd(Sgd, SgdHyper {
        lr: required, momentum, dampening, weight_decay, nesterov, maximize
    });
    host
    "Adafactor" adafactor(Adafactor, AdafactorHyper {
        lr, beta2_decay, eps, d, weight_decay, maximize
    });
    "Lion" lion(Lion, LionHyper { lr, betas, weight_decay, maximize });
    "Muon" muon(Muon, MuonHyper {
        lr, momentum, nesterov, weight_decay, eps, ns_steps, adjust_lr_fn: of_adjustments,
        use_muon, betas, adamw_eps, maximize
    });
}

fn required(section: &mut Section, key: &'static str) -> Result<f64> {
    section.required(key)
}

fn of_schedules(section: &mut Section, key: &'static str) -> Result<Schedule> {
    let schedules = [
        ("warmup_linear", Schedule::Linear),
        ("warmup_cosine", Schedule::Cosine),
        ("warmup_constant", Schedule::Constant),
        ("warmup_poly", Schedule::Poly),
    ];
    section.choice(key, "warmup_linear", &schedules)
}

fn of_scopes(section: &mut Section, key: &'static str) -> Result<ClipScope> {
    section.choice(key, "group", &[("group", ClipScope::Group), ("tensor", ClipScope::Tensor)])
}

fn of_places(section: &mut Section, key: &'static str) -> Result<CosineEps> {
    section.choice(key, "add", &[("add", CosineEps::Add), ("torch", CosineEps::Max)])
}

fn of_adjustments(section: &mut Section, key: &'static str) -> Result<AdjustLr> {
    let adjustments = [
        ("original", AdjustLr::Original),
        ("match_rms_adamw", AdjustLr::MatchRmsAdamW),
        ("spectral_unclamped", AdjustLr::SpectralUnclamped),
    ];
    section.choice(key, "original", &adjustments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn build(text: &str) -> Result<OptimizerFactory> {
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
        assert_eq!(FUSED.len(), 2 * kinds.len() + 3);
        let groups = Paramwise::default().groups(&[]);
        for (text, kind) in [
            ("type = 'Adafactor'\neps = [1e-6, 0.01]", "adafactor"),
            ("type = 'Lion'\nbetas = [0.9, 0.98]", "lion"),
            ("type = 'Muon'\nadjust_lr_fn = 'match_rms_adamw'", "muon"),
        ] {
            let made = build(text).unwrap()(&[], &groups, &Placement::host()).unwrap();
            assert_eq!(made.kind(), kind);
        }
        for name in ["NpuFusedAdafactor", "NpuFusedLion", "NpuFusedMuon"] {
            let error = build(&format!("type = '{name}'")).err().unwrap().to_string();
            assert!(error.contains(name), "{error}");
        }
        for (name, kind) in kinds {
            for name in [name.to_owned(), format!("NpuFused{name}")] {
                let optimizer = build(&format!("type = '{name}'\nlr = 0.25")).unwrap()(
                    &[],
                    &groups,
                    &Placement::host(),
                )
                .unwrap();
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
            ("type = 'NpuFusedAdamw'", "did you mean `NpuFusedAdamW`?"),
        ] {
            let error = build(text).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    fn wrapper(text: &str) -> Result<OptimWrapperFactory> {
        OPTIM_WRAPPERS.build(Config::from_text("c.toml", text)?.into_section())
    }

    fn params(names: &[&str]) -> Vec<TensorSpec> {
        let spec = |name: &&str| TensorSpec {
            name: (*name).to_owned(),
            shape: vec![3; 1 + usize::from(name.ends_with("weight"))],
            dtype: DType::F32,
        };
        names.iter().map(spec).collect()
    }

    #[test]
    fn parameter_groups_have_their_own_rates() {
        let text = "type = 'OptimWrapper'
            optimizer = { type = 'AdamW', lr = 0.5, weight_decay = 0.25 }
            [paramwise_cfg]
            bias_lr_mult = 2
            bypass_duplicate = true
            custom_keys = { 'head' = { lr_mult = 0.5, decay_mult = 0 } }";
        let mut wrapper = (wrapper(text).unwrap().build)(
            &params(&["a.weight", "a.bias", "head.bias"]),
            &Placement::host(),
        )
        .unwrap();
        let optimizer = wrapper.optimizer_mut();
        let rates: Vec<_> = (0..3).map(|group| optimizer.lr(group).unwrap()).collect();
        assert_eq!(rates, [0.5, 1.0, 0.25]);
        assert_eq!(optimizer.group_count(), 3);
        let groups = optimizer.state_dict().unwrap().param_groups;
        let groups: serde_json::Value = serde_json::from_str(&groups).unwrap();
        let decay: Vec<_> = (0..3).map(|at| groups[at]["weight_decay"].as_f64()).collect();
        assert_eq!(decay, [Some(0.25), Some(0.25), Some(0.0)]);
    }

    #[test]
    fn dtype_none_is_the_default() {
        let sgd = "optimizer = { type = 'SGD', lr = 1 }\ntype = 'AmpOptimWrapper'";
        for (dtype, wanted) in [
            ("", DType::F16),
            ("dtype = 'None'", DType::F16),
            ("dtype = 'float16'", DType::F16),
            ("dtype = 'bfloat16'", DType::Bf16),
            ("dtype = 'float32'", DType::F32),
        ] {
            for half in [false, true] {
                let text = format!("{sgd}\nhalf_parameters = {half}\n{dtype}");
                let factory = wrapper(&text).unwrap();
                assert_eq!(factory.dtype, if half { wanted } else { DType::F32 }, "{text}");
                let built = (factory.build)(&params(&["w"]), &Placement::host()).unwrap();
                let autocast = (!half && wanted != DType::F32).then_some(wanted);
                assert_eq!(built.autocast(), autocast, "{text}");
                // bf16 has f32's range and needs no scaler.
                assert_eq!(built.loss_scale() > 1.0, wanted == DType::F16, "{text}");
            }
        }
        for (scale, wanted) in [
            ("'dynamic'", 65536.0),
            ("512", 512.0),
            ("{ init_scale = 8 }", 8.0),
            ("{ enabled = false }", 1.0),
        ] {
            let factory = wrapper(&format!("{sgd}\nloss_scale = {scale}")).unwrap();
            assert_eq!(
                (factory.build)(&params(&["w"]), &Placement::host()).unwrap().loss_scale(),
                wanted,
                "{scale}"
            );
        }
    }

    #[test]
    fn errors_of_a_wrapper_have_a_position() {
        let sgd = "optimizer = { type = 'SGD', lr = 1 }\ntype = 'AmpOptimWrapper'\n";
        for (text, wanted) in [
            ("dtype = 'bf16'", "c.toml:3:9: unknown value `bf16`"),
            ("dtype = 'bfloat61'", "did you mean `bfloat16`?"),
            (
                "loss_scale = 'dynamc'",
                "c.toml:3:14: unknown value `dynamc`; did you mean `dynamic`?",
            ),
            ("loss_scale = { init_scal = 1 }", "did you mean `init_scale`?"),
            ("clip_grad = {}", "missing key `max_norm` in [clip_grad]"),
            ("clip_grad = { max_norm = -1 }", "c.toml:3:26: invalid max_norm: -1"),
            ("clip_grad = { max_norm = 1, norm_type = 'if' }", "did you mean `inf`?"),
            ("clip_grad = { type = 'vale' }", "did you mean `value`?"),
            ("clip_grad = { type = 'value', clip_value = -1 }", "invalid clip_value"),
            ("clip_grad = { type = 'value', max_norm = 1 }", "missing key `clip_value`"),
            ("paramwise_cfg = { norm_decay_mul = 0 }", "did you mean `norm_decay_mult`?"),
            ("paramwise_cfg = { bias_lr_mult = -1 }", "c.toml:3:34: `bias_lr_mult` must be finite"),
            ("paramwise_cfg = { custom_keys = { a = { lr_mul = 1 } } }", "did you mean `lr_mult`?"),
            ("half_paramters = true", "did you mean `half_parameters`?"),
            ("paramwise_cfg = { dcn_offset_lr_mult = 0.1 }", "there are no deformable"),
            ("use_fsdp = true", "FSDP is not available"),
            ("constructor = 'Mine'", "unknown value `Mine`"),
        ] {
            let error = wrapper(&format!("{sgd}{text}")).err().map(|e| e.to_string());
            let error = error.unwrap_or_default();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn parts_of_a_model_have_their_own_optimizers() {
        let text = "type = 'OptimWrapperDict'
            [generator]
            optimizer = { type = 'Adam', lr = 0.5 }
            [discriminator]
            type = 'OptimWrapper'
            optimizer = { type = 'SGD', lr = 0.25 }
            clip_grad = { max_norm = 1 }";
        let names = ["discriminator.w", "generator.w", "generator.b"];
        let built = (wrapper(text).unwrap().build)(&params(&names), &Placement::host()).unwrap();
        let optimizer = built.optimizer();
        assert_eq!((optimizer.lr(0).unwrap(), optimizer.lr(1).unwrap()), (0.5, 0.25));
        assert!(optimizer.lr(2).is_err());
        for (names, wanted) in [
            (&["generator.w", "discriminator.w", "other"][..], "parameter `other` must be under"),
            (&["generator.w", "discriminators.w"], "parameter `discriminators.w`"),
            (&["generator.w"], "no parameters under `discriminator.`"),
        ] {
            let built = (wrapper(text).unwrap().build)(&params(names), &Placement::host());
            let error = built.err().unwrap().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        let error = wrapper("type = 'OptimWrapperDict'").err().unwrap().to_string();
        assert!(error.contains("at least one part"), "{error}");
        let text = format!("{text}\n[both]\ntype = 'AmpOptimWrapper'\noptimizer = {{}}");
        let error = wrapper(&text).err().unwrap().to_string();
        assert!(error.contains("unknown value `AmpOptimWrapper`"), "{error}");
    }
}
