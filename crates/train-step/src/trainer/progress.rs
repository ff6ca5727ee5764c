//! The state of a run in a checkpoint besides tensors, and the names of its entries.
//!
//! A checkpoint is one safetensors file: the tensors by their names, so that it is a model file as
//! well, and further entries, whose names begin with [`PREFIX`]: the vectors of the optimizer's
//! state, the ranks' own data, and [`TRAINER`], which is JSON. In a file of several trainers
//! ([`Parts`](super::Parts)) the names of each one's tensors begin with its own. Rank 0 writes it,
//! one entry at a time. In files of formats 1 and 2 these entries' names begin with
//! [`OLD_PREFIX`]; a file of format 1 has the optimizer's state in one entry, [`OPTIMIZER`], and
//! the ranks' own data in [`TRAINER`].
//!
//! Invariant: each rank verifies and checks the whole file, and all ranks agree that they have the
//! same one, before any state changes. A rank that fails makes all fail, with its reason.

use amp::ScalerState;
use collective::object::all_gather_object;
use fused_optim::StateLayout;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Trainer;
use crate::{Result, Scheduler};

/// Beginning of the names of entries that are not tensors.
pub(super) const PREFIX: &str = "train_step.";
/// The same in formats 1 and 2, which `candle-train` wrote.
pub(super) const OLD_PREFIX: &str = "candle_train.";
pub(super) const TRAINER: &str = "trainer";
pub(super) const OPTIMIZER: &str = "optimizer";

/// Whether a tensor must not have this name, which a checkpoint needs.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    name == "__metadata__" || name.starts_with(PREFIX) || name.starts_with(OLD_PREFIX)
}

/// Names of the entries of a trainer in a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names<'a> {
    /// Beginning of the names of entries that are not tensors.
    pub(super) prefix: &'static str,
    /// The trainer's name, if the file is of several.
    pub(super) part: Option<&'a str>,
}

impl<'a> Names<'a> {
    /// Names in a file of this version.
    pub(super) const fn new(part: Option<&'a str>) -> Self {
        Self { prefix: PREFIX, part }
    }

    fn entry(self, name: &str) -> String {
        match self.part {
            Some(part) => format!("{}{PARTS}{part}.{name}", self.prefix),
            None => format!("{}{name}", self.prefix),
        }
    }

    /// Name of the entry of a tensor.
    pub(super) fn tensor(self, name: &str) -> String {
        self.part.map_or_else(|| name.to_owned(), |part| format!("{part}.{name}"))
    }

    pub(super) fn trainer(self) -> String {
        self.entry(TRAINER)
    }

    /// In format 1.
    pub(super) fn whole_optimizer(self) -> String {
        self.entry(OPTIMIZER)
    }

    /// Name of the entry of a vector of the optimizer's state.
    pub(super) fn optimizer(self, index: usize, name: &str) -> String {
        self.entry(&format!("{OPTIMIZER}.{index}.{name}"))
    }

    /// Name of the entry of a tensor's weights in training, if its own entry has those for
    /// evaluation.
    pub(super) fn trained(self, name: &str) -> String {
        self.entry(&format!("trained.{name}"))
    }

    /// Name of the entry of a rank's own data, in CBOR: JSON has neither infinity nor NaN. All
    /// trainers of a file have it in common.
    pub(super) fn own(self, rank: usize) -> String {
        format!("{}own.{rank}", self.prefix)
    }
}

/// Beginning of the names of the entries of one of several trainers, after the prefix.
const PARTS: &str = "parts.";

/// Names of the trainers of a file of several.
pub(super) fn parts_of(names: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<String> {
    let part = |name: &str| {
        let name = name.strip_prefix(PREFIX)?.strip_prefix(PARTS)?;
        Some(name.split_once('.').filter(|(_, entry)| *entry == TRAINER)?.0.to_owned())
    };
    let mut parts: Vec<_> = names.into_iter().filter_map(|name| part(name.as_ref())).collect();
    parts.sort();
    parts
}

/// The state of a run besides vectors.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Progress {
    pub(super) format: u32,
    pub(super) epoch: usize,
    pub(super) steps: u64,
    /// Absent in format 1.
    #[serde(default)]
    pub(super) seed: Option<u64>,
    pub(super) scaler: Option<ScalerState>,
    /// The number of steps skipped in a row.
    #[serde(default)]
    pub(super) skips: usize,
    /// The learning rates by parameter group, before the schedule's factors.
    pub(super) base_lrs: Vec<f64>,
    /// Whether a function has set the learning rates: `TrainerBuilder::schedule`.
    #[serde(default)]
    pub(super) has_schedule: bool,
    /// The schedulers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) schedulers: Vec<Scheduler>,
    /// The mean count of a batch in the last step whose batches have counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mean_count: Option<f64>,
    /// The number of random words drawn by dropout, by rank.
    pub(super) random_positions: Vec<u64>,
    /// The autotune cache of each rank; empty if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) autotune_caches: Vec<String>,
    /// Absent in format 1.
    #[serde(default)]
    pub(super) optimizer: Option<StateLayout>,
    /// The argument of `save_with`, by rank; only in format 1.
    #[serde(default, skip_serializing)]
    pub(super) own: Vec<Value>,
}

pub(super) const FORMAT: u32 = 3;

impl Trainer {
    /// Whether the tensors' entries have weights for evaluation, and those in training are
    /// further entries: from either alone the other cannot be computed bit for bit.
    pub(super) fn saves_eval_weights(&self) -> bool {
        self.optim.optimizer().has_eval_weights()
    }

    /// Exchanges the ranks' results. If one has failed, all have its reason.
    pub(super) fn exchange<T: Serialize + DeserializeOwned>(
        &self,
        own: Result<T, String>,
    ) -> Result<Result<Vec<T>, String>> {
        let all = all_gather_object(self.group(), &own)?;
        let named = |(rank, result): (usize, Result<T, String>)| {
            result.map_err(|reason| match self.world_size() {
                1 => reason,
                _ => format!("rank {rank}: {reason}"),
            })
        };
        Ok(all.into_iter().enumerate().map(named).collect())
    }
}
