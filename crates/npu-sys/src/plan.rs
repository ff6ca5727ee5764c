//! A planned operator: between its first function and its second.

#![expect(unsafe_code, reason = "calls C by function pointer")]

use std::ffi::c_void;

use crate::Result;
use crate::sys::{AclOpExecutor, AclrtStream, Run};
use crate::table::Returned;

/// An operator with its arguments, not yet in a stream. It runs once, which frees it.
#[derive(Debug)]
#[must_use = "a plan that is not run leaks"]
pub struct Plan {
    pub(crate) operator: &'static str,
    pub(crate) workspace_bytes: u64,
    pub(crate) executor: *mut AclOpExecutor,
    pub(crate) run: Run,
}

impl Plan {
    /// How much memory of the device the operator needs beside its tensors.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Puts it into `stream`.
    ///
    /// # Errors
    ///
    /// A status that is not success.
    ///
    /// # Safety
    ///
    /// `workspace` must be at least [`workspace_bytes`](Self::workspace_bytes) of the device, unused by
    /// others, and live, like the tensors' memory, until the stream has done this work; the stream must
    /// belong to this thread's context.
    pub unsafe fn run(self, workspace: *mut c_void, stream: AclrtStream) -> Result<()> {
        // SAFETY: the executor is of this operator's plan and, `self` being consumed, runs once; the
        // caller vouches for workspace and stream.
        let status = unsafe { (self.run)(workspace, self.workspace_bytes, self.executor, stream) };
        status.checked(self.operator)
    }
}
