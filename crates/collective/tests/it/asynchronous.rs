//! Asynchronous verbs return the results of the blocking ones, and a `Work` may be waited for,
//! awaited, or dropped at any point.

#![expect(unsafe_code, reason = "one test forks")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use collective::{Buffer, Error, ProcessGroup, ReduceOp, Result, Work};

use crate::common::{self, SOON};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Wakes a thread and counts the wake-ups.
struct Unpark {
    thread: Thread,
    wakes: AtomicUsize,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.thread.unpark();
    }
}

fn unpark() -> Arc<Unpark> {
    Arc::new(Unpark { thread: std::thread::current(), wakes: AtomicUsize::new(0) })
}

/// A minimal executor: polls only when woken.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let unpark = unpark();
    let waker = Waker::from(Arc::clone(&unpark));
    let mut seen = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let start = Instant::now();
        while unpark.wakes.load(Ordering::SeqCst) == seen {
            assert!(start.elapsed() < TIMEOUT, "the task is not woken");
            std::thread::park_timeout(SOON);
        }
        seen = unpark.wakes.load(Ordering::SeqCst);
    }
}

fn poll_once<B>(work: &mut Work<B>, unpark: &Arc<Unpark>) -> Poll<Result<B>> {
    let waker = Waker::from(Arc::clone(unpark));
    pin!(work).poll(&mut Context::from_waker(&waker))
}

/// Two ranks: rank 1 does its part of `held` only after rank 0 releases it.
fn held_back(
    rank_0: impl Fn(&ProcessGroup, &dyn Fn()) + Sync,
    rank_1: impl Fn(&ProcessGroup) + Sync,
) {
    let gate = Barrier::new(2);
    common::threads(2, TIMEOUT, |group| {
        if group.rank() == 0 {
            rank_0(&group, &|| {
                gate.wait();
            });
        } else {
            gate.wait();
            rank_1(&group);
        }
        group.barrier().unwrap();
    });
}

/// Input of rank `rank`.
fn input(rank: usize, count: usize) -> Vec<i64> {
    (0..count).map(|i| (rank * 1000 + i) as i64).collect()
}

#[test]
fn asynchronous_backend_verbs_return_the_blocking_result() {
    for world in 1..=3 {
        common::threads(world, TIMEOUT, |group| {
            let (rank, root) = (group.rank(), world - 1);
            for count in [0, 1, 7, 5000] {
                let (own, all) = (input(rank, count), input(rank, world * count));

                let mut wanted = own.clone();
                group.reduce(&mut wanted, ReduceOp::Max, root).unwrap();
                let got = group.reduce_async(own.clone(), ReduceOp::Max, root).unwrap();
                assert_eq!(got.wait().unwrap(), wanted);

                let mut wanted = own.clone();
                group.broadcast(&mut wanted, root).unwrap();
                let got = group.broadcast_async(own.clone(), root).unwrap();
                assert_eq!(block_on(got).unwrap(), wanted);

                let mut wanted = vec![0; world * count];
                group.all_gather(&mut wanted, &own).unwrap();
                let got = group.all_gather_async(vec![0; world * count], own.clone()).unwrap();
                assert_eq!(got.wait().unwrap(), (wanted, own.clone()));

                let mut wanted = vec![0; count];
                group.reduce_scatter(&mut wanted, &all, ReduceOp::Sum).unwrap();
                let output = vec![0; count].into_boxed_slice();
                let got = group.reduce_scatter_async(output, all.clone(), ReduceOp::Sum).unwrap();
                let (output, back) = got.wait().unwrap();
                assert_eq!((&*output, back), (&*wanted, all));
            }
            group.barrier_async().unwrap().wait().unwrap();
        });
    }
}

#[test]
fn a_poll_or_wait_after_the_outcome_panics_without_poisoning_the_work() {
    common::threads(1, TIMEOUT, |group| {
        let mut work = group.barrier_async().unwrap();
        block_on(&mut work).unwrap();
        let poll = catch_unwind(AssertUnwindSafe(|| poll_once(&mut work, &unpark())));
        assert!(poll.is_err());
        // A poisoned lock would panic here and in `drop`, the latter during unwinding.
        assert!(work.is_done());
        assert!(catch_unwind(AssertUnwindSafe(|| work.wait())).is_err());
    });
}

