//! Requests as bytes.
//!
//! [`decode`] reads one request from the front of a buffer without copying, or says how many bytes
//! the buffer must have before it is worth trying again; [`Request::encode`] is its inverse. A
//! *blob* is a `u64` length and that many bytes.
//!
//! Invariant: nothing is allocated from a length that has not been checked against its limit, and
//! what `decode` takes, `encode` reproduces byte for byte.

use crate::store::values::cost;

/// Longest key, in bytes. This and the next two are the limits of PyTorch's server.
pub const MAX_KEY_BYTES: usize = 8 * 1024;
/// Longest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 8 * 1024 * 1024;
/// Most keys in one request.
pub const MAX_KEYS: usize = 128 * 1024;
/// Longest request and longest reply, in bytes. PyTorch has no such limit.
pub const MAX_MESSAGE_BYTES: usize = 256 * 1024 * 1024;
/// What a store may hold, with 128 bytes for each value. PyTorch has no such limit.
pub const MAX_STORE_BYTES: usize = 1024 * 1024 * 1024;
/// What a client's first request must carry.
pub const MAGIC: u32 = 0x3C85_F7CE;

/// One request of a client. Keys and values are any bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are the arguments each variant's line speaks of")]
pub enum Request<'a> {
    /// Opens a connection; no reply.
    Validate { magic: u32 },
    /// Stores `value`; no reply.
    Set { key: &'a [u8], value: &'a [u8] },
    /// Stores `desired` if the value is `expected`; the reply is a blob.
    CompareSet { key: &'a [u8], expected: &'a [u8], desired: &'a [u8] },
    /// The reply is a blob, empty for a missing key.
    Get { key: &'a [u8] },
    /// Adds to a counter; the reply is the sum, `i64`.
    Add { key: &'a [u8], delta: i64 },
    /// The reply is `u8` [`CHECK_PRESENT`] or [`CHECK_ABSENT`].
    Check { keys: Vec<&'a [u8]> },
    /// The reply, `u8` [`WAIT_OVER`], comes once all keys are there.
    Wait { keys: Vec<&'a [u8]> },
    /// The reply is the number of keys, `i64`.
    NumKeys,
    /// The reply is `i64`, 1 if the key was there.
    DeleteKey { key: &'a [u8] },
    /// Adds bytes to the end of a value; no reply.
    Append { key: &'a [u8], value: &'a [u8] },
    /// The reply is one blob for each key.
    MultiGet { keys: Vec<&'a [u8]> },
    /// Stores several values; no reply.
    MultiSet { pairs: Vec<(&'a [u8], &'a [u8])> },
    /// Ends this connection's wait; the reply is `u8` [`WAIT_CANCELLED`] in any case.
    CancelWait,
    /// The reply is the nonce, `u32`.
    Ping { nonce: u32 },
    /// Adds to the end of a queue; no reply.
    QueuePush { key: &'a [u8], value: &'a [u8] },
    /// The reply is the length before, `i64`, and if that is not 0 the first value, a blob.
    QueuePop { key: &'a [u8] },
    /// The reply is `i64`.
    QueueLen { key: &'a [u8] },
    /// The reply is `i64` and that many blobs, in any order.
    ListKeys,
    /// Counts one arrival; the reply, `u8` [`WAIT_OVER`], comes at the `world_size`th.
    Barrier { key: &'a [u8], world_size: i64 },
}

/// Most digits of a counter, and its sign.
const COUNTER_DIGITS: usize = 20;
/// Answer to [`Request::Check`]: all keys are there.
pub const CHECK_PRESENT: u8 = 0;
/// Answer to [`Request::Check`]: a key is missing.
pub const CHECK_ABSENT: u8 = 1;
/// Answer to [`Request::Wait`] and [`Request::Barrier`].
pub const WAIT_OVER: u8 = 0;
/// Answer to [`Request::CancelWait`].
pub const WAIT_CANCELLED: u8 = 1;

/// Why a connection is closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A byte that is no opcode.
    #[error("unknown opcode {0}")]
    UnknownOpcode(u8),
    /// A length over its limit.
    #[error("{what} of length {len} is over the limit of {limit}")]
    TooLong {
        /// What was too long.
        what: &'static str,
        /// Its length.
        len: u64,
        /// The limit.
        limit: usize,
    },
    /// The connection did not begin with the protocol's magic number.
    #[error("not a store client")]
    NotValidated,
    /// The magic number came twice.
    #[error("validated twice")]
    ValidatedTwice,
    /// A wait or barrier was sent while the connection already waits.
    #[error("a second wait before the first was answered")]
    SecondWait,
    /// The store has no room for what the request would store.
    #[error("the store holds {limit} bytes at most")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// An addition to a value that does not begin with a number.
    #[error("added to a value that is not a number")]
    NotANumber,
}

/// What [`decode`] found at the front of the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A whole request.
    Request {
        /// The request, borrowing from the buffer.
        request: Request<'a>,
        /// How many bytes of the buffer it takes.
        len: usize,
    },
    /// The beginning of a request.
    Incomplete {
        /// The buffer must be at least this long before a further attempt can succeed.
        need: usize,
    },
}

/// Reads one request from the front of `input`.
///
/// # Errors
///
/// [`ProtocolError::UnknownOpcode`] and [`ProtocolError::TooLong`]; the bytes after that cannot be
/// understood, so the connection must be closed.
pub fn decode(input: &[u8]) -> Result<Decoded<'_>, ProtocolError> {
    let mut reader = Reader { input, at: 0 };
    match reader.request() {
        Ok(request) => Ok(Decoded::Request { request, len: reader.at }),
        Err(Stop::Short { need }) if need > MAX_MESSAGE_BYTES => {
            Err(too_long("request", need as u64, MAX_MESSAGE_BYTES))
        }
        Err(Stop::Short { need }) => Ok(Decoded::Incomplete { need }),
        Err(Stop::Wrong(error)) => Err(error),
    }
}

impl Request<'_> {
    /// Appends the request's bytes to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.opcode());
        match self {
            Self::Validate { magic: word } | Self::Ping { nonce: word } => {
                out.extend_from_slice(&word.to_le_bytes());
            }
            Self::Set { key, value } | Self::Append { key, value } => put_blobs(out, &[key, value]),
            Self::QueuePush { key, value } => put_blobs(out, &[key, value]),
            Self::CompareSet { key, expected, desired } => {
                put_blobs(out, &[key, expected, desired]);
            }
            Self::Get { key }
            | Self::DeleteKey { key }
            | Self::QueuePop { key }
            | Self::QueueLen { key } => put_blob(out, key),
            Self::Add { key, delta: number } | Self::Barrier { key, world_size: number } => {
                put_blob(out, key);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Self::Check { keys } | Self::Wait { keys } | Self::MultiGet { keys } => {
                put_len(out, keys.len());
                put_blobs(out, keys);
            }
            Self::MultiSet { pairs } => {
                put_len(out, pairs.len());
                for (key, value) in pairs {
                    put_blobs(out, &[key, value]);
                }
            }
            Self::NumKeys | Self::CancelWait | Self::ListKeys => {}
        }
    }

    /// What the request may add to a store's [bytes](MAX_STORE_BYTES).
    pub(super) fn stores(&self) -> usize {
        match self {
            Self::Set { key, value } | Self::Append { key, value } => cost(key, value.len()),
            Self::QueuePush { key, value } => cost(key, value.len()),
            Self::CompareSet { key, desired, .. } => cost(key, desired.len()),
            Self::Add { key, .. } | Self::Barrier { key, .. } => cost(key, COUNTER_DIGITS),
            Self::MultiSet { pairs } => {
                pairs.iter().map(|(key, value)| cost(key, value.len())).sum()
            }
            _ => 0,
        }
    }

    fn opcode(&self) -> u8 {
        match self {
            Self::Validate { .. } => VALIDATE,
            Self::Set { .. } => SET,
            Self::CompareSet { .. } => COMPARE_SET,
            Self::Get { .. } => GET,
            Self::Add { .. } => ADD,
            Self::Check { .. } => CHECK,
            Self::Wait { .. } => WAIT,
            Self::NumKeys => GETNUMKEYS,
            Self::DeleteKey { .. } => DELETE_KEY,
            Self::Append { .. } => APPEND,
            Self::MultiGet { .. } => MULTI_GET,
            Self::MultiSet { .. } => MULTI_SET,
            Self::CancelWait => CANCEL_WAIT,
            Self::Ping { .. } => PING,
            Self::QueuePush { .. } => QUEUE_PUSH,
            Self::QueuePop { .. } => QUEUE_POP,
            Self::QueueLen { .. } => QUEUE_LEN,
            Self::ListKeys => LIST_KEYS,
            Self::Barrier { .. } => BARRIER,
        }
    }
}

/// Appends a blob: length and bytes. Replies are made of these too.
pub fn put_blob(out: &mut Vec<u8>, blob: &[u8]) {
    put_len(out, blob.len());
    out.extend_from_slice(blob);
}

fn put_blobs(out: &mut Vec<u8>, blobs: &[&[u8]]) {
    for blob in blobs {
        put_blob(out, blob);
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

/// Why decoding stopped.
enum Stop {
    Short { need: usize },
    Wrong(ProtocolError),
}

type Read<T> = Result<T, Stop>;

struct Reader<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn request(&mut self) -> Read<Request<'a>> {
        let opcode = self.array::<1>()?[0];
        Ok(match opcode {
            VALIDATE => Request::Validate { magic: u32::from_le_bytes(self.array()?) },
            SET => Request::Set { key: self.key()?, value: self.value()? },
            COMPARE_SET => Request::CompareSet {
                key: self.key()?,
                expected: self.value()?,
                desired: self.value()?,
            },
            GET => Request::Get { key: self.key()? },
            ADD => Request::Add { key: self.key()?, delta: self.i64()? },
            CHECK => Request::Check { keys: self.keys()? },
            WAIT => Request::Wait { keys: self.keys()? },
            GETNUMKEYS => Request::NumKeys,
            DELETE_KEY => Request::DeleteKey { key: self.key()? },
            APPEND => Request::Append { key: self.key()?, value: self.value()? },
            MULTI_GET => Request::MultiGet { keys: self.keys()? },
            MULTI_SET => Request::MultiSet {
                pairs: self.several(2, |reader| Ok((reader.key()?, reader.value()?)))?,
            },
            CANCEL_WAIT => Request::CancelWait,
            PING => Request::Ping { nonce: u32::from_le_bytes(self.array()?) },
            QUEUE_PUSH => Request::QueuePush { key: self.key()?, value: self.value()? },
            QUEUE_POP => Request::QueuePop { key: self.key()? },
            QUEUE_LEN => Request::QueueLen { key: self.key()? },
            LIST_KEYS => Request::ListKeys,
            BARRIER => Request::Barrier { key: self.key()?, world_size: self.i64()? },
            unknown => return Err(Stop::Wrong(ProtocolError::UnknownOpcode(unknown))),
        })
    }

    fn keys(&mut self) -> Read<Vec<&'a [u8]>> {
        self.several(1, Self::key)
    }

    /// A count and that many items, each of at least `blobs` lengths of eight bytes: the vector
    /// is allocated only once the buffer has room for so many.
    fn several<T>(&mut self, blobs: usize, item: impl Fn(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let count = self.len("number of keys", MAX_KEYS)?;
        self.room_for(count * blobs * 8)?;
        let mut items = Vec::with_capacity(count);
        for read in 0..count {
            items.push(item(self).map_err(|stop| match stop {
                Stop::Short { need } => Stop::Short { need: need + (count - read - 1) * blobs * 8 },
                wrong => wrong,
            })?);
        }
        Ok(items)
    }

    fn key(&mut self) -> Read<&'a [u8]> {
        let len = self.len("key", MAX_KEY_BYTES)?;
        self.take(len)
    }

    fn value(&mut self) -> Read<&'a [u8]> {
        let len = self.len("value", MAX_VALUE_BYTES)?;
        self.take(len)
    }

    fn len(&mut self, what: &'static str, limit: usize) -> Read<usize> {
        let len = u64::from_le_bytes(self.array()?);
        match usize::try_from(len) {
            Ok(checked) if checked <= limit => Ok(checked),
            _ => Err(Stop::Wrong(too_long(what, len, limit))),
        }
    }

    fn i64(&mut self) -> Read<i64> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("take returns as many bytes as were asked for"))
    }

    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        self.room_for(len)?;
        let taken = &self.input[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    fn room_for(&self, len: usize) -> Read<()> {
        let need = self.at + len;
        if need > self.input.len() { Err(Stop::Short { need }) } else { Ok(()) }
    }
}

fn too_long(what: &'static str, len: u64, limit: usize) -> ProtocolError {
    ProtocolError::TooLong { what, len, limit }
}

pub(super) const VALIDATE: u8 = 0;
const SET: u8 = 1;
const COMPARE_SET: u8 = 2;
const GET: u8 = 3;
const ADD: u8 = 4;
const CHECK: u8 = 5;
const WAIT: u8 = 6;
const GETNUMKEYS: u8 = 7;
const DELETE_KEY: u8 = 8;
const APPEND: u8 = 9;
const MULTI_GET: u8 = 10;
const MULTI_SET: u8 = 11;
const CANCEL_WAIT: u8 = 12;
const PING: u8 = 13;
const QUEUE_PUSH: u8 = 14;
const QUEUE_POP: u8 = 15;
const QUEUE_LEN: u8 = 16;
const LIST_KEYS: u8 = 17;
const BARRIER: u8 = 18;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blob() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..20)
    }

    /// Builds the request with this opcode from a pool of material.
    fn request(opcode: u8, blobs: &[Vec<u8>], number: i64) -> Request<'_> {
        let keys = || blobs.iter().map(Vec::as_slice).collect::<Vec<_>>();
        let pairs = || blobs.iter().map(|blob| (&blob[..], &blobs[0][..])).collect();
        let [key, value, third] = [&blobs[0][..], &blobs[1][..], &blobs[2][..]];
        match opcode {
            VALIDATE => Request::Validate { magic: number as u32 },
            SET => Request::Set { key, value },
            COMPARE_SET => Request::CompareSet { key, expected: value, desired: third },
            GET => Request::Get { key },
            ADD => Request::Add { key, delta: number },
            CHECK => Request::Check { keys: keys() },
            WAIT => Request::Wait { keys: keys() },
            GETNUMKEYS => Request::NumKeys,
            DELETE_KEY => Request::DeleteKey { key },
            APPEND => Request::Append { key, value },
            MULTI_GET => Request::MultiGet { keys: keys() },
            MULTI_SET => Request::MultiSet { pairs: pairs() },
            CANCEL_WAIT => Request::CancelWait,
            PING => Request::Ping { nonce: number as u32 },
            QUEUE_PUSH => Request::QueuePush { key, value },
            QUEUE_POP => Request::QueuePop { key },
            QUEUE_LEN => Request::QueueLen { key },
            LIST_KEYS => Request::ListKeys,
            _ => Request::Barrier { key, world_size: number },
        }
    }

    proptest! {
        #[test]
        fn decode_inverts_encode_and_every_prefix_is_incomplete(
            opcode in 0..=BARRIER,
            blobs in prop::collection::vec(blob(), 3..8),
            number: i64,
        ) {
            let request = request(opcode, &blobs, number);
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            let whole = bytes.len();
            for len in 0..whole {
                match decode(&bytes[..len]) {
                    Ok(Decoded::Incomplete { need }) => prop_assert!(len < need && need <= whole),
                    other => prop_assert!(false, "{len} of {whole} bytes: {other:?}"),
                }
            }
            bytes.extend_from_slice(b"the next request");
            prop_assert_eq!(decode(&bytes), Ok(Decoded::Request { request, len: whole }));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Decoded::Request { request, len }) = decode(&bytes) {
                let mut again = Vec::new();
                request.encode(&mut again);
                prop_assert_eq!(&again[..], &bytes[..len]);
            }
        }
    }

    #[test]
    fn a_length_over_its_limit_is_refused_before_its_bytes_come() {
        let key = |len: u64| [&[GET][..], &len.to_le_bytes()].concat();
        assert_eq!(decode(&key(8192)), Ok(Decoded::Incomplete { need: 9 + 8192 }));
        assert!(matches!(decode(&key(8193)), Err(ProtocolError::TooLong { what: "key", .. })));
        assert!(matches!(decode(&key(u64::MAX)), Err(ProtocolError::TooLong { .. })));
        let mut set = Vec::new();
        Request::Set { key: b"k", value: b"" }.encode(&mut set);
        set.truncate(set.len() - 8);
        set.extend_from_slice(&(MAX_VALUE_BYTES as u64 + 1).to_le_bytes());
        assert!(matches!(decode(&set), Err(ProtocolError::TooLong { what: "value", .. })));
        let wait = [&[WAIT][..], &(MAX_KEYS as u64 + 1).to_le_bytes()].concat();
        assert!(matches!(decode(&wait), Err(ProtocolError::TooLong { .. })));
        assert_eq!(decode(&[200]), Err(ProtocolError::UnknownOpcode(200)));
    }

    #[test]
    fn a_request_too_long_as_a_whole_is_refused() {
        let value = vec![0; MAX_VALUE_BYTES];
        let pairs = vec![(&b"k"[..], &value[..]); 33];
        let mut bytes = Vec::new();
        Request::MultiSet { pairs }.encode(&mut bytes);
        let refused =
            (0..bytes.len()).step_by(MAX_VALUE_BYTES).find_map(|len| decode(&bytes[..len]).err());
        assert!(matches!(refused, Some(ProtocolError::TooLong { what: "request", .. })));
    }
}
