//! How `[model_wrapper_cfg]` is written.

use collective::ReducerOptions;

use super::{DistributedDataParallel, WrapperFactory};
use crate::Result;
use crate::config::Section;
use crate::registry::Builtin;

/// The wrappers a configuration can name; MMEngine's own spelling is one of them.
pub(crate) const BUILTIN: Builtin<WrapperFactory> =
    &[("DistributedDataParallel", ddp), ("MMDistributedDataParallel", ddp)];

const MIB: usize = 1 << 20;

fn ddp(section: &mut Section) -> Result<WrapperFactory> {
    let mut options = ReducerOptions::default();
    options.find_unused_parameters =
        section.or("find_unused_parameters", options.find_unused_parameters)?;
    // As in PyTorch, a cap of one's own is also the first bucket's.
    let default = (options.bucket_bytes / MIB) as f64;
    if section.has("bucket_cap_mb") {
        let mib = section.or_checked("bucket_cap_mb", default, "positive", |mib| *mib > 0.0)?;
        let bytes = ((mib * MIB as f64) as usize).max(1);
        (options.first_bucket_bytes, options.bucket_bytes) = (bytes, bytes);
    }
    Ok(Box::new(move |group, params| {
        Ok(Box::new(DistributedDataParallel::new(group, params, options)?))
    }))
}
