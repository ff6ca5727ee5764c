//! Verbs that move blocks without reducing them.

use collective::{ProcessGroup, Result};

use super::Scope;
use super::twin::{Number, Off, input, same};
use crate::common::Random;

/// Every verb, with blocks of equal and of different lengths.
pub(crate) fn all<T: Number>(group: &ProcessGroup, scope: Scope, seed: u64) -> Result<()> {
    for (i, &count) in scope.counts.iter().enumerate() {
        let roots = if count == 33 { 0..group.world_size() } else { i..i + 1 };
        for root in roots.map(|root| root % group.world_size()) {
            rooted::<T>(group, count, root, seed)?;
        }
        for_all::<T>(group, count, seed)?;
    }
    let mut random = Random(seed);
    for round in 0..scope.uneven {
        let mut uneven = || [0, 0, 1, 5, 130, 3000, 40_001][random.below(7)];
        let world = group.world_size();
        let mut matrix: Vec<Vec<usize>> =
            (0..world).map(|_| (0..world).map(|_| uneven()).collect()).collect();
        if round == 0 {
            matrix.iter_mut().flatten().for_each(|count| *count = 0);
        }
        of_different_lengths::<T>(group, &matrix, round % world, seed)?;
    }
    Ok(())
}

/// The inputs of all ranks, in rank order.
fn all_inputs<T: Number>(world: usize, count: usize, seed: u64) -> Vec<T> {
    (0..world).flat_map(|rank| input(rank, count, seed)).collect()
}

fn rooted<T: Number>(group: &ProcessGroup, count: usize, root: usize, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let mine = Off::new(&input::<T>(rank, count, seed));
    let mut buf = Off::new(&mine);
    group.broadcast(&mut buf, root)?;
    same(&buf, &input(root, count, seed), "broadcast");

    // On other ranks than the root the output is not changed, whatever its length.
    let mut all = Off::zeros(if rank == root { world * count } else { rank % 2 * 9 });
    group.gather(&mut all, &mine, root)?;
    let expected = if rank == root { all_inputs(world, count, seed) } else { all.to_vec() };
    same(&all, &expected, "gather");
    assert!(rank == root || all.iter().all(|x| x.bits() == T::default().bits()));

    let blocks = Off::new(&if rank == root { all_inputs(world, count, seed) } else { vec![] });
    let mut buf = Off::zeros(count);
    group.scatter(&mut buf, &blocks, root)?;
    same(&buf, &mine, "scatter");
    Ok(())
}

fn for_all<T: Number>(group: &ProcessGroup, count: usize, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let mut all = Off::zeros(world * count);
    group.all_gather(&mut all, &Off::new(&input::<T>(rank, count, seed)))?;
    same(&all, &all_inputs(world, count, seed), "all_gather");

    // Block `s` of rank `r` is block `r` of input `s`.
    let block = count / world;
    let part = |of: usize, which: usize| {
        input::<T>(of, block * world, seed)[which * block..][..block].to_vec()
    };
    let mut output = Off::zeros(block * world);
    group.all_to_all(&mut output, &Off::new(&input::<T>(rank, block * world, seed)))?;
    let expected: Vec<T> = (0..world).flat_map(|from| part(from, rank)).collect();
    same(&output, &expected, "all_to_all");
    Ok(())
}

/// `matrix[r][s]` elements go from rank `r` to rank `s`; the verbs with one list take a row of it.
fn of_different_lengths<T: Number>(
    group: &ProcessGroup,
    matrix: &[Vec<usize>],
    root: usize,
    seed: u64,
) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let counts = &matrix[root];
    let total = counts.iter().sum();
    let mine = Off::new(&input::<T>(rank, counts[rank], seed));
    let all: Vec<T> = (0..world).flat_map(|rank| input(rank, counts[rank], seed)).collect();

    let mut output = Off::zeros(total);
    group.all_gather_v(&mut output, &mine, counts)?;
    same(&output, &all, "all_gather_v");

    let (mut output, known) =
        if rank == root { (Off::zeros(total), &counts[..]) } else { (Off::zeros(3), &[][..]) };
    group.gather_v(&mut output, &mine, known, root)?;
    if rank == root {
        same(&output, &all, "gather_v");
    } else {
        same(&output, &[T::default(); 3], "gather_v elsewhere");
    }

    let source = Off::new(if rank == root { &all } else { &[] });
    let mut output = Off::zeros(counts[rank]);
    group.scatter_v(&mut output, &source, known, root)?;
    same(&output, &mine, "scatter_v");

    let received: Vec<usize> = matrix.iter().map(|row| row[rank]).collect();
    let block = |from: usize, to: usize| input::<T>(from, matrix[from][to], seed + to as u64);
    let blocks: Vec<T> = (0..world).flat_map(|to| block(rank, to)).collect();
    let mut output = Off::zeros(received.iter().sum());
    group.all_to_all_v(&mut output, &received, &Off::new(&blocks), &matrix[rank])?;
    let expected: Vec<T> = (0..world).flat_map(|from| block(from, rank)).collect();
    same(&output, &expected, "all_to_all_v");
    Ok(())
}
