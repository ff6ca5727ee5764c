//! Assigns parameters to buckets: a pure function of the parameters, an order, and caps.
//!
//! The rule is PyTorch's. Parameters are taken in order; each dtype has one open bucket; the
//! parameter that brings a bucket to its cap, or beyond it, is the bucket's last. The next bucket
//! of that dtype has the next cap; the last cap applies to all further buckets.
//!
//! Invariant: every parameter is in exactly one bucket; the parameters of a bucket are in the given
//! order, of one dtype, and packed without gaps or overlaps.

use crate::{DType, Error, Result};

/// One parameter; the same list on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Its name, for error texts: `layer1.0.conv1.weight`.
    pub name: String,
    /// Number of elements.
    pub count: usize,
    /// Element type of the parameter and of its gradient.
    pub dtype: DType,
    /// Length of the first dimension if there are two or more, else 0. Used only by PowerSGD, which
    /// treats the parameter as a matrix with this many rows.
    pub rows: usize,
}

impl ParamInfo {
    /// Creates the description of a vector from its name, number of elements and type.
    pub fn new(name: impl Into<String>, count: usize, dtype: DType) -> Self {
        Self { name: name.into(), count, dtype, rows: 0 }
    }

    /// Sets the number of rows, for a parameter that is a matrix.
    pub fn with_rows(mut self, rows: usize) -> Self {
        self.rows = rows;
        self
    }
}

/// One bucket: parameters that are reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketSpec {
    /// Element type of all of them.
    pub dtype: DType,
    /// Indices of the parameters, in memory order.
    pub params: Vec<usize>,
    /// Total number of elements.
    pub count: usize,
}

/// A parameter's location in its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slot {
    /// Index of the bucket.
    pub bucket: usize,
    /// Offset in the bucket, in elements.
    pub offset: usize,
    /// Number of elements.
    pub count: usize,
}

/// A complete assignment of parameters to buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<BucketSpec>,
    slots: Vec<Slot>,
}

impl BucketPlan {
    /// The plan before any gradient has arrived: buckets are filled in registration order and then
    /// reversed, because backward begins with the parameters registered last. The caps are in
    /// bytes; with the single cap [`usize::MAX`] each dtype has one bucket.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] without caps, or if the parameters' total size overflows.
    pub fn registered(params: &[ParamInfo], caps: &[usize]) -> Result<Self> {
        let mut buckets = fill(params, 0..params.len(), caps)?;
        buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.params[0]));
        Ok(Self::of(params, buckets))
    }

    /// The plan for gradients that arrive in `order`: buckets are filled in that order, and ordered
    /// by when they are full.
    ///
    /// # Errors
    ///
    /// Same as [`registered`](Self::registered), and if `order` is not a permutation of the
    /// parameters.
    pub fn arrived(params: &[ParamInfo], order: &[usize], caps: &[usize]) -> Result<Self> {
        let mut seen = vec![false; params.len()];
        let fresh =
            |&index: &usize| seen.get_mut(index).is_some_and(|seen| !std::mem::replace(seen, true));
        if order.len() != params.len() || !order.iter().all(fresh) {
            let text = "the order of arrival is not a permutation of the parameters";
            return Err(Error::InvalidArgument(text.to_owned()));
        }
        Ok(Self::of(params, fill(params, order.iter().copied(), caps)?))
    }

    fn of(params: &[ParamInfo], buckets: Vec<BucketSpec>) -> Self {
        let mut slots = vec![Slot { bucket: 0, offset: 0, count: 0 }; params.len()];
        for (bucket, spec) in buckets.iter().enumerate() {
            let mut offset = 0;
            for &index in &spec.params {
                let count = params[index].count;
                slots[index] = Slot { bucket, offset, count };
                offset += count;
            }
        }
        Self { buckets, slots }
    }

    /// The buckets, in the order in which they are reduced.
    pub fn buckets(&self) -> &[BucketSpec] {
        &self.buckets
    }

    /// Each parameter's location, by its index.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }
}

