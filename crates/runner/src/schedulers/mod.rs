//! Schedulers of learning rate and momentum, with MMEngine's names and defaults in configurations.
//!
//! The schedulers themselves are those of [`train_step`].

mod read;

pub use read::PARAM_SCHEDULERS;
pub(crate) use read::read_all;
pub use train_step::{
    Anneal, Comparison, Floor, OneCycle, Param, Plateau, RunLength, Scheduler, SchedulerConfig,
    Shape, Threshold,
};

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::Result;
    use crate::config::Config;

    const ENDLESS: RunLength =
        RunLength { epochs: 1_000_000_000, iters: 1_000_000_000, epoch_length: 1 };

    fn recorded() -> Value {
        serde_json::from_str(include_str!("../../tests/vectors/schedulers.json")).unwrap()
    }

    /// Reads a scheduler from a configuration with the arguments of a recording.
    fn read(kind: &str, args: &Value) -> Result<SchedulerConfig> {
        let mut text = format!("type = '{kind}'\n");
        for (key, value) in args.as_object().unwrap() {
            match key.as_str() {
                "convert" => text += "convert_to_iter_based = true\n",
                "epoch_len" => {}
                key => text += &format!("{key} = {value}\n"),
            }
        }
        PARAM_SCHEDULERS.build(Config::from_text("c.toml", &text)?.into_section())
    }

    fn floats(values: &Value) -> Vec<f64> {
        values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    }

    /// Runs a chain of schedulers on one value and compares it step by step.
    fn check(
        chain: &[SchedulerConfig],
        span: RunLength,
        initial: f64,
        expected: &[f64],
        what: &Value,
    ) {
        let (mut base, mut values) = ([initial], [initial]);
        let make = |config| Scheduler::new(config, span, &mut base, &mut values).unwrap();
        let mut chain: Vec<_> = chain.iter().map(make).collect();
        for (step, expected) in expected.iter().enumerate() {
            let [value] = values;
            let off = (value - expected).abs();
            assert!(off <= 1e-9 * expected.abs(), "{what}: step {step}: {value}, not {expected}");
            // Each step restores the scheduler from its saved form.
            for scheduler in &mut chain {
                let saved = serde_json::to_string(scheduler).unwrap();
                let texts = scheduler.resume(serde_json::from_str(&saved).unwrap()).unwrap();
                assert!(texts.is_empty(), "{texts:?}");
                scheduler.step(&mut values, None).unwrap();
            }
        }
    }

    #[test]
    fn schedulers_match_mmengine() {
        for case in recorded()["single"].as_array().unwrap() {
            let kind = case["type"].as_str().unwrap();
            let config = read(kind, &case["args"]).unwrap();
            let initial = case[if kind.ends_with("LR") { "lr" } else { "momentum" }].as_f64();
            let epoch_length = case["args"]["epoch_len"].as_u64().unwrap_or(1);
            // A recording of a cycle ends with the cycle.
            let epochs = case["args"]["total_steps"].as_u64().unwrap_or(ENDLESS.epochs);
            let span = RunLength { epochs, epoch_length, ..ENDLESS };
            check(&[config], span, initial.unwrap(), &floats(&case["values"]), case);
        }
    }

    #[test]
    fn chained_schedulers_match_mmengine() {
        for case in recorded()["chain"].as_array().unwrap() {
            let one = |part: &Value| read(part[0].as_str().unwrap(), &part[1]).unwrap();
            let chain: Vec<_> = case["chain"].as_array().unwrap().iter().map(one).collect();
            check(&chain, ENDLESS, 0.1, &floats(&case["values"]), case);
        }
    }

    /// A restart starts from the value that other schedulers have changed.
    #[test]
    fn restart_in_a_chain_matches_mmengine() {
        let restarts = serde_json::json!({
            "periods": [3, 4], "restart_weights": [1, 0.5], "eta_min": 0.001
        });
        let steps = serde_json::json!({ "step_size": 2, "gamma": 0.7, "begin": 1 });
        let chain = [("CosineRestartLR", restarts), ("StepLR", steps)];
        let chain = chain.map(|(kind, args)| read(kind, &args).unwrap());
        let values = [
            0.1,
            0.075_250_000_000_000_01,
            0.025_750_000_000_000_016,
            0.034_999_999_999_999_996,
            0.030_020_815_280_171_306,
            0.012_599_999_999_999_998,
            0.004_397_561_338_236_05,
            0.003_078_292_936_765_234_7,
        ];
        check(&chain, ENDLESS, 0.1, &values, &Value::Null);
    }

    #[test]
    fn plateau_matches_mmengine() {
        let case = &recorded()["reduce_on_plateau"];
        let config = read("ReduceOnPlateauLR", &case["args"]).unwrap();
        let (mut base, mut values) = ([0.1], [0.1]);
        let mut scheduler = Scheduler::new(&config, ENDLESS, &mut base, &mut values).unwrap();
        assert!(scheduler.needs_metrics());
        let expected = floats(&case["values"]);
        for (metric, expected) in floats(&case["metrics"]).into_iter().zip(expected) {
            let saved = serde_json::to_string(&scheduler).unwrap();
            scheduler.resume(serde_json::from_str(&saved).unwrap()).unwrap();
            scheduler.step(&mut values, Some(&[("loss".into(), metric)])).unwrap();
            assert!((values[0] - expected).abs() < 1e-9, "{values:?} {expected}");
        }
        let error = scheduler.step(&mut values, Some(&[("accuracy".into(), 1.0)])).unwrap_err();
        assert!(error.to_string().contains("no metric `loss`; known: accuracy"), "{error}");
    }

    #[test]
    fn plateau_ignores_non_finite_metrics() {
        for first in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let config = read("ReduceOnPlateauLR", &serde_json::json!({ "patience": 1 })).unwrap();
            let mut values = [0.1];
            let mut scheduler = Scheduler::new(&config, ENDLESS, &mut [0.1], &mut values).unwrap();
            for metric in [first, 3.0, 2.0, 1.0] {
                scheduler.step(&mut values, Some(&[("loss".into(), metric)])).unwrap();
            }
            assert_eq!(values, [0.1], "{first}");
        }
    }

    /// The relative threshold of a negative metric applies to its magnitude.
    #[test]
    fn relative_plateau_of_a_negative_metric_reduces() {
        for (rule, better) in [("less", -1.2), ("greater", -0.8)] {
            let text = format!(
                "type = 'ReduceOnPlateauLR'\nrule = '{rule}'\nthreshold = 0.1\npatience = 1"
            );
            let section = Config::from_text("c.toml", text).unwrap().into_section();
            let config = PARAM_SCHEDULERS.build(section).unwrap();
            let mut values = [1.0];
            let mut scheduler = Scheduler::new(&config, ENDLESS, &mut [1.0], &mut values).unwrap();
            let mut after = |metric: f64| {
                scheduler.step(&mut values, Some(&[("loss".into(), metric)])).unwrap();
                values[0]
            };
            // The first is the best; equal ones are not better.
            assert_eq!([-1.0; 3].map(&mut after), [1.0, 1.0, 0.1], "{rule}");
            assert_eq!([-1.0, better].map(&mut after), [0.1; 2], "{rule}");
        }
    }

    /// Shapes that do not depend on their length.
    #[test]
    fn extended_run_equals_a_run_of_that_length() {
        for text in [
            "type = 'ExponentialLR'\ngamma = 0.9",
            "type = 'StepLR'\nstep_size = 2",
            "type = 'MultiStepLR'\nmilestones = [1, 3, 5]",
            "type = 'CosineAnnealingLR'\nT_max = 5",
            "type = 'CosineRestartLR'\nperiods = [3, 3]\nrestart_weights = [1.0, 0.5]",
        ] {
            let config =
                PARAM_SCHEDULERS.build(Config::from_text("c", text).unwrap().into_section());
            let config = config.unwrap();
            let made = |epochs, values: &mut [f64]| {
                let span = RunLength { epochs, iters: epochs, epoch_length: 1 };
                Scheduler::new(&config, span, &mut [1.0], values).unwrap()
            };
            let (mut long, mut short) = ([1.0], [1.0]);
            let (mut whole, mut first) = (made(6, &mut long), made(3, &mut short));
            for _ in 0..3 {
                whole.step(&mut long, None).unwrap();
                first.step(&mut short, None).unwrap();
            }
            let mut second = made(6, &mut [1.0]);
            assert_eq!(second.resume(first.clone()).unwrap(), [""; 0]);
            for epoch in 3..6 {
                assert_eq!(short, long, "{text}, epoch {epoch}");
                whole.step(&mut long, None).unwrap();
                second.step(&mut short, None).unwrap();
            }
        }
    }

    #[test]
    fn invalid_schedulers_are_refused_at_creation() {
        for (text, wanted) in [
            ("type = 'ConstantLR'\nbegin = 3\nend = 3", "begin=3, end=3"),
            ("type = 'ConstantLR'\nfactor = 1.5", "factor"),
            ("type = 'ConstantLR'\nfactor = 0", "factor"),
            ("type = 'LinearLR'\nstart_factor = 0", "start_factor"),
            ("type = 'OneCycleLR'\neta_max = 1\ntotal_steps = 9", "`total_steps` is 9"),
            ("type = 'OneCycleLR'\neta_max = 1\ntotal_steps = 9\nend = 10", "`total_steps` is 9"),
            ("type = 'StepLR'\nstep_size = 0", "step_size"),
            ("type = 'ExponentialLR'\ngamma = -0.5", "`gamma` must not be negative"),
            ("type = 'PolyLR'\npower = -1", "`power` must not be negative"),
            (
                "type = 'OneCycleLR'\neta_max = 1\ntotal_steps = 9\nfinal_div_factor = 0",
                "`final_div_factor` must be above 0",
            ),
            ("type = 'StepLR'\nstep_size = 1\ngamma = inf", "must be finite"),
            ("type = 'CosineRestartLR'\nperiods = [1, 2]\neta_min = 0.0", "restart_weights"),
            ("type = 'CosineAnnealingLR'\neta_min = 0\neta_min_ratio = 0", "eta_min_ratio"),
            ("type = 'OneCycleMomentum'\neta_max = 1\ntotal_steps = 9", "unknown scheduler"),
            (
                "type = 'StepLR'\nstep_size = 1\nby_epoch = false\nconvert_to_iter_based = true",
                "epoch",
            ),
        ] {
            let section = Config::from_text("c.toml", text).unwrap().into_section();
            let made = PARAM_SCHEDULERS
                .build(section)
                .and_then(|config| Ok(Scheduler::new(&config, ENDLESS, &mut [0.1], &mut [0.1])?));
            let error = made.map(drop).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn cycle_with_a_rise_of_one_step_begins_at_its_maximum() {
        let args = serde_json::json!({ "eta_max": 1.0, "total_steps": 10, "pct_start": 0.1 });
        let config = read("OneCycleLR", &args).unwrap();
        let span = RunLength { epochs: 10, ..ENDLESS };
        let mut values = [0.1];
        let mut scheduler = Scheduler::new(&config, span, &mut [0.1], &mut values).unwrap();
        assert_eq!(values, [1.0]);
        for _ in 0..9 {
            scheduler.step(&mut values, None).unwrap();
            assert!(values[0] < 1.0, "{values:?}");
        }
    }
}
