//! A simulator of CANN as its documents describe it, in host memory: AscendCL, aclnn's operators
//! and HCCL.
//!
//! Its purpose is to show that a program keeps CANN's rules. It does not model speed, the order in
//! which kernels add, or behaviour that the documents leave open; a program that passes here has
//! not been run on Ascend. It is built from the rows of `npu-sys`, so every function exists and has
//! the type declared there; a separate check compares the rows with CANN's headers.
//!
//! * A breach of a rule with a documented status gives that status. A breach whose outcome the
//!   documents leave undefined is a violation as well: it is listed by [`Session::finish`].
//! * Streams are threads. By default they are lazy: work in a stream runs only when a caller waits
//!   for it or queries it, the latest time that hardware may run it. So a program that reads a
//!   result, frees a buffer or reuses memory too early fails every time, not once in a while.
//! * Device addresses are not mapped on the host: dereferencing one there crashes.
//! * Fresh memory holds NaN, and every allocation has a margin that is checked when it is freed.
//!
//! A test links the simulator ([`start`], [`acl`], [`nnop`], [`ops`], [`hccl`]), or opens it as
//! `libnpu_sim.so` in place of `libascendcl.so`, `libnnopbase.so`, `libopapi.so` and `libhccl.so`.
//! The library takes its [`Config`] from the environment: `NPU_SIM_SOC`, `NPU_SIM_DEVICES`,
//! `NPU_SIM_EAGER`, `NPU_SIM_FAULT` as `function:nth:code`, and `NPU_SIM_REPORT`, the file that
//! violations are appended to.

mod acl;
mod export;
mod hccl;
mod hub;
mod kernels;
mod memory;
mod nnop;
mod ops;
mod raw;
pub mod sequence;
mod soc;
mod stream;
mod wire;
mod world;

use std::sync::LazyLock;

use npu_sys::safe::{Context, Operators, Stream};
use npu_sys::sys::{Acl, Hccl, Nnop, Ops};

pub use export::symbol;
pub use soc::Soc;
pub use world::{Config, Session, start};

/// The table of AscendCL, of the simulator in this process.
pub fn acl() -> &'static Acl {
    static TABLE: LazyLock<Acl> = LazyLock::new(|| export::acl_table(&[]));
    &TABLE
}

/// The table of what operators share.
pub fn nnop() -> &'static Nnop {
    static TABLE: LazyLock<Nnop> = LazyLock::new(|| export::nnop_table(&[]));
    &TABLE
}

/// The table of operators.
pub fn ops() -> &'static Ops {
    static TABLE: LazyLock<Ops> = LazyLock::new(|| export::ops_table(&[]));
    &TABLE
}

/// The table of operators of a CANN that lacks some; CANN 8.1 lacks [`LATER`]. It stays for ever.
pub fn ops_without(operators: &[&str]) -> &'static Ops {
    Box::leak(Box::new(export::ops_table(operators)))
}

/// Operators that CANN 8.1 does not declare.
pub const LATER: &[&str] = &[
    "aclnnForeachNonFiniteCheckAndUnscale",
    "aclnnAmpUpdateScale",
    "aclnnFusedSgd",
    "aclnnFusedAdamw",
];

/// Operators in a stream of their own on a device, of the simulator in this process.
///
/// # Errors
///
/// Those of the calls that make them, if they are to fail.
pub fn operators(device: usize) -> npu_sys::Result<Operators> {
    operators_of(device, ops())
}

/// Operators of a table in a stream of their own on a device.
///
/// # Errors
///
/// As [`operators`].
pub fn operators_of(device: usize, ops: &'static Ops) -> npu_sys::Result<Operators> {
    let context = Context::new(acl(), device)?;
    Operators::new(Stream::new(&context)?, nnop(), ops)
}

/// The table of HCCL.
pub fn hccl() -> &'static Hccl {
    static TABLE: LazyLock<Hccl> = LazyLock::new(|| export::hccl_table(&[]));
    &TABLE
}
