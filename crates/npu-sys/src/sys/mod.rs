//! The C interface as it is: library names, types, tables of functions. Nothing here decides anything.
//!
//! Each family of functions is declared once, as a macro that hands its rows to another macro:
//! `acl_table!(bind)` makes of them the struct [`Acl`], a simulator makes exported functions of the
//! same rows, and [`headers`](crate::headers) C++ that a compiler holds against the real headers. The C
//! spelling of a row follows from its Rust types by [`CType`]; it is written nowhere a second time.

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

/// A type of the C interface, and how C++ spells it.
pub trait CType {
    /// The C++ spelling.
    fn c() -> String;
}

/// One function of a table.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// Its C name.
    pub name: &'static str,
    /// Whether the table cannot exist without it.
    pub required: bool,
    /// A version of CANN that has it: 8.1, or the later one that its row names.
    pub since: &'static str,
    /// The C++ spelling of what it returns.
    pub result: fn() -> String,
    /// The C++ spellings of what it takes.
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
