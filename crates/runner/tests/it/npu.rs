//! `device = "npu"` on the simulator of CANN: runs the program `runner` with a CANN toolkit whose
//! libraries are all the simulator, and compares with the same runs on the CPU.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::from_config;
use crate::common::slurm::Cluster;
use runner::Runner;
use runner::config::Config;
use runner::data::{Array, Batch};
use runner::engine::Losses;
use runner::hooks::Hook;
use safetensors::SafeTensors;

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");

/// A small perceptron on the digits.
const MLP: &str = r#"
[model]
type = "Mlp"
in_features = 64
hidden = [16]
num_classes = 10
[train_dataloader]
batch_size = 32
dataset = { type = "Digits", split = "train" }
[train_cfg]
type = "IterBasedTrainLoop"
max_iters = 12
[default_hooks]
logger = { type = "LoggerHook", interval = 1 }
checkpoint = { type = "CheckpointHook", by_epoch = false, interval = 6 }
[randomness]
seed = 3
"#;

const NPU: &str = "device = 'npu'\n";

/// A directory for runs, with a CANN toolkit.
struct Bench {
    dir: tempfile::TempDir,
}

/// Result and output of a run.
struct Ran {
    work_dir: PathBuf,
    good: bool,
    said: String,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("cann/lib64");
        std::fs::create_dir_all(&folder).unwrap();
        let simulator = std::env::current_exe().unwrap().with_file_name("libnpu_sim.so");
        assert!(simulator.exists(), "{} is missing", simulator.display());
        for name in ["libascendcl.so", "libnnopbase.so", "libopapi.so", "libhccl.so"] {
            symlink(&simulator, folder.join(name)).unwrap();
        }
        Self { dir }
    }

    /// Trains, with the launcher's arguments first.
    fn train(
        &self,
        name: &str,
        launcher: &[&str],
        config: &str,
        vars: &[(&str, &str)],
        more: &[&str],
    ) -> Ran {
        let path = self.dir.path().join(format!("{name}.toml"));
        std::fs::write(&path, config).unwrap();
        let (work_dir, path) = (self.work_dir(name), path.display().to_string());
        let words = ["train", &path, "--work-dir", &work_dir.display().to_string()];
        self.run(name, &[launcher, &words, more].concat(), vars)
    }

    fn work_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a command that starts ranks; fails if it violates a rule of CANN.
    fn run(&self, name: &str, words: &[&str], vars: &[(&str, &str)]) -> Ran {
        let report = self.dir.path().join(format!("{name}.report"));
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", "300"]).args(words);
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "ASCEND_RT_VISIBLE_DEVICES"] {
            command.env_remove(variable);
        }
        command.env("ASCEND_HOME_PATH", self.dir.path().join("cann")).env("RAYON_NUM_THREADS", "1");
        command.env("NPU_SIM_REPORT", &report).envs(vars.iter().copied());
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let broken = std::fs::read_to_string(report).unwrap_or_default();
        assert!(broken.is_empty(), "{name}: {broken}{said}");
        Ran { work_dir: self.work_dir(name), good: output.status.success(), said }
    }

    fn alone(&self, name: &str, config: &str, vars: &[(&str, &str)]) -> Ran {
        self.train(name, &[RUNNER], config, vars, &[])
    }

    fn two(&self, name: &str, config: &str, vars: &[(&str, &str)]) -> Ran {
        let launch = [RUNNER, "launch", "--nproc-per-node", "2", "--"];
        self.train(name, &launch, config, vars, &[])
    }
}

impl Ran {
    #[track_caller]
    fn well(self) -> Self {
        assert!(self.good, "{}", self.said);
        self
    }

    #[track_caller]
    fn says(self, words: &[&str]) -> Self {
        for word in words {
            assert!(self.said.contains(word), "no `{word}` in {}", self.said);
        }
        self
    }

    #[track_caller]
    fn fails(self, words: &[&str]) {
        assert!(!self.good, "{}", self.said);
        self.says(words);
    }

