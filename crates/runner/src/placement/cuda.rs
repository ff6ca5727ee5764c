//! The CUDA GPUs that a rank sees.

use std::fmt;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use collective::Accelerator;

use crate::{Error, Result};

/// Whether there is a GPU of this number among those that the environment leaves.
pub(super) fn find(index: usize) -> Result<()> {
    let count = CudaContext::device_count().map_err(refused)?;
    let count = usize::try_from(count).unwrap_or(0);
    if index < count {
        return Ok(());
    }
    let variable = Accelerator::Cuda.variable();
    let why = match std::env::var(variable) {
        Ok(list) => format!("{variable}={list:?} leaves no more"),
        Err(_) => "the launcher starts more ranks than there are GPUs".to_owned(),
    };
    Err(refused(format!("this rank's own is GPU {index}, and there are {count}: {why}")))
}

fn refused(why: impl fmt::Display) -> Error {
    Error::Config(format!("device = \"cuda\": {why}"))
}
