//! [`OpDesc`], which describes a call of any verb, and the [`Fingerprint`] that ranks compare
//! before data moves.
//!
//! [`ProcessGroup`](crate::ProcessGroup) turns every call into an [`OpDesc`]; backends, checks and
//! error texts use only descriptors. A [`Fingerprint`] is a descriptor with its sequence number in
//! the group, packed into a few words that every rank publishes when it enters the operation. It is
//! not a hash: peers decode it to report what the other rank called.

use std::fmt;

use super::Factor;
use crate::{DType, Error, Rank, ReduceOp, Result};

macro_rules! verbs {
    ($($(#[$doc:meta])* $verb:ident = $name:literal, $kind:ident, $root:ident;)*) => {
        /// An operation of a group.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Verb {
            $($(#[$doc])* $verb,)*
        }

        impl Verb {
            /// All verbs, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$verb),*];

            /// Returns the name of its method on [`ProcessGroup`](crate::ProcessGroup).
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$verb => $name,)*
                }
            }

            const fn kind(self) -> Kind {
                match self {
                    $(Self::$verb => Kind::$kind,)*
                }
            }

            /// Returns whether the verb has a root.
            pub(crate) const fn has_root(self) -> bool {
                matches!(match self { $(Self::$verb => Root::$root,)* }, Root::Rooted)
            }
        }
    };
}

/// How a backend runs a verb.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// With [`Backend::run`](crate::Backend::run); the verb moves data.
    Run,
    /// With [`Backend::exchange`](crate::Backend::exchange), on all ranks.
    Exchange,
    /// Not at all: the verb has blocks of different lengths and is composed of other verbs.
    Varying,
    Other,
}

enum Root {
    Rooted,
    Equal,
}

verbs! {
    /// Every rank gets the reduction of all ranks' buffers.
    AllReduce = "all_reduce", Run, Equal;
    /// The root gets the reduction of all ranks' buffers.
    Reduce = "reduce", Run, Rooted;
    /// Every rank gets the root's buffer.
    Broadcast = "broadcast", Run, Rooted;
    /// Every rank gets all ranks' buffers, one after another.
    AllGather = "all_gather", Run, Equal;
    /// The root gets all ranks' buffers, one after another.
    Gather = "gather", Exchange, Rooted;
    /// Every rank gets its block of the root's buffer.
    Scatter = "scatter", Exchange, Rooted;
    /// Every rank gets its block of the reduction.
    ReduceScatter = "reduce_scatter", Run, Equal;
    /// Every rank gets its block of every rank's buffer.
    AllToAll = "all_to_all", Exchange, Equal;
    /// [`AllGather`](Self::AllGather) of blocks of different lengths.
    AllGatherV = "all_gather_v", Varying, Equal;
    /// [`Gather`](Self::Gather) of blocks of different lengths.
    GatherV = "gather_v", Varying, Rooted;
    /// [`Scatter`](Self::Scatter) of blocks of different lengths.
    ScatterV = "scatter_v", Varying, Rooted;
    /// [`AllToAll`](Self::AllToAll) of blocks of different lengths.
    AllToAllV = "all_to_all_v", Varying, Equal;
    /// [`ReduceScatter`](Self::ReduceScatter) of blocks of different lengths.
    ReduceScatterV = "reduce_scatter_v", Varying, Equal;
    /// Every rank gets the block lengths of every rank, before verbs in which they differ. Backends
    /// run it as an [`AllGather`](Self::AllGather).
    Counts = "counts", Run, Equal;
    /// Point-to-point messages; only the ranks that take part call it.
    Batch = "batch_isend_irecv", Other, Equal;
    /// No rank returns before all have called it.
    Barrier = "barrier", Other, Equal;
    /// All ranks allocate memory that the backend can reduce in place.
    Alloc = "alloc", Other, Equal;
}

impl Verb {
    /// Returns whether [`Backend::run`](crate::Backend::run) runs it and it moves data.
    pub(crate) fn is_run(self) -> bool {
        self.kind() == Kind::Run
    }

    /// Returns whether its blocks have different lengths.
    pub(crate) fn is_varying(self) -> bool {
        self.kind() == Kind::Varying
    }

