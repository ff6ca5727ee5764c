//! Settings of a rank's process: memory that is kept, threads of candle's own operators.

mod memory;
mod threads;

pub use memory::keep_freed_memory;
pub use threads::limit_threads;
