//! Encoding and decoding of requests.
//!
//! [`decode`] reads one request from the front of a buffer without copying, or returns the buffer
//! length needed before another attempt can succeed; [`Request::encode`] is its inverse. [`resume`]
//! does not read again what an earlier attempt has read, so that a request that arrives in many
//! pieces costs as much as one that arrives at once. A *blob* is a `u64` length and that many
//! bytes.
//!
//! Invariant: a length is checked against its limit before anything is allocated for it, and
//! `encode` reproduces the input of `decode` byte for byte.

use crate::store::values::cost;

/// Maximum length of a key, in bytes. This and the next two are the limits of PyTorch's server.
pub const MAX_KEY_BYTES: usize = 8 * 1024;
/// Maximum length of a value, in bytes.
pub const MAX_VALUE_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of keys in one request.
pub const MAX_KEYS: usize = 128 * 1024;
/// Maximum length of a request and of a reply, in bytes. PyTorch has no such limit.
pub const MAX_MESSAGE_BYTES: usize = 256 * 1024 * 1024;
/// Maximum memory of a store, in bytes: values with 128 bytes of overhead each, waits, unfinished
/// requests and unread replies. PyTorch has no such limit.
pub const MAX_STORE_BYTES: usize = 1024 * 1024 * 1024;
/// Sent in a client's first request.
pub const MAGIC: u32 = 0x3C85_F7CE;

/// Defines [`Request`], its encoder and its decoder from one row per request: name, opcode, and the
/// fields in wire order, each with its type and the reader's method for it.
macro_rules! requests {
    ($(
        $(#[$doc:meta])*
        $name:ident = $opcode:literal $({ $($field:ident: $type:ty = $read:ident),* })?;
    )*) => {
        /// A client's request. Keys and values are arbitrary bytes.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "each variant's line documents its fields")]
        pub enum Request<'a> {
            $($(#[$doc])* $name $({ $($field: $type),* })?,)*
        }

        impl Request<'_> {
            /// Appends the request's bytes to `out`.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$name $({ $($field),* })? => {
                        out.push($opcode);
                        $($($field.put(out);)*)?
                    })*
                }
            }
        }

        impl<'a> Reader<'a> {
            fn request(&mut self) -> Read<Request<'a>> {
                Ok(match self.array::<1>()?[0] {
                    $($opcode => Request::$name $({ $($field: self.$read()?),* })?,)*
                    unknown => return Err(ProtocolError::UnknownOpcode(unknown)),
                })
            }
        }
    };
}

