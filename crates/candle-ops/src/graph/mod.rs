//! Operators over slices as nodes of candle's graph or of a tape; on a GPU, compositions of
//! candle's operators.

pub(crate) mod custom_op;
pub(crate) mod device;
pub(crate) mod operator;
pub(crate) mod tape;