    /// Returns the tensors of a checkpoint, by file and name.
    fn numbers(&self, checkpoint: &str, file: &str) -> Vec<(String, Vec<f32>)> {
        let bytes = std::fs::read(self.work_dir.join(checkpoint).join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let mut all: Vec<_> = tensors
            .tensors()
            .into_iter()
            .filter(|(_, view)| view.dtype() == safetensors::Dtype::F32)
            .map(|(name, view)| {
                let words = view.data().as_chunks().0.iter();
                (name, words.map(|word| f32::from_le_bytes(*word)).collect())
            })
            .collect();
        all.sort_by(|a: &(String, Vec<f32>), b| a.0.cmp(&b.0));
        all
    }
}

/// Checks that weights and optimizer state are equal within `bound` times the largest value of each
/// tensor.
#[track_caller]
fn close(one: &Ran, other: &Ran, checkpoint: &str, bound: f32) {
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let (one, other) = (one.numbers(checkpoint, file), other.numbers(checkpoint, file));
        assert!(!one.is_empty() && one.len() == other.len());
        for ((name, one), (of, other)) in one.iter().zip(&other) {
            assert_eq!((name, one.len()), (of, other.len()));
            let largest = other.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            for (at, (one, other)) in one.iter().zip(other).enumerate() {
                let error = (one - other).abs();
                assert!(error <= bound * largest, "{file} {name}[{at}]: {one} and {other}");
            }
        }
    }
}

fn with(optimizer: &str) -> String {
    format!("{MLP}\n[optim_wrapper]\ntype = 'OptimWrapper'\n{optimizer}")
}

fn on_npu(config: &str) -> String {
    format!("{NPU}{config}")
}

const SGD: &str = "optimizer = { type = 'SGD', lr = 0.1, momentum = 0.9, weight_decay = 1e-4 }";

/// Twelve steps, rounded operator by operator on one side: about a hundred roundings of f32.
const BOUND: f32 = 1e-5;

#[test]
fn optimizers_on_the_npu_match_the_cpu() {
    let bench = Bench::new();
    for (name, optimizer) in [
        ("sgd", SGD),
        ("adamw", "clip_grad = { max_norm = 1 }\noptimizer = { type = 'AdamW', lr = 0.01 }"),
        ("lamb", "accumulative_counts = 2\noptimizer = { type = 'NpuFusedLamb', lr = 0.01 }"),
    ] {
        let config = with(optimizer);
        let cpu = bench.alone(&format!("{name}-cpu"), &config, &[]).well();
        let npu = bench.alone(&format!("{name}-npu"), &on_npu(&config), &[]).well();
        let npu = npu.says(&["device npu:0 (Ascend910B2)", "the model computes on the host"]);
        close(&npu, &cpu, "iter_12", BOUND);
        assert!(!cpu.said.contains("npu"), "{}", cpu.said);
    }
}

#[test]
fn two_ranks_average_by_hccl() {
    let bench = Bench::new();
    let config = with(SGD);
    let cpu = bench.two("cpu", &config, &[]).well();
    let npu = bench.two("npu", &on_npu(&config), &[]).well();
    let npu = npu.says(&["gradients are averaged by HCCL (all ranks have an NPU and HCCL)"]);
    close(&npu, &cpu, "iter_12", BOUND);
    // An explicitly requested backend is used, and logged.
    let host = format!("{NPU}env_cfg.dist_cfg.backend = 'host'\n{config}");
    let host = bench.two("host", &host, &[]).well();
    let host = host.says(&["WARNING", "averaged on the host by backend `host`, not by HCCL"]);
    close(&host, &cpu, "iter_12", BOUND);
    let hccl = format!("{NPU}env_cfg.dist_cfg.backend = 'hccl'\n{config}");
    bench.two("hccl", &hccl, &[]).well().says(&["averaged by HCCL (requested)"]);
    // HCCL does the reduction: if it fails, the run fails on both ranks within the timeout.
    let fault = [("NPU_SIM_FAULT", "HcclAllReduce:3:19")];
    bench.two("fault", &on_npu(&config), &fault).fails(&["HcclAllReduce", "HCCL_E_"]);
}