#[test]
fn asynchronous_message_verbs_return_the_blocking_result() {
    for world in 1..=3 {
        common::threads(world, TIMEOUT, |group| {
            let (rank, root) = (group.rank(), world - 1);
            let (count, is_root) = (700, rank == root);
            let (own, all) = (input(rank, count), input(rank, world * count));
            let zeros = |count: usize| vec![0_i64; count];

            let mut wanted = zeros(if is_root { world * count } else { 0 });
            group.gather(&mut wanted, &own, root).unwrap();
            let got = group.gather_async(zeros(wanted.len()), own.clone(), root).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);

            let mut wanted = zeros(count);
            group.scatter(&mut wanted, if is_root { &all } else { &[] }, root).unwrap();
            let blocks = if is_root { all.clone() } else { vec![] };
            let got = group.scatter_async(zeros(count), blocks, root).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);

            let mut wanted = zeros(world * count);
            group.all_to_all(&mut wanted, &all).unwrap();
            let got = group.all_to_all_async(zeros(world * count), all.clone()).unwrap();
            assert_eq!(got.wait().unwrap(), (wanted, all));
        });
    }
}

#[test]
fn asynchronous_v_verbs_return_the_blocking_result() {
    for world in 1..=3 {
        common::threads(world, TIMEOUT, |group| {
            let (rank, root) = (group.rank(), 0);
            let counts: Vec<usize> = (0..world).map(|rank| 3 * rank + 1).collect();
            let total: usize = counts.iter().sum();
            let (own, all) = (input(rank, counts[rank]), input(rank, total));
            let zeros = |count: usize| vec![0_i64; count];
            let at_root = |count| if rank == root { count } else { 0 };

            let mut wanted = zeros(total);
            group.all_gather_v(&mut wanted, &own, &counts).unwrap();
            let got = group.all_gather_v_async(zeros(total), own.clone(), &counts).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);

            let mut wanted = zeros(at_root(total));
            group.gather_v(&mut wanted, &own, &counts, root).unwrap();
            let output = zeros(at_root(total));
            let got = group.gather_v_async(output, own.clone(), &counts, root).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);

            let (mut wanted, from) = (zeros(counts[rank]), &all[..at_root(total)]);
            group.scatter_v(&mut wanted, from, &counts, root).unwrap();
            let output = zeros(counts[rank]);
            let got = group.scatter_v_async(output, from.to_vec(), &counts, root).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);

            let mut wanted = zeros(counts[rank]);
            group.reduce_scatter_v(&mut wanted, &all, &counts, ReduceOp::Min).unwrap();
            let (output, op) = (zeros(counts[rank]), ReduceOp::Min);
            let got = group.reduce_scatter_v_async(output, all.clone(), &counts, op).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);

            // Rank r sends s + r elements to rank s.
            let to: Vec<usize> = (0..world).map(|peer| peer + rank).collect();
            let sum = to.iter().sum();
            let (mut wanted, from) = (zeros(sum), input(rank, sum));
            group.all_to_all_v(&mut wanted, &to, &from, &to).unwrap();
            let got = group.all_to_all_v_async(zeros(sum), &to, from, &to).unwrap();
            assert_eq!(got.wait().unwrap().0, wanted);
        });
    }
}

#[test]
fn messages_in_flight_arrive_in_order() {
    common::threads(3, TIMEOUT, |group| {
        let (rank, world) = (group.rank(), 3);
        let (next, last) = ((rank + 1) % world, (rank + world - 1) % world);
        // A ring, which would deadlock if receives blocked sends.
        let sends = vec![(input(rank, 10), next), (input(rank, 20), next)];
        let receives = vec![(vec![0; 10], last), (vec![0; 20], last)];
        let work = group.batch_isend_irecv_async(sends, receives).unwrap();
        let (sent, received) = block_on(work).unwrap();
        assert_eq!(sent, [(input(rank, 10), next), (input(rank, 20), next)]);
        assert_eq!(received, [(input(last, 10), last), (input(last, 20), last)]);
        if rank == 0 {
            let one = group.send_async(vec![1_u8], 1).unwrap();
            let two = group.send_async(vec![2_u8], 1).unwrap();
            assert_eq!((one.wait().unwrap(), two.wait().unwrap()), (vec![1], vec![2]));
        }
        if rank == 1 {
            let one = group.recv_async(vec![0_u8], 0).unwrap();
            let two = group.recv_async(vec![0_u8], 0).unwrap();
            assert_eq!((one.wait().unwrap(), two.wait().unwrap()), (vec![1], vec![2]));
        }
    });
}

