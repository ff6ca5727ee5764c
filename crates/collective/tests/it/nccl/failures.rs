//! Failures on devices: the right error on every rank, in time, and one abort per rank.

use std::ops::Range;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use collective::nccl::{Config, connector};
use collective::{
    Error, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result, device::DeviceWork,
};

use super::fake::{Fake, Fault, Memory, Stream, devices};
use crate::common::{DEADLINE, play, wait_for};

const TIMEOUT: Duration = Duration::from_millis(1500);
/// Additional time allowed on a loaded machine.
const SLACK: Duration = Duration::from_secs(10);

struct Rank<'a> {
    group: &'a ProcessGroup,
    stream: &'a Stream,
    memory: &'a mut Memory<f32>,
}

impl Rank<'_> {
    fn all_reduce(&mut self, count: usize) -> Result<DeviceWork> {
        let buf = self.memory.buf().part(0..count).unwrap();
        self.group.device()?.all_reduce(buf, ReduceOp::Sum)?.enqueue(self.stream.raw())
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }
}

/// Calls `rank` on every rank after a successful first operation and returns the errors. Checks
/// that every rank's communicator was aborted once and not destroyed, and that the group is
/// poisoned.
fn failing(
    devices: Range<u32>,
    config: &Config,
    rank: impl Fn(&mut Rank<'_>) -> Result<()> + Sync,
) -> Vec<Error> {
    let options = GroupOptions::default().with_timeout(TIMEOUT);
    let all_here = Barrier::new(devices.len());
    let groups = Fake::get().groups(devices.clone(), &options, config);
    let groups = groups.into_iter().map(Result::unwrap).collect();
    let errors = play(groups, |group| {
        let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1.0; 100]));
        let mut this = Rank { group: &group, stream: &stream, memory: &mut memory };
        this.all_reduce(100).unwrap().wait().unwrap();
        // A failure would also fail the first operation on a rank that has not completed it.
        all_here.wait();
        let error = rank(&mut this).unwrap_err();
        let later = this.all_reduce(1).unwrap_err();
        assert!(matches!(&later, Error::Poisoned(_)), "{later}");
        group.barrier().unwrap_err();
        let record = group.flight_record().to_string();
        assert!(!record.contains("under way"), "{error}\n{record}");
        error
    });
    for device in devices {
        assert_eq!(Fake::get().calls("ncclCommAbort", device), 1, "aborts of device {device}");
        assert_eq!(Fake::get().calls("ncclCommDestroy", device), 0);
        assert_eq!(Fake::get().retained(device), 0);
    }
    errors
}

