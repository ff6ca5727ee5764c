//! Further state that a run resumes from (PowerSGD's error feedback, random numbers), learning
//! rates for parts of a model, runs that only evaluate, and `env_cfg` and `log_level`.

use std::sync::Once;

use candle_nn::{Linear, Module, VarBuilder, linear};
use collective::Transport;
use runner::engine::candle::{
    CandleEngine, CandleModel, Loss, Outputs, TensorBatch, candle_core, candle_nn, ops,
};
use runner::model::MODELS;

use super::*;

/// Kills `config` before iteration 17 of 24 on two ranks, resumes, and compares with an
/// uninterrupted run.
fn resumes_exactly(config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let config =
        format!("default_hooks.checkpoint = {{ by_epoch = false, interval = 5 }}\n{config}");
    resume(&config, &whole, 2);
    killed(&config, &broken, 2, 17);
    resume(&config, &broken, 2);
    assert!(log(&broken).contains("resumed from"), "{}", log(&broken));
    assert_equal(&whole, &broken, "iter_24");
    dir
}

#[test]
fn error_feedback_of_power_sgd_is_resumed() {
    let full = MLP.replace("AmpOptimWrapper", "OptimWrapper").replace("dtype = \"float16\"\n", "");
    let full = full.replace("loss_scale = { init_scale = 256.0, growth_interval = 5 }\n", "");
    for wrapper in ["MMDistributedDataParallel", "MMSeparateDistributedDataParallel"] {
        let config = format!(
            "{full}[model_wrapper_cfg]\ntype = '{wrapper}'\nbucket_cap_mb = 0.0005\n\
             comm_hook = {{ matrix_approximation_rank = 1, start_powerSGD_iter = 2 }}\n"
        );
        let dir = resumes_exactly(&config);
        let read = |rank| {
            let file = format!("whole/iter_15/wrapper_{rank}.safetensors");
            std::fs::read(dir.path().join(file)).unwrap()
        };
        // The error feedback differs between ranks.
        assert!(read(0) != read(1));
    }
}

/// A perceptron with dropout of half of its hidden values.
struct Dropping(Linear, Linear);

impl Dropping {
    fn logits(&self, batch: &TensorBatch) -> candle_core::Result<candle_core::Tensor> {
        let x = batch.get("inputs")?.flatten_from(1)?.to_dtype(candle_core::DType::F32)?;
        // Scaled so that no hidden value is always zero, whose mask would have no effect.
        self.1.forward(&ops::dropout(&self.0.forward(&(x / 255.0)?)?.relu()?, 0.5)?)
    }
}

impl CandleModel for Dropping {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        Ok(Loss::new(ops::cross_entropy(&self.logits(batch)?, batch.get("labels")?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// A configuration with that model and a seed.
const DROPPING: &str = r#"
model = { type = "Dropping" }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { max_epochs = 2 }
randomness.seed = 3
optim_wrapper = { type = "OptimWrapper", optimizer = { type = "SGD", lr = 0.05 } }
"#;

fn register_dropping() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let build = |vb: VarBuilder<'static>| {
            Ok(Dropping(linear(64, 8, vb.pp("a"))?, linear(8, 10, vb.pp("b"))?))
        };
        MODELS.register("Dropping", move |_| Ok(CandleEngine::factory(build))).unwrap();
    });
}

