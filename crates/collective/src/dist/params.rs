//! Reduces a model's parameters, of several types, in a chosen number of operations.
//!
//! The grouping depends only on types and lengths: each type has one open bucket, which is closed
//! before a parameter that would make it too large. Closed buckets come first, in the order in
//! which they were closed; then the open ones, in the order in which their types first occurred. So
//! all ranks make the same calls. PyTorch's `_take_tensors` does the same.
//!
//! Invariant: the bytes of a [`Param`] are a slice of the type of its `dtype`, and no other code
//! accesses them.

#![expect(unsafe_code, reason = "erases the type of slices")]

use super::several;
use crate::{DType, Element, ProcessGroup, ReduceOp, Result};

/// Number of operations of [`all_reduce_params`]. It does not affect the bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Coalesce {
    /// One per type; the default.
    #[default]
    PerType,
    /// As few as possible, each of at most `bytes` bytes unless a single parameter is larger.
    Buckets {
        /// The limit; MMEngine's `bucket_size_mb` is in units of 2^20.
        bytes: usize,
    },
    /// One per parameter.
    Never,
}

/// The numbers of one parameter, of any [`Element`] type.
#[derive(Debug)]
pub struct Param<'a> {
    dtype: DType,
    /// Number of elements.
    count: usize,
    bytes: &'a mut [u8],
    /// [`reduce_bucket`] for the type.
    reduce: fn(&mut [&mut Self], ReduceOp, &ProcessGroup) -> Result<()>,
}

impl<'a, T: Element> From<&'a mut [T]> for Param<'a> {
    fn from(data: &'a mut [T]) -> Self {
        let (count, bytes) = (data.len(), size_of_val(data));
        // SAFETY: the memory of `data`, which is borrowed for `'a`; elements have no padding, so
        // all its bytes are initialized, and only `reduce_bucket` writes them, as elements of `T`.
        let bytes = unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), bytes) };
        Self { dtype: T::DTYPE, count, bytes, reduce: reduce_bucket::<T> }
    }
}

