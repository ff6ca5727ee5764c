//! The examples of MMEngine's pages on distributed training, on speeding up training and on model
//! wrappers, and of torch_npu's page on its fused optimizers: each has an equivalent here, which
//! trains.
//!
//! Python configurations of the pages are TOML here, and
//! `python -m torch.distributed.launch ... PROGRAM` is `runner launch ... -- PROGRAM`.
//! `TORCH_PYTHON` is a Python that can import torch.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_nn::{Linear, Module, VarBuilder, linear};
use collective::{ProcessGroup, reducer::ReducerOptions};
use runner::Result;
use runner::config::Config;
use runner::engine::candle::{
    CandleEngine, CandleModel, Loss, Outputs, TensorBatch, candle_core, candle_nn, ops,
};
use runner::engine::{Model, StepContext};
use runner::model::{DistributedDataParallel, MODEL_WRAPPERS, MODELS, ModelWrapper, WrapperOver};

use crate::common::from_config;

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");

/// Configuration without optimizer: twenty iterations on the digits, each recorded in
/// `scalars.json`.
const JOB: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [16], num_classes = 10 }
train_dataloader = { batch_size = 32, dataset = { type = "Digits" } }
train_cfg = { by_epoch = false, max_iters = 20 }
default_hooks.logger.interval = 1
randomness.seed = 5
"#;

const SGD: &str = r#"
optim_wrapper = { type = "OptimWrapper", optimizer = { type = "SGD", lr = 0.1, momentum = 0.9 } }
"#;

/// A directory for runs with one configuration.
struct Job {
    dir: tempfile::TempDir,
    config: PathBuf,
}

impl Job {
    fn new(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.toml");
        std::fs::write(&path, config).unwrap();
        Self { dir, config: path }
    }

    fn work_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts `launcher`, whose ranks train in the work directory `name`.
    fn start(
        &self,
        name: &str,
        launcher: &[&str],
        more: &[&str],
        envs: &[(&str, &str)],
    ) -> Running {
        let work_dir = self.work_dir(name).display().to_string();
        let config = self.config.display().to_string();
        let ranks = [launcher, &["train", &config, "--work-dir", &work_dir], more].concat();
        Running::start(&ranks, envs)
    }

    fn train(&self, name: &str, launcher: &[&str], more: &[&str], envs: &[(&str, &str)]) {
        self.start(name, launcher, more, envs).succeeds(name);
    }

    /// Trains on two ranks started by `runner launch`, as the reference for others.
    fn train_reference(&self) {
        self.train("reference", &[RUNNER, "launch", "--nproc_per_node", "2", "--"], &[], &[]);
    }

    /// Checks that run `name` had two ranks and ended with the reference's parameters.
    fn assert_same(&self, name: &str) {
        let end = |name: &str, file: &str| {
            std::fs::read(self.work_dir(name).join("iter_20").join(file)).unwrap()
        };
        let state: serde_json::Value = serde_json::from_slice(&end(name, "state.json")).unwrap();
        assert_eq!(state["world_size"], 2, "{name}");
        let model = "model.safetensors";
        assert!(end(name, model) == end("reference", model), "{name} trained something else");
    }
}

/// A command that is terminated after a timeout, or when dropped.
struct Running(Child);