#[test]
fn a_callers_mistake_is_an_error_before_it_is_queued() {
    common::threads(2, TIMEOUT, |group| {
        let (sum, out) = (ReduceOp::Sum, || vec![0_i32; 3]);
        let unit = |error| drop::<Work<Vec<i32>>>(error);
        let pair = |error| drop::<Work<(Vec<i32>, Vec<i32>)>>(error);
        let mistakes = [
            group.all_reduce_async(out(), ReduceOp::Avg).map(unit),
            group.reduce_async(out(), sum, 2).map(unit),
            group.broadcast_async(out(), 2).map(unit),
            group.all_gather_async(out(), out()).map(pair),
            group.reduce_scatter_async(out(), out(), sum).map(pair),
            group.gather_async(out(), out(), group.rank()).map(pair),
            group.gather_async(out(), out(), 2).map(pair),
            group.scatter_async(out(), out(), group.rank()).map(pair),
            group.all_to_all_async(out(), out()).map(pair),
            group.all_gather_v_async(out(), out(), &[1, 2]).map(pair),
            group.gather_v_async(out(), out(), &[1], group.rank()).map(pair),
            group.scatter_v_async(out(), out(), &[9, 9], group.rank()).map(pair),
            group.reduce_scatter_v_async(out(), out(), &[3, usize::MAX], sum).map(pair),
            group.all_to_all_v_async(out(), &[1, 2], out(), &[2, 1]).map(pair),
            group.send_async(out(), group.rank()).map(unit),
            group.recv_async(out(), 2).map(unit),
            group.batch_isend_irecv_async(vec![(out(), 5)], vec![(out(), 0)]).map(drop),
        ];
        for (i, mistake) in mistakes.into_iter().enumerate() {
            assert!(matches!(mistake, Err(Error::InvalidArgument(_))), "{i}: {mistake:?}");
        }
        // Nothing was sent, and the next operation matches.
        group.barrier().unwrap();
        assert_eq!(group.flight_record().calls.len(), 1);
    });
}

#[test]
fn wait_timeout_returns_a_late_work() {
    held_back(
        |group, let_go| {
            let work = group.all_reduce_async(vec![1; 9], ReduceOp::Sum).unwrap();
            let work = work.wait_timeout(Duration::from_millis(20)).unwrap_err();
            let mut work = work.wait_timeout(Duration::ZERO).unwrap_err();
            assert!(!work.is_done());
            // Polls and waits may alternate.
            assert!(poll_once(&mut work, &unpark()).is_pending());
            let_go();
            assert_eq!(work.wait_timeout(Duration::MAX).unwrap().unwrap(), [2; 9]);
        },
        |group| {
            let work = group.all_reduce_async(vec![1; 9], ReduceOp::Sum).unwrap();
            assert_eq!(work.wait_timeout(SOON).unwrap().unwrap(), [2; 9]);
        },
    );
}

/// A buffer that counts its drops.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

