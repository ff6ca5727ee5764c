//! Unsupported keys, and incomplete or invalid values.

use collective::Transport;

use super::*;

#[test]
fn unsupported_keys_are_refused_by_name() {
    for (option, says) in [
        ("default_scope=mmdet", "`default_scope` is not supported"),
        ("model.type=mmdet.Mlp", "`mmdet.Mlp` is not supported: names have no scopes"),
        ("model._scope_=mmdet", "`_scope_` is not supported: names have no scopes"),
        (
            "model_wrapper_cfg.type=MMFullyShardedDataParallel",
            "`MMFullyShardedDataParallel` is not supported",
        ),
        ("sync_bn=torch", "`sync_bn` is not supported"),
        ("custom_imports.imports=a", "`custom_imports` is not supported"),
        ("data_preprocessor.type=A", "`data_preprocessor` is not supported"),
        ("activation_checkpointing=x", "`activation_checkpointing` is not supported"),
        ("env_cfg.cudnn_benchmark=true", "`cudnn_benchmark` is not supported"),
        ("env_cfg.mp_cfg.opencv_num_threads=0", "`mp_cfg` is not supported"),
        ("train_dataloader.worker_init_fn=x", "`worker_init_fn` is not supported"),
        ("train_dataloader.batch_sampler.type=A", "`batch_sampler` is not supported"),
        (
            "train_dataloader.collate_fn.type=pseudo_collate",
            "`pseudo_collate` is not supported: use `default_collate`",
        ),
        ("default_hooks.visualization.type=A", "`visualization` is not supported"),
        ("default_hooks.sampler_seed=None", "`sampler_seed` cannot be disabled: the order"),
        ("default_hooks.runtime_info=false", "`runtime_info` cannot be disabled: hooks read"),
        ("visualizer.vis_backends.type=WandbVisBackend", "`WandbVisBackend` is not supported"),
        ("default_hooks.checkpoint.out_dir=x", "`out_dir` is not supported"),
        ("val_cfg.fp16=true", "`fp16` is not supported"),
        ("train_cfg.max_iters=3", "`max_iters` is not supported"),
    ] {
        let mut config = Config::from_text("c.toml", GOOD).unwrap();
        config.override_with([option]).unwrap();
        let text = said(Ok(config));
        assert!(text.starts_with(&format!("--cfg-options {option}: {says}")), "{text}");
    }
    // Unsupported keys are not listed as valid.
    let mut config = Config::from_text("c.toml", GOOD).unwrap();
    config.override_with(["sed=1"]).unwrap();
    let text = said(Ok(config));
    assert!(text.contains("valid: auto_scale_lr, compile,") && !text.contains("sync_bn"), "{text}");
    // Disabled, they are accepted; and so are MMEngine's short forms.
    for option in [
        "env_cfg.cudnn_benchmark=false",
        "default_hooks.logger=None",
        "val_cfg.fp16=false",
        "find_unused_parameters=true",
        "resume=auto",
        "randomness.diff_rank_seed=true",
        "env_cfg.resource_limit=4096",
        "train_dataloader.worker_init_fn=None",
        "train_dataloader.num_workers=2",
        "train_dataloader.persistent_workers=false",
        "train_dataloader.prefetch_factor=None",
        "train_dataloader.timeout=0",
        "train_dataloader.pin_memory=true",
        "train_dataloader.collate_fn.type=default_collate",
        // The six default hooks, and others under user-defined keys.
        "default_hooks.runtime_info.type=RuntimeInfoHook",
        "default_hooks.sampler_seed.type=DistSamplerSeedHook",
        "default_hooks.ema.type=EMAHook",
        "val_dataloader.sampler.round_up=false",
    ] {
        let mut config = Config::from_text("c.toml", GOOD).unwrap();
        config.override_with([option]).unwrap();
        from_config(config).unwrap();
    }
}

