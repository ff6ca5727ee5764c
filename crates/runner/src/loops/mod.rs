//! The loops of a run: epochs of training, and validation between them.

mod epoch;
mod val;

pub(crate) use epoch::train;
