//! Whole runs with `device = "cuda"`, compared with the same runs on the CPU. Needs a GPU, or the
//! fake one of `.ci/devices`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use runner::data::{Array, ArrayData, Batch};
use runner::hooks::Hook;
use runner::optim_wrapper::OptimWrapperFactory;
use runner::{Result, Runner, RunnerBuilder};
use safetensors::SafeTensors;

mod counts;
mod ema;
mod nccl;

use crate::from_config;
use crate::gpu;

const OPTIM: &str = "optim_wrapper = { type = 'OptimWrapper', optimizer = { type = 'SGD', lr = 0.05, momentum = 0.9 } }";

/// Builds a run of a small residual network on the digits, for `steps` iterations.
fn built(dir: &Path, more: &str, steps: usize, resume: bool) -> Result<Runner> {
    let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
    builder(dir, more, steps, resume)?.process_group(group).build()
}

fn builder(dir: &Path, more: &str, steps: usize, resume: bool) -> Result<RunnerBuilder> {
    let checkpoints = match more.contains("default_hooks = ") {
        true => "",
        false => {
            "default_hooks = { checkpoint = { type = 'CheckpointHook', by_epoch = false, interval = 2 } }"
        }
    };
    let model = match more.contains("model = ") {
        true => "",
        false => RESNET,
    };
    let text = format!(
        "{more}
        resume = {resume}
        {model}
        train_dataloader = {{ batch_size = 8, dataset = {{ type = 'Digits', split = 'train' }} }}
        train_cfg = {{ type = 'IterBasedTrainLoop', max_iters = {steps}, val_interval = 3 }}
        {checkpoints}
        randomness = {{ seed = 3 }}"
    );
    Ok(from_config(Config::from_text("c.toml", text)?)?.work_dir(dir))
}

/// Trains; returns the last checkpoint.
fn run(dir: &Path, more: &str, steps: usize, resume: bool) -> PathBuf {
    built(dir, more, steps, resume).unwrap().train().unwrap();
    dir.join(format!("iter_{steps}"))
}

/// Tensors of a checkpoint's model, by name.
fn numbers(checkpoint: &Path) -> Vec<(String, Vec<f32>)> {
    numbers_of(&checkpoint.join("model.safetensors"))
}

/// Tensors of a file, which are f32.
fn numbers_of(file: &Path) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let read = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let words = view.data().as_chunks().0.iter();
        (name, words.map(|word| f32::from_le_bytes(*word)).collect())
    };
    let mut all: Vec<_> = tensors.tensors().into_iter().map(read).collect();
    all.sort_by(|a: &(String, Vec<f32>), b| a.0.cmp(&b.0));
    all
}

#[test]
fn run_on_the_gpu_matches_the_cpu_up_to_rounding() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let cpu = run(&dir.path().join("cpu"), OPTIM, 4, false);
    let gpu = format!("device = 'cuda'\n{OPTIM}");
    let gpu = run(&dir.path().join("gpu"), &gpu, 4, false);
    assert_close(&cpu, &gpu);
}

#[test]
fn compiled_run_on_the_gpu_matches_the_cpu_up_to_rounding() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let cpu = run(&dir.path().join("cpu"), OPTIM, 4, false);
    for backend in ["engine", "inductor"] {
        let gpu = format!("device = 'cuda'\ncompile = {{ backend = '{backend}' }}\n{OPTIM}");
        assert_close(&cpu, &run(&dir.path().join(backend), &gpu, 4, false));
    }
    // Rounding to eleven bits; and equal bits in each run.
    let amp = "device = 'cuda'\ncompile = true
        optim_wrapper = { type = 'AmpOptimWrapper', optimizer = { type = 'SGD', lr = 0.05, momentum = 0.9 } }";
    let [one, other] = ["one", "other"].map(|name| run(&dir.path().join(name), amp, 4, false));
    assert!(files(&one) == files(&other));
    assert_within(&cpu, &one, 0.05);
}

