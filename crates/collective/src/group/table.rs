//! The table of verbs: each verb on buffers, with its arguments, and all of its forms.
//!
//! The blocking form runs the verb's function in [`verbs`](super::verbs), which checks the
//! arguments, on the caller's thread. The asynchronous form owns its buffers; it runs the same
//! function, first as a dry run on the caller's thread, for the checks, then on the group's
//! communication thread. The scoped form is an asynchronous one with borrowed buffers. Messages and
//! the barrier, whose arguments follow no pattern, are written out below the table.

use super::scope::{Scope, ScopedWork};
use super::verbs::Message;
#[cfg(doc)]
use crate::Error;
use crate::work::{Buffer, Work};
use crate::{Element, ProcessGroup, Rank, ReduceOp, Result};

/// Buffers of a batch of messages, each with the rank it is sent to or received from.
type WithPeers<B> = Vec<(B, Rank)>;

/// The type of an argument, given those of the output and of the input.
macro_rules! arg_type {
    (out $out:ty, $input:ty) => {
        $out
    };
    (input $out:ty, $input:ty) => {
        $input
    };
    (op $out:ty, $input:ty) => {
        ReduceOp
    };
    (root $out:ty, $input:ty) => {
        Rank
    };
    (counts $out:ty, $input:ty) => {
        &[usize]
    };
}

/// An argument as an operation in flight stores it.
macro_rules! stored_arg {
    (counts $arg:ident) => {
        $arg.to_vec()
    };
    ($kind:ident $arg:ident) => {
        $arg
    };
}

/// A stored argument as the blocking form takes it.
macro_rules! call_arg {
    (counts $arg:ident) => {
        &$arg
    };
    ($kind:ident $arg:ident) => {
        $arg
    };
}