impl Running {
    fn start(words: &[&str], envs: &[(&str, &str)]) -> Self {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", "240"]).args(words);
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"] {
            command.env_remove(variable);
        }
        command
            .env("RAYON_NUM_THREADS", "1")
            .env("OMP_NUM_THREADS", "1")
            .envs(envs.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn succeeds(mut self, name: &str) {
        let mut said = String::new();
        let mut stderr = self.0.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{name}: {status}\n{said}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

/// ```text
/// python -m torch.distributed.launch --nproc_per_node=8 \
///     examples/distributed_training.py --launcher pytorch
/// ```
///
/// Also with `CUDA_VISIBLE_DEVICES=0,3` and `--nproc_per_node=2`.
#[test]
fn distributed_launch_and_visible_devices() {
    let name = "experiment_name = 'on_{{ $CUDA_VISIBLE_DEVICES:all }}'\n\
                default_hooks.logger.interval_exp_name = 10\n";
    let job = Job::new(&format!("{name}{JOB}{SGD}"));
    job.train_reference();
    let launch = [RUNNER, "launch", "--nproc_per_node=2", "--"];
    job.train("pytorch", &launch, &["--launcher", "pytorch"], &[]);
    job.assert_same("pytorch");
    let devices = [("CUDA_VISIBLE_DEVICES", "0,3")];
    job.train("devices", &launch, &["--launcher", "pytorch"], &devices);
    job.assert_same("devices");
    // One rank per visible device.
    job.train("gpu", &[RUNNER, "launch", "--nproc_per_node=gpu", "--"], &[], &devices);
    job.assert_same("gpu");
    // The ranks saw the launcher's variable.
    let log = log(&job.work_dir("devices"));
    assert!(log.contains("Exp name: on_0,3_"), "{log}");
}

/// ```text
/// python -m torch.distributed.launch --nnodes 8 --node_rank 0 --master_addr 127.0.0.1 \
///     --master_port 29500 --nproc_per_node=8 ...
/// ```
///
/// On each node with its own rank.
#[test]
fn several_nodes() {
    let job = Job::new(&format!("{JOB}{SGD}"));
    job.train_reference();
    let port = free_port();
    let node = |rank: &'static str| {
        let place = ["--master_addr", "127.0.0.1", "--master_port", &port, "--nproc_per_node=1"];
        let nodes =
            [&[RUNNER, "launch", "--nnodes", "2", "--node_rank", rank][..], &place, &["--"]];
        job.start("nodes", &nodes.concat(), &["--launcher", "pytorch"], &[])
    };
    let nodes = ["0", "1"].map(node);
    for (rank, node) in nodes.into_iter().enumerate() {
        node.succeeds(&format!("node {rank}"));
    }
    job.assert_same("nodes");
}

/// ```text
/// srun -p mm_dev --job-name=test --gres=gpu:8 --ntasks=16 --ntasks-per-node=8 \
///     --cpus-per-task=5 --kill-on-bad-exit=1 python examples/distributed_training.py \
///     --launcher="slurm"
/// ```
///
/// Tested with the environment of two tasks. (`launchers.rs` runs it on a cluster, if available.)
#[test]
fn tasks_of_slurm() {
    let job = Job::new(&format!("{JOB}{SGD}"));
    job.train_reference();
    let port = free_port();
    let task = |rank: &'static str| {
        let envs = [
            ("SLURM_JOB_ID", "17"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "localhost"),
            ("SLURM_STEP_NUM_NODES", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_NODEID", "0"),
            ("SLURM_PROCID", rank),
            ("SLURM_LOCALID", rank),
            ("MASTER_PORT", &port),
        ];
        job.start("slurm", &[RUNNER], &["--launcher=slurm"], &envs)
    };
    let tasks = ["0", "1"].map(task);
    tasks.into_iter().enumerate().for_each(|(rank, task)| task.succeeds(&format!("task {rank}")));
    job.assert_same("slurm");
}

/// Path of an example's program.
fn example(name: &str) -> String {
    let program = Path::new(RUNNER).with_file_name("examples").join(name);
    assert!(
        program.is_file(),
        "{} is not there: cargo build -p gradstack-runner --examples",
        program.display()
    );
    program.display().to_string()
}

/// Metric of a run's last validation.
fn accuracy(dir: &Path) -> f64 {
    let log = log(dir);
    let last = log.rsplit("accuracy: ").next().unwrap().split(' ').next().unwrap();
    last.parse().unwrap_or_else(|_| panic!("no accuracy: {log}"))
}

/// `examples/train.rs`: a program without registered components.
#[test]
fn user_program_trains() {
    let program = example("train");
    let dir = tempfile::tempdir().unwrap();
    let work_dir = dir.path().display().to_string();
    let launch = [RUNNER, "launch", "--nproc-per-node=2", "--", &program, &work_dir];
    Running::start(&launch, &[]).succeeds("train");
    assert!(accuracy(dir.path()) > 90.0);
}

/// Trains `examples/distributed_training.rs` for an epoch; returns its model.
fn train_the_example(dir: &Path, name: &str, launcher: &[&str], more: &[&str]) -> Vec<u8> {
    let dir = dir.join(name);
    let (program, work_dir) = (example("distributed_training"), dir.display().to_string());
    let ranks = [launcher, &[&program, "--epochs=1", "--work-dir", &work_dir], more].concat();
    Running::start(&ranks, &[]).succeeds(name);
    assert!(accuracy(&dir) > 60.0, "{name}");
    std::fs::read(dir.join("epoch_1/model.safetensors")).unwrap()
}

const OURS: [&str; 4] = [RUNNER, "launch", "--nproc-per-node=2", "--"];

#[test]
fn example_trains_on_one_rank_and_on_two() {
    let dir = tempfile::tempdir().unwrap();
    let train = |name, launcher| train_the_example(dir.path(), name, launcher, &[]);
    assert!(train("ours", &OURS[..]) != train("alone", &[]), "two ranks are not one");
}

/// The example under another launcher yields the same bits as under ours.
fn assert_example_matches_under(launcher: &[&str], kind: &str) {
    let dir = tempfile::tempdir().unwrap();
    let ours = train_the_example(dir.path(), "ours", &OURS, &[]);
    let theirs = train_the_example(dir.path(), "theirs", launcher, &["--launcher", kind]);
    assert!(theirs == ours, "{launcher:?}");
}

#[test]
#[ignore = "needs Debian's openmpi-bin"]
fn example_under_open_mpi() {
    let mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"];
    assert_example_matches_under(&mpirun, "mpi");
}

#[test]
#[ignore = "needs Debian's mpich"]
fn example_under_mpich() {
    assert_example_matches_under(&["mpiexec.mpich", "-n", "2"], "mpi");
}

#[test]
#[ignore = "needs PyTorch: TORCH_PYTHON, or python3, imports torch"]
fn example_under_torchrun() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"];
    assert_example_matches_under(
        &[&[&python[..]], &torchrun[..], &["--no-python"]].concat(),
        "pytorch",
    );
}

/// Log of rank 0 in `dir`.
fn log(dir: &Path) -> String {
    files(dir, "log")
}

/// All files below `dir` with an extension, concatenated.
fn files(dir: &Path, extension: &str) -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all += &files(&path, extension);
        } else if path.extension().is_some_and(|e| e == extension) {
            all += &std::fs::read_to_string(path).unwrap();
        }
    }
    all
}

