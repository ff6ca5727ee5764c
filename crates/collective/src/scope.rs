//! Asynchronous operations on borrowed memory, which cannot outlive a scope.
//!
//! [`ProcessGroup::scope`] works as [`std::thread::scope`]: it returns once every operation that was
//! started in it is over, however the closure ends and whatever becomes of the [`ScopedWork`]s. The
//! invariant: an operation uses what it borrows for `'scope` only before the scope ends.

#![expect(unsafe_code, reason = "lends borrowed slices to the communication thread")]

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::verbs::Verbs;
use crate::work::Work;
use crate::{Element, ProcessGroup, Result};

/// Starts operations on memory that lives longer than the [scope](ProcessGroup::scope).
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    group: &'env ProcessGroup,
    // Both invariant, as those of `std::thread::Scope`.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

/// An operation in flight on borrowed memory. Dropping or forgetting it loses its error; the scope
/// waits for the operation all the same.
#[derive(Debug)]
#[must_use = "dropping a `ScopedWork` loses the error"]
pub struct ScopedWork<'scope, T> {
    work: Work<Lent<T>>,
    output: PhantomData<&'scope mut [T]>,
}

impl<'scope, T: Element> ScopedWork<'scope, T> {
    /// Waits for the operation and gives the output back, before the scope ends.
    ///
    /// # Errors
    ///
    /// What the operation failed with; the contents of the output are unspecified then.
    pub fn wait(self) -> Result<&'scope mut [T]> {
        let Lent { mut output, .. } = self.work.wait()?;
        // SAFETY: borrowed exclusively for `'scope` by the call that started the operation, which was
        // the only user and is over.
        Ok(unsafe { output.as_mut() })
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.work.is_done()
    }
}

/// The slices that an operation borrows. Pointers, since the communication thread may drop them after
/// the borrow has ended.
#[derive(Debug)]
struct Lent<T> {
    output: NonNull<[T]>,
    input: NonNull<[T]>,
}

// SAFETY: stands for a `&mut [T]` and a `&[T]`, and an `Element` is `Send` and `Sync`.
unsafe impl<T: Element> Send for Lent<T> {}

impl<'scope> Scope<'scope, '_> {
    /// Queues `run` on the slices.
    pub(crate) fn submit<T: Element>(
        &'scope self,
        output: &'scope mut [T],
        input: &'scope [T],
        run: impl Fn(Verbs<'_>, &mut [T], &[T]) -> Result<()> + Send + 'static,
    ) -> Result<ScopedWork<'scope, T>> {
        let lent = Lent { output: NonNull::from(output), input: NonNull::from(input) };
        let work = self.group.submit(lent, move |verbs, lent| {
            // SAFETY: borrowed exclusively for `'scope`, which ends after this operation, by
            // `ProcessGroup::scope`; nobody else has it until the operation is over.
            let output = unsafe { lent.output.as_mut() };
            // SAFETY: likewise, but shared.
            run(verbs, output, unsafe { lent.input.as_ref() })
        })?;
        Ok(ScopedWork { work, output: PhantomData })
    }
}

/// Waits for a group's operations when it is dropped.
struct Drain<'a>(&'a ProcessGroup);

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        // In a fork, the thread that would do the operations does not exist, and cannot touch memory.
        if !self.0.backend.forked() {
            self.0.queue.drain();
        }
    }
}

impl ProcessGroup {
    /// Calls `f` with a [`Scope`], whose verbs start asynchronous operations on borrowed slices, and
    /// returns when `f` has returned, or panicked, and all operations are over.
    ///
    /// The verbs are those on buffers, with the arguments of the blocking forms and the order of the
    /// asynchronous ones. At the end it waits for everything in this group's queue, each operation for
    /// at most the timeout for each of its steps.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::time::Duration;
    /// use collective::{ProcessGroup, ReduceOp, Result};
    ///
    /// fn step(group: &ProcessGroup) -> Result<()> {
    ///     let (mut weight, mut bias) = ([group.rank() as f32; 1000], [1.0_f32; 10]);
    ///     group.scope(|scope| {
    ///         let weight = scope.all_reduce(&mut weight, ReduceOp::Avg)?;
    ///         let bias = scope.all_reduce(&mut bias, ReduceOp::Sum)?;
    ///         // Compute the next gradients here.
    ///         weight.wait()?[0] += 1.0;
    ///         bias.wait().map(drop)
    ///     })?;
    ///     assert_eq!((weight[0], bias[0]), (1.5, 2.0));
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
    ///
    /// What is in flight cannot be touched:
    ///
    /// ```compile_fail,E0506
    /// # use collective::{ProcessGroup, ReduceOp};
    /// # fn step(group: &ProcessGroup) {
    /// let mut x = [1.0_f32; 10];
    /// group.scope(|scope| {
    ///     let work = scope.all_reduce(&mut x, ReduceOp::Sum);
    ///     x[0] = 2.0;
    /// });
    /// # }
    /// ```
    pub fn scope<'env, R>(
        &'env self,
        f: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R,
    ) -> R {
        // Dropped last, also when `f` panics.
        let _drain = Drain(self);
        let scope = Scope { group: self, scope: PhantomData, env: PhantomData };
        f(&scope)
    }
}
