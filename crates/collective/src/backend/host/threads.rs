//! Ranks as threads of one process: the same segment, mapped once per rank.
//!
//! A thread cannot die alone: its group is dropped when it unwinds, and that says so to the peers.

use std::sync::Arc;

use super::Host;
use super::segment::Segment;
use crate::{Error, GroupOptions, Result};

/// All ranks of a group, in order.
pub(crate) fn group(world_size: usize, options: &GroupOptions) -> Result<Vec<Host>> {
    super::check_world(0, world_size)?;
    let file = Segment::create(world_size)?;
    let rank = |rank| {
        let copy = file.try_clone();
        let copy = copy.map_err(|error| Error::io("sharing the segment", &error))?;
        let segment = Arc::new(Segment::attach(copy, world_size)?);
        Host::new(segment, rank, options, std::process::id(), None)
    };
    (0..world_size).map(rank).collect()
}
