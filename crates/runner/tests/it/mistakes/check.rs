//! The program `runner check`: samples of data on the model, gradients.

use super::{GOOD, run, stderr};

#[test]
fn check_tries_samples_of_each_data_set_on_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let said = |config: &str| {
        let output = run(dir.path(), config, &["check", "c.toml"], &[("RUST_BACKTRACE", "1")]);
        (output.status.success(), stderr(&output))
    };
    assert_eq!(said(GOOD), (true, String::new()));
    for (good, bad, told) in [
        (
            "num_classes = 10",
            "num_classes = 8",
            ["forward: cross_entropy: label 9 is none of 8", "metric `Accuracy`: label 9 (number "],
        ),
        ("\"Mlp\"\nin_features = 64", "\"ResNet\"\nin_channels = 3", ["forward: conv2d: "; 2]),
    ] {
        assert!(GOOD.contains(good), "{good}");
        let (right, said) = said(&GOOD.replacen(good, bad, 1));
        assert!(!right && said.lines().count() == 2, "{said}");
        let places = ["16:1: train_dataloader", "20:1: val_dataloader"];
        for ((line, at), told) in said.lines().zip(places).zip(told) {
            let told = format!("error: c.toml:{at}: trying samples on the model: {told}");
            assert!(line.starts_with(&told), "{line}\n{told}");
        }
    }
    assert!(!dir.path().join("work_dirs").exists());
}

#[test]
fn check_of_gradients_passes_correct_models_and_refuses_unknown_names() {
    let dir = tempfile::tempdir().unwrap();
    let check = |more: &[&str]| {
        let args = [&["check", "c.toml", "--gradients"][..], more].concat();
        let output = run(dir.path(), GOOD, &args, &[]);
        (output.status.code(), stderr(&output))
    };
    assert_eq!(check(&[]), (Some(0), String::new()));
    let (code, said) = check(&["--ignore", "layers.0.wieght"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.starts_with("error: unknown parameter `layers.0.wieght`; did you mean `"),
        "{said}"
    );
    assert!(!dir.path().join("work_dirs").exists());
}

#[test]
fn model_that_memory_cannot_hold_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let huge = 1_usize << 31;
    for (model, sizes) in [
        ("ResNet", &["in_channels", "width"][..]),
        ("Mlp", &["in_features", "hidden.0"]),
        ("Transformer", &["image_size"]),
        ("Transformer", &["feed_forward"]),
        ("Gpt", &["vocab_size"]),
    ] {
        let options = sizes.iter().map(|size| format!("model.{size}={huge}"));
        let options: Vec<_> = [format!("model.type={model}")].into_iter().chain(options).collect();
        let size = sizes[0];
        let hidden = if model == "Mlp" { "hidden = [1]\n" } else { "" };
        let config = GOOD.replace("in_features = 64\nnum_classes = 10\n", hidden);
        for command in ["check", "train"] {
            let mut args = vec![command, "c.toml", "--cfg-options"];
            args.extend(options.iter().map(String::as_str));
            let output = run(dir.path(), &config, &args, &[]);
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{model} {size}: {said}");
            assert!(
                said.contains("are available: check the sizes of its layer"),
                "{model} {size}: {said}"
            );
        }
    }
    assert!(!dir.path().join("work_dirs").exists());
}

#[test]
fn all_errors_are_reported_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let wrong = [
        "env_cfg = { dist_cfg = { backend = \"gloo\" }, mp_cfg = { a = 1 }, wrong = 1 }",
        "auto_scale_lr = { enable = true, wrong = 1 }",
        "lora = { rank = 0, wrong = 1 }",
        "frozen = [1]",
        "test_cfg = { type = \"TestLop\" }",
        "compile = { mode = \"default\", options = {}, wrong = 1 }",
        "param_scheduler = { type = \"LinearLR\", by_epoch = false, convert_to_iter_based = true, wrong = 1 }",
        "default_hooks.checkpoint = { filename_tmpl = \"x\", published_keys = \"a\", wrong = 1 }",
        "wrong = 1",
    ];
    let config = GOOD.split("[default_hooks]").next().unwrap();
    let keys = "[optim_wrapper]\nparamwise_cfg.custom_keys = { a = 1, b = 2 }";
    let config = config.replace("[optim_wrapper]", keys);
    let config = format!("{}\n{config}", wrong.join("\n"));
    let output = run(dir.path(), &config, &["check", "c.toml"], &[]);
    let said = stderr(&output);
    let count = |of: &str| said.matches(of).count();
    assert_eq!(count("unknown key `wrong`"), 7, "{said}");
    for (of, times) in [
        ("needs `runner` built with the feature `gloo`", usize::from(!cfg!(feature = "gloo"))),
        ("`mp_cfg` is not supported", 1),
        ("missing key `base_batch_size`", 1),
        ("missing key `targets`", 1),
        ("`rank` must be at least 1", 1),
        ("`frozen` must be", 1),
        ("`test_cfg` needs", 1),
        ("unknown value `TestLop`", 1),
        ("set either `mode` or `options`", 1),
        ("must be a table, got an integer", 2),
        ("`filename_tmpl` must have one", 1),
        ("unknown part `a`", 1),
    ] {
        assert_eq!(count(of), times, "{of}: {said}");
    }
}

