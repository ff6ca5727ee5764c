//! The reducer over ranks that are threads: equal to a separate average of each gradient, in any
//! order of arrival, and errors that name the parameter and the rank.

use std::time::Duration;

use collective::reducer::{BucketPlan, CommHook, Gradient, ParamInfo, Reducer, ReducerOptions};
use collective::{DType, Error, ProcessGroup, ReduceOp};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::common::threads;

const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn ranks<T: Send>(world: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    threads(world, TIMEOUT, rank)
}

fn params(counts: &[usize]) -> Vec<ParamInfo> {
    let info = |(index, &count)| ParamInfo::new(format!("p{index}"), count, DType::F32);
    counts.iter().enumerate().map(info).collect()
}

/// Each parameter has its own bucket once the buckets are rebuilt.
fn tiny() -> ReducerOptions {
    let mut options = ReducerOptions::default();
    (options.first_bucket_bytes, options.bucket_bytes) = (1, 1);
    options
}

fn find_unused() -> ReducerOptions {
    let mut options = tiny();
    options.find_unused_parameters = true;
    options
}

/// One pass in which every element of parameter `i`'s gradient is `value(i)`.
fn pass(reducer: &mut Reducer, counts: &[usize], sync: bool, value: impl Fn(usize) -> f32) {
    reducer.prepare(sync).unwrap();
    for (index, &count) in counts.iter().enumerate().rev() {
        reducer.ready(index, &vec![value(index); count]).unwrap();
    }
    reducer.finish().unwrap();
}

fn grads(reducer: &Reducer, all: usize) -> Vec<Option<f32>> {
    (0..all).map(|index| reducer.grad::<f32>(index).map(|grad| grad[0])).collect()
}

/// The reference: each gradient is kept separately, accumulated, and averaged by its own call.
struct Twin {
    group: ProcessGroup,
    grads: Vec<Option<Grad>>,
}

#[derive(Clone, Debug)]
enum Grad {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    F64(Vec<f64>),
}

macro_rules! each {
    ($grad:expr, $name:ident => $do:expr) => {
        match $grad {
            Grad::F16($name) => $do,
            Grad::Bf16($name) => $do,
            Grad::F32($name) => $do,
            Grad::F64($name) => $do,
        }
    };
}

impl Grad {
    fn new(dtype: DType, count: usize, seed: usize) -> Self {
        let values = (0..count).map(|at| ((seed * 31 + at * 7) % 1009) as f64 / 97.0 - 5.0);
        match dtype {
            DType::F16 => Self::F16(values.map(f16::from_f64).collect()),
            DType::Bf16 => Self::Bf16(values.map(bf16::from_f64).collect()),
            DType::F32 => Self::F32(values.map(|value| value as f32).collect()),
            _ => Self::F64(values.collect()),
        }
    }

    fn add(&mut self, other: &Self) {
        fn add<T: Gradient>(sum: &mut [T], term: &[T]) {
            T::accumulate(sum, term);
        }
        match (self, other) {
            (Self::F16(sum), Self::F16(term)) => add(sum, term),
            (Self::Bf16(sum), Self::Bf16(term)) => add(sum, term),
            (Self::F32(sum), Self::F32(term)) => add(sum, term),
            (Self::F64(sum), Self::F64(term)) => add(sum, term),
            _ => unreachable!("a parameter keeps its type"),
        }
    }

    /// A text that is equal only for equal values.
    fn bits(&self) -> Vec<u8> {
        let text = |debug: String| debug.into_bytes();
        each!(self, values => text(format!("{values:?}")))
    }
}

impl Twin {
    fn ready(&mut self, index: usize, grad: &Grad) {
        match &mut self.grads[index] {
            Some(sum) => sum.add(grad),
            none => *none = Some(grad.clone()),
        }
    }

    fn finish(&mut self) {
        for grad in self.grads.iter_mut().flatten() {
            each!(grad, values => self.group.all_reduce(values, ReduceOp::Avg).unwrap());
        }
    }
}