requests! {
    /// Opens a connection; no reply.
    Validate = 0 { magic: u32 = u32 };
    /// Stores `value`; no reply.
    Set = 1 { key: &'a [u8] = key, value: &'a [u8] = value };
    /// Stores `desired` if the value is `expected`; the reply is a blob.
    CompareSet = 2 { key: &'a [u8] = key, expected: &'a [u8] = value, desired: &'a [u8] = value };
    /// Reads a value; the reply is a blob, empty for a missing key.
    Get = 3 { key: &'a [u8] = key };
    /// Adds to a counter; the reply is the sum, `i64`.
    Add = 4 { key: &'a [u8] = key, delta: i64 = i64 };
    /// Checks keys; the reply is `u8`, [`CHECK_PRESENT`] or [`CHECK_ABSENT`].
    Check = 5 { keys: Vec<&'a [u8]> = keys };
    /// Waits for keys; the reply, `u8` [`WAIT_OVER`], comes once all exist.
    Wait = 6 { keys: Vec<&'a [u8]> = keys };
    /// Counts keys; the reply is `i64`.
    NumKeys = 7;
    /// Deletes a key; the reply is `i64`, 1 if the key existed.
    DeleteKey = 8 { key: &'a [u8] = key };
    /// Appends bytes to a value; no reply.
    Append = 9 { key: &'a [u8] = key, value: &'a [u8] = value };
    /// Reads several values; the reply is one blob per key.
    MultiGet = 10 { keys: Vec<&'a [u8]> = keys };
    /// Stores several values; no reply.
    MultiSet = 11 { pairs: Vec<(&'a [u8], &'a [u8])> = pairs };
    /// Cancels this connection's wait; the reply is always `u8` [`WAIT_CANCELLED`].
    CancelWait = 12;
    /// Checks the connection; the reply is the nonce, `u32`.
    Ping = 13 { nonce: u32 = u32 };
    /// Appends to a queue; no reply.
    QueuePush = 14 { key: &'a [u8] = key, value: &'a [u8] = value };
    /// Pops from a queue; the reply is the length before, `i64`, and if that is not 0 the first
    /// value, a blob.
    QueuePop = 15 { key: &'a [u8] = key };
    /// Length of a queue; the reply is `i64`.
    QueueLen = 16 { key: &'a [u8] = key };
    /// Lists keys; the reply is `i64` and that many blobs, in any order.
    ListKeys = 17;
    /// Arrives at a barrier; the reply, `u8` [`WAIT_OVER`], comes at the `world_size`th arrival.
    Barrier = 18 { key: &'a [u8] = key, world_size: i64 = i64 };
}

/// Opcode of [`Request::Validate`].
pub(super) const VALIDATE: u8 = 0;
/// Maximum length of a counter as text, including its sign.
const COUNTER_DIGITS: usize = 20;
/// Reply to [`Request::Check`]: all keys exist.
pub const CHECK_PRESENT: u8 = 0;
/// Reply to [`Request::Check`]: a key is missing.
pub const CHECK_ABSENT: u8 = 1;
/// Reply to [`Request::Wait`] and [`Request::Barrier`].
pub const WAIT_OVER: u8 = 0;
/// Reply to [`Request::CancelWait`].
pub const WAIT_CANCELLED: u8 = 1;

/// Why the server closes a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The beginning of a request: not an error while more bytes may come.
    #[error("the request has at least {need} bytes")]
    Incomplete {
        /// Minimum length of the buffer before another attempt to decode it can succeed.
        need: usize,
    },
    /// An unknown opcode.
    #[error("unknown opcode {0}")]
    UnknownOpcode(u8),
    /// A length exceeds its limit.
    #[error("{what} of length {len} exceeds the limit of {limit}")]
    TooLong {
        /// The name of the length.
        what: &'static str,
        /// Its length.
        len: u64,
        /// The limit.
        limit: usize,
    },
    /// The connection did not begin with the protocol's magic number.
    #[error("not a store client")]
    NotValidated,
    /// The magic number was sent twice.
    #[error("validated twice")]
    ValidatedTwice,
    /// A wait or barrier was sent while an earlier one is unanswered.
    #[error("a second wait before the first was answered")]
    SecondWait,
    /// Storing the request would exceed the store's limit.
    #[error("the store is full: the limit is {limit} bytes")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// [`Request::Add`] to a value that does not begin with a number.
    #[error("added to a value that is not a number")]
    NotANumber,
}

/// Reads one request from the front of `input`; returns it, borrowing from `input`, and its length.
///
/// # Errors
///
/// [`ProtocolError::Incomplete`]. [`ProtocolError::UnknownOpcode`] and [`ProtocolError::TooLong`];
/// the bytes that follow cannot be decoded, so the connection must be closed.
pub fn decode(input: &[u8]) -> Result<(Request<'_>, usize), ProtocolError> {
    resume(input, &mut Progress::default())
}

/// How much of an incomplete request has been read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Complete items of the request's list.
    items: usize,
    /// Offset of the next item.
    at: usize,
}

/// Same as [`decode`], after earlier calls with fewer bytes of the same request and the same
/// `progress`. Begin each request with a new one.
///
/// # Errors
///
/// Those of [`decode`].
pub fn resume<'a>(
    input: &'a [u8],
    progress: &mut Progress,
) -> Result<(Request<'a>, usize), ProtocolError> {
    let mut reader = Reader { input, at: 0, progress: std::mem::take(progress) };
    let request = reader.request();
    *progress = reader.progress;
    let need = match &request {
        Err(ProtocolError::Incomplete { need }) => *need,
        _ => reader.at,
    };
    if need > MAX_MESSAGE_BYTES {
        return Err(too_long("request", need as u64, MAX_MESSAGE_BYTES));
    }
    Ok((request?, reader.at))
}

impl Request<'_> {
    /// Maximum number of bytes that the request adds to a store, see [`MAX_STORE_BYTES`].
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
}

/// Appends a blob: length and bytes. Replies use it too.
pub fn put_blob(out: &mut Vec<u8>, blob: &[u8]) {
    put_len(out, blob.len());
    out.extend_from_slice(blob);
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u64).to_le_bytes());
}

/// A field of a request, for encoding.
trait Put {
    fn put(&self, out: &mut Vec<u8>);
}

impl Put for u32 {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }
}

impl Put for i64 {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }
}

impl Put for &[u8] {
    fn put(&self, out: &mut Vec<u8>) {
        put_blob(out, self);
    }
}

impl<A: Put, B: Put> Put for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
}

impl<T: Put> Put for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        put_len(out, self.len());
        self.iter().for_each(|item| item.put(out));
    }
}

