//! The commands `launch` and `launch store`.

mod flags;
mod nproc;
mod refused;
mod store;

pub use self::flags::LaunchArgs;
pub use self::nproc::nproc_per_node;
pub use self::store::{StoreArgs, serve_store};