impl Buffer for Counted {
    type Elem = u8;

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_dropped_future_finishes_its_operation_and_frees_its_buffer_once() {
    held_back(
        |group, let_go| {
            let freed = Arc::new(AtomicUsize::new(0));
            let unpark = unpark();
            let start = || {
                let buf = Counted(vec![1; 9], Arc::clone(&freed));
                group.all_reduce_async(buf, ReduceOp::Sum).unwrap()
            };
            let (before, mut between, mut kept) = (start(), start(), start());
            drop(before);
            assert!(poll_once(&mut between, &unpark).is_pending());
            drop(between);
            // The waker of a dropped task is not kept.
            assert_eq!(Arc::strong_count(&unpark), 1);
            assert!(poll_once(&mut kept, &unpark).is_pending());
            // Another task polls before the operation can finish; the first is never woken.
            assert!(poll_once(&mut kept, &self::unpark()).is_pending());
            assert_eq!(Arc::strong_count(&unpark), 1);
            assert_eq!(freed.load(Ordering::SeqCst), 0);
            let_go();
            let kept = block_on(kept).unwrap();
            assert_eq!(kept.0, [2; 9]);
            assert_eq!(unpark.wakes.load(Ordering::SeqCst), 0);
            assert_eq!(freed.load(Ordering::SeqCst), 2);
        },
        |group| {
            for _ in 0..3 {
                let mut buf = [1_u8; 9];
                group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
                assert_eq!(buf, [2; 9]);
            }
        },
    );
}

#[test]
fn a_failure_wakes_the_task() {
    held_back_failing(|group| {
        let work = group.all_reduce_async(vec![1; 9], ReduceOp::Sum).unwrap();
        let error = block_on(work).unwrap_err();
        assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
    });
}

/// Rank 1 aborts while rank 0 waits.
fn held_back_failing(rank_0: impl Fn(&ProcessGroup) + Sync) {
    common::threads(2, TIMEOUT, |group| {
        if group.rank() == 0 {
            return rank_0(&group);
        }
        std::thread::sleep(Duration::from_millis(20));
        group.abort("enough");
    });
}

#[test]
fn waiting_in_a_fork_is_an_error() {
    held_back(
        |group, let_go| {
            let work = group.barrier_async().unwrap();
            // SAFETY: the child allocates little, which libc allows after a fork, and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let refused =
                    work.is_done() && matches!(work.wait(), Err(Error::InvalidArgument(_)));
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(i32::from(!refused)) };
            }
            let mut status = 0;
            // SAFETY: waits for our own child.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(status, 0);
            let_go();
            work.wait().unwrap();
        },
        |group| group.barrier().unwrap(),
    );
}

#[test]
fn scoped_verbs_borrow_and_return_the_blocking_result() {
    for world in 1..=3 {
        common::threads(world, TIMEOUT, |group| {
            let (rank, counts) = (group.rank(), (1..=world).collect::<Vec<_>>());
            let (own, total) = (input(rank, counts[rank]), counts.iter().sum());
            let (mut sum, mut all) = (input(rank, 5000), vec![0; total]);
            let (mut wanted, mut wanted_all) = (sum.clone(), all.clone());
            group.all_reduce(&mut wanted, ReduceOp::Sum).unwrap();
            group.all_gather_v(&mut wanted_all, &own, &counts).unwrap();
            group.scope(|scope| {
                let sum = scope.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                let all = scope.all_gather_v(&mut all, &own, &counts).unwrap();
                assert_eq!(sum.wait().unwrap(), wanted);
                let all = all.wait().unwrap();
                assert_eq!(all, wanted_all);
                // The result is in the caller's memory.
                all[0] = -1;
            });
            assert_eq!((sum, all[0]), (wanted, -1));
        });
    }
}

/// Whether works are forgotten or the scope panics, it ends after its operations.
#[test]
fn a_scope_waits_for_forgotten_operations_and_after_a_panic() {
    // As by `mem::forget`, but reachable for a leak checker.
    static FORGOTTEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    for panics in [false, true] {
        held_back(
            |group, let_go| {
                let mut sum = vec![1; 70_000];
                let scope = AssertUnwindSafe(|| {
                    group.scope(|scope| {
                        let work = scope.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                        let work = Box::into_raw(Box::new(work)).expose_provenance();
                        FORGOTTEN.lock().unwrap().push(work);
                        let_go();
                        if panics {
                            std::panic::resume_unwind(Box::new("part of a test"));
                        }
                    });
                });
                assert_eq!(catch_unwind(scope).is_err(), panics);
                assert_eq!(sum, vec![2; 70_000]);
            },
            |group| group.all_reduce(&mut vec![1; 70_000], ReduceOp::Sum).unwrap(),
        );
    }
}

#[test]
fn scoped_mistakes_are_returned_at_once_and_failures_by_wait() {
    held_back_failing(|group| {
        let mut sum = [1; 9];
        group.scope(|scope| {
            let error = scope.broadcast::<i32>(&mut [], 2).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
            let work = scope.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            let error = work.wait().unwrap_err();
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
        });
    });
}
