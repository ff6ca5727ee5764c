//! The store's codec and state on arbitrary bytes.
//!
//! The input is what two connections send. Its first byte is a bit pattern that says, piece by
//! piece, whose turn it is; pieces are of 16 bytes. Checked: what is decoded encodes to the same
//! bytes, `need` is never satisfied yet, and no wait is answered on a connection that is not there.

#![no_main]

use collective::store::tcp::codec::{Decoded, MAGIC, Request, decode};
use collective::store::tcp::state::{Piece, State};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((turns, data)) = data.split_first() else { return };
    let mut state = State::new();
    let mut open = [true; 2];
    let mut inputs = [Vec::new(), Vec::new()];
    for id in 0..2 {
        state.connect(id);
        let hello = Request::Validate { magic: MAGIC };
        state.handle(id, &hello, &mut |_, _| panic!("no reply")).expect("the magic is right");
    }
    for (number, piece) in data.chunks(16).enumerate() {
        let id = usize::from(turns >> (number % 8) & 1);
        if open[id] {
            inputs[id].extend_from_slice(piece);
            open[id] = serve(&mut state, id, &mut inputs[id], open);
            if !open[id] {
                state.disconnect(id);
            }
        }
    }
});

/// Takes the whole requests from `input`; false if the connection must be closed.
fn serve(state: &mut State, id: usize, input: &mut Vec<u8>, open: [bool; 2]) -> bool {
    loop {
        let (request, len) = match decode(input) {
            Ok(Decoded::Request { request, len }) => (request, len),
            Ok(Decoded::Incomplete { need }) => {
                assert!(need > input.len());
                return true;
            }
            Err(_) => return false,
        };
        let mut again = Vec::new();
        request.encode(&mut again);
        assert_eq!(again, input[..len]);
        let mut reply = |to: usize, _: Piece<'_>| assert!(open[to]);
        if state.handle(id, &request, &mut reply).is_err() {
            return false;
        }
        input.drain(..len);
    }
}
