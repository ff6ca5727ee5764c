//! Manual rendezvous of ranks that know only the store's address.
//!
//! `cargo run -p gradstack-collective --example store`
//!
//! Three threads act as three processes. Each listens on a port, publishes its address in the
//! store, reads the next rank's address, and sends it a message. `init_process_group` does the same
//! internally.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use collective::{
    Store, TcpStore,
    store::{PrefixStore, TcpStoreServer},
};

const WORLD_SIZE: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(10);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let server = TcpStoreServer::bind("127.0.0.1:0".parse()?)?;
    println!("the store listens on {}", server.local_addr());
    let port = server.port();
    let ranks: Vec<_> =
        (0..WORLD_SIZE).map(|rank| thread::spawn(move || run(rank, port))).collect();
    for rank in ranks {
        rank.join().expect("no rank panics")?;
    }
    Ok(())
}

fn run(rank: usize, store_port: u16) -> Result<()> {
    let store = TcpStore::connect("127.0.0.1", store_port, TIMEOUT)?;
    // A prefix for this job and attempt, in case the store serves others too.
    let store = PrefixStore::new("example/0", Arc::new(store));

    let listener = TcpListener::bind("127.0.0.1:0")?;
    store.set(&format!("addr/{rank}"), listener.local_addr()?.to_string().as_bytes())?;

    let next = (rank + 1) % WORLD_SIZE;
    // Blocks until that rank has published its address.
    let addr = String::from_utf8(store.get(&format!("addr/{next}"), TIMEOUT)?)?;
    TcpStream::connect(&addr)?.write_all(format!("hello from rank {rank}").as_bytes())?;
    let mut hello = String::new();
    listener.accept()?.0.read_to_string(&mut hello)?;
    println!("rank {rank} heard: {hello}");

    // A barrier: the last rank to arrive releases the others.
    if store.add("arrived", 1)? == WORLD_SIZE as i64 {
        store.set("all", b"")?;
    }
    Ok(store.wait(&["all"], TIMEOUT)?)
}
