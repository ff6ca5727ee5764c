//! Feeds arbitrary bytes of two connections to the TCP store's codec and state.
//!
//! Input: a byte whose bits choose the connection of each 16-byte piece, then the pieces. Checks: a
//! decoded request encodes to the same bytes, `need` is more than the received bytes, a resumed
//! attempt gives the same as a new one, and no reply goes to a closed connection.

use collective::store::tcp::codec::{MAGIC, Progress, ProtocolError, Request, decode, resume};
use collective::store::tcp::state::{Piece, State};

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((turns, data)) = data.split_first() else { return };
    let mut state = State::new();
    let mut open = [true; 2];
    let mut inputs: [(Vec<u8>, Progress); 2] = Default::default();
    for id in 0..2 {
        state.connect(id);
        let hello = Request::Validate { magic: MAGIC };
        state.handle(id, &hello, &mut |_, _| panic!("no reply")).expect("the magic is right");
    }
    for (number, piece) in data.chunks(16).enumerate() {
        let id = usize::from(turns >> (number % 8) & 1);
        if open[id] {
            inputs[id].0.extend_from_slice(piece);
            open[id] = serve(&mut state, id, &mut inputs[id], open);
            if !open[id] {
                state.disconnect(id);
            }
        }
    }
}

/// Takes the whole requests from `input`; false if the connection must be closed.
fn serve(
    state: &mut State,
    id: usize,
    (input, progress): &mut (Vec<u8>, Progress),
    open: [bool; 2],
) -> bool {
    loop {
        let resumed = resume(input, progress);
        assert_eq!(resumed, decode(input));
        let (request, len) = match resumed {
            Ok(decoded) => decoded,
            Err(ProtocolError::Incomplete { need }) => {
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
        *progress = Progress::default();
        input.drain(..len);
    }
}
