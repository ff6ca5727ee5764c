//! The training loop of this workspace: configuration, registries, hooks, mixed precision, data
//! parallelism, checkpoints that resume exactly.
//!
//! It composes the other crates: [`launch`](mod@launch) starts the ranks, [`collective`] moves
//! gradients between them, [`amp`] scales the loss, [`fused_optim`] updates parameters, and a
//! tensor engine (by default [candle](https://github.com/huggingface/candle)) computes.
//!
//! # From a configuration
//!
//! ```toml
//! [model]
//! type = "ResNet"
//!
//! [train_dataloader]
//! batch_size = 32
//! dataset = { type = "Digits", split = "train" }
//!
//! [optim_wrapper]
//! type = "AmpOptimWrapper"            # half parameters, dynamic loss scale
//! optimizer = { type = "SGD", lr = 0.1, momentum = 0.9 }
//!
//! [train_cfg]
//! max_epochs = 10
//! ```
//!
//! `runner launch --nproc-per-node 2 -- train that.toml` trains it on two processes.
//!
//! # From a program
//!
//! The same parts built in code ([`RunnerBuilder`]), in one process. Under a launcher the same
//! program is one rank of several.
//!
//! ```
//! use fused_optim::{Sgd, SgdHyper};
//! use runner::engine::candle::CandleEngine;
//! use runner::evaluate::Accuracy;
//! use runner::optim_wrapper::OptimWrapperFactory;
//! use runner::{DataLoaderConfig, Runner, TrainConfig};
//! use runner::zoo::{Digits, Mlp, MlpOptions, Split};
//!
//! # fn main() -> runner::Result<()> {
//! let dir = tempfile::tempdir().unwrap();
//! let mlp = MlpOptions { in_features: 64, hidden: vec![32], ..MlpOptions::default() };
//! let hyper = SgdHyper { lr: 0.1, ..SgdHyper::default() };
//! let metrics = Runner::builder()
//!     .model(CandleEngine::factory(move |vb| Mlp::new(&mlp, vb)))
//!     .optim_wrapper(OptimWrapperFactory::fp32(move |count| Sgd::with_one_group(hyper, count)))
//!     .train_dataloader(DataLoaderConfig::new(Digits::new(Split::Train, 0)?, 32).shuffled())
//!     .validation(DataLoaderConfig::new(Digits::new(Split::Test, 0)?, 32), Accuracy::default())
//!     .train_cfg(TrainConfig::new(1))
//!     .work_dir(dir.path())
//!     .build()?
//!     .train()?;
//! assert_eq!(metrics[0].0, "accuracy");
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | [`config`], [`registry`] | TOML and JSON with positions in every error; builders by name |
//! | [`engine`] | the interface to a tensor crate; the candle adapter |
//! | [`placement`] | device of gradients, state and steps: host, CUDA GPU, Ascend NPU |
//! | [`model`] | gradient storage, and averages over ranks during backward |
//! | [`optim_wrapper`] | accumulation, loss scale, the optimizer's step |
//! | [`hooks`] | logging, checkpoints, validation and other actions around iterations |
//! | [`schedulers`] | learning rate and momentum over a run |
//! | [`checkpoint`] | atomic, checksummed, exact to resume from |
//! | [`zoo`] | models and data sets of the example configurations |

// docs.rs notes at each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_os = "linux"))]
compile_error!("`runner` needs Linux, as `collective` and `launch` do");

pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod engine;
mod error;
pub mod evaluate;
mod from_config;
pub mod hooks;
mod losses;
pub mod model;
pub mod optim_wrapper;
pub mod placement;
mod pretrained;
pub mod registry;
mod runner;
pub mod schedulers;
pub mod signals;
pub mod sinks;
#[cfg(test)]
mod testing;
#[cfg(feature = "candle")]
pub mod zoo;

pub use error::{ConfigPlace, Error, Mistake, NotFiniteSince, Result, SpentObject};
pub use runner::{DataLoaderConfig, Length, LoadOptions, Runner, RunnerBuilder, Save, TrainConfig};
pub use train_step;

/// Tests the examples of the README.
#[cfg(all(doctest, feature = "candle"))]
#[doc = include_str!("../README.md")]
struct Readme;