/// Waits until the group has failed for this rank, which has no operation in flight.
fn until_failure(this: &Rank<'_>) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < DEADLINE {
        let _ = this.group.device()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn poisoned_by(error: &Error) -> &Error {
    match error {
        Error::Poisoned(cause) => cause,
        error => error,
    }
}

#[test]
fn a_missing_rank_is_named_by_all_other_ranks() {
    let errors = failing(devices(4), &Config::default(), |this| {
        if this.rank() == 1 {
            return until_failure(this);
        }
        // Ranks arrive at different times; a waiting rank is not missing.
        std::thread::sleep(Duration::from_millis(300 * this.rank() as u64));
        let start = Instant::now();
        let result = this.all_reduce(10)?.wait();
        assert!(start.elapsed() < TIMEOUT + SLACK, "{:?}", start.elapsed());
        result
    });
    for (rank, error) in errors.iter().enumerate() {
        match poisoned_by(error) {
            Error::Aborted { reason, .. } if rank == 1 => {
                assert!(reason.contains("still missing rank 1"), "{reason}");
            }
            Error::Timeout { op, missing, .. } if rank != 1 => {
                assert_eq!((missing, &op[..]), (&vec![1], "all_reduce #1 of group default"));
            }
            error => panic!("rank {rank}: {error}"),
        }
    }
}

#[test]
fn a_rank_whose_stream_is_blocked_is_named() {
    let errors = failing(devices(2), &Config::default(), |this| {
        if this.rank() == 0 {
            return this.all_reduce(10)?.wait();
        }
        this.stream.block();
        let work = this.all_reduce(10)?;
        until_failure(this).unwrap_err();
        // An abort waits for the operation's work in the stream.
        assert!(work.settled().is_none());
        this.stream.unblock();
        work.wait()
    });
    assert!(matches!(&errors[0], Error::Timeout { missing, .. } if *missing == [1]), "{errors:?}");
    // The timeout of rank 1 may expire first.
    match &errors[1] {
        Error::Aborted { by: 0, reason } => assert!(reason.contains("missing rank 1"), "{reason}"),
        Error::Timeout { missing, .. } => assert_eq!(*missing, [1]),
        error => panic!("{error}"),
    }
}

/// Over TCP, where each rank may be the first to abort, and with a rank that waits in a verb on
/// slices.
#[test]
fn a_missing_rank_is_named_between_machines() {
    let (devices, store) = (devices(3), MemoryStore::new());
    let connect = connector(Fake::get().libraries, Config::default());
    let all_here = Barrier::new(3);
    std::thread::scope(|scope| {
        for (rank, device) in devices.enumerate() {
            let (store, connect) = (Arc::new(store.clone()), Arc::clone(&connect));
            let all_here = &all_here;
            scope.spawn(move || {
                let options = GroupOptions::default().with_timeout(TIMEOUT);
                let options = options.with_host_id(rank.to_string()).with_cuda_device(device);
                let group =
                    ProcessGroup::from_store_with(store, rank, 3, options, connect).unwrap();
                let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1.0; 10]));
                let mut this = Rank { group: &group, stream: &stream, memory: &mut memory };
                this.all_reduce(10).unwrap().wait().unwrap();
                all_here.wait();
                if rank == 1 {
                    let error = group.with_timeout(DEADLINE).barrier().unwrap_err();
                    let Error::Aborted { reason, .. } = &error else { panic!("{error}") };
                    assert!(reason.contains("still missing rank 1"), "{reason}");
                } else {
                    let error = this.all_reduce(10).unwrap().wait().unwrap_err();
                    let Error::Timeout { op, missing, .. } = &error else { panic!("{error}") };
                    assert_eq!((missing, &op[..]), (&vec![1], "all_reduce #1 of group default"));
                }
                // The others may still exchange why they failed.
                all_here.wait();
            });
        }
    });
}

/// A list that another stream has reached, and even completed, says nothing about an earlier one.
#[test]
fn a_rank_with_one_blocked_stream_of_two_is_named() {
    let errors = failing(devices(2), &Config::default(), |this| {
        let (side, mut memory) = (Fake::get().stream(), Memory::new(vec![1.0_f32; 4]));
        if this.rank() == 1 {
            this.stream.block();
        }
        let blocked = this.all_reduce(10)?;
        let calls = this.group.device()?.all_reduce(memory.buf(), ReduceOp::Sum)?;
        calls.enqueue(side.raw())?.wait()?;
        if this.rank() == 1 {
            until_failure(this).unwrap_err();
            this.stream.unblock();
        }
        blocked.wait()
    });
    assert!(matches!(&errors[0], Error::Timeout { missing, .. } if *missing == [1]), "{errors:?}");
}

/// The blocked stream may still use the memory; the error says so, and in time.
#[test]
fn an_abort_that_hangs_is_reported() {
    let (devices, options) = (devices(2), GroupOptions::default().with_timeout(TIMEOUT));
    let groups = Fake::get().groups(devices, &options, &Config::default());
    let groups = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1_u8; 10]));
        if group.rank() == 1 {
            stream.block();
        }
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        let error = calls.enqueue(stream.raw()).unwrap().wait().unwrap_err();
        if group.rank() == 0 {
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [1]), "{error}");
            return;
        }
        let Error::Backend { during, text, .. } = &error else { panic!("{error}") };
        assert_eq!(during, "ncclCommAbort");
        assert!(text.contains("may still use the memory"), "{text}");
        assert!(text.contains("missing rank 1"), "{text}");
    });
}

