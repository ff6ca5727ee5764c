//! AscendCL: memory and what fills it.

use std::ffi::c_void;
use std::ptr;

use npu_sys::sys::*;

use super::{NOT_SUPPORTED, Outcome, put};
use crate::memory::{is_of_device, pointer};
use crate::raw;
use crate::stream::{INVALID, Job, wait};
use crate::world::{World, world};

const OUT_OF_MEMORY: i32 = 207_001;
/// Status of a copy that accesses an invalid address.
const DEVICE_FAULT: i32 = 507_015;

pub(crate) fn aclrtMalloc(
    address: *mut *mut c_void,
    bytes: usize,
    _policy: AclrtMemMallocPolicy,
) -> Outcome {
    let mut world = world();
    let (_, device) = world.current()?;
    if bytes == 0 {
        return Err(INVALID);
    }
    if world.memory.used(device).saturating_add(bytes) > world.config.memory {
        return Err(OUT_OF_MEMORY);
    }
    let made = world.memory.allocate(bytes, device).ok_or(OUT_OF_MEMORY)?;
    put(address, pointer(made))
}

pub(crate) fn aclrtMallocAlign32(
    address: *mut *mut c_void,
    bytes: usize,
    policy: AclrtMemMallocPolicy,
) -> Outcome {
    aclrtMalloc(address, bytes, policy)
}

pub(crate) fn aclrtFree(address: *mut c_void) -> Outcome {
    let mut world = world();
    let (_, device) = world.current()?;
    let freed = world.memory.free(address.addr(), device);
    freed.map_err(|what| {
        world.violation(format!("aclrtFree: {what}"));
        INVALID
    })
}

pub(crate) fn aclrtMallocHost(address: *mut *mut c_void, bytes: usize) -> Outcome {
    let mut world = world();
    world.current()?;
    if bytes == 0 {
        return Err(INVALID);
    }
    let made = world.memory.allocate_pinned(bytes).ok_or(OUT_OF_MEMORY)?;
    put(address, made.cast())
}

pub(crate) fn aclrtFreeHost(address: *mut c_void) -> Outcome {
    let mut world = world();
    world.current()?;
    let freed = world.memory.free_pinned(address.addr());
    freed.map_err(|what| {
        world.violation(format!("aclrtFreeHost: {what}"));
        INVALID
    })
}

/// A place that a copy reads or writes.
#[derive(Clone, Copy)]
enum Place {
    /// Of the host, pinned or not, by its exposed address.
    Host(usize, bool),
    Device(usize),
}

// Addresses are resolved when the copy runs, on the thread that runs it.
impl Place {
    fn find(self, world: &mut World, bytes: usize, device: usize) -> Result<*mut u8, i32> {
        match self {
            Self::Host(address, true) if !world.memory.is_pinned(address) => {
                world.violation("a copy: pinned memory was freed before it was done");
                Err(DEVICE_FAULT)
            }
            Self::Host(address, _) => Ok(ptr::with_exposed_provenance_mut(address)),
            Self::Device(address) => {
                let found = world.memory.on_device(address, bytes, device);
                found.map_err(|what| {
                    world.violation(format!("a copy: {what}"));
                    DEVICE_FAULT
                })
            }
        }
    }
}

/// A copy's two places, by its kind; an address of the wrong sort is a breach.
fn places(
    world: &mut World,
    to: *mut c_void,
    from: *const c_void,
    kind: AclrtMemcpyKind,
) -> Result<(Place, Place), i32> {
    let (to_device, from_device) = match kind {
        AclrtMemcpyKind::HOST_TO_HOST => (false, false),
        AclrtMemcpyKind::HOST_TO_DEVICE => (true, false),
        AclrtMemcpyKind::DEVICE_TO_HOST => (false, true),
        AclrtMemcpyKind::DEVICE_TO_DEVICE => (true, true),
        _ => return Err(INVALID),
    };
    if to.is_null() || from.is_null() {
        return Err(INVALID);
    }
    let mut place = |address: usize, exposed: usize, device: bool| {
        if is_of_device(address) != device {
            world.violation("a copy's address is not of the kind that the copy says");
            return Err(INVALID);
        }
        Ok(if device {
            Place::Device(address)
        } else {
            Place::Host(exposed, world.memory.is_pinned(address))
        })
    };
    let to = place(to.addr(), to.expose_provenance(), to_device)?;
    Ok((to, place(from.addr(), from.expose_provenance(), from_device)?))
}

