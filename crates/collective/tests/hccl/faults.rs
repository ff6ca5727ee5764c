//! Calls of CANN that fail when they are told to: whichever it is, the failure is told and nothing
//! hangs, no rule is broken by what is done about it, and nothing is ended twice.

use collective::hccl::Config;
use collective::{GroupOptions, ProcessGroup, ReduceOp, Result};
use npu_sim::{Config as Simulated, Session, start};
use npu_sys::sys::{Acl, Hccl, Nnop, Ops};

use crate::common::DEADLINE;
use crate::fake::{Memory, Stream, groups, play, well};

/// A life of two ranks that uses everything; what each says of it.
fn life(session: &Session, begun: impl Fn(&Session)) -> Vec<Result<()>> {
    let options = GroupOptions::default().with_timeout(DEADLINE);
    begun(session);
    let ranks = groups(2, &options, &Config::default());
    if ranks.iter().any(Result::is_err) {
        return ranks.into_iter().map(|rank| rank.map(drop)).collect();
    }
    let ranks = ranks.into_iter().map(Result::unwrap).collect();
    play(ranks, |group, stream| work(&group, stream))
}

fn work(group: &ProcessGroup, stream: &Stream) -> Result<()> {
    // The simulator's faults are for the group, not for what the test needs itself.
    let Some((mut one, mut two, mut to)) = memory() else { return Ok(()) };
    let device = || group.device();
    let calls = device()?.all_reduce(one.buf(), ReduceOp::Avg)?.broadcast(two.buf(), 1)?;
    let first = calls.enqueue(stream.raw())?;
    let own = group.device()?.alloc(collective::DType::F32, 4)?;
    let second = device()?.all_to_all(to.buf(), two.buf())?.enqueue(stream.raw())?;
    let done = first.wait().and_then(|()| second.wait());
    stream.sync();
    drop(own);
    done
}

fn memory() -> Option<(Memory<f32>, Memory<i32>, Memory<i32>)> {
    let make = || (Memory::new(vec![1.0; 8]), Memory::new(vec![1; 4]), Memory::new(vec![0; 4]));
    std::panic::catch_unwind(make).ok()
}

#[test]
fn whichever_call_fails_it_is_told_and_nothing_is_broken() {
    let tables = [Acl::SYMBOLS, Hccl::SYMBOLS, Nnop::SYMBOLS, Ops::SYMBOLS];
    let functions: Vec<&str> = tables.concat().iter().map(|symbol| symbol.name).collect();
    let session = start(Simulated::default());
    assert!(life(&session, |_| {}).iter().all(Result::is_ok));
    let counts = functions.iter().map(|&function| (function, session.calls(function)));
    let counts: Vec<_> = counts.filter(|&(_, calls)| calls > 0).collect();
    well(session);
    let mut told = 0;
    for (function, calls) in counts {
        // Calls that the test itself makes, for its ranks and their memory.
        if OWN.contains(&function) {
            continue;
        }
        for nth in [1, calls.div_ceil(2), calls] {
            let session = start(Simulated::default());
            let outcomes = life(&session, |session| session.fail(function, nth, code_of(function)));
            told += usize::from(outcomes.iter().any(Result::is_err));
            for error in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
                let text = error.to_string();
                assert!(
                    text.contains(function) || text.contains("unusable") || text.contains("abort"),
                    "{function} {nth}: {text}"
                );
            }
            assert!(session.calls("HcclCommDestroy") <= 2, "{function} {nth}");
            // What could not be ended is still there.
            let report = session.finish();
            let broken = report.iter().filter(|what| !what.contains(" left"));
            let broken: Vec<_> = broken.filter(|what| !what.contains("context ends")).collect();
            assert!(broken.is_empty(), "{function} {nth}: {broken:?}");
        }
    }
    assert!(told > 15, "{told}");
}

const OWN: [&str; 6] = [
    "aclrtMemcpyAsync",
    "aclrtMallocHost",
    "aclrtFreeHost",
    "aclrtSynchronizeStream",
    "aclrtCreateContext",
    "aclrtCreateStream",
];

/// A number that is an error of the function's family.
fn code_of(function: &str) -> i32 {
    if function.starts_with("Hccl") { 4 } else { 500_000 }
}
