//! The frames on a connection: headers of fixed size, some followed by data.
//!
//! A header is 64 bytes: its kind, seven magic bytes, and seven little-endian words, of which
//! unused ones are zero. So a stream that is out of sync, or another program's, is detected at the
//! next header. A length in a header is compared with the expected one before any data are read.
//! Only the length of a control message, which is limited, determines an allocation.
//!
//! Control messages, which are rare and short, are JSON after a header.

use serde::{Deserialize, Serialize};

use super::failure::{Cause, Failure};
use crate::op::Fingerprint;
use crate::{DType, Rank, Verb};

/// Length of a header, in bytes.
pub const HEADER: usize = 64;
/// Maximum length of a control message, in bytes.
pub const CONTROL_BYTES: usize = 64 << 10;

/// Bytes 1 to 7 of every header.
const MAGIC: [u8; 7] = *b"collec1";
const WORDS: usize = 7;

/// The contents of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The first header in each direction: which rank connects to which.
    Hello(Hello),
    /// The sender has entered an operation of all ranks.
    Enter(Fingerprint),
    /// A block of the operation in progress follows.
    Block {
        /// The operation's sequence number.
        seq: u64,
        /// The block's index among those from this sender to this receiver in the operation.
        index: u64,
        /// Bytes that follow.
        bytes: u64,
    },
    /// A point-to-point message follows.
    Message {
        /// The verb that sends it.
        verb: Verb,
        /// Its element type.
        dtype: DType,
        /// Number of elements that follow.
        count: u64,
    },
    /// A control message follows.
    Control {
        /// Bytes that follow, at most [`CONTROL_BYTES`].
        bytes: usize,
    },
}

/// The first frame of a connection, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Random, unique to this group and attempt.
    pub nonce: u128,
    /// Number of ranks.
    pub world: u64,
    /// The sender's rank.
    pub from: u64,
    /// The intended receiver's rank.
    pub to: u64,
    /// Purpose of the connection.
    pub channel: Channel,
}

/// Purpose of a connection; a pair of ranks has one of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Operations; read by the thread that runs them.
    Data,
    /// Control messages; read at all times.
    Control,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// The sender leaves the group; nothing follows.
    Goodbye,
    /// The group has failed.
    Failed(Failure),
    /// Asks which ranks the receiver waits for.
    Ask,
    /// Answer: the ranks that the sender waits for; empty if it is not waiting in an operation.
    Waiting(Vec<Rank>),
}

/// Error for bytes that are not a valid frame or control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Frame {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let (kind, words) = match *self {
            Self::Hello(Hello { nonce, world, from, to, channel }) => {
                let halves = [nonce as u64, (nonce >> 64) as u64];
                (1, [halves[0], halves[1], world, from, to, channel as u64, 0])
            }
            Self::Enter(print) => {
                let [a, b, c, d, e] = print.words();
                (2, [print.seq, a, b, c, d, e, 0])
            }
            Self::Block { seq, index, bytes } => (3, [seq, index, bytes, 0, 0, 0, 0]),
            Self::Message { verb, dtype, count } => {
                (4, [verb as u64, dtype as u64, count, 0, 0, 0, 0])
            }
            Self::Control { bytes } => (5, [bytes as u64, 0, 0, 0, 0, 0, 0]),
        };
        let mut header = [0; HEADER];
        header[0] = kind;
        header[1..8].copy_from_slice(&MAGIC);
        for (bytes, word) in header[8..].as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        header
    }

    /// Decodes a header. Accepts exactly the output of [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// [`Malformed`].
    pub fn decode(header: &[u8; HEADER]) -> Result<Self, Malformed> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(header[8..].as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let frame = match (header[0], words) {
            (1, [low, high, world, from, to, channel, 0]) => {
                let nonce = u128::from(high) << 64 | u128::from(low);
                let channel = match channel {
                    0 => Channel::Data,
                    1 => Channel::Control,
                    _ => return Err(Malformed),
                };
                Self::Hello(Hello { nonce, world, from, to, channel })
            }
            (2, [seq, a, b, c, d, e, 0]) => {
                Self::Enter(Fingerprint::from_words(seq, [a, b, c, d, e]))
            }
            (3, [seq, index, bytes, 0, 0, 0, 0]) => Self::Block { seq, index, bytes },
            (4, [verb, dtype, count, 0, 0, 0, 0]) => {
                let verb = usize::try_from(verb).ok().and_then(|code| Verb::ALL.get(code));
                let dtype = usize::try_from(dtype).ok().and_then(|code| DType::ALL.get(code));
                let (Some(&verb), Some(&dtype)) = (verb, dtype) else { return Err(Malformed) };
                Self::Message { verb, dtype, count }
            }
            (5, [bytes, 0, 0, 0, 0, 0, 0]) if bytes <= CONTROL_BYTES as u64 => {
                Self::Control { bytes: bytes as usize }
            }
            _ => return Err(Malformed),
        };
        if header[1..8] == MAGIC { Ok(frame) } else { Err(Malformed) }
    }
}

