//! Reads schedulers from a configuration:
//! `param_scheduler = { type = "CosineAnnealingLR", T_max = 10 }`, or several in
//! `[[param_scheduler]]`.

use train_step::NOT_BY_EPOCHS;

use super::{
    Anneal, Comparison, Floor, OneCycle, Param, Plateau, SchedulerConfig, Shape, Threshold,
};
use crate::Result;
use crate::config::{Section, unknown};
use crate::evaluate::check_metric;
use crate::registry::{Builtin, Registry};

/// Schedulers that a configuration can name in `param_scheduler`.
pub static PARAM_SCHEDULERS: Registry<SchedulerConfig> = Registry::with("scheduler", BUILTIN);

const BUILTIN: Builtin<SchedulerConfig> = &[
    ("ConstantLR", |s| read(s, Param::Lr, constant)),
    ("CosineAnnealingLR", |s| read(s, Param::Lr, cosine_annealing)),
    ("CosineRestartLR", |s| read(s, Param::Lr, cosine_restart)),
    ("ExponentialLR", |s| read(s, Param::Lr, exponential)),
    ("LinearLR", |s| read(s, Param::Lr, linear)),
    ("MultiStepLR", |s| read(s, Param::Lr, multi_step)),
    ("OneCycleLR", |s| read(s, Param::Lr, one_cycle)),
    ("PolyLR", |s| read(s, Param::Lr, poly)),
    ("ReduceOnPlateauLR", |s| read(s, Param::Lr, plateau)),
    ("StepLR", |s| read(s, Param::Lr, step)),
    ("ConstantMomentum", |s| read(s, Param::Momentum, constant)),
    ("CosineAnnealingMomentum", |s| read(s, Param::Momentum, cosine_annealing)),
    ("CosineRestartMomentum", |s| read(s, Param::Momentum, cosine_restart)),
    ("ExponentialMomentum", |s| read(s, Param::Momentum, exponential)),
    ("LinearMomentum", |s| read(s, Param::Momentum, linear)),
    ("MultiStepMomentum", |s| read(s, Param::Momentum, multi_step)),
    ("PolyMomentum", |s| read(s, Param::Momentum, poly)),
    ("ReduceOnPlateauMomentum", |s| read(s, Param::Momentum, plateau)),
    ("StepMomentum", |s| read(s, Param::Momentum, step)),
];

/// Reads `param_scheduler`: a table is one scheduler, an array several; a table without `type` has
/// one or several for each part of an optimizer; `parts` are the names of the parts. `metrics` are
/// the names of the validation's metrics, if known.
pub(crate) fn read_all(
    root: &mut Section,
    parts: &[String],
    metrics: Option<&[String]>,
) -> Result<Vec<SchedulerConfig>> {
    let key = "param_scheduler";
    if !root.has_table_without(key, "type") {
        let sections = root.sections(key)?.into_iter();
        let all = sections.map(|s| root.attempt_whole(|_| build(s, metrics)));
        return Ok(all.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect());
    }
    let mut all = Vec::new();
    for (name, sections) in root.section(key)?.named_lists()? {
        for section in sections {
            let Some(part) = parts.iter().find(|part| **part == name) else {
                root.note(section.error(unknown("part of the optimizer", &name, parts)))?;
                continue;
            };
            let part = Some(part.clone());
            let config = root.attempt_whole(|_| build(section, metrics))?;
            all.extend(config.map(|config| SchedulerConfig { part, ..config }));
        }
    }
    Ok(all)
}

fn build(section: Section, metrics: Option<&[String]>) -> Result<SchedulerConfig> {
    let place = section.offset_of(if section.has("monitor") { "monitor" } else { "type" });
    let config = PARAM_SCHEDULERS.build(section)?;
    if let Shape::Plateau(plateau) = &config.shape {
        check_metric(&plateau.monitor, metrics, &place)?;
    }
    Ok(config)
}

