//! Server and client of PyTorch's `TCPStore` protocol.
//!
//! A launcher or rank 0 runs the server, every rank is a client; PyTorch's own clients and servers
//! (2.3 and later) interoperate with both. Four parts, the first two without any I/O:
//!
//! * [`codec`]: bytes to requests and back, with a limit on every length;
//! * [`state`]: values and waiters; applies requests and returns replies;
//! * [`server`]: one thread, one poll loop around the state;
//! * [`client`]: [`TcpStore`](client::TcpStore), a [`Store`](super::Store), over connections of
//!   `connection`.
//!
//! Invariant: integers are little-endian, a request is an opcode and its arguments, a reply has no
//! header, and replies come in the order of the requests on one connection.

pub mod client;
pub mod codec;
mod connection;
pub mod server;
pub mod state;
