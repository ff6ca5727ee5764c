//! The table of verbs: of each verb on buffers its name and arguments, once, with all of its forms.
//!
//! The blocking form runs the verb's function in [`verbs`](crate::verbs), where its checks are, on the
//! caller's thread. The asynchronous form owns its buffers; it runs the same function, first as a
//! rehearsal on the caller's thread, for the checks, then on the group's communication thread. The scoped
//! form is an asynchronous one that borrows them. The verbs of messages and the barrier, whose arguments
//! are like no other's, follow the table.

#[cfg(doc)]
use crate::Error;
use crate::scope::{Scope, ScopedWork};
use crate::verbs::Message;
use crate::work::{Buffer, Work};
use crate::{Element, ProcessGroup, Rank, ReduceOp, Result};

/// Messages that a batch owns: each a buffer, and the rank it goes to or comes from.
type Addressed<B> = Vec<(B, Rank)>;

/// An argument of a blocking or a scoped form, by kind.
macro_rules! borrowed {
    (out $T:ident $($life:lifetime)?) => {
        &$($life)? mut [$T]
    };
    (input $T:ident $($life:lifetime)?) => {
        &$($life)? [$T]
    };
    (op $T:ident $($life:lifetime)?) => {
        ReduceOp
    };
    (root $T:ident $($life:lifetime)?) => {
        Rank
    };
    (counts $T:ident $($life:lifetime)?) => {
        &[usize]
    };
}

/// An argument of an asynchronous form, by kind.
macro_rules! owned {
    (out $O:ident $I:ident) => {
        $O
    };
    (input $O:ident $I:ident) => {
        $I
    };
    (op $O:ident $I:ident) => {
        ReduceOp
    };
    (root $O:ident $I:ident) => {
        Rank
    };
    (counts $O:ident $I:ident) => {
        &[usize]
    };
}

/// What an operation in flight keeps of an argument.
macro_rules! kept {
    (counts $arg:ident) => {
        $arg.to_vec()
    };
    ($kind:ident $arg:ident) => {
        $arg
    };
}

/// A kept argument as the blocking form takes it.
macro_rules! lent {
    (counts $arg:ident) => {
        &$arg
    };
    ($kind:ident $arg:ident) => {
        $arg
    };
}

