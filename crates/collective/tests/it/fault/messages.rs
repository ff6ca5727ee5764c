//! Failures of point-to-point messages.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use collective::object::broadcast_object;
use collective::{Error, Message, ProcessGroup, ReduceOp, Result};

use super::transports::{TestTransport, transports};
use super::{Calls, SOON, TIMEOUT, at_once, in_time};
use crate::common::{self, play};

/// Rank 0 sends a message that rank 1 does not expect. Every rank gets both calls, in its current
/// call or the next; no byte has changed.
fn unexpected(
    transport: TestTransport,
    world: usize,
    field: &str,
    send: impl Fn(&ProcessGroup, &[f32]) -> Result<()> + Sync,
    receive: impl Fn(&ProcessGroup, &mut [f32]) -> Result<()> + Sync,
) {
    for (count, idle) in [9, transport.large].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        // The first is passed when rank 1 has its error, the second when all ranks have.
        let (told, all, calls) = (Barrier::new(world), Barrier::new(world), Calls::default());
        let wait = || idle.then(|| told.wait());
        play(transport.groups(world, TIMEOUT), |group| {
            let (rank, mut buf) = (group.rank(), vec![7.0_f32; count]);
            group.barrier().unwrap();
            calls.now();
            let result = match rank {
                0 => send(&group, &buf),
                1 => receive(&group, &mut buf),
                _ => Ok(()),
            };
            wait();
            // The send may complete before rank 1 reads the message.
            let result = result.and_then(|()| {
                calls.now();
                match rank {
                    0 => group.barrier(),
                    1 => Ok(()),
                    _ => group.all_reduce_async(vec![1_u8; 9], ReduceOp::Sum)?.wait().map(drop),
                }
            });
            let known = Instant::now();
            all.wait();
            at_once(transport.name, calls.until(known));
            let error = result.unwrap_err();
            let Error::Mismatch { field: got, by_rank, .. } = &error else { panic!("{error}") };
            assert_eq!(*got, field, "{error}");
            let [(0, sent), (1, expected)] = &by_rank[..] else { panic!("{error}") };
            assert!(sent.contains("message") && sent.ends_with("to rank 1"), "{error}");
            assert!(field == "verb" || expected.ends_with("from rank 0"), "{error}");
            assert_eq!(buf, vec![7.0; count]);
            let next = group.send(&[0_u8], (rank + 1) % world).unwrap_err();
            assert!(matches!(next, Error::Poisoned(_)), "{next}");
        });
    }
}

#[test]
fn a_different_message_is_a_mismatch_on_every_rank_and_changes_nothing() {
    for transport in transports() {
        let short = |group: &ProcessGroup, buf: &[f32]| group.send(&buf[1..], 1);
        let long = |group: &ProcessGroup, buf: &[f32]| group.send(&buf.repeat(2), 1);
        let other = |group: &ProcessGroup, buf: &[f32]| group.send(&vec![1_i32; buf.len()], 1);
        // An empty message completes at once over every transport.
        let none = |group: &ProcessGroup, _: &[f32]| group.send::<f32>(&[], 1);
        let receive = |group: &ProcessGroup, buf: &mut [f32]| group.recv(buf, 0);
        for world in [2, 3] {
            unexpected(transport, world, "count", short, receive);
            unexpected(transport, world, "count", long, receive);
            unexpected(transport, world, "count", none, receive);
            unexpected(transport, world, "dtype", other, receive);
        }
        unexpected(
            transport,
            3,
            "dtype",
            |group, _| {
                group.batch_isend_irecv(vec![Message::send(&[1_u8], 1), Message::send(&[1_u64], 1)])
            },
            |group, buf| {
                let (byte, rest) = (&mut [0_u8], &mut buf[..1]);
                group.batch_isend_irecv(vec![Message::recv(byte, 0), Message::recv(rest, 0)])
            },
        );
    }
}

#[test]
fn an_unreceived_message_is_a_mismatch_with_a_collective() {
    for transport in transports() {
        unexpected(
            transport,
            2,
            "verb",
            |group, _| {
                group.send(&[1.0_f32; 4], 1)?;
                group.gather(&mut [], &[1.0_f32; 4], 1)
            },
            |group, buf| group.gather(&mut buf[..8], &[7.0; 4], 1),
        );
    }
}

/// The result of `call` on each of three ranks, which arrives soon after the timeout.
fn late(call: impl Fn(&ProcessGroup) -> Option<Result<()>> + Sync) -> Vec<Option<Error>> {
    let (timeout, base) = (Duration::from_millis(200), Instant::now());
    let ranks = common::threads(3, timeout, |group| {
        let start = Instant::now();
        // Ranks that do not call keep the group until all others have returned.
        let Some(result) = call(&group) else { return (group, None) };
        let error = result.unwrap_err();
        in_time(base, start, timeout);
        let next = group.barrier().unwrap_err();
        assert!(matches!(next, Error::Poisoned(_)), "{next}");
        (group, Some(error))
    });
    ranks.into_iter().map(|(_, error)| error).collect()
}

fn missing(errors: Vec<Option<Error>>, expected: &[usize]) {
    assert!(errors.iter().any(Option::is_some));
    for error in errors.into_iter().flatten() {
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, expected);
    }
}

