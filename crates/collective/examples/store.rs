//! Rendezvous by hand: ranks that know nothing of one another but the store's address.
//!
//! `cargo run -p collective --example store`
//!
//! Three threads play three processes. Each listens somewhere, tells the store where, learns where
//! the others are, and says hello to the next. `init_process_group` does the same behind the scenes.

#![expect(clippy::print_stdout, reason = "an example shows something")]

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
    // Keys of this job and attempt only, should the store serve others as well.
    let store = PrefixStore::new("example/0", Arc::new(store));

    let listener = TcpListener::bind("127.0.0.1:0")?;
    store.set(&format!("addr/{rank}"), listener.local_addr()?.to_string().as_bytes())?;

    let next = (rank + 1) % WORLD_SIZE;
    // Waits until that rank has come.
    let addr = String::from_utf8(store.get(&format!("addr/{next}"), TIMEOUT)?)?;
    TcpStream::connect(&addr)?.write_all(format!("hello from rank {rank}").as_bytes())?;
    let mut hello = String::new();
    listener.accept()?.0.read_to_string(&mut hello)?;
    println!("rank {rank} heard: {hello}");

    // A barrier: the last to come opens the door.
    if store.add("arrived", 1)? == WORLD_SIZE as i64 {
        store.set("all", b"")?;
    }
    Ok(store.wait(&["all"], TIMEOUT)?)
}
