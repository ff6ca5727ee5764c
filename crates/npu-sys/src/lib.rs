//! Bindings to Ascend CANN, loaded at run time.
//!
//! Building and linking need no CANN: the libraries are opened with `dlopen` at the first use. If
//! they are missing or lack a function, that is an error value:
//!
//! ```
//! match npu_sys::probe() {
//!     Ok(found) => println!("{found}"),       // "8 x Ascend910B2, AscendCL 1.14.0"
//!     Err(reason) => println!("no NPU: {reason}"),
//! }
//! ```
//!
//! | layer | content |
//! |---|---|
//! | [`sys`] | the C headers: types, library names, tables of functions |
//! | [`Acl`](sys::Acl), [`Nnop`](sys::Nnop), [`Ops`](sys::Ops), [`Hccl`](sys::Hccl) | one method for each C function, which returns its [`Status`] as a `Result` |
//! | [`probe`], [`safe`] | safe code: available devices; contexts, memory, streams, events, operators |
//! | [`headers`] | the tables as C++ assertions, to compile with CANN's headers |
//!
//! # Verification
//!
//! `.ci/ascend-headers` compiles every prototype of AscendCL and HCCL, the layout of their structs
//! and every constant against the headers of the torch_npu wheels 2.14.0 and 2.5.1; the same rows
//! with a mistake in each must all fail. All rows, including operators, passed the same check with
//! the headers of CANN 8.1.RC1, except for four newer operators. Of those, `aclnnFusedSgd` and
//! `aclnnFusedAdamw` were checked with the public headers of ops-nn 9.1.0 and 9.2.0-beta.2, and
//! `aclnnAmpUpdateScale` and `aclnnForeachNonFiniteCheckAndUnscale` with the prototypes in public
//! headers written by CANN's generator. The order of calls is tested on a simulator that enforces
//! the rules of CANN's documentation. **Not tested on Ascend hardware or with real CANN
//! libraries.**

#[cfg(not(unix))]
compile_error!("`npu-sys` needs Unix: it opens CANN by `dlopen`");

pub mod headers;
mod installed;
mod loader;
mod plan;
mod probe;
mod result;
mod returned;
pub mod safe;
mod soc;
mod status;
pub mod sys;
mod table;
mod types;

pub use loader::{Attempt, LoadError};
pub use plan::Plan;
pub use probe::{Devices, Version, probe, probe_with};
pub use result::finalize;
pub use returned::Returned;
pub use soc::Soc;
pub use status::{Error, Result, Status};

/// Tests the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