/// One epoch of `resnet_digits.toml`: batch norm, fp16 under autocast, dynamic loss scale, several
/// buckets.
#[test]
fn digits_job_trains_on_two_npus() {
    let bench = Bench::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/resnet_digits.toml");
    let text = std::fs::read_to_string(path).unwrap();
    let short = "\n[default_hooks]\ncheckpoint = { interval = 1 }\n";
    let (head, _) = text.split_once("[train_cfg]").unwrap();
    let tail = "[train_cfg]\nmax_epochs = 1\nval_interval = 1\n[randomness]\nseed = 0\n";
    let config = format!("{head}{tail}{short}").replace("width = 16", "width = 4");
    let cpu = bench.two("cpu", &config, &[]).well();
    let npu = bench.two("npu", &on_npu(&config), &[]).well().says(&["averaged by HCCL"]);
    // The simulator rounds SGD's operators as the CPU does, and halves of sums are exact: equal
    // bits.
    close(&npu, &cpu, "epoch_1", 0.0);
}

#[test]
fn run_resumes_on_cpu_and_npu_alternately() {
    let bench = Bench::new();
    let config = with("optimizer = { type = 'AdamW', lr = 0.01 }");
    let straight = bench.alone("straight", &config, &[]).well();
    for (name, first, then) in [("to", "", NPU), ("fro", NPU, "")] {
        let half = config.replace("max_iters = 12", "max_iters = 6");
        bench.alone(name, &format!("{first}{half}"), &[]).well();
        let second = format!("{then}{config}");
        let resumed = bench.train(name, &[RUNNER], &second, &[], &["--resume"]).well();
        close(&resumed, &straight, "iter_12", BOUND);
    }
}

#[test]
fn each_rank_uses_its_own_visible_npu() {
    let bench = Bench::new();
    let config = on_npu(&with(SGD)).replace("max_iters = 12", "max_iters = 1");
    let shown = |vars| bench.two("shown", &config, vars);
    shown(&[("ASCEND_RT_VISIBLE_DEVICES", "2,5")]).well().says(&["device npu:0"]);
    // The other rank gets the error, too, and does not have to be killed.
    shown(&[("NPU_SIM_DEVICES", "1")]).fails(&[
        "this rank needs NPU 1, but there are 1",
        "[rank 0]",
        "aborted",
    ]);
    // The simulator has eight devices.
    shown(&[("ASCEND_RT_VISIBLE_DEVICES", "8,9")])
        .fails(&["there are 0", "ASCEND_RT_VISIBLE_DEVICES=\"8,9\" makes no others visible"]);
    shown(&[("ASCEND_RT_VISIBLE_DEVICES", "")]).fails(&["ASCEND_RT_VISIBLE_DEVICES", "no device"]);
    // Ranks with chips of two generations are refused.
    let script = bench.dir.path().join("mixed.sh");
    let text =
        "#!/bin/sh\n[ $RANK = 0 ] || export NPU_SIM_SOC=Ascend910A\nexec \"$RUNNER\" \"$@\"\n";
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let script = script.display().to_string();
    let launch = [RUNNER, "launch", "--nproc-per-node", "2", "--", &script];
    bench
        .train("mixed", &launch, &config, &[("RUNNER", RUNNER)], &[])
        .fails(&["rank 1 has Ascend910A: all ranks need NPUs of the same generation"]);
    let alone = [("ASCEND_RT_VISIBLE_DEVICES", "7")];
    bench.alone("alone", &config, &alone).well().says(&["device npu:0"]);
}

#[test]
#[ignore = "needs Debian's openmpi-bin"]
fn ranks_of_open_mpi_average_by_hccl() {
    let bench = Bench::new();
    let config = on_npu(&with(SGD)).replace("max_iters = 12", "max_iters = 1");
    let mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", RUNNER];
    bench.train("mpi", &mpirun, &config, &[], &[]).well().says(&["averaged by HCCL"]);
}

