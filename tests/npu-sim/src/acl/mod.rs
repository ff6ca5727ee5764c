//! AscendCL: devices, contexts, streams, events.

#![expect(non_snake_case, reason = "the names are C's")]

mod copies;

use std::ffi::c_char;
use std::ptr;
use std::time::{Duration, Instant};

use npu_sys::sys::*;

use crate::memory::pointer;
use crate::raw;
use crate::stream::{INVALID, INVALID_HANDLE, Job, WRONG_CONTEXT, wait};
use crate::world::{Context, Event, NO_CONTEXT, World, set_current_context, world};

pub(crate) use copies::*;

type Outcome = Result<(), i32>;

const UNINITIALISED: i32 = 100_001;
const REPEATED: i32 = 100_002;
const INVALID_DEVICE: i32 = 107_001;
const NOT_SUPPORTED: i32 = 207_000;
const NOT_COMPLETE: i32 = 507_006;

fn put<T>(to: *mut T, value: T) -> Outcome {
    raw::put(to, value).ok_or(INVALID)
}

pub(crate) fn aclInit(_config: *const c_char) -> Outcome {
    let mut world = world();
    if world.initialised {
        return Err(REPEATED);
    }
    world.initialised = true;
    Ok(())
}

pub(crate) fn aclFinalize() -> Outcome {
    let mut world = world();
    if !world.initialised {
        return Err(100_037);
    }
    if !world.streams.is_empty() {
        world.violation("aclFinalize while there are streams");
    }
    world.initialised = false;
    Ok(())
}

/// The device with this index, if AscendCL was initialised.
fn device(world: &World, index: i32) -> Result<usize, i32> {
    if !world.initialised {
        return Err(UNINITIALISED);
    }
    let index = usize::try_from(index).map_err(|_| INVALID_DEVICE)?;
    if index < world.visible.len() { Ok(index) } else { Err(INVALID_DEVICE) }
}

pub(crate) fn aclrtSetDevice(index: i32) -> Outcome {
    let mut world = world();
    let device = device(&world, index)?;
    let found = world.contexts.iter().find(|(_, c)| c.is_default && c.device == device);
    let id = match found.map(|(id, _)| *id) {
        Some(id) => id,
        None => {
            let id = world.handle();
            world.contexts.insert(id, Context { device, is_default: true });
            id
        }
    };
    set_current_context(id);
    Ok(())
}

pub(crate) fn aclrtResetDevice(index: i32) -> Outcome {
    let mut world = world();
    let device = device(&world, index)?;
    let found = world.contexts.iter().find(|(_, c)| c.is_default && c.device == device);
    let Some(id) = found.map(|(id, _)| *id) else { return Err(INVALID_DEVICE) };
    end_context(&mut world, id);
    Ok(())
}

pub(crate) fn aclrtGetDevice(index: *mut i32) -> Outcome {
    let (_, device) = world().current()?;
    put(index, device as i32)
}

pub(crate) fn aclrtGetDeviceCount(count: *mut u32) -> Outcome {
    put(count, world().visible.len() as u32)
}

pub(crate) fn aclrtGetSocName() -> Result<*const c_char, i32> {
    Ok(world().config.soc.name().as_ptr())
}

pub(crate) fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) -> Outcome {
    put(major, 1)?;
    put(minor, 14)?;
    put(patch, 0)
}

pub(crate) fn aclrtCreateContext(context: *mut AclrtContext, index: i32) -> Outcome {
    let mut world = world();
    let device = device(&world, index)?;
    let id = world.handle();
    put(context, AclrtContext(pointer(id)))?;
    world.contexts.insert(id, Context { device, is_default: false });
    set_current_context(id);
    Ok(())
}

/// A context ends, and its own stream with it; other things left in it are breaches.
fn end_context(world: &mut World, id: usize) {
    if let Some(stream) = world.default_streams.remove(&id) {
        world.streams.remove(&stream);
    }
    let streams = world.streams.values().filter(|stream| stream.context == id).count();
    let events = world.events.values().filter(|event| event.context == id).count();
    if streams + events > 0 {
        world.violation(format!("a context ends with {streams} streams and {events} events in it"));
    }
    world.contexts.remove(&id);
    crate::world::CHANGED.notify_all();
}

pub(crate) fn aclrtDestroyContext(context: AclrtContext) -> Outcome {
    let (mut world, id) = (world(), context.0.addr());
    match world.contexts.get(&id) {
        Some(found) if !found.is_default => {
            end_context(&mut world, id);
            Ok(())
        }
        Some(_) => {
            world.violation("aclrtDestroyContext of a context of aclrtSetDevice");
            Err(INVALID)
        }
        None => Err(NO_CONTEXT),
    }
}

pub(crate) fn aclrtSetCurrentContext(context: AclrtContext) -> Outcome {
    let id = context.0.addr();
    if !world().contexts.contains_key(&id) {
        return Err(NO_CONTEXT);
    }
    set_current_context(id);
    Ok(())
}

