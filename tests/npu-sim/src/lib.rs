//! CANN as its documents describe it, over memory of the host: AscendCL, aclnn's operators and
//! HCCL.
//!
//! What it is for: showing that a program keeps CANN's rules. It is no model of speed, of the order
//! in which kernels add, nor of what the documents leave open, and a program that passes here has
//! not been run on Ascend. It is built from the rows of `npu-sys`, so a function cannot be missing
//! or of another type than there; that the rows are CANN's own is checked against real headers, not
//! here.
//!
//! * A breach of a rule with a documented status gives that status. A breach whose outcome the
//!   documents leave undefined is a violation as well: it is listed by [`Session::finish`].
//! * Streams are threads. By default they are lazy: nothing in a stream is done before somebody
//!   waits for it or asks after it, which is the latest that hardware may do it. So what reads a
//!   result, frees a buffer or reuses memory too early is found every time, not once in a while.
//! * Addresses of devices are not addresses: who follows one on the host crashes.
//! * Fresh memory holds NaN, and every allocation has a margin that is looked at when it is freed.
//!
//! Linked into a test ([`start`], [`acl`], [`nnop`], [`ops`], [`hccl`]), or opened as
//! `libnpu_sim.so` in place of `libascendcl.so`, `libnnopbase.so`, `libopapi.so` and `libhccl.so`,
//! when the environment takes the place of [`Config`]: `NPU_SIM_SOC`, `NPU_SIM_DEVICES`,
//! `NPU_SIM_EAGER`, `NPU_SIM_FAULT` as `function:nth:code`, and `NPU_SIM_REPORT` names a file that
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
