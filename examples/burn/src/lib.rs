//! The parts that the programs in `main.rs` and `bin` share.

pub mod lend;
pub mod mlp;
