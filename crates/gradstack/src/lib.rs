//! The book of a family of crates for training models on several processes, without Python.
//!
//! Each crate is usable alone, and none needs anything installed on a CPU. This crate has no code:
//! it says where to begin.
//!
//! # Where to begin
//!
//! | you | page |
//! |---|---|
//! | have a training loop over slices of numbers, in no framework or your own | [`slices`] |
//! | have a [candle](https://github.com/huggingface/candle) program | [`candle`] |
//! | have a [burn](https://github.com/tracel-ai/burn) program | [`burn`] |
//! | have a [tch](https://github.com/LaurentMazare/tch-rs) program, that is, libtorch | [`tch`] |
//! | have an NVIDIA GPU | [`gpu`] |
//! | have an Ascend NPU | [`ascend`] |
//! | come from PyTorch | [`pytorch`] |
//! | come from MMEngine | [`mmengine`] |
//! | run on a Slurm cluster | [`slurm`] |
//! | run on Kubernetes | [`kubernetes`] |
//! | want to watch a run: logs, plots, TensorBoard, W&B, a trace | [`watch`] |
//! | have a run that hangs or fails | [`hangs`] |
//!
//! # The crates
//!
//! The name of a package is `gradstack-` and the name of its library, with `-` for `_`: the line
//! `gradstack-collective = { path = "../gradstack/crates/collective" }` of a manifest gives
//! `use collective::ProcessGroup`. They are not published yet; then `= "0.1"` will do. With candle,
//! depend on `candle-core = "0.11.1"`: another 0.x has other types.
//!
//! The programs `launch` and `runner` are installed from the repository by
//! `cargo install --path crates/launch` and `cargo install --path crates/runner`.
//!
//! | library | what it is | runs on |
//! |---|---|---|
//! | [`collective`] | process groups: all-reduce and the other collectives between threads, processes and machines; stores, launchers' environments, gradient buckets | Linux |
//! | [`launch`](mod@launch) | starts and watches the ranks of any program, as torchrun does | Linux |
//! | [`amp`] | loss scalers, autocast lists, checks for non-finite values, casts | any system |
//! | [`fused_optim`] | optimizers that update all tensors in one call | any system |
//! | [`candle_ops`] | operators and layers for candle with right gradients | any system |
//! | [`train_data`] | data sets, loaders, streams, transforms, metrics; resumes exactly | any system |
//! | [`train_log`](mod@train_log) | lines, a progress bar, `scalars.json`, TensorBoard, traces | any system |
//! | [`train_step`] | the data-parallel step, learning rate schedules, parameter groups, without a tensor crate | any system |
//! | [`candle_train`] | data parallelism, mixed precision, optimizers and exact resume for a candle program's own loop | Linux |
//! | [`runner`] | the training loop: configuration, hooks, checkpoints, evaluation, data parallelism | Linux |
//! | [`cuda_rt`] | CUDA without a toolkit: driver, NVRTC, cache of kernels, device memory | Unix |
//! | [`npu_sys`] | Ascend CANN, loaded at run time | Unix |

#[doc = include_str!("ascend.md")]
pub mod ascend {}
#[doc = include_str!("burn.md")]
pub mod burn {}
#[doc = include_str!("candle.md")]
pub mod candle {}
#[doc = include_str!("gpu.md")]
pub mod gpu {}
#[doc = include_str!("hangs.md")]
pub mod hangs {}
#[doc = include_str!("kubernetes.md")]
pub mod kubernetes {}
#[doc = include_str!("mmengine.md")]
pub mod mmengine {}
#[doc = include_str!("pytorch.md")]
pub mod pytorch {}
#[doc = include_str!("slices.md")]
pub mod slices {}
#[doc = include_str!("slurm.md")]
pub mod slurm {}
#[doc = include_str!("tch.md")]
pub mod tch {}
#[doc = include_str!("watch.md")]
pub mod watch {}
