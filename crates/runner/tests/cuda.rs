//! `device = "cuda"` through whole runs, beside the same on the CPU. Where there is no GPU, it is said that
//! they are left out.

#![cfg(feature = "candle-cuda")]
#![expect(clippy::unwrap_used, reason = "a test")]
#![expect(clippy::print_stderr, reason = "a test says why it is ignored")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use runner::{Result, Runner, RunnerBuilder};
use safetensors::SafeTensors;

const OPTIM: &str = "optim_wrapper = { type = 'OptimWrapper', optimizer = { type = 'SGD', lr = 0.05, momentum = 0.9 } }";

/// A small residual network on the digits, for some steps.
fn built(dir: &Path, more: &str, steps: usize, resume: bool) -> Result<Runner> {
    let group = ProcessGroup::threads(1, Duration::from_secs(60))?.remove(0);
    built_in(group, dir, more, steps, resume)
}

fn built_in(
    group: ProcessGroup,
    dir: &Path,
    more: &str,
    steps: usize,
    resume: bool,
) -> Result<Runner> {
    let text = format!(
        "{more}
        resume = {resume}
        model = {{ type = 'ResNet', width = 4, blocks = [1], stem_max_pool = true }}
        train_dataloader = {{ batch_size = 8, dataset = {{ type = 'Digits', split = 'train' }} }}
        train_cfg = {{ type = 'IterBasedTrainLoop', max_iters = {steps} }}
        default_hooks = {{ checkpoint = {{ type = 'CheckpointHook', by_epoch = false, interval = 2 }} }}
        randomness = {{ seed = 3 }}"
    );
    let builder = RunnerBuilder::from_config(Config::from_text("c.toml", text)?)?;
    builder.work_dir(dir).process_group(group).build()
}

/// Its last checkpoint.
fn run(dir: &Path, more: &str, steps: usize, resume: bool) -> PathBuf {
    built(dir, more, steps, resume).unwrap().train().unwrap();
    dir.join(format!("iter_{steps}"))
}

/// Why there is no GPU, if there is none.
fn missing() -> bool {
    let found = candle_core::Device::new_cuda_with_stream(0);
    found.inspect_err(|why| eprintln!("ignored: no GPU here: {why}")).is_err()
}

/// The numbers of a checkpoint's model, by name.
fn numbers(checkpoint: &Path) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(checkpoint.join("model.safetensors")).unwrap();
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
fn a_run_on_the_gpu_is_the_cpus_but_for_rounding() {
    if missing() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cpu = run(&dir.path().join("cpu"), OPTIM, 4, false);
    let gpu = format!("device = 'cuda'\n{OPTIM}");
    let gpu = run(&dir.path().join("gpu"), &gpu, 4, false);
    assert_close(&cpu, &gpu);
}

#[test]
fn two_ranks_on_one_gpu_are_two_on_the_cpu() {
    if missing() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &str| {
        let dir = dir.path().join(name);
        std::thread::scope(|scope| {
            for group in ProcessGroup::threads(2, Duration::from_secs(60)).unwrap() {
                let dir = &dir;
                scope.spawn(move || {
                    built_in(group, dir, more, 4, false).unwrap().train().unwrap();
                });
            }
        });
        dir.join("iter_4")
    };
    assert_close(&run("cpu", OPTIM), &run("gpu", &format!("device = 'cuda'\n{OPTIM}")));
}

fn assert_close(cpu: &Path, gpu: &Path) {
    let (cpu, gpu) = (numbers(cpu), numbers(gpu));
    assert!(!cpu.is_empty() && cpu.len() == gpu.len());
    for ((name, cpu), (of, gpu)) in cpu.iter().zip(&gpu) {
        assert_eq!((name, cpu.len()), (of, gpu.len()));
        let largest = cpu.iter().fold(1e-3_f32, |most, x| most.max(x.abs()));
        let apart = cpu.iter().zip(gpu).fold(0_f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(apart <= 1e-3 * largest, "{name} is off by {apart} of {largest}");
    }
}

#[test]
fn a_run_on_the_gpu_goes_on_from_its_checkpoint() {
    if missing() {
        return;
    }
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
fn a_graph_is_refused_and_nothing_called_applied() {
    if missing() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let compile = |options: &str| format!("device = 'cuda'\ncompile = {{ {options} }}\n{OPTIM}");
    let error = built(&dir.path().join("graph"), &compile("fullgraph = true"), 1, false);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no step on cuda:0 is one graph"), "{error}");
    let tuned = compile("mode = 'max-autotune'");
    let mut tuned = built(&dir.path().join("tuned"), &tuned, 1, false).unwrap();
    tuned.train().unwrap();
    let report = tuned.engine_mut().compile_report().unwrap().to_string();
    assert!(report.starts_with("compile: applied: nothing. Not applied: "), "{report}");
    for left_out in ["a search: ", "whole steps as one launch: candle allocates"] {
        assert!(report.contains(left_out), "{report}");
    }
}
