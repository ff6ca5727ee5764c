//! The safe layer of `npu-sys`: it keeps every rule by itself.

use std::thread;
use std::time::Duration;

use npu_sim::ops;
use npu_sys::safe::{Buffer, Context, Event, Stream};

use super::*;

fn current() -> Option<AclrtContext> {
    let mut context = AclrtContext::NULL;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtGetCurrentContext(&raw mut context) }.ok().map(|()| context)
}

#[test]
fn bytes_go_up_and_down_in_order_on_any_thread() {
    let sim = session();
    let context = Context::new(acl(), 0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::new(&context, 100).unwrap();
    let other = Buffer::new(&context, 100).unwrap();
    stream.upload(&buffer, 10, &[1, 2, 3]).unwrap();
    stream.copy((&other, 5), (&buffer, 10), 3).unwrap();
    stream.fill(&other, 6, 1, 9).unwrap();
    let read = thread::scope(|scope| {
        let there = scope.spawn(|| {
            let mut bytes = [0; 3];
            stream.download(&other, 5, &mut bytes).map(|()| bytes)
        });
        there.join().unwrap()
    });
    assert_eq!(read.unwrap(), [1, 9, 3]);
    drop((stream, buffer, other, context));
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn nothing_is_freed_under_a_stream() {
    let sim = session();
    let context = Context::new(acl(), 0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let kept = Buffer::new(&context, 4).unwrap();
    {
        let buffer = Buffer::new(&context, 4).unwrap();
        stream.upload(&buffer, 0, &[1, 2, 3, 4]).unwrap();
        stream.copy((&kept, 0), (&buffer, 0), 4).unwrap();
        // The buffer, its bytes on the host and the event end here, before the lazy stream begins.
        let event = Event::new(&context).unwrap();
        event.record(&stream).unwrap();
        event.hold_back(&stream).unwrap();
    }
    let before = sim.calls("aclrtFree");
    stream.synchronize().unwrap();
    assert_eq!(sim.calls("aclrtFree"), before + 1);
    let mut bytes = [0; 4];
    stream.download(&kept, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    stream.fill(&kept, 0, 4, 0).unwrap();
    // A stream that is dropped waits, too; and all of it may be dropped on another thread.
    drop(kept);
    thread::spawn(move || drop((stream, context))).join().unwrap();
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn the_threads_own_context_is_put_back() {
    let sim = session();
    on_device(3);
    let mine = current();
    assert!(mine.is_some());
    let context = Context::new(acl(), 1).unwrap();
    assert_eq!(current(), mine);
    let buffer = Buffer::new(&context, 8).unwrap();
    let stream = Stream::new(&context).unwrap();
    stream.upload(&buffer, 0, &[0; 8]).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(current(), mine);
    {
        let _entered = context.enter().unwrap();
        assert_eq!(current(), Some(context.raw()));
    }
    assert_eq!(current(), mine);
    drop((buffer, stream, context));
    assert_eq!(current(), mine);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn events_order_two_streams() {
    let sim = session();
    let context = Context::new(acl(), 0).unwrap();
    let [first, second] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let buffer = Buffer::new(&context, 4).unwrap();
    let event = Event::new(&context).unwrap();
    first.fill(&buffer, 0, 4, 1).unwrap();
    event.record(&first).unwrap();
    event.hold_back(&second).unwrap();
    second.fill(&buffer, 0, 2, 2).unwrap();
    let mut bytes = [0; 4];
    second.download(&buffer, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 2, 1, 1]);
    assert!(event.is_reached().unwrap());
    drop((first, second, buffer, event, context));
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn mistakes_are_seen_before_cann_sees_them() {
    let sim = session();
    let context = Context::new(acl(), 0).unwrap();
    let elsewhere = Context::new(acl(), 1).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::new(&context, 8).unwrap();
    let foreign = Buffer::new(&elsewhere, 8).unwrap();
    let refused = |result: Result<()>| {
        assert!(matches!(result, Err(Error::Argument { .. })), "{result:?}");
    };
    refused(Buffer::new(&context, 0).map(drop));
    refused(Buffer::new(&context, usize::MAX).map(drop));
    refused(stream.upload(&buffer, 5, &[0; 4]));
    refused(stream.upload(&buffer, usize::MAX, &[0; 4]));
    refused(stream.upload(&foreign, 0, &[0; 4]));
    refused(stream.download(&buffer, 8, &mut [0; 1]));
    refused(stream.copy((&buffer, 0), (&buffer, 3), 4));
    refused(stream.fill(&buffer, 0, 9, 0));
    refused(Event::new(&elsewhere).unwrap().record(&stream));
    refused(Event::new(&elsewhere).unwrap().hold_back(&stream));
    assert_eq!(code(Context::new(acl(), 8)), 107_001);
    drop((stream, buffer, foreign, context, elsewhere));
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_stream_holds_only_so_much() {
    let sim = session();
    let context = Context::new(acl(), 0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::new(&context, 4).unwrap();
    for _ in 0..=Stream::MOST {
        stream.fill(&buffer, 0, 4, 0).unwrap();
    }
    assert_eq!(sim.calls("aclrtSynchronizeStream"), 1);
    stream.synchronize_for(Duration::from_secs(60)).unwrap();
    drop((stream, buffer, context));
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn an_operator_is_launched_with_its_workspace() {
    let sim = session();
    let context = Context::new(acl(), 0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::new(&context, 64).unwrap();
    let half = Buffer::new(&context, 32).unwrap();
    stream.upload(&buffer, 0, bytes_of(&[1.5f32; 16])).unwrap();
    let from = tensor(buffer.address(), &[16], AclDataType::FLOAT);
    let to = tensor(half.address(), &[16], AclDataType::FLOAT16);
    // SAFETY: tensors that exist.
    let plan = unsafe { ops().aclnnCast(from, AclDataType::FLOAT16, to) }.unwrap();
    assert!(plan.workspace_bytes() > 0);
    let keep = Box::new((buffer.clone(), half.clone()));
    // SAFETY: both tensors' memory is kept, and of the stream's context.
    unsafe { stream.launch(plan, keep) }.unwrap();
    end_tensor(from);
    end_tensor(to);
    let mut bytes = [0; 32];
    stream.download(&half, 0, &mut bytes).unwrap();
    assert!(bytes.as_chunks().0.iter().all(|b| half::f16::from_le_bytes(*b).to_f32() == 1.5));
    drop((stream, buffer, half, context));
    assert_eq!(sim.finish(), [""; 0]);
}

fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: every byte of a number is a byte.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}
