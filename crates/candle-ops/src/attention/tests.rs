//! Tests of scaled dot-product attention, with the checks of `tests/mod.rs`.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use proptest::prelude::*;

use crate::tests::{assert_differentiates, assert_rounds_once, distance, flat, run, values};
use crate::*;

/// Attention composed of candle's operators, with keys and values repeated for each group.
fn stock_attention(t: &[Tensor], options: SdpaOptions<'_>) -> Result<Tensor> {
    let (heads, kv_heads) = (t[0].dim(1)?, t[1].dim(1)?);
    let (queries, keys, depth) = (t[0].dim(2)?, t[1].dim(2)?, t[0].dim(3)?);
    let repeated = |t: &Tensor| {
        let at: Vec<u32> = (0..heads).map(|head| (head * kv_heads / heads) as u32).collect();
        t.index_select(&Tensor::new(at, &Device::Cpu)?, 1)
    };
    let (k, v) = (repeated(&t[1])?, repeated(&t[2])?);
    let scale = options.scale.unwrap_or_else(|| (depth as f64).sqrt().recip());
    let mut scores = (t[0].matmul(&k.t()?.contiguous()?)? * scale)?;
    if options.causal {
        let unseen = |at: usize| if at % keys > at / keys { f64::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f64> = (0..queries * keys).map(unseen).collect();
        let mask = Tensor::from_vec(mask, (queries, keys), &Device::Cpu)?;
        scores = scores.broadcast_add(&mask.to_dtype(scores.dtype())?)?;
    }
    if let Some(mask) = options.mask {
        let mask = match mask.dtype() {
            DType::U8 => ((mask.to_dtype(scores.dtype())? - 1.0)? * 1e30)?,
            _ => mask.to_dtype(scores.dtype())?,
        };
        scores = scores.broadcast_add(&mask)?;
    }
    candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)
}

/// Queries, keys and values.
fn qkv(heads: [usize; 2], lengths: [usize; 2], depths: [usize; 2]) -> [Tensor; 3] {
    [
        values("q", &[2, heads[0], lengths[0], depths[0]]),
        values("k", &[2, heads[1], lengths[1], depths[0]]),
        values("v", &[2, heads[1], lengths[1], depths[1]]),
    ]
}

/// A mask with at least one visible element in each row and column.
fn seen(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let keys = shape[shape.len() - 1];
    let seen = (0..count).map(|i| u8::from(i % keys == 0 || i * 7 % 5 < 3)).collect();
    Tensor::from_vec(seen, shape, &Device::Cpu).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// All lengths, including some around block sizes of queries.
    #[test]
    fn attention_is_candles(
        kv_heads in 1usize..3, group in 1usize..4, queries in prop_oneof![1usize..9, 126usize..260],
        keys in prop_oneof![1usize..9, 126usize..140], depth in 1usize..5, width in 1usize..5,
        causal: bool, masked in 0..5, scale in prop_oneof![Just(None), Just(Some(0.3))],
    ) {
        let inputs = qkv([kv_heads * group, kv_heads], [queries, keys], [depth, width]);
        let mask = match masked {
            0 => None,
            1 => Some(seen(&[queries, keys])),
            2 => Some(seen(&[2, 1, 1, keys])),
            3 => Some(values("mask", &[kv_heads * group, 1, keys])),
            _ => Some(values("mask", &[2, 1, queries, 1])),
        };
        let options = SdpaOptions { mask: mask.as_ref(), causal, scale, dropout: 0.0 };
        let sdpa = |t: &[Tensor]| scaled_dot_product_attention(&t[0], &t[1], &t[2], options);
        let stock = run(&inputs, |t| stock_attention(t, options)).unwrap();
        // The same with positions before heads.
        let thd = |t: &[Tensor]| {
            let [q, k, v] = [0, 1, 2].map(|i| t[i].transpose(1, 2).unwrap().contiguous().unwrap());
            scaled_dot_product_attention_thd(&q, &k, &v, options)?.transpose(1, 2)?.contiguous()
        };
        let ours = [
            run(&inputs, sdpa).unwrap(),
            run(&inputs, thd).unwrap(),
            composed(|| run(&inputs, sdpa).unwrap()),
            composed(|| run(&inputs, thd).unwrap()),
        ];
        for ours in ours {
            for (ours, stock) in ours.iter().zip(&stock) {
                prop_assert!(distance(ours, stock) < 1e-4);
            }
        }
    }
}

