//! Integration tests of `npu-sys`, one module for each subject.

#![expect(clippy::unwrap_used, reason = "a test")]

mod loader;