/// On one node each rank uses the NPU of its local rank; on two nodes each uses the first of its
/// node.
#[test]
#[ignore = "needs root, Slurm and munge"]
fn ranks_of_slurm_use_their_own_npus_and_average_by_hccl() {
    let cluster = Cluster::start(&[]);
    let (bench, conf) = (Bench::new(), cluster.conf());
    let config = on_npu(&with(SGD));
    let ours = bench.two("ours", &config, &[]).well();
    let srun = |name: &str, words: &[&str], vars: &[(&str, &str)]| {
        let srun = ["srun", "--ntasks=2", "--kill-on-bad-exit=1", "--label"];
        let vars = [vars, &[("SLURM_CONF", &conf)]].concat();
        bench.train(name, &[&srun, words].concat(), &config, &vars, &["--launcher", "slurm"])
    };
    let (one, two) = (&["--nodes=1", RUNNER][..], &["--nodes=2", RUNNER][..]);
    // Each rank sees only its own NPU, as a task prologue may configure it.
    let own = "ASCEND_RT_VISIBLE_DEVICES=$((2 + 3 * SLURM_LOCALID)) exec \"$0\" \"$@\"";
    let own = &["--nodes=1", "sh", "-c", own, RUNNER][..];
    let averaged = ["device npu:0", "gradients are averaged by HCCL"];
    for (name, words, vars) in [
        ("one", one, &[][..]),
        ("two", two, &[]),
        // One NPU per node suffices with one rank per node.
        ("few", two, &[("NPU_SIM_DEVICES", "1")]),
        ("seen", one, &[("ASCEND_RT_VISIBLE_DEVICES", "2,5")]),
        ("own", own, &[]),
    ] {
        let ran = srun(name, words, vars).well().says(&averaged);
        close(&ran, &ours, "iter_12", 0.0);
    }
    let refused = "1: [rank 1] error: device = \"npu\": this rank needs NPU 1, but there are 1";
    srun("lacking", one, &[("NPU_SIM_DEVICES", "1")]).fails(&[refused]);
    // CANN sees one device with this value.
    let vars = [("ASCEND_RT_VISIBLE_DEVICES", "5,2")];
    srun("falling", one, &vars).fails(&["none is left for local rank 1: CANN stops"]);
}

#[test]
fn missing_cann_is_an_error_before_anything_is_created() {
    let bench = Bench::new();
    let nowhere = bench.dir.path().display().to_string();
    let nowhere = [("ASCEND_HOME_PATH", nowhere.as_str())];
    let words =
        ["device = \"npu\"", "cannot load libascendcl.so", "install the Ascend CANN toolkit"];
    for ran in [bench.alone("one", &on_npu(&with(SGD)), &nowhere), {
        bench.two("two", &on_npu(&with(SGD)), &nowhere)
    }] {
        assert!(!ran.work_dir.exists());
        ran.fails(&words);
    }
    // An evaluation does not need an NPU.
    bench.alone("trained", &with(SGD), &[]).well();
    let backend = "env_cfg.dist_cfg.backend = 'hccl'\n".to_owned() + &with(SGD);
    bench.alone("backend", &backend, &[]).fails(&["needs device = \"npu\""]);
    let typo = format!("device = 'npuu'\n{}", with(SGD));
    bench.alone("typo", &typo, &[]).fails(&["typo.toml:1:10", "did you mean `npu`?"]);
    let key = format!("device = {{ type = 'npu', swich_to_amp = true }}\n{}", with(SGD));
    bench.alone("key", &key, &[]).fails(&["did you mean `switch_to_amp`?"]);
}

/// The message contains the installed version of CANN and the required one.
#[test]
fn old_cann_is_refused_with_its_version() {
    let hccl = format!("{NPU}env_cfg.dist_cfg.backend = 'hccl'\n{}", with(SGD));
    for (library, function) in [
        ("libhccl.so", "HcclGetRootInfo"),
        ("libopapi.so", "aclnnInplaceZeroGetWorkspaceSize"),
        ("libnnopbase.so", "aclnnInit"),
        ("libascendcl.so", "aclInit"),
    ] {
        let bench = Bench::new();
        let cann = bench.dir.path().join("cann");
        let arch = cann.join(format!("{}-linux", std::env::consts::ARCH));
        std::fs::create_dir(&arch).unwrap();
        let info = "package_name=Ascend-cann-toolkit\nversion=8.0.RC3\ninnerversion=V100R001C19\n";
        std::fs::write(arch.join("ascend_toolkit_install.info"), info).unwrap();
        let folder = cann.join("lib64").display().to_string();
        let path = format!("{folder}/{library}");
        std::fs::remove_file(&path).unwrap();
        // A library without functions.
        let cc = Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o", &path]).status();
        assert!(cc.unwrap().success());
        let refused = format!("CANN 8.0.RC3 ({path}) has no function {function}; CANN 8.1 has it");
        let by_home = bench.two("home", &hccl, &[]);
        assert!(!by_home.work_dir.exists());
        by_home.fails(&[&refused]);
        let by_path = [("ASCEND_HOME_PATH", "/nowhere"), ("LD_LIBRARY_PATH", &folder)];
        bench.two("path", &hccl, &by_path).fails(&[&refused]);
    }
}

