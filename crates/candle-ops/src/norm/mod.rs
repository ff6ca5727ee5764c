//! Normalization: batch, group, layer, and root mean square.

pub(crate) mod batch_norm;
mod dispatch;
pub(crate) mod group_norm;
pub(crate) mod instance_norm;
pub(crate) mod layer_norm;
pub(crate) mod rms_norm;
