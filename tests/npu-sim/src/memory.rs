//! Memory of devices, and pinned memory of the host.
//!
//! A device's memory is memory of the host under another address: one bit that no real address has
//! is set, so that following it crashes. Before and after every allocation lies a margin, and what
//! is in it at first is NaN in every floating type.

#![expect(unsafe_code, reason = "allocates by hand, to know alignment and margins")]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ptr;

use crate::raw;

/// Set in every address of a device.
const OF_DEVICE: usize = 1 << 60;
const ALIGN: usize = 64;
const MARGIN: usize = 64;
const MARGIN_BYTE: u8 = 0xa5;
/// NaN as f16, bf16, f32 and f64, and -1 as an integer.
const FRESH: u8 = 0xff;

pub(crate) const fn is_of_device(address: usize) -> bool {
    address & OF_DEVICE != 0
}

#[derive(Debug)]
struct Block {
    base: *mut u8,
    layout: Layout,
    bytes: usize,
    device: usize,
}

// SAFETY: memory of its own, reached under the world's lock only.
unsafe impl Send for Block {}

impl Block {
    fn new(bytes: usize, device: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.checked_add(2 * MARGIN)?, ALIGN).ok()?;
        // SAFETY: the margins make it larger than nothing.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            return None;
        }
        let block = Self { base, layout, bytes, device };
        raw::write(base, &[MARGIN_BYTE; MARGIN]);
        raw::write(block.start(), &vec![FRESH; bytes]);
        raw::write(block.start().wrapping_add(bytes), &[MARGIN_BYTE; MARGIN]);
        Some(block)
    }

    fn start(&self) -> *mut u8 {
        self.base.wrapping_add(MARGIN)
    }

    fn is_whole(&self) -> bool {
        let after = self.start().wrapping_add(self.bytes);
        [self.base, after].iter().all(|at| raw::read(*at, MARGIN) == [MARGIN_BYTE; MARGIN])
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout, and freed once.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// All memory there is.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// By the start's address, without the device's bit.
    device: BTreeMap<usize, Block>,
    pinned: BTreeMap<usize, Block>,
}

impl Memory {
    /// The address of fresh memory.
    pub(crate) fn allocate(&mut self, bytes: usize, device: usize) -> Option<usize> {
        let block = Block::new(bytes, device)?;
        let start = block.start().addr();
        self.device.insert(start, block);
        Some(start | OF_DEVICE)
    }

    /// Frees it; says what was wrong with that.
    pub(crate) fn free(&mut self, address: usize, device: usize) -> Result<(), String> {
        let block = is_of_device(address).then(|| self.device.remove(&(address & !OF_DEVICE)));
        let Some(block) = block.flatten() else {
            return Err(format!("{address:#x} is freed, but not the start of device memory"));
        };
        if block.device != device {
            return Err(format!("memory of device {} is freed on {device}", block.device));
        }
        if block.is_whole() {
            Ok(())
        } else {
            Err("the margin of an allocation was written".into())
        }
    }

    pub(crate) fn allocate_pinned(&mut self, bytes: usize) -> Option<*mut u8> {
        let block = Block::new(bytes, 0)?;
        let start = block.start();
        self.pinned.insert(start.addr(), block);
        Some(start)
    }

    pub(crate) fn free_pinned(&mut self, address: usize) -> Result<(), String> {
        match self.pinned.remove(&address) {
            Some(block) if block.is_whole() => Ok(()),
            Some(_) => Err("the margin of pinned memory was written".into()),
            None => Err(format!("{address:#x} is freed, but not the start of pinned memory")),
        }
    }

    pub(crate) fn is_pinned(&self, address: usize) -> bool {
        let before = self.pinned.range(..=address).next_back();
        before.is_some_and(|(start, block)| address < start + block.bytes)
    }

    /// The host address of a device's range.
    pub(crate) fn on_device(
        &self,
        address: usize,
        bytes: usize,
        device: usize,
    ) -> Result<*mut u8, String> {
        if !is_of_device(address) {
            return Err(format!("{address:#x} is not an address of a device"));
        }
        let at = address & !OF_DEVICE;
        let Some((start, block)) = self.device.range(..=at).next_back() else {
            return Err("device memory is used that is not allocated".into());
        };
        let offset = at - start;
        if offset.checked_add(bytes).is_none_or(|end| end > block.bytes) {
            return Err(if offset >= block.bytes {
                "device memory is used that is not allocated".into()
            } else {
                format!("{bytes} bytes at {offset} of an allocation of {}", block.bytes)
            });
        }
        if block.device != device {
            return Err(format!("memory of device {} is used on {device}", block.device));
        }
        Ok(block.start().wrapping_add(offset))
    }

    /// How many allocations there are on devices, and pinned.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.device.len(), self.pinned.len())
    }

    /// Bytes allocated on a device.
    pub(crate) fn used(&self, device: usize) -> usize {
        self.device.values().filter(|b| b.device == device).map(|b| b.bytes).sum()
    }
}

/// An address as C has it.
pub(crate) const fn pointer<T>(address: usize) -> *mut T {
    ptr::without_provenance_mut(address)
}
