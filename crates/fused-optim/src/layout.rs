//! State without its values: to save and load a state one vector at a time, without a copy of all
//! of it.

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};

use crate::error::format;
use crate::state_dict::metadata;
use crate::{ParamSpec, ParamState, Result, StateDict};

/// Takes one vector of a state: its tensor's index, its name, its values.
pub type VisitState<'a> = dyn FnMut(usize, &str, &[f32]) -> io::Result<()> + 'a;

/// Writes the values of one vector of a saved state, which has this index and name.
pub type ReadState<'a> = dyn FnMut(usize, &str, &mut [f32]) -> io::Result<()> + 'a;

/// A [`StateDict`] with the lengths of its vectors in place of their values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateLayout {
    /// As [`StateDict::kind`].
    pub kind: String,
    /// As [`StateDict::param_groups`].
    pub param_groups: String,
    /// As [`StateDict::state`].
    pub state: BTreeMap<usize, ParamLayout>,
    /// As [`StateDict::params`].
    pub params: BTreeMap<usize, ParamSpec>,
}

/// The state of one tensor, without values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamLayout {
    /// As [`ParamState::step`](crate::ParamState::step).
    pub step: u64,
    /// Lengths of the vectors by name.
    pub tensors: BTreeMap<String, usize>,
}

impl StateDict {
    /// Returns the layout of this state.
    #[must_use]
    pub fn layout(&self) -> StateLayout {
        let param = |(index, state): (&usize, &ParamState)| {
            let lengths = state.tensors.iter().map(|(name, values)| (name.clone(), values.len()));
            (*index, ParamLayout { step: state.step, tensors: lengths.collect() })
        };
        StateLayout {
            kind: self.kind.clone(),
            param_groups: self.param_groups.clone(),
            state: self.state.iter().map(param).collect(),
            params: self.params.clone(),
        }
    }
}

impl StateLayout {
    /// Key and text of the metadata in a file of [`StateDict::to_safetensors`]: with them, a
    /// program can write that file from [`visit_state`](crate::Optimizer::visit_state), one vector
    /// at a time. Its entries are `state.INDEX.step` (I64, a scalar) and `state.INDEX.NAME` (F32,
    /// one dimension).
    ///
    /// # Errors
    ///
    /// [`Error::Format`](crate::Error::Format) if a name cannot be written.
    pub fn metadata(&self) -> Result<(&'static str, String)> {
        metadata(&self.kind, &self.param_groups, &self.params)
    }

    /// A state dict of this layout. `read` writes the values of each vector, which are zeros
    /// before.
    ///
    /// # Errors
    ///
    /// Errors of `read`.
    pub fn with_values(&self, read: &mut ReadState<'_>) -> Result<StateDict> {
        let mut state = BTreeMap::new();
        for (&index, saved) in &self.state {
            let mut tensors = BTreeMap::new();
            for (name, &count) in &saved.tensors {
                let mut values = vec![0.0; count];
                read(index, name, &mut values).map_err(format("read the state"))?;
                tensors.insert(name.clone(), values);
            }
            state.insert(index, ParamState { step: saved.step, tensors });
        }
        Ok(StateDict {
            kind: self.kind.clone(),
            param_groups: self.param_groups.clone(),
            state,
            params: self.params.clone(),
        })
    }
}
