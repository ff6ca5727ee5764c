//! Two ranks, as two threads, add their numbers:
//! `cargo run -p gradstack-collective --example all_reduce`.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::time::Duration;

use collective::{ProcessGroup, ReduceOp, Result};

fn rank(group: &ProcessGroup) -> Result<()> {
    let mut x = [group.rank() as f32, 1.0, 0.5];
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    println!("rank {} of {}: {x:?}", group.rank(), group.world_size());
    group.barrier()
}

fn main() -> Result<()> {
    let groups = ProcessGroup::threads(2, Duration::from_secs(10))?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(|| rank(group))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank does not panic"))
    })
}