/// A configuration with each table that has keys of its own.
fn with_each_table() -> serde_json::Value {
    serde_json::json!({
        "model": { "type": "Mlp", "in_features": 64, "num_classes": 10 },
        "optim_wrapper": { "optimizer": { "type": "SGD", "lr": 0.1 }, "paramwise_cfg": {} },
        "train_cfg": { "by_epoch": true, "max_epochs": 2 },
        "train_dataloader": { "batch_size": 64, "sampler": {}, "dataset": { "type": "Digits" } },
        "env_cfg": { "dist_cfg": {} }, "log_processor": {}, "randomness": {},
        "default_hooks": { "checkpoint": { "type": "CheckpointHook" } },
        "model_wrapper_cfg": {}, "visualizer": {}
    })
}

/// Whether `runner check` accepts a configuration, and what it says.
fn check(config: &str) -> (bool, String) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.json"), config).unwrap();
    let output = run(dir.path(), "", &["check", "c.json"], &[]);
    (output.status.success(), stderr(&output))
}

/// Every key that messages list as valid, of the configuration and of its tables.
#[test]
fn null_means_absent_for_every_key() {
    let good = with_each_table();
    for path in [
        "",
        "/model",
        "/optim_wrapper",
        "/optim_wrapper/optimizer",
        "/train_cfg",
        "/optim_wrapper/paramwise_cfg",
        "/train_dataloader",
        "/train_dataloader/sampler",
        "/train_dataloader/dataset",
        "/env_cfg",
        "/env_cfg/dist_cfg",
        "/log_processor",
        "/randomness",
        "/default_hooks/checkpoint",
        "/model_wrapper_cfg",
        "/visualizer",
    ] {
        let mut config = good.clone();
        let table = config.pointer_mut(path).unwrap().as_object_mut().unwrap();
        table.insert("wrong".into(), 1.into());
        let said = check(&config.to_string()).1;
        let valid = said.split("(valid: ").nth(1).unwrap_or_else(|| panic!("{path}: {said}"));
        let valid = valid.split(')').next().unwrap();
        let table = config.pointer_mut(path).unwrap().as_object_mut().unwrap();
        table.remove("wrong");
        for key in valid.split(", ") {
            table.entry(key).or_insert(serde_json::Value::Null);
        }
        let (right, said) = check(&config.to_string());
        assert!(right, "{path}: {said}\n{config}");
    }
}

#[test]
fn null_in_a_dump_of_mmengine_or_under_a_misspelt_key() {
    let good = with_each_table();
    // Of MMEngine's dump.
    let mut config = good.clone();
    let nulls = ["test_dataloader", "test_evaluator", "test_cfg", "val_evaluator", "default_scope"];
    for key in nulls {
        config[key] = serde_json::Value::Null;
    }
    assert_eq!(check(&config.to_string()), (true, String::new()));
    // A misspelt key is one, also if it is `null`.
    for (path, key, like) in [
        ("", "test_dataloder", "test_dataloader"),
        ("", "val_evaluater", "val_evaluator"),
        ("/optim_wrapper", "clip_grads", "clip_grad"),
        ("/train_dataloader/dataset", "pipelin", "pipeline"),
    ] {
        let mut config = good.clone();
        config.pointer_mut(path).unwrap()[key] = serde_json::Value::Null;
        let said = check(&config.to_string()).1;
        let told = format!("unknown key `{key}`; did you mean `{like}`?");
        assert!(said.contains(&told) && said.lines().count() == 1, "{said}");
    }
    // A hook of a base that is disabled, and a misspelt one.
    config["default_hooks"]["ema"] = serde_json::Value::Null;
    assert_eq!(check(&config.to_string()), (true, String::new()));
    config["default_hooks"]["chekpoint"] = serde_json::Value::Null;
    let said = check(&config.to_string()).1;
    assert!(said.contains("unknown key `chekpoint`; did you mean `checkpoint`?"), "{said}");
}
