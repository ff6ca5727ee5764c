//! Memory that a step gives back is kept for the next step.
//!
//! A training step allocates its activations and gradients and frees them all. The C library gives large
//! blocks back to the system, which hands them out again as zeroed pages, one fault for each 4 KiB: for
//! small models that is a third of a step.

#![expect(unsafe_code, reason = "the C library's allocator is told so by a function of its own")]

/// Has glibc's allocator keep what is freed, up to 1 GiB, for the rest of the process. Other allocators
/// are left alone.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
                // SAFETY: mallopt (malloc.h) takes any two integers, refuses what it does not know, and
                // takes the allocator's own lock.
                unsafe { libc::mallopt(parameter, KEPT) };
            }
        });
    }
}

/// Bytes: blocks up to this size come from the heap, which shrinks when so many are free at its end.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: libc::c_int = 1 << 30;