/// Returns the buckets in the order in which they become full, followed by those that never do.
fn fill(
    params: &[ParamInfo],
    order: impl Iterator<Item = usize>,
    caps: &[usize],
) -> Result<Vec<BucketSpec>> {
    let invalid = |text: &str| Error::InvalidArgument(text.to_owned());
    let last = caps.last().ok_or_else(|| invalid("a bucket plan needs at least one cap"))?;
    let mut closed = Vec::new();
    // One open bucket for each dtype, and the number of buckets of that dtype closed before it.
    let mut open: Vec<(BucketSpec, usize)> = Vec::new();
    for index in order {
        let param = &params[index];
        let at =
            open.iter().position(|(bucket, _)| bucket.dtype == param.dtype).unwrap_or_else(|| {
                open.push((BucketSpec::new(param.dtype), 0));
                open.len() - 1
            });
        let (bucket, before) = &mut open[at];
        bucket.params.push(index);
        let count = bucket.count.checked_add(param.count);
        let bytes = count.and_then(|count| count.checked_mul(param.dtype.size()));
        let (Some(count), Some(bytes)) = (count, bytes) else {
            return Err(invalid("the total size of the parameters overflows"));
        };
        bucket.count = count;
        if bytes >= *caps.get(*before).unwrap_or(last) {
            *before += 1;
            closed.push(std::mem::replace(bucket, BucketSpec::new(param.dtype)));
        }
    }
    closed.extend(open.into_iter().map(|(bucket, _)| bucket).filter(|b| !b.params.is_empty()));
    Ok(closed)
}

impl BucketSpec {
    fn new(dtype: DType) -> Self {
        Self { dtype, params: Vec::new(), count: 0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params() -> impl Strategy<Value = Vec<ParamInfo>> {
        let dtype = prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16]);
        prop::collection::vec((0..300_usize, dtype), 0..40).prop_map(|specs| {
            specs.into_iter().map(|(count, dtype)| ParamInfo::new("p", count, dtype)).collect()
        })
    }

    fn with_order() -> impl Strategy<Value = (Vec<ParamInfo>, Vec<usize>)> {
        params().prop_flat_map(|params| {
            let order = Just((0..params.len()).collect::<Vec<_>>()).prop_shuffle();
            (Just(params), order)
        })
    }

    fn check(plan: &BucketPlan, params: &[ParamInfo], order: &[usize]) {
        let rank = |index: usize| order.iter().position(|&other| other == index);
        assert_eq!(plan.slots().len(), params.len());
        let mut seen = vec![0; params.len()];
        for (at, bucket) in plan.buckets().iter().enumerate() {
            assert!(!bucket.params.is_empty());
            assert!(bucket.params.is_sorted_by_key(|&index| rank(index)), "order kept");
            let mut offset = 0;
            for &index in &bucket.params {
                seen[index] += 1;
                assert_eq!(params[index].dtype, bucket.dtype);
                let slot = Slot { bucket: at, offset, count: params[index].count };
                assert_eq!(plan.slots()[index], slot);
                offset += params[index].count;
            }
            assert_eq!(offset, bucket.count);
        }
        assert!(seen.iter().all(|&times| times == 1), "each in exactly one bucket");
    }

    proptest! {
        #[test]
        fn plans_keep_the_invariant(
            (params, order) in with_order(),
            caps in prop::collection::vec(0..2000_usize, 1..4),
        ) {
            check(&BucketPlan::arrived(&params, &order, &caps).unwrap(), &params, &order);
            let registered: Vec<_> = (0..params.len()).collect();
            check(&BucketPlan::registered(&params, &caps).unwrap(), &params, &registered);
        }

        #[test]
        fn a_bucket_reaches_its_cap_with_its_last_parameter(
            (mut params, order) in with_order(),
            caps in prop::collection::vec(1..2000_usize, 1..4),
        ) {
            params.iter_mut().for_each(|param| param.dtype = DType::F32);
            let plan = BucketPlan::arrived(&params, &order, &caps).unwrap();
            let closed = plan.buckets().len().saturating_sub(1);
            for (at, bucket) in plan.buckets().iter().enumerate() {
                let cap = caps[at.min(caps.len() - 1)];
                let last = params[*bucket.params.last().unwrap()].count;
                prop_assert!((bucket.count - last) * 4 < cap);
                prop_assert!(at == closed || bucket.count * 4 >= cap);
            }
        }

        #[test]
        fn an_unlimited_cap_makes_one_bucket_per_dtype(params in params()) {
            let plan = BucketPlan::registered(&params, &[usize::MAX]).unwrap();
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                let buckets = plan.buckets().iter().filter(|bucket| bucket.dtype == dtype);
                prop_assert!(buckets.count() <= 1);
            }
        }
    }

    #[test]
    fn invalid_orders_caps_and_sizes_are_errors() {
        let params = [ParamInfo::new("a", 1, DType::F32), ParamInfo::new("b", 1, DType::F32)];
        for order in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 1]] {
            assert!(BucketPlan::arrived(&params, order, &[1]).is_err(), "{order:?}");
        }
        assert!(BucketPlan::registered(&params, &[]).is_err());
        let huge = [ParamInfo::new("a", usize::MAX, DType::F32)];
        assert!(BucketPlan::registered(&huge, &[1]).is_err());
    }
}