/// An abort that fails has ended nothing, so the error says that the memory may still be in use.
#[test]
fn an_abort_that_fails_is_reported() {
    let (devices, options) = (devices(2), GroupOptions::default().with_timeout(TIMEOUT));
    Fake::get().fault("ncclCommAbort", devices.start + 1, 1, Fault::Return(3));
    let groups = Fake::get().groups(devices, &options, &Config::default());
    let groups = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1_u8; 10]));
        if group.rank() == 0 {
            return drop(until_failure(&Rank {
                group: &group,
                stream: &stream,
                memory: &mut Memory::new(vec![]),
            }));
        }
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        let error = calls.enqueue(stream.raw()).unwrap().wait().unwrap_err();
        let Error::Backend { during, name, text, .. } = &error else { panic!("{error}") };
        assert_eq!((&during[..], &name[..]), ("ncclCommAbort", "ncclInternalError"));
        assert!(text.contains("may still use the memory"), "{text}");
        assert!(text.contains("missing rank 0"), "{text}");
    });
}

#[test]
fn a_missing_message_names_its_sender() {
    let errors = failing(devices(3), &Config::default(), |this| {
        if this.rank() != 2 {
            return until_failure(this);
        }
        let (buf, stream) = (this.memory.buf(), this.stream.raw());
        this.group.device()?.recv(buf, 0)?.enqueue(stream)?.wait()
    });
    let Error::Timeout { op, missing, .. } = &errors[2] else { panic!("{errors:?}") };
    assert_eq!((missing, &op[..]), (&vec![0], "batch_isend_irecv #0 of group default"));
    let told = poisoned_by(&errors[1]);
    assert!(matches!(told, Error::Timeout { missing, .. } if *missing == [0]), "{told}");
    assert!(matches!(poisoned_by(&errors[0]), Error::Aborted { by: 2, .. }), "{errors:?}");
}

#[test]
fn a_message_whose_stream_is_blocked_names_its_sender() {
    let errors = failing(devices(2), &Config::default(), |this| {
        let (buf, stream) = (this.memory.buf(), this.stream.raw());
        if this.rank() == 0 {
            return this.group.device()?.recv(buf, 1)?.enqueue(stream)?.wait();
        }
        this.stream.block();
        let work = this.group.device()?.send(buf, 0)?.enqueue(stream)?;
        until_failure(this).unwrap_err();
        this.stream.unblock();
        work.wait()
    });
    assert!(matches!(&errors[0], Error::Timeout { missing, .. } if *missing == [1]), "{errors:?}");
}

#[test]
fn mismatched_calls_are_reported_at_the_timeout() {
    let errors = failing(devices(3), &Config::default(), |this| {
        let count = if this.rank() == 2 { 11 } else { 10 };
        this.all_reduce(count)?.wait()
    });
    for error in &errors {
        let Error::Mismatch { field: "count", by_rank, .. } = error else { panic!("{error}") };
        let calls: Vec<_> = by_rank.iter().map(|(_, call)| &call[..]).collect();
        let [ten, eleven] = ["all_reduce of 10 f32, sum", "all_reduce of 11 f32, sum"];
        assert_eq!(calls, [ten, ten, eleven]);
    }
}

