//! Reads `[optim_wrapper]`.

use ::amp::{LossScaler, LossScalerOptions};
use fused_optim::{Clip, ClipNorm, DType, Optimizer, clip_grad_norm, clip_grad_value};

use super::assign;
use super::optimizers::refused;
use super::{
    Member, Multipliers, OPTIMIZERS, OptimWrapper, OptimWrapperFactory, OptimizerConfig, Paramwise,
};
use crate::config::{Mistakes, Section};
use crate::engine::TensorSpec;
use crate::placement::Placement;
use crate::registry::Registry;
use crate::{Error, Result};
use train_step::MAX_CONSECUTIVE_SKIPS;

/// Wrappers that a configuration can name in `[optim_wrapper]`.
pub static OPTIM_WRAPPERS: Registry<OptimWrapperFactory> = Registry::with(
    "optimizer wrapper",
    &[("OptimWrapper", plain), ("AmpOptimWrapper", amp), ("OptimWrapperDict", dict)],
);

fn plain(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = section.count("accumulative_counts", 1)?;
    let optimizers = Optimizers::One(Part::read(section)?);
    Ok(Config { name: "OptimWrapper", counts, precision: None, optimizers }.into())
}

fn amp(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = section.count("accumulative_counts", 1)?;
    let precision = Some(Precision::read(section)?);
    let optimizers = Optimizers::One(Part::read(section)?);
    Ok(Config { name: "AmpOptimWrapper", counts, precision, optimizers }.into())
}

/// Builds a wrapper with one optimizer per part of the model. There is one loss, so accumulation,
/// precision and loss scale are set for all parts together.
fn dict(section: &mut Section) -> Result<OptimWrapperFactory> {
    let counts = section.count("accumulative_counts", 1)?;
    let mixed =
        ["dtype", "half_parameters", "loss_scale", "skip_non_finite", "max_consecutive_skips"]
            .iter()
            .any(|key| section.has(key));
    let precision = mixed.then(|| Precision::read(section)).transpose()?;
    let tables = section.named_sections()?;
    if tables.is_empty() {
        return Err(section.error("an OptimWrapperDict needs at least one part"));
    }
    let mut parts = Vec::new();
    for (name, table) in tables {
        let part = section.attempt(|_| Part::read_whole(table))?;
        parts.extend(part.map(|part| (name, part)));
    }
    let optimizers = Optimizers::ByPart(parts);
    Ok(Config { name: "OptimWrapperDict", counts, precision, optimizers }.into())
}

/// Description of an optimizer wrapper in a configuration.
struct Config {
    name: &'static str,
    /// Number of batches per step.
    counts: usize,
    /// `None`: the precision of the device.
    precision: Option<Precision>,
    optimizers: Optimizers,
}

/// One optimizer for the whole model, or one for each part.
enum Optimizers {
    One(Part),
    ByPart(Vec<(String, Part)>),
}

impl From<Config> for OptimWrapperFactory {
    fn from(config: Config) -> Self {
        let dtype = config.precision.as_ref().map_or(DType::F32, |precision| precision.dtype);
        Self { dtype, build: Box::new(|params, placement| config.build(params, placement)) }
    }
}

impl Config {
    fn build(self, params: &[TensorSpec], placement: &Placement) -> Result<OptimWrapper> {
        let wrapper = match self.optimizers {
            Optimizers::One(part) => {
                let optimizer = part.build(params, None, placement)?;
                OptimWrapper::new(optimizer, self.counts).with_clip_grad(part.clip)
            }
            Optimizers::ByPart(parts) => {
                let names: Vec<_> = parts.iter().map(|(name, _)| name.as_str()).collect();
                let owned = assign(&names, params)?;
                let member = |((name, part), own): ((String, Part), Vec<usize>)| {
                    let optimizer = part.build(params, Some(&own), placement)?;
                    Ok(Member { name, optimizer, clip: part.clip })
                };
                let members = parts.into_iter().zip(owned).map(member).collect::<Result<_>>()?;
                OptimWrapper::of_members(members, self.counts)
            }
        };
        let max_skips = self.precision.as_ref().map(|precision| precision.max_skips);
        let wrapper =
            wrapper.with_max_consecutive_skips(max_skips.unwrap_or(MAX_CONSECUTIVE_SKIPS));
        let (autocast, scaler) = match self.precision {
            Some(precision) => (precision.autocast, precision.scaler),
            // Same as `AmpOptimWrapper` without options.
            None if placement.switches_to_amp(self.name) => {
                (Some(DType::F16), Some(default_scaler(DType::F16)?))
            }
            None => return Ok(wrapper),
        };
        let wrapper = wrapper.with_autocast(autocast);
        let Some(scaler) = scaler else { return Ok(wrapper) };
        Ok(wrapper.with_mixed_precision(scaler).with_overflows(placement.overflows()))
    }
}

