//! Keeps memory freed by a step for the next step.
//!
//! A training step allocates its activations and gradients and frees them all. The C library
//! returns large blocks to the system, which later provides them again as zeroed pages, one page
//! fault for each 4 KiB: for small models that is a third of a step.

#![expect(unsafe_code, reason = "the C library's allocator is told so by a function of its own")]

/// Makes glibc's allocator keep memory that the main thread frees, up to 1 GiB, instead of
/// returning it to the system. It counts as the process' memory until the process ends. Other
/// allocators are not changed.
///
/// Other threads allocate from heaps of 64 MiB each. Smaller blocks are kept there, too; a larger
/// one is requested from the system each time and returned when it is freed. So train on the main
/// thread if tensors are larger than that.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
                // SAFETY: mallopt (malloc.h) takes any two integers, ignores unknown parameters,
                // and takes the allocator's own lock.
                unsafe { libc::mallopt(parameter, KEPT) };
            }
        });
    }
}

/// In bytes. Blocks up to this size are allocated on the heap of the main thread, which shrinks
/// when this much memory is free at its end.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT: libc::c_int = 1 << 30;
