//! A program that is its own launcher: `first_collective launch --nproc-per-node 4 -- first` starts four
//! ranks of itself, each of which sums one number over all and ends.
//!
//! With `START_NS` (nanoseconds since 1970) in its environment rank 0 says how many milliseconds have
//! passed since then: `benches/side_by_side/launch.sh` asks so, under several launchers.
#![expect(clippy::print_stdout, reason = "what it is for")]

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use collective::{GroupOptions, ReduceOp, Topology, init_process_group};

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() != Some("first") {
        return runner::cli::main();
    }
    match first() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn first() -> Result<(), Box<dyn std::error::Error>> {
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