fn model() -> impl Strategy<Value = Vec<ParamInfo>> {
    let dtype = prop::sample::select(vec![DType::F16, DType::Bf16, DType::F32, DType::F64]);
    prop::collection::vec((0..600_usize, dtype), 0..8).prop_map(|specs| {
        let info = |(index, (count, dtype))| ParamInfo::new(format!("p{index}"), count, dtype);
        specs.into_iter().enumerate().map(info).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn averages_match_the_reference_bit_for_bit(
        model in model(),
        world in 1..4_usize,
        caps in (0..3000_usize, 0..3000_usize),
        // For each pass: whether gradients are averaged, and whether they are zeroed after it.
        passes in prop::collection::vec(any::<(bool, bool)>(), 1..5),
        seed: u16,
    ) {
        let twins = ProcessGroup::threads(world, TIMEOUT).unwrap();
        let (model, passes) = (&model, &passes);
        ranks(world, |group| {
            let rank = group.rank();
            let mut options = ReducerOptions::default();
            (options.first_bucket_bytes, options.bucket_bytes) = caps;
            let mut reducer = Reducer::new(group, model.clone(), options).unwrap();
            let mut twin = Twin { group: twins[rank].clone(), grads: vec![None; model.len()] };
            for (number, &(sync, zero)) in passes.iter().enumerate() {
                reducer.prepare(sync).unwrap();
                // A different order on each rank and in each pass.
                let mut order: Vec<_> = (0..model.len()).collect();
                order.sort_by_key(|index| (index * 7919 + usize::from(seed) + rank * 31 + number * 17) % 101);
                for index in order {
                    let param = &model[index];
                    let grad = Grad::new(param.dtype, param.count, index + rank * 5 + number * 3);
                    each!(&grad, values => reducer.ready(index, values).unwrap());
                    twin.ready(index, &grad);
                }
                reducer.finish().unwrap();
                if sync {
                    twin.finish();
                }
                for (index, want) in twin.grads.iter().enumerate() {
                    let got = match want.as_ref().unwrap() {
                        Grad::F16(_) => reducer.grad(index).map(|grad| Grad::F16(grad.to_vec())),
                        Grad::Bf16(_) => reducer.grad(index).map(|grad| Grad::Bf16(grad.to_vec())),
                        Grad::F32(_) => reducer.grad(index).map(|grad| Grad::F32(grad.to_vec())),
                        Grad::F64(_) => reducer.grad(index).map(|grad| Grad::F64(grad.to_vec())),
                    };
                    assert_eq!(got.unwrap().bits(), want.as_ref().unwrap().bits());
                }
                if zero {
                    reducer.zero_grad();
                    twin.grads.fill(None);
                }
            }
        });
    }
}

#[test]
fn gradients_accumulate_until_zeroed_and_have_one_dtype() {
    ranks(2, |group| {
        let rank = group.rank() as f32;
        let mut reducer = Reducer::new(group, params(&[3, 2]), tiny()).unwrap();
        assert_eq!(grads(&reducer, 2), [None, None]);
        pass(&mut reducer, &[3, 2], true, |index| rank + index as f32);
        assert_eq!(grads(&reducer, 2), [Some(0.5), Some(1.5)]);
        assert_eq!(reducer.grad::<f64>(0), None);
        // The next gradients are added to the average, and averaged again.
        pass(&mut reducer, &[3, 2], true, |_| 2.0 * rank);
        assert_eq!(grads(&reducer, 2), [Some(1.5), Some(2.5)]);
        reducer.zero_grad();
        assert_eq!(grads(&reducer, 2), [None, None]);
        pass(&mut reducer, &[3, 2], true, |_| rank);
        assert_eq!(grads(&reducer, 2), [Some(0.5), Some(0.5)]);
    });
}

#[test]
fn without_sync_gradients_accumulate_locally() {
    ranks(2, |group| {
        let rank = group.rank() as f32;
        let mut reducer = Reducer::new(group, params(&[3, 2]), tiny()).unwrap();
        pass(&mut reducer, &[3, 2], false, |_| rank);
        assert_eq!(grads(&reducer, 2), [Some(rank), Some(rank)]);
        assert_eq!(reducer.launched(), 0);
        pass(&mut reducer, &[3, 2], false, |_| rank);
        pass(&mut reducer, &[3, 2], true, |_| 4.0);
        assert_eq!(grads(&reducer, 2), [Some(5.0), Some(5.0)]);
    });
}

#[test]
fn buckets_are_rebuilt_in_arrival_order_of_rank_0() {
    let counts = [1, 1, 1, 1];
    let plans = ranks(3, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, params(&counts), tiny()).unwrap();
        assert_eq!(reducer.plan().buckets().len(), 1, "one bucket in the first pass");
        for _ in 0..2 {
            reducer.prepare(true).unwrap();
            let order = [[2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0]][rank];
            for index in order {
                reducer.ready(index, &[index as f32]).unwrap();
            }
            reducer.finish().unwrap();
            assert_eq!(grads(&reducer, 4), [0.0, 1.0, 2.0, 3.0].map(Some));
            reducer.zero_grad();
        }
        reducer.plan().clone()
    });
    let want = BucketPlan::arrived(&params(&counts), &[2, 0, 3, 1], &[1, 1]).unwrap();
    assert!(plans.iter().all(|plan| *plan == want));
}