/// Files of model and optimizer in a checkpoint.
fn files(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let names = ["model", "optimizer", "ema", "gradients_0", "gradients_1"]
        .map(|n| format!("{n}.safetensors"));
    let read = |name: String| std::fs::read(checkpoint.join(&name)).ok().map(|bytes| (name, bytes));
    names.into_iter().filter_map(read).collect()
}

const GPU: &str = "device = 'cuda'";
const OFFLOADED: &str = "device = { type = 'cuda', offload_optimizer = true }";
const RESNET: &str = "model = { type = 'ResNet', width = 4, blocks = [1], stem_max_pool = true }";
const MLP: &str = "model = { type = 'Mlp', in_features = 64, hidden = [9], num_classes = 10 }";

/// Runs `steps` iterations with the optimizer on the GPU and on the host, both with gradients of
/// the GPU, and compares bits.
fn assert_same_bits(dir: &Path, rest: &str, steps: usize) -> Vec<(String, Vec<u8>)> {
    let run = |name: &str, device: &str| {
        let model = if rest.contains("model = ") { "" } else { MLP };
        files(&run(&dir.join(name), &format!("{device}\n{model}\n{rest}"), steps, false))
    };
    let (gpu, host) = (run("gpu", GPU), run("host", OFFLOADED));
    assert!(gpu.len() >= 2);
    for ((name, gpu), (_, host)) in gpu.iter().zip(&host) {
        assert!(gpu == host, "{name} differs: {rest}");
    }
    assert_eq!(gpu.len(), host.len());
    gpu
}

#[test]
fn optimizers_on_the_gpu_have_the_bits_of_the_host() {
    let _gpu = gpu::shared();
    for (optimizer, clip) in [
        ("'Adadelta'", "{ max_norm = 0.5 }"),
        ("'Adam', amsgrad = true", "{ type = 'value', clip_value = 0.01 }"),
        ("'AdamP'", "{ max_norm = 0.5 }"),
        ("'AdamW', lr = 0.01", "{ max_norm = 1e9 }"),
        ("'BertAdam', lr = 0.01", "{ max_norm = 0.5 }"),
        ("'Lamb', lr = 0.01", "{ max_norm = 0.5 }"),
        ("'RMSprop', momentum = 0.5", "{ max_norm = 0.5 }"),
        ("'RMSpropTF'", "{ max_norm = 0.5 }"),
        ("'SGD', lr = 0.1, momentum = 0.9", "{ max_norm = 0.5 }"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let rest = format!(
            "optim_wrapper = {{ type = 'OptimWrapper', optimizer = {{ type = {optimizer} }}, clip_grad = {clip} }}"
        );
        assert_same_bits(dir.path(), &rest, 2);
    }
}

/// An `AmpOptimWrapper` with these options of precision: parameter groups with their own rates,
/// schedules of rates and momentum, EMA of the model, and a norm in the log.
fn everything(precision: &str) -> String {
    format!(
        "optim_wrapper = {{ type = 'AmpOptimWrapper', {precision}, \
            optimizer = {{ type = 'AdamW', lr = 0.01 }}, clip_grad = {{ max_norm = 0.5 }}, \
            paramwise_cfg = {{ bias_lr_mult = 2, bias_decay_mult = 0 }} }}
        param_scheduler = [{{ type = 'LinearLR', start_factor = 0.5, end = 4, by_epoch = false }}, \
            {{ type = 'LinearMomentum', start_factor = 0.5, end = 4, by_epoch = false }}]
        custom_hooks = [{{ type = 'EMAHook', momentum = 0.1 }}]"
    )
}

/// A loss scale at which the first steps overflow.
const OVERFLOWS: &str = "loss_scale = { init_scale = 3e38, growth_interval = 2 }";

#[test]
fn mixed_precision_groups_schedules_and_averages_have_the_bits_of_the_host() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let twice = everything(&format!("accumulative_counts = 2, {OVERFLOWS}"));
    // The last of nine batches is a separate step.
    let files = assert_same_bits(&dir.path().join("twice"), &twice, 9);
    assert_eq!(files.len(), 3, "model, optimizer and average");
    let half = everything(&format!("half_parameters = true, {OVERFLOWS}"));
    assert_same_bits(&dir.path().join("half"), &half, 4);
    let parts = "optim_wrapper = { type = 'OptimWrapperDict', loss_scale = { init_scale = 1e38 }, \
        layers = { optimizer = { type = 'SGD', lr = 0.1 }, clip_grad = { max_norm = 0.1 } } }";
    assert_same_bits(&dir.path().join("parts"), parts, 4);
    assert_same_bits(&dir.path().join("several"), &format!("{RESNET}\n{SEVERAL}"), 4);
}

