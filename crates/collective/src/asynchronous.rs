//! The asynchronous forms: every verb on buffers that it owns.
//!
//! Each runs the function of the blocking form, first as a rehearsal on the caller's thread, for its
//! checks, then on the group's communication thread.

#[cfg(doc)]
use crate::Error;
use crate::verbs::Message;
use crate::work::{Buffer, Work};
use crate::{ProcessGroup, Rank, ReduceOp, Result};

/// Messages that a batch owns: each a buffer, and the rank it goes to or comes from.
pub type Addressed<B> = Vec<(B, Rank)>;

/// The asynchronous forms. They take the arguments of the blocking ones, with buffers by value, and
/// give the buffers back through a [`Work`]. All run in the order of submission on the group's one
/// communication thread, must be called in the same place among the calls of every rank (in either
/// form), do not block unless 1024 operations are queued, and fail at once only for a caller's
/// mistake or a group that has failed before, which drops the buffers.
impl ProcessGroup {
    /// Starts an [`all_reduce`](Self::all_reduce) and returns; the result comes with
    /// [`Work::wait`].
    ///
    /// Every rank must call it in the same place among its calls; whether a rank takes the blocking
    /// or the asynchronous form is its own affair. Operations run on the group's one communication
    /// thread in the order of submission. Does not block unless 1024 operations are queued. Steps,
    /// bytes and bits are those of the blocking form.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], or the group's earlier failure; `buf` is dropped. What happens
    /// in flight is reported by [`Work::wait`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// use collective::{ProcessGroup, ReduceOp, Result, SharedBuf};
    ///
    /// fn step(group: &ProcessGroup) -> Result<()> {
    ///     let mut bucket: SharedBuf<f32> = group.alloc(1000)?;
    ///     bucket.fill(group.rank() as f32);
    ///     let work = group.all_reduce_async(bucket, ReduceOp::Avg)?;
    ///     // Compute the next gradients here.
    ///     let bucket = work.wait()?;
    ///     assert!(bucket.iter().all(|&x| x == 0.5));
    ///     Ok(())
    /// }
    /// # let groups = ProcessGroup::threads(2, Duration::from_secs(10))?;
    /// # std::thread::scope(|scope| {
    /// #     for group in groups {
    /// #         scope.spawn(move || step(&group).expect("both ranks are here"));
    /// #     }
    /// # });
    /// # Ok::<(), collective::Error>(())
    /// ```
    pub fn all_reduce_async<B: Buffer>(&self, buf: B, op: ReduceOp) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| verbs.all_reduce(buf.as_mut_slice(), op))
    }

    /// Starts a [`reduce`](Self::reduce); the buffer comes back as it was on all ranks but the root.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn reduce_async<B: Buffer>(&self, buf: B, op: ReduceOp, root: Rank) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| verbs.reduce(buf.as_mut_slice(), op, root))
    }

    /// Starts a [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn broadcast_async<B: Buffer>(&self, buf: B, root: Rank) -> Result<Work<B>> {
        self.submit(buf, move |verbs, buf| verbs.broadcast(buf.as_mut_slice(), root))
    }

    /// Starts an [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_gather_async<O, I>(&self, output: O, input: I) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.all_gather(output.as_mut_slice(), input.as_mut_slice())
        })
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn reduce_scatter_async<O, I>(
        &self,
        output: O,
        input: I,
        op: ReduceOp,
    ) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.reduce_scatter(output.as_mut_slice(), input.as_mut_slice(), op)
        })
    }

    /// Starts a [`gather`](Self::gather); `output` may be empty on all ranks but the root.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn gather_async<O, I>(&self, output: O, input: I, root: Rank) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.gather(output.as_mut_slice(), input.as_mut_slice(), root)
        })
    }

    /// Starts a [`scatter`](Self::scatter); `input` may be empty on all ranks but the root.
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn scatter_async<O, I>(&self, output: O, input: I, root: Rank) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.scatter(output.as_mut_slice(), input.as_mut_slice(), root)
        })
    }

    /// Starts an [`all_to_all`](Self::all_to_all).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_to_all_async<O, I>(&self, output: O, input: I) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.all_to_all(output.as_mut_slice(), input.as_mut_slice())
        })
    }

    /// Starts an [`all_gather_v`](Self::all_gather_v).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_gather_v_async<O, I>(
        &self,
        output: O,
        input: I,
        counts: &[usize],
    ) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        let counts = counts.to_vec();
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.all_gather_v(output.as_mut_slice(), input.as_mut_slice(), &counts)
        })
    }

    /// Starts a [`gather_v`](Self::gather_v).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn gather_v_async<O, I>(
        &self,
        output: O,
        input: I,
        counts: &[usize],
        root: Rank,
    ) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        let counts = counts.to_vec();
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.gather_v(output.as_mut_slice(), input.as_mut_slice(), &counts, root)
        })
    }

    /// Starts a [`scatter_v`](Self::scatter_v).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn scatter_v_async<O, I>(
        &self,
        output: O,
        input: I,
        counts: &[usize],
        root: Rank,
    ) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        let counts = counts.to_vec();
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.scatter_v(output.as_mut_slice(), input.as_mut_slice(), &counts, root)
        })
    }

    /// Starts a [`reduce_scatter_v`](Self::reduce_scatter_v).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn reduce_scatter_v_async<O, I>(
        &self,
        output: O,
        input: I,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        let counts = counts.to_vec();
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.reduce_scatter_v(output.as_mut_slice(), input.as_mut_slice(), &counts, op)
        })
    }

    /// Starts an [`all_to_all_v`](Self::all_to_all_v).
    ///
    /// # Errors
    ///
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_to_all_v_async<O, I>(
        &self,
        output: O,
        output_counts: &[usize],
        input: I,
        input_counts: &[usize],
    ) -> Result<Work<(O, I)>>
    where
        O: Buffer,
        I: Buffer<Elem = O::Elem>,
    {
        let (to, from) = (output_counts.to_vec(), input_counts.to_vec());
        self.submit((output, input), move |verbs, (output, input)| {
            verbs.all_to_all_v(output.as_mut_slice(), &to, input.as_mut_slice(), &from)
        })
    }

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
