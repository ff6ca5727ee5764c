//! Tests of inputs at the edge of what is defined: refused with an error, or with a defined result.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::PathBuf;

use amp::{Autocast, CastRule};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::nn::llama::LlamaCache;
use candle_ops::nn::lora::{LoraOptions, lora, save_peft};
use candle_ops::nn::{
    Gru, Llama, LlamaConfig, Lstm, RnnConfig, VarMap, linear, linear_no_bias, loss, pretrained,
    seeded,
};
use candle_ops::{
    ConvOptions, ConvTransposeOptions, PadMode, Window, autocast, avg_pool2d, conv_transpose1d,
    conv_transpose2d, conv1d, conv2d, conv3d, gather, instance_norm, lowered_operators, max_pool2d,
    mean, mean_keepdim, pad, pixel_shuffle, pixel_unshuffle, scatter, scatter_add, sum,
    sum_keepdim,
};

const CPU: Device = Device::Cpu;

fn new<A: candle_core::NdArray>(values: A) -> Tensor {
    Tensor::new(values, &CPU).unwrap()
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &CPU).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The message of an error, with what must be in it.
fn assert_error<T>(result: Result<T>, expected: &str) {
    let Err(error) = result else { panic!("no error: {expected}") };
    let message = error.to_string();
    assert!(message.contains(expected), "{message}, not {expected}");
}

fn temporary(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("candle-ops-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn parsed(more: &str) -> Result<LlamaConfig> {
    let text = format!(
        r#"{{"vocab_size": 9, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
            "num_attention_heads": 2{more}}}"#
    );
    serde_json::from_str(&text).map_err(candle_core::Error::wrap)
}

fn small() -> LlamaConfig {
    parsed("").unwrap()
}

fn build(config: &LlamaConfig) -> Result<Llama> {
    Llama::new(config, seeded(&VarMap::new(), 0, DType::F32, &CPU))
}