#[test]
fn with_checks_mismatched_calls_change_nothing() {
    let start = Instant::now();
    let config = Config::default().with_checks(true);
    let errors = failing(devices(3), &config, |this| {
        let before = this.memory.numbers();
        let (buf, stream) = (this.memory.buf(), this.stream.raw());
        let device = this.group.device()?;
        let calls = match this.rank() {
            1 => device.broadcast(buf, 0)?,
            _ => device.all_reduce(buf, ReduceOp::Sum)?.broadcast(buf.part(0..0)?, 0)?,
        };
        let error = calls.enqueue(stream).map(drop);
        assert_eq!(this.memory.numbers(), before);
        error
    });
    assert!(start.elapsed() < SLACK);
    for error in &errors {
        let Error::Mismatch { field: "verb", by_rank, op } = error else { panic!("{error}") };
        assert_eq!(by_rank[1].1, "broadcast of 100 f32, root 0");
        assert_eq!(by_rank[2].1, "all_reduce of 100 f32, sum and broadcast of 0 f32, root 0");
        assert!(op.ends_with("#1 of group default"), "{op}");
    }
}

#[test]
fn with_checks_calls_queued_before_enqueue_are_compared_first() {
    let options = GroupOptions::default().with_timeout(DEADLINE);
    let groups = Fake::get().groups(devices(2), &options, &Config::default().with_checks(true));
    play(groups.into_iter().map(Result::unwrap).collect(), |group| {
        let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1.0_f32; 4]));
        for round in 0..50 {
            let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Max).unwrap();
            let queued = group.all_reduce_async(vec![1.0_f32; 4], ReduceOp::Max).unwrap();
            // Lets one rank's queue run first.
            if group.rank() == round % 2 {
                std::thread::sleep(Duration::from_millis(2));
            }
            let work = calls.enqueue(stream.raw()).unwrap();
            queued.wait().unwrap();
            work.wait().unwrap();
        }
    });
}

/// Injects an NCCL error on rank 1, which returns it; the other ranks report it as rank 1's
/// failure.
fn nccl_fails(function: &str, fault: Fault, during: &str, code: i32) {
    let devices = devices(3);
    // The first is the join's, the second that of `failing`.
    Fake::get().fault(function, devices.start + 1, 3, fault);
    let errors = failing(devices, &Config::default(), |this| this.all_reduce(10)?.wait());
    let Error::Backend { backend, during: of, code: got, name, text } = &errors[1] else {
        panic!("{:?}", errors[1])
    };
    assert_eq!((*backend, &of[..], *got), ("nccl", during, code));
    assert!(name.starts_with("nccl"), "{name}");
    // NCCL's last error is per process, so its text may come from another test.
    assert!(text.contains(": an injected fault in "), "{text}");
    for rank in [0, 2] {
        let Error::Aborted { by: 1, reason } = &errors[rank] else { panic!("{:?}", errors[rank]) };
        assert!(reason.contains(during) && reason.contains(name), "{reason}");
    }
}

#[test]
fn a_failed_nccl_call_fails_all_ranks() {
    nccl_fails("ncclAllReduce", Fault::Return(2), "ncclAllReduce", 2);
    nccl_fails("launch", Fault::Return(1), "ncclGroupEnd", 1);
}

#[test]
fn an_asynchronous_nccl_error_fails_all_ranks() {
    nccl_fails("ncclAllReduce", Fault::Async(3), "ncclCommGetAsyncError", 3);
    nccl_fails("launch", Fault::Async(6), "ncclCommGetAsyncError", 6);
}

/// While an operation is in flight and no rank is in a call, the watchdog polls for errors.
#[test]
fn an_asynchronous_error_is_detected_while_ranks_wait() {
    let devices = devices(2);
    let first = devices.start;
    let errors = failing(devices, &Config::default(), |this| {
        if this.rank() == 1 {
            return until_failure(this);
        }
        let work = this.all_reduce(10)?;
        Fake::get().fault("ncclCommGetAsyncError", first, 1, Fault::Async(6));
        work.wait()
    });
    let Error::Backend { during, code: 6, .. } = &errors[0] else { panic!("{}", errors[0]) };
    assert_eq!(during, "ncclCommGetAsyncError");
    let Error::Aborted { by: 0, reason } = poisoned_by(&errors[1]) else { panic!("{}", errors[1]) };
    assert!(reason.contains("ncclRemoteError"), "{reason}");
}

