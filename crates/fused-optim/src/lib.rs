//! Fused multi-tensor optimizers over plain slices.
//!
//! A training step ends with the update of the weights. Written with tensor operations that is a
//! dozen passes over memory per tensor, and the update is limited by memory bandwidth. *Fused*
//! means that one call updates all tensors in one sweep over memory: it reads weight, gradient and
//! state, unscales the gradient, applies the rule, writes weight and state, and rounds the half
//! copy that the next forward reads, all while the values are in the cache. `Adafactor`, `AdamP`,
//! `Lamb` and `Muon` need a second sweep.
//!
//! There is no tensor type. Weights and gradients are slices of `f32`, [`f16`](half::f16) or
//! [`bf16`](half::bf16), in any mix; state is always f32.
//!
//! ```
//! use fused_optim::{AdamW, AdamWHyper, Applied, Optimizer, ParamMut, Slice, StepCtl};
//!
//! let (mut weight, mut bias) = (vec![1.0_f32; 6], vec![0.0_f32; 2]);
//! let (weight_grad, bias_grad) = (vec![0.5_f32; 6], vec![-1.0_f32; 2]);
//!
//! let mut adamw = AdamW::with_one_group(AdamWHyper { lr: 0.01, ..Default::default() }, 2)?;
//! let mut params = [
//!     ParamMut::new(&mut weight[..], Some(Slice::F32(&weight_grad))),
//!     ParamMut::new(&mut bias[..], Some(Slice::F32(&bias_grad))),
//! ];
//! assert_eq!(adamw.step(&mut params, &StepCtl::default())?, Applied::Applied);
//! assert!(weight[0] < 1.0 && bias[0] > 0.0);
//! # Ok::<(), fused_optim::Error>(())
//! ```
//!
//! # The rules
//!
//! `g` is the gradient times `grad_scale` (negated to maximize), `t` the tensor's own step count.
//! `m`, `v` are `m ← β1·m+(1−β1)g`, `v ← β2·v+(1−β2)g²`. Each optimizer's page has its formula in
//! full, its defaults, its source, and where it differs from that.
//!
//! | optimizer | update | state |
//! |---|---|---|
//! | [`Adadelta`] | `g ← g+λp`; `s ← ρs+(1−ρ)g²`; `d = √(a+ε)/√(s+ε)·g`; `p ← p − lr·d`; `a ← ρa+(1−ρ)d²` | `square_avg`, `acc_delta` |
//! | [`Adafactor`] | `p ← p(1−lr·λ) − max(ε₂,RMS(p))·min(lr,1/√t)·u`, with `u = g/√v` of RMS 1 at most, `v` a product of means | `row_var`, `col_var` or `variance` |
//! | [`Adam`] | `g ← g+λp`; `p ← p − lr/(1−β1ᵗ) · m/(√v/√(1−β2ᵗ)+ε)` | `exp_avg`, `exp_avg_sq`, with amsgrad `max_exp_avg_sq` |
//! | [`AdamP`] | AdamW without the update's component along `p`, if `g` is nearly orthogonal to `p` | `exp_avg`, `exp_avg_sq` |
//! | [`AdamW`] | `p ← p(1−lr·λ)`, then as Adam without `λ` | as Adam |
//! | [`BertAdam`] | `g` clipped by norm; `p ← p − lr·schedule·(m/(√v+ε) + λp)` | `exp_avg`, `exp_avg_sq` |
//! | [`Lamb`] | `u = m/(√v+ε) + λp`; `p ← p − lr·min(‖p‖,10)/‖u‖·u` | `exp_avg`, `exp_avg_sq` |
//! | [`Lion`] | `p ← p(1−lr·λ) − lr·sign(β1·m+(1−β1)g)`; `m ← β2·m+(1−β2)g` | `exp_avg` |
//! | `Muon` | matrices `p ← p(1−lr·λ) − lr·X`, with `X` orthogonalized from `m ← μ·m+(1−μ)g`; others as AdamW | `momentum_buffer` or as AdamW |
//! | [`RmsProp`] | `g ← g+λp`; `s ← αs+(1−α)g²`; `b ← μb+g/(√s+ε)`; `p ← p − lr·b` | `square_avg`; `grad_avg`, `momentum_buffer` where used |
//! | [`RmsPropTf`] | the same with `ε` under the root, `s` initially 1, `lr` inside `b` | as RmsProp |
//! | [`ScheduleFreeAdamW`] | AdamW at `y = (1−β1)z + β1·x`, where `x` is the average of `z` | `z`, `exp_avg_sq` |
//! | [`Sgd`] | `g ← g+λp`; `b ← μ·b+(1−τ)g`, at first `b ← g`; `p ← p − lr·b`, or with nesterov `p − lr(g+μ·b)` | with momentum `momentum_buffer` |
//!
//! Three rules differ between implementations. An option chooses, by default torch_npu's variant:
//! whether decoupled decay is multiplied by the learning rate ([`RmsPropTfHyper::decoupled_lr`]),
//! the position of `ε` in AdamP's cosine ([`CosineEps`]), and the tensors in BertAdam's norm
//! ([`ClipScope`]).
//!
//! [`Adafactor`], [`Lion`], `Muon` (feature `muon`) and [`ScheduleFreeAdamW`] run on the CPU only,
//! the other nine on devices too.
//!
//! Each is a [`CpuOptimizer`] of its hyper-parameters. For a rule of your own implement
//! [`ElementwiseRule`].
//!
//! [`Averaged`] adds an average of the weights (EMA, SWA) to any optimizer on the CPU.
//!
//! Hyper-parameters belong to a [`ParamGroup`]: [`AdamW::new`] takes several, and
//! [`AdamW::add_param_group`] adds one at any time. A tensor without a gradient is not updated, nor
//! is its step count. A tensor without elements is allowed.
//!
//! # One step, two passes
//!
//! A mixed-precision step unscales the gradients, checks them for infinities, computes their norm,
//! clips, and then updates: five passes over memory if each is a call. Here it is one call and two
//! passes: the first reads the gradients, for the check and the norm; the second unscales, clips,
//! updates and rounds, and optionally ([`ParamMut::clearing`], [`ParamMut::with_ema`]) clears the
//! gradient and updates a moving average of the weight.
//!
//! ```
//! use fused_optim::{AdamW, AdamWHyper, Applied, Clip, FoundInf, Optimizer, ParamMut, StepCtl};
//!
//! let (mut weight, mut grad, mut average) = (vec![1.0_f32; 4], vec![1536.0_f32; 4], vec![1.0; 4]);
//! let mut adamw = AdamW::with_one_group(AdamWHyper::default(), 1)?.with_threads(2);
//! let param = ParamMut::new(&mut weight[..], None);
//! let param = param.clearing(&mut grad[..]).with_ema(&mut average, 0.99);
//! let ctl = StepCtl {
//!     grad_scale: 1.0 / 1024.0,
//!     found_inf: FoundInf::Check,
//!     clip: Some(Clip::norm(1.0)),
//! };
//! assert_eq!(adamw.step(&mut [param], &ctl)?, Applied::Applied);
//! assert_eq!((adamw.grad_norm(), grad[0]), (Some(3.0), 0.0));
//! assert!(weight[0] < average[0] && average[0] < 1.0);
//! # Ok::<(), fused_optim::Error>(())
//! ```
//!
//! # Half precision
//!
//! A weight of f16 or bf16 loses small updates: `1 + 0.001` is `1` in bf16. So the optimizer keeps
//! the f32 value, the *master*, in its state. It is copied from the weight in the tensor's first
//! step and updated from then on: the next step overwrites a change made to the half weight outside
//! the optimizer, unless [`Optimizer::refresh_masters`] is called. [`HalfWeights`] has options
//! without a master, one of them with stochastic rounding.
//!
//! With loss scaling the gradients are multiplied by the scale `S`. Pass `1/S` as
//! [`grad_scale`](StepCtl::grad_scale), and as [`found_inf`](StepCtl::found_inf) either the result
//! of your own check or [`FoundInf::Check`]. If a gradient is infinite or NaN the step is skipped
//! and says so:
//!
//! ```
//! use fused_optim::{Applied, FoundInf, Optimizer, ParamMut, Sgd, SgdHyper, Slice, StepCtl};
//! use half::f16;
//!
//! let mut weight = [f16::ONE; 4];
//! let mut sgd = Sgd::with_one_group(SgdHyper { lr: 0.1, ..Default::default() }, 1)?;
//! let ctl = StepCtl { grad_scale: 1.0 / 1024.0, found_inf: FoundInf::Check, ..StepCtl::PLAIN };
//!
//! let overflown = [f16::from_f32(512.0), f16::INFINITY, f16::ZERO, f16::ZERO];
//! let params = &mut [ParamMut::new(&mut weight[..], Some(Slice::F16(&overflown)))];
//! assert_eq!(sgd.step(params, &ctl)?, Applied::SkippedNonFinite);
//!
//! let finite = [f16::from_f32(512.0); 4];
//! let params = &mut [ParamMut::new(&mut weight[..], Some(Slice::F16(&finite)))];
//! assert_eq!(sgd.step(params, &ctl)?, Applied::Applied);
//! assert_eq!(weight[0], f16::from_f32(0.95));
//! # Ok::<(), fused_optim::Error>(())
//! ```
//!
//! # Saving
//!
//! [`Optimizer::state_dict`] uses PyTorch's names; [`StateDict::to_safetensors`] serializes it.
//! Loading checks everything before it changes anything, and training resumes with the same
//! bits as without a restart. [`StateDict::from_torch`] reads the state of a PyTorch optimizer.
//! [`Optimizer::visit_state`] and [`Optimizer::load_state`] save and load one vector at a time.
//!
//! An optimizer identifies a tensor by its index in the list passed to each step. If that order can
//! differ between processes, as that of candle's `VarMap` does, set names
//! ([`Optimizer::set_param_names`]): they are saved, and state is [loaded by
//! name](Optimizer::load_state_dict).
//!
//! # In a candle program
//!
//! With the feature `candle`, `candle::VarOptimizer` is a `candle_nn::Optimizer` that updates
//! `Var`s in place with any of these optimizers.
//!
//! # Reproducibility
//!
//! An element's result depends on that element alone, and, where a rule or clipping needs a norm,
//! on sums whose order is fixed by lengths and shapes: products are exact, in f64; element `i` of a
//! block of 1024 is added to lane `i mod 16`; lanes, blocks, rows and tensors are each folded by
//! adding neighbours, `(0,1)`, `(2,3)`, and so on until one is left. An implementation on another
//! device that keeps this order, and f32 without contracted multiply-adds, gives the same bits. The
//! loops are compiled for SSE2, AVX2 and AVX-512 from the same source and chosen at run time, and
//! for NEON on aarch64; they give equal bits for any alignment and number of
//! [threads](Optimizer::set_threads). Only the matrix products of `Muon`, computed by the `gemm`
//! crate, may differ between processors, and `pow` between systems: it is used for `t^beta2_decay`
//! of [`Adafactor`] and for norms other than 2 and infinity. One thread is the default: one core of
//! a server already uses most of its memory bandwidth.

