//! An attempt, as the ranks of this node need it: their numbers, and the reasons for its end.

use serde::{Deserialize, Serialize};

/// The ranks of this node in one attempt, and the address of their store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Assignment {
    /// Number of the attempt, counting those that ended because nodes joined or left.
    pub(crate) round: u32,
    /// Number of restarts after failures.
    pub(crate) restart_count: u32,
    pub(crate) node: usize,
    pub(crate) nodes: usize,
    pub(crate) first_rank: usize,
    pub(crate) world_size: usize,
    pub(crate) first_role_rank: usize,
    pub(crate) role_world_size: usize,
    /// Host name or address of the ranks' store.
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
}

/// Reason for which a node ends an attempt on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    /// This rank failed.
    Failed { rank: usize },
    /// This rank was interrupted by a signal and saved; the others will, too.
    Saved { rank: usize },
    /// This node joins the job.
    Joined { node: String },
    /// This node's launcher received a signal.
    Left { node: usize },
    /// This node is lost.
    Lost { node: String },
}
