//! Several ranks of `candle_train::Trainer` on GPUs: failures, and what a step waits for.

use std::env;
use std::ffi::{c_char, c_int};
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::nn::{BatchNorm, BatchNormConfig, Linear, batch_norm, linear};
use candle_ops::{cross_entropy, relu};
use candle_train::train_data::{Array, Batch};
use candle_train::{AdamWHyper, Fields, Trainer, TrainerBuilder};
use collective::{GroupOptions, MemoryStore, ProcessGroup, Store, Transport};

use crate::of_the_fake;

/// Calls `rank` on two ranks, threads with the same GPU.
fn two_ranks<R: Send>(timeout: Duration, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let rank = |index| {
        let options = GroupOptions::default().with_timeout(timeout);
        let options = options.with_transport(Transport::Nccl).with_cuda_device(0);
        rank(ProcessGroup::from_store(store.clone(), index, 2, options).unwrap())
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks = [0, 1].map(|index| scope.spawn(move || rank(index)));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

struct Net(Linear, BatchNorm, Linear);

impl Net {
    fn new(vars: &VarMap, device: &Device) -> Result<Self> {
        let vb = VarBuilder::from_varmap(vars, DType::F32, device);
        let norm = batch_norm(16, BatchNormConfig::default(), vb.pp("norm"))?;
        Ok(Self(linear(8, 16, vb.pp("first"))?, norm, linear(16, 4, vb.pp("last"))?))
    }

    fn loss(&self, fields: &Fields) -> Result<Tensor> {
        use candle_core::{Module, ModuleT};
        let x = self.1.forward_t(&self.0.forward(fields.get("x")?)?, true)?;
        cross_entropy(&self.2.forward(&relu(&x)?)?, fields.get("y")?)
    }
}

fn batch(index: usize) -> Batch {
    let x = (0..64).map(|i| ((i + 31 * index) as f32 * 0.7).sin()).collect::<Vec<_>>();
    let y = (0..8).map(|row| ((row + index) % 4) as i64).collect::<Vec<_>>();
    let x = Array::new([8, 8], x).unwrap();
    Batch::new().with("x", x).with("y", Array::new([8], y).unwrap())
}

const HANG: c_int = 2;

/// Lets the next launch of a collective on device 0 hang until the group is aborted.
fn hang_at_next_launch() {
    type Inject = unsafe extern "C" fn(*const c_char, c_int, c_int, c_int, c_int);
    // SAFETY: that is the type of the function of this name.
    let inject = unsafe { of_the_fake::<Inject>("fake_fault") };
    // SAFETY: it copies the name.
    unsafe { inject(c"launch".as_ptr(), 0, 1, HANG, 0) };
}

/// Bytes that this thread has copied to the host.
fn copied() -> u64 {
    type Copied = extern "C" fn() -> *const [u64; 2];
    // SAFETY: that is the type of the function of this name.
    let copied = unsafe { of_the_fake::<Copied>("fake_gpu_copied") };
    // SAFETY: the address of two numbers of this thread.
    unsafe { (*copied())[1] }
}

/// The step is the last one, so no later one could notice it.
#[test]
#[ignore = "needs the fake GPU, whose NCCL can be made to hang"]
fn a_step_whose_averages_failed_is_an_error_in_mixed_precision_and_else_of_settle() {
    let all_here = Barrier::new(2);
    let errors = |with: fn(TrainerBuilder) -> TrainerBuilder, waits: bool| {
        two_ranks(Duration::from_secs(2), |group| {
            let is_first = group.rank() == 0;
            let device = Device::new_cuda_with_stream(0).unwrap();
            let vars = VarMap::new();
            let net = Net::new(&vars, &device).unwrap();
            let builder = with(Trainer::builder(&vars).group(group));
            let mut train = builder.build(AdamWHyper::default()).unwrap();
            for index in 0..3 {
                train.step_on(&batch(index), |fields| net.loss(fields)).unwrap();
                train.settle().unwrap();
            }
            all_here.wait();
            if is_first {
                hang_at_next_launch();
            }
            all_here.wait();
            let step = train.step_on(&batch(3), |fields| net.loss(fields));
            if waits {
                return step.unwrap_err().to_string();
            }
            step.unwrap();
            let settled = train.settle().unwrap_err().to_string();
            train.sum([0.0]).unwrap_err();
            settled
        })
    };
    let plain = errors(|builder| builder, false);
    let all = [errors(TrainerBuilder::f16, true), errors(TrainerBuilder::bf16, true), plain];
    for text in all.iter().flatten() {
        assert!(text.contains("all_reduce") || text.contains("broadcast"), "{text}");
    }
}

#[test]
#[ignore = "needs the fake GPU, which counts copies"]
fn steps_copy_nothing_to_the_host_but_the_status_of_mixed_precision() {
    let bytes = |with: fn(TrainerBuilder) -> TrainerBuilder| {
        two_ranks(Duration::from_secs(60), |group| {
            let device = Device::new_cuda_with_stream(0).unwrap();
            let vars = VarMap::new();
            let net = Net::new(&vars, &device).unwrap();
            let builder = with(Trainer::builder(&vars).group(group));
            let mut train = builder.build(AdamWHyper::default()).unwrap();
            let mut bytes = Vec::new();
            for index in 0..4 {
                let before = copied();
                train.step_on(&batch(index), |fields| net.loss(fields)).unwrap();
                bytes.push(copied() - before);
            }
            bytes[1..].to_vec()
        })
    };
    assert_eq!(bytes(|builder| builder), [[0; 3]; 2]);
    let status = bytes(TrainerBuilder::f16);
    assert!(status.iter().flatten().all(|bytes| (1..=64).contains(bytes)), "{status:?}");
}

#[test]
#[ignore = "needs the fake GPU, which can be a single one"]
fn a_gpu_that_is_not_there_is_named_by_every_rank() {
    if env::var_os("RANK").is_some() {
        let built = candle_train::device().and_then(|device| {
            let vars = VarMap::new();
            Net::new(&vars, &device)?;
            Trainer::builder(&vars).build(AdamWHyper::default()).map(drop)
        });
        println!("{}", built.unwrap_err());
        return;
    }
    let start = Instant::now();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks = ["0", "1"].map(|rank| {
        let mut command = Command::new(env::current_exe().unwrap());
        let test = "several::a_gpu_that_is_not_there_is_named_by_every_rank";
        command.args([test, "--exact", "--nocapture", "--include-ignored"]);
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")]);
        command
            .env("FAKE_GPUS", "1")
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]);
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    });
    for (index, rank) in ranks.into_iter().enumerate() {
        let output = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        assert!(text.contains("there is no CUDA device 1 among 1"), "{text}");
        assert!(text.contains("by rank 1") || index == 1, "{text}");
    }
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}
