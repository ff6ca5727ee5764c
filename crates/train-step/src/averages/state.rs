//! State of reducers for a checkpoint, encoded as safetensors: each name has the reducer's index as
//! prefix.

use collective::reducer::Reducer;
use collective::reducer::{BucketMemory, ReducerState};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::{Error, Result};

/// Encodes the state of the reducers; empty if no reducer has any.
pub(super) fn to_bytes(reducers: &[Reducer]) -> Result<Vec<u8>> {
    let mut all: Vec<(String, Dtype, Vec<u8>)> = Vec::new();
    for (at, reducer) in reducers.iter().enumerate() {
        let Some(state) = reducer.state_dict() else { continue };
        let numbers = |of: &[u64]| of.iter().flat_map(|n| n.to_le_bytes()).collect();
        let floats = |of: &[f32]| of.iter().flat_map(|x| x.to_le_bytes()).collect();
        let order: Vec<u64> = state.order.iter().map(|index| *index as u64).collect();
        all.push((format!("{at}.passes"), Dtype::U64, numbers(&[state.passes])));
        all.push((format!("{at}.order"), Dtype::U64, numbers(&order)));
        all.push((format!("{at}.idle"), Dtype::U8, state.idle));
        for (bucket, memory) in state.buckets.iter().enumerate() {
            all.push((format!("{at}.{bucket}.q"), Dtype::F32, floats(&memory.q)));
            all.push((format!("{at}.{bucket}.error"), Dtype::F32, floats(&memory.error)));
        }
    }
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let views = all.iter().map(|(name, dtype, bytes)| {
        let count = bytes.len() * 8 / dtype.bitsize();
        TensorView::new(*dtype, vec![count], bytes).map(|view| (name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>();
    views.and_then(|views| safetensors::serialize(views, None)).map_err(bad)
}

/// Restores the state of each reducer.
pub(super) fn load(reducers: &mut [Reducer], bytes: &[u8]) -> Result<()> {
    let tensors = SafeTensors::deserialize(bytes).map_err(bad)?;
    let data = |name: String| tensors.tensor(&name).map(|view| view.data()).map_err(bad);
    let numbers = |name: String| -> Result<Vec<u64>> {
        Ok(data(name)?.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n)).collect())
    };
    let floats = |name: String| -> Result<Vec<f32>> {
        Ok(data(name)?.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect())
    };
    for (at, reducer) in reducers.iter_mut().enumerate() {
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let mut state = ReducerState {
            passes: numbers(format!("{at}.passes"))?.first().copied().unwrap_or(0),
            order: numbers(format!("{at}.order"))?.into_iter().map(index).collect(),
            idle: data(format!("{at}.idle"))?.to_vec(),
            buckets: Vec::new(),
        };
        while let Ok(q) = floats(format!("{at}.{}.q", state.buckets.len())) {
            let error = floats(format!("{at}.{}.error", state.buckets.len()))?;
            state.buckets.push(BucketMemory { q, error });
        }
        reducer.load_state_dict(&state)?;
    }
    Ok(())
}

fn bad(error: impl std::fmt::Display) -> Error {
    Error::WrapperState { reason: error.to_string() }
}