fn read(
    section: &mut Section,
    param: Param,
    shape: fn(&mut Section) -> Result<Shape>,
) -> Result<SchedulerConfig> {
    let shape = shape(section)?;
    if let Err(error) = shape.validate() {
        let text = error.to_string();
        let key = text.split('`').nth(1).unwrap_or_default();
        section.note(section.error_about(key, &text))?;
    }
    let mut config = SchedulerConfig::new(param, shape);
    config.begin = section.or("begin", config.begin)?;
    let place = section.offset_of("end");
    config.end = section.optional("end")?;
    if let Some(end) = config.end
        && end <= config.begin
    {
        let begin = config.begin;
        let text = format!("end should be larger than begin, but got begin={begin}, end={end}");
        section.note(place.error(text))?;
    }
    config.by_epoch = section.or("by_epoch", config.by_epoch)?;
    let place = section.offset_of("convert_to_iter_based");
    config.convert_to_iter_based = section.or("convert_to_iter_based", false)?;
    if config.convert_to_iter_based && !config.by_epoch {
        section.note(place.error(NOT_BY_EPOCHS))?;
    }
    Ok(config)
}

fn constant(section: &mut Section) -> Result<Shape> {
    Ok(Shape::Constant { factor: section.or("factor", 1.0 / 3.0)? })
}

fn cosine_annealing(section: &mut Section) -> Result<Shape> {
    let t_max = section.optional("T_max")?;
    Ok(Shape::CosineAnnealing { t_max, floor: floor(section)? })
}

fn cosine_restart(section: &mut Section) -> Result<Shape> {
    let periods = section.required("periods")?;
    let restart_weights = section.or("restart_weights", vec![1.0])?;
    Ok(Shape::CosineRestart { periods, restart_weights, floor: floor(section)? })
}

fn exponential(section: &mut Section) -> Result<Shape> {
    Ok(Shape::Exponential { gamma: section.required("gamma")? })
}

fn linear(section: &mut Section) -> Result<Shape> {
    let start_factor = section.or("start_factor", 1.0 / 3.0)?;
    Ok(Shape::Linear { start_factor, end_factor: section.or("end_factor", 1.0)? })
}

fn multi_step(section: &mut Section) -> Result<Shape> {
    let milestones = section.required("milestones")?;
    Ok(Shape::MultiStep { milestones, gamma: section.or("gamma", 0.1)? })
}

fn one_cycle(section: &mut Section) -> Result<Shape> {
    let strategies = [("cos", Anneal::Cos), ("linear", Anneal::Linear)];
    let cycle = OneCycle::new(section.required("eta_max")?, section.required("total_steps")?);
    Ok(Shape::OneCycle(OneCycle {
        pct_start: section.or("pct_start", cycle.pct_start)?,
        anneal: section.choice("anneal_strategy", "cos", &strategies)?,
        div_factor: section.or("div_factor", cycle.div_factor)?,
        final_div_factor: section.or("final_div_factor", cycle.final_div_factor)?,
        three_phase: section.or("three_phase", cycle.three_phase)?,
        ..cycle
    }))
}

fn poly(section: &mut Section) -> Result<Shape> {
    Ok(Shape::Poly { power: section.or("power", 1.0)?, eta_min: section.or("eta_min", 0.0)? })
}

fn step(section: &mut Section) -> Result<Shape> {
    Ok(Shape::Step { step_size: section.required("step_size")?, gamma: section.or("gamma", 0.1)? })
}

fn plateau(section: &mut Section) -> Result<Shape> {
    let thresholds = [("rel", Threshold::Rel), ("abs", Threshold::Abs)];
    let plateau = Plateau::default();
    Ok(Shape::Plateau(Plateau {
        monitor: section.or("monitor", plateau.monitor)?,
        rule: section.choice("rule", "less", &Comparison::NAMES)?,
        factor: section.or("factor", plateau.factor)?,
        patience: section.or("patience", plateau.patience)?,
        threshold: section.or("threshold", plateau.threshold)?,
        threshold_rule: section.choice("threshold_rule", "rel", &thresholds)?,
        cooldown: section.or("cooldown", plateau.cooldown)?,
        min_value: section.or("min_value", plateau.min_value)?,
        eps: section.or("eps", plateau.eps)?,
    }))
}

/// Reads `eta_min` or `eta_min_ratio`.
fn floor(section: &mut Section) -> Result<Floor> {
    let offset = section.offset_of("eta_min_ratio");
    match (section.optional("eta_min")?, section.optional("eta_min_ratio")?) {
        (Some(value), Some(_)) => {
            section.note(offset.error("`eta_min_ratio` and `eta_min` cannot both be set"))?;
            Ok(Floor::Value(value))
        }
        (_, Some(ratio)) => Ok(Floor::Ratio(ratio)),
        (value, None) => Ok(Floor::Value(value.unwrap_or(0.0))),
    }
}