/// Makes a pixel infinite in batch 2, the first of two of a step, and in batch 5, the second.
struct Infinite;

impl Hook for Infinite {
    fn name(&self) -> &'static str {
        "Infinite"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> Result<()> {
        let inputs = batch.get("inputs")?;
        let ArrayData::U8(pixels) = inputs.data() else { panic!("not bytes") };
        let mut pixels: Vec<f32> = pixels.iter().map(|p| f32::from(*p) / 255.0).collect();
        if [2, 5].contains(&runner.position().iter) {
            pixels[5] = f32::INFINITY;
        }
        let inputs = Array::new(inputs.shape(), ArrayData::F32(pixels))?;
        *batch = std::mem::take(batch).with("inputs", inputs);
        Ok(())
    }
}

#[test]
fn buffers_of_skipped_steps_have_the_bits_of_the_host() {
    let _gpu = gpu::alone();
    let dir = tempfile::tempdir().unwrap();
    let amp = "optim_wrapper = { type = 'AmpOptimWrapper', accumulative_counts = 2, \
        loss_scale = { init_scale = 256 }, optimizer = { type = 'SGD', lr = 0.05, momentum = 0.9 } }
        custom_hooks = [{ type = 'EMAHook', momentum = 0.1, update_buffers = true }]";
    let run = |name: &str, device: &str| {
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let (dir, more) = (dir.path().join(name), format!("{device}\n{RESNET}\n{amp}"));
        let builder = builder(&dir, &more, 8, false).unwrap().hook(Box::new(Infinite));
        let mut runner = builder.process_group(group).build().unwrap();
        runner.train().unwrap();
        // Batches 2 and 3 are one step, batches 4 and 5 the next one.
        assert!((runner.optim_wrapper().loss_scale() - 64.0).abs() < 0.5);
        files(&dir.join("iter_8"))
    };
    let host = run("host", OFFLOADED);
    for (name, device) in [
        ("gpu", GPU.to_owned()),
        ("graph", format!("{GPU}\ncompile = {{ backend = 'cudagraphs' }}")),
    ] {
        assert!(run(name, &device) == host, "{name}");
    }
    let saved = numbers(&dir.path().join("gpu/iter_8"));
    for (name, values) in
        saved.iter().chain(&numbers_of(&dir.path().join("gpu/iter_8/ema.safetensors")))
    {
        assert!(values.iter().all(|x| x.is_finite()), "{name}");
    }
}

/// An optimizer for each of several parts of [`RESNET`], with a loss scale at which the first steps
/// overflow.
const SEVERAL: &str = "optim_wrapper = { type = 'OptimWrapperDict', accumulative_counts = 2, \
    loss_scale = { init_scale = 1e38, growth_interval = 2 }, \
    conv1 = { optimizer = { type = 'SGD', lr = 0.1, momentum = 0.9 } }, \
    bn1 = { optimizer = { type = 'Adam', lr = 0.01 }, clip_grad = { type = 'value', clip_value = 0.01 } }, \
    layer1 = { optimizer = { type = 'Lamb', lr = 0.01 }, clip_grad = { max_norm = 0.1 } }, \
    fc = { optimizer = { type = 'AdamW', lr = 0.01 } } }";

