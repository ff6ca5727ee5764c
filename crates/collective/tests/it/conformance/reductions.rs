//! Verbs that reduce.

use collective::{DType, Error, ProcessGroup, ReduceOp, Result, SharedBuf};

use super::Scope;
use super::twin::{Number, Off, input, reduced, same};

/// All operators that the type has, and the errors of those it does not have.
pub(crate) fn all<T: Number>(group: &ProcessGroup, scope: Scope, mut seed: u64) -> Result<()> {
    // A factor that no type represents exactly, so that products round.
    for op in ReduceOp::ALL.into_iter().chain([ReduceOp::pre_mul_sum(-1.0 / 3.0)]) {
        seed += 2;
        if !op.supports(T::DTYPE) {
            let error = group.all_reduce(&mut [T::default()], op).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
            let error = group.reduce(&mut [T::default()], op, 0).unwrap_err();
            let text = format!("reduce: {op} is not defined for {}", T::DTYPE);
            assert!(error.to_string().starts_with(&text), "{error}");
            continue;
        }
        for &count in scope.counts {
            reductions::<T>(group, op, count, seed)?;
        }
        let in_place = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::BitXor);
        if scope.shared && (in_place || T::DTYPE == DType::Bool) {
            shared::<T>(group, op, seed)?;
        }
    }
    coalesced::<T>(group, seed + 2)
}

fn reductions<T: Number>(
    group: &ProcessGroup,
    op: ReduceOp,
    count: usize,
    seed: u64,
) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let what = format!("{op} of {count}");
    let expected = reduced::<T>(op, world, count, seed);
    let mine = input::<T>(rank, count, seed);

    let mut buf = Off::new(&mine);
    group.all_reduce(&mut buf, op)?;
    same(&buf, &expected, &what);

    let buf = group.all_reduce_async(mine.clone(), op)?.wait()?;
    same(&buf, &expected, &what);

    // All roots for one length, one root for each other length.
    let roots = if count == 33 { 0..world } else { count % world..count % world + 1 };
    for root in roots {
        let mut buf = Off::new(&mine);
        group.reduce(&mut buf, op, root)?;
        let expected = if rank == root { &*expected } else { &mine };
        same(&buf, expected, &format!("reduce to {root}, {what}"));
    }

    let block = count / world;
    let mut output = Off::zeros(block);
    group.reduce_scatter(&mut output, &Off::new(&mine[..block * world]), op)?;
    same(&output, &expected[rank * block..][..block], &what);

    // Two blocks of different lengths, the others empty.
    let (one, two) = (seed as usize % world, (seed as usize + 1) % world);
    let mut counts = vec![0; world];
    counts[one] += count / 3;
    counts[two] += count - count / 3;
    let mut output = Off::zeros(counts[rank]);
    group.reduce_scatter_v(&mut output, &Off::new(&mine), &counts, op)?;
    let start: usize = counts[..rank].iter().sum();
    same(&output, &expected[start..][..counts[rank]], &format!("reduce_scatter_v, {what}"));
    Ok(())
}

/// Results at several offsets of a shared buffer have the same bits as in a plain buffer.
fn shared<T: Number>(group: &ProcessGroup, op: ReduceOp, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let mut buf: SharedBuf<T> = group.alloc(100_000)?;
    assert!(buf.iter().all(|x| x.bits() == 0));
    for (start, count) in [(0, 100_000), (1, 99_999), (13, 33_333), (77, 100), (5, 0)] {
        let part = &mut buf[start..][..count];
        part.copy_from_slice(&input(rank, count, seed));
        group.all_reduce(part, op)?;
        same(part, &reduced(op, world, count, seed), "in place");
    }
    buf.copy_from_slice(&input(rank, 100_000, seed + 1));
    let buf = group.all_reduce_async(buf, op)?.wait()?;
    same(&buf, &reduced(op, world, 100_000, seed + 1), "in place, asynchronously");
    Ok(())
}

/// Coalesced buffers get the same results as single ones.
fn coalesced<T: Number>(group: &ProcessGroup, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let lens = [3, 0, 1, 1000, 17, 2500];
    let inputs = |rank| lens.iter().zip(seed..).map(move |(&len, seed)| input(rank, len, seed));
    let all_same = |bufs: &[Vec<T>], what: &str, wanted: &dyn Fn(usize, u64) -> Vec<T>| {
        for ((buf, len), seed) in bufs.iter().zip(lens).zip(seed..) {
            same(buf, &wanted(len, seed), what);
        }
    };
    fn slices<T>(bufs: &mut [Vec<T>]) -> Vec<&mut [T]> {
        bufs.iter_mut().map(Vec::as_mut_slice).collect()
    }

    let mut bufs: Vec<Vec<T>> = inputs(rank).collect();
    group.broadcast_coalesced(&mut slices(&mut bufs), world - 1)?;
    all_same(&bufs, "broadcast_coalesced", &|len, seed| input(world - 1, len, seed));

    let own: Vec<Vec<T>> = inputs(rank).collect();
    let own: Vec<&[T]> = own.iter().map(Vec::as_slice).collect();
    let mut all: Vec<Vec<T>> = lens.map(|len| vec![T::default(); world * len]).to_vec();
    group.all_gather_coalesced(&mut slices(&mut all), &own)?;
    all_same(&all, "all_gather_coalesced", &|len, seed| {
        (0..world).flat_map(|rank| input(rank, len, seed)).collect()
    });

    let Some(op) = [ReduceOp::Sum, ReduceOp::Max].into_iter().find(|op| op.supports(T::DTYPE))
    else {
        return Ok(());
    };
    let mut bufs: Vec<Vec<T>> = inputs(rank).collect();
    group.all_reduce_coalesced(&mut slices(&mut bufs), op)?;
    all_same(&bufs, "all_reduce_coalesced", &|len, seed| reduced(op, world, len, seed).to_vec());

    let whole: Vec<Vec<T>> =
        lens.iter().zip(seed..).map(|(&len, seed)| input(rank, world * len, seed)).collect();
    let whole: Vec<&[T]> = whole.iter().map(Vec::as_slice).collect();
    let mut blocks: Vec<Vec<T>> = lens.map(|len| vec![T::default(); len]).to_vec();
    group.reduce_scatter_coalesced(&mut slices(&mut blocks), &whole, op)?;
    all_same(&blocks, "reduce_scatter_coalesced", &|len, seed| {
        reduced(op, world, world * len, seed)[rank * len..][..len].to_vec()
    });
    group.all_reduce_coalesced::<T>(&mut [], op)
}
