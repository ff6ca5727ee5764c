//! Tests of the public API: in the process of the test, or by the program `runner`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[cfg(feature = "candle")]
mod compile;
mod ddp;
#[cfg(feature = "candle")]
mod engine;
#[cfg(feature = "candle")]
mod engine_digits;
#[cfg(all(feature = "candle", target_os = "linux"))]
mod engine_memory;
mod engine_state;
#[cfg(feature = "candle")]
mod from_rust;
#[cfg(feature = "candle")]
mod gan;
#[cfg(feature = "candle")]
mod gradients;
#[cfg(feature = "candle")]
mod hosts;
#[cfg(feature = "candle")]
mod interrupt;
#[cfg(feature = "candle")]
mod launchers;
#[cfg(feature = "candle")]
mod metrics;
#[cfg(feature = "candle")]
mod mistakes;
#[cfg(all(feature = "npu", feature = "candle"))]
mod npu;
mod optim_wrapper;
#[cfg(feature = "candle")]
mod own_loop;
mod plot;
#[cfg(feature = "candle")]
mod published;
#[cfg(feature = "candle")]
mod seed_docs;
mod stdout;
#[cfg(feature = "candle")]
mod tensorboard;
#[cfg(feature = "candle")]
mod tied;
#[cfg(feature = "candle")]
mod torch_numerics;
#[cfg(feature = "candle")]
mod trace;
mod trackers;
#[cfg(feature = "candle")]
mod train;
#[cfg(feature = "candle")]
mod transformer;
#[cfg(feature = "candle")]
mod vis_backend;
#[cfg(feature = "candle")]
mod zoo_vectors;
