//! Every verb on the memory of NPUs, for the types that HCCL supports; unsupported types and
//! operators.

use std::fmt::Debug;
use std::time::Duration;

use collective::hccl::Config;
use collective::{DType, Error, GroupOptions, ProcessGroup, ReduceOp};
use half::{bf16, f16};
use npu_sim::{Config as Simulated, Soc, start};

use super::device::{input, moves, reductions, run};
use super::fake::{Memory, Stream, connect_all, finish, has, libraries_but, play, play_all, read};
use crate::common::DEADLINE;
use crate::conformance::twin::Number;

fn options() -> GroupOptions {
    GroupOptions::default().with_timeout(DEADLINE)
}

/// Calls `rank` on every rank of groups of each size; streams start work as late as allowed.
fn every_size(rank: impl Fn(&ProcessGroup, &Stream) + Sync) {
    for world in 1..=4 {
        let session = start(Simulated::default());
        play_all(world, &options(), &Config::default(), |group, stream| rank(&group, stream));
        finish(session);
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
    verbs::<u16>();
    verbs::<bool>();
}

/// Streams that start work at once expose other races than streams that start it late.
#[test]
fn verbs_match_the_host_on_eager_streams() {
    let session = start(Simulated { eager: true, ..Simulated::default() });
    play_all(3, &options(), &Config::default(), |group, stream| {
        reductions::<f32>(&group, stream);
        moves::<i32>(&group, stream);
    });
    finish(session);
}

/// In 16 bits both the sum and the quotient are rounded.
#[test]
fn averages_are_the_sum_divided_by_the_world_size() {
    averages::<f32>(|x| x);
    averages::<f16>(f16::from_f32);
    averages::<bf16>(bf16::from_f32);
}

fn averages<T: Number + Into<f32> + PartialEq + Debug>(narrow: fn(f32) -> T) {
    every_size(|group, stream| {
        let (rank, world) = (group.rank(), group.world_size());
        let own: Vec<T> = input(rank, 24 * world);
        let mut sums = own.clone();
        group.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        let means: Vec<T> = sums.iter().map(|&sum| narrow(sum.into() / world as f32)).collect();
        let mut memory = Memory::new(own.clone());
        run(group, stream, |calls| calls.all_reduce(memory.buf(), ReduceOp::Avg));
        assert_eq!(memory.numbers(), means);
        for root in 0..world {
            let mut memory = Memory::new(own.clone());
            run(group, stream, |calls| calls.reduce(memory.buf(), ReduceOp::Avg, root));
            assert_eq!(memory.numbers(), if rank == root { means.clone() } else { own.clone() });
        }
        let (mut from, mut to) = (Memory::new(own), Memory::new(vec![T::default(); 24]));
        run(group, stream, |calls| calls.reduce_scatter(to.buf(), from.buf(), ReduceOp::Avg));
        assert_eq!(to.numbers(), means[24 * rank..][..24]);
        let mut counts = vec![24; world];
        (counts[0], counts[world - 1]) = (23, counts[world - 1] + 1);
        if world == 1 {
            counts = vec![24];
        }
        let start = counts[..rank].iter().sum();
        let mut to = Memory::new(vec![T::default(); counts[rank]]);
        run(group, stream, |calls| {
            calls.reduce_scatter_v(to.buf(), from.buf(), &counts, ReduceOp::Avg)
        });
        assert_eq!(to.numbers(), means[start..][..counts[rank]]);
    });
}

/// Including offsets at which a CANN tensor cannot start.
#[test]
fn f16_averages_work_at_any_offset() {
    every_size(|group, stream| {
        let world = group.world_size();
        let own: Vec<f16> =
            (0..500_u16).map(|i| f16::from_bits(i * 60 + group.rank() as u16)).collect();
        for start in 0..18 {
            let (mut memory, mut twin) = (Memory::new(own.clone()), own.clone());
            let part = memory.buf().part(start..499).unwrap();
            run(group, stream, |calls| calls.all_reduce(part, ReduceOp::Avg));
            group.all_reduce(&mut twin[start..499], ReduceOp::Sum).unwrap();
            for sum in &mut twin[start..499] {
                *sum = f16::from_f32(f32::from(*sum) / world as f32);
            }
            let same = |(a, b): (&f16, &f16)| a == b || a.is_nan() && b.is_nan();
            assert!(memory.numbers().iter().zip(&twin).all(same), "from {start}");
        }
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
        let mut sum = Memory::new(vec![1_i32]);
        run(group, stream, |mut calls| {
            for (out, into) in out.iter_mut().zip(&mut into) {
                calls = calls.send(out.buf(), next)?.recv(into.buf(), last)?;
            }
            calls.all_reduce(sum.buf(), ReduceOp::Sum)
        });
        for (i, into) in into.iter().enumerate() {
            assert_eq!(into.numbers(), vec![(last * 10 + i) as i32; i]);
        }
        assert_eq!(sum.numbers(), [world as i32]);
        // Only these two ranks take part; one sends in one batch, the other receives in two calls.
        if rank < 2 {
            let (mut a, mut b) = (Memory::new(vec![rank as u8; 5]), Memory::new(vec![7_u8; 2]));
            let device = || group.device().unwrap();
            let works = match rank {
                0 => vec![device().send(a.buf(), 1).unwrap().send(b.buf(), 1).unwrap()],
                _ => vec![device().recv(a.buf(), 0).unwrap(), device().recv(b.buf(), 0).unwrap()],
            };
            let works: Vec<_> =
                works.into_iter().map(|calls| calls.enqueue(stream.raw()).unwrap()).collect();
            works.iter().for_each(|work| work.wait().unwrap());
            assert_eq!((a.numbers(), b.numbers()), (vec![0; 5], vec![7; 2]));
        }
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
        for wrong in [
            device().all_gather(whole, block.part(0..7).unwrap()),
            device().all_gather(whole, floats),
            device().reduce(block, ReduceOp::Sum, world),
            device().all_reduce(block, ReduceOp::Avg),
            device().recv(block, world),
        ] {
            assert!(matches!(wrong, Err(Error::InvalidArgument(_))), "{wrong:?}");
        }
        // SAFETY: the registration is refused.
        #[expect(unsafe_code, reason = "the contract of registrations")]
        let registered = unsafe { device().register(block) };
        assert!(matches!(registered, Err(Error::Unsupported { backend: "hccl", .. })));
        run(group, stream, |calls| calls.all_reduce(block, ReduceOp::Sum));
        assert_eq!(b.numbers(), [2 * world as i32; 8]);
    });
}

/// They are refused before anything is enqueued, for each type.
#[test]
fn reductions_that_hccl_lacks_are_unsupported() {
    for soc in [Soc::Ascend910A, Soc::Ascend910B, Soc::Ascend910C] {
        let session = start(Simulated { soc, ..Simulated::default() });
        play_all(2, &options(), &Config::default(), |group, stream| {
            let mut memory = Memory::new(vec![0_u64; 4]);
            let address = memory.buf().address();
            for of in DType::ALL {
                // SAFETY: as many bytes as the memory has, or fewer.
                #[expect(unsafe_code, reason = "the contract of buffers")]
                let buf =
                    unsafe { collective::device::DeviceBuf::from_raw(address, 2, of) }.unwrap();
                let further = [ReduceOp::pre_mul_sum(0.5)];
                for op in ReduceOp::ALL.into_iter().chain(further).filter(|op| op.supports(of)) {
                    let old = soc == Soc::Ascend910A && of == DType::Bf16;
                    let calls = group.device().unwrap().all_reduce(buf, op);
                    if has(op, of) && !old {
                        calls.unwrap().enqueue(stream.raw()).unwrap().wait().unwrap();
                    } else {
                        let error = calls.unwrap_err();
                        let Error::Unsupported { backend: "hccl", what } = &error else {
                            panic!("{error}")
                        };
                        assert!(what.contains(of.name()), "{what}");
                    }
                }
                // Moving is supported for every type.
                let calls = group.device().unwrap().broadcast(buf, 1).unwrap();
                calls.enqueue(stream.raw()).unwrap().wait().unwrap();
            }
        });
        finish(session);
    }
}

#[test]
fn averages_without_cann_operators_are_unsupported() {
    let session = start(Simulated::default());
    for lacks in ["aclnnInplaceDivs", "aclCreateTensor"] {
        let without =
            libraries_but(&|name| name.starts_with(lacks).then_some(std::ptr::null_mut())).unwrap();
        let ranks = connect_all(&options(), &[without.clone(), without]);
        play(ranks, |group, stream| {
            let mut memory = Memory::new(vec![1.0_f32]);
            let error =
                group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Avg).unwrap_err();
            assert!(matches!(error, Error::Unsupported { backend: "hccl", .. }), "{error}");
            assert!(error.to_string().contains("aclnnInplaceDivs"), "{error}");
            run(&group, stream, |calls| calls.all_reduce(memory.buf(), ReduceOp::Sum));
            assert_eq!(memory.numbers(), [2.0]);
        });
    }
    finish(session);
}

