//! The frames on a connection of the TCP backend, on arbitrary bytes.
//!
//! The input is what one peer sends: headers, and behind those of control messages what they
//! announce. Checked: what is decoded encodes to the same bytes, a message announces no more than
//! the limit, and a control message names only ranks of the group.

#![no_main]

use collective::wire::{CONTROL_BYTES, Cause, ControlMessage, Failure, Frame, HEADER};
use libfuzzer_sys::fuzz_target;

const WORLD: usize = 5;

fuzz_target!(|data: &[u8]| {
    // Also without a header in the way.
    message(data);
    let mut rest = data;
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER>() {
        let Ok(frame) = Frame::decode(header) else { return };
        assert_eq!(frame.encode(), *header);
        rest = behind;
        if let Frame::Control { bytes } = frame {
            assert!(bytes <= CONTROL_BYTES);
            let Some((json, behind)) = rest.split_at_checked(bytes) else { return };
            message(json);
            rest = behind;
        }
    }
});

fn message(json: &[u8]) {
    let Ok(message) = ControlMessage::decode(json, WORLD) else { return };
    match &message {
        ControlMessage::Waiting(ranks) => assert!(ranks.iter().all(|&rank| rank < WORLD)),
        ControlMessage::Failed(Failure { by, cause }) => {
            assert!(*by < WORLD);
            if let Cause::Died { rank, .. } = cause {
                assert!(*rank < WORLD);
            }
        }
        _ => {}
    }
    // What was read may have left out what is written as null, and so have been shorter.
    let Some(again) = message.encode() else { return };
    let (_, json) = again.split_first_chunk::<HEADER>().expect("a header");
    assert_eq!(ControlMessage::decode(json, WORLD).as_ref(), Ok(&message));
}
