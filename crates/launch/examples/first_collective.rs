//! A rank that joins its job, sums one number over all ranks, and exits:
//! `launch --nproc-per-node 4 target/release/examples/first_collective`.
//!
//! If the environment variable `START_NS` is set (nanoseconds since 1970), rank 0 prints the
//! milliseconds since then; `benches/side_by_side/launch.sh` compares them with other launchers.
#![expect(clippy::print_stdout, reason = "prints a measurement")]

use std::error::Error;
use std::time::{SystemTime, UNIX_EPOCH};

use collective::{GroupOptions, ReduceOp, Topology, init_process_group};

fn main() -> Result<(), Box<dyn Error>> {
    launch::tie_to_parent()?;
    let topology = Topology::from_env(|name| std::env::var(name).ok())?;
    let group = init_process_group(&topology, GroupOptions::default())?;
    let mut x = [1.0_f32];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    assert!(x == [group.world_size() as f32], "the sum differs from the number of ranks");
    if group.rank() == 0
        && let Ok(start) = std::env::var("START_NS")
    {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        println!("ms {:.2}", now.saturating_sub(start.parse()?) as f64 / 1e6);
    }
    Ok(())
}