#[test]
fn order_makes_a_stream_wait_for_an_operation() {
    every_size(|group, stream| {
        let (behind, world) = (Stream::another(), group.world_size() as i32);
        for _ in 0..20 {
            let (mut one, mut two) = (Memory::new(vec![1_i32; 9]), Memory::new(vec![5_i32; 3]));
            let calls = group.device().unwrap().all_reduce(one.buf(), ReduceOp::Sum).unwrap();
            let first = calls.enqueue(stream.raw()).unwrap();
            // SAFETY: the stream lives until the end.
            #[expect(unsafe_code, reason = "that is how streams are ordered")]
            unsafe {
                first.order(behind.raw()).unwrap();
            }
            let calls = group.device().unwrap().all_reduce(two.buf(), ReduceOp::Sum).unwrap();
            calls.enqueue(behind.raw()).unwrap().wait().unwrap();
            assert!(first.wait_timeout(Duration::ZERO).unwrap());
            assert_eq!((one.numbers(), two.numbers()), (vec![world; 9], vec![5 * world; 3]));
        }
        drop(behind);
    });
}

#[test]
fn alloc_returns_device_memory_that_verbs_accept() {
    let session = start(Simulated::default());
    play_all(2, &options(), &Config::default(), |group, stream| {
        assert_eq!(group.device().unwrap().device_name(), format!("npu:{}", group.rank()));
        let own = group.device().unwrap().alloc(DType::I32, 5).unwrap();
        // SAFETY: the memory outlives its view.
        #[expect(unsafe_code, reason = "the contract of views")]
        let view = unsafe { own.as_buf() };
        assert_eq!((view.count(), view.address() % 64), (5, 0));
        run(&group, stream, |calls| calls.broadcast(view, 0));
        drop(own);
    });
    finish(session);
}

