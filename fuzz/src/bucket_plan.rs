//! Lays out buckets for arbitrary parameters, orders and caps.
//!
//! Input: two caps of four bytes each, then four bytes for each parameter: three are its count, the
//! fourth its position in the order of arrival and, by its low bits, its dtype. Checks: every
//! parameter lies in exactly one bucket, in order, without gap or overlap.

use collective::DType;
use collective::reducer::{BucketPlan, ParamInfo};

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((caps, data)) = data.split_first_chunk::<8>() else { return };
    let cap = |at: usize| u32::from_le_bytes([caps[at], caps[at + 1], caps[at + 2], caps[at + 3]]);
    let caps = [cap(0) as usize, cap(4) as usize];
    let (specs, _) = data.as_chunks::<4>();
    let dtypes = [DType::F32, DType::F16, DType::Bf16, DType::F64];
    let param = |&[a, b, c, kind]: &[u8; 4]| {
        let count = u32::from_le_bytes([a, b, c, 0]) as usize;
        ParamInfo::new("", count, dtypes[usize::from(kind % 4)])
    };
    let params: Vec<_> = specs.iter().map(param).collect();
    let mut order: Vec<_> = (0..params.len()).collect();
    order.sort_by_key(|&index| specs[index][3]);

    check_plan(&params, &order, &BucketPlan::arrived(&params, &order, &caps).expect("small"));
    order.sort();
    check_plan(&params, &order, &BucketPlan::registered(&params, &caps).expect("small"));
}

fn check_plan(params: &[ParamInfo], order: &[usize], plan: &BucketPlan) {
    let mut rank = vec![0; params.len()];
    for (at, &index) in order.iter().enumerate() {
        rank[index] = at;
    }
    let mut seen = vec![false; params.len()];
    for (at, bucket) in plan.buckets().iter().enumerate() {
        assert!(bucket.params.is_sorted_by_key(|&index| rank[index]));
        let mut offset = 0;
        for &index in &bucket.params {
            assert!(!std::mem::replace(&mut seen[index], true));
            assert_eq!(params[index].dtype, bucket.dtype);
            let place = plan.slots()[index];
            assert_eq!((place.bucket, place.offset), (at, offset));
            assert_eq!(place.count, params[index].count);
            offset += place.count;
        }
        assert_eq!(offset, bucket.count);
    }
    assert!(seen.iter().all(|&seen| seen));
}