/// MMEngine's rule for chips of the first generation, with a warning.
#[test]
fn first_generation_switches_to_mixed_precision_with_a_warning() {
    let bench = Bench::new();
    let old = [("NPU_SIM_SOC", "Ascend910A")];
    let config = with(SGD);
    let amp = config.replace("'OptimWrapper'", "'AmpOptimWrapper'");
    let expected = bench.alone("amp", &amp, &[]).well();
    let switched = bench.alone("switched", &on_npu(&config), &old).well();
    let words = [
        "WARNING",
        "npu:0 is Ascend910A, an NPU of the first generation",
        "OptimWrapper becomes AmpOptimWrapper",
        "switch_to_amp = false",
        "loss_scale: 65536",
    ];
    close(&switched.says(&words), &expected, "iter_12", 0.0);
    let declined = format!("device = {{ type = 'npu', switch_to_amp = false }}\n{config}");
    let declined = bench.alone("declined", &declined, &old).well();
    assert!(!declined.said.contains("WARNING") && !declined.said.contains("loss_scale"));
    close(&declined, &bench.alone("plain", &config, &[]).well(), "iter_12", BOUND);
    // Half parameters, whose gradients overflow on all ranks until the scale has been reduced.
    let half = amp.replace(
        SGD,
        &format!("half_parameters = true\nloss_scale = {{ init_scale = 1e9 }}\n{SGD}"),
    );
    let cpu = bench.two("half-cpu", &half, &[]).well();
    let npu = bench.two("half-npu", &on_npu(&half), &old).well();
    let scales = |ran: &Ran| {
        let scale =
            |line: &str| Some(line.split_once("loss_scale: ")?.1.split(' ').next()?.to_owned());
        ran.said.lines().filter_map(scale).collect::<Vec<_>>()
    };
    assert_eq!(scales(&npu), scales(&cpu));
    assert!(scales(&npu).iter().collect::<std::collections::BTreeSet<_>>().len() > 3);
    // The chip does not support bf16, which is an error.
    let bf16 = half.replace("half_parameters", "dtype = 'bfloat16'\nhalf_parameters");
    bench.alone("bf16", &on_npu(&bf16), &old).fails(&["bf16 on this chip"]);
}

/// Records the state of a rank after each iteration; one rank's batch may overflow.
struct Watcher {
    overflows: bool,
    seen: File,
}

impl Hook for Watcher {
    fn name(&self) -> &'static str {
        "Watcher"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> runner::Result<()> {
        if self.overflows && (runner.group().rank(), runner.position().iter) == (1, OVERFLOW) {
            // One feature, so gradients of its weights have this size times the scale.
            let shape = batch.get("inputs")?.shape().to_owned();
            let count = shape.iter().product();
            let numbers: Vec<f32> = (0..count).map(|i| f32::from(i % 64 == 0) * 1e4).collect();
            *batch = std::mem::take(batch).with("inputs", Array::new(shape, numbers)?);
        }
        Ok(())
    }

    fn after_train_iter(
        &mut self,
        runner: &mut Runner,
        _: &Batch,
        _: &Losses,
    ) -> runner::Result<()> {
        let mut weights = String::new();
        runner.engine_mut().with_params(&mut |params| {
            weights = format!("{params:?}");
            Ok(())
        })?;
        let optim = runner.optim_wrapper();
        let (scale, state) = (optim.loss_scale(), optim.state_dict()?.optimizer.state);
        writeln!(self.seen, "{scale}|{weights}|{state:?}").unwrap();
        Ok(())
    }
}