#[test]
fn random_numbers_are_resumed() {
    register_dropping();
    let dir = resumes_exactly(DROPPING);
    // Eight values of 64 samples, fifteen times. The last batch of an epoch has 15 samples.
    let state = std::fs::read(dir.path().join("whole/iter_15/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    let drawn = 8 * (14 * 64 + 15);
    assert_eq!(state["random"], serde_json::json!([drawn, drawn]));
}

#[test]
fn dropout_of_a_run_with_a_drawn_seed_is_resumed() {
    register_dropping();
    for randomness in ["", "randomness.diff_rank_seed = true"] {
        let dir = tempfile::tempdir().unwrap();
        let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
        let unseeded = DROPPING.replace("randomness.seed = 3", randomness);
        killed(&unseeded, &broken, 2, 17);
        resume(&unseeded, &broken, 2);
        let state = std::fs::read(broken.join("epoch_1/state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        let seed = state["seed"].as_u64().unwrap();
        for outcome in run(&unseeded, &whole, 2, |builder, _| builder.seed(seed)) {
            outcome.unwrap();
        }
        assert_equal(&whole, &broken, "epoch_2");
    }
}

const PARTS: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [8], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { max_epochs = 2 }
randomness.seed = 3
[optim_wrapper]
type = "OptimWrapperDict"
"layers.0" = { optimizer = { type = "SGD", lr = 0.1 } }
"layers.1" = { optimizer = { type = "SGD", lr = 0.2, momentum = 0.5 } }
[param_scheduler]
"layers.0" = { type = "StepLR", step_size = 1, gamma = 0.5 }
"layers.1" = [
    { type = "LinearLR", start_factor = 0.1, end = 5, by_epoch = false },
    { type = "LinearMomentum", start_factor = 0.5, end = 5, by_epoch = false },
]
"#;

#[test]
fn parts_have_their_own_schedulers_and_are_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    let outcome = run(PARTS, &whole, 2, |mut builder, _| {
        for (iter, rates, momentum) in
            [(0, [0.1, 0.02], 0.25), (2, [0.1, 0.11], 0.375), (12, [0.05, 0.2], 0.5)]
        {
            builder = builder.hook(before_iter(iter, move |runner| {
                let optimizer = runner.optim_wrapper().optimizer();
                for (group, rate) in rates.into_iter().enumerate() {
                    assert!((optimizer.lr(group).unwrap() - rate).abs() < 1e-12, "{iter} {group}");
                }
                assert!((optimizer.momentum(1).unwrap().unwrap() - momentum).abs() < 1e-12);
                Ok(())
            }));
        }
        builder
    });
    outcome.into_iter().for_each(|rank| drop(rank.unwrap()));
    let rates = "layers.0.lr: 1.0000e-01 layers.1.lr: 2.0000e-01  eta: ";
    assert!(log(&whole).contains(&format!("[1][10/12]  {rates}")), "{}", log(&whole));
    killed(PARTS, &broken, 2, 14);
    resume(PARTS, &broken, 2);
    assert_equal(&whole, &broken, "epoch_2");
    // One list applies to all parts; an unknown part is named.
    let common = "[[param_scheduler]]\ntype = 'StepLR'\nstep_size = 1";
    let (head, _) = PARTS.split_once("[param_scheduler]").unwrap();
    assert_eq!(read(&format!("{head}{common}")), "");
    let typo =
        format!("{head}[param_scheduler]\n\"layers.2\" = {{ type = 'StepLR', step_size = 1 }}");
    let said = read(&typo);
    assert!(said.starts_with("c.toml:11:14: unknown part of the optimizer `layers.2`"), "{said}");
    assert!(said.contains("layers.0"), "{said}");
}

/// Error text of a configuration; empty if it is valid.
fn read(config: &str) -> String {
    let read = Config::from_text("c.toml", config).and_then(from_config);
    read.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn configuration_without_training_evaluates() {
    let dir = tempfile::tempdir().unwrap();
    let (trained, evaluated) = (dir.path().join("trained"), dir.path().join("evaluated"));
    let full = MLP.replace("AmpOptimWrapper", "OptimWrapper").replace("dtype = \"float16\"\n", "");
    let full = full.replace("loss_scale = { init_scale = 256.0, growth_interval = 5 }\n", "");
    let metrics = run(&format!("{VALIDATION}{full}"), &trained, 1, |builder, _| builder);
    let model = full.lines().find(|line| line.starts_with("model")).unwrap();
    let config = format!("{model}\n{VALIDATION}");
    let build = || {
        let config = Config::from_text("c.toml", &config).unwrap();
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let builder = from_config(config).unwrap().work_dir(&evaluated);
        builder.process_group(group).load_from(trained.join("epoch_2")).build().unwrap()
    };
    assert_eq!(build().validate().unwrap(), *metrics[0].as_ref().unwrap());
    assert_eq!(checkpoints(&evaluated), [""; 0]);
    assert!(!log(&evaluated).contains("converted"));
    let said = build().train().unwrap_err().to_string();
    assert!(said.contains("no train_dataloader, train_cfg and optim_wrapper"), "{said}");
    // All training keys or none.
    let said = read(&format!("train_cfg = {{ max_epochs = 1 }}\n{config}"));
    assert!(said.contains("missing key `optim_wrapper`"), "{said}");
    assert!(read(model).contains("missing key `optim_wrapper`"));
}

/// Without training the model has no half precision, so half parameters are converted.
#[test]
fn configuration_without_training_evaluates_half_parameters_in_f32() {
    let dir = tempfile::tempdir().unwrap();
    let half = MLP.replace("dtype = \"float16\"", "dtype = \"float16\"\nhalf_parameters = true");
    run(&half, dir.path(), 1, |builder, _| builder).remove(0).unwrap();
    let model = half.lines().find(|line| line.starts_with("model")).unwrap();
    let judge = |config: &str, change: fn(RunnerBuilder) -> RunnerBuilder| {
        let config = Config::from_text("c.toml", config).unwrap();
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let builder = from_config(config).unwrap().work_dir(dir.path());
        change(builder.process_group(group)).build().unwrap().validate().unwrap()
    };
    let newest: fn(RunnerBuilder) -> RunnerBuilder = |builder| builder.resume(true);
    let as_f32 = judge(&format!("{model}\n{VALIDATION}"), newest);
    assert!(log(dir.path()).contains("4 tensors of F16 converted to F32"), "{}", log(dir.path()));
    let as_half = judge(&format!("{VALIDATION}{half}"), newest);
    // Without rounding of activations a sample or two may be classified differently.
    assert!(
        as_f32[0].1 > 30.0 && (as_f32[0].1 - as_half[0].1).abs() < 1.0,
        "{as_f32:?} {as_half:?}"
    );
    // A run cannot resume like this, because its optimizer state belongs to other parameters.
    let full =
        half.replace("half_parameters = true", "").replace("max_epochs = 2", "max_epochs = 3");
    let said = run(&full, dir.path(), 1, |builder, _| builder.resume(true)).remove(0);
    let said = said.unwrap_err().to_string();
    assert!(said.contains("is F16") && said.contains("the model has F32"), "{said}");
}

#[test]
fn log_level_filters_lines() {
    let dir = tempfile::tempdir().unwrap();
    for (level, info, warning) in
        [("INFO", true, true), ("WARNING", false, true), ("ERROR", false, false)]
    {
        let work_dir = dir.path().join(level);
        // There is no checkpoint to resume from, which is a warning.
        resume(&format!("log_level = '{level}'\n{MLP}"), &work_dir, 1);
        let log = log(&work_dir);
        assert_eq!(log.contains(" - INFO - "), info, "{level}: {log}");
        assert_eq!(log.contains(" - WARNING - "), warning, "{level}: {log}");
    }
    assert!(read(&format!("log_level = 'INFOS'\n{MLP}")).contains("did you mean `INFO`?"));
}

#[test]
fn backend_is_built_in_or_its_feature_is_named() {
    let with = |backend: &str| read(&format!("env_cfg.dist_cfg.backend = '{backend}'\n{MLP}"));
    for backend in ["auto", "host", "tcp"] {
        assert_eq!(with(backend), "");
    }
    for (backend, transport, feature) in
        [("gloo", Transport::Gloo, "gloo"), ("nccl", Transport::Nccl, "cuda")]
    {
        let said = with(backend);
        let place = "c.toml:1:28: backend";
        let refused = said.starts_with(place) && said.contains(&format!("feature `{feature}`"));
        assert_eq!(refused, !transport.is_built_in(), "{said}");
    }
    assert!(with("glo").contains("did you mean `gloo`?"), "{}", with("glo"));
}

/// Names in a line, in order.
fn names(line: &str) -> Vec<&str> {
    let words = line.split(['{', ',', ' ']).filter_map(|word| word.strip_suffix(':'));
    words.map(|word| word.trim_matches('"')).collect()
}

#[test]
fn log_lines_follow_mmengines_order() {
    let dir = tempfile::tempdir().unwrap();
    let full = MLP.replace("AmpOptimWrapper", "OptimWrapper").replace("dtype = \"float16\"\n", "");
    let full = full.replace("loss_scale = { init_scale = 256.0, growth_interval = 5 }", "");
    let config = format!("{VALIDATION}{full}clip_grad = {{ max_norm = 5.0 }}\n");
    let recorded = include_str!("../../vectors/log_epoch.txt");
    resume(&config, dir.path(), 1);
    let scalars = walk(dir.path()).into_iter().find(|f| f.ends_with("scalars.json")).unwrap();
    let ours = log(dir.path()) + &std::fs::read_to_string(scalars).unwrap();
    for (kind, left_out) in
        [("Epoch(train) ", "loss_cls"), ("{\"lr\"", "loss_cls"), ("Epoch(val) ", "digits/n")]
    {
        let find = |text: &str| {
            let line = text.lines().find_map(|line| line.find(kind).map(|at| &line[at..]));
            line.unwrap().replace(" accuracy", " digits/accuracy")
        };
        let (ours, mut theirs) = (find(&ours), find(recorded));
        theirs =
            theirs.replace(&format!("{left_out}:"), "").replace(&format!("\"{left_out}\":"), "");
        assert_eq!(names(&ours), names(&theirs), "{ours}");
    }
}

#[test]
fn log_processor_and_experiment_name_change_log_lines() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!(
        "experiment_name = 'mine'\nlog_processor = {{ window_size = 1, by_epoch = false }}\n\
         default_hooks.logger.interval = 1\n{MLP}"
    );
    resume(&config, dir.path(), 1);
    let log = log(dir.path());
    assert!(log.contains(" - Iter(train) [ 2/46]  lr: ") && !log.contains("Epoch("), "{log}");
    assert!(log.contains(" - Exp name: mine_20"), "{log}");
    // With a window of one, a line contains the values of its iteration.
    let scalars = walk(dir.path()).into_iter().find(|f| f.ends_with("scalars.json")).unwrap();
    let scalars = std::fs::read_to_string(scalars).unwrap();
    let losses = scalars.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line.get("epoch").is_none(), "{line}");
        line["loss"].as_f64().unwrap()
    });
    let losses: Vec<_> = losses.collect();
    assert_eq!(losses.len(), 46);
    assert!(losses.windows(2).any(|pair| pair[1] > pair[0]), "{losses:?}");
}

#[test]
fn checkpoint_without_a_loss_scale_is_refused_by_file_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let full = MLP.replace("AmpOptimWrapper", "OptimWrapper").replace("dtype = \"float16\"\n", "");
    let full = full.replace("loss_scale = { init_scale = 256.0, growth_interval = 5 }\n", "");
    resume(&full, dir.path(), 1);
    let longer = MLP.replace("max_epochs = 2", "max_epochs = 3");
    for (config, file, key) in [
        (longer.clone(), "epoch_2/state.json: `loss_scaler`", "did not (OptimWrapper"),
        (
            full.replace("\"SGD\"", "\"Adam\"").replace(", momentum = 0.9", ""),
            "epoch_2/optimizer.safetensors",
            "",
        ),
    ] {
        let outcome = run(&config, dir.path(), 1, |builder, _| builder.resume(true)).remove(0);
        let said = outcome.map(drop).map_err(|e| e.to_string()).unwrap_err();
        assert!(said.contains(file) && said.contains(key), "{said}");
    }
}
