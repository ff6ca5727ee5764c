//! The C interface: library names, types, tables of functions.
//!
//! Each family of functions is declared once, as a macro that passes its rows to another macro:
//! `acl_table!(bind)` generates the struct [`Acl`], a simulator generates exported functions from
//! the same rows, and [`headers`](crate::headers) generates C++ assertions to compile with CANN's
//! headers. [`CType`] derives the C spelling of a row from its Rust types.

mod acl;
mod hccl;
mod nnop;
mod ops;

pub use acl::{ACL_LIBRARIES, Acl};
pub use hccl::{HCCL_LIBRARIES, Hccl};
pub use nnop::{NNOP_LIBRARIES, Nnop};
pub use ops::{NEWER_OP_HEADERS, OP_HEADERS, OPS_LIBRARIES, Ops, Phases};

pub use crate::types::*;

/// One function of a table.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// The function's C name.
    pub name: &'static str,
    /// Whether loading the table fails without it.
    pub required: bool,
    /// A version of CANN that has it: 8.1, or the later one in its row.
    pub since: &'static str,
    /// The C++ spelling of the return type.
    pub result: fn() -> String,
    /// The C++ spellings of the parameter types.
    pub parameters: &'static [fn() -> String],
}
