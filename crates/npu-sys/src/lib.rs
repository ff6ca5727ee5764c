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
//! What is bound so far is the part of `acl/acl.h` that says what is there: initialisation, device
//! count, SoC name and version.
//!
//! | layer | what it is |
//! |---|---|
//! | [`sys`] | the C header: types, library names, [`Acl`](sys::Acl), a table of function pointers |
//! | `result` | one function per C function, [`Status`] turned into `Result` |
//! | [`probe`] | safe: what this machine has |
//!
//! # What has been verified, and what has not
//!
//! The prototypes were compared, outside this repository, with the headers of CANN 8.1.RC1 and of
//! the torch_npu 2.14.0 wheel. The tests run against small libraries with the same C interface,
//! compiled on the spot. **None of this has been run on Ascend hardware or against real CANN
//! libraries.**

mod loader;
mod probe;
mod result;
mod status;
pub mod sys;

pub use loader::{Attempt, LoadError};
pub use probe::{Devices, Version, probe, probe_with};
pub use result::finalize;
pub use status::{Error, Result, Status};