#[test]
fn incomplete_or_invalid_options_are_refused() {
    for (option, says) in [
        (
            "default_hooks.chekpoint.interval=5",
            "unknown key `chekpoint`; did you mean `checkpoint`?",
        ),
        ("default_hooks.ema.type=EMAHok", "unknown hook `EMAHok`; did you mean `EMAHook`?"),
        ("test_cfg.type=TestLoop", "`test_cfg` needs `test_dataloader` and `test_evaluator`"),
        ("test_evaluator.type=Accuracy", "missing key `test_dataloader`"),
        ("train_dataloader.sampler.round_up=false", "`round_up` must be true"),
        ("train_dataloader.batch_size=0", "`batch_size` must be at least 1"),
        ("train_dataloader.num_workers=-1", "`num_workers` must be a non-negative integer, got -1"),
        ("train_dataloader.persistent_workers=true", "`persistent_workers` needs `num_workers`"),
        ("train_dataloader.timeout=5s", "`timeout` needs `num_workers` to be at least 1"),
        ("train_dataloader.collate_fn.type=pad", "unknown collate function `pad`"),
        ("model.hidden=3,0", "`hidden` must each be at least 1"),
        ("model.num_classes=0", "`num_classes` must be at least 1"),
        (
            "model.in_features=1000000000000",
            "`in_features` must be at least 1 and at most 2147483648",
        ),
        ("model.in_features=9223372036854775807", "`in_features` must be at least 1 and at most"),
        (
            "model.hidden=10,1000000000000",
            "`hidden` must each be at least 1 and at most 2147483648",
        ),
        ("default_hooks.checkpoint.max_keep_ckpts=0", "`max_keep_ckpts` must be at least 1"),
        ("val_evaluator.topk=0", "`topk` must each be at least 1"),
        ("val_evaluator.type=Acuracy", "unknown metric `Acuracy`; did you mean `Accuracy`?"),
        ("val_evaluator.topK=3", "unknown key `topK`; did you mean `topk`?"),
        ("val_evaluator.type=Recall", "missing key `num_classes` in [val_evaluator]"),
        (
            "val_evaluator.type=ConfusionMatrix val_evaluator.num_classes=50257",
            "`num_classes` = 50257 needs more than 67108864 sums",
        ),
        ("train_dataloader.num_workers=2000", "`num_workers` must be at most 1024, got 2000"),
        ("val_evaluator.metrics={}", "unknown value `Accuracy`"),
        ("default_hooks.checkpoint.save_best=accuracy/top1", "unknown metric `accuracy/top1`"),
        // An error of an optimizer is reported at its own key.
        (
            "optim_wrapper.optimizer.lr=-1",
            "--cfg-options optim_wrapper.optimizer.lr=-1: invalid learning rate: -1",
        ),
    ] {
        let mut config = Config::from_text("c.toml", GOOD).unwrap();
        config.override_with(option.split(' ')).unwrap();
        let text = said(Ok(config));
        assert!(text.contains(says), "{option}: {text}");
    }
}

#[test]
fn backend_without_its_feature_is_reported_with_other_errors() {
    let backends =
        [("gloo", Transport::Gloo), ("nccl", Transport::Nccl), ("hccl", Transport::Hccl)];
    for (backend, transport) in backends {
        // Another crate of the build may have enabled it.
        let is_there = transport.is_built_in();
        let env = format!(
            "env_cfg = {{ mp_cfg = {{ mp_start_method = \"fork\" }}, dist_cfg = {{ backend = \"{backend}\" }} }}\n"
        );
        let text = said(Config::from_text("c.toml", format!("{env}{GOOD}")));
        assert!(text.contains("`mp_cfg` is not supported"), "{text}");
        let told = format!("backend `{backend}` needs `runner` built with the feature");
        assert_ne!(text.contains(&told), is_there, "{text}");
        assert_eq!(text.lines().count(), 2 - usize::from(is_there), "{text}");
    }
}

#[test]
fn errors_in_a_pipeline_have_a_position() {
    let pipeline = r#"dataset = { type = "Digits", pipeline = [{ type = "Resiz", size = 9 }, { type = "RandomFlip", prob = 3 }] }"#;
    let config = GOOD.replacen("dataset = { type = \"Digits\" }", pipeline, 1);
    let text = said(Config::from_text("c.toml", &config));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].starts_with("c.toml:18:51: unknown transform `Resiz`; did you mean `Resize`?")
    );
    assert_eq!(lines[1], "c.toml:18:102: `prob` must be from 0 to 1, got 3");
    assert!(!text.contains("missing"), "{text}");
}
