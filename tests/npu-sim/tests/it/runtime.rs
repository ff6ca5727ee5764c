//! AscendCL's rules, each broken once.

use std::ptr;

use super::*;

const TO_DEVICE: AclrtMemcpyKind = AclrtMemcpyKind::HOST_TO_DEVICE;
const TO_HOST: AclrtMemcpyKind = AclrtMemcpyKind::DEVICE_TO_HOST;

fn pinned(bytes: usize) -> *mut c_void {
    let mut address = ptr::null_mut();
    // SAFETY: writes to a local.
    unsafe { acl().aclrtMallocHost(&raw mut address, bytes) }.unwrap();
    address
}

fn event(flags: u32) -> AclrtEvent {
    let mut event = AclrtEvent::NULL;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtCreateEventExWithFlag(&raw mut event, flags) }.unwrap();
    event
}

#[test]
fn what_was_copied_up_comes_down() {
    let sim = session();
    on_device(0);
    let memory = malloc(12);
    upload(memory, &[1.0f32, 2.0, 3.0]);
    assert_eq!(download::<f32>(memory, 3), [1.0, 2.0, 3.0]);
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn nothing_works_before_it_is_initialised_and_twice_is_a_status() {
    let sim = session();
    // SAFETY: of the simulator, as all below.
    assert_eq!(code(unsafe { acl().aclrtSetDevice(0) }), 100_001);
    // SAFETY: as above.
    unsafe { acl().aclInit(ptr::null()) }.unwrap();
    // SAFETY: as above.
    assert_eq!(code(unsafe { acl().aclInit(ptr::null()) }), 100_002);
    // SAFETY: as above.
    unsafe { acl().aclFinalize() }.unwrap();
    // SAFETY: as above.
    assert_eq!(code(unsafe { acl().aclFinalize() }), 100_037);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn another_thread_has_no_context() {
    let sim = session();
    on_device(0);
    let there = std::thread::spawn(|| {
        let mut address = ptr::null_mut();
        let policy = AclrtMemMallocPolicy::HUGE_FIRST;
        // SAFETY: writes to a local.
        code(unsafe { acl().aclrtMalloc(&raw mut address, 64, policy) })
    });
    assert_eq!(there.join().unwrap(), 107_002);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_stream_belongs_to_its_context() {
    let sim = session();
    on_device(0);
    let stream = new_stream();
    on_device(1);
    assert_eq!(code(synchronize(stream)), 107_003);
    on_device(0);
    end_stream(stream);
    assert_eq!(code(synchronize(stream)), 107_017);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn devices_are_counted_among_the_visible() {
    let visible = Some("1,3,x,5".into());
    let sim = start(Config { visible, ..Config::default() });
    on_device(1);
    // SAFETY: of the simulator.
    assert_eq!(code(unsafe { acl().aclrtSetDevice(2) }), 107_001);
    // SAFETY: of the simulator.
    assert_eq!(code(unsafe { acl().aclrtSetDevice(-1) }), 107_001);
    let mut count = 0;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtGetDeviceCount(&raw mut count) }.unwrap();
    assert_eq!(count, 2);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn no_memory_of_no_bytes_nor_of_too_many() {
    let sim = start(Config { memory: 1000, ..Config::default() });
    on_device(0);
    let mut address = ptr::null_mut();
    let policy = AclrtMemMallocPolicy::HUGE_FIRST;
    // SAFETY: writes to a local.
    assert_eq!(code(unsafe { acl().aclrtMalloc(&raw mut address, 0, policy) }), 107_000);
    // SAFETY: writes to a local.
    assert_eq!(code(unsafe { acl().aclrtMalloc(&raw mut address, 1001, policy) }), 207_001);
    let memory = malloc(1000);
    assert_eq!(memory.addr() % 64, 0);
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn fresh_memory_is_not_zero() {
    let sim = session();
    on_device(0);
    let memory = malloc(8);
    assert!(download::<f32>(memory, 2).iter().all(|number| number.is_nan()));
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn memory_is_freed_once_and_on_its_device() {
    let sim = session();
    on_device(0);
    let (memory, other) = (malloc(8), malloc(8));
    free(memory);
    // SAFETY: the simulator only looks it up.
    assert_eq!(code(unsafe { acl().aclrtFree(memory) }), 107_000);
    one_violation(&sim, "not the start");
    on_device(1);
    // SAFETY: as above.
    assert_eq!(code(unsafe { acl().aclrtFree(other) }), 107_000);
    one_violation(&sim, "freed on 1");
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_copy_stays_inside() {
    let sim = session();
    on_device(0);
    let memory = malloc(8);
    let host = [0u8; 16];
    let from = host.as_ptr().cast();
    // SAFETY: the simulator refuses to write.
    assert_eq!(code(unsafe { acl().aclrtMemcpy(memory, 16, from, 16, TO_DEVICE) }), 507_015);
    one_violation(&sim, "16 bytes at 0 of an allocation of 8");
    // SAFETY: as above.
    assert_eq!(code(unsafe { acl().aclrtMemcpy(memory, 8, from, 16, TO_DEVICE) }), 107_000);
    // SAFETY: as above.
    assert_eq!(code(unsafe { acl().aclrtMemcpy(memory, 8, from, 8, TO_HOST) }), 107_000);
    one_violation(&sim, "not of the kind");
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn pinned_copies_come_late_and_pageable_ones_at_once() {
    let sim = session();
    on_device(0);
    let (memory, stream, host) = (malloc(4), new_stream(), pinned(4));
    upload(memory, &[7u32]);
    // SAFETY: four bytes of the host.
    unsafe { host.cast::<u32>().write(0) };
    // SAFETY: four bytes each.
    unsafe { acl().aclrtMemcpyAsync(host, 4, memory, 4, TO_HOST, stream) }.unwrap();
    // SAFETY: nobody writes while the lazy stream waits.
    assert_eq!(unsafe { host.cast::<u32>().read() }, 0);
    synchronize(stream).unwrap();
    // SAFETY: the copy is done.
    assert_eq!(unsafe { host.cast::<u32>().read() }, 7);
    let mut pageable = 0u32;
    let to = (&raw mut pageable).cast();
    // SAFETY: four bytes each.
    unsafe { acl().aclrtMemcpyAsync(to, 4, memory, 4, TO_HOST, stream) }.unwrap();
    assert_eq!(pageable, 7);
    let kind = AclrtMemcpyKind::HOST_TO_HOST;
    // SAFETY: four bytes each.
    assert_eq!(code(unsafe { acl().aclrtMemcpyAsync(to, 4, host, 4, kind, stream) }), 207_000);
    // SAFETY: of `pinned`.
    unsafe { acl().aclrtFreeHost(host) }.unwrap();
    free(memory);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn memory_freed_before_its_copy_is_found() {
    let sim = session();
    on_device(0);
    let (memory, stream, host) = (malloc(4), new_stream(), pinned(4));
    // SAFETY: four bytes each, for now.
    unsafe { acl().aclrtMemcpyAsync(memory, 4, host, 4, TO_DEVICE, stream) }.unwrap();
    free(memory);
    assert_eq!(code(synchronize(stream)), 507_015);
    one_violation(&sim, "not allocated");
    let memory = malloc(4);
    // SAFETY: four bytes each, for now.
    unsafe { acl().aclrtMemcpyAsync(memory, 4, host, 4, TO_DEVICE, stream) }.unwrap();
    // SAFETY: of `pinned`.
    unsafe { acl().aclrtFreeHost(host) }.unwrap();
    assert_eq!(code(synchronize(stream)), 507_015);
    one_violation(&sim, "pinned memory was freed");
    free(memory);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn events_hold_streams_back() {
    let sim = session();
    on_device(0);
    let (first, second, memory) = (new_stream(), new_stream(), malloc(4));
    let mark = event(ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
    // SAFETY: four bytes each; the streams are alive, as is the event.
    unsafe {
        acl().aclrtMemsetAsync(memory, 4, 1, 4, first).unwrap();
        acl().aclrtRecordEvent(mark, first).unwrap();
        acl().aclrtStreamWaitEvent(second, mark).unwrap();
        acl().aclrtMemsetAsync(memory, 4, 2, 4, second).unwrap();
    }
    // The first stream was never waited for by the host.
    synchronize(second).unwrap();
    assert_eq!(download::<u8>(memory, 4), [2; 4]);
    let mut status = AclrtEventRecordedStatus::NOT_READY;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtQueryEventStatus(mark, &raw mut status) }.unwrap();
    assert_eq!(status, AclrtEventRecordedStatus::COMPLETE);
    let deaf = event(ACL_EVENT_TIME_LINE);
    // SAFETY: both exist.
    unsafe { acl().aclrtRecordEvent(deaf, first) }.unwrap();
    // SAFETY: both exist.
    assert_eq!(code(unsafe { acl().aclrtStreamWaitEvent(second, deaf) }), 107_000);
    let mut ms = -1.0;
    // SAFETY: writes to a local.
    assert_eq!(code(unsafe { acl().aclrtEventElapsedTime(&raw mut ms, mark, deaf) }), 507_006);
    synchronize(first).unwrap();
    // SAFETY: writes to a local.
    unsafe { acl().aclrtEventElapsedTime(&raw mut ms, mark, deaf) }.unwrap();
    assert!(ms >= 0.0);
    for event in [mark, deaf] {
        // SAFETY: of `event`.
        unsafe { acl().aclrtDestroyEvent(event) }.unwrap();
    }
    end_stream(first);
    end_stream(second);
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_failed_stream_stops_only_if_told_to() {
    let sim = session();
    on_device(0);
    let (stream, memory) = (new_stream(), malloc(4));
    let fail = || {
        // SAFETY: the simulator refuses to write there.
        unsafe { acl().aclrtMemsetAsync(memory, 8, 0, 8, stream) }.unwrap();
        assert_eq!(code(synchronize(stream)), 507_015);
        one_violation(&sim, "8 bytes at 0");
    };
    fail();
    // SAFETY: four bytes.
    unsafe { acl().aclrtMemsetAsync(memory, 4, 3, 4, stream) }.unwrap();
    synchronize(stream).unwrap();
    // SAFETY: a stream.
    unsafe { acl().aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE) }.unwrap();
    fail();
    // SAFETY: four bytes.
    assert_eq!(code(unsafe { acl().aclrtMemsetAsync(memory, 4, 4, 4, stream) }), 507_015);
    assert_eq!(download::<u8>(memory, 4), [3; 4]);
    // SAFETY: a stream.
    unsafe { acl().aclrtDestroyStreamForce(stream) }.unwrap();
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn waiting_for_a_stream_can_end() {
    let sim = session();
    on_device(0);
    let stream = new_stream();
    // SAFETY: nothing is done with a timeout of zero.
    assert_eq!(code(unsafe { acl().aclrtSynchronizeStreamWithTimeout(stream, 0) }), 107_000);
    // SAFETY: a stream without work.
    unsafe { acl().aclrtSynchronizeStreamWithTimeout(stream, 1) }.unwrap();
    let comm = hccl::alone_of_two(0);
    // SAFETY: of `alone_of_two`; the peer never comes, so this cannot end by itself.
    unsafe { npu_sim::hccl().HcclBarrier(comm.raw(), stream) }.unwrap();
    // SAFETY: a stream.
    assert_eq!(code(unsafe { acl().aclrtSynchronizeStreamWithTimeout(stream, 20) }), 507_046);
    comm.end_both();
    assert_eq!(code(synchronize(stream)), 507_015);
    one_violation(&sim, "HcclCommDestroy");
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_context_outlives_what_is_in_it() {
    let sim = session();
    on_device(0);
    let mut context = AclrtContext::NULL;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtCreateContext(&raw mut context, 1) }.unwrap();
    let stream = new_stream();
    // SAFETY: a context; that there is a stream in it is the mistake.
    unsafe { acl().aclrtDestroyContext(context) }.unwrap();
    one_violation(&sim, "1 streams");
    // SAFETY: the simulator only looks it up.
    assert_eq!(code(unsafe { acl().aclrtSetCurrentContext(context) }), 107_002);
    assert_eq!(code(synchronize(stream)), 107_002);
    assert_eq!(sim.finish(), ["1 streams are left"]);
}

#[test]
fn what_is_not_given_back_is_named() {
    let sim = session();
    on_device(0);
    malloc(8);
    pinned(8);
    event(ACL_EVENT_SYNC);
    let left = sim.finish().join("; ");
    for what in ["1 allocations on devices", "1 pinned allocations", "1 events"] {
        assert!(left.contains(what), "{left}");
    }
}

#[test]
fn overflow_is_a_flag_only_where_numbers_saturate() {
    for (soc, saturates) in [(Soc::Ascend910A, true), (Soc::Ascend910B, false)] {
        let sim = session_on(soc);
        on_device(0);
        let (memory, stream) = (malloc(64), new_stream());
        let mut can = -1;
        // SAFETY: writes to a local.
        unsafe { acl().aclGetCannAttribute(AclCannAttr::INF_NAN, &raw mut can) }.unwrap();
        assert_eq!(can, i32::from(!saturates));
        // SAFETY: 64 bytes.
        let asked = unsafe { acl().aclrtGetOverflowStatus(memory, 64, stream) };
        if saturates {
            asked.unwrap();
            // SAFETY: as above, but of the wrong size.
            assert_eq!(code(unsafe { acl().aclrtGetOverflowStatus(memory, 8, stream) }), 107_000);
            synchronize(stream).unwrap();
            assert_eq!(download::<u8>(memory, 64), [0; 64]);
        } else {
            assert_eq!(code(asked), 207_000);
        }
        end_stream(stream);
        free(memory);
        assert_eq!(sim.finish(), [""; 0]);
    }
}
