//! Every verb on device memory over NCCL; memory that NCCL allocates, launches, and unsupported
//! operations.

use std::fmt::Debug;
use std::time::Duration;

use collective::nccl::Config;
use collective::{Error, GroupOptions, ProcessGroup, ReduceOp, Result};
use half::{bf16, f16};

use super::device::{input, moves, reductions, run};
use super::fake::{Fake, Memory, Stream, devices};
use crate::common::{DEADLINE, play};
use crate::conformance::twin::Number;

/// Calls `rank` on every rank of groups of each size, with a stream.
fn every_size(rank: impl Fn(&ProcessGroup, &Stream) + Sync) {
    for world in 1..=4 {
        let options = GroupOptions::default().with_timeout(DEADLINE);
        let groups = Fake::get().groups(devices(world), &options, &Config::default());
        let groups = groups.into_iter().map(Result::unwrap).collect();
        play(groups, |group| rank(&group, &Fake::get().stream()));
    }
}

fn verbs<T: Number + PartialEq + Debug>() {
    every_size(|group, stream| {
        reductions::<T>(group, stream);
        moves::<T>(group, stream);
    });
}

#[test]
fn verbs_match_the_host_for_floats() {
    verbs::<f32>();
    verbs::<f64>();
}

#[test]
fn verbs_match_the_host_for_f16_and_bf16() {
    verbs::<f16>();
    verbs::<bf16>();
}

#[test]
fn verbs_match_the_host_for_integers() {
    verbs::<i8>();
    verbs::<u8>();
    verbs::<i32>();
    verbs::<i64>();
    verbs::<u64>();
    verbs::<u32>();
}

/// They are moved as types of the same size that NCCL has.
#[test]
fn verbs_work_for_types_that_nccl_lacks() {
    verbs::<u16>();
    verbs::<bool>();
    every_size(moves::<collective::F8E4M3>);
}

/// The fake rounds an `f16` once, as the host does; otherwise these comparisons would be
/// meaningless.
#[test]
fn f16_sums_round_as_on_the_host() {
    every_size(|group, stream| {
        let own: Vec<f16> =
            (0..500_u16).map(|i| f16::from_bits(i * 60 + group.rank() as u16)).collect();
        let (mut memory, mut twin) = (Memory::new(own.clone()), own);
        run(group, stream, |calls| calls.all_reduce(memory.buf(), ReduceOp::Sum));
        group.all_reduce(&mut twin, ReduceOp::Sum).unwrap();
        assert_eq!(memory.numbers(), twin);
    });
}

#[test]
fn messages_between_pairs_match_in_order() {
    every_size(|group, stream| {
        let (rank, world) = (group.rank(), group.world_size());
        if world == 1 {
            return;
        }
        let (next, last) = ((rank + 1) % world, (rank + world - 1) % world);
        let mut out: Vec<_> =
            (0..3).map(|i| Memory::new(vec![(rank * 10 + i) as i32; i])).collect();
        let mut into: Vec<_> = (0..3).map(|i| Memory::new(vec![-1_i32; i])).collect();
        run(group, stream, |mut calls| {
            for (out, into) in out.iter_mut().zip(&mut into) {
                calls = calls.send(out.buf(), next)?.recv(into.buf(), last)?;
            }
            Ok(calls)
        });
        for (i, into) in into.iter().enumerate() {
            assert_eq!(into.numbers(), vec![(last * 10 + i) as i32; i]);
        }
        // Only the two ranks of a message take part.
        if rank < 2 {
            let mut memory = Memory::new(vec![rank as u8; 5]);
            run(group, stream, |calls| match rank {
                0 => calls.send(memory.buf(), 1),
                _ => calls.recv(memory.buf(), 0),
            });
            assert_eq!(memory.numbers(), [0; 5]);
        }
    });
}

#[test]
fn many_tensors_use_one_launch_and_one_premulsum_op() {
    every_size(|group, stream| {
        let device = group.device().unwrap().device_name();
        let device: u32 = device.strip_prefix("cuda:").unwrap().parse().unwrap();
        let half = ReduceOp::pre_mul_sum(0.5);
        let mut tensors: Vec<_> =
            (0..40).map(|i| Memory::new(input::<f32>(group.rank(), i))).collect();
        let launches = Fake::get().calls("launch", device);
        run(group, stream, |mut calls| {
            for tensor in &mut tensors {
                calls = calls.all_reduce(tensor.buf(), half)?;
            }
            Ok(calls)
        });
        assert_eq!(Fake::get().calls("launch", device), launches + 1);
        assert_eq!(Fake::get().calls("ncclRedOpCreatePreMulSum", device), 1);
        assert_eq!(Fake::get().calls("ncclRedOpDestroy", device), 1);
        for (i, tensor) in tensors.iter().enumerate() {
            let mut twin = input::<f32>(group.rank(), i);
            group.all_reduce(&mut twin, half).unwrap();
            assert_eq!(tensor.numbers(), twin);
        }
        let record = group.flight_record();
        let text = record.to_string();
        let call = "all_reduce of 0 f32, premulsum(0.5), and 39 more calls: done";
        assert!(text.contains(call) && text.contains("backend nccl"), "{text}");
    });
}