type Read<T> = Result<T, ProtocolError>;

struct Reader<'a> {
    input: &'a [u8],
    at: usize,
    /// Of the list; a request has at most one.
    progress: Progress,
}

impl<'a> Reader<'a> {
    fn keys(&mut self) -> Read<Vec<&'a [u8]>> {
        self.several(1, Self::key)
    }

    fn pairs(&mut self) -> Read<Vec<(&'a [u8], &'a [u8])>> {
        self.several(2, |reader| Ok((reader.key()?, reader.value()?)))
    }

    /// Reads a count and that many items, each with at least `blobs` lengths of eight bytes.
    /// Allocates the vector only if all have arrived.
    fn several<T>(&mut self, blobs: usize, item: impl Fn(&mut Self) -> Read<T>) -> Read<Vec<T>> {
        let count = self.len("number of keys", MAX_KEYS)?;
        self.require(count * blobs * 8)?;
        let first = self.at;
        // Finds the end of the list, from where the last attempt stopped.
        self.progress.at = self.progress.at.max(first);
        while self.progress.items < count {
            self.at = self.progress.at;
            item(self).map_err(|error| match error {
                ProtocolError::Incomplete { need } => {
                    let after = count - self.progress.items - 1;
                    ProtocolError::Incomplete { need: need + after * blobs * 8 }
                }
                invalid => invalid,
            })?;
            self.progress = Progress { items: self.progress.items + 1, at: self.at };
        }
        self.at = first;
        (0..count).map(|_| item(self)).collect()
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
            _ => Err(too_long(what, len, limit)),
        }
    }

    fn u32(&mut self) -> Read<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn i64(&mut self) -> Read<i64> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("`take` returns the requested number of bytes"))
    }

    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        self.require(len)?;
        let taken = &self.input[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    fn require(&self, len: usize) -> Read<()> {
        let need = self.at + len;
        if need > self.input.len() { Err(ProtocolError::Incomplete { need }) } else { Ok(()) }
    }
}

