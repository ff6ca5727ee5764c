//! Connections: non-blocking streams, socket options, and the address at which peers reach this
//! rank.

pub(crate) mod address;
pub(crate) mod sockopt;
pub(crate) mod stream;
pub(crate) mod sys;