#[test]
fn run_resumes_on_host_and_gpu_alternately_at_any_batch() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    // Three batches per step: the checkpoints after two and four contain accumulated gradients.
    let rest = everything("accumulative_counts = 3, loss_scale = { init_scale = 256 }");
    let go_on = |name: &str, device: &str, from: Option<&Path>| {
        let from = from.map(|path| format!("load_from = '{}'\n", path.display()));
        let more = format!("{}{device}\n{MLP}\n{rest}", from.as_deref().unwrap_or_default());
        let dir = dir.path().join(name);
        run(&dir, &more, 8, from.is_some());
        dir
    };
    let whole = files(&go_on("whole", OFFLOADED, None).join("iter_8"));
    for devices in [[GPU, GPU, GPU], [GPU, OFFLOADED, GPU], [OFFLOADED, GPU, OFFLOADED]] {
        let mut from = None;
        for (at, device) in devices.into_iter().enumerate() {
            let name = format!("{}-{at}", devices.map(|device| device.len().to_string()).concat());
            let dir = go_on(&name, device, from.as_deref());
            assert!(files(&dir.join("iter_8")) == whole, "{devices:?} {at}");
            let next = dir.join(format!("iter_{}", 2 << at));
            let waiting = files(&next).iter().any(|(name, _)| name == "gradients_0.safetensors");
            assert_eq!(waiting, at < 2, "{}", next.display());
            from = Some(next);
        }
    }
}

#[test]
fn unsupported_options_of_an_optimizer_on_the_gpu_are_refused_by_name() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    for (clip, named) in [
        ("max_norm = 1, norm_type = 'inf'", "`clip_grad.norm_type`"),
        ("max_norm = 1, error_if_nonfinite = true", "`clip_grad.error_if_nonfinite`"),
    ] {
        let optim = OPTIM.replace("optimizer =", &format!("clip_grad = {{ {clip} }}, optimizer ="));
        let error = built(&dir.path().join("refused"), &format!("{GPU}\n{optim}"), 1, false);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(named) && error.contains("offload_optimizer = true"), "{error}");
        built(&dir.path().join("offloaded"), &format!("{OFFLOADED}\n{optim}"), 1, false).unwrap();
    }
    let config = Config::from_text(
        "c.toml",
        format!(
            "{GPU}\n{MLP}\n{OPTIM}
        train_dataloader = {{ batch_size = 8, dataset = {{ type = 'Digits', split = 'train' }} }}
        train_cfg = {{ type = 'IterBasedTrainLoop', max_iters = 1 }}"
        ),
    );
    let own = |count| fused_optim::Sgd::with_one_group(fused_optim::SgdHyper::default(), count);
    let builder = from_config(config.unwrap()).unwrap();
    let builder = builder.optim_wrapper(OptimWrapperFactory::fp32(own)).work_dir(dir.path());
    let error = builder.build().unwrap_err().to_string();
    assert!(error.contains("the optimizer `sgd` computes on cpu, not on cuda:0"), "{error}");
}

/// Runs the ranks as threads; each resumes if there is a checkpoint to load.
fn train_in(groups: Vec<ProcessGroup>, dir: &Path, more: &str, steps: usize) {
    train(groups, &|_| builder(dir, more, steps, more.contains("load_from = ")).unwrap());
}

fn train(groups: Vec<ProcessGroup>, builder: &(dyn Fn(usize) -> RunnerBuilder + Sync)) {
    std::thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let builder = builder(group.rank()).process_group(group);
                builder.build().unwrap().train().unwrap();
            });
        }
    });
}

/// Two ranks over host memory.
fn over_host() -> Vec<ProcessGroup> {
    ProcessGroup::threads(2, Duration::from_secs(60)).unwrap()
}