/// NVIDIA's libraries capture so, for example while an average is pending.
#[test]
fn global_captures_stay_valid_while_the_watchdog_polls() {
    let (fake, options) = (Fake::alone(), GroupOptions::default().with_timeout(DEADLINE));
    let groups = fake.groups(0..2, &options, &Config::default());
    let groups = groups.into_iter().map(Result::unwrap).collect();
    let all_here = Barrier::new(2);
    play(groups, |group| {
        let (stream, mut memory) = (fake.stream(), Memory::new(vec![1.0_f32; 4]));
        if group.rank() == 1 {
            stream.block();
        }
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        let work = calls.enqueue(stream.raw()).unwrap();
        all_here.wait();
        let valid = group.rank() == 1 || {
            let polls = || fake.calls("cuEventQuery", 0);
            let (last, _) = (polls() + 10, fake.capture(true));
            let polled = || (polls() > last || group.device().is_err()).then_some(());
            wait_for(polled, "polls of the watchdog");
            fake.capture(false)
        };
        all_here.wait();
        stream.unblock();
        work.wait().unwrap();
        assert!(valid);
        assert_eq!(memory.numbers(), [2.0; 4]);
    });
}

#[test]
fn a_cuda_driver_error_fails_all_ranks() {
    let devices = devices(2);
    Fake::get().fault("cuEventRecord", devices.start, 4, Fault::Return(719));
    let errors = failing(devices, &Config::default(), |this| this.all_reduce(10)?.wait());
    assert_eq!(
        errors[0].to_string(),
        "cuEventRecord: CUDA_ERROR_LAUNCH_FAILED (719): the CUDA driver returned an error"
    );
    assert!(matches!(&errors[1], Error::Aborted { by: 0, .. }), "{errors:?}");
}

#[test]
fn an_operation_that_hangs_on_all_ranks_times_out() {
    let devices = devices(2);
    Fake::get().fault("launch", devices.start, 3, Fault::Hang);
    let start = Instant::now();
    let errors = failing(devices, &Config::default(), |this| this.all_reduce(10)?.wait());
    assert!(start.elapsed() < TIMEOUT + SLACK);
    let told = |error: &Error| match error {
        Error::Backend { text, .. } | Error::Aborted { reason: text, .. } => {
            text.contains("the streams of all ranks have reached it")
        }
        _ => false,
    };
    assert!(errors.iter().all(told), "{errors:?}");
}

#[test]
fn a_blocked_call_is_aborted_from_another_thread() {
    let devices = devices(2);
    Fake::get().fault("ncclAllReduce", devices.start, 3, Fault::Block);
    let start = Instant::now();
    let errors = failing(devices, &Config::default(), |this| this.all_reduce(10)?.wait());
    assert!(start.elapsed() < TIMEOUT + SLACK);
    let timed_out = |error: &Error| {
        matches!(error, Error::Backend { name, .. } if name == "timed out")
            || matches!(error, Error::Aborted { reason, .. } if reason.contains("timed out"))
    };
    assert!(errors.iter().all(timed_out), "{errors:?}");
}

#[test]
fn abort_reaches_all_ranks_and_ends_operations_in_flight() {
    let start = Instant::now();
    let errors = failing(devices(3), &Config::default(), |this| {
        if this.rank() == 2 {
            std::thread::sleep(Duration::from_millis(50));
            this.group.abort("enough");
            return until_failure(this);
        }
        this.all_reduce(10)?.wait()
    });
    assert!(start.elapsed() < SLACK);
    for error in &errors {
        let error = poisoned_by(error);
        let Error::Aborted { by: 2, reason } = error else { panic!("{error}") };
        assert_eq!(reason, "enough");
    }
}

#[test]
fn a_failure_on_the_host_fails_device_operations() {
    let errors = failing(devices(2), &Config::default(), |this| {
        if this.rank() == 1 {
            return this.group.barrier().and_then(|()| until_failure(this));
        }
        let work = this.all_reduce(10)?;
        this.group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err();
        work.wait()
    });
    assert!(
        errors.iter().all(|e| matches!(e, Error::Mismatch { .. } | Error::Aborted { .. })),
        "{errors:?}"
    );
}

