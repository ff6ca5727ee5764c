//! Compares every verb on device memory with the verb on slices of the same group, for each
//! library: its `fake` module provides the memory, the streams, and the supported reductions.

use std::fmt::Debug;

use collective::{ProcessGroup, ReduceOp, Result, device::DeviceCalls};

use super::fake::{Memory, Stream, reduces};
use crate::common::Random;
use crate::conformance::twin::Number;

const COUNTS: [usize; 4] = [0, 1, 7, 1000];

/// As in the conformance suite: integers of any bits, floats whose sums round; but no NaN and no
/// infinity, which libraries treat differently.
pub(crate) fn input<T: Number>(rank: usize, count: usize) -> Vec<T> {
    let mut random = Random((rank as u64 + 1) << 24 | count as u64);
    (0..count).map(|_| T::any(random.next() | 1)).collect()
}

/// Initial contents of an expected output, different from those of device memory.
fn unwritten<T: Number>(count: usize) -> Vec<T> {
    input(99, count)
}

pub(crate) fn run<'a>(
    group: &'a ProcessGroup,
    stream: &Stream,
    calls: impl FnOnce(DeviceCalls<'a>) -> Result<DeviceCalls<'a>>,
) {
    calls(group.device().unwrap()).unwrap().enqueue(stream.raw()).unwrap().wait().unwrap();
}

pub(crate) fn reductions<T: Number + PartialEq + Debug>(group: &ProcessGroup, stream: &Stream) {
    let (rank, world) = (group.rank(), group.world_size());
    let ops = ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE));
    for op in ops.filter(|&op| reduces(op, T::DTYPE)) {
        for count in COUNTS {
            let own = input::<T>(rank, count);
            let (mut memory, mut twin) = (Memory::new(own.clone()), own.clone());
            run(group, stream, |calls| calls.all_reduce(memory.buf(), op));
            group.all_reduce(&mut twin, op).unwrap();
            assert_eq!(memory.numbers(), twin, "all_reduce {op}");

            let root = count % world;
            let (mut memory, mut twin) = (Memory::new(own.clone()), own);
            run(group, stream, |calls| calls.reduce(memory.buf(), op, root));
            group.reduce(&mut twin, op, root).unwrap();
            assert_eq!(memory.numbers(), twin, "reduce {op} to {root}");

            let own = input(rank, count * world);
            let (mut from, mut memory) =
                (Memory::new(own.clone()), Memory::new(vec![T::default(); count]));
            run(group, stream, |calls| calls.reduce_scatter(memory.buf(), from.buf(), op));
            let mut twin = unwritten(count);
            group.reduce_scatter(&mut twin, &own, op).unwrap();
            assert_eq!(memory.numbers(), twin, "reduce_scatter {op}");
            assert_eq!(from.numbers(), own);
            // In place, in this rank's block.
            run(group, stream, |calls| {
                let whole = from.buf();
                calls.reduce_scatter(whole.part(rank * count..(rank + 1) * count)?, whole, op)
            });
            assert_eq!(from.numbers()[rank * count..][..count], twin, "in place");

            let counts: Vec<usize> = (0..world).map(|rank| (count + rank) % 5).collect();
            let own = input(rank, counts.iter().sum());
            let mut memory = Memory::new(vec![T::default(); counts[rank]]);
            let mut from = Memory::new(own.clone());
            run(group, stream, |calls| {
                calls.reduce_scatter_v(memory.buf(), from.buf(), &counts, op)
            });
            let mut twin = unwritten(counts[rank]);
            group.reduce_scatter_v(&mut twin, &own, &counts, op).unwrap();
            assert_eq!(memory.numbers(), twin, "reduce_scatter_v {op}");
        }
    }
}