#[test]
fn two_ranks_on_one_gpu_match_two_on_the_cpu() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &str| {
        let dir = dir.path().join(name);
        train_in(over_host(), &dir, more, 4);
        dir.join("iter_4")
    };
    let gpu = run("gpu", &format!("{GPU}\n{OPTIM}"));
    assert_close(&run("cpu", OPTIM), &gpu);
    assert!(files(&gpu) == files(&run("offloaded", &format!("{OFFLOADED}\n{OPTIM}"))));
}

fn assert_close(cpu: &Path, gpu: &Path) {
    assert_within(cpu, gpu, 1e-3);
}

fn assert_within(cpu: &Path, gpu: &Path, within: f32) {
    let (cpu, gpu) = (numbers(cpu), numbers(gpu));
    assert!(!cpu.is_empty() && cpu.len() == gpu.len());
    for ((name, cpu), (of, gpu)) in cpu.iter().zip(&gpu) {
        assert_eq!((name, cpu.len()), (of, gpu.len()));
        let largest = cpu.iter().fold(1e-3_f32, |most, x| most.max(x.abs()));
        let apart = cpu.iter().zip(gpu).fold(0_f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(apart <= within * largest, "{name} is off by {apart} of {largest}");
    }
}

#[test]
fn run_on_the_gpu_resumes_from_its_checkpoint() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let amp = "device = 'cuda'
        optim_wrapper = { type = 'AmpOptimWrapper', loss_scale = { init_scale = 256 }, \
        optimizer = { type = 'AdamW', lr = 0.01 }, accumulative_counts = 2 }";
    let whole = run(&dir.path().join("whole"), amp, 4, false);
    let half = run(&dir.path().join("parts"), amp, 2, false);
    let parts = run(&dir.path().join("parts"), amp, 4, true);
    assert_eq!(numbers(&whole), numbers(&parts));
    let weights = |of: &Path| numbers(of).into_iter().find(|(name, _)| name == "fc.weight");
    assert_ne!(weights(&half), weights(&whole), "no step was taken");
}

#[test]
fn kernels_and_autotuning_are_applied() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let tuned = format!("{GPU}\ncompile = {{ mode = 'max-autotune' }}\n{OPTIM}");
    let mut tuned = built(&dir.path().join("tuned"), &tuned, 1, false).unwrap();
    tuned.train().unwrap();
    let report = tuned.engine_mut().compile_report().unwrap().to_string();
    for applied in [
        "kernels of this engine for tensors of f32, f16 and bf16 of fewer than 2^31 elements, ",
        "autotuning of the optimizer: f32 weights by up to ",
    ] {
        assert!(report.contains(applied), "{report}");
    }
    // With cuDNN, and without.
    let searched = ["autotuning of cuDNN's convolutions", "autotuning of the model's kernels: "];
    assert!(searched.iter().any(|text| report.contains(text)), "{report}");
    assert!(report.contains("forward and backward as one CUDA graph: not yet"), "{report}");
}

/// In a process whose fake GPU has an older compute capability.
#[test]
fn bfloat16_on_a_gpu_without_it_is_an_error_that_names_the_compute_capability() {
    if counts::of_the_fake(c"fake_calls").is_none() {
        return;
    }
    if std::env::var_os("FAKE_GPU_CAPABILITY").is_none() {
        let test =
            "device::bfloat16_on_a_gpu_without_it_is_an_error_that_names_the_compute_capability";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env("FAKE_GPU_CAPABILITY", "75");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let train = |dtype: &str| {
        let amp = format!(
            "{GPU}\ncompile = true\n{MLP}\noptim_wrapper = {{ type = 'AmpOptimWrapper', dtype = '{dtype}', \
             optimizer = {{ type = 'SGD', lr = 0.05 }} }}"
        );
        built(&dir.path().join(dtype), &amp, 1, false).and_then(|mut run| run.train())
    };
    train("float16").unwrap();
    let text = train("bfloat16").unwrap_err().to_string();
    let wanted = "autocast on cuda:0: bf16 needs a GPU of compute capability 8.0 or later, this one has 7.5: use f16";
    assert!(text.contains(wanted), "{text}");
}
