//! Asynchronous operations on borrowed memory, which cannot outlive a scope.
//!
//! [`ProcessGroup::scope`] works as [`std::thread::scope`]: it returns once every operation started
//! in it is complete, however the closure ends and even if [`ScopedWork`]s are dropped or
//! forgotten. Invariant: an operation uses memory borrowed for `'scope` only before the scope ends.

#![expect(unsafe_code, reason = "lends borrowed slices to the communication thread")]

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::verbs::Verbs;
use crate::work::Work;
use crate::{Element, ProcessGroup, Result};

/// Starts operations on memory that outlives the [scope](ProcessGroup::scope).
#[derive(Debug)]
pub struct Scope<'scope, 'env: 'scope> {
    group: &'env ProcessGroup,
    // Both lifetimes are invariant, as in `std::thread::Scope`.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

/// An operation in flight on borrowed memory. Dropping or forgetting it loses its error; the scope
/// still waits for the operation.
#[derive(Debug)]
#[must_use = "dropping a `ScopedWork` loses the error"]
pub struct ScopedWork<'scope, T> {
    work: Work<BorrowedSlices<T>>,
    output: PhantomData<&'scope mut [T]>,
}

impl<'scope, T: Element> ScopedWork<'scope, T> {
    /// Waits for the operation and returns the output, before the scope ends.
    ///
    /// # Errors
    ///
    /// The operation's error; the contents of the output are unspecified then.
    pub fn wait(self) -> Result<&'scope mut [T]> {
        let BorrowedSlices { mut output, .. } = self.work.wait()?;
        // SAFETY: borrowed exclusively for `'scope` by the call that started the operation, which
        // was the only user and is complete.
        Ok(unsafe { output.as_mut() })
    }

    /// Returns whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.work.is_done()
    }
}

/// The slices that an operation borrows. They are pointers because the communication thread may
/// drop them after the borrow has ended.
#[derive(Debug)]
struct BorrowedSlices<T> {
    output: NonNull<[T]>,
    input: NonNull<[T]>,
}

// SAFETY: represents a `&mut [T]` and a `&[T]`, and an `Element` is `Send` and `Sync`.
unsafe impl<T: Element> Send for BorrowedSlices<T> {}

impl<'scope> Scope<'scope, '_> {
    /// Queues `run` on the slices.
    pub(crate) fn submit<T: Element>(
        &'scope self,
        output: &'scope mut [T],
        input: &'scope [T],
        run: impl Fn(Verbs<'_>, &mut [T], &[T]) -> Result<()> + Send + 'static,
    ) -> Result<ScopedWork<'scope, T>> {
        let slices = BorrowedSlices { output: NonNull::from(output), input: NonNull::from(input) };
        let work = self.group.submit(slices, move |verbs, slices| {
            // SAFETY: borrowed exclusively for `'scope`, which `ProcessGroup::scope` ends after
            // this operation; nothing else accesses it until the operation is complete.
            let output = unsafe { slices.output.as_mut() };
            // SAFETY: likewise, but shared.
            run(verbs, output, unsafe { slices.input.as_ref() })
        })?;
        Ok(ScopedWork { work, output: PhantomData })
    }
}

/// Waits for a group's operations when it is dropped.
struct Drain<'a>(&'a ProcessGroup);

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        // A fork has no communication thread, so no operation can touch the memory there.
        if !self.0.backend.forked() {
            self.0.queue.drain();
        }
    }
}

impl ProcessGroup {
    /// Calls `f` with a [`Scope`], whose verbs start asynchronous operations on borrowed slices.
    /// Returns when `f` has returned or panicked and all operations are complete.
    ///
    /// The verbs on buffers take the arguments of the blocking forms and run in order with the
    /// asynchronous ones. At the end it waits for everything in this group's queue, each operation
    /// for at most the timeout for each of its steps.
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
    /// A buffer in flight cannot be accessed:
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
