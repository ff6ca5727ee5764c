//! The parts of a call: element types, operators, its description, and the checks that need no
//! peer.

pub(crate) mod blocks;
mod desc;
mod element;
mod reduce_op;

pub use self::desc::{BufferLocation, Fingerprint, OpDesc, Verb};
pub use self::element::{DType, Element, F8E4M3, F8E5M2};
pub use self::reduce_op::{Factor, ReduceOp};