/// The asynchronous form of a verb.
macro_rules! asynchronous {
    (
        ($(#[$doc:meta])*) $form:ident($out:ident: O $(, $in:ident: $I:ident)?)
        $verb:ident($($arg:ident: $kind:ident),+)
    ) => {
        $(#[$doc])*
        pub fn $form<O: Buffer $(, $I: Buffer<Elem = O::Elem>)?>(
            &self,
            $($arg: arg_type!($kind O, I)),+
        ) -> Result<Work<(O $(, $I)?)>> {
            $(let $arg = stored_arg!($kind $arg);)+
            self.submit(($out $(, $in)?), move |verbs, ($out $(, $in)?)| {
                let ($out $(, $in)?) = ($out.as_mut_slice() $(, $in.as_mut_slice())?);
                verbs.$verb($(call_arg!($kind $arg)),+)
            })
        }
    };
}

/// The form of a verb within a scope.
macro_rules! scoped {
    (
        ($(#[$doc:meta])*) ($out:ident: O $(, $in:ident: I)?)
        $verb:ident($($arg:ident: $kind:ident),+)
    ) => {
        $(#[$doc])*
        pub fn $verb<T: Element>(
            &'scope self,
            $($arg: arg_type!($kind &'scope mut [T], &'scope [T])),+
        ) -> Result<ScopedWork<'scope, T>> {
            $(let $arg = stored_arg!($kind $arg);)+
            let input: &[T] = [$($in,)? &[]][0];
            self.submit($out, input, move |verbs, $out, _input| {
                $(let $in = _input;)?
                verbs.$verb($(call_arg!($kind $arg)),+)
            })
        }
    };
}

/// The table: the blocking form with all its arguments, then the asynchronous form with the buffers
/// it owns.
macro_rules! table {
    ($(
        $(#[$doc:meta])*
        fn $verb:ident($($arg:ident: $kind:ident),+);
        $(#[$own_doc:meta])*
        fn $form:ident($($buf:ident: $B:ident),+);
    )+) => {
        /// The verbs on buffers.
        ///
        /// The asynchronous forms take the arguments of the blocking ones, with buffers by value,
        /// and return the buffers through a [`Work`]. All run in the order of submission on the
        /// group's communication thread. They must be called in the same order as on every other
        /// rank, where either form matches the other. They do not block unless 1024 operations are
        /// queued. They fail at once, and drop the buffers, only for an invalid argument or if the
        /// group has failed before.
        #[expect(unused_parens, reason = "one buffer or two")]
        impl ProcessGroup {
            $(
                $(#[$doc])*
                pub fn $verb<T: Element>(&self, $($arg: arg_type!($kind &mut [T], &[T])),+) -> Result<()> {
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
                        /// [`Error::InvalidArgument`], or the group's earlier failure; the buffers
                        /// are dropped. Later errors are returned by [`Work::wait`].
                    )
                    $form($($buf: $B),+) $verb($($arg: $kind),+)
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
                    /// [`Error::InvalidArgument`], or the group's earlier failure. Later errors are
                    /// returned by [`ScopedWork::wait`].
                )
                ($($buf: $B),+) $verb($($arg: $kind),+)
            })+
        }
    };
}

table! {
    /// Reduces the ranks' buffers, element by element, in place; every rank gets the result, with
    /// the same bits.
    ///
    /// Every rank must call it with the same count, type and operator. Blocks. A buffer of
    /// [`alloc`](Self::alloc), or the same part of it on every rank, is reduced in place; it is a
    /// mismatch if only some ranks pass one.
    ///
    /// Over shared memory, for `n` ranks and `b` bytes: up to 8 KiB, or 32 KiB divided by `n` for
    /// more than four ranks, one step, in which each rank reads all `n * b`. Above, in chunks of
    /// 256 KiB, three steps each: a rank writes `(n-1)/n * b` for the others, folds `b / n` from
    /// each of them, and reads `(n-1)/n * b` of results; between two ranks up to 64 KiB, two steps
    /// each: a rank writes `b` for the other and folds `b` from it. In place: one step; a rank
    /// reads `b / n` from every rank and writes it to every rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T`. [`Error::Mismatch`] with `buf`
    /// unchanged. Otherwise a peer's failure, with the contents of `buf` unspecified.
    #[doc(alias = "allreduce")]
    fn all_reduce(buf: out, op: op);
    /// Every rank must call it in the same place among its calls; the blocking form on one rank
    /// matches the asynchronous form on another. Steps, bytes and bits are those of the blocking
    /// form.
    fn all_reduce_async(buf: O);

    /// Reduces the ranks' buffers, element by element, into the root's; the other ranks' buffers
    /// are unchanged.
    ///
    /// Every rank must call it with the same count, type, operator and root. Blocks. The root gets
    /// the bits of [`all_reduce`](Self::all_reduce), in the same steps; only the root reads
    /// results.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `op` is not defined for `T` or the root is not a rank of the
    /// group; else as [`all_reduce`](Self::all_reduce).
    fn reduce(buf: out, op: op, root: root);
    /// On all ranks but the root the buffer is returned unchanged.
    fn reduce_async(buf: O);

    /// Copies the root's buffer to every rank.
    ///
    /// Every rank must call it with the same count, type and root. Blocks, on every rank, until all
    /// have entered and this rank has its copy. Over shared memory the root writes the buffer once,
    /// in chunks of 256 KiB, and every other rank reads it. All ranks end with the same bits.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the root is not a rank of the group; else as
    /// [`all_reduce`](Self::all_reduce).
    fn broadcast(buf: out, root: root);
    fn broadcast_async(buf: O);

    /// Concatenates the ranks' inputs, in rank order, on every rank.
    ///
    /// Every rank must call it with the same `input.len()` and type, and with
    /// `output.len() == world_size * input.len()`. Blocks. Over shared memory every rank writes its
    /// input once, in chunks of 256 KiB, and reads those of the others. All ranks end with the same
    /// bits.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if a length is wrong; else as [`all_reduce`](Self::all_reduce).
    #[doc(alias = "allgather")]
    fn all_gather(output: out, input: input);
    fn all_gather_async(output: O, input: I);

    /// Reduces the ranks' inputs; rank `r` gets block `r` of the result.
    ///
    /// Every rank must call it with the same `output.len()`, type and operator, and with
    /// `input.len() == world_size * output.len()`. Blocks. Over shared memory a rank writes the
    /// other ranks' blocks of its input once, in chunks of 256 KiB, and reads its own block from
    /// every other rank. The result has the bits of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if a length is wrong or `op` is not defined for `T`; else as
    /// [`all_reduce`](Self::all_reduce).
    fn reduce_scatter(output: out, input: input, op: op);
    fn reduce_scatter_async(output: O, input: I);

    /// Concatenates the ranks' inputs, in rank order, on the root.
    ///
    /// Every rank must call it with the same `input.len()`, type and root. On the root
    /// `output.len() == world_size * input.len()`; on other ranks `output` is not written, and may
    /// be empty. Blocks until the root has all inputs, and on other ranks until their input is in
    /// the channel. One step; every rank but the root sends its input once.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather`](Self::all_gather), or [`Error::InvalidArgument`] if the root is not a
    /// rank of the group.
    fn gather(output: out, input: input, root: root);
    /// `output` may be empty on all ranks but the root.
    fn gather_async(output: O, input: I);

    /// Sends block `r` of the root's input to rank `r`.
    ///
    /// Every rank must call it with the same `output.len()`, type and root. On the root
    /// `input.len() == world_size * output.len()`; on other ranks `input` is not read, and may be
    /// empty. Blocks until this rank has its block, and on the root until all are in the channels.
    /// One step; the root sends each block once.
    ///
    /// # Errors
    ///
    /// Same as [`gather`](Self::gather).
    fn scatter(output: out, input: input, root: root);
    /// `input` may be empty on all ranks but the root.
    fn scatter_async(output: O, input: I);

    /// Copies block `s` of rank `r`'s input to block `r` of rank `s`'s output.
    ///
    /// Every rank must call it with the same `input.len() == output.len()`, a multiple of
    /// `world_size`, and type. Blocks. One step; every rank sends each block but its own once.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather`](Self::all_gather).
    #[doc(alias = "alltoall")]
    fn all_to_all(output: out, input: input);
    fn all_to_all_async(output: O, input: I);

    /// [`all_gather`](Self::all_gather) of inputs of different lengths: rank `r` has `counts[r]`
    /// elements.
    ///
    /// Every rank must call it with the same `counts` and type, `input.len() == counts[rank]`, and
    /// `output.len()` their sum. Blocks. Two steps: an all-gather of the counts, which are compared
    /// on every rank, then every rank sends its input to every other.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if a length is wrong; [`Error::Mismatch`] on every rank, with
    /// `output` unchanged, if the ranks' counts differ; else as [`all_reduce`](Self::all_reduce).
    #[doc(alias = "allgatherv")]
    fn all_gather_v(output: out, input: input, counts: counts);
    fn all_gather_v_async(output: O, input: I);

    /// [`gather`](Self::gather) of inputs of different lengths: rank `r` has `counts[r]` elements.
    /// Only the root's `counts` are read.
    ///
    /// Two steps: an all-gather of the counts, then the inputs.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather_v`](Self::all_gather_v).
    fn gather_v(output: out, input: input, counts: counts, root: root);
    fn gather_v_async(output: O, input: I);

    /// [`scatter`](Self::scatter) of blocks of different lengths: rank `r` gets `counts[r]`
    /// elements. Only the root's `counts` are read.
    ///
    /// Two steps: an all-gather of the counts, then the blocks.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather_v`](Self::all_gather_v).
    fn scatter_v(output: out, input: input, counts: counts, root: root);
    fn scatter_v_async(output: O, input: I);

    /// [`reduce_scatter`](Self::reduce_scatter) with blocks of different lengths: rank `r` gets
    /// `counts[r]` elements of the result.
    ///
    /// Every rank must call it with the same `counts`, type and operator,
    /// `output.len() == counts[rank]` and `input.len()` the sum of the counts. Blocks. An
    /// all-gather of the counts, then a [`reduce`](Self::reduce) for each rank, on a copy of the
    /// block.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather_v`](Self::all_gather_v), or [`Error::InvalidArgument`] if `op` is not
    /// defined for `T`.
    fn reduce_scatter_v(output: out, input: input, counts: counts, op: op);
    fn reduce_scatter_v_async(output: O, input: I);

    /// [`all_to_all`](Self::all_to_all) with blocks of different lengths: this rank sends
    /// `input_counts[s]` elements to rank `s` and receives `output_counts[r]` from rank `r`.
    ///
    /// The count that a rank sends to another must equal the count that the other expects. Blocks.
    /// Two steps: an all-gather of all counts, then the blocks.
    ///
    /// # Errors
    ///
    /// Same as [`all_gather_v`](Self::all_gather_v).
    #[doc(alias = "all_to_all_single")]
    fn all_to_all_v(output: out, output_counts: counts, input: input, input_counts: counts);
    fn all_to_all_v_async(output: O, input: I);
}

/// The asynchronous forms of messages and the barrier.
impl ProcessGroup {
    /// Starts a [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// Same as [`all_reduce_async`](Self::all_reduce_async).
    #[doc(alias = "isend")]
    pub fn send_async<B: Buffer>(&self, buf: B, to: Rank) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| {
            verbs.batch(vec![Message::send(&*buf.as_mut_slice(), to)])
        })
    }

    /// Starts a [`recv`](Self::recv).
    ///
    /// Until its message has arrived, no operation submitted later on this rank runs, and blocking
    /// calls wait. So two ranks that each receive from the other before they send to it wait until
    /// the timeout. Use one [`batch_isend_irecv_async`](Self::batch_isend_irecv_async) for such
    /// messages, which then progress concurrently.
    ///
    /// # Errors
    ///
    /// Same as [`all_reduce_async`](Self::all_reduce_async).
    #[doc(alias = "irecv")]
    pub fn recv_async<B: Buffer>(&self, buf: B, from: Rank) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| {
            verbs.batch(vec![Message::recv(buf.as_mut_slice(), from)])
        })
    }

    /// Starts a [`batch_isend_irecv`](Self::batch_isend_irecv) of `sends`, each to the rank paired
    /// with it, and of `receives`, each from the rank paired with it. The order between sends and
    /// receives does not matter: the two directions match separately.
    ///
    /// # Errors
    ///
    /// Same as [`all_reduce_async`](Self::all_reduce_async).
    pub fn batch_isend_irecv_async<S: Buffer, R: Buffer>(
        &self,
        sends: WithPeers<S>,
        receives: WithPeers<R>,
    ) -> Result<Work<(WithPeers<S>, WithPeers<R>)>> {
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
    /// Same as [`all_reduce_async`](Self::all_reduce_async).
    #[doc(alias = "ibarrier")]
    pub fn barrier_async(&self) -> Result<Work<()>> {
        self.submit((), |verbs, ()| verbs.barrier())
    }
}