/// Result of a run on threads.
struct Trained {
    dir: tempfile::TempDir,
    outcome: Vec<Result<()>>,
}

impl Trained {
    fn new(config: &str, ranks: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let groups = ProcessGroup::threads(ranks, Duration::from_secs(60)).unwrap();
        let rank = |group: ProcessGroup| {
            let config = Config::from_text("job.toml", config)?;
            let builder = from_config(config)?.work_dir(dir.path());
            builder.process_group(group).build()?.train().map(drop)
        };
        let outcome = std::thread::scope(|scope| {
            let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(|| rank(g))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        Self { dir, outcome }
    }

    /// Values of a scalar by iteration; losses are means over ten.
    fn scalar(&self, name: &str) -> Vec<f64> {
        let stamped = std::fs::read_dir(self.dir.path()).unwrap().map(|e| e.unwrap().path());
        let scalars = stamped.map(|dir| dir.join("vis_data/scalars.json")).find(|f| f.is_file());
        let text = std::fs::read_to_string(scalars.unwrap()).unwrap();
        let lines =
            text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter_map(|line| line[name].as_f64()).collect()
    }

    /// Checks that the loss is finite throughout and lower at the end.
    fn learned(&self, what: &str) {
        for outcome in &self.outcome {
            outcome.as_ref().unwrap();
        }
        let loss = self.scalar("loss");
        assert!(loss.len() == 20 && loss.iter().all(|loss| loss.is_finite()), "{what}: {loss:?}");
        assert!(loss[19] < loss[0], "{what}: {loss:?}");
    }
}

/// `optim_wrapper=dict(type='AmpOptimWrapper', optimizer=...)`, `dtype` 'float16', 'bfloat16' or
/// None.
#[test]
fn amp_in_every_dtype() {
    for (dtype, scaled) in [("float16", true), ("bfloat16", false), ("None", true)] {
        let amp = format!(
            "[optim_wrapper]\ntype = 'AmpOptimWrapper'\ndtype = '{dtype}'\n\
             optimizer = {{ type = 'SGD', lr = 0.1, momentum = 0.9 }}\n"
        );
        let run = Trained::new(&format!("{JOB}{amp}"), 1);
        run.learned(dtype);
        let scale = run.scalar("loss_scale");
        assert_eq!(!scale.is_empty(), scaled, "{dtype}");
        assert!(scale.iter().all(|scale| *scale >= 1.0), "{dtype}: {scale:?}");
    }
    // Shortest form on the page.
    let short =
        "[optim_wrapper]\ntype = 'AmpOptimWrapper'\noptimizer = { type = 'SGD', lr = 0.1 }\n";
    Trained::new(&format!("{JOB}{short}"), 1).learned("no dtype");
}

/// `cfg=dict(compile=True)`, and `compile=dict(backend='inductor', mode='max-autotune')`.
#[test]
fn compile_true_and_by_table() {
    for (compile, said) in [
        ("true", "autotuning"),
        ("{ backend = 'inductor', mode = 'max-autotune' }", "backend `inductor`"),
    ] {
        let run = Trained::new(&format!("compile = {compile}\n{JOB}{SGD}"), 1);
        run.learned(compile);
        assert!(log(run.dir.path()).contains(said), "{}", log(run.dir.path()));
    }
    let run = Trained::new(&format!("compile = false\n{JOB}{SGD}"), 1);
    run.learned("not compiled");
    assert!(!log(run.dir.path()).contains("search"));
}

/// `optimizer=dict(type='NpuFusedSGD', lr=0.1, ...)`, for each of the nine optimizers.
#[test]
fn npu_fused_optimizers() {
    for (name, options) in [
        ("NpuFusedAdadelta", "lr = 1.0"),
        ("NpuFusedAdam", "lr = 0.01"),
        ("NpuFusedAdamP", "lr = 0.01"),
        ("NpuFusedAdamW", "lr = 0.01"),
        ("NpuFusedBertAdam", "lr = 0.05"),
        ("NpuFusedLamb", "lr = 0.01"),
        ("NpuFusedRMSprop", "lr = 0.003"),
        ("NpuFusedRMSpropTF", "lr = 0.05"),
        ("NpuFusedSGD", "lr = 0.1, momentum = 0.9, weight_decay = 0.0001"),
    ] {
        let optimizer = format!("{{ type = '{name}', {options} }}");
        let optim =
            format!("optim_wrapper = {{ type = 'OptimWrapper', optimizer = {optimizer} }}\n");
        Trained::new(&format!("{JOB}{optim}"), 1).learned(name);
    }
}

/// A model with a layer that its loss does not depend on.
struct Idle(Linear, Linear);

impl Idle {
    fn logits(&self, batch: &TensorBatch) -> candle_core::Result<candle_core::Tensor> {
        let x = batch.get("inputs")?.flatten_from(1)?.to_dtype(candle_core::DType::F32)?;
        self.0.forward(&(x / 255.0)?)
    }
}

impl CandleModel for Idle {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        Ok(Loss::new(ops::cross_entropy(&self.logits(batch)?, batch.get("labels")?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> candle_core::Result<Outputs> {
        let _ = &self.1;
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

/// `model_wrapper_cfg=dict(type='MMDistributedDataParallel', find_unused_parameters=True)`.
#[test]
fn unused_parameters() {
    let build = |vb: VarBuilder<'static>| {
        Ok(Idle(linear(64, 10, vb.pp("used"))?, linear(10, 10, vb.pp("unused"))?))
    };
    MODELS.register("Idle", move |_| Ok(CandleEngine::factory(build))).unwrap();
    let model = "model = { type = \"Idle\" }\n";
    let (_, job) = JOB.trim_start().split_once('\n').unwrap();
    let wrapper = |find: bool| {
        format!(
            "[model_wrapper_cfg]\ntype = 'MMDistributedDataParallel'\nfind_unused_parameters = {find}\n"
        )
    };
    Trained::new(&format!("{model}{job}{SGD}{}", wrapper(true)), 2).learned("find");
    // Short form of the same option.
    let short = "find_unused_parameters = true\n";
    Trained::new(&format!("{short}{model}{job}{SGD}"), 2).learned("short");
    for outcome in Trained::new(&format!("{model}{job}{SGD}{}", wrapper(false)), 2).outcome {
        let said = outcome.unwrap_err().to_string();
        assert!(said.contains("unused.weight") && said.contains("unused.bias"), "{said}");
    }
}

/// Number of forward passes seen by [`MyDdp`].
static FORWARDS: AtomicUsize = AtomicUsize::new(0);

/// The user-defined wrapper on the page.
struct MyDdp(DistributedDataParallel);

impl WrapperOver for MyDdp {
    type Inner = DistributedDataParallel;

    fn inner(&self) -> &Self::Inner {
        &self.0
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut self.0
    }

    fn prepare(
        &mut self,
        engine: Option<&mut dyn Model>,
        cx: &mut StepContext<'_>,
    ) -> train_step::Result<()> {
        // Relaxed: read after the ranks have been joined.
        FORWARDS.fetch_add(1, Ordering::Relaxed);
        self.0.prepare(engine, cx)
    }
}

/// `@MODEL_WRAPPERS.register_module() class MyDDP(...)`, then
/// `model_wrapper_cfg=dict(type='MyDDP')`.
#[test]
fn user_defined_wrapper() {
    MODEL_WRAPPERS
        .register("MyDDP", |_| {
            Ok(Box::new(|group, params| {
                let options = ReducerOptions::default();
                Ok(Box::new(MyDdp(DistributedDataParallel::new(group, params, options)?)))
            }))
        })
        .unwrap();
    let run = Trained::new(&format!("{JOB}{SGD}[model_wrapper_cfg]\ntype = 'MyDDP'\n"), 2);
    run.learned("MyDDP");
    // Twenty on each of two ranks. Relaxed: they have been joined.
    assert_eq!(FORWARDS.load(Ordering::Relaxed), 40);
}