/// By the reducer on device memory.
#[test]
fn the_reducer_averages_gradients_in_buckets() {
    use collective::reducer::{DeviceReducer, NoKernels, ParamInfo, ReducerOptions};
    let session = start(Simulated::default());
    play_all(3, &options(), &Config::default(), |group, stream| {
        let rank = group.rank() as f32;
        let params = (0..4).map(|i| ParamInfo::new(format!("p{i}"), 5 + i, DType::F32)).collect();
        let options = ReducerOptions::default();
        let mut reducer = DeviceReducer::new(group, params, options, NoKernels).unwrap();
        for pass in 0..3 {
            let mut gradients: Vec<Memory<f32>> =
                (0..4).map(|i| Memory::new(vec![rank + (pass * i) as f32; 5 + i])).collect();
            reducer.prepare(true).unwrap();
            #[expect(unsafe_code, reason = "the reducer's contract")]
            for (index, gradient) in gradients.iter_mut().enumerate().rev() {
                // SAFETY: the memory stays until the pass is over; the stream outlives the reducer.
                unsafe { reducer.ready(index, gradient.buf(), stream.raw()) }.unwrap();
            }
            #[expect(unsafe_code, reason = "the reducer's contract")]
            // SAFETY: as above.
            unsafe {
                reducer.finish(stream.raw()).unwrap();
            }
            stream.sync();
            reducer.wait().unwrap();
            for i in 0..4 {
                let average = read::<f32>(reducer.grad(i).unwrap());
                assert_eq!(average, vec![1.0 + (pass * i) as f32; 5 + i]);
            }
            reducer.zero_grad();
        }
        drop(reducer);
    });
    finish(session);
}