#[test]
fn attention_differentiates_and_rounds_once() {
    let mask = seen(&[3, 5]);
    let bias = values("bias", &[4, 1, 5]);
    for (heads, causal, mask, scale) in [
        ([2, 2], false, None, None),
        ([4, 2], true, None, Some(0.7)),
        ([4, 1], false, Some(&mask), None),
        ([4, 4], true, Some(&bias), None),
    ] {
        let inputs = qkv(heads, [3, 5], [4, 2]);
        let options = SdpaOptions { mask, causal, scale, dropout: 0.0 };
        let sdpa = |t: &[Tensor]| scaled_dot_product_attention(&t[0], &t[1], &t[2], options);
        assert_differentiates("attention", &inputs, sdpa);
        assert_rounds_once("attention", &inputs, sdpa);
    }
}

/// For example a table of relative positions.
#[test]
fn a_mask_can_be_a_parameter() {
    let [q, k, v] = qkv([4, 2], [3, 5], [4, 2]);
    let sdpa = |t: &[Tensor]| {
        let options = SdpaOptions { mask: Some(&t[3]), causal: true, ..Default::default() };
        scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
    };
    for shape in [&[2, 4, 3, 5][..], &[4, 1, 5], &[5]] {
        let inputs = [q.clone(), k.clone(), v.clone(), values("mask", shape)];
        assert_differentiates("attention with a parameter as mask", &inputs, sdpa);
        let constant = flat(&sdpa(&inputs).unwrap());
        let inputs = inputs.each_ref().map(|t| t.to_dtype(DType::BF16).unwrap());
        let half = run(&inputs, sdpa).unwrap();
        assert!(half.iter().all(|t| t.dtype() == DType::BF16));
        let apart =
            flat(&half[0]).iter().zip(&constant).fold(0_f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(apart < 0.05, "{apart}");
    }
}

#[test]
fn a_query_that_sees_nothing_has_a_result_of_zero_and_gives_no_gradient() {
    let inputs = qkv([2, 2], [3, 4], [4, 4]);
    let hidden = [[1_u8, 0, 1, 1], [0; 4], [1, 1, 1, 0]];
    let hidden = Tensor::new(&hidden, &Device::Cpu).unwrap();
    let far = (hidden.to_dtype(DType::F32).unwrap().log()).unwrap();
    for (mask, causal) in [(&hidden, false), (&far, false), (&far, true)] {
        let options = SdpaOptions { mask: Some(mask), causal, ..Default::default() };
        let sdpa = |t: &[Tensor]| scaled_dot_product_attention(&t[0], &t[1], &t[2], options);
        assert_differentiates("attention that sees nothing", &inputs, sdpa);
        for all in [run(&inputs, sdpa).unwrap(), composed(|| run(&inputs, sdpa).unwrap())] {
            for part in [0, 1] {
                let row = all[part].narrow(2, 1, 1).unwrap();
                assert!(flat(&row).iter().all(|v| *v == 0.0));
            }
        }
    }
    // A NaN among the keys is propagated.
    let [q, k, v] = inputs;
    let nan = (&q * f64::NAN).unwrap();
    let options = SdpaOptions { mask: Some(&hidden), ..Default::default() };
    let y = scaled_dot_product_attention(&nan, &k, &v, options).unwrap();
    assert!(flat(&y).iter().all(|v| v.is_nan()));
}

#[test]
fn dropout_of_attention_is_the_contexts() {
    let inputs = qkv([4, 2], [150, 140], [8, 8]);
    for causal in [false, true] {
        let options = |dropout| SdpaOptions { causal, dropout, ..Default::default() };
        let sdpa = |dropout| {
            move |t: &[Tensor]| scaled_dot_product_attention(&t[0], &t[1], &t[2], options(dropout))
        };
        let trained = |p| {
            let mut context = Context::new(5);
            let all = context.enter(|| run(&inputs, sdpa(p)).unwrap());
            (all, context.random_position())
        };
        let (loops, position) = trained(0.3);
        assert_eq!(position, 2 * 4 * 150 * 140);
        // One random word per weight, by position, so that a composition drops the same weights.
        let (composition, end) = composed(|| trained(0.3));
        assert_eq!(end, position);
        for (i, (a, b)) in loops.iter().zip(&composition).enumerate() {
            assert!(distance(a, b) < 1e-4, "tensor {i}");
        }
        let (kept, position) = trained(0.0);
        assert_eq!(position, 0);
        assert!(distance(&loops[0], &kept[0]) > 0.01);
        let plain = run(&inputs, sdpa(0.3)).unwrap();
        assert_eq!(flat(&plain[0]), flat(&kept[0]));
    }
    // The gradient uses the same weights.
    let small = qkv([2, 1], [3, 4], [4, 2]);
    assert_differentiates("attention with dropout", &small, |t| {
        Context::new(1).enter(|| {
            let options = SdpaOptions { dropout: 0.4, ..Default::default() };
            scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
        })
    });
}

#[test]
fn attention_apart_is_attention_side_by_side() {
    let (heads, depth, positions) = (3, 4, 140);
    let qkv = values("qkv", &[2, positions, 3 * heads * depth]);
    for causal in [false, true] {
        let packed = run(std::slice::from_ref(&qkv), |t| {
            self_attention(&t[0], AttentionOptions { heads, causal })
        });
        let apart = run(std::slice::from_ref(&qkv), |t| {
            let parts = t[0].reshape((2, positions, 3, heads, depth))?;
            let part = |i| parts.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2);
            let options = SdpaOptions { causal, ..Default::default() };
            let y = scaled_dot_product_attention(&part(0)?, &part(1)?, &part(2)?, options)?;
            y.transpose(1, 2)?.flatten_from(2)
        });
        for (packed, apart) in packed.unwrap().iter().zip(&apart.unwrap()) {
            assert_eq!(flat(packed), flat(apart));
        }
    }
}