// docs.rs notes at each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod averaged;
#[cfg(feature = "candle")]
pub mod candle;
mod clip;
mod core;
mod cpu;
mod cpu_optimizer;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod elementwise;
mod error;
mod hyper_param;
mod layout;
mod names;
mod norms;
#[cfg(feature = "npu")]
pub mod npu;
mod optimizer;
mod param;
mod rule;
mod rules;
mod state;
mod state_dict;
mod step;
mod sweep;
mod torch;

pub use averaged::{Averaged, WeightAverage};
pub use clip::{Clip, ClipNorm, TotalNorm, clip_grad_norm, clip_grad_value};
pub use cpu_optimizer::CpuOptimizer;
pub use device::{DeviceParam, DeviceParams, GradStats, Launches, Tuned};
pub use elementwise::{ElementwiseRule, State};
pub use error::{Error, Result, StateProblem};
pub use hyper_param::HyperParam;
pub use layout::{ParamLayout, ReadState, StateLayout, VisitState};
pub use optimizer::{DeviceOptimizer, Optimizer};
pub use param::{DType, Ema, Grad, ParamGroup, ParamMut, ParamSpec, Slice, SliceMut};
pub use rules::*;
pub use state_dict::{ParamState, StateDict};
pub use step::{Applied, FoundInf, HalfWeights, StepCtl};

/// Tests the examples of the README.
#[cfg(all(doctest, feature = "candle"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// Splitting of tensors into blocks and shares, for the fuzz target; not part of the API.
#[doc(hidden)]
pub mod plan {
    pub use crate::cpu::plan::{BLOCK, Chunk, ChunkPlan, Layout};
}