#[test]
fn buckets_are_launched_in_order() {
    ranks(2, |group| {
        let mut reducer = Reducer::new(group, params(&[1, 1, 1]), tiny()).unwrap();
        pass(&mut reducer, &[1, 1, 1], true, |_| 1.0);
        reducer.prepare(true).unwrap();
        // Buckets are [2], [1], [0].
        reducer.ready(1, &[1.0_f32]).unwrap();
        assert_eq!(reducer.launched(), 0);
        reducer.ready(2, &[1.0_f32]).unwrap();
        assert_eq!(reducer.launched(), 2, "before the last gradient is reported");
        assert_eq!(reducer.grad::<f32>(1), None, "in flight");
        reducer.ready(0, &[1.0_f32]).unwrap();
        assert_eq!(reducer.launched(), 3);
        reducer.finish().unwrap();
    });
}

#[test]
fn an_unused_parameter_is_an_error_in_the_same_step_on_every_rank() {
    let errors = ranks(3, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, params(&[1, 1, 1]), tiny()).unwrap();
        pass(&mut reducer, &[1, 1, 1], true, |_| 1.0);
        reducer.prepare(true).unwrap();
        for index in [2, 1, 0] {
            if rank != 1 || index != 1 {
                // The abort may have reached this rank already.
                let _ = reducer.ready(index, &[1.0_f32]);
            }
        }
        let error = reducer.finish().unwrap_err();
        assert!(matches!(reducer.prepare(true), Err(Error::Poisoned(_))));
        error
    });
    match &errors[1] {
        Error::UnusedParameters { rank: 1, names } => assert_eq!(names, &["p1"]),
        other => panic!("{other}"),
    }
    for rank in [0, 2] {
        let text = errors[rank].to_string();
        assert!(text.contains("by rank 1") && text.contains("p1"), "rank {rank}: {text}");
    }
}

#[test]
fn an_unused_parameter_leaves_a_group_of_one_rank_usable() {
    ranks(1, |group| {
        let mut reducer = Reducer::new(group, params(&[1, 1, 1]), tiny()).unwrap();
        for _ in 0..2 {
            reducer.prepare(true).unwrap();
            for index in [2, 0] {
                reducer.ready(index, &[1.0_f32]).unwrap();
            }
            let error = reducer.finish().unwrap_err();
            assert!(matches!(error, Error::UnusedParameters { names, .. } if names == ["p1"]));
            assert_eq!(reducer.grad::<f32>(0), None);
        }
        pass(&mut reducer, &[1, 1, 1], true, |_| 2.0);
        assert_eq!([0, 1, 2].map(|index| reducer.grad(index)), [Some(&[2.0_f32][..]); 3]);
    });
}