#[test]
fn invalid_arguments_are_errors_and_the_group_stays_usable() {
    every_size(|group, stream| {
        let world = group.world_size();
        let (mut a, mut b) = (Memory::new(vec![1_i32; 8 * world]), Memory::new(vec![2_i32; 8]));
        let mut floats = Memory::new(vec![0.0_f32; 8]);
        let (whole, block, floats) = (a.buf(), b.buf(), floats.buf());
        let device = || group.device().unwrap();
        let inside = whole.part(1..9).ok();
        let wrong = [
            device().all_gather(whole, block.part(0..7).unwrap()),
            device().all_gather(whole, floats),
            device().reduce_scatter(whole.part(0..7).unwrap(), whole, ReduceOp::Sum),
            device().reduce(block, ReduceOp::Sum, world),
            device().all_reduce(block, ReduceOp::Avg),
            device().send(block, group.rank()),
            device().recv(block, world),
            device()
                .all_gather_v(whole, block, &[8])
                .and_then(|calls| calls.all_gather_v(whole, block, &[])),
            device().scatter_v(block, Some(whole), &vec![usize::MAX; world], group.rank()),
            device().gather(None, block, group.rank()),
            inside.map_or_else(
                || device().broadcast(block, 9),
                |inside| device().all_gather(whole, inside),
            ),
        ];
        for (i, wrong) in wrong.into_iter().enumerate() {
            assert!(matches!(wrong, Err(Error::InvalidArgument(_))), "{i}: {wrong:?}");
        }
        for op in [ReduceOp::BitAnd, ReduceOp::BitXor] {
            let error = device().all_reduce(block, op).unwrap_err();
            assert!(matches!(error, Error::Unsupported { backend: "nccl", .. }), "{error}");
        }
        let error = device().all_reduce(Memory::new(vec![1_u16]).buf(), ReduceOp::Sum).unwrap_err();
        assert_eq!(error.to_string(), "backend nccl does not support sum of u16 on device memory");
        let error = device().all_reduce(Memory::new(vec![true]).buf(), ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        let twice = device().all_reduce(block, ReduceOp::Sum).unwrap();
        let twice = twice.broadcast(block.part(7..8).unwrap(), 0).unwrap();
        for calls in [device(), twice] {
            let error = calls.enqueue(stream.raw()).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        }
        stream.capture(true);
        let error = device().all_reduce(block, ReduceOp::Sum).unwrap().enqueue(stream.raw());
        assert!(matches!(error, Err(Error::Unsupported { .. })), "{error:?}");
        stream.capture(false);
        run(group, stream, |calls| calls.all_reduce(block, ReduceOp::Sum));
        assert_eq!(b.numbers(), [2 * world as i32; 8]);
    });
}

/// The root of a broadcast only reads its memory, so another call of the list may read it, too.
#[test]
fn a_root_may_broadcast_and_send_the_same_memory() {
    every_size(|group, stream| {
        if group.world_size() == 1 {
            return;
        }
        let (mut all, mut one) =
            (Memory::new(vec![group.rank() as i32 + 7; 5]), Memory::new(vec![0_i32; 5]));
        run(group, stream, |calls| match (calls.broadcast(all.buf(), 0)?, group.rank()) {
            (calls, 0) => calls.send(all.buf(), 1),
            (calls, 1) => calls.recv(one.buf(), 0),
            (calls, _) => Ok(calls),
        });
        assert_eq!(all.numbers(), [7; 5]);
        assert_eq!(one.numbers(), [if group.rank() == 1 { 7 } else { 0 }; 5]);
        // A rank that receives the broadcast writes the memory.
        let calls = group.device().unwrap().broadcast(all.buf(), 0).unwrap();
        let calls = calls.send(all.buf(), (group.rank() + 1) % group.world_size()).unwrap();
        if group.rank() != 0 {
            let error = calls.enqueue(stream.raw()).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        }
    });
}

#[test]
fn enqueue_does_not_block_and_order_makes_a_stream_wait() {
    every_size(|group, stream| {
        let (behind, world) = (Fake::get().stream(), group.world_size() as i32);
        let (mut one, mut two) = (Memory::new(vec![1_i32; 9]), Memory::new(vec![5_i32; 3]));
        stream.compute(if group.rank() == 0 { 60 } else { 0 });
        let calls = group.device().unwrap().all_reduce(one.buf(), ReduceOp::Sum).unwrap();
        let first = calls.enqueue(stream.raw()).unwrap();
        if group.rank() == 0 {
            assert!(first.settled().is_none() && !first.wait_timeout(Duration::ZERO).unwrap());
        }
        // SAFETY: the stream lives until the end.
        #[expect(unsafe_code, reason = "that is how streams are ordered")]
        unsafe {
            first.order(behind.raw()).unwrap();
        }
        let calls = group.device().unwrap().all_reduce(two.buf(), ReduceOp::Sum).unwrap();
        calls.enqueue(behind.raw()).unwrap().wait().unwrap();
        assert!(matches!(first.settled(), Some(Ok(()))));
        assert_eq!((one.numbers(), two.numbers()), (vec![world; 9], vec![5 * world; 3]));
    });
}

#[test]
fn verbs_accept_registered_and_nccl_allocated_memory() {
    every_size(|group, stream| {
        let mut memory = Memory::new(vec![1_i64; 100]);
        let device = group.device().unwrap();
        // SAFETY: the memory outlives the registration; the view its memory.
        #[expect(unsafe_code, reason = "the contract of registrations")]
        let (registration, own) = unsafe {
            (
                device.register(memory.buf()).unwrap(),
                device.alloc(collective::DType::I32, 64).unwrap(),
            )
        };
        // SAFETY: as above.
        #[expect(unsafe_code, reason = "the contract of views")]
        let view = unsafe { own.as_buf() };
        assert_eq!((view.count(), view.address() % 4096), (64, 0));
        run(group, stream, |calls| {
            calls.all_reduce(memory.buf(), ReduceOp::Sum)?.broadcast(view, 0)
        });
        assert_eq!(memory.numbers(), [group.world_size() as i64; 100]);
        drop(registration);
    });
}

/// Registrations and memory are dropped in any order, also after their group, whether or not it has
/// failed.
#[test]
fn registrations_and_memory_may_outlive_their_group() {
    for fails in [false, true] {
        let options = GroupOptions::default().with_timeout(DEADLINE);
        let groups = Fake::get().groups(devices(2), &options, &Config::default());
        let groups = groups.into_iter().map(Result::unwrap).collect();
        play(groups, |group| {
            let (stream, world) = (Fake::get().stream(), group.world_size() as i32);
            let mut all: Vec<_> = (0..4).map(|i| Memory::new(vec![i; 16])).collect();
            let device = group.device().unwrap();
            let own = device.alloc(collective::DType::I32, 64).unwrap();
            let register = |memory: &mut Memory<i32>| {
                // SAFETY: the memory outlives the registration.
                #[expect(unsafe_code, reason = "the contract of registrations")]
                unsafe { device.register(memory.buf()) }.unwrap()
            };
            let mut kept: Vec<_> = all.iter_mut().map(register).collect();
            drop(kept.remove(2));
            drop(kept.remove(0));
            run(&group, &stream, |mut calls| {
                for memory in &mut all {
                    calls = calls.all_reduce(memory.buf(), ReduceOp::Sum)?;
                }
                Ok(calls)
            });
            drop(kept.remove(1));
            for (i, memory) in all.iter().enumerate() {
                assert_eq!(memory.numbers(), [world * i as i32; 16]);
            }
            group.barrier().unwrap();
            if fails {
                group.abort("enough");
            }
            drop(group);
            drop((kept, own));
        });
    }
}

#[test]
fn an_nccl_without_the_scalable_init_joins_and_splits() {
    let options = GroupOptions::default().with_timeout(DEADLINE);
    let groups = Fake::old().groups(devices(3), &options, &Config::default().with_ranks_per_id(1));
    let groups = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        let mut memory = Memory::new(vec![group.rank() as i32; 3]);
        let part = group.split(Some(u32::from(group.rank() > 0)), 0).unwrap().unwrap();
        run(&part, &Fake::old().stream(), |calls| calls.all_reduce(memory.buf(), ReduceOp::Sum));
        assert_eq!(memory.numbers(), [if group.rank() == 0 { 0 } else { 3 }; 3]);
    });
}
