//! HCCL's rules, each broken once, and what it computes.

use std::mem::MaybeUninit;
use std::thread;
use std::time::Duration;

use half::{bf16, f16};

use super::*;

/// Runs `rank` as each rank of a communicator, a thread and a device each.
fn ranks<T: Send>(count: u32, rank: impl Fn(u32, HcclComm, AclrtStream) -> T + Sync) -> Vec<T> {
    on_device(0);
    let info = root_info();
    let run = |at: u32| {
        on_device(at as i32);
        let (comm, stream) = (join(count, &info, at).unwrap(), new_stream());
        let out = rank(at, comm, stream);
        // The stream may have failed on purpose.
        drop(synchronize(stream));
        // SAFETY: of `join`, and nothing is left to do.
        unsafe { npu_sim::hccl().HcclCommDestroy(comm) }.unwrap();
        end_stream(stream);
        out
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|at| scope.spawn(move || run(at))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn root_info() -> HcclRootInfo {
    let mut info = MaybeUninit::uninit();
    // SAFETY: writes to a local, all of it.
    unsafe { npu_sim::hccl().HcclGetRootInfo(info.as_mut_ptr()) }.unwrap();
    // SAFETY: written just now.
    unsafe { info.assume_init() }
}

fn join(count: u32, info: &HcclRootInfo, rank: u32) -> Result<HcclComm> {
    let (mut comm, config) = (HcclComm::NULL, HcclCommConfig::default());
    // SAFETY: reads and writes locals.
    unsafe {
        npu_sim::hccl().HcclCommInitRootInfoConfig(
            count,
            info,
            rank,
            &raw const config,
            &raw mut comm,
        )
    }?;
    Ok(comm)
}

/// A communicator whose second rank never does anything.
pub(crate) struct Alone(HcclComm, HcclComm);

impl Alone {
    pub(crate) fn raw(&self) -> HcclComm {
        self.0
    }

    pub(crate) fn end_both(self) {
        for comm in [self.0, self.1] {
            // SAFETY: of `join`.
            unsafe { npu_sim::hccl().HcclCommDestroy(comm) }.unwrap();
        }
    }
}

pub(crate) fn alone_of_two(device: i32) -> Alone {
    let info = root_info();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            on_device(device);
            join(2, &info, 1).unwrap()
        });
        let one = join(2, &info, 0).unwrap();
        Alone(one, other.join().unwrap())
    })
}

