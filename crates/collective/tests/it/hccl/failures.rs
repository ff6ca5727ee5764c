//! Failures on NPUs: the right error on every rank, in time, and the communicator destroyed once.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use collective::hccl::Config;
use collective::{Error, GroupOptions, ProcessGroup, ReduceOp, Result, device::DeviceWork};
use npu_sim::{Config as Simulated, Session, start};

use super::fake::{Memory, Stream, finish, play_all};
use crate::common::DEADLINE;

const TIMEOUT: Duration = Duration::from_millis(1500);

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
/// that every rank's communicator was destroyed once, nothing is left, and the group is poisoned.
fn failing(
    session: Session,
    world: usize,
    timeout: Duration,
    config: &Config,
    rank: impl Fn(&mut Rank<'_>) -> Result<()> + Sync,
) -> Vec<Error> {
    let options = GroupOptions::default().with_timeout(timeout);
    let all_here = Barrier::new(world);
    let errors = play_all(world, &options, config, |group, stream| {
        let mut memory = Memory::new(vec![1.0; 100]);
        let mut this = Rank { group: &group, stream, memory: &mut memory };
        this.all_reduce(100).unwrap().wait().unwrap();
        // A failure would also fail the first operation on a rank that has not completed it.
        all_here.wait();
        let error = rank(&mut this).unwrap_err();
        let later = this.all_reduce(1).unwrap_err();
        assert!(matches!(&later, Error::Poisoned(_)), "{later}");
        group.barrier().unwrap_err();
        let record = group.flight_record().to_string();
        assert!(!record.contains("under way"), "{error}\n{record}");
        // An abort may leave work in the stream that uses the memory.
        stream.sync();
        error
    });
    assert_eq!(session.calls("HcclCommDestroy"), world);
    finish(session);
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
    let session = start(Simulated::default());
    let errors = failing(session, 4, TIMEOUT, &Config::default(), |this| {
        if this.rank() == 1 {
            return until_failure(this);
        }
        // Ranks arrive at different times; a waiting rank is not missing.
        std::thread::sleep(Duration::from_millis(300 * this.rank() as u64));
        this.all_reduce(10)?.wait()
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

/// HCCL's own timeout expires before the group's: the error names the missing ranks and the
/// variable to set.
#[test]
fn hccl_exec_timeout_error_names_missing_rank_and_variable() {
    let execute_timeout = Duration::from_millis(700);
    let session = start(Simulated { execute_timeout, ..Simulated::default() });
    let errors = failing(session, 3, DEADLINE, &Config::default(), |this| {
        if this.rank() == 2 {
            return until_failure(this);
        }
        this.all_reduce(10)?.wait()
    });
    for (rank, error) in errors.iter().enumerate() {
        match poisoned_by(error) {
            Error::Aborted { reason, .. } if rank == 2 => {
                assert!(reason.contains("still missing rank 2"), "{reason}");
                assert!(reason.contains("HCCL_EXEC_TIMEOUT"), "{reason}");
            }
            Error::Timeout { op, missing, .. } if rank != 2 => {
                assert!(op.starts_with("all_reduce #1 of group default"), "{op}");
                assert_eq!(*missing, [2]);
            }
            error => panic!("rank {rank}: {error}"),
        }
    }
    let text = format!("{} {}", errors[0], errors[1]);
    assert!(text.contains("HCCL_EXEC_TIMEOUT"), "{text}");
}

#[test]
fn a_missing_message_names_its_sender() {
    let session = start(Simulated::default());
    let errors = failing(session, 3, TIMEOUT, &Config::default(), |this| {
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

/// HCCL itself reports only that a parameter is wrong.
#[test]
fn mismatched_calls_are_reported_on_all_ranks() {
    let session = start(Simulated::default());
    let errors = failing(session, 3, DEADLINE, &Config::default(), |this| {
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
    let session = start(Simulated::default());
    let config = Config::default().with_checks(true);
    let errors = failing(session, 3, DEADLINE, &config, |this| {
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
    for error in &errors {
        let Error::Mismatch { field: "verb", by_rank, .. } = error else { panic!("{error}") };
        assert_eq!(by_rank[1].1, "broadcast of 100 f32, root 0");
    }
}

/// Every error code of HCCL, from a call and asynchronously: the rank where it happens returns it,
/// the others report it as that rank's failure.
#[test]
fn every_hccl_error_fails_all_ranks() {
    let kinds = [
        "PARA",
        "PTR",
        "MEMORY",
        "INTERNAL",
        "NOT_SUPPORT",
        "NOT_FOUND",
        "UNAVAIL",
        "SYSCALL",
        "TIMEOUT",
        "OPEN_FILE_FAILURE",
        "TCP_CONNECT",
        "ROCE_CONNECT",
        "TCP_TRANSFER",
        "ROCE_TRANSFER",
        "RUNTIME",
        "DRV",
        "PROFILING",
        "CCE",
        "NETWORK",
        "AGAIN",
        "REMOTE",
    ];
    for (code, kind) in (1..).zip(kinds) {
        // Only every third asynchronously, since each takes several polls of the peers.
        let functions = ["HcclAllReduce", "HcclGetCommAsyncError"];
        for function in &functions[..if code % 3 == 0 { 2 } else { 1 }] {
            let session = start(Simulated::default());
            let faulty = Barrier::new(2);
            let planned = &session;
            let options = GroupOptions::default().with_timeout(DEADLINE);
            let errors = play_all(2, &options, &Config::default(), |group, stream| {
                let mut memory = Memory::new(vec![1.0; 10]);
                let mut this = Rank { group: &group, stream, memory: &mut memory };
                this.all_reduce(10).unwrap().wait().unwrap();
                if faulty.wait().is_leader() {
                    planned.fail(function, 1, code);
                }
                faulty.wait();
                let error = this.all_reduce(10).and_then(|work| work.wait()).err();
                let error = error.or_else(|| until_failure(&this).err()).unwrap();
                stream.sync();
                poisoned_by(&error).clone()
            });
            assert_eq!(session.calls("HcclCommDestroy"), 2, "{kind} of {function}: {errors:?}");
            finish(session);
            let is_own = |error: &Error| matches!(error, Error::Backend { .. });
            let own = errors.iter().position(is_own).unwrap_or_else(|| panic!("{errors:?}"));
            let name = format!("HCCL_E_{kind}");
            let Error::Backend { backend, during, name: got, code: number, text } = &errors[own]
            else {
                unreachable!()
            };
            assert_eq!(
                (*backend, &during[..], &got[..], *number),
                ("hccl", *function, &name[..], code)
            );
            assert_eq!(text.contains("HCCL_EXEC_TIMEOUT"), kind == "TIMEOUT", "{text}");
            match &errors[1 - own] {
                Error::Aborted { by, reason } => {
                    assert!(*by == own && reason.contains(&name), "{reason}");
                }
                error => panic!("{error}"),
            }
        }
    }
}

#[test]
fn abort_reaches_all_ranks_and_ends_operations_in_flight() {
    let session = start(Simulated::default());
    let errors = failing(session, 3, DEADLINE, &Config::default(), |this| {
        if this.rank() == 2 {
            std::thread::sleep(Duration::from_millis(50));
            this.group.abort("enough");
            return until_failure(this);
        }
        this.all_reduce(10)?.wait()
    });
    for error in &errors {
        let error = poisoned_by(error);
        let Error::Aborted { by: 2, reason } = error else { panic!("{error}") };
        assert_eq!(reason, "enough");
    }
}

#[test]
fn a_failure_on_the_host_fails_device_operations() {
    let session = start(Simulated::default());
    let errors = failing(session, 2, DEADLINE, &Config::default(), |this| {
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

/// If the group may not abort the device's tasks, an error waits for HCCL's own timeout.
#[test]
fn without_device_abort_the_error_waits_for_hccls_timeout() {
    let execute_timeout = Duration::from_secs(2);
    let session = start(Simulated { execute_timeout, ..Simulated::default() });
    let config = Config::default().with_device_abort(false);
    let begun = Instant::now();
    let timeout = Duration::from_millis(700);
    let errors = failing(session, 2, timeout, &config, |this| {
        if this.rank() == 1 {
            return until_failure(this);
        }
        this.all_reduce(10)?.wait()
    });
    assert!(begun.elapsed() >= execute_timeout);
    assert!(matches!(&errors[0], Error::Timeout { missing, .. } if *missing == [1]), "{errors:?}");
}

/// If HCCL does not time out either, the error says that the memory may still be in use.
#[test]
fn memory_still_in_use_by_the_device_is_reported() {
    let session = start(Simulated::default());
    let config = Config::default().with_device_abort(false);
    let options = GroupOptions::default().with_timeout(Duration::from_millis(700));
    play_all(2, &options, &config, |group, stream| {
        let mut memory = Memory::new(vec![1.0; 10]);
        let mut this = Rank { group: &group, stream, memory: &mut memory };
        if this.rank() == 1 {
            until_failure(&this).unwrap_err();
            return;
        }
        let error = this.all_reduce(10).unwrap().wait().unwrap_err();
        let Error::Backend { during, text, .. } = &error else { panic!("{error}") };
        assert_eq!(during, "HcclCommDestroy");
        let after = "not completed after 5.";
        for part in [after, "may still use the memory", "HCCL_EXEC_TIMEOUT", "missing rank 1"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // Lets the stream end.
        #[expect(unsafe_code, reason = "aborts the tasks, which the group may not do")]
        // SAFETY: the device exists.
        unsafe { npu_sim::acl().aclrtDeviceTaskAbort(0, 0) }.unwrap();
        stream.sync();
    });
    assert_eq!(session.calls("HcclCommDestroy"), 1);
    let left = session.finish();
    assert_eq!(left.last().unwrap(), "1 communicators are left", "{left:?}");
}

#[test]
fn drop_finishes_operations_and_destroys_the_communicator() {
    let (session, options) =
        (start(Simulated::default()), GroupOptions::default().with_timeout(DEADLINE));
    play_all(3, &options, &Config::default(), |group, stream| {
        let mut memory = Memory::new(vec![1_i32; 10]);
        let calls = group.device().unwrap().all_reduce(memory.buf(), ReduceOp::Sum).unwrap();
        let work = calls.enqueue(stream.raw()).unwrap();
        drop(group);
        assert!(matches!(work.settled(), Some(Ok(()))));
        assert_eq!(memory.numbers(), [3; 10]);
    });
    assert_eq!((session.calls("HcclCommDestroy"), session.calls("aclrtDeviceTaskAbort")), (3, 0));
    finish(session);
}