#[test]
fn attention_refuses_what_does_not_fit() {
    let q = values("q", &[2, 4, 3, 8]);
    let of = |k: [usize; 4], v: [usize; 4], options: SdpaOptions<'_>| {
        scaled_dot_product_attention(&q, &values("k", &k), &values("v", &v), options)
    };
    let plain = SdpaOptions { ..Default::default() };
    for (k, v) in [
        ([2, 3, 5, 8], [2, 3, 5, 8]),
        ([2, 4, 5, 7], [2, 4, 5, 8]),
        ([2, 4, 5, 8], [2, 4, 6, 8]),
        ([1, 4, 5, 8], [1, 4, 5, 8]),
        ([2, 4, 0, 8], [2, 4, 0, 8]),
        ([2, 0, 5, 8], [2, 0, 5, 8]),
    ] {
        let error = of(k, v, plain).unwrap_err().to_string();
        assert!(error.contains("do not fit keys"), "{error}");
    }
    let shape = [2, 4, 5, 8];
    for mask in [seen(&[5, 3]), seen(&[1, 2, 4, 3, 5]), seen(&[2, 3, 5])] {
        let error = of(shape, shape, SdpaOptions { mask: Some(&mask), ..plain }).unwrap_err();
        assert!(error.to_string().contains("does not fit scores [2, 4, 3, 5]"), "{error}");
    }
    let mask = seen(&[3, 5]).to_dtype(DType::I64).unwrap();
    let error = of(shape, shape, SdpaOptions { mask: Some(&mask), ..plain }).unwrap_err();
    assert!(error.to_string().contains("a mask must be of u8 or a floating-point type"), "{error}");
    let error = of(shape, shape, SdpaOptions { dropout: 1.0, ..plain }).unwrap_err();
    assert!(error.to_string().contains("p is 1"), "{error}");
    let half = values("k", &shape).to_dtype(DType::F16).unwrap();
    let error = scaled_dot_product_attention(&q, &half, &half, plain).unwrap_err();
    assert!(error.to_string().contains("need one type"), "{error}");
}

#[test]
fn no_queries_and_no_samples_give_empty_results() {
    for shape in [[0, 2, 3, 4], [1, 2, 0, 4]] {
        let q = Var::from_tensor(&values("q", &shape)).unwrap();
        let k = values("k", &[shape[0], 1, 3, 4]);
        let y = scaled_dot_product_attention(&q, &k, &k, SdpaOptions::default()).unwrap();
        assert_eq!(y.dims(), shape);
        y.sum_all().unwrap().backward().unwrap();
    }
}
