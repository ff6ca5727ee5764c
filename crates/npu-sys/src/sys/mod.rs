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
mod types;

use std::ffi::{c_char, c_void};

pub use acl::{ACL_LIBRARIES, Acl};
pub use hccl::{HCCL_LIBRARIES, Hccl};
pub use nnop::{NNOP_LIBRARIES, Nnop};
pub use ops::{NEWER_OP_HEADERS, OP_HEADERS, OPS_LIBRARIES, Ops, Phases, Run};
pub use types::*;

/// A type of the C interface and its C++ spelling.
pub trait CType {
    /// The C++ spelling.
    fn c() -> String;
}

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

macro_rules! spelled {
    ($($rust:ty => $c:literal,)*) => {
        $(impl $crate::sys::CType for $rust {
            fn c() -> String {
                $c.into()
            }
        })*
    };
}
pub(crate) use spelled;

spelled! {
    c_void => "void",
    c_char => "char",
    bool => "bool",
    i32 => "int32_t",
    u32 => "uint32_t",
    i64 => "int64_t",
    u64 => "uint64_t",
    usize => "size_t",
    f32 => "float",
    f64 => "double",
}

impl<T: CType> CType for *const T {
    fn c() -> String {
        format!("{} const*", T::c())
    }
}

impl<T: CType> CType for *mut T {
    fn c() -> String {
        format!("{}*", T::c())
    }
}