pub(crate) fn aclrtGetCurrentContext(context: *mut AclrtContext) -> Outcome {
    let (id, _) = world().current()?;
    put(context, AclrtContext(pointer(id)))
}

pub(crate) fn aclrtCreateStream(stream: *mut AclrtStream) -> Outcome {
    let mut world = world();
    let (context, device) = world.current()?;
    let id = world.new_stream(context, device)?;
    put(stream, AclrtStream(pointer(id)))
}

pub(crate) fn aclrtCreateStreamWithConfig(
    stream: *mut AclrtStream,
    _priority: u32,
    _flags: u32,
) -> Outcome {
    aclrtCreateStream(stream)
}

pub(crate) fn aclrtDestroyStream(stream: AclrtStream) -> Outcome {
    let (id, until) = {
        let mut world = world();
        let id = world.stream_of(stream.0.addr())?;
        (id, world.streams.get(&id).map_or(0, |stream| stream.submitted))
    };
    let waited = wait(id, until, None);
    let mut world = world();
    world.streams.remove(&id);
    crate::world::CHANGED.notify_all();
    waited
}

pub(crate) fn aclrtDestroyStreamForce(stream: AclrtStream) -> Outcome {
    let mut world = world();
    let id = world.stream_of(stream.0.addr())?;
    world.abort(id);
    world.streams.remove(&id);
    Ok(())
}

fn synchronize(stream: AclrtStream, timeout: Option<Duration>) -> Outcome {
    let (id, until) = {
        let mut world = world();
        let id = world.stream_of(stream.0.addr())?;
        (id, world.streams.get(&id).map_or(0, |stream| stream.submitted))
    };
    wait(id, until, timeout)
}

pub(crate) fn aclrtSynchronizeStream(stream: AclrtStream) -> Outcome {
    synchronize(stream, None)
}

pub(crate) fn aclrtSynchronizeStreamWithTimeout(stream: AclrtStream, timeout_ms: i32) -> Outcome {
    match timeout_ms {
        -1 => synchronize(stream, None),
        ms if ms > 0 => synchronize(stream, Some(Duration::from_millis(ms as u64))),
        _ => Err(INVALID),
    }
}

pub(crate) fn aclrtSynchronizeDevice() -> Outcome {
    let streams: Vec<_> = {
        let world = world();
        let (_, device) = world.current()?;
        let here = world.streams.iter().filter(|(_, stream)| stream.device == device);
        here.map(|(id, stream)| (*id, stream.submitted)).collect()
    };
    streams.into_iter().try_for_each(|(id, until)| wait(id, until, None))
}

pub(crate) fn aclrtStreamWaitEvent(stream: AclrtStream, event: AclrtEvent) -> Outcome {
    let mut world = world();
    let id = world.stream_of(stream.0.addr())?;
    let found = world.events.get(&event.0.addr()).ok_or(INVALID_HANDLE)?;
    if !found.waitable {
        return Err(INVALID);
    }
    // An event that was never recorded holds nobody back.
    let Some((recorder, until)) = found.recorded else { return Ok(()) };
    if recorder == id {
        return Ok(());
    }
    // The work that was waited for has its own stream to fail in.
    let job: Job = Box::new(move || {
        wait_only(recorder, until);
        Ok(())
    });
    world.submit(id, job).map(drop)
}

/// Waits without taking note of failures.
fn wait_only(id: usize, until: u64) {
    let mut world = world();
    world.demand(id, until);
    while !world.is_done(id, until) {
        world = crate::world::CHANGED.wait(world).unwrap_or_else(|broken| broken.into_inner());
    }
}

pub(crate) fn aclrtSetStreamFailureMode(stream: AclrtStream, mode: u64) -> Outcome {
    let mut world = world();
    let id = world.stream_of(stream.0.addr())?;
    let stream = world.streams.get_mut(&id).ok_or(INVALID_HANDLE)?;
    stream.stops_on_failure = mode == ACL_STOP_ON_FAILURE;
    Ok(())
}

fn create_event(event: *mut AclrtEvent, flags: u32) -> Outcome {
    let mut world = world();
    let (context, _) = world.current()?;
    let id = world.handle();
    put(event, AclrtEvent(pointer(id)))?;
    let (waitable, timed) = (flags & ACL_EVENT_SYNC != 0, flags & ACL_EVENT_TIME_LINE != 0);
    let event = Event { context, waitable, timed, recorded: None, reached_at: None };
    world.events.insert(id, event);
    Ok(())
}

pub(crate) fn aclrtCreateEvent(event: *mut AclrtEvent) -> Outcome {
    create_event(event, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE)
}

pub(crate) fn aclrtCreateEventExWithFlag(event: *mut AclrtEvent, flags: u32) -> Outcome {
    create_event(event, flags)
}

pub(crate) fn aclrtDestroyEvent(event: AclrtEvent) -> Outcome {
    let mut world = world();
    world.current()?;
    world.events.remove(&event.0.addr()).map(drop).ok_or(INVALID_HANDLE)
}