#[test]
fn unused_parameters_count_as_zero_or_have_no_gradient() {
    ranks(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, params(&[1; 4]), find_unused()).unwrap();
        let layout = reducer.plan().clone();
        for _ in 0..3 {
            reducer.prepare(true).unwrap();
            // 0: used by both, 1: by rank 0, 2: by rank 1, 3: by none.
            reducer.ready(0, &[2.0_f32]).unwrap();
            reducer.ready(1 + rank, &[4.0_f32]).unwrap();
            reducer.finish().unwrap();
            assert_eq!(grads(&reducer, 4), [Some(2.0), Some(2.0), Some(2.0), None]);
            reducer.zero_grad();
        }
        assert_eq!(*reducer.plan(), layout, "never rebuilt");
        // Gradients accumulated without sync count as used.
        reducer.prepare(false).unwrap();
        reducer.ready(3, &[rank as f32]).unwrap();
        reducer.finish().unwrap();
        reducer.prepare(true).unwrap();
        reducer.finish().unwrap();
        assert_eq!(grads(&reducer, 4), [None, None, None, Some(0.5)]);
    });
}

#[test]
fn different_parameters_or_options_name_the_first_difference() {
    let errors = ranks(3, |group| {
        let mut own = params(&[1, 2, 3]);
        match group.rank() {
            1 => own[1].name = "weird".to_owned(),
            2 => drop(own.pop()),
            _ => {}
        }
        Reducer::new(group, own, tiny()).unwrap_err().to_string()
    });
    for error in errors {
        let named = error.contains("parameter 1 is weird f32 [2]") && error.contains("is p1");
        assert!(named && !error.contains("no parameter 2"), "the first difference: {error}");
    }
    let errors = ranks(2, |group| {
        let options = if group.rank() == 0 { tiny() } else { find_unused() };
        Reducer::new(group, params(&[1]), options).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("find_unused_parameters: true")));
}

#[test]
fn misuse_is_an_error_and_changes_nothing() {
    ranks(2, |group| {
        let uneven = vec![ParamInfo::new("w", 100, DType::F32).with_rows(9)];
        let error = Reducer::new(group.clone(), uneven, tiny()).unwrap_err().to_string();
        assert!(error.contains("parameter w: 100 elements in 9 rows"), "{error}");
        let mut reducer = Reducer::new(group, params(&[2, 2]), tiny()).unwrap();
        let refused = |result: collective::Result<()>, text: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        };
        refused(reducer.ready(0, &[1.0_f32; 2]), "reported before `prepare`");
        refused(reducer.finish(), "`finish` called before `prepare`");
        reducer.prepare(true).unwrap();
        refused(reducer.ready(9, &[1.0_f32; 2]), "parameter 9");
        refused(reducer.ready(0, &[1.0_f32; 3]), "p0 is f32 [3], the parameter is f32 [2]");
        refused(reducer.ready(0, &[1.0_f64; 2]), "p0 is f64 [2]");
        reducer.ready(0, &[1.0_f32; 2]).unwrap();
        refused(reducer.ready(0, &[1.0_f32; 2]), "second gradient for p0");
        reducer.ready(1, &[1.0_f32; 2]).unwrap();
        refused(reducer.prepare(true), "`prepare` called before `finish`");
        reducer.finish().unwrap();
        assert_eq!(grads(&reducer, 2), [Some(1.0), Some(1.0)]);
    });
    let group = ProcessGroup::threads(1, TIMEOUT).unwrap().remove(0);
    let integers = vec![ParamInfo::new("n", 1, DType::I64)];
    assert!(matches!(Reducer::new(group, integers, tiny()), Err(Error::Unsupported { .. })));
}

fn static_graph() -> ReducerOptions {
    let mut options = tiny();
    options.static_graph = true;
    options
}

/// A static graph's buckets are rebuilt after the second pass; parameters unused in the first pass
/// count as zero from then on, and other buckets are launched without waiting for them.
#[test]
fn a_static_graph_learns_unused_parameters_in_the_first_pass() {
    ranks(2, |group| {
        let rank = group.rank();
        let mut reducer = Reducer::new(group, params(&[3, 4, 5, 2]), static_graph()).unwrap();
        // No rank uses 1; only rank 1 uses 3.
        let used = if rank == 0 { vec![2, 0] } else { vec![3, 2, 0] };
        for pass in 0..4_u8 {
            let laid_out = pass >= 2;
            assert_eq!(reducer.plan().buckets().len(), if laid_out { 4 } else { 1 });
            reducer.prepare(true).unwrap();
            for &index in &used {
                let count = reducer.plan().slots()[index].count;
                reducer.ready(index, &vec![f32::from(pass) + 2.0; count]).unwrap();
            }
            if laid_out && rank == 0 {
                // In rank 0's order of arrival; the buckets of both its gradients are launched.
                let first: Vec<_> = reducer.plan().buckets().iter().map(|b| b.params[0]).collect();
                assert_eq!(first, [2, 0, 1, 3]);
                assert!(reducer.launched() >= 2);
            }
            reducer.finish().unwrap();
            let value = f32::from(pass) + 2.0;
            let wanted = [Some(value), None, Some(value), Some(value / 2.0)];
            assert_eq!(grads(&reducer, 4), wanted, "pass {pass} on rank {rank}");
            reducer.zero_grad();
        }
    });
}

