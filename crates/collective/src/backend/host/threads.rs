//! Ranks as threads of one process: each rank maps the same segment.
//!
//! No deaths need to be detected: a thread that panics drops its group, which publishes that the
//! rank has left.

use std::sync::Arc;

use super::Host;
use super::segment::Segment;
use crate::{Error, GroupOptions, Result};

/// Creates all ranks of a group, in order.
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
