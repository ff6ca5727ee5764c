//! The loops of a run: training by epochs or by iterations, validation between them, tests.

mod judge;
mod train;

pub(crate) use judge::{judge_once, nothing_to_judge};
pub(crate) use train::train;