impl ControlMessage {
    /// Encodes header and message; `None` if it is too long, which only a caller's text can cause.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let json = serde_json::to_vec(self).ok().filter(|json| json.len() <= CONTROL_BYTES)?;
        Some([&Frame::Control { bytes: json.len() }.encode()[..], &json].concat())
    }

    /// Decodes a message from a group of `world` ranks.
    ///
    /// # Errors
    ///
    /// [`Malformed`], also if it names ranks that the group does not have.
    pub fn decode(json: &[u8], world: usize) -> Result<Self, Malformed> {
        let message: Self = serde_json::from_slice(json).map_err(|_| Malformed)?;
        let all = |ranks: &[Rank]| ranks.len() <= world && ranks.iter().all(|&rank| rank < world);
        let known = match &message {
            Self::Goodbye | Self::Ask => true,
            Self::Waiting(ranks) => all(ranks),
            Self::Failed(Failure { by, cause }) => {
                all(&[*by])
                    && match cause {
                        Cause::Died { rank, .. } => all(&[*rank]),
                        Cause::Aborted { .. } => true,
                        Cause::TimedOut { missing, .. } => all(missing),
                        Cause::Mismatch { by_rank, .. } => {
                            by_rank.iter().all(|&(rank, _)| rank < world)
                        }
                    }
            }
        };
        if known { Ok(message) } else { Err(Malformed) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = Frame> {
        let channel = prop_oneof![Just(Channel::Data), Just(Channel::Control)];
        let hello = (any::<u128>(), any::<[u64; 3]>(), channel).prop_map(
            |(nonce, [world, from, to], channel)| {
                Frame::Hello(Hello { nonce, world, from, to, channel })
            },
        );
        prop_oneof![
            hello,
            any::<(u64, [u64; 5])>()
                .prop_map(|(seq, words)| Frame::Enter(Fingerprint::from_words(seq, words))),
            any::<[u64; 3]>().prop_map(|[seq, index, bytes]| Frame::Block { seq, index, bytes }),
            (0..Verb::ALL.len(), 0..DType::ALL.len(), any::<u64>()).prop_map(
                |(verb, dtype, count)| {
                    Frame::Message { verb: Verb::ALL[verb], dtype: DType::ALL[dtype], count }
                }
            ),
            (0..=CONTROL_BYTES).prop_map(|bytes| Frame::Control { bytes }),
        ]
    }

    proptest! {
        #[test]
        fn headers_round_trip(frame in frames()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }

        #[test]
        fn a_flipped_bit_changes_the_frame_or_is_malformed(frame in frames(), at in 0..HEADER, bit in 0..8) {
            let mut header = frame.encode();
            header[at] ^= 1_u8 << bit;
            if let Ok(other) = Frame::decode(&header) {
                prop_assert_ne!(other, frame);
                prop_assert_eq!(other.encode(), header);
            }
        }
    }

    #[test]
    fn other_protocols_are_malformed() {
        let mut http = [b' '; HEADER];
        http[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(Frame::decode(&http), Err(Malformed));
        assert_eq!(Frame::decode(&[0; HEADER]), Err(Malformed));
        let mut long = Frame::Control { bytes: 0 }.encode();
        long[8..16].copy_from_slice(&(CONTROL_BYTES as u64 + 1).to_le_bytes());
        assert_eq!(Frame::decode(&long), Err(Malformed));
    }

    #[test]
    fn control_messages_round_trip_and_name_only_ranks_of_the_group() {
        let failed = |cause| ControlMessage::Failed(Failure { by: 1, cause });
        for message in [
            ControlMessage::Goodbye,
            ControlMessage::Ask,
            ControlMessage::Waiting(vec![0, 2]),
            failed(Cause::Died { rank: 2, pid: 7, how: Some("x".into()) }),
            failed(Cause::TimedOut { missing: vec![2], text: "t".into() }),
            failed(Cause::Mismatch { field: "verb".into(), by_rank: vec![(2, "x".into())] }),
        ] {
            let bytes = message.encode().unwrap();
            let (header, json) = bytes.split_first_chunk().unwrap();
            assert_eq!(Frame::decode(header), Ok(Frame::Control { bytes: json.len() }));
            assert_eq!(ControlMessage::decode(json, 3).as_ref(), Ok(&message));
            let names_rank_2 = !matches!(message, ControlMessage::Goodbye | ControlMessage::Ask);
            assert_eq!(ControlMessage::decode(json, 2).is_err(), names_rank_2);
        }
        assert_eq!(ControlMessage::decode(b"[[[[", 3), Err(Malformed));
        let long = ControlMessage::Failed(Failure {
            by: 0,
            cause: Cause::Aborted { reason: "x".repeat(CONTROL_BYTES) },
        });
        assert_eq!(long.encode(), None);
    }
}
