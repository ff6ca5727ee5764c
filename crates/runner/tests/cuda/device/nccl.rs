//! Two ranks on one GPU whose gradients are averaged by NCCL, compared with averages on the host:
//! equal bits.

use std::ffi::CStr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Module};
use collective::ProcessGroup;
use runner::engine::candle::nn::{Linear, linear};
use runner::engine::candle::{CandleEngine, CandleModel, Loss, Outputs, TensorBatch, ops};

use super::counts::of_the_fake;
use super::{
    GPU, MLP, OFFLOADED, OPTIM, OVERFLOWS, RESNET, SEVERAL, builder, everything, files, over_host,
    train, train_in,
};
use crate::gpu;
use crate::nccl::ranks;

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn unsupported_options_of_nccl_averages_are_refused_by_name() {
    let _gpu = gpu::shared();
    for (option, named) in [
        ("static_graph = true", "`static_graph`"),
        ("comm_hook = 'powerSGD'", "`comm_hook = \"powerSGD\"`"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let more =
            |device: &str| format!("{device}\n{MLP}\n{OPTIM}\nmodel_wrapper_cfg = {{ {option} }}");
        let errors: Vec<String> = std::thread::scope(|scope| {
            let ranks: Vec<_> = ranks()
                .unwrap()
                .into_iter()
                .map(|group| {
                    let (dir, more) = (dir.path(), more(GPU));
                    scope.spawn(move || {
                        let builder = builder(dir, &more, 1, false).unwrap();
                        builder.process_group(group).build().unwrap_err().to_string()
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        // A rank may receive the other's error first.
        assert!(errors.iter().any(|error| error.contains(named)), "{errors:?}");
        train_in(ranks().unwrap(), &dir.path().join("offloaded"), &more(OFFLOADED), 1);
    }
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn averages_over_nccl_equal_the_hosts() {
    let _gpu = gpu::shared();
    let amp = everything(&format!("accumulative_counts = 3, {OVERFLOWS}"));
    let half = everything(&format!("half_parameters = true, {OVERFLOWS}"));
    let wrapped =
        |wrapper: &str, rest: &str| format!("model_wrapper_cfg = {{ {wrapper} }}\n{rest}");
    let small = "type = 'MMDistributedDataParallel', bucket_cap_mb = 0.001";
    for (name, rest) in [
        ("plain", OPTIM.to_owned()),
        ("amp", amp.clone()),
        ("half", half),
        ("buckets", wrapped(small, &amp)),
        ("unused", wrapped(&format!("{small}, find_unused_parameters = true"), &amp)),
        ("fp16", wrapped("comm_hook = 'fp16_compress'", &amp)),
        ("bf16", wrapped("comm_hook = 'bf16_compress'", OPTIM)),
        ("parts", wrapped("type = 'MMSeparateDistributedDataParallel'", OPTIM)),
        ("separate", wrapped("type = 'MMSeparateDistributedDataParallel'", &amp)),
        (
            "value",
            OPTIM.replace(
                "optimizer =",
                "clip_grad = { type = 'value', clip_value = 0.01 }, optimizer =",
            ),
        ),
        ("dict", format!("{RESNET}\n{SEVERAL}")),
        ("statistics", format!("{RESNET}\n{VALIDATED}\n{OPTIM}")),
        (
            "rank 0's",
            format!("{RESNET}\n{VALIDATED}\n{}", wrapped("broadcast_buffers = true", &amp)),
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = if rest.contains("model = ") { "" } else { MLP };
        let more = format!("{GPU}\n{model}\n{rest}");
        let run = |on: &str, groups| {
            let dir = dir.path().join(on);
            train_in(groups, &dir, &more, 8);
            files(&dir.join("iter_8"))
        };
        let host = run("host", over_host());
        assert!(run("nccl", ranks().unwrap()) == host, "{name}");
    }
}

/// Validations, before which running statistics are averaged over ranks.
const VALIDATED: &str =
    "val_dataloader = { batch_size = 100, dataset = { type = 'Digits', split = 'test' } }
    val_evaluator = { type = 'Accuracy' }";

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn run_resumes_during_accumulation_with_nccl_and_without() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    // Three batches per step: of the first four, the fourth is accumulated.
    let rest = everything("accumulative_counts = 3, loss_scale = { init_scale = 256 }");
    let run = |name: &str, groups, from: &str| {
        let dir = dir.path().join(name);
        let load = if from.is_empty() { String::new() } else { format!("load_from = '{from}'\n") };
        train_in(groups, &dir, &format!("{load}{GPU}\n{MLP}\n{rest}"), 8);
        dir
    };
    let whole = run("whole", ranks().unwrap(), "");
    let names: Vec<_> = files(&whole.join("iter_4")).into_iter().map(|(name, _)| name).collect();
    assert!(names.contains(&"gradients_1.safetensors".to_owned()), "{names:?}");
    let from = whole.join("iter_4").display().to_string();
    for (name, groups) in [("nccl", ranks().unwrap()), ("host", over_host())] {
        let gone_on = run(name, groups, &from);
        for at in ["iter_6", "iter_8"] {
            assert!(files(&gone_on.join(at)) == files(&whole.join(at)), "{name}, {at}");
        }
        assert!(!gone_on.join("iter_4").exists(), "{name}: it started from the beginning");
    }
}

/// A model of two branches; a pass may skip the second.
struct Branches {
    first: Linear,
    second: Linear,
    passes: AtomicUsize,
    rank: usize,
}

impl CandleModel for Branches {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let x = batch.get("inputs")?.to_dtype(DType::F32)?.flatten_from(1)?;
        let pass = self.passes.fetch_add(1, Ordering::Relaxed);
        let mut logits = self.first.forward(&x)?;
        // Both ranks skip it in every fifth pass, the second rank also in every third.
        if pass % 5 != 1 && (self.rank == 0 || !pass.is_multiple_of(3)) {
            logits = (logits + self.second.forward(&x)?)?;
        }
        Ok(Loss::new(ops::cross_entropy(&logits, batch.get("labels")?)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Err(candle_core::Error::Msg("it is only trained".into()))
    }
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn parameter_unused_in_a_pass_or_on_a_rank_is_averaged_as_on_the_host() {
    let _gpu = gpu::shared();
    let wrapper = "model_wrapper_cfg = { find_unused_parameters = true, bucket_cap_mb = 0.001 }";
    let scale = "loss_scale = { init_scale = 256 }";
    for (name, optim) in [
        ("plain", OPTIM.to_owned()),
        ("amp", everything(scale)),
        ("accumulate", everything(&format!("accumulative_counts = 2, {scale}"))),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let run = |on: &str, groups: Vec<ProcessGroup>| {
            let dir = dir.path().join(on);
            let more = format!("{GPU}\n{wrapper}\n{optim}");
            train(groups, &|rank| {
                let model = CandleEngine::factory(move |vb| {
                    Ok(Branches {
                        first: linear(64, 10, vb.pp("first"))?,
                        second: linear(64, 10, vb.pp("second"))?,
                        passes: AtomicUsize::new(0),
                        rank,
                    })
                });
                builder(&dir, &more, 12, false).unwrap().model(model)
            });
            files(&dir.join("iter_12"))
        };
        assert!(run("nccl", ranks().unwrap()) == run("host", over_host()), "{name}");
    }
}

/// Number of blocks that one of two ranks launches in `steps` steps over NCCL: for statistics after
/// a bucket, and before a step.
fn stats_blocks(dir: &Path, more: &str, steps: usize) -> [u64; 2] {
    let of = |group: ProcessGroup| {
        let count =
            || [c"grad_stats", c"finish_grad_stats"].map(|kernel| launched(kernel).unwrap());
        let before = count();
        let builder = builder(dir, more, steps, false).unwrap().process_group(group);
        builder.build().unwrap().train().unwrap();
        std::array::from_fn(|at| count()[at] - before[at])
    };
    std::thread::scope(|scope| {
        let ranks = ranks().unwrap().into_iter().map(|group| scope.spawn(move || of(group)));
        let ranks: Vec<[u64; 2]> =
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0]
    })
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn statistics_are_computed_once_after_each_bucket() {
    let _gpu = gpu::shared();
    let dir = tempfile::tempdir().unwrap();
    let amp = "type = 'AmpOptimWrapper', optimizer = { type = 'AdamW' }";
    let clip = "clip_grad = { max_norm = 1 }, optimizer = { type = 'AdamW' }";
    let value = &clip.replace("max_norm", "type = 'value', clip_value");
    let parts = "type = 'OptimWrapperDict', layers = { optimizer = { type = 'SGD', lr = 0.1 }, \
        clip_grad = { max_norm = 0.1 } }";
    for (name, optim, wrapper, takes_stats) in [
        ("plain", "optimizer = { type = 'AdamW' }", "", false),
        ("value", value, "", false),
        ("amp", amp, "", true),
        ("clip", clip, "", true),
        ("separate", clip, "type = 'MMSeparateDistributedDataParallel'", true),
        ("fp16", amp, "comm_hook = 'fp16_compress'", true),
        ("accumulate", &format!("accumulative_counts = 2, {amp}"), "", true),
        ("parts", parts, "", false),
    ] {
        let more = format!(
            "{GPU}\nmodel_wrapper_cfg = {{ {wrapper} }}
            model = {{ type = 'Mlp', in_features = 64, hidden = [2999], num_classes = 10 }}
            optim_wrapper = {{ {optim} }}"
        );
        // The first step has other buckets, and computes all statistics itself.
        let of = |steps| stats_blocks(&dir.path().join(format!("{name}-{steps}")), &more, steps);
        let (few, many) = (of(4), of(8));
        let [behind, before] = [many[0] - few[0], many[1] - few[1]];
        let steps = if name == "accumulate" { 2 } else { 4 };
        assert_eq!(behind > 0, takes_stats, "{name}: {behind} blocks behind buckets");
        // A step that reads no gradients for statistics launches one block.
        let reads = name == "parts";
        assert_eq!(before > steps, reads, "{name}: {before} blocks in {steps} steps");
    }
}

/// Number of blocks of an optimizer's kernel that this thread launched on the fake GPU.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
fn launched(kernel: &CStr) -> Option<u64> {
    let address = of_the_fake(c"fake_gpu_blocks")?;
    // SAFETY: the function of this name takes a C string and returns a word.
    let launched = unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(*const libc::c_char) -> u64>(address)
    };
    Some(launched(kernel.as_ptr()))
}