#[test]
fn a_static_graph_that_changes_is_an_error() {
    ranks(1, |group| {
        let mut reducer = Reducer::new(group, params(&[3, 4]), static_graph()).unwrap();
        reducer.prepare(true).unwrap();
        reducer.ready(0, &[1.0_f32; 3]).unwrap();
        reducer.finish().unwrap();
        reducer.prepare(true).unwrap();
        let error = reducer.ready(1, &[1.0_f32; 4]).unwrap_err().to_string();
        assert!(error.contains("gradient for p1, which had none in the first pass"), "{error}");
        let error = reducer.finish().unwrap_err();
        assert!(matches!(error, Error::UnusedParameters { ref names, .. } if *names == ["p0"]));
    });
}

/// Gradients are rounded to 16 bits, averaged and rounded again, but stay `f32` for the caller.
#[test]
fn compression_hooks_round_before_and_after_the_average() {
    ranks(2, |group| {
        let rank = group.rank();
        for (hook, wanted) in [
            (CommHook::Fp16Compress, [1.0 + 0.5 / 1024.0, f32::INFINITY]),
            (CommHook::Bf16Compress, [1.0, 99840.0]),
        ] {
            let mut options = tiny();
            options.comm_hook = hook.clone();
            let mut infos = params(&[2]);
            infos.push(ParamInfo::new("half", 2, DType::F16));
            let mut reducer = Reducer::new(group.clone(), infos, options).unwrap();
            for _ in 0..3 {
                reducer.prepare(true).unwrap();
                // 1 + 2^-10 is an f16, and not a bf16; 1e5 is a bf16 when rounded, and no f16.
                let own = if rank == 0 { 1.0 } else { 1.0 + 1.0 / 1024.0 };
                reducer.ready(1, &[f16::from_f32(own); 2]).unwrap();
                reducer.ready(0, &[own, 1e5]).unwrap();
                reducer.finish().unwrap();
                // The mean of two neighbours is a tie, which rounds to even.
                let mean = f16::from_f32(wanted[0].min(1.0 + 0.5 / 1024.0));
                let wanted = [f16::from_f32(wanted[0]).to_f32(), wanted[1]];
                assert_eq!(reducer.grad::<f32>(0).unwrap(), wanted, "{hook:?}");
                assert_eq!(reducer.grad::<f16>(1).unwrap()[0], mean.min(f16::ONE), "{hook:?}");
                reducer.zero_grad();
            }
        }
    });
}

/// Also if gradients of several passes were accumulated.
#[test]
fn the_average_of_one_rank_is_its_own_gradient() {
    ranks(1, |group| {
        let mut reducer = Reducer::new(group.clone(), params(&[3, 2]), tiny()).unwrap();
        for (sync, sum) in [(true, 1.5), (false, 3.0), (true, 4.5)] {
            pass(&mut reducer, &[3, 2], sync, |index| index as f32 + 0.5);
            assert_eq!(reducer.grad::<f32>(1), Some(&[sum; 2][..]));
        }
        reducer.zero_grad();
        pass(&mut reducer, &[3, 2], true, |index| index as f32 + 0.5);
        assert_eq!(reducer.grad::<f32>(0), Some(&[0.5; 3][..]));
        group.abort("enough");
        reducer.prepare(true).unwrap();
        assert!(matches!(reducer.ready(1, &[0.5_f32; 2]), Err(Error::Aborted { by: 0, .. })));
    });
}
