//! The checks of the fuzz targets, one function for each target.
//!
//! The targets in `fuzz_targets` feed them libFuzzer's inputs; `cargo test -p tests corpus` feeds
//! them the files in `corpus`.

pub mod bucket_plan;
pub mod chunk_plan;
pub mod config;
pub mod frame;
pub mod scaler;
pub mod shard;
pub mod state_dict;
pub mod store;
pub mod torch_state;

/// Checks one input; panics if it finds a bug.
pub type Check = fn(&[u8]);

/// Each target's name and function.
pub const TARGETS: [(&str, Check); 10] = [
    ("bucket_plan", bucket_plan::check),
    ("chunk_plan", chunk_plan::check),
    ("config", config::check),
    ("frame", frame::check),
    ("npu_sim", npu_sim::sequence::run),
    ("scaler", scaler::check),
    ("shard", shard::check),
    ("state_dict", state_dict::check),
    ("store", store::check),
    ("torch_state", torch_state::check),
];
