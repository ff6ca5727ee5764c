//! Injects an error into each CANN call: the error is reported, nothing hangs, the cleanup breaks
//! no rule of CANN, and nothing is destroyed twice.

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::Duration;

use collective::hccl::Config;
use collective::{DType, GroupOptions, ProcessGroup, ReduceOp, Result};
use npu_sim::{Config as Simulated, Session, start};
use npu_sys::sys::{Acl, Hccl, Nnop, Ops};

use super::fake::{Memory, Stream, groups, play};

/// The call to fail: a function, and which of its calls since the group has joined, or, for
/// functions in [`JOINING`], since the start.
type Fault = (&'static str, usize);

/// Joins two ranks, uses every function, and drops the group; returns the number of calls of each
/// function and the ranks' results.
fn run_all_functions(
    session: &Session,
    fault: Option<Fault>,
) -> (BTreeMap<&'static str, usize>, Vec<Result<()>>) {
    let calls = || -> BTreeMap<_, _> {
        let tables = [Acl::SYMBOLS, Hccl::SYMBOLS, Nnop::SYMBOLS, Ops::SYMBOLS].concat();
        tables.iter().map(|symbol| (symbol.name, session.calls(symbol.name))).collect()
    };
    // An error code of the function's library.
    let code = |function: &str| if function.starts_with("Hccl") { 4 } else { 500_000 };
    let plan = |now: bool| {
        if let Some((function, nth)) = fault
            && now == JOINING.contains(&function)
        {
            session.fail(function, nth, code(function));
        }
    };
    plan(true);
    let options = GroupOptions::default().with_timeout(Duration::from_secs(20));
    let ranks = groups(2, &options, &Config::default());
    let mut counts = calls();
    if ranks.iter().any(Result::is_err) {
        return (counts, ranks.into_iter().map(|rank| rank.map(drop)).collect());
    }
    let ranks = ranks.into_iter().map(Result::unwrap).collect();
    let (all_here, before) = (Barrier::new(2), std::sync::Mutex::new(BTreeMap::new()));
    let outcomes = play(ranks, |group, stream| {
        let mut memory =
            (Memory::new(vec![1.0; 8]), Memory::new(vec![1; 4]), Memory::new(vec![0; 4]));
        if all_here.wait().is_leader() {
            *before.lock().unwrap() = calls();
            plan(false);
        }
        all_here.wait();
        let done = work(&group, stream, &mut memory);
        drop(group);
        // Completes the work that is still in the stream, whatever the result.
        stream.sync();
        done
    });
    let before = before.into_inner().unwrap();
    for (function, count) in &mut counts {
        if !JOINING.contains(function) {
            *count = session.calls(function) - before[function];
        }
    }
    (counts, outcomes)
}

fn work(
    group: &ProcessGroup,
    stream: &Stream,
    (one, two, to): &mut (Memory<f32>, Memory<i32>, Memory<i32>),
) -> Result<()> {
    let calls = group.device()?.all_reduce(one.buf(), ReduceOp::Avg)?.broadcast(two.buf(), 1)?;
    let first = calls.enqueue(stream.raw())?;
    let behind = Stream::another();
    // SAFETY: the stream lives until all is done.
    #[expect(unsafe_code, reason = "that is how streams are ordered")]
    unsafe { first.order(behind.raw()) }?;
    let own = group.device()?.alloc(DType::F32, 4)?;
    let second = group.device()?.all_to_all(to.buf(), two.buf())?.enqueue(stream.raw())?;
    let done = first.wait().and_then(|()| second.wait());
    behind.sync();
    drop(own);
    done
}

#[test]
#[ignore = "a sweep over all calls, some of which wait for a timeout"]
fn nightly_each_failing_call_is_reported_and_breaks_no_rule() {
    let session = start(Simulated::default());
    let (counts, outcomes) = run_all_functions(&session, None);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(session.finish(), [""; 0]);
    let (mut tried, mut told, mut unnamed) = (0, 0, Vec::new());
    for (function, calls) in counts.into_iter().filter(|(name, _)| !OWN.contains(name)) {
        let mut which = vec![1, calls.div_ceil(2), calls];
        which.dedup();
        for nth in which.into_iter().filter(|_| calls > 0) {
            let session = start(Simulated::default());
            let (_, outcomes) = run_all_functions(&session, Some((function, nth)));
            tried += 1;
            told += usize::from(outcomes.iter().any(Result::is_err));
            let errors = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
            let errors = errors.map(|error| format!("{function} {nth}: {error}"));
            let rest =
                |text: &String| CALLERS.contains(&function) && text.contains("still missing");
            unnamed.extend(errors.filter(|text| text.matches(function).count() < 2 && !rest(text)));
            assert!(session.calls("HcclCommDestroy") <= 2, "{function} {nth}");
            // Objects whose destruction failed are still there when the context ends.
            let report = session.finish();
            let left = |what: &&String| what.contains(" left") || what.contains("context ends");
            let broken: Vec<_> = report.iter().filter(|what| !left(what)).collect();
            assert!(broken.is_empty(), "{function} {nth}: {broken:?}");
        }
    }
    assert_eq!(unnamed, [""; 0]);
    assert!(tried > 40 && told > 25, "{told} of {tried}");
}

/// Called while the group is joined, and not by the test for its ranks.
const JOINING: [&str; 6] = [
    "HcclCommInitRootInfoConfig",
    "HcclGetRootInfo",
    "aclrtGetDeviceCount",
    "aclrtGetSocName",
    "aclrtGetVersion",
    "aclrtGetDevice",
];

/// Called for one rank only: its error does not fail the group, whose other ranks wait for that
/// rank.
const CALLERS: [&str; 2] = ["aclrtMalloc", "aclrtStreamWaitEvent"];

/// Called by the test itself while the group works.
const OWN: [&str; 2] = ["aclrtCreateStream", "aclInit"];