pub(crate) fn aclrtRecordEvent(event: AclrtEvent, stream: AclrtStream) -> Outcome {
    let mut world = world();
    let (stream, event) = (world.stream_of(stream.0.addr())?, event.0.addr());
    let (context, _) = world.current()?;
    match world.events.get(&event) {
        None => return Err(INVALID_HANDLE),
        Some(found) if found.context != context => return Err(WRONG_CONTEXT),
        Some(_) => {}
    }
    let job: Job = Box::new(move || {
        if let Some(event) = crate::world::world().events.get_mut(&event) {
            event.reached_at = Some(Instant::now());
        }
        Ok(())
    });
    let number = world.submit(stream, job)?;
    if let Some(event) = world.events.get_mut(&event) {
        (event.recorded, event.reached_at) = (Some((stream, number)), None);
    }
    Ok(())
}

pub(crate) fn aclrtQueryEventStatus(
    event: AclrtEvent,
    status: *mut AclrtEventRecordedStatus,
) -> Outcome {
    let mut world = world();
    let found = world.events.get(&event.0.addr()).ok_or(INVALID_HANDLE)?;
    let complete = match found.recorded {
        None => true,
        Some((stream, until)) => {
            world.demand(stream, until);
            world.is_done(stream, until)
        }
    };
    put(
        status,
        if complete {
            AclrtEventRecordedStatus::COMPLETE
        } else {
            AclrtEventRecordedStatus::NOT_READY
        },
    )
}

pub(crate) fn aclrtSynchronizeEvent(event: AclrtEvent) -> Outcome {
    let recorded = world().events.get(&event.0.addr()).ok_or(INVALID_HANDLE)?.recorded;
    recorded.map_or(Ok(()), |(stream, until)| wait(stream, until, None))
}

pub(crate) fn aclrtEventElapsedTime(ms: *mut f32, start: AclrtEvent, end: AclrtEvent) -> Outcome {
    let world = world();
    let at = |event: AclrtEvent| {
        let found = world.events.get(&event.0.addr()).ok_or(INVALID_HANDLE)?;
        if !found.timed {
            return Err(INVALID);
        }
        found.reached_at.ok_or(NOT_COMPLETE)
    };
    put(ms, at(end)?.saturating_duration_since(at(start)?).as_secs_f32() * 1e3)
}

pub(crate) fn aclrtSetDeviceSatMode(mode: AclrtFloatOverflowMode) -> Outcome {
    let mut world = world();
    world.current()?;
    if world.config.soc.saturates() && mode == AclrtFloatOverflowMode::INFNAN {
        return Err(NOT_SUPPORTED);
    }
    world.overflow_mode = mode;
    Ok(())
}

pub(crate) fn aclrtGetDeviceSatMode(mode: *mut AclrtFloatOverflowMode) -> Outcome {
    let world = world();
    world.current()?;
    put(mode, world.overflow_mode)
}

pub(crate) fn aclGetRecentErrMsg() -> Result<*const c_char, i32> {
    Ok(ptr::null())
}

pub(crate) fn aclGetCannAttribute(which: AclCannAttr, value: *mut i32) -> Outcome {
    match which {
        AclCannAttr::INF_NAN => put(value, i32::from(!world().config.soc.saturates())),
        _ => Err(INVALID),
    }
}

/// The first failure of the current device's streams.
fn last_error(forget: bool) -> Outcome {
    let mut world = world();
    let (_, device) = world.current()?;
    let mut here = world.streams.values_mut().filter(|stream| stream.device == device);
    let Some(stream) = here.find(|stream| stream.error.is_some()) else { return Ok(()) };
    let error = stream.error;
    if forget && !stream.stops_on_failure {
        stream.error = None;
    }
    error.map_or(Ok(()), Err)
}

pub(crate) fn aclrtPeekAtLastError(_level: AclrtLastErrLevel) -> Outcome {
    last_error(false)
}

pub(crate) fn aclrtGetLastError(_level: AclrtLastErrLevel) -> Outcome {
    last_error(true)
}

pub(crate) fn aclrtDeviceTaskAbort(index: i32, _timeout: u32) -> Outcome {
    let mut world = world();
    let device = device(&world, index)?;
    let here = world.streams.iter().filter(|(_, stream)| stream.device == device);
    let streams: Vec<_> = here.map(|(id, _)| *id).collect();
    streams.into_iter().for_each(|id| world.abort(id));
    // Running work ends as well: only HCCL operations may block for long, and these end with their
    // connection.
    world.comms.values().filter(|comm| comm.device == device).for_each(|comm| comm.close());
    Ok(())
}

pub(crate) fn aclrtSetOpWaitTimeout(_seconds: u32) -> Outcome {
    world().current().map(drop)
}

pub(crate) fn aclrtSetOpExecuteTimeOut(_seconds: u32) -> Outcome {
    world().current().map(drop)
}
