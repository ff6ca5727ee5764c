//! Trains a small perceptron on handwritten digits in data parallel, under any launcher.
//!
//! Built with `cargo build --release -p gradstack-runner --examples`; below, `PROGRAM` is
//! `target/release/examples/distributed_training`. Without `--launcher` the launcher is detected
//! from the environment.
//!
//! ```text
//! PROGRAM                                                          # one rank
//! runner launch --nproc-per-node 8 -- PROGRAM                      # eight ranks on this machine
//! CUDA_VISIBLE_DEVICES=0,3 runner launch --nproc-per-node 2 -- PROGRAM
//! runner launch --nnodes 2 --node-rank 0 --master-addr 10.1.1.1 --master-port 29500 \
//!     --nproc-per-node 8 -- PROGRAM                      # and with --node-rank 1 on the other
//! runner launch --nnodes 1:4 --rdzv-endpoint 10.1.1.1:29400 --nproc-per-node 8 -- PROGRAM
//!
//! torchrun --nproc-per-node 8 --no-python PROGRAM --launcher pytorch
//! python -m torch.distributed.launch --use-env --nproc-per-node 8 --no-python PROGRAM
//!
//! mpirun -np 8 PROGRAM --launcher mpi
//! mpiexec.mpich -n 8 PROGRAM --launcher mpi
//!
//! srun -p PARTITION --gres=gpu:8 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=5 \
//!     --kill-on-bad-exit=1 PROGRAM --launcher slurm
//! ```

use std::path::PathBuf;

use clap::Parser;
use collective::init::Launcher;
use fused_optim::{Sgd, SgdHyper};
use runner::engine::candle::CandleEngine;
use runner::evaluate::Accuracy;
use runner::optim_wrapper::OptimWrapperFactory;
use runner::zoo::{Digits, Mlp, MlpOptions, Split};
use runner::{DataLoaderConfig, Result, Runner, TrainConfig};

/// Trains the digits in data parallel.
#[derive(Parser)]
struct Args {
    /// Launcher that started the ranks: none, pytorch, slurm or mpi [default: detected from the
    /// environment].
    #[arg(long)]
    launcher: Option<Launcher>,
    /// Directory for checkpoints and logs.
    #[arg(long, default_value = "work_dirs/distributed_training")]
    work_dir: PathBuf,
    /// Number of passes over the data.
    #[arg(long, default_value_t = 10)]
    epochs: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let mlp = MlpOptions { in_features: 64, hidden: vec![64], ..MlpOptions::default() };
    let hyper = SgdHyper { lr: 0.1, momentum: 0.9, ..SgdHyper::default() };
    Runner::builder()
        .launcher(args.launcher)
        .model(CandleEngine::factory(move |vb| Mlp::new(&mlp, vb)))
        .optim_wrapper(OptimWrapperFactory::fp32(move |count| Sgd::with_one_group(hyper, count)))
        .train_dataloader(DataLoaderConfig::new(Digits::new(Split::Train, 0)?, 32).shuffled())
        .validation(DataLoaderConfig::new(Digits::new(Split::Test, 0)?, 64), Accuracy::default())
        .train_cfg(TrainConfig::new(args.epochs))
        .default_hooks()
        .seed(1)
        .work_dir(args.work_dir)
        .build()?
        .train()
        .map(drop)
}