/// An asynchronous form, of one buffer or of two.
macro_rules! asynchronous {
    (($(#[$doc:meta])*) $form:ident($buf:ident) $verb:ident($($arg:ident: $kind:ident),+)) => {
        $(#[$doc])*
        pub fn $form<B: Buffer>(&self, $($arg: owned!($kind B B)),+) -> Result<Work<B>> {
            $(let $arg = kept!($kind $arg);)+
            self.submit($buf, move |verbs, $buf| {
                let $buf = $buf.as_mut_slice();
                verbs.$verb($(lent!($kind $arg)),+)
            })
        }
    };
    (($(#[$doc:meta])*) $form:ident($out:ident, $in:ident) $verb:ident($($arg:ident: $kind:ident),+)) => {
        $(#[$doc])*
        pub fn $form<O, I>(&self, $($arg: owned!($kind O I)),+) -> Result<Work<(O, I)>>
        where
            O: Buffer,
            I: Buffer<Elem = O::Elem>,
        {
            $(let $arg = kept!($kind $arg);)+
            self.submit(($out, $in), move |verbs, ($out, $in)| {
                let ($out, $in) = ($out.as_mut_slice(), $in.as_mut_slice());
                verbs.$verb($(lent!($kind $arg)),+)
            })
        }
    };
}

/// A scoped form, of one buffer or of two.
macro_rules! scoped {
    (($(#[$doc:meta])*) ($buf:ident) $verb:ident($($arg:ident: $kind:ident),+)) => {
        scoped! { ($(#[$doc])*) ($buf, _input = &[]) $verb($($arg: $kind),+) }
    };
    (($(#[$doc:meta])*) ($out:ident, $in:ident) $verb:ident($($arg:ident: $kind:ident),+)) => {
        scoped! { ($(#[$doc])*) ($out, $in = $in) $verb($($arg: $kind),+) }
    };
    (
        ($(#[$doc:meta])*) ($out:ident, $in:ident = $from:expr)
        $verb:ident($($arg:ident: $kind:ident),+)
    ) => {
        $(#[$doc])*
        pub fn $verb<T: Element>(
            &'scope self,
            $($arg: borrowed!($kind T 'scope)),+
        ) -> Result<ScopedWork<'scope, T>> {
            $(let $arg = kept!($kind $arg);)+
            self.submit($out, $from, move |verbs, $out, $in| verbs.$verb($(lent!($kind $arg)),+))
        }
    };
}

/// The table: the blocking form with all its arguments, then the asynchronous one with those that it
/// owns.
macro_rules! table {
    ($(
        $(#[$doc:meta])*
        fn $verb:ident($($arg:ident: $kind:ident),+);
        $(#[$own_doc:meta])*
        fn $form:ident($($buf:ident),+);
    )+) => {
        /// The verbs on buffers.
        ///
        /// The asynchronous forms take the arguments of the blocking ones, with buffers by value, and give
        /// the buffers back through a [`Work`]. All run in the order of submission on the group's one
        /// communication thread, must be called in the same place among the calls of every rank (in either
        /// form), do not block unless 1024 operations are queued, and fail at once only for a caller's
        /// mistake or a group that has failed before, which drops the buffers.
        impl ProcessGroup {
            $(
                $(#[$doc])*
                pub fn $verb<T: Element>(&self, $($arg: borrowed!($kind T)),+) -> Result<()> {
                    self.verbs()?.$verb($($arg),+)
                }

                asynchronous! {
                    (
                        #[doc = concat!("Starts [`", stringify!($verb), "`](Self::", stringify!($verb), ") and")]
                        /// returns; the result comes with [`Work::wait`].
                        ///
                        $(#[$own_doc])*
                        ///
                        /// # Errors
                        ///
                        /// [`Error::InvalidArgument`], or the group's earlier failure; the buffers are dropped. What
                        /// happens in flight is reported by [`Work::wait`].
                    )
                    $form($($buf),+) $verb($($arg: $kind),+)
                }
            )+
        }

        /// The verbs on buffers, borrowed until the [scope](ProcessGroup::scope) ends.
        impl<'scope> Scope<'scope, '_> {
            $(scoped! {
                (
                    #[doc = concat!("Starts [`", stringify!($verb), "`](ProcessGroup::", stringify!($verb), ") and")]
                    /// returns; the result comes with [`ScopedWork::wait`], or when the scope ends.
                    ///
                    /// # Errors
                    ///
                    /// [`Error::InvalidArgument`], or the group's earlier failure. What happens in flight is
                    /// reported by [`ScopedWork::wait`].
                )
                ($($buf),+) $verb($($arg: $kind),+)
            })+
        }
    };
}

table! {
    /// Reduces the ranks' buffers, element by element, in place; every rank gets the result, with
    /// the same bits.
    ///
    /// Every rank must call it with the same count, type and operator. Blocks. A buffer of
    /// [`alloc`](Self::alloc), or the same part of it on every rank, is reduced where it lies; if
    /// only some ranks pass one, that is a mismatch.
    ///
    /// Over shared memory, for `n` ranks and `b` bytes: up to 8 KiB one step, each rank reads all
    /// `n * b`. Above, in chunks of 256 KiB, three steps each: a rank writes `(n-1)/n * b` for the
    /// others, folds `b / n` from each of them, and reads `(n-1)/n * b` of results; between two
    /// ranks, in chunks of 512 KiB (128 KiB above 4 MiB), two steps each: a rank writes `b` for the
    /// other and folds `b` from it. In place: one step; a rank reads `b / n` from every rank and writes it to every
    /// rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T`. [`Error::Mismatch`] with `buf`
    /// unchanged. Otherwise a peer's failure, with the contents of `buf` unspecified.
    #[doc(alias = "allreduce")]
    fn all_reduce(buf: out, op: op);
    /// Every rank must call it in the same place among its calls; whether a rank takes the blocking or the
    /// asynchronous form is its own affair. Steps, bytes and bits are those of the blocking form.
    fn all_reduce_async(buf);

    /// Reduces the ranks' buffers, element by element, into the root's; the others' stay as they
    /// were.
    ///
    /// Every rank must call it with the same count, type, operator and root. Blocks. The root gets
    /// the bits that [`all_reduce`](Self::all_reduce) gives, for the same steps; only the root reads
    /// results.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T` or there is no such root; else as
    /// [`all_reduce`](Self::all_reduce).
    fn reduce(buf: out, op: op, root: root);
    /// The buffer comes back as it was on all ranks but the root.
    fn reduce_async(buf);

    /// Copies the root's buffer to every rank.
    ///
    /// Every rank must call it with the same count, type and root. Blocks, on every rank, until all
    /// have entered and this rank has its copy. Over shared memory the root writes the buffer once,
    /// in chunks of 256 KiB, and every other rank reads it. All ranks end with the same bits.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if there is no such root; else as [`all_reduce`](Self::all_reduce).
    fn broadcast(buf: out, root: root);
    fn broadcast_async(buf);

    /// Concatenates the ranks' inputs, in rank order, on every rank.
    ///
    /// Every rank must call it with the same `input.len()` and type, and with
    /// `output.len() == world_size * input.len()`. Blocks. Over shared memory every rank writes its
    /// input once, in chunks of 256 KiB, and reads those of the others. All ranks end with the same
    /// bits.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the lengths do not fit; else as
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "allgather")]
    fn all_gather(output: out, input: input);
    fn all_gather_async(output, input);

    /// Reduces the ranks' inputs and leaves rank `r` with block `r` of the result.
    ///
    /// Every rank must call it with the same `output.len()`, type and operator, and with
    /// `input.len() == world_size * output.len()`. Blocks. Over shared memory a rank writes the
    /// other ranks' blocks of its input once, in chunks of 256 KiB, and reads its own block from
    /// every other rank. The result has the bits that [`all_reduce`](Self::all_reduce) gives.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the lengths do not fit or `op` is not defined for `T`; else as
    /// [`all_reduce`](Self::all_reduce).
    fn reduce_scatter(output: out, input: input, op: op);
    fn reduce_scatter_async(output, input);

    /// Concatenates the ranks' inputs, in rank order, on the root.
    ///
    /// Every rank must call it with the same `input.len()`, type and root. On the root
    /// `output.len() == world_size * input.len()`; elsewhere `output` is left alone, and may be
    /// empty. Blocks until the root has all, and on the others until their input is on its way. One
    /// step; every rank but the root sends its input once.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather), or [`Error::InvalidArgument`] if there is no such root.
    fn gather(output: out, input: input, root: root);
    /// `output` may be empty on all ranks but the root.
    fn gather_async(output, input);

    /// Leaves rank `r` with block `r` of the root's input.
    ///
    /// Every rank must call it with the same `output.len()`, type and root. On the root
    /// `input.len() == world_size * output.len()`; elsewhere `input` is not read, and may be empty.
    /// Blocks until this rank has its block, and on the root until all are on their way. One step;
    /// the root sends each block once.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn scatter(output: out, input: input, root: root);
    /// `input` may be empty on all ranks but the root.
    fn scatter_async(output, input);

    /// Block `s` of rank `r`'s input becomes block `r` of rank `s`'s output.
    ///
    /// Every rank must call it with the same `input.len() == output.len()`, a multiple of
    /// `world_size`, and type. Blocks. One step; every rank sends each block but its own once.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
    #[doc(alias = "alltoall")]
    fn all_to_all(output: out, input: input);
    fn all_to_all_async(output, input);

    /// [`all_gather`](Self::all_gather) of inputs of different lengths: `counts[r]` elements of
    /// rank `r`.
    ///
    /// Every rank must call it with the same `counts` and type, `input.len() == counts[rank]`, and
    /// `output.len()` their sum. Blocks. Two steps: an all-gather of the counts, which are compared
    /// on every rank, then every rank sends its input to every other.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the lengths do not fit; [`Error::Mismatch`] on every rank,
    /// with `output` unchanged, if the ranks' counts do not; else as
    /// [`all_reduce`](Self::all_reduce).
    #[doc(alias = "allgatherv")]
    fn all_gather_v(output: out, input: input, counts: counts);
    fn all_gather_v_async(output, input);

    /// [`gather`](Self::gather) of inputs of different lengths: the root says that rank `r` has
    /// `counts[r]` elements, and elsewhere `counts` is not read.
    ///
    /// Two steps: an all-gather of the counts, then the inputs.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    fn gather_v(output: out, input: input, counts: counts, root: root);
    fn gather_v_async(output, input);

    /// [`scatter`](Self::scatter) of blocks of different lengths: the root says that rank `r` gets
    /// `counts[r]` elements, and elsewhere `counts` is not read.
    ///
    /// Two steps: an all-gather of the counts, then the blocks.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    fn scatter_v(output: out, input: input, counts: counts, root: root);
    fn scatter_v_async(output, input);

    /// [`reduce_scatter`](Self::reduce_scatter) with blocks of different lengths: rank `r` is left
    /// with `counts[r]` elements of the result.
    ///
    /// Every rank must call it with the same `counts`, type and operator,
    /// `output.len() == counts[rank]` and `input.len()` the sum of the counts. Blocks. An
    /// all-gather of the counts, then a [`reduce`](Self::reduce) for each rank, on a copy of the
    /// block.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v), or [`Error::InvalidArgument`] if `op` is not
    /// defined for `T`.
    fn reduce_scatter_v(output: out, input: input, counts: counts, op: op);
    fn reduce_scatter_v_async(output, input);

    /// [`all_to_all`](Self::all_to_all) with blocks of different lengths: this rank sends
    /// `input_counts[s]` elements to rank `s` and receives `output_counts[r]` from rank `r`.
    ///
    /// What a rank sends another must be what that one expects. Blocks. Two steps: an all-gather of
    /// all counts, then the blocks.
    ///
    /// # Errors
    ///
    /// As [`all_gather_v`](Self::all_gather_v).
    #[doc(alias = "all_to_all_single")]
    fn all_to_all_v(output: out, output_counts: counts, input: input, input_counts: counts);
    fn all_to_all_v_async(output, input);
}

/// The asynchronous forms of messages and of the barrier.
impl ProcessGroup {
    /// Starts a [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    #[doc(alias = "isend")]
    pub fn send_async<B: Buffer>(&self, buf: B, to: Rank) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| {
            verbs.batch(vec![Message::send(&*buf.as_mut_slice(), to)])
        })
    }

    /// Starts a [`recv`](Self::recv).
    ///
    /// It stands in the one queue of this rank: until its message is there, nothing that was
    /// submitted later runs, and a blocking call waits. Two ranks that each receive from the other
    /// before they send to it thus wait until the group's timeout. Messages that cross belong into
    /// one [`batch_isend_irecv_async`](Self::batch_isend_irecv_async), in which none waits for
    /// another.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    #[doc(alias = "irecv")]
    pub fn recv_async<B: Buffer>(&self, buf: B, from: Rank) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| {
            verbs.batch(vec![Message::recv(buf.as_mut_slice(), from)])
        })
    }

    /// Starts a [`batch_isend_irecv`](Self::batch_isend_irecv) of `sends`, each to the rank beside
    /// it, and of messages into `receives`, each from the rank beside it. The sends come first
    /// among messages with one rank, which does not matter: the two directions match separately.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn batch_isend_irecv_async<S: Buffer, R: Buffer>(
        &self,
        sends: Addressed<S>,
        receives: Addressed<R>,
    ) -> Result<Work<(Addressed<S>, Addressed<R>)>> {
        self.submit((sends, receives), |verbs, (sends, receives)| {
            let mut messages = Vec::with_capacity(sends.len() + receives.len());
            messages
                .extend(sends.iter_mut().map(|(buf, to)| Message::send(&*buf.as_mut_slice(), *to)));
            messages.extend(
                receives.iter_mut().map(|(buf, from)| Message::recv(buf.as_mut_slice(), *from)),
            );
            verbs.batch(messages)
        })
    }

    /// Starts a [`barrier`](Self::barrier).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    #[doc(alias = "ibarrier")]
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.submit((), |verbs, ()| verbs.barrier())
    }
}