#[test]
fn only_peers_with_pending_transfers_are_missing() {
    let big = || vec![1.0_f32; 100_000];
    // A message that is not sent, and one that is not received; rank 2 is not involved.
    let errors = late(|group| (group.rank() == 0).then(|| group.recv(&mut [0_u8], 1)));
    missing(errors, &[1]);
    let errors = late(|group| (group.rank() == 0).then(|| group.send(&big(), 1)));
    missing(errors, &[1]);
    // One of two peers takes part.
    let errors = late(|group| match group.rank() {
        0 => Some(group.batch_isend_irecv(vec![
            Message::recv(&mut [0_u8; 3], 1),
            Message::recv(&mut [0_u8; 3], 2),
            Message::send(&big(), 2),
        ])),
        1 => group.send(&[0_u8; 3], 0).err().map(Err),
        _ => None,
    });
    missing(errors, &[2]);
    let errors = late(|group| {
        (group.rank() == 1).then(|| {
            group.batch_isend_irecv(vec![
                Message::recv(&mut [0_u8; 3], 2),
                Message::recv(&mut [0_u8; 3], 0),
            ])
        })
    });
    missing(errors, &[0, 2]);
    // Verbs that all ranks enter.
    let errors =
        late(|group| (group.rank() != 1).then(|| group.gather(&mut vec![0.0; 300_000], &big(), 0)));
    missing(errors, &[1]);
    let errors = late(|group| {
        (group.rank() == 2).then(|| group.all_to_all(&mut vec![0.0; 300_000], &big().repeat(3)))
    });
    missing(errors, &[0, 1]);
}

/// A receiver knows its sender, and not which rank that one waits for.
#[test]
fn in_a_chain_of_messages_the_direct_sender_is_missing() {
    let mut errors = late(|group| match group.rank() {
        0 => None,
        1 => {
            std::thread::sleep(Duration::from_millis(100));
            Some(group.recv(&mut [0_u8], 0))
        }
        _ => Some(group.recv(&mut [0_u8], 1)),
    });
    let told = errors[1].take().unwrap();
    let Error::Aborted { by: 2, reason } = &told else { panic!("{told}") };
    assert!(reason.ends_with("still missing rank 1"), "{reason}");
    missing(errors, &[1]);
}

#[test]
fn monitored_barrier_has_its_own_timeout() {
    let (timeout, base) = (Duration::from_millis(100), Instant::now());
    common::threads(3, TIMEOUT, |group| {
        group.monitored_barrier(SOON).unwrap();
        if group.rank() == 1 {
            // Kept until all have returned.
            return group;
        }
        let start = Instant::now();
        let error = group.monitored_barrier(timeout).unwrap_err();
        in_time(base, start, timeout);
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(missing, &[1]);
        group
    });
}

/// The timeout applies to calls of that handle on that rank, not to peers or the group.
#[test]
fn with_timeout_can_shorten_the_timeout() {
    let timeout = Duration::from_millis(100);
    let calls: [fn(&ProcessGroup) -> Result<()>; 4] = [
        |group| group.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum),
        |group| group.all_gather_async(vec![0_u8; 18], vec![0; 9])?.wait().map(drop),
        |group| group.recv(&mut [0_u8], 1),
        |group| broadcast_object(group, Some(1), 0).map(drop),
    ];
    for (transport, call) in ["host", "tcp", "machines", "host"].into_iter().zip(calls) {
        let base = Instant::now();
        play(common::over(transport, 2, TIMEOUT), |group| {
            let short = group.with_timeout(timeout);
            if group.rank() == 1 {
                std::thread::sleep(timeout * 3);
            }
            group.barrier().unwrap();
            if group.rank() == 1 {
                // Kept until all have returned.
                return group;
            }
            let start = Instant::now();
            let error = call(&short).unwrap_err();
            in_time(base, start, timeout);
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
            assert!(matches!(group.barrier(), Err(Error::Poisoned(_))));
            group
        });
    }
}

#[test]
fn with_timeout_can_extend_the_timeout() {
    let timeout = Duration::from_millis(200);
    common::threads(2, timeout, |group| {
        let patient = group.with_timeout(TIMEOUT);
        if group.rank() == 1 {
            std::thread::sleep(timeout * 3);
        }
        let mut sum = [1];
        patient.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [2]);
        group.barrier().unwrap();
    });
}

#[test]
fn abort_wakes_a_receiver() {
    common::threads(3, TIMEOUT, |group| {
        let start = Instant::now();
        let error = match group.rank() {
            0 => group.recv(&mut [0.0_f64; 1000], 2),
            1 => group.send(&vec![0.0_f64; 100_000], 2),
            _ => {
                std::thread::sleep(Duration::from_millis(50));
                group.abort("enough");
                group.all_reduce(&mut [0_u8], ReduceOp::Sum)
            }
        };
        assert!(matches!(error, Err(Error::Aborted { by: 2, .. })), "{error:?}");
        assert!(start.elapsed() < SOON);
    });
}

/// Rank 0 waits for two peers. The first to arrive is in its next call while the other is late,
/// which is not a failure.
#[test]
fn a_sender_in_its_next_call_does_not_fail_a_receiver_that_waits_for_another() {
    common::threads(3, TIMEOUT, |group| {
        for round in 0..10_000_i32 {
            match group.rank() {
                0 => {
                    let (mut one, mut two) = ([0], [0]);
                    let receive = vec![Message::recv(&mut one, 1), Message::recv(&mut two, 2)];
                    group.batch_isend_irecv(receive).unwrap();
                    assert_eq!((one, two), ([round], [round]));
                }
                rank => {
                    let start = Instant::now();
                    while rank == 2 && start.elapsed() < Duration::from_micros(20) {}
                    group.send(&[round], 0).unwrap();
                }
            }
            group.barrier().unwrap();
        }
    });
}
