//! What goes over a connection: headers of one fixed size, some with bytes behind them.
//!
//! A header is 64 bytes: its kind, seven bytes that every header has, and seven little-endian
//! words, those that a kind does not use being zero. So a stream that is out of step, or a
//! stranger's, is noticed at the next header. A header that says how many bytes follow is compared
//! with what is expected before any is read; nothing is ever allocated by a length from a peer but
//! a control message's, which has a limit.
//!
//! Control messages, rare and short, are JSON behind a header.

use serde::{Deserialize, Serialize};

use crate::op::Fingerprint;
use crate::{DType, Rank, Verb};

/// Bytes of a header.
pub const HEADER: usize = 64;
/// The longest control message.
pub const CONTROL_BYTES: usize = 64 << 10;

/// Bytes 1 to 7 of every header.
const MAGIC: [u8; 7] = *b"collec1";
const WORDS: usize = 7;

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Who connects to whom; the first header each way.
    Hello(Hello),
    /// The sender has entered an operation that all ranks take part in.
    Enter(Fingerprint),
    /// A block of the operation under way, `bytes` long, follows.
    Block {
        /// The operation.
        seq: u64,
        /// The block's place among those from this sender to this receiver in the operation.
        index: u64,
        /// Bytes that follow.
        bytes: u64,
    },
    /// A message between a pair of ranks follows.
    Message {
        /// What the message is part of.
        verb: Verb,
        /// Its elements.
        dtype: DType,
        /// How many follow.
        count: u64,
    },
    /// A control message follows.
    Control {
        /// Bytes that follow, at most [`CONTROL_BYTES`].
        bytes: usize,
    },
}

/// How a connection begins, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Random, of this group alone: no other group, nor an earlier one of the same name, has it.
    pub nonce: u128,
    /// Its ranks.
    pub world: u64,
    /// The sender's rank.
    pub from: u64,
    /// The rank the sender means to talk to.
    pub to: u64,
    /// What the connection is for.
    pub channel: Channel,
}

/// A pair of ranks has one connection of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Operations, read by the thread that carries them out.
    Data,
    /// Control messages, read at all times.
    Control,
}

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// The sender leaves the group; nothing follows.
    Goodbye,
    /// The group has failed.
    Failed(Failure),
    /// Whom does the receiver wait for?
    Ask,
    /// The sender, when asked, waits for these ranks; if none, it is not waiting in an operation.
    Waiting(Vec<Rank>),
}

/// Why a group failed, in words that are the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Who noticed.
    pub by: Rank,
    /// What happened.
    pub cause: Cause,
}

/// See [`Failure`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A rank's process ended, or its host is out of reach.
    Died {
        /// The rank.
        rank: Rank,
        /// Its process id.
        pid: u32,
        /// If it is not known to have ended: what makes it lost.
        how: Option<String>,
    },
    /// `by` gave the group up.
    Aborted {
        /// Its words.
        reason: String,
    },
    /// Ranks did not come in time.
    TimedOut {
        /// Those.
        missing: Vec<Rank>,
        /// The whole story, for those who were missed.
        text: String,
    },
    /// A message was not what its receiver expected.
    Mismatch {
        /// `verb`, `dtype` or `count`.
        field: String,
        /// What each of the two called.
        by_rank: Vec<(Rank, String)>,
    },
}

/// Bytes that are no header of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Garbled;

impl Frame {
    /// The bytes.
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

    /// What [`encode`](Self::encode) wrote, and nothing else.
    ///
    /// # Errors
    ///
    /// [`Garbled`].
    pub fn decode(header: &[u8; HEADER]) -> Result<Self, Garbled> {
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
                    _ => return Err(Garbled),
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
                let (Some(&verb), Some(&dtype)) = (verb, dtype) else { return Err(Garbled) };
                Self::Message { verb, dtype, count }
            }
            (5, [bytes, 0, 0, 0, 0, 0, 0]) if bytes <= CONTROL_BYTES as u64 => {
                Self::Control { bytes: bytes as usize }
            }
            _ => return Err(Garbled),
        };
        if header[1..8] == MAGIC { Ok(frame) } else { Err(Garbled) }
    }
}

impl Control {
    /// Header and message. A message over the limit, which only a text of the caller's can make,
    /// is not sent: `None`.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let json = serde_json::to_vec(self).ok().filter(|json| json.len() <= CONTROL_BYTES)?;
        Some([&Frame::Control { bytes: json.len() }.encode()[..], &json].concat())
    }

    /// A message from a group of `world` ranks.
    ///
    /// # Errors
    ///
    /// [`Garbled`], also if it names ranks that the group does not have.
    pub fn decode(json: &[u8], world: usize) -> Result<Self, Garbled> {
        let message: Self = serde_json::from_slice(json).map_err(|_| Garbled)?;
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
        if known { Ok(message) } else { Err(Garbled) }
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
        fn headers_are_read_as_written(frame in frames()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        }

        #[test]
        fn one_header_has_one_meaning(frame in frames(), at in 0..HEADER, bit in 0..8) {
            let mut header = frame.encode();
            header[at] ^= 1_u8 << bit;
            if let Ok(other) = Frame::decode(&header) {
                prop_assert_ne!(other, frame);
                prop_assert_eq!(other.encode(), header);
            }
        }
    }

    #[test]
    fn strangers_are_garbled() {
        let mut http = [b' '; HEADER];
        http[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert_eq!(Frame::decode(&http), Err(Garbled));
        assert_eq!(Frame::decode(&[0; HEADER]), Err(Garbled));
        let mut long = Frame::Control { bytes: 0 }.encode();
        long[8..16].copy_from_slice(&(CONTROL_BYTES as u64 + 1).to_le_bytes());
        assert_eq!(Frame::decode(&long), Err(Garbled));
    }

    #[test]
    fn control_messages_are_read_as_written_and_name_only_ranks_of_the_group() {
        let failed = |cause| Control::Failed(Failure { by: 1, cause });
        for message in [
            Control::Goodbye,
            Control::Ask,
            Control::Waiting(vec![0, 2]),
            failed(Cause::Died { rank: 2, pid: 7, how: Some("x".into()) }),
            failed(Cause::TimedOut { missing: vec![2], text: "t".into() }),
            failed(Cause::Mismatch { field: "verb".into(), by_rank: vec![(2, "x".into())] }),
        ] {
            let bytes = message.encode().unwrap();
            let (header, json) = bytes.split_first_chunk().unwrap();
            assert_eq!(Frame::decode(header), Ok(Frame::Control { bytes: json.len() }));
            assert_eq!(Control::decode(json, 3).as_ref(), Ok(&message));
            let names_rank_2 = !matches!(message, Control::Goodbye | Control::Ask);
            assert_eq!(Control::decode(json, 2).is_err(), names_rank_2);
        }
        assert_eq!(Control::decode(b"[[[[", 3), Err(Garbled));
        let long = Control::Failed(Failure {
            by: 0,
            cause: Cause::Aborted { reason: "x".repeat(CONTROL_BYTES) },
        });
        assert_eq!(long.encode(), None);
    }
}