fn copy(to: Place, from: Place, bytes: usize, device: usize) -> Outcome {
    let mut world = world();
    let from = from.find(&mut world, bytes, device)?;
    let to = to.find(&mut world, bytes, device)?;
    raw::write(to, &raw::read(from, bytes));
    Ok(())
}

pub(crate) fn aclrtMemcpy(
    to: *mut c_void,
    room: usize,
    from: *const c_void,
    bytes: usize,
    kind: AclrtMemcpyKind,
) -> Outcome {
    let ((to, from), device) = {
        let mut world = world();
        let (_, device) = world.current()?;
        if bytes == 0 || room < bytes {
            return Err(INVALID);
        }
        (places(&mut world, to, from, kind)?, device)
    };
    copy(to, from, bytes, device)
}

pub(crate) fn aclrtMemcpyAsync(
    to: *mut c_void,
    room: usize,
    from: *const c_void,
    bytes: usize,
    kind: AclrtMemcpyKind,
    stream: AclrtStream,
) -> Outcome {
    let (stream, number, pageable) = {
        let mut world = world();
        let stream = world.stream_of(stream.0.addr())?;
        let (_, device) = world.current()?;
        if kind == AclrtMemcpyKind::HOST_TO_HOST {
            return Err(NOT_SUPPORTED);
        }
        if bytes == 0 || room < bytes {
            return Err(INVALID);
        }
        let (to, from) = places(&mut world, to, from, kind)?;
        let pageable = [to, from].into_iter().any(|place| matches!(place, Place::Host(_, false)));
        let number = world.submit(stream, Box::new(move || copy(to, from, bytes, device)))?;
        (stream, number, pageable)
    };
    // Memory that the system may move is copied before the call returns.
    if pageable { wait(stream, number, None) } else { Ok(()) }
}

fn set(address: usize, value: i32, bytes: usize, device: usize) -> Outcome {
    let mut world = world();
    let at = Place::Device(address).find(&mut world, bytes, device)?;
    raw::write(at, &vec![value as u8; bytes]);
    Ok(())
}

pub(crate) fn aclrtMemset(address: *mut c_void, room: usize, value: i32, bytes: usize) -> Outcome {
    let (_, device) = world().current()?;
    if bytes == 0 || room < bytes {
        return Err(INVALID);
    }
    set(address.addr(), value, bytes, device)
}

pub(crate) fn aclrtMemsetAsync(
    address: *mut c_void,
    room: usize,
    value: i32,
    bytes: usize,
    stream: AclrtStream,
) -> Outcome {
    let mut world = world();
    let stream = world.stream_of(stream.0.addr())?;
    let (_, device) = world.current()?;
    if bytes == 0 || room < bytes {
        return Err(INVALID);
    }
    let address = address.addr();
    world.submit(stream, Box::new(move || set(address, value, bytes, device))).map(drop)
}

pub(crate) fn aclrtGetMemInfo(
    _which: AclrtMemAttr,
    free: *mut usize,
    total: *mut usize,
) -> Outcome {
    let world = world();
    let (_, device) = world.current()?;
    put(free, world.config.memory.saturating_sub(world.memory.used(device)))?;
    put(total, world.config.memory)
}

/// Bytes of the status that `aclrtGetOverflowStatus` writes.
const OVERFLOW_STATUS: usize = 64;

pub(crate) fn aclrtGetOverflowStatus(
    status: *mut c_void,
    bytes: usize,
    stream: AclrtStream,
) -> Outcome {
    let mut world = world();
    let stream = world.stream_of(stream.0.addr())?;
    let (_, device) = world.current()?;
    if !world.config.soc.saturates() {
        return Err(NOT_SUPPORTED);
    }
    if bytes != OVERFLOW_STATUS {
        return Err(INVALID);
    }
    let address = status.addr();
    let job: Job = Box::new(move || {
        let mut world = crate::world::world();
        let at = Place::Device(address).find(&mut world, OVERFLOW_STATUS, device)?;
        let mut status = [0; OVERFLOW_STATUS];
        status[0] = u8::from(world.overflow);
        raw::write(at, &status);
        Ok(())
    });
    world.submit(stream, job).map(drop)
}

pub(crate) fn aclrtResetOverflowStatus(stream: AclrtStream) -> Outcome {
    let mut world = world();
    let stream = world.stream_of(stream.0.addr())?;
    if !world.config.soc.saturates() {
        return Err(NOT_SUPPORTED);
    }
    let job: Job = Box::new(|| {
        crate::world::world().overflow = false;
        Ok(())
    });
    world.submit(stream, job).map(drop)
}
