//! Memory for state: one mapping, in huge pages, for all tensors whose state a step creates.
//!
//! A sweep reads four streams or more. In pages of 4 KiB each stream needs a new TLB entry every
//! thousand values, and the cache sets of a page are random. Weights and gradients are the caller's
//! memory; state is ours, and is in huge pages of 2 MiB where the kernel supports them
//! (`transparent_hugepage/enabled` is `madvise` or `always`). Most tensors are smaller than such a
//! page, so they share a mapping ([`Pages`]) of which each has parts ([`Buffer`]).
//!
//! For less than a huge page, or if mapping fails, memory is an ordinary `Vec`.
//!
//! Invariant: a part is inside its mapping, overlaps no other part, and keeps the mapping alive.
//! Hence the owner of a part may read and write it as if it were a `Box<[f32]>`.

#![expect(unsafe_code, reason = "references to parts of a mapping")]

use std::ops::{Deref, DerefMut};
use std::slice;
use std::sync::Arc;

use memmap2::MmapRaw;
#[cfg(all(target_os = "linux", not(miri)))]
use memmap2::{Advice, MmapMut};

/// Allocates parts of a mapping.
#[derive(Debug)]
pub(crate) struct Pages {
    mapping: Option<Arc<Mapping>>,
    /// Values allocated so far.
    used: usize,
}

impl Pages {
    /// Maps memory for `count` values; no mapping if they do not fill a huge page, or if mapping
    /// fails.
    pub(crate) fn new(count: usize) -> Self {
        let mapping = if count < LARGE { None } else { Mapping::new(count) };
        Self { mapping: mapping.map(Arc::new), used: 0 }
    }

    /// Allocates `count` zeros: a part of the mapping, aligned to a cache line, or a `Vec` if it
    /// does not fit.
    pub(crate) fn alloc(&mut self, count: usize) -> Buffer {
        let Some(mapping) = &self.mapping else { return Buffer::Own(vec![0.0; count]) };
        let end = self.used.checked_add(count).filter(|end| *end <= mapping.count);
        let Some(end) = end else { return Buffer::Own(vec![0.0; count]) };
        let part = Part { mapping: Arc::clone(mapping), first: self.used, count };
        // May be beyond the end; then later allocations do not fit.
        self.used = end.saturating_add(LINE - 1) / LINE * LINE;
        Buffer::Part(part)
    }
}

/// An owned vector of values.
#[derive(Debug)]
pub(crate) enum Buffer {
    Own(Vec<f32>),
    Part(Part),
}

impl Default for Buffer {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl From<Vec<f32>> for Buffer {
    fn from(values: Vec<f32>) -> Self {
        Self::Own(values)
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut copy = Pages::new(self.len()).alloc(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

impl Deref for Buffer {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        match self {
            Self::Own(values) => values,
            // SAFETY: a part is mapped, initialised and aligned, and by the invariant only its
            // owner, which is borrowed here, accesses it.
            Self::Part(part) => unsafe { slice::from_raw_parts(part.start(), part.count) },
        }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Own(values) => values,
            // SAFETY: as above, and the owner is borrowed for this alone.
            Self::Part(part) => unsafe { slice::from_raw_parts_mut(part.start(), part.count) },
        }
    }
}

/// A range of a mapping.
#[derive(Debug)]
pub(crate) struct Part {
    mapping: Arc<Mapping>,
    /// Its first value in the mapping.
    first: usize,
    count: usize,
}

impl Part {
    #[inline]
    fn start(&self) -> *mut f32 {
        let bytes = self.mapping.before + self.first * size_of::<f32>();
        self.mapping.map.as_mut_ptr().wrapping_add(bytes).cast()
    }
}

/// An anonymous memory mapping, zeroed by the kernel.
#[derive(Debug)]
struct Mapping {
    map: MmapRaw,
    /// Bytes before the first huge page.
    before: usize,
    /// Values from there on.
    count: usize,
}

impl Mapping {
    #[cfg(all(target_os = "linux", not(miri)))]
    fn new(count: usize) -> Option<Self> {
        let wanted = count.checked_mul(size_of::<f32>())?.checked_next_multiple_of(LARGE_BYTES)?;
        // One huge page more, for alignment; untouched memory costs nothing.
        let map = MmapRaw::from(MmapMut::map_anon(wanted.checked_add(LARGE_BYTES)?).ok()?);
        let start = map.as_ptr().addr();
        let before = start.next_multiple_of(LARGE_BYTES) - start;
        // A failure changes nothing.
        drop(map.advise_range(Advice::HugePage, before, wanted));
        Some(Self { map, before, count })
    }

    #[cfg(not(all(target_os = "linux", not(miri))))]
    fn new(_: usize) -> Option<Self> {
        None
    }
}

const LARGE_BYTES: usize = 2 << 20;
/// Values per huge page.
const LARGE: usize = LARGE_BYTES / size_of::<f32>();
/// Values per cache line.
pub(crate) const LINE: usize = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn allocations_are_zeroed_and_disjoint(counts in prop::collection::vec(0..LARGE, 0..12), room in 0..4 * LARGE) {
            let mut pages = Pages::new(room);
            let mut all: Vec<Buffer> = counts.iter().map(|count| pages.alloc(*count)).collect();
            drop(pages);
            for (at, buffer) in all.iter_mut().enumerate() {
                prop_assert_eq!(buffer.len(), counts[at]);
                prop_assert!(buffer.iter().all(|x| *x == 0.0));
                buffer.fill(at as f32 + 1.0);
            }
            let copies = all.clone();
            all.iter_mut().for_each(|buffer| buffer.fill(-1.0));
            for (at, copy) in copies.iter().enumerate() {
                prop_assert!(copy.iter().all(|x| *x == at as f32 + 1.0));
            }
        }
    }

    #[test]
    fn allocations_that_do_not_fit_are_vecs() {
        let mut pages = Pages::new(LARGE);
        let buffers = [LARGE - 1, 1, 0, 100].map(|count| pages.alloc(count));
        let own = buffers.each_ref().map(|buffer| matches!(buffer, Buffer::Own(_)));
        let mapped = cfg!(all(target_os = "linux", not(miri)));
        assert_eq!(own, [!mapped, true, !mapped, true]);
        assert!(matches!(Pages::new(LARGE - 1).alloc(1), Buffer::Own(_)));
        assert!(matches!(Pages::new(0).alloc(1), Buffer::Own(_)));
    }

    /// Leaked mappings would exhaust the address space. (An emulator would take minutes.)
    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
    fn mappings_are_unmapped_on_drop() {
        for _ in 0..40_000 {
            let mut pages = Pages::new(1 << 30);
            assert!(matches!(pages.alloc(1), Buffer::Part(_)));
        }
    }

    /// (An emulator has its own `smaps`.)
    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
    #[ignore = "needs a kernel with transparent huge pages"]
    fn mappings_are_advised_to_use_huge_pages() {
        let buffer = Pages::new(LARGE).alloc(LARGE);
        let address = buffer.as_ptr().addr();
        assert_eq!(address % LARGE_BYTES, 0);
        // The lines of each mapping start with its addresses and end with its flags.
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        let flags = maps.lines().find_map(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((from, to)) = range {
                let [from, to] = [from, to].map(|x| usize::from_str_radix(x, 16));
                if let (Ok(from), Ok(to)) = (from, to) {
                    inside = (from..to).contains(&address);
                }
            }
            line.strip_prefix("VmFlags:").filter(|_| inside)
        });
        assert!(flags.unwrap().contains(" hg"), "{flags:?}");
    }
}
