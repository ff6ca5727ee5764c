//! All mistakes of a configuration are reported together, each as if it were alone.

use serde_json::{Value, json};

use super::*;

/// Keys after which the rest of their table is not read, or is read in another way.
const DECISIVE: [&str; 7] =
    ["type", "max_norm", "monitor", "lr", "by_epoch", "num_workers", "step_size"];

/// A configuration with most keys.
fn whole() -> Value {
    json!({
        "model": { "type": "Mlp", "in_features": 64, "hidden": [8], "num_classes": 10 },
        "model_wrapper_cfg": { "bucket_cap_mb": 4, "comm_hook": { "matrix_approximation_rank": 2 } },
        "optim_wrapper": {
            "type": "AmpOptimWrapper", "dtype": "bfloat16", "accumulative_counts": 2,
            "max_consecutive_skips": 9, "loss_scale": { "init_scale": 8.0, "enabled": true },
            "optimizer": { "type": "AdamW", "lr": 0.1, "weight_decay": 0.5 },
            "clip_grad": { "norm_type": 2.0, "max_norm": 1.0 },
            "paramwise_cfg": { "norm_decay_mult": 0.0, "custom_keys": { "a": { "lr_mult": 0.5 } } }
        },
        "param_scheduler": [
            { "type": "LinearLR", "begin": 0, "end": 1, "start_factor": 0.1 },
            { "type": "CosineAnnealingLR", "begin": 1, "eta_min": 0.01 }
        ],
        "train_cfg": { "by_epoch": true, "val_interval": 1, "val_begin": 1, "max_epochs": 2 },
        "train_dataloader": {
            "num_workers": 1, "prefetch_factor": 2, "drop_last": true, "batch_size": 64,
            "collate_fn": { "type": "pad_collate", "padding_value": 1, "padding_values": { "x": 1 } },
            "sampler": { "type": "DefaultSampler", "shuffle": true },
            "dataset": { "type": "Digits", "split": "train", "pipeline": [
                { "type": "RandomFlip", "prob": 0.5 }, { "type": "Resize", "size": 8 }
            ] }
        },
        "val_dataloader": { "drop_last": false, "batch_size": 64, "dataset": { "type": "Digits", "split": "test" } },
        "val_evaluator": [
            { "type": "Accuracy", "topk": 1, "prefix": "a" },
            { "type": "Recall", "average": "macro", "num_classes": 10 }
        ],
        "val_cfg": { "type": "ValLoop" },
        "test_dataloader": { "batch_size": 64, "dataset": { "type": "Digits", "split": "test" } },
        "test_evaluator": { "type": "Accuracy" },
        "test_cfg": { "type": "TestLoop" },
        "auto_scale_lr": { "enable": false, "base_batch_size": 64 },
        "default_hooks": {
            "logger": { "type": "LoggerHook", "interval": 10 },
            "checkpoint": { "type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 2 },
            "runtime_info": { "type": "RuntimeInfoHook" },
            "more": { "type": "EMAHook", "priority": 49 }
        },
        "custom_hooks": [
            { "type": "CheckInvalidLossHook", "interval": 5, "priority": "LOW" },
            { "type": "EarlyStoppingHook", "monitor": "a/accuracy", "patience": 3 }
        ],
        "randomness": { "seed": 1, "deterministic": false },
        "env_cfg": { "resource_limit": 4096, "dist_cfg": { "backend": "host", "timeout": 5 } },
        "launcher": "none",
        "device": { "type": "cpu" },
        "resume": false,
        "load_from": { "checkpoint": "a", "strict": false, "revise_keys": [["a", "b"]], "transpose": ["a"] },
        "frozen": ["x"],
        "lora": { "rank": 2, "dropout": 0.5, "targets": ["a"] },
        "experiment_name": "a",
        "log_level": "INFO",
        "log_processor": { "type": "LogProcessor", "window_size": 5, "by_epoch": true },
        "visualizer": { "type": "Visualizer", "name": "a" },
        "vis_backends": [{ "type": "LocalVisBackend" }],
        "trace": "trace.json",
        "work_dir": "a",
        "find_unused_parameters": false,
        "compile": { "backend": "engine", "mode": "default" }
    })
}

/// The same with an optimizer for each part of a model.
fn with_parts() -> Value {
    let mut config = whole();
    config["optim_wrapper"] = json!({
        "type": "OptimWrapperDict", "accumulative_counts": 2,
        "a": { "optimizer": { "type": "SGD", "lr": 0.1 }, "clip_grad": { "max_norm": 1.0 } },
        "b": { "type": "OptimWrapper", "optimizer": { "type": "AdamW", "lr": 0.1 } }
    });
    config["param_scheduler"] = json!({
        "a": { "type": "LinearLR", "end": 1 }, "b": [{ "type": "StepLR", "step_size": 1 }]
    });
    config
}

/// Adds a pointer to each value that is no array or table, and to a new key of each table.
fn places(value: &Value, path: &str, to: &mut Vec<String>) {
    match value {
        Value::Object(table) => {
            table.iter().for_each(|(key, value)| places(value, &format!("{path}/{key}"), to));
            to.push(format!("{path}/wrong{}", to.len()));
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            values
                .iter()
                .enumerate()
                .for_each(|(i, value)| places(value, &format!("{path}/{i}"), to));
        }
        _ => to.push(path.to_owned()),
    }
}

/// The reason without the list of valid names, which may depend on another mistake.
fn told(mistake: &runner::Mistake) -> String {
    mistake.reason.split(['(', ';']).next().unwrap().trim_end().to_owned()
}

/// Reasons of the errors, sorted, of a configuration with wrong values at these places.
fn reasons(config: &Value, at: &[&String]) -> Vec<String> {
    let mut config = config.clone();
    for path in at {
        let (table, key) = path.rsplit_once('/').unwrap();
        let table = config.pointer_mut(table).unwrap().as_object_mut().unwrap();
        table.insert(key.to_owned(), json!({ "wrong": 1 }));
    }
    let read = Config::from_text("c.json", config.to_string()).and_then(from_config);
    let mut reasons = match read {
        Ok(_) => Vec::new(),
        Err(Error::Config { mistakes }) => mistakes.iter().map(told).collect(),
        Err(error) => panic!("{error}"),
    };
    reasons.sort();
    reasons
}

#[test]
fn all_mistakes_are_reported_together() {
    for config in [whole(), with_parts()] {
        let mut all = Vec::new();
        places(&config, "", &mut all);
        let check = |paths: &[&String]| {
            let mut wanted: Vec<_> =
                paths.iter().flat_map(|path| reasons(&config, &[path])).collect();
            wanted.sort();
            assert_eq!(reasons(&config, paths).join("\n"), wanted.join("\n"));
        };
        check(&[]);
        let parts = |path: &String| {
            let (table, key) = path.rsplit_once('/').unwrap();
            (format!("{table}/"), DECISIVE.contains(&key))
        };
        let (decisive, free): (Vec<_>, Vec<_>) = all.iter().partition(|path| parts(path).1);
        check(&free);
        for path in decisive {
            let table = parts(path).0;
            let outside = free.iter().copied().filter(|other| !other.starts_with(&table));
            check(&outside.chain([path]).collect::<Vec<_>>());
        }
    }
}