/// An optimizer with its parameter groups and gradient clipping.
struct Part {
    optimizer: Box<dyn OptimizerConfig>,
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

    /// Reads the table of a part.
    fn read_whole(mut section: Section) -> Result<Self> {
        section.choice("type", "OptimWrapper", &[("OptimWrapper", ())])?;
        let part = Self::read(&mut section);
        // As of a component, unknown keys are reported beside a listed mistake.
        if part.as_ref().err().is_none_or(Mistakes::is_listed) {
            section.finish()?;
        }
        part
    }

    /// Creates the optimizer of all parameters, or of `own`.
    fn build(
        &self,
        params: &[TensorSpec],
        own: Option<&[usize]>,
        placement: &Placement,
    ) -> Result<Box<dyn Optimizer>> {
        placement.check_clip(self.clip)?;
        let mut groups = self.paramwise.groups(params);
        let all: Vec<_> = (0..params.len()).collect();
        let own_params = own.unwrap_or(&all).iter().map(|index| params[*index].clone());
        if let Some(text) = self.paramwise.unmatched(&own_params.collect::<Vec<_>>()) {
            return Err(Error::config(format!("paramwise_cfg: {text}")));
        }
        if let Some(own) = own {
            groups.iter_mut().for_each(|group| group.params.retain(|index| own.contains(index)));
            groups.retain(|group| !group.params.is_empty());
        }
        self.optimizer.build(params, &groups, placement)
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

/// Precision set by `dtype`, `half_parameters`, `loss_scale`, `skip_non_finite` and
/// `max_consecutive_skips`.
struct Precision {
    /// Type of the parameters.
    dtype: DType,
    /// Type of operators under autocast.
    autocast: Option<DType>,
    /// `None`: gradients are not checked.
    scaler: Option<LossScaler>,
    /// Number of skipped steps in a row after which the run ends.
    max_skips: usize,
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
        let scaler = loss_scale(section, asked)?;
        let skips = section.or("skip_non_finite", true)?;
        if !skips && scaler.is_enabled() {
            let why = "gradients must be checked with a loss scale; set dtype = 'bfloat16' without \
                 `loss_scale`, or remove this key";
            section.note(section.error_about("skip_non_finite", why))?;
        }
        let max_skips = section.count("max_consecutive_skips", MAX_CONSECUTIVE_SKIPS)?;
        Ok(Self { dtype, autocast, scaler: skips.then_some(scaler), max_skips })
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
            section.note(section.error_about(key, e))?;
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
        section.note(table.error_about(key, error))?;
        Ok::<_, Error>(LossScaler::disabled())
    })?;
    table.finish()?;
    Ok(scaler)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

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
        for (more, skips) in [("", true), ("skip_non_finite = false", false)] {
            let factory = wrapper(&format!("{sgd}\ndtype = 'bfloat16'\n{more}")).unwrap();
            let built = (factory.build)(&params(&["w"]), &Placement::host()).unwrap();
            assert_eq!((built.autocast(), built.skips_non_finite()), (Some(DType::Bf16), skips));
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
            (
                "dtype = 'bfloat16'\nloss_scale = 8\nskip_non_finite = false",
                "c.toml:5:19: gradients",
            ),
            ("skip_non_finite = false", "c.toml:3:19: gradients must be checked with a loss scale"),
            ("max_consecutive_skips = 0", "`max_consecutive_skips` must be at least 1"),
            ("max_consecutive_skip = 5", "did you mean `max_consecutive_skips`?"),
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
