//! Saves a run, and resumes it bit by bit.
//!
//! A checkpoint is one safetensors file: the variables by their names, so that it is a model file
//! as well, and further entries, whose names begin with [`PREFIX`]: the vectors of the optimizer's
//! state, the ranks' own data, and [`TRAINER`], which is JSON. Rank 0 writes it, one entry at a
//! time. A file of format 1 has the optimizer's state in one entry, [`OPTIMIZER`], and the ranks'
//! own data in [`TRAINER`].
//!
//! Invariant: each rank verifies and checks the whole file, and all ranks agree that they have the
//! same one, before any state changes. A rank that fails makes all fail, with its reason.

mod file;
mod place;
mod resume;
mod save;

use amp::ScalerState;
use collective::object::all_gather_object;
use fused_optim::{Optimizer as _, StateLayout};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use train_step::Scheduler;

pub(crate) use self::place::Places;
use crate::{Result, Trainer};

/// Beginning of the names of entries that are not variables.
pub(crate) const PREFIX: &str = "candle_train.";
const TRAINER: &str = "candle_train.trainer";
/// In format 1.
const OPTIMIZER: &str = "candle_train.optimizer";

/// Name of the entry of a vector of the optimizer's state.
fn optimizer_entry(index: usize, name: &str) -> String {
    format!("{OPTIMIZER}.{index}.{name}")
}

/// Name of the entry of a variable's weights in training, if its own entry has those for
/// evaluation.
fn trained_entry(name: &str) -> String {
    format!("{PREFIX}trained.{name}")
}

/// Name of the entry of a rank's own data, in CBOR: JSON has neither infinity nor NaN.
fn own_entry(rank: usize) -> String {
    format!("{PREFIX}own.{rank}")
}

/// The state of a run besides vectors.
#[derive(Debug, Serialize, Deserialize)]
struct Progress {
    format: u32,
    epoch: usize,
    steps: u64,
    /// Absent in format 1.
    #[serde(default)]
    seed: Option<u64>,
    scaler: Option<ScalerState>,
    /// The number of steps skipped in a row.
    #[serde(default)]
    skips: usize,
    /// The learning rates by parameter group, before the schedule's factors.
    base_lrs: Vec<f64>,
    /// Whether a function has set the learning rates: `TrainerBuilder::schedule`.
    #[serde(default)]
    has_schedule: bool,
    /// The schedulers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    schedulers: Vec<Scheduler>,
    /// The mean count of a batch in the last step whose batches have counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mean_count: Option<f64>,
    /// The number of random words drawn by dropout, by rank.
    random_positions: Vec<u64>,
    /// Absent in format 1.
    #[serde(default)]
    optimizer: Option<StateLayout>,
    /// The argument of `save_with`, by rank; only in format 1.
    #[serde(default, skip_serializing)]
    own: Vec<Value>,
}

const FORMAT: u32 = 2;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Trainer {
    /// Whether the variables' entries have weights for evaluation, and those in training are
    /// further entries: from either alone the other cannot be computed bit for bit.
    fn saves_eval_weights(&self) -> bool {
        self.optimizer.optimizer().has_eval_weights()
    }

    /// Exchanges the ranks' results. If one has failed, all have its reason.
    fn exchange<T: Serialize + DeserializeOwned>(
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