    /// Returns whether [`Backend::exchange`](crate::Backend::exchange) runs it on all ranks.
    #[cfg(feature = "sim")]
    pub(crate) fn is_exchange(self) -> bool {
        self.kind() == Kind::Exchange
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Description of a call: everything that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpDesc {
    /// The collective.
    pub verb: Verb,
    /// The element type; `u8` for a barrier.
    pub dtype: DType,
    /// The operator, for the verbs that reduce.
    pub op: Option<ReduceOp>,
    /// The root, for the verbs that have one.
    pub root: Option<Rank>,
    /// Elements: of the buffer for `all_reduce`, `reduce`, `broadcast` and `alloc`, of one rank's
    /// block for `all_gather`, `gather`, `scatter`, `reduce_scatter` and `all_to_all`. 0 for verbs
    /// whose blocks differ in length.
    pub count: usize,
}

impl OpDesc {
    /// Returns the number of elements of the input buffer of [`Backend::run`](crate::Backend::run).
    pub fn input_count(&self, world_size: usize) -> usize {
        match self.verb {
            Verb::ReduceScatter => self.count * world_size,
            _ => self.count,
        }
    }

    /// Returns the number of elements of the output buffer of
    /// [`Backend::run`](crate::Backend::run).
    pub fn output_count(&self, world_size: usize) -> usize {
        match self.verb {
            Verb::AllGather | Verb::Counts => self.count * world_size,
            _ => self.count,
        }
    }

    /// Checks that the operator is defined for the type, and that the root exists.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`].
    pub fn check(&self, world_size: usize) -> Result<()> {
        if let Some(op) = self.op
            && !op.supports(self.dtype)
        {
            return Err(Error::InvalidArgument(format!(
                "{}: {op} is not defined for {}, see ReduceOp::supports",
                self.verb, self.dtype
            )));
        }
        if let Some(root) = self.root
            && root >= world_size
        {
            return Err(Error::InvalidArgument(format!(
                "{}: root {root} is not a rank of this group of {world_size}",
                self.verb
            )));
        }
        Ok(())
    }

    /// Returns the fingerprint of this call as operation number `seq` of the group.
    pub fn fingerprint(&self, seq: u64, location: BufferLocation) -> Fingerprint {
        let op = self.op.map_or(0, |op| op.code() + 1);
        let factor = self.op.map_or(0, |op| op.factor().bits());
        let root = self.root.map_or(0, |root| root as u64 + 1);
        let what = self.verb as u64 | (self.dtype as u64) << 8 | op << 16 | root << 32;
        let (shared, offset) = match location {
            BufferLocation::Private => (0, 0),
            BufferLocation::Shared { id, offset } => (id, offset),
        };
        Fingerprint { seq, what, count: self.count as u64, shared, offset, factor }
    }
}

impl fmt::Display for OpDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verb)?;
        if self.verb == Verb::Barrier {
            return Ok(());
        }
        match self.verb.is_varying() {
            // Counts differ between ranks.
            true => write!(f, " of {}", self.dtype)?,
            false => write!(f, " of {} {}", self.count, self.dtype)?,
        }
        if let Some(op) = self.op {
            write!(f, ", {op}")?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        Ok(())
    }
}

/// Location of a rank's buffer, as it is published to its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferLocation {
    /// In private memory: data are copied.
    Private,
    /// In memory of [`alloc`](crate::ProcessGroup::alloc), which peers reduce in place.
    Shared {
        /// Number of the allocation; never 0.
        id: u64,
        /// Byte offset of the buffer in this rank's part of the allocation.
        offset: u64,
    },
}

/// A rank's call, its sequence number and buffer location. Data move only if it is equal on all
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Sequence number of the operation in the group, from 0.
    pub seq: u64,
    what: u64,
    count: u64,
    shared: u64,
    offset: u64,
    factor: u64,
}

impl Fingerprint {
    pub(crate) const WORDS: usize = 5;

    /// Returns all fields but `seq`.
    pub(crate) fn words(&self) -> [u64; Self::WORDS] {
        [self.what, self.count, self.shared, self.offset, self.factor]
    }

    pub(crate) fn from_words(seq: u64, words: [u64; Self::WORDS]) -> Self {
        let [what, count, shared, offset, factor] = words;
        Self { seq, what, count, shared, offset, factor }
    }

