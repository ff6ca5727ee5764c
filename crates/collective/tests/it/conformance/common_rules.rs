//! Properties of all verbs: a caller's mistakes are errors, order is kept, buffers can be dropped.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use collective::object::{
    all_gather_object, broadcast_object, recv_object, scatter_object, send_object,
};
use collective::{Error, Message, ProcessGroup, ReduceOp, Result, SharedBuf, Work};

pub(crate) fn all(group: &ProcessGroup) -> Result<()> {
    mistakes(group)?;
    in_flight(group)?;
    objects(group)?;
    group.monitored_barrier(Duration::from_secs(30))
}
/// A caller's mistakes are errors at once, on that rank, and leave the group usable.
fn mistakes(group: &ProcessGroup) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let (three, six) = (vec![3; world], vec![6; world + 1]);
    let mistakes = [
        group.reduce(&mut [0_u8; 3], ReduceOp::Sum, world),
        group.gather(&mut [0_u8; 3], &[0; 3], world),
        group.scatter(&mut [0_u8; 3], &[0; 3], world),
        group.gather(&mut vec![0_u8; 3 * world + 1], &[0; 3], rank),
        group.scatter(&mut [0_u8; 3], &vec![0; 3 * world + 1], rank),
        group.all_to_all(&mut vec![0_u8; 2 * world], &vec![0; 3 * world]),
        group.all_gather_v(&mut vec![0_u8; 3 * world], &[0; 4], &three),
        group.all_gather_v(&mut vec![0_u8; 3 * world], &[0; 3], &six),
        group.gather_v(&mut vec![0_u8; 3 * world + 1], &[0; 3], &three, rank),
        group.scatter_v(&mut [0_u8; 4], &vec![0; 3 * world], &three, rank),
        group.all_to_all_v(&mut vec![0_u8; 3 * world], &three, &vec![0; 3 * world], &six),
        group.reduce_scatter_v(&mut [0_u8; 4], &vec![0; 3 * world], &three, ReduceOp::Sum),
        group.reduce_scatter_v(&mut [0_u8; 3], &vec![0; 3 * world], &three, ReduceOp::Avg),
        group.send(&[0_u8; 3], rank),
        group.recv(&mut [0_u8; 3], world),
        group.batch_isend_irecv(vec![Message::send(&[0_u8], usize::MAX)]),
        group.broadcast(&mut [0_u8; 3], world),
        group.all_gather(&mut vec![0_u8; 3 * world + 1], &[0; 3]),
        group.reduce_scatter(&mut [0_u8; 3], &vec![0; 3 * world + 1], ReduceOp::Sum),
        group.alloc::<u64>(usize::MAX / 4).map(drop),
        group.all_reduce_async(vec![1_i32], ReduceOp::Avg).map(drop),
        group.all_gather_coalesced(&mut [&mut vec![0_u8; 3 * world + 1]], &[&[0; 3]]),
        group.all_gather_coalesced(&mut [], &[&[0_u8; 3][..]]),
        group.reduce_scatter_coalesced(&mut [&mut [0; 3]], &[&[0_u8]], ReduceOp::Sum),
        group.reduce_scatter_coalesced(&mut [&mut [0; 3]], &[], ReduceOp::Sum),
        scatter_object::<u8>(group, Some(&[]), world).map(drop),
        send_object(group, &0, rank),
        recv_object::<u8>(group, world).map(drop),
    ];
    for mistake in mistakes {
        assert!(matches!(mistake, Err(Error::InvalidArgument(_))), "{mistake:?}");
    }
    group.barrier()
}

/// Asynchronous operations keep their order among themselves and with blocking ones.
fn in_flight(group: &ProcessGroup) -> Result<()> {
    let sum = (0..group.world_size()).sum::<usize>() as i64;
    let mine = group.rank() as i64;
    let works: Vec<_> = (0..20)
        .map(|i| group.all_reduce_async(vec![mine * i; 5000], ReduceOp::Sum))
        .collect::<Result<_>>()?;
    drop(group.all_reduce_async(vec![mine; 100_000].into_boxed_slice(), ReduceOp::Max)?);
    let mut last = [mine];
    group.all_reduce(&mut last, ReduceOp::Sum)?;
    assert_eq!(last, [sum]);
    for (i, work) in works.into_iter().enumerate() {
        assert!(work.is_done());
        assert_eq!(work.wait()?, vec![sum * i as i64; 5000]);
    }
    // Forgotten, as by `mem::forget`, but reachable, so that a leak checker does not report it.
    static FORGOTTEN: Mutex<Vec<Work<Vec<i64>>>> = Mutex::new(Vec::new());
    FORGOTTEN.lock().unwrap().push(group.all_reduce_async(vec![mine; 10], ReduceOp::Sum)?);
    group.barrier()
}

fn objects(group: &ProcessGroup) -> Result<()> {
    let name = |rank: usize| (rank, "x".repeat(rank * 5000));
    let all = all_gather_object(group, &name(group.rank()))?;
    assert_eq!(all, (0..group.world_size()).map(name).collect::<Vec<_>>());

    let root = group.world_size() - 1;
    let object = (group.rank() == root).then(|| vec!["a".to_owned(), "b".to_owned()]);
    assert_eq!(broadcast_object(group, object, root)?, ["a", "b"]);

    // A root without an object is an error everywhere, not a wait.
    let error = broadcast_object::<u8>(group, None, root).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");

    let objects: Vec<_> = (0..group.world_size()).map(name).collect();
    let own = (group.rank() == root).then_some(&objects[..]);
    assert_eq!(scatter_object(group, own, root)?, name(group.rank()));
    // JSON has no tuple keys.
    let unwritable = vec![BTreeMap::from([((1, 2), 3)]); group.world_size()];
    for error in [
        scatter_object::<u8>(group, None, root).map(drop),
        scatter_object(group, Some(&objects[1..]), root).map(drop),
        scatter_object(group, Some(&unwritable), root).map(drop),
    ] {
        assert!(matches!(error, Err(Error::InvalidArgument(_))), "{error:?}");
    }
    if root > 0 && group.rank() == 0 {
        send_object(group, &name(3), root)?;
        let error = send_object(group, &unwritable[0], root).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        send_object(group, &"no number", root)?;
    } else if root > 0 && group.rank() == root {
        assert_eq!(recv_object::<(usize, String)>(group, 0)?, name(3));
        for text in ["rank 0 has no object to send", "the object of rank 0 cannot be read"] {
            let error = recv_object::<u8>(group, 0).unwrap_err();
            assert!(error.to_string().starts_with(text), "{error}");
        }
    }
    group.barrier()
}

/// Shared buffers are dropped at different times on the ranks, and outlive the group.
pub(crate) fn buffers(group: ProcessGroup) -> Result<SharedBuf<f32>> {
    let one: SharedBuf<f32> = group.alloc(5000)?;
    let mut two: SharedBuf<f32> = group.alloc(7000)?;
    if group.rank() == 0 {
        drop(one);
    }
    two.fill(1.0);
    group.all_reduce(&mut two, ReduceOp::Sum)?;
    let three: SharedBuf<f32> = group.alloc(0)?;
    assert!(three.is_empty());
    group.barrier()?;
    let world = group.world_size() as f32;
    drop(group);
    assert!(two.iter().all(|&x| x == world));
    Ok(two)
}
