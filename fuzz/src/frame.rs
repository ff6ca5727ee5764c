//! Decodes arbitrary bytes as frames of the TCP backend.
//!
//! Input: the bytes of one peer, headers and the payload of each control message. Checks: a decoded
//! frame encodes to the same bytes, a payload is within the limit, and a control message names only
//! ranks of the group.

use collective::wire::{CONTROL_BYTES, Cause, Control, Failure, Frame, HEADER};

const WORLD: usize = 5;

/// Checks one input.
pub fn check(data: &[u8]) {
    // As a payload without a header, too.
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
}

fn message(json: &[u8]) {
    let Ok(message) = Control::decode(json, WORLD) else { return };
    match &message {
        Control::Waiting(ranks) => assert!(ranks.iter().all(|&rank| rank < WORLD)),
        Control::Failed(Failure { by, cause }) => {
            assert!(*by < WORLD);
            if let Cause::Died { rank, .. } = cause {
                assert!(*rank < WORLD);
            }
        }
        _ => {}
    }
    // The input may lack fields that `encode` writes as null, so the encoding may exceed the limit.
    let Some(again) = message.encode() else { return };
    let (_, json) = again.split_first_chunk::<HEADER>().expect("a header");
    assert_eq!(Control::decode(json, WORLD).as_ref(), Ok(&message));
}