    /// Returns the first field in which two calls differ.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        let differs = self.what ^ other.what;
        let bits = [
            self.seq ^ other.seq,
            differs & 0xff,
            differs >> 8 & 0xff,
            differs >> 16 & 0xff | self.factor ^ other.factor,
            differs >> 32,
            self.count ^ other.count,
            self.shared ^ other.shared | self.offset ^ other.offset,
        ];
        Self::FIELDS.into_iter().zip(bits).find(|&(_, bits)| bits != 0).map(|(name, _)| name)
    }

    /// Names that [`difference`](Self::difference) may return.
    pub(crate) const FIELDS: [&'static str; 7] =
        ["seq", "verb", "dtype", "op", "root", "count", "buffer"];

    /// Decodes the call; `None` if the words are not valid.
    pub fn op_desc(&self) -> Option<OpDesc> {
        let byte = |shift: u32| usize::from((self.what >> shift) as u8);
        let op = match byte(16) {
            0 => None,
            code => Some(ReduceOp::from_code(code - 1, Factor::from_bits(self.factor))?),
        };
        let root = ((self.what >> 32) as usize).checked_sub(1);
        let (verb, dtype) = (*Verb::ALL.get(byte(0))?, *DType::ALL.get(byte(8))?);
        Some(OpDesc { verb, dtype, op, root, count: usize::try_from(self.count).ok()? })
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op_desc() {
            Some(desc) => write!(f, "{desc}")?,
            None => write!(f, "an unknown call ({:#x})", self.what)?,
        }
        if self.shared != 0 {
            write!(f, ", in shared buffer {} at byte {}", self.shared, self.offset)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: OpDesc = OpDesc {
        verb: Verb::AllReduce,
        dtype: DType::F32,
        op: Some(ReduceOp::Sum),
        root: None,
        count: 1000,
    };

    #[test]
    fn a_call_round_trips_through_its_fingerprint() {
        for &verb in Verb::ALL {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL.into_iter().map(Some).chain([None]) {
                    for root in [None, Some(0), Some(255)] {
                        let call = OpDesc { verb, dtype, op, root, count: usize::MAX };
                        let print = call.fingerprint(7, BufferLocation::Private);
                        let copy = Fingerprint::from_words(7, print.words());
                        assert_eq!(copy.op_desc(), Some(call));
                        assert_eq!(copy.difference(&print), None);
                    }
                }
            }
        }
    }

    #[test]
    fn difference_names_the_first_field_that_differs() {
        let differs = |other: OpDesc, location| {
            CALL.fingerprint(3, BufferLocation::Private).difference(&other.fingerprint(3, location))
        };
        let own = BufferLocation::Private;
        assert_eq!(differs(OpDesc { verb: Verb::Barrier, ..CALL }, own), Some("verb"));
        assert_eq!(differs(OpDesc { dtype: DType::I32, ..CALL }, own), Some("dtype"));
        assert_eq!(differs(OpDesc { op: Some(ReduceOp::Max), ..CALL }, own), Some("op"));
        assert_eq!(differs(OpDesc { root: Some(0), ..CALL }, own), Some("root"));
        assert_eq!(differs(OpDesc { count: 1, ..CALL }, own), Some("count"));
        assert_eq!(differs(CALL, BufferLocation::Shared { id: 1, offset: 0 }), Some("buffer"));
        let one = CALL.fingerprint(3, own);
        assert_eq!((one.difference(&one), one.op_desc()), (None, Some(CALL)));
    }

    #[test]
    fn invalid_words_decode_to_no_call() {
        let garbage = Fingerprint::from_words(0, [u64::MAX; 5]);
        assert_eq!(garbage.op_desc(), None);
        assert!(garbage.to_string().contains("unknown"));
    }

    #[test]
    fn display_names_verb_count_type_operator_and_root() {
        assert_eq!(CALL.to_string(), "all_reduce of 1000 f32, sum");
        let call = OpDesc { verb: Verb::Broadcast, op: None, root: Some(2), ..CALL };
        assert_eq!(call.to_string(), "broadcast of 1000 f32, root 2");
    }
}
