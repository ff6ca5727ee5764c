//! A rank that joins its job, sums one number over all ranks, and ends:
//! `launch --nproc-per-node 4 target/release/examples/first_collective`.
//!
//! With `START_NS` (nanoseconds since 1970) in its environment rank 0 prints the milliseconds since then, which
//! `benches/side_by_side/launch.sh` compares with other launchers'.
#![expect(clippy::print_stdout, reason = "what it is for")]

use std::error::Error;
use std::time::{SystemTime, UNIX_EPOCH};

use collective::{GroupOptions, ReduceOp, Topology, init_process_group};

fn main() -> Result<(), Box<dyn Error>> {
    launch::tie_to_parent()?;
    let topology = Topology::from_env(|name| std::env::var(name).ok())?;
    let group = init_process_group(&topology, GroupOptions::default())?;
    let mut x = [1.0_f32];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    assert!(x == [group.world_size() as f32], "a sum over all ranks is the same everywhere");
    if group.rank() == 0
        && let Ok(start) = std::env::var("START_NS")
    {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        println!("ms {:.2}", now.saturating_sub(start.parse()?) as f64 / 1e6);
    }
    Ok(())
}
