//! Rotary embeddings. candle-nn's `slow` ones are those that have a gradient there; here all do.

pub use crate::{rope, rope as rope_slow, rope_i, rope_i as rope_i_slow, rope_thd};