pub(crate) fn moves<T: Number + PartialEq + Debug>(group: &ProcessGroup, stream: &Stream) {
    let (rank, world) = (group.rank(), group.world_size());
    for count in COUNTS {
        let (own, root) = (input(rank, count), (count + 1) % world);
        let (mut memory, mut twin) = (Memory::new(own.clone()), own.clone());
        run(group, stream, |calls| calls.broadcast(memory.buf(), root));
        group.broadcast(&mut twin, root).unwrap();
        assert_eq!(memory.numbers(), twin, "broadcast from {root}");

        let mut from = Memory::new(own.clone());
        let (mut all, mut twin) =
            (Memory::new(vec![T::default(); count * world]), unwritten(count * world));
        run(group, stream, |calls| calls.all_gather(all.buf(), from.buf()));
        group.all_gather(&mut twin, &own).unwrap();
        assert_eq!(all.numbers(), twin, "all_gather");

        let mut all = Memory::new(vec![T::default(); count * world]);
        run(group, stream, |calls| {
            calls.gather((rank == root).then(|| all.buf()), from.buf(), root)
        });
        let expected = if rank == root { twin } else { vec![T::default(); count * world] };
        assert_eq!(all.numbers(), expected, "gather to {root}");

        let own = input(rank, count * world);
        let mut from = Memory::new(own.clone());
        let (mut block, mut twin) = (Memory::new(vec![T::default(); count]), unwritten(count));
        run(group, stream, |calls| {
            calls.scatter(block.buf(), (rank == root).then(|| from.buf()), root)
        });
        group.scatter(&mut twin, &own, root).unwrap();
        assert_eq!(block.numbers(), twin, "scatter from {root}");

        let (mut to, mut twin) = (Memory::new(vec![T::default(); own.len()]), own.clone());
        run(group, stream, |calls| calls.all_to_all(to.buf(), from.buf()));
        group.all_to_all(&mut twin, &own).unwrap();
        assert_eq!(to.numbers(), twin, "all_to_all");
        uneven::<T>(group, stream, count);
    }
}

/// The forms with blocks of different lengths.
fn uneven<T: Number + PartialEq + Debug>(group: &ProcessGroup, stream: &Stream, count: usize) {
    let (rank, world) = (group.rank(), group.world_size());
    let root = count % world;
    let counts: Vec<usize> = (0..world).map(|rank| (count + 3 * rank) % 7).collect();
    let total = counts.iter().sum();
    let own = input(rank, counts[rank]);
    let mut from = Memory::new(own.clone());
    let (mut all, mut twin) = (Memory::new(vec![T::default(); total]), unwritten(total));
    run(group, stream, |calls| calls.all_gather_v(all.buf(), from.buf(), &counts));
    group.all_gather_v(&mut twin, &own, &counts).unwrap();
    assert_eq!(all.numbers(), twin, "all_gather_v");

    let mut all = Memory::new(vec![T::default(); total]);
    run(group, stream, |calls| {
        calls.gather_v((rank == root).then(|| all.buf()), from.buf(), &counts, root)
    });
    let expected = if rank == root { twin } else { vec![T::default(); total] };
    assert_eq!(all.numbers(), expected, "gather_v");

    let own = input(rank, total);
    let mut from = Memory::new(own.clone());
    let (mut block, mut twin) =
        (Memory::new(vec![T::default(); counts[rank]]), unwritten(counts[rank]));
    run(group, stream, |calls| {
        calls.scatter_v(block.buf(), (rank == root).then(|| from.buf()), &counts, root)
    });
    group.scatter_v(&mut twin, &own, &counts, root).unwrap();
    assert_eq!(block.numbers(), twin, "scatter_v");

    // Number of elements that rank a sends to rank b.
    let sends = |a: usize, b: usize| (count + a + 2 * b) % 4;
    let out: Vec<usize> = (0..world).map(|peer| sends(rank, peer)).collect();
    let into: Vec<usize> = (0..world).map(|peer| sends(peer, rank)).collect();
    let own = input(rank, out.iter().sum());
    let mut from = Memory::new(own.clone());
    let len = into.iter().sum();
    let (mut to, mut twin) = (Memory::new(vec![T::default(); len]), unwritten(len));
    run(group, stream, |calls| calls.all_to_all_v(to.buf(), &into, from.buf(), &out));
    group.all_to_all_v(&mut twin, &into, &own, &out).unwrap();
    assert_eq!(to.numbers(), twin, "all_to_all_v");
}
