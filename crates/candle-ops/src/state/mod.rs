//! State of a pass that is shared by operators: the [`Context`](context::Context) and the types of
//! its fields.

pub(crate) mod autotune;
pub(crate) mod constants;
pub mod context;
pub(crate) mod index_range;
pub mod known_inputs;
pub(crate) mod precision;
pub(crate) mod random;
