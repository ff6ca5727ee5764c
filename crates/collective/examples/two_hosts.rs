//! Two machines add their numbers, over TCP.
//!
//! On the first machine, whose address is 10.0.0.1 on the second machine's network:
//!
//! ```sh
//! RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 cargo run --example two_hosts
//! ```
//!
//! On the second one:
//!
//! ```sh
//! RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 cargo run --example two_hosts
//! ```
//!
//! In two terminals of one machine, with `MASTER_ADDR=127.0.0.1`, the same command uses shared
//! memory; `TRANSPORT=tcp` on both selects TCP. Port 29500 of the first machine must be open to the
//! second, and the ephemeral ports in both directions. With several interfaces, the one on the
//! route to `MASTER_ADDR` is used, unless `COLLECTIVE_IFNAME=eth1` names another.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::time::{Duration, Instant};

use collective::{GroupOptions, ReduceOp, Result, Topology, Transport, init_process_group};

fn main() -> Result<()> {
    let topology = Topology::from_env(|name| std::env::var(name).ok())?;
    println!("{topology}");
    let mut options = GroupOptions::default().with_timeout(Duration::from_secs(60));
    if std::env::var("TRANSPORT").is_ok_and(|transport| transport == "tcp") {
        options = options.with_transport(Transport::Tcp);
    }
    let group = init_process_group(&topology, options)?;
    println!("over {}: {}", group.backend_name(), group.backend_reason());

    let mut x = vec![group.rank() as f32 + 1.0; 1 << 20];
    group.barrier()?;
    let start = Instant::now();
    group.all_reduce(&mut x, ReduceOp::Sum)?;
    println!("4 MiB summed in {:?}: {} everywhere", start.elapsed(), x[0]);
    group.barrier()
}