/// Reduces parameters, all of this type, in one operation.
fn reduce_bucket<T: Element>(
    bucket: &mut [&mut Param<'_>],
    op: ReduceOp,
    group: &ProcessGroup,
) -> Result<()> {
    let numbers = bucket.iter_mut().map(|param| {
        assert_eq!(param.dtype, T::DTYPE, "a bucket has one type");
        let start = param.bytes.as_mut_ptr().cast::<T>();
        // SAFETY: each `DType` belongs to one type, so `from` made these bytes from `count`
        // elements of `T`, aligned and initialized; they are borrowed mutably as long as `param`.
        unsafe { std::slice::from_raw_parts_mut(start, param.count) }
    });
    match &mut numbers.collect::<Vec<_>>()[..] {
        [alone] => group.all_reduce(alone, op),
        several => group.all_reduce_coalesced(several, op),
    }
}

/// Reduces parameters or buffers of a model, in place; every rank gets the result, with the same
/// bits for any `coalesce`.
///
/// Every rank must call it with the same number of parameters, of the same types and lengths in the
/// same order, and the same `op` and `coalesce`. Blocks. Without a group it does nothing.
///
/// # Errors
///
/// [`Error::Mismatch`](crate::Error::Mismatch) if the ranks' parameters differ in total length or
/// type per operation; else as [`ProcessGroup::all_reduce`]. Parameters before the failing one may
/// have been reduced.
///
/// # Examples
///
/// ```
/// use collective::ReduceOp;
/// use collective::dist::{Coalesce, Param, all_reduce_params};
///
/// let (mut weight, mut steps) = ([0.5_f32, 1.0], [3_i64]);
/// let mut params = [Param::from(&mut weight[..]), Param::from(&mut steps[..])];
/// all_reduce_params(&mut params, ReduceOp::Sum, Coalesce::PerType, None)?;
/// # Ok::<(), collective::Error>(())
/// ```
pub fn all_reduce_params(
    params: &mut [Param<'_>],
    op: ReduceOp,
    coalesce: Coalesce,
    group: Option<&ProcessGroup>,
) -> Result<()> {
    let Some(group) = several(group) else { return Ok(()) };
    let shapes: Vec<_> = params.iter().map(|param| (param.dtype, param.count)).collect();
    let buckets = plan(&shapes, coalesce);
    let mut params: Vec<Option<&mut Param<'_>>> = params.iter_mut().map(Some).collect();
    for bucket in buckets {
        let mut bucket: Vec<_> = bucket.iter().filter_map(|&index| params[index].take()).collect();
        let reduce = bucket[0].reduce;
        reduce(&mut bucket, op, group)?;
    }
    Ok(())
}

/// Groups parameters into buckets: lists of indices, none empty.
fn plan(shapes: &[(DType, usize)], coalesce: Coalesce) -> Vec<Vec<usize>> {
    let limit = match coalesce {
        Coalesce::PerType => usize::MAX,
        Coalesce::Buckets { bytes } => bytes,
        Coalesce::Never => return (0..shapes.len()).map(|index| vec![index]).collect(),
    };
    let mut closed = Vec::new();
    let mut open: Vec<(DType, usize, Vec<usize>)> = Vec::new();
    for (index, &(dtype, count)) in shapes.iter().enumerate() {
        let bytes = count * dtype.size();
        let at = open.iter().position(|(other, ..)| *other == dtype).unwrap_or_else(|| {
            open.push((dtype, 0, Vec::new()));
            open.len() - 1
        });
        let (_, size, bucket) = &mut open[at];
        if *size > 0 && size.saturating_add(bytes) > limit {
            closed.push(std::mem::take(bucket));
            *size = 0;
        }
        bucket.push(index);
        *size = size.saturating_add(bytes);
    }
    closed.extend(open.into_iter().map(|(.., bucket)| bucket));
    closed
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_parameter_that_does_not_fit_starts_a_new_bucket() {
        use DType::{F16, F32};
        let shapes = [(F32, 1), (F16, 3), (F32, 1), (F32, 5), (F16, 1), (F32, 1)];
        let plan = |coalesce| plan(&shapes, coalesce);
        assert_eq!(plan(Coalesce::PerType), [vec![0, 2, 3, 5], vec![1, 4]]);
        assert_eq!(plan(Coalesce::Never), [[0], [1], [2], [3], [4], [5]]);
        let small = plan(Coalesce::Buckets { bytes: 8 });
        assert_eq!(small, [vec![0, 2], vec![3], vec![5], vec![1, 4]]);
        assert_eq!(plan(Coalesce::Buckets { bytes: 0 }).len(), 6);
    }

    proptest! {
        #[test]
        fn every_parameter_is_in_one_bucket_of_its_type_within_the_limit(
            shapes in proptest::collection::vec((0..DType::ALL.len(), 0..20_usize), 0..40),
            limit in 0..200_usize,
        ) {
            let shapes: Vec<_> =
                shapes.into_iter().map(|(code, count)| (DType::ALL[code], count)).collect();
            let bytes = |index: &usize| shapes[*index].1 * shapes[*index].0.size();
            let buckets = plan(&shapes, Coalesce::Buckets { bytes: limit });
            let mut seen: Vec<usize> = buckets.concat();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..shapes.len()).collect::<Vec<_>>());
            for bucket in &buckets {
                prop_assert!(bucket.is_sorted());
                prop_assert!(bucket.iter().all(|&index| shapes[index].0 == shapes[bucket[0]].0));
                let full: usize = bucket.iter().map(bytes).sum();
                let filled = bucket.iter().filter(|index| bytes(index) > 0).count();
                prop_assert!(full <= limit || filled == 1);
            }
            // The first parameter of a bucket did not fit into the type's previous one.
            for dtype in DType::ALL {
                let of_type = buckets.iter().filter(|bucket| shapes[bucket[0]].0 == dtype);
                let of_type: Vec<_> = of_type.collect();
                for pair in of_type.windows(2) {
                    let full: usize = pair[0].iter().map(bytes).sum();
                    prop_assert!(full + bytes(&pair[1][0]) > limit);
                }
            }
        }
    }
}
