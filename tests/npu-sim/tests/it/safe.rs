//! The safe layer of `npu-sys`: it keeps every rule by itself.

use std::thread;
use std::time::Duration;

use npu_sim::ops;
use npu_sys::safe::{Buffer, Context, Event, Operators, SgdNumbers, Stream, View};

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
        event.wait(&stream).unwrap();
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
    event.wait(&second).unwrap();
    second.fill(&buffer, 0, 2, 2).unwrap();
    let mut bytes = [0; 4];
    second.download(&buffer, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 2, 1, 1]);
    assert!(event.is_complete().unwrap());
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
    refused(Event::new(&elsewhere).unwrap().wait(&stream));
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
    for _ in 0..=Stream::MAX_PENDING {
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

/// Operators in a stream of their own on a chip.
fn operators(device: usize) -> Operators {
    let context = Context::new(acl(), device).unwrap();
    Operators::new(Stream::new(&context).unwrap(), nnop(), ops()).unwrap()
}

#[test]
fn views_are_inside_aligned_and_of_one_context() {
    let sim = session();
    let (on, elsewhere) = (operators(0), operators(1));
    let all = on.alloc(64, AclDataType::FLOAT).unwrap();
    let refused = |made: Result<View>| matches!(made, Err(Error::Argument { .. }));
    assert!(refused(View::new(all.buffer(), 4, &[1], AclDataType::FLOAT)));
    assert!(refused(View::new(all.buffer(), 32, &[57], AclDataType::FLOAT)));
    assert!(refused(View::new(all.buffer(), 0, &[usize::MAX, 2], AclDataType::FLOAT)));
    assert!(refused(View::new(all.buffer(), 0, &[1], AclDataType(77))));
    assert!(refused(all.part(8, 57)) && refused(all.part(usize::MAX, 2)));
    assert!(refused(all.part(1, 2)) && refused(all.shaped(&[3])));
    let part = all.part(8, 6).unwrap().shaped(&[2, 3]).unwrap();
    assert_eq!((part.count(), part.offset(), part.bytes()), (6, 32, 24));
    assert!(matches!(elsewhere.zero(&all), Err(Error::Argument { .. })));
    assert!(matches!(on.write(&all, &[0; 3]), Err(Error::Argument { .. })));
    assert!(matches!(on.row_sums(&all.part(0, 7).unwrap(), &all), Err(Error::Argument { .. })));
    drop((all, part, on, elsewhere));
    assert_eq!(sim.finish(), [""; 0]);
}

/// The operators' own checks of shapes, types, lists and chips.
#[test]
fn operators_refuse_what_does_not_go_together() {
    for soc in [Soc::Ascend910A, Soc::Ascend910B] {
        let sim = session_on(soc);
        let on = operators(0);
        let view = |count| {
            let view = on.alloc(count, AclDataType::FLOAT).unwrap();
            on.fill(&view, 3.0).unwrap();
            view
        };
        let (matrix, column, row) = (view(6).shaped(&[2, 3]).unwrap(), view(2), view(3));
        on.mul(&matrix, &matrix, &row).unwrap();
        on.add(&matrix, &matrix, &column.shaped(&[2, 1]).unwrap(), 1.0).unwrap();
        assert_eq!(code(on.add(&matrix, &matrix, &column, 1.0)), 161_002);
        assert_eq!(code(on.mul(&column, &column, &matrix)), 161_002);
        let half = on.alloc(6, AclDataType::FLOAT16).unwrap();
        assert_eq!(code(on.muls(&half, &matrix, 1.0)), 161_002);
        assert_eq!(on.read(&matrix).unwrap()[..4], 12.0_f32.to_ne_bytes());
        let (found, scale, two) = (view(1), view(1), view(2));
        on.zero(&found).unwrap();
        let unscale = |list: &[View], found| on.non_finite_check_and_unscale(list, found, &scale);
        match soc {
            Soc::Ascend910A => {
                assert_eq!(code(unscale(&[view(2)], &found)), 561_003);
                assert_eq!(code(on.foreach_norm(&[view(1)], &[view(2)])), 561_003);
            }
            _ => {
                assert_eq!(code(unscale(&vec![view(1); 257], &found)), 561_002);
                assert_eq!(code(unscale(&[view(2)], &two)), 161_002);
                assert_eq!(code(on.foreach_muls(&vec![view(1); 51], &[1.0; 51])), 561_002);
                unscale(std::slice::from_ref(&row), &found).unwrap();
                assert_eq!(on.read(&row).unwrap()[..4], 9.0_f32.to_ne_bytes());
            }
        }
        drop((matrix, column, row, half, found, scale, two, on));
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn the_overflow_flag_is_that_of_chips_that_saturate() {
    for soc in [Soc::Ascend910A, Soc::Ascend910B] {
        let sim = session_on(soc);
        let on = operators(0);
        let half = on.alloc(1, AclDataType::FLOAT16).unwrap();
        on.fill(&half, 60_000.0).unwrap();
        match soc {
            Soc::Ascend910A => {
                on.clear_overflow().unwrap();
                assert!(!on.overflowed().unwrap());
                on.muls(&half, &half, 2.0).unwrap();
                assert!(on.overflowed().unwrap());
                on.clear_overflow().unwrap();
                assert!(!on.overflowed().unwrap());
            }
            _ => {
                assert_eq!(code(on.clear_overflow()), 207_000);
                assert_eq!(code(on.overflowed()), 207_000);
            }
        }
        drop((half, on));
        assert_eq!(sim.finish(), [""; 0]);
    }
}

fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: every byte of a number is a byte.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

#[test]
fn the_threads_context_outlives_the_handle_that_made_it() {
    let sim = session();
    // The thread had no context, so this one stays current.
    let made = Context::new(acl(), 0).unwrap();
    let shared = Context::of_thread(acl(), 0).unwrap();
    assert_eq!(shared.raw(), made.raw());
    drop(made);
    let buffer = Buffer::new(&shared, 8).unwrap();
    Stream::new(&shared).unwrap().fill(&buffer, 0, 8, 1).unwrap();
    assert_eq!(sim.calls("aclrtDestroyContext"), 0);
    drop((buffer, shared));
    assert_eq!(sim.calls("aclrtDestroyContext"), 1);
    // Now it has none, and gets the default one, which is never destroyed.
    drop(Context::of_thread(acl(), 0).unwrap());
    assert_eq!(sim.calls("aclrtDestroyContext"), 1);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn lists_of_different_lengths_are_refused_and_empty_ones_do_nothing() {
    let sim = session();
    let on = operators(0);
    let view = |count| on.alloc(count, AclDataType::FLOAT).unwrap();
    let refused = |result: Result<()>| {
        assert!(matches!(result, Err(Error::Argument { .. })), "{result:?}");
    };
    let (one, two) = ([view(1)], [view(1), view(1)]);
    for list in [&two[..], &[]] {
        refused(on.foreach_norm(&one, list));
        refused(on.foreach_norm(list, &one));
        refused(on.foreach_muls(&one, &vec![1.0; list.len()]));
        refused(on.foreach_muls(list, &[1.0]));
    }
    let (p, empty) = (view(4), view(0));
    let numbers = SgdNumbers {
        weight_decay: 0.0,
        momentum: 0.9,
        lr: 0.1,
        dampening: 0.0,
        nesterov: false,
        is_first_step: true,
    };
    refused(on.fused_sgd([&p, &empty], Some(&p), numbers));
    refused(on.fused_sgd([&p, &p], Some(&empty), numbers));
    let before = sim.calls("aclCreateTensorList") + sim.calls("aclCreateScalarList");
    on.foreach_norm(&[], &[]).unwrap();
    on.foreach_muls(&[], &[]).unwrap();
    on.non_finite_check_and_unscale(&[], &one[0], &one[0]).unwrap();
    on.fused_sgd([&empty, &empty], None, numbers).unwrap();
    assert_eq!(sim.calls("aclCreateTensorList") + sim.calls("aclCreateScalarList"), before);
    drop((one, two, p, empty, on));
    assert_eq!(sim.finish(), [""; 0]);
}