#[test]
fn every_collective_is_what_its_name_says() {
    let sim = session();
    ranks(3, |rank, comm, stream| {
        let (small, large) = (malloc(8), malloc(24));
        let mine = [rank as f32 + 1.0, 10.0 * rank as f32];
        let (f32s, sum) = (HcclDataType::FP32, HcclReduceOp::SUM);
        let hccl = npu_sim::hccl();
        let done = |what: Result<()>| {
            what.unwrap();
            synchronize(stream).unwrap();
        };
        upload(small, &mine);
        // SAFETY: two numbers per rank, here and below six in the larger buffer.
        done(unsafe { hccl.HcclAllReduce(small, small, 2, f32s, sum, comm, stream) });
        assert_eq!(download::<f32>(small, 2), [6.0, 30.0]);
        upload(small, &mine);
        // SAFETY: as above.
        done(unsafe { hccl.HcclAllGather(small, large, 2, f32s, comm, stream) });
        assert_eq!(download::<f32>(large, 6), [1.0, 0.0, 2.0, 10.0, 3.0, 20.0]);
        // SAFETY: as above.
        done(unsafe { hccl.HcclReduceScatter(large, small, 2, f32s, sum, comm, stream) });
        let expected = [3.0 * (rank as f32 + 1.0), 30.0 * rank as f32];
        assert_eq!(download::<f32>(small, 2), expected);
        upload(small, &mine);
        // SAFETY: as above.
        done(unsafe { hccl.HcclBroadcast(small, 2, f32s, 1, comm, stream) });
        assert_eq!(download::<f32>(small, 2), [2.0, 10.0]);
        upload(small, &mine);
        let most = HcclReduceOp::MAX;
        // SAFETY: as above.
        done(unsafe { hccl.HcclReduce(small, large, 2, f32s, most, 2, comm, stream) });
        if rank == 2 {
            assert_eq!(download::<f32>(large, 2), [3.0, 20.0]);
        }
        upload(large, &[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0].map(|x| x + mine[0]));
        // SAFETY: as above.
        done(unsafe { hccl.HcclScatter(large, small, 2, f32s, 0, comm, stream) });
        let first = 1.0 + 2.0 * rank as f32;
        assert_eq!(download::<f32>(small, 2), [first, first + 1.0]);
        // SAFETY: no buffers.
        done(unsafe { hccl.HcclBarrier(comm, stream) });
        free(small);
        free(large);
    });
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn integers_wrap_and_bf16_is_rounded_once() {
    let sim = session();
    ranks(3, |rank, comm, stream| {
        let memory = malloc(8);
        let (hccl, sum) = (npu_sim::hccl(), HcclReduceOp::SUM);
        upload(memory, &[i64::MAX - i64::from(rank)]);
        let dtype = HcclDataType::INT64;
        // SAFETY: one number.
        unsafe { hccl.HcclAllReduce(memory, memory, 1, dtype, sum, comm, stream) }.unwrap();
        synchronize(stream).unwrap();
        let max = i64::MAX;
        let expected = max.wrapping_add(max - 1).wrapping_add(max - 2);
        assert_eq!(download::<i64>(memory, 1), [expected]);
        // One by one each half would be lost to the rounding.
        upload(memory, &[if rank == 0 { bf16::from_f32(256.0) } else { bf16::from_f32(1.0) }]);
        let dtype = HcclDataType::BFP16;
        // SAFETY: one number.
        unsafe { hccl.HcclAllReduce(memory, memory, 1, dtype, sum, comm, stream) }.unwrap();
        synchronize(stream).unwrap();
        assert_eq!(download::<u16>(memory, 1), [bf16::from_f32(258.0).to_bits()]);
        free(memory);
    });
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn messages_meet_in_pairs_and_all_to_all() {
    let sim = session();
    ranks(3, |rank, comm, stream| {
        let (from, to) = (malloc(12), malloc(12));
        let (hccl, int) = (npu_sim::hccl(), HcclDataType::INT32);
        upload(from, &[10 * rank as i32, 10 * rank as i32 + 1, 10 * rank as i32 + 2]);
        // SAFETY: three numbers each.
        unsafe { hccl.HcclAlltoAll(from, 1, int, to, 1, int, comm, stream) }.unwrap();
        synchronize(stream).unwrap();
        let mine = rank as i32;
        assert_eq!(download::<i32>(to, 3), [mine, 10 + mine, 20 + mine]);
        // Rank 0 to 1, two numbers; rank 2 looks on.
        match rank {
            // SAFETY: two of three numbers.
            0 => unsafe { hccl.HcclSend(from, 2, int, 1, comm, stream) }.unwrap(),
            // SAFETY: as above.
            1 => unsafe { hccl.HcclRecv(to, 2, int, 0, comm, stream) }.unwrap(),
            _ => {}
        }
        synchronize(stream).unwrap();
        if rank == 1 {
            assert_eq!(download::<i32>(to, 2), [0, 1]);
        }
        // Around a ring, both directions at once.
        let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
        let item = |direction, buf, remote_rank| HcclSendRecvItem {
            direction,
            buf,
            count: 1,
            data_type: int,
            remote_rank,
        };
        let mut items =
            [item(HcclSendRecvType::SEND, from, next), item(HcclSendRecvType::RECV, to, last)];
        // SAFETY: two items of one number.
        unsafe { hccl.HcclBatchSendRecv(items.as_mut_ptr(), 2, comm, stream) }.unwrap();
        synchronize(stream).unwrap();
        assert_eq!(download::<i32>(to, 1), [10 * last as i32]);
        // Uneven: rank r gets r + 1 numbers of rank 0, none of others.
        let counts: [u64; 3] = if rank == 0 { [1, 1, 1] } else { [0; 3] };
        let offsets = [0u64, 1, 2];
        let (got, got_at) = ([1u64, 0, 0], [0u64; 3]);
        // SAFETY: as many counts and offsets as ranks, and all inside.
        unsafe {
            let [c, o] = [counts.as_ptr().cast(), offsets.as_ptr().cast()];
            let [g, a] = [got.as_ptr().cast(), got_at.as_ptr().cast()];
            hccl.HcclAlltoAllV(from, c, o, int, to, g, a, int, comm, stream)
        }
        .unwrap();
        synchronize(stream).unwrap();
        assert_eq!(download::<i32>(to, 1), [rank as i32]);
        free(from);
        free(to);
    });
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn types_and_operations_depend_on_the_chip() {
    use HcclReduceOp as Op;
    type Type = HcclDataType;
    let cases = [
        (Soc::Ascend910A, Type::FP32, Op::PROD, true),
        (Soc::Ascend910A, Type::INT16, Op::SUM, false),
        (Soc::Ascend910A, Type::BFP16, Op::SUM, false),
        (Soc::Ascend910B, Type::BFP16, Op::SUM, true),
        (Soc::Ascend910B, Type::BFP16, Op::PROD, false),
        (Soc::Ascend910B, Type::INT16, Op::PROD, false),
        (Soc::Ascend910B, Type::UINT8, Op::SUM, false),
        (Soc::Ascend910C, Type::FP64, Op::SUM, false),
    ];
    for (soc, dtype, op, takes) in cases {
        let sim = session_on(soc);
        ranks(1, |_, comm, stream| {
            let memory = malloc(64);
            // SAFETY: eight bytes at most.
            let called = unsafe {
                npu_sim::hccl().HcclAllReduce(memory, memory, 1, dtype, op, comm, stream)
            };
            if takes {
                called.unwrap();
            } else {
                assert_eq!(code(called), 5, "{soc:?} {dtype:?} {op:?}");
            }
            synchronize(stream).unwrap();
            free(memory);
        });
        assert_eq!(sim.finish(), [""; 0]);
    }
}

/// An infinity of one rank is no infinity in the sum, and no flag tells of it.
#[test]
fn sums_of_halves_saturate_where_the_chip_does() {
    for (soc, sum) in [(Soc::Ascend910A, f16::MAX), (Soc::Ascend910B, f16::INFINITY)] {
        let sim = session_on(soc);
        ranks(2, |rank, comm, stream| {
            let own = if rank == 0 { f16::ONE } else { f16::INFINITY };
            let memory = malloc(64);
            upload(memory, &[own.to_bits()]);
            let (hccl, op) = (npu_sim::hccl(), HcclReduceOp::SUM);
            // SAFETY: one number of two bytes.
            unsafe { hccl.HcclAllReduce(memory, memory, 1, HcclDataType::FP16, op, comm, stream) }
                .unwrap();
            synchronize(stream).unwrap();
            assert_eq!(download::<u16>(memory, 1), [sum.to_bits()]);
            free(memory);
        });
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn ranks_that_disagree_all_fail() {
    let sim = session();
    let codes = ranks(2, |rank, comm, stream| {
        let memory = malloc(64);
        let count = 1 + u64::from(rank);
        let (hccl, f32s, sum) = (npu_sim::hccl(), HcclDataType::FP32, HcclReduceOp::SUM);
        // SAFETY: at most two numbers; that the ranks give different counts is the mistake.
        unsafe { hccl.HcclAllReduce(memory, memory, count, f32s, sum, comm, stream) }.unwrap();
        assert_eq!(code(synchronize(stream)), 507_015);
        let mut error = HcclResult::SUCCESS;
        // SAFETY: writes to a local.
        unsafe { hccl.HcclGetCommAsyncError(comm, &raw mut error) }.unwrap();
        free(memory);
        error.0
    });
    assert_eq!(codes, [1, 1]);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_receive_without_a_send_times_out_and_is_told_later() {
    let sim = start(Config { execute_timeout: Duration::from_millis(50), ..Config::default() });
    let codes = ranks(2, |rank, comm, stream| {
        let memory = malloc(64);
        let mut error = HcclResult(-1);
        let hccl = npu_sim::hccl();
        if rank == 1 {
            // SAFETY: one byte; nobody sends is the mistake.
            unsafe { hccl.HcclRecv(memory, 1, HcclDataType::INT8, 0, comm, stream) }.unwrap();
            assert_eq!(code(synchronize(stream)), 507_015);
        }
        // SAFETY: writes to a local.
        unsafe { hccl.HcclGetCommAsyncError(comm, &raw mut error) }.unwrap();
        free(memory);
        error.0
    });
    assert_eq!(codes, [0, 9]);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn who_never_comes_is_waited_for_only_so_long() {
    let sim = start(Config { connect_timeout: Duration::from_millis(50), ..Config::default() });
    on_device(0);
    let info = root_info();
    assert_eq!(code(join(2, &info, 0)), 9);
    assert_eq!(code(join(2, &info, 2)), 1);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn two_ranks_of_one_number_do_not_start() {
    let sim = session();
    on_device(0);
    let info = root_info();
    let codes = thread::scope(|scope| {
        let threads = [0, 1].map(|device| {
            scope.spawn(move || {
                on_device(device);
                code(join(2, &info, 0))
            })
        });
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(codes, [1, 1]);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_configuration_is_checked() {
    let sim = session();
    on_device(0);
    let (info, hccl) = (root_info(), npu_sim::hccl());
    let try_with = |config: &HcclCommConfig| {
        let mut comm = HcclComm::NULL;
        // SAFETY: reads and writes locals.
        code(unsafe {
            hccl.HcclCommInitRootInfoConfig(1, &raw const info, 0, config, &raw mut comm)
        })
    };
    let right = HcclCommConfig::default();
    assert_eq!(try_with(&HcclCommConfig { magic: 1, ..right }), 1);
    assert_eq!(try_with(&HcclCommConfig { size: 299, ..right }), 1);
    one_violation(&sim, "too short");
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn one_process_may_make_all_communicators() {
    let sim = session();
    on_device(0);
    let (mut devices, mut comms) = ([0, 1], [HcclComm::NULL; 2]);
    let hccl = npu_sim::hccl();
    // SAFETY: two devices, room for two communicators.
    unsafe { hccl.HcclCommInitAll(2, devices.as_mut_ptr(), comms.as_mut_ptr()) }.unwrap();
    for (rank, comm) in comms.into_iter().enumerate() {
        let (mut at, mut of) = (9, 9);
        // SAFETY: writes to locals.
        unsafe { hccl.HcclGetRankId(comm, &raw mut at) }.unwrap();
        // SAFETY: writes to locals.
        unsafe { hccl.HcclGetRankSize(comm, &raw mut of) }.unwrap();
        assert_eq!((at as usize, of), (rank, 2));
        // SAFETY: of above.
        unsafe { hccl.HcclCommDestroy(comm) }.unwrap();
    }
    // SAFETY: the simulator only looks it up.
    assert_eq!(code(unsafe { hccl.HcclCommDestroy(comms[0]) }), 1);
    one_violation(&sim, "does not exist");
    // SAFETY: null is a status.
    assert_eq!(code(unsafe { hccl.HcclCommDestroy(HcclComm::NULL) }), 2);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let sim = session();
    on_device(0);
    let alone = alone_of_two(1);
    on_device(1);
    let stream = new_stream();
    // SAFETY: the stream's device is the mistake.
    assert_eq!(code(unsafe { npu_sim::hccl().HcclBarrier(alone.raw(), stream) }), 1);
    one_violation(&sim, "another device");
    alone.end_both();
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_suspended_communicator_takes_nothing() {
    let sim = session();
    ranks(1, |_, comm, stream| {
        let hccl = npu_sim::hccl();
        // SAFETY: a communicator.
        unsafe { hccl.HcclCommSuspend(comm) }.unwrap();
        // SAFETY: as above.
        assert_eq!(code(unsafe { hccl.HcclBarrier(comm, stream) }), 22);
        // SAFETY: as above.
        unsafe { hccl.HcclCommResume(comm) }.unwrap();
        // SAFETY: as above.
        unsafe { hccl.HcclBarrier(comm, stream) }.unwrap();
        synchronize(stream).unwrap();
    });
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn work_that_a_stream_drops_does_not_hold_up_others() {
    let sim = session();
    ranks(1, |_, comm, stream| {
        let hccl = npu_sim::hccl();
        // SAFETY: a communicator and a stream.
        unsafe { hccl.HcclBarrier(comm, stream) }.unwrap();
        // SAFETY: the device exists.
        unsafe { acl().aclrtDeviceTaskAbort(0, 0) }.unwrap();
        // SAFETY: as above.
        unsafe { hccl.HcclBarrier(comm, stream) }.unwrap();
        // The first was dropped, so the peers cannot be in step any more.
        assert_eq!(code(synchronize(stream)), 107_020);
        let mut error = HcclResult::SUCCESS;
        // SAFETY: writes to a local.
        unsafe { hccl.HcclGetCommAsyncError(comm, &raw mut error) }.unwrap();
        assert_eq!(error.0, 4);
    });
    assert_eq!(sim.finish(), [""; 0]);
}
