//! An operator's plan: the result of `aclnn...GetWorkspaceSize`, which its second function
//! executes.

#![expect(unsafe_code, reason = "calls C by function pointer")]

use std::ffi::c_void;

use crate::Result;
use crate::returned::Returned;
use crate::types::{AclOpExecutor, AclrtStream, Run};

/// An operator with its arguments, not yet enqueued. Running it frees it.
#[derive(Debug)]
#[must_use = "a plan that is not run leaks"]
pub struct Plan {
    pub(crate) operator: &'static str,
    pub(crate) workspace_bytes: u64,
    pub(crate) executor: *mut AclOpExecutor,
    pub(crate) run: Run,
}

impl Plan {
    /// Size of the workspace in device memory that the operator needs.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Enqueues the operator on `stream`.
    ///
    /// # Errors
    ///
    /// A status that is not success.
    ///
    /// # Safety
    ///
    /// `workspace` must be at least [`workspace_bytes`](Self::workspace_bytes) of device memory
    /// that nothing else uses; it and the tensors must be valid until the operator has run. The
    /// stream must belong to this thread's context.
    pub unsafe fn run(self, workspace: *mut c_void, stream: AclrtStream) -> Result<()> {
        // SAFETY: the executor belongs to this plan and runs once, since `self` is consumed; the
        // caller guarantees workspace and stream.
        let status = unsafe { (self.run)(workspace, self.workspace_bytes, self.executor, stream) };
        status.checked(self.operator)
    }
}