fn too_long(what: &'static str, len: u64, limit: usize) -> ProtocolError {
    ProtocolError::TooLong { what, len, limit }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blob() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..20)
    }

    /// Builds the request with this opcode from sample blobs and a number.
    fn request(opcode: u8, blobs: &[Vec<u8>], number: i64) -> Request<'_> {
        let keys = || blobs.iter().map(Vec::as_slice).collect::<Vec<_>>();
        let pairs = || blobs.iter().map(|blob| (&blob[..], &blobs[0][..])).collect();
        let [key, value, third] = [&blobs[0][..], &blobs[1][..], &blobs[2][..]];
        match opcode {
            VALIDATE => Request::Validate { magic: number as u32 },
            1 => Request::Set { key, value },
            2 => Request::CompareSet { key, expected: value, desired: third },
            3 => Request::Get { key },
            4 => Request::Add { key, delta: number },
            5 => Request::Check { keys: keys() },
            6 => Request::Wait { keys: keys() },
            7 => Request::NumKeys,
            8 => Request::DeleteKey { key },
            9 => Request::Append { key, value },
            10 => Request::MultiGet { keys: keys() },
            11 => Request::MultiSet { pairs: pairs() },
            12 => Request::CancelWait,
            13 => Request::Ping { nonce: number as u32 },
            14 => Request::QueuePush { key, value },
            15 => Request::QueuePop { key },
            16 => Request::QueueLen { key },
            17 => Request::ListKeys,
            _ => Request::Barrier { key, world_size: number },
        }
    }

    proptest! {
        #[test]
        fn decode_inverts_encode_and_every_prefix_is_incomplete(
            opcode in 0..=18_u8,
            blobs in prop::collection::vec(blob(), 3..8),
            number: i64,
        ) {
            let request = request(opcode, &blobs, number);
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            let whole = bytes.len();
            for len in 0..whole {
                match decode(&bytes[..len]) {
                    Err(ProtocolError::Incomplete { need }) => prop_assert!(len < need && need <= whole),
                    other => prop_assert!(false, "{len} of {whole} bytes: {other:?}"),
                }
            }
            bytes.extend_from_slice(b"the next request");
            prop_assert_eq!(decode(&bytes), Ok((request, whole)));
        }

        /// The earlier bytes are not read again, so the attempts read each byte about once in all.
        #[test]
        fn resume_goes_on_where_it_was(
            opcode in prop::sample::select(vec![5_u8, 6, 10, 11]),
            blobs in prop::collection::vec(blob(), 3..60),
            sizes in prop::collection::vec(1..50_usize, 1..40),
        ) {
            let request = request(opcode, &blobs, 0);
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            let (mut progress, mut len, mut sizes) = (Progress::default(), 0, sizes.iter().cycle());
            loop {
                match resume(&bytes[..len], &mut progress) {
                    Ok(decoded) => {
                        prop_assert_eq!(decoded, (request, bytes.len()));
                        break;
                    }
                    Err(error) => prop_assert_eq!(Err(error), decode(&bytes[..len])),
                }
                // All complete items, of which even the shortest has eight bytes.
                let next = bytes[progress.at.min(len)..len].len();
                prop_assert!(progress.items == 0 || next < 2 * (8 + 20));
                len = bytes.len().min(len + sizes.next().unwrap());
            }
        }

        #[test]
        fn arbitrary_bytes_decode_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok((request, len)) = decode(&bytes) {
                let mut again = Vec::new();
                request.encode(&mut again);
                prop_assert_eq!(&again[..], &bytes[..len]);
            }
        }
    }

    #[test]
    fn a_length_over_its_limit_is_an_error_before_its_bytes_arrive() {
        let key = |len: u64| [&[3][..], &len.to_le_bytes()].concat();
        assert_eq!(decode(&key(8192)), Err(ProtocolError::Incomplete { need: 9 + 8192 }));
        assert!(matches!(decode(&key(8193)), Err(ProtocolError::TooLong { what: "key", .. })));
        assert!(matches!(decode(&key(u64::MAX)), Err(ProtocolError::TooLong { .. })));
        let mut set = Vec::new();
        Request::Set { key: b"k", value: b"" }.encode(&mut set);
        set.truncate(set.len() - 8);
        set.extend_from_slice(&(MAX_VALUE_BYTES as u64 + 1).to_le_bytes());
        assert!(matches!(decode(&set), Err(ProtocolError::TooLong { what: "value", .. })));
        let wait = [&[6][..], &(MAX_KEYS as u64 + 1).to_le_bytes()].concat();
        assert!(matches!(decode(&wait), Err(ProtocolError::TooLong { .. })));
        assert_eq!(decode(&[200]), Err(ProtocolError::UnknownOpcode(200)));
    }

    #[test]
    fn a_request_over_the_total_limit_is_an_error() {
        let value = vec![0; MAX_VALUE_BYTES];
        let pairs = vec![(&b"k"[..], &value[..]); 33];
        let mut bytes = Vec::new();
        Request::MultiSet { pairs }.encode(&mut bytes);
        let mut errors =
            (0..bytes.len()).step_by(MAX_VALUE_BYTES).filter_map(|len| decode(&bytes[..len]).err());
        let refused = errors.find(|error| !matches!(error, ProtocolError::Incomplete { .. }));
        assert!(matches!(refused, Some(ProtocolError::TooLong { what: "request", .. })));
    }
}
