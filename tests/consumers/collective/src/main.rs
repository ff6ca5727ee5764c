//! The first program of `collective`'s README.

use std::time::Duration;

use collective::{ProcessGroup, ReduceOp};

fn main() -> collective::Result<()> {
    let ranks = ProcessGroup::threads(2, Duration::from_secs(10))?;
    std::thread::scope(|scope| {
        for group in ranks {
            scope.spawn(move || {
                let mut gradient = vec![group.rank() as f32; 1000];
                group.all_reduce(&mut gradient, ReduceOp::Avg).expect("both ranks are here");
                assert_eq!(gradient, [0.5; 1000]);
            });
        }
    });

    // A rank of torchrun, `launch`, srun or mpirun; started alone, the only one.
    let group = collective::init()?;
    println!("rank {} of {} over {}", group.rank(), group.world_size(), group.backend_name());
    Ok(())
}