#[test]
fn earlier_stream_work_and_slow_launches_do_not_time_out() {
    let devices = devices(2);
    for device in devices.clone() {
        Fake::get().fault("launch", device, 2, Fault::Progress(40));
    }
    let options = GroupOptions::default().with_timeout(TIMEOUT);
    let groups = Fake::get().groups(devices, &options, &Config::default());
    let groups = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1.0_f32; 10]));
        stream.compute(2200);
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        let work = calls.with_timeout(SLACK).enqueue(stream.raw()).unwrap();
        while !work.wait_timeout(Duration::from_millis(50)).unwrap() {}
        assert_eq!(memory.numbers(), [2.0; 10]);
        // The timeout of a wait does not include the earlier work of the stream.
        stream.compute(100);
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        calls.enqueue(stream.raw()).unwrap().wait().unwrap();
        assert_eq!(memory.numbers(), [4.0; 10]);
    });
}

#[test]
fn drop_finishes_operations_and_destroys_the_communicator() {
    let (devices, options) = (devices(3), GroupOptions::default().with_timeout(DEADLINE));
    for device in devices.clone() {
        Fake::get().fault("ncclCommFinalize", device, 1, Fault::Progress(20));
    }
    let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
    let groups = groups.into_iter().map(Result::unwrap).collect();
    play(groups, |group| {
        let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1_u8; 10]));
        stream.compute(50);
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        let work = calls.enqueue(stream.raw()).unwrap();
        drop(group);
        assert!(matches!(work.settled(), Some(Ok(()))));
        assert_eq!(memory.numbers(), [3; 10]);
    });
    for device in devices {
        assert_eq!(Fake::get().calls("ncclCommDestroy", device), 1);
        assert_eq!(Fake::get().calls("ncclCommAbort", device), 0);
        assert_eq!(Fake::get().retained(device), 0);
    }
}

/// Several threads of every rank abort at once.
#[test]
fn concurrent_aborts_abort_the_communicator_once() {
    let errors = failing(devices(3), &Config::default(), |this| {
        let work = match this.rank() {
            0 => None,
            _ => Some(this.all_reduce(10)?),
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                let group = this.group;
                scope.spawn(move || group.abort("enough"));
            }
        });
        work.map_or_else(|| until_failure(this), |work| work.wait())
    });
    for error in &errors {
        let error = poisoned_by(error);
        let Error::Aborted { reason, .. } = error else { panic!("{error}") };
        assert_eq!(reason, "enough");
    }
}

/// `ncclCommFinalize` fails, at once or later, or never completes.
#[test]
fn a_failed_finalize_ends_in_an_abort() {
    for fault in [Fault::Return(3), Fault::Async(6), Fault::Progress(i32::MAX)] {
        let (devices, options) = (devices(2), GroupOptions::default().with_timeout(TIMEOUT));
        Fake::get().fault("ncclCommFinalize", devices.start, 1, fault);
        let groups = Fake::get().groups(devices.clone(), &options, &Config::default());
        let groups = groups.into_iter().map(Result::unwrap).collect();
        let start = Instant::now();
        play(groups, |group| {
            let (stream, mut memory) = (Fake::get().stream(), Memory::new(vec![1_u8; 10]));
            let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
            calls.enqueue(stream.raw()).unwrap().wait().unwrap();
            drop(group);
        });
        assert!(start.elapsed() < TIMEOUT + SLACK, "{fault:?}");
        for (device, [destroyed, aborted]) in devices.zip([[0, 1], [1, 0]]) {
            assert_eq!(Fake::get().calls("ncclCommDestroy", device), destroyed, "{fault:?}");
            assert_eq!(Fake::get().calls("ncclCommAbort", device), aborted, "{fault:?}");
            assert_eq!(Fake::get().retained(device), 0);
        }
    }
}
