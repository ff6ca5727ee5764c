//! Bindings to Ascend CANN, always loaded at run time.
//!
//! Nothing of CANN is needed to build, and nothing is linked: the libraries are opened with
//! `dlopen` when first asked for. Where they are missing, or too old to have a function, that is a
//! value one can read, not a crash:
//!
//! ```
//! match npu_sys::probe() {
//!     Ok(found) => println!("{found}"),       // "8 x Ascend910B2, AscendCL 1.14.0"
//!     Err(reason) => println!("no NPU: {reason}"),
//! }
//! ```
//!
//! | layer | what it is |
//! |---|---|
//! | [`sys`] | the C headers: types, library names, tables of functions, each written down once |
//! | [`Acl`](sys::Acl), [`Nnop`](sys::Nnop), [`Ops`](sys::Ops), [`Hccl`](sys::Hccl) | one method per C function, its [`Status`] turned into `Result` |
//! | [`probe`], [`safe`] | safe: what this machine has; contexts, memory, streams, events, operators |
//! | [`headers`] | the tables as C++ assertions, for a compiler and the real headers |
//!
//! # What has been verified, and what has not
//!
//! Every prototype of AscendCL and HCCL, the layout of their structs and every constant here compile
//! against the headers of the torch_npu wheels 2.14.0 and 2.5.1, by `.ci/ascend-headers`, in which the
//! same rows with a mistake in each must all fail; likewise all rows, those of operators included,
//! against the headers of CANN 8.1.RC1, but for four operators that came later. Of those,
//! `aclnnFusedSgd` and `aclnnFusedAdamw` were compiled so against the public headers of ops-nn 9.1.0 and
//! 9.2.0-beta.2, and `aclnnAmpUpdateScale` and `aclnnForeachNonFiniteCheckAndUnscale` against the prototypes
//! that CANN's generator has put into headers in public. The order of calls is tested on a simulator that
//! enforces the rules of CANN's documents. **None of this has been run on Ascend hardware or against real
//! CANN libraries.**

pub mod headers;
mod installed;
mod loader;
mod plan;
mod probe;
mod result;
pub mod safe;
mod soc;
mod status;
pub mod sys;
mod table;

pub use loader::{Attempt, LoadError};
pub use plan::Plan;
pub use probe::{Devices, Version, probe, probe_with};
pub use result::finalize;
pub use soc::Soc;
pub use status::{Error, Result, Status};
pub use table::Returned;
