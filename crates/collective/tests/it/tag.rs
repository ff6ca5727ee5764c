//! Tags of calls: ranks that call the same verb on different tensors are told so.

use std::sync::Arc;
use std::time::Duration;

use collective::{Error, GroupOptions, ProcessGroup, ReduceOp, Result, Transport};

/// Results of each of two ranks, over shared memory and over TCP.
fn on_two_ranks(call: impl Fn(&ProcessGroup) -> Result<()> + Sync) -> Vec<[Result<()>; 2]> {
    let timeout = Duration::from_secs(30);
    [Transport::Host, Transport::Tcp]
        .map(|transport| {
            let store = Arc::new(collective::MemoryStore::new());
            std::thread::scope(|scope| {
                let run = |rank| {
                    let (store, call) = (store.clone(), &call);
                    let options = GroupOptions::default().with_timeout(timeout);
                    let options = options.with_transport(transport);
                    scope.spawn(move || {
                        call(&ProcessGroup::from_store(store, rank, 2, options).unwrap())
                    })
                };
                [run(0), run(1)].map(|rank| rank.join().unwrap())
            })
        })
        .into()
}

/// A call on a group, with the rank's tag.
type Tagged = fn(&ProcessGroup) -> Result<()>;

const CALLS: [Tagged; 4] = [
    |group| group.all_reduce(&mut [1.0_f32; 64], ReduceOp::Avg),
    |group| group.all_reduce_async(vec![1.0_f32; 64], ReduceOp::Avg)?.wait().map(drop),
    |group| group.all_to_all(&mut [0_u8; 8], &[0; 8]),
    |group| group.all_gather_v(&mut [0_u8; 3], &[0; 3][..group.rank() + 1], &[1, 2]),
];

#[test]
fn ranks_with_different_tags_are_told_both() {
    for call in CALLS {
        let tags = ["l0.weight", "l3.weight"];
        for ranks in on_two_ranks(|group| call(&group.with_tag(tags[group.rank()]))) {
            let texts = ranks.map(|result| match result.unwrap_err() {
                error @ Error::Mismatch { field: "tag", .. } => error.to_string(),
                other => panic!("{other}"),
            });
            assert_eq!(texts[0], texts[1]);
            let (zero, one) = (texts[0].find("l0.weight"), texts[0].find("l3.weight"));
            assert!(zero.is_some() && zero < one, "{}", texts[0]);
            assert!(texts[0].contains("rank 0") && texts[0].contains("rank 1"), "{}", texts[0]);
        }
    }
}

#[test]
fn equal_tags_change_nothing() {
    let long =
        "a name of more than sixty-four bytes, é, which is cut only in an error's text ".repeat(2);
    for ranks in on_two_ranks(|group| {
        let mut values = [group.rank() as f32, 1.0];
        group.with_tag(&long).all_reduce(&mut values, ReduceOp::Sum)?;
        assert_eq!(values, [1.0, 2.0]);
        CALLS.iter().try_for_each(|call| call(&group.with_tag(&long)))?;
        group.all_reduce(&mut values, ReduceOp::Sum)
    }) {
        ranks.into_iter().for_each(Result::unwrap);
    }
}

/// The order of a `VarMap`'s variables differs by process: ranks would average one tensor with
/// another.
#[test]
fn a_tag_that_one_rank_leaves_out_or_another_count_is_an_error_on_both() {
    let calls: [fn(&ProcessGroup) -> Result<()>; 2] = [
        |group| match group.rank() {
            0 => group.with_tag("w").all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
            _ => group.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
        },
        |group| {
            let mut values = vec![1.0_f32; 8 + group.rank()];
            group.with_tag("w").all_reduce(&mut values, ReduceOp::Sum)
        },
    ];
    for call in calls {
        for ranks in on_two_ranks(call) {
            assert!(
                ranks.iter().all(|result| matches!(result, Err(Error::Mismatch { .. }))),
                "{ranks:?}"
            );
        }
    }
}
