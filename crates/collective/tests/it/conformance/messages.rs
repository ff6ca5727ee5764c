//! Point-to-point messages.

use collective::{Message, ProcessGroup, Rank, ReduceOp, Result};
use half::f16;

use super::Scope;
use super::twin::{Number, input, same};
use crate::common::Random;

/// One pair after another, then random batches.
pub(crate) fn all(group: &ProcessGroup, scope: Scope) -> Result<()> {
    // Many ranks have too many pairs.
    if group.world_size() <= 8 {
        pairs::<u8>(group)?;
        pairs::<f64>(group)?;
    }
    one_batch_many_calls(group)?;
    mixed(group)?;
    for seed in 0..scope.batches {
        match seed % 3 {
            0 => batch::<f32>(group, seed)?,
            1 => batch::<u8>(group, seed)?,
            _ => batch::<f16>(group, seed)?,
        }
    }
    // Nothing is left in the channels.
    group.barrier()?;
    group.batch_isend_irecv(vec![])
}

/// Every pair alone, in both directions.
fn pairs<T: Number>(group: &ProcessGroup) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let pairs = (0..world).flat_map(|a| (0..world).map(move |b| (a, b))).filter(|(a, b)| a != b);
    for (a, b) in pairs {
        for count in [0, 1, 33, 4099, 70_001] {
            let there = input::<T>(a, count, b as u64);
            let mut buf = vec![T::default(); count];
            if rank == a {
                group.send(&there, b)?;
                group.recv(&mut buf, b)?;
            } else if rank == b {
                group.recv(&mut buf, a)?;
                group.send(&buf, a)?;
            } else {
                continue;
            }
            same(&buf, &there, "there and back");
        }
    }
    Ok(())
}

/// Messages match in order, however they are divided among calls.
fn one_batch_many_calls(group: &ProcessGroup) -> Result<()> {
    let (rank, last) = (group.rank(), group.world_size() - 1);
    let text = |i: usize| input::<i64>(0, i * i * 11 % 3000, i as u64);
    let texts: Vec<_> = (0..40).map(text).collect();
    if last == 0 {
        return Ok(());
    }
    if rank == 0 {
        group.batch_isend_irecv(texts.iter().map(|text| Message::send(text, last)).collect())?;
    } else if rank == last {
        for text in &texts {
            let mut buf = vec![0; text.len()];
            group.recv(&mut buf, 0)?;
            same(&buf, text, "one of a batch");
        }
    }
    Ok(())
}

/// Types may differ between messages, and collectives may be called in between.
fn mixed(group: &ProcessGroup) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    if world == 1 {
        return Ok(());
    }
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    for round in 0..50_u8 {
        let (mut bytes, mut number) = ([0_u8; 3], [0.0_f64]);
        group.batch_isend_irecv(vec![
            Message::recv(&mut bytes, previous),
            Message::send(&[round; 3], next),
            Message::send(&[f64::from(round)], next),
            Message::recv(&mut number, previous),
        ])?;
        assert_eq!((bytes, number), ([round; 3], [f64::from(round)]));
        let mut sum = [1_i32];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [world as i32]);
    }
    Ok(())
}

/// One message of a plan that every rank knows.
#[derive(Clone, Copy, Debug)]
struct Planned {
    from: Rank,
    to: Rank,
    count: usize,
    seed: u64,
}

fn plan(world: usize, seed: u64) -> Vec<Planned> {
    let mut random = Random(seed);
    let one = |i| {
        let from = random.below(world);
        let to = (from + 1 + random.below(world - 1)) % world;
        let count = match random.below(10) {
            0 => 0,
            1..6 => random.below(30),
            6..9 => random.below(5000),
            _ => random.below(100_000),
        };
        Planned { from, to, count, seed: seed * 1000 + i }
    };
    (0..15 * world as u64).map(one).collect()
}

/// Many messages between random pairs, which each rank passes in a different order. Only the order
/// from one rank to another is kept.
fn batch<T: Number>(group: &ProcessGroup, seed: u64) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    if world == 1 {
        return Ok(());
    }
    let plan = plan(world, seed);
    let sent: Vec<Vec<T>> = plan
        .iter()
        .filter(|message| message.from == rank)
        .map(|message| input(message.from, message.count, message.seed))
        .collect();
    let coming: Vec<Planned> = plan.iter().copied().filter(|message| message.to == rank).collect();
    let mut got: Vec<Vec<T>> =
        coming.iter().map(|message| vec![T::default(); message.count]).collect();

    let mut lanes: Vec<Vec<Message<'_>>> = (0..2 * world).map(|_| Vec::new()).collect();
    let destinations = plan.iter().filter(|message| message.from == rank);
    for (block, message) in sent.iter().zip(destinations) {
        lanes[message.to].push(Message::send(block, message.to));
    }
    for (block, message) in got.iter_mut().zip(&coming) {
        lanes[world + message.from].push(Message::recv(block, message.from));
    }
    let mut random = Random(seed * 31 + rank as u64);
    let mut lanes: Vec<_> =
        lanes.into_iter().filter(|lane| !lane.is_empty()).map(Vec::into_iter).collect();
    let mut messages = Vec::new();
    while !lanes.is_empty() {
        let at = random.below(lanes.len());
        match lanes[at].next() {
            Some(message) => messages.push(message),
            None => drop(lanes.swap_remove(at)),
        }
    }
    group.batch_isend_irecv(messages)?;
    for (got, message) in got.iter().zip(&coming) {
        same(got, &input(message.from, message.count, message.seed), &format!("{message:?}"));
    }
    Ok(())
}
