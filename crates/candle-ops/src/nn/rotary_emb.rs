//! Rotary embeddings. Functions with `slow` in their name are those that have a gradient in
//! candle-nn; here all have one.

pub use crate::{rope, rope as rope_slow, rope_i, rope_i as rope_i_slow, rope_thd};
