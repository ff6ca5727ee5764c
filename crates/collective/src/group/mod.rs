//! [`ProcessGroup`]: its verbs in all their forms, and how groups are made, split and rebuilt.
//!
//! * [`process_group`]: the type, and how one is made;
//! * [`verbs`]: each verb as one function on slices; [`table`]: its blocking, asynchronous and
//!   scoped forms; [`scope`];
//! * [`object`]: verbs on any serde type;
//! * [`membership`], [`attempt`], [`rebuild`], [`mesh`]: joining through a store, subgroups, and
//!   groups after a failure.

mod attempt;
mod membership;
mod mesh;
pub mod object;
mod process_group;
mod rebuild;
pub mod scope;
mod table;
pub(crate) mod verbs;

pub use self::mesh::DeviceMesh;
pub use self::process_group::ProcessGroup;
pub use self::verbs::Message;