/// Iteration, counted from 0, in which one rank overflows.
const OVERFLOW: usize = 2;

/// Runs a rank of the next test.
#[test]
fn worker() {
    let Ok(dir) = std::env::var("NPU_TEST_DIR") else { return };
    let dir = Path::new(&dir);
    let seen = File::create(dir.join(format!("seen{}", std::env::var("RANK").unwrap()))).unwrap();
    let overflows = dir.join("overflows").exists();
    let config = Config::from_file(dir.join("config.toml")).unwrap();
    let builder = from_config(config).unwrap().work_dir(dir);
    let watcher = Box::new(Watcher { overflows, seen });
    builder.hook(watcher).build().unwrap().train().unwrap();
}

/// On a chip that saturates, sums contain no infinity: the ranks must exchange the overflow flag.
#[test]
fn overflow_on_one_rank_skips_the_step_on_all() {
    let bench = Bench::new();
    let amp = "half_parameters = true\nloss_scale = { init_scale = 1024 }\n";
    let config = with(&format!("{amp}{SGD}")).replace("'OptimWrapper'", "'AmpOptimWrapper'");
    let config = on_npu(&config).replace("max_iters = 12", "max_iters = 6");
    let program = std::env::current_exe().unwrap().display().to_string();
    let launch = [RUNNER, "launch", "--nproc-per-node", "2", "--", &program];
    let words = [&launch[..], &["--exact", "npu::worker", "--nocapture"]].concat();
    // State of both ranks after each iteration: scale, weights, optimizer state.
    let run = |name: &str, soc: &str, overflows: bool| {
        let dir = bench.work_dir(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("config.toml"), &config).unwrap();
        if overflows {
            File::create(dir.join("overflows")).unwrap();
        }
        let vars = [("NPU_SIM_SOC", soc), ("NPU_TEST_DIR", dir.to_str().unwrap())];
        bench.run(name, &words, &vars).well().says(&["averaged by HCCL"]);
        let seen = |rank| std::fs::read_to_string(dir.join(format!("seen{rank}"))).unwrap();
        assert!(seen(0) == seen(1), "{name}: the ranks differ");
        let lines = seen(0);
        let parts = |line: &str| line.split('|').map(str::to_owned).collect::<Vec<_>>();
        lines.lines().map(parts).collect::<Vec<_>>()
    };
    let scales =
        |seen: &[Vec<String>]| seen.iter().map(|parts| parts[0].clone()).collect::<Vec<_>>();
    let calm = run("calm", "Ascend910A", false);
    assert_eq!(scales(&calm), ["1024"; 6]);
    let skips = run("skips", "Ascend910A", true);
    assert_eq!(scales(&skips), ["1024", "1024", "512", "512", "512", "512"]);
    // Before that iteration the runs are equal: the overflow is in rank 1's batch only.
    assert!(skips[..OVERFLOW] == calm[..OVERFLOW]);
    let moved: Vec<_> = skips.windows(2).map(|pair| pair[0][1..] != pair[1][1..]).collect();
    assert_eq!(moved, [true, false, true, true, true]);
    // A chip with infinities gives the same result.
    assert!(run("second", "Ascend910B2", true) == skips);
}

#[test]
fn unsupported_options_and_device_errors_end_the_run() {
    let bench = Bench::new();
    let clip = with(&format!("clip_grad = {{ max_norm = 1, norm_type = 'inf' }}\n{SGD}"));
    bench.alone("clip", &on_npu(&clip), &[]).fails(&["another norm than the 2-norm"]);
    let power = format!("{}\n[model_wrapper_cfg]\ncomm_hook = 'powerSGD'\n", with(SGD));
    bench.two("power", &on_npu(&power), &[]).fails(&["PowerSgd", "through a device"]);
    for function in ["aclnnFusedSgd:5:507035", "aclrtMemcpyAsync:9:507899", "aclrtMalloc:4:207001"]
    {
        let name = function.split(':').next().unwrap();
        bench.alone(name, &on_npu(&with(SGD)), &[("NPU_SIM_FAULT", function)]).fails(&[name]);
    }
}