#[test]
fn quantized_models_are_refused() {
    assert_error(parsed(r#", "quantization_config": {"bits": 4}"#), "`quantization_config`");
    assert_eq!(parsed(r#", "quantization_config": null"#).unwrap(), small());
    let folder = temporary("quantized");
    let file = folder.join("model.safetensors");
    for dtype in [DType::F8E4M3, DType::U8, DType::I32] {
        let weight = ones(&[2, 2]).to_dtype(dtype).unwrap();
        candle_core::safetensors::save(&HashMap::from([("fc.weight", weight)]), &file).unwrap();
        let vb = |dtype| pretrained(&VarMap::new(), &file, 0, dtype, &CPU).unwrap().pp("fc");
        let layer = linear_no_bias(2, 2, vb(DType::F32));
        assert_error(layer, "`fc.weight` has type ");
        // Integers that are asked for.
        if dtype != DType::F8E4M3 {
            assert_eq!(vb(dtype).get((2, 2), "weight").unwrap().dtype(), dtype);
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_index_names_files_of_its_folder() {
    let folder = temporary("index");
    for name in ["../other.safetensors", "/other.safetensors", "a/b.safetensors", ".."] {
        let index = format!(r#"{{"weight_map": {{"w": "{name}"}}}}"#);
        std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
        let vb = pretrained(&VarMap::new(), &folder, 0, DType::F32, &CPU);
        assert_error(vb.map(drop), &format!("`{name}` is not the name of a file"));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn impossible_sizes_of_a_llama_are_refused() {
    for count in [1 << 45, usize::MAX] {
        let config = LlamaConfig { max_position_embeddings: count, ..small() };
        assert_error(build(&config), "max_position_embeddings");
    }
    let (heads, depth) = (1 << 33, Some(1 << 33));
    let config = LlamaConfig {
        num_attention_heads: heads,
        num_key_value_heads: heads,
        head_dim: depth,
        ..small()
    };
    assert_error(build(&config), "8589934592 heads of a width of 8589934592");
    for rope_theta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_error(build(&LlamaConfig { rope_theta, ..small() }), "rope_theta is ");
    }
}

#[test]
fn both_spellings_of_a_rope_type_are_read() {
    let scaling = |names: &str| {
        parsed(&format!(
            r#", "rope_scaling": {{{names}, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#
        ))
    };
    let one = scaling(r#""rope_type": "llama3""#).unwrap();
    assert_eq!(scaling(r#""type": "llama3", "rope_type": "llama3""#).unwrap(), one);
    assert_eq!(scaling(r#""type": "llama3""#).unwrap(), one);
    assert!(one.rope_scaling.is_some());
    assert_error(scaling(r#""type": "llama3", "rope_type": "yarn""#), "type `yarn`");
}

#[test]
fn a_cache_of_another_number_of_layers_is_refused() {
    let [one, two] = [1, 2].map(|count| LlamaConfig { num_hidden_layers: count, ..small() });
    let [one, two] = [one, two].map(|config| build(&config).unwrap());
    let (tokens, mut cache) = (new(&[[1_u32, 2]]), LlamaCache::default());
    two.forward_cached(&tokens, &mut cache).unwrap();
    assert_error(one.forward_cached(&tokens, &mut cache), "a cache of 2 layers for a model of 1");
    assert_eq!(cache.len(), 2);
    two.forward_cached(&tokens, &mut cache).unwrap();
}

#[test]
fn adapters_of_another_rank_are_not_saved() {
    let vars = VarMap::new();
    let mut options =
        LoraOptions { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["*".to_owned()] };
    lora(&options, || linear(4, 4, seeded(&vars, 0, DType::F32, &CPU).pp("fc"))).unwrap();
    options.rank = 3;
    let folder = temporary("rank");
    assert_error(save_peft(&vars, &options, &folder), "`fc` has an adapter of rank 2, not 3");
    assert!(std::fs::read_dir(&folder).unwrap().next().is_none());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn integers_are_summed_in_i64_and_have_no_mean() {
    for dtype in [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64] {
        let x = ones(&[2, 300]).to_dtype(dtype).unwrap();
        let y = sum(&x, 1).unwrap();
        assert_eq!(y.to_vec1::<i64>().unwrap(), [300, 300], "{dtype:?}");
        assert_eq!(sum_keepdim(&x, 1).unwrap().to_vec2::<i64>().unwrap(), [[300], [300]]);
        assert_error(mean(&x, 1), "mean: the mean of integers");
        assert_error(mean_keepdim(&x, 1), "mean: the mean of integers");
    }
}

#[test]
fn padding_of_sequences_does_not_matter() {
    let vars = VarMap::new();
    let vb = seeded(&vars, 0, DType::F32, &CPU);
    let config = RnnConfig { num_layers: 2, bidirectional: true, ..RnnConfig::default() };
    let lstm = Lstm::new(3, 4, config, vb.pp("lstm")).unwrap();
    let gru = Gru::new(3, 4, config, vb.pp("gru")).unwrap();
    let with = |padding: f32| {
        let kept = Tensor::cat(&[ones(&[2, 2, 3]), ones(&[2, 2, 3]).affine(0.0, 0.5)?], 1)?;
        let sample = |at: usize, length: usize| {
            let rest = Tensor::full(padding, (1, 4 - length, 3), &CPU)?;
            Tensor::cat(&[kept.narrow(0, at, 1)?.narrow(1, 0, length)?, rest], 1)
        };
        let x = Var::from_tensor(&Tensor::cat(&[sample(0, 4)?, sample(1, 2)?], 0)?)?;
        let lengths = Some(&[4, 2][..]);
        let (a, b) =
            (lstm.forward_with(&x, None, lengths)?.0, gru.forward_with(&x, None, lengths)?.0);
        let gradients = (a.sum_all()? + b.sum_all()?)?.backward()?;
        let mut all = vec![flat(&a), flat(&b), flat(gradients.get(&x).unwrap())];
        let vars = vars.data().lock().unwrap();
        let mut names: Vec<_> = vars.keys().collect();
        names.sort();
        all.extend(names.into_iter().map(|name| flat(gradients.get(&vars[name]).unwrap())));
        Ok::<_, candle_core::Error>(all)
    };
    let zeros = with(0.0).unwrap();
    assert!(zeros.iter().flatten().all(|v| v.is_finite()));
    for padding in [f32::NAN, f32::INFINITY] {
        assert_eq!(with(padding).unwrap(), zeros, "{padding}");
    }
}

#[test]
fn equal_values_have_no_gradient_of_smooth_l1() {
    let x = Var::new(&[1f32, 2.0, 3.0, f32::NAN], &CPU).unwrap();
    let target = new(&[1f32, 5.0, 0.0, 0.0]);
    let y = loss::smooth_l1(&x, &target, 0.0).unwrap();
    assert!(y.to_scalar::<f32>().unwrap().is_nan());
    let gradient = flat(y.backward().unwrap().get(&x).unwrap());
    assert_eq!(gradient[..3], [0.0, -0.25, 0.25]);
}

#[test]
fn options_of_losses_out_of_range_are_refused() {
    let x = ones(&[2]);
    for delta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_error(loss::huber(&x, &x, delta), "huber: delta is ");
    }
    for beta in [-1.0, f64::NAN, f64::INFINITY] {
        assert_error(loss::smooth_l1(&x, &x, beta), "smooth_l1: beta is ");
    }
}

#[test]
fn labels_of_nll_out_of_range_are_refused() {
    let log = ones(&[2, 3]);
    let error = |labels: &Tensor| assert_error(loss::nll(&log, labels), "is none of 3 classes");
    for label in [u32::MAX, 3] {
        error(&new(&[0, label]));
    }
    for label in [i64::MAX, -1, 3, i64::from(u32::MAX)] {
        error(&new(&[0, label]));
    }
    assert_error(loss::nll(&log, &new(&[0f32, 1.0])), "i64 or u32, not F32");
    assert_eq!(loss::nll(&log, &new(&[0_u8, 2])).unwrap().to_scalar::<f32>().unwrap(), -1.0);
}

#[test]
fn impossible_events_have_no_term_in_kl_div() {
    let log = Var::new(&[[f32::NEG_INFINITY, 0.0]], &CPU).unwrap();
    let target = Var::new(&[[0f32, 1.0]], &CPU).unwrap();
    let y = loss::kl_div(&log, &target).unwrap();
    assert_eq!(y.to_scalar::<f32>().unwrap(), 0.0);
    let gradients = y.backward().unwrap();
    assert_eq!(flat(gradients.get(&log).unwrap()), [0.0, -1.0]);
    assert!(flat(gradients.get(&target).unwrap()).iter().all(|v| v.is_finite()));
    let certain = loss::kl_div(&log, &new(&[[0.5f32, 0.5]])).unwrap();
    assert_eq!(certain.to_scalar::<f32>().unwrap(), f32::INFINITY);
}

#[test]
fn indices_that_are_not_integers_are_refused() {
    let (x, at) = (ones(&[2, 3]), ones(&[2, 3]));
    assert_error(gather(&x, &at, 1), "gather: indices must be integers, not F32");
    assert_error(scatter(&x, &at, &x, 1), "scatter: indices must be integers, not F32");
    assert_error(scatter_add(&x, &at, &x, 1), "scatter_add: indices must be integers, not F32");
    let at = at.to_dtype(DType::U8).unwrap();
    assert_eq!(gather(&x, &at, 1).unwrap().dims(), [2, 3]);
}

/// Operators that call another one are cast once, by their own rule.
#[test]
fn composed_operators_are_cast_by_their_own_rule() {
    let low = |op: &str| Autocast::cuda().with_rule(op, CastRule::LowerPrecisionFp);
    let (x, w, b) = (ones(&[1, 2, 2, 3, 3]), ones(&[2, 2, 1, 2, 2]), ones(&[2]));
    let conv = || conv3d(&x, &w, Some(&b), Window::default()).unwrap().dtype();
    let keep = Autocast::cuda().without_rule("conv3d");
    assert_eq!(autocast(&keep, conv), DType::F32);
    let wide = Autocast::cuda().with_rule("conv2d", CastRule::Fp32);
    assert_eq!(autocast(&wide, conv), DType::F16);
    let count = || {
        conv();
        lowered_operators()
    };
    assert_eq!(autocast(&Autocast::cuda(), count), 1);
    let image = ones(&[2, 2, 3, 3]);
    let half = image.to_dtype(DType::F16).unwrap();
    let norm =
        |x: &Tensor, with: bool| instance_norm(x, with.then_some((&b, &b)), 1e-5).unwrap().dtype();
    for with in [false, true] {
        // `group_norm` is in a list, `instance_norm` in none.
        assert_eq!(autocast(&Autocast::cuda(), || norm(&half, with)), DType::F16);
        assert_eq!(autocast(&low("instance_norm"), || norm(&image, with)), DType::F16);
    }
}

/// The documentation's lists of operators with a rule and without one.
#[test]
fn operators_with_a_rule_are_listed() {
    let page = include_str!("../../src/lib.rs");
    let (_, listed) = page.split_once("with PyTorch's name for").unwrap();
    let (listed, rest) = listed.split_once("In no").unwrap();
    let (rest, _) = rest.split_once("\n\n").unwrap();
    let policies = [Autocast::cpu(), Autocast::cuda()];
    for (text, expected) in [(listed, true), (rest, false)] {
        for name in text.split('`').skip(1).step_by(2).filter(|name| *name != "swiglu") {
            let has_rule = policies.iter().any(|policy| policy.rule(name).is_some());
            assert_eq!(has_rule, expected, "{name}");
        }
    }
}

#[test]
fn paddings_that_overflow_are_refused() {
    let (image, weight, line) = (ones(&[1, 1, 4, 4]), ones(&[1, 1, 3, 3]), ones(&[1, 1, 4]));
    for padding in [usize::MAX, usize::MAX / 2 + 1] {
        let window = Window { stride: 1, padding };
        assert_error(conv2d(&image, &weight, None, window), "does not fit");
        assert_error(conv1d(&line, &ones(&[1, 1, 3]), None, window), "does not fit");
        assert!(max_pool2d(&image, 2, window).is_err());
        assert_error(avg_pool2d(&image, usize::MAX, window), "");
        let options = ConvTransposeOptions { padding, ..Default::default() };
        assert_error(conv_transpose2d(&image, &weight, None, options), "leave nothing");
        assert_error(conv_transpose1d(&line, &ones(&[1, 1, 3]), None, options), "leave nothing");
        for both in [(padding, 0), (0, padding), (padding, padding)] {
            let padded = pad(&image, &[both], PadMode::Constant(0.0));
            assert_error(padded, "pad: ");
        }
    }
    let dilation = usize::MAX;
    let options = ConvOptions { dilation, ..Default::default() };
    assert_error(conv2d(&image, &weight, None, options), "dilation");
}

#[test]
fn pixel_shuffles_by_no_factor_are_refused() {
    let x = ones(&[1, 4, 2, 2]);
    assert_error(pixel_shuffle(&x, 0), "pixel_shuffle: a factor of 0");
    assert_error(pixel_unshuffle(&x, 0), "pixel_unshuffle: a factor of 0");
    let wide = pixel_shuffle(&x, 2).unwrap();
    assert_eq!(
        (wide.dims(), pixel_unshuffle(&wide, 2).unwrap().dims()),
        (&[1, 1, 4, 4][..], x.dims())
    );
}
