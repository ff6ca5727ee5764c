//! Tests that compare the layers with candle-nn's, including their names and initial values.

use std::slice;

use candle_core::{D, Device};

use super::*;
use crate::Context;
use crate::tests::{distance, flat, run, values};

fn builder(vars: &VarMap, dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_varmap(vars, dtype, &Device::Cpu)
}

#[test]
fn batch_norm_tracks_as_pytorch_does() {
    let norm = batch_norm(1, 1e-5, builder(&VarMap::new(), DType::F32)).unwrap();
    let x = Tensor::new(&[[[[1f32, 2.0], [3.0, 6.0]]]], &Device::Cpu).unwrap();
    let y = norm.forward_t(&x, true).unwrap();
    // Mean 3, squared deviations 4 + 1 + 0 + 9 = 14: biased 3.5, unbiased 14 / 3.
    let mean = norm.running_mean().to_vec1::<f32>().unwrap()[0];
    let var = norm.running_var().to_vec1::<f32>().unwrap()[0];
    assert!((mean - 0.3).abs() < 1e-6, "{mean}");
    assert!((var - (0.9 + 0.1 * 14.0 / 3.0)).abs() < 1e-6, "{var}");
    let y = y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!((y[3] - 3.0 / 3.5f32.sqrt()).abs() < 1e-5, "{y:?}");
    let y = norm.forward_t(&x, false).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!((y[3] - (6.0 - mean) / (var + 1e-5).sqrt()).abs() < 1e-5, "{y:?}");
}

#[test]
fn names_are_pytorchs() {
    let vars = VarMap::new();
    let vb = builder(&vars, DType::F32);
    conv2d_no_bias(2, 3, 3, Conv2dConfig::default(), vb.pp("conv")).unwrap();
    linear(4, 5, vb.pp("fc")).unwrap();
    linear_no_bias(4, 5, vb.pp("out")).unwrap();
    batch_norm(3, 1e-5, vb.pp("bn")).unwrap();
    layer_norm(3, 1e-5, vb.pp("ln")).unwrap();
    rms_norm(3, 1e-5, vb.pp("rms")).unwrap();
    embedding(3, 2, vb.pp("tokens")).unwrap();
    group_norm(2, 4, 1e-5, vb.pp("gn")).unwrap();
    let affine = InstanceNormConfig { affine: true, ..Default::default() };
    instance_norm(3, affine, vb.pp("in")).unwrap();
    instance_norm(3, InstanceNormConfig::default(), vb.pp("plain")).unwrap();
    let config = Conv1dConfig { groups: 2, ..Default::default() };
    assert_eq!(conv1d(4, 6, 3, config, vb.pp("c1")).unwrap().weight().dims(), [6, 2, 3]);
    let config = ConvTranspose1dConfig { groups: 2, ..Default::default() };
    let turned = conv_transpose1d_no_bias(4, 6, 3, config, vb.pp("t1")).unwrap();
    assert_eq!(turned.weight().dims(), [4, 3, 3]);
    let turned = conv_transpose2d(4, 6, 3, Default::default(), vb.pp("t2")).unwrap();
    assert_eq!(turned.weight().dims(), [4, 6, 3, 3]);
    let mut names: Vec<_> = vars.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    assert_eq!(
        names,
        [
            "bn.bias",
            "bn.running_mean",
            "bn.running_var",
            "bn.weight",
            "c1.bias",
            "c1.weight",
            "conv.weight",
            "fc.bias",
            "fc.weight",
            "gn.bias",
            "gn.weight",
            "in.bias",
            "in.weight",
            "ln.bias",
            "ln.weight",
            "out.weight",
            "rms.weight",
            "t1.weight",
            "t2.bias",
            "t2.weight",
            "tokens.weight"
        ]
    );
}

#[test]
fn instance_norm_is_its_function_with_or_without_parameters() {
    let x = values("x", &[2, 3, 4, 5]);
    let (weight, bias) = (values("w", &[3]), values("b", &[3]));
    let norm = InstanceNorm::new(3, weight.clone(), bias.clone(), 0.125).unwrap();
    let plain = instance_norm(3, Default::default(), builder(&VarMap::new(), DType::F32)).unwrap();
    let affine = Some((&weight, &bias));
    for (got, wanted) in [
        (passed(&x, |x| norm.forward(x)), passed(&x, |x| crate::instance_norm(x, affine, 0.125))),
        (passed(&x, |x| plain.forward(x)), passed(&x, |x| crate::instance_norm(x, None, 1e-5))),
    ] {
        assert_eq!(got.map(|t| flat(&t)), wanted.map(|t| flat(&t)));
    }
    assert!(plain.weight_and_bias().is_none() && norm.weight_and_bias().is_some());
    let error = InstanceNorm::new(4, weight, bias, 1e-5).unwrap_err().to_string();
    assert!(error.contains("both must be [4]"), "{error}");
    for shape in [&[2, 4, 3][..], &[3]] {
        for norm in [&norm, &plain] {
            let error = norm.forward(&values("x", shape)).unwrap_err().to_string();
            assert!(error.contains("for 3 channels"), "{error}");
        }
    }
}

#[test]
fn layer_norm_takes_the_old_names_of_a_checkpoint() {
    let table = [("gamma", 3.0), ("beta", 2.0)].map(|(name, value)| {
        (name.to_owned(), Tensor::full(value as f32, 4, &Device::Cpu).unwrap())
    });
    let vb = VarBuilder::from_tensors(table.into(), DType::F32, &Device::Cpu);
    let norm = layer_norm(4, 1e-5, vb).unwrap();
    assert_eq!(norm.weight().to_vec1::<f32>().unwrap(), [3.0; 4]);
    assert_eq!(norm.bias().unwrap().to_vec1::<f32>().unwrap(), [2.0; 4]);
}

/// The output of a layer, and the gradient of its input.
fn passed(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> [Tensor; 2] {
    run(slice::from_ref(x), |x| f(&x[0])).unwrap().try_into().unwrap()
}

/// All layers of candle-nn that have a correct gradient, for two different `use` lines.
macro_rules! layers {
    ($nn:ident, $name:ident) => {
        fn $name() -> Vec<Box<dyn Fn(&Tensor) -> Result<Tensor>>> {
            use $nn::{Activation, BatchNorm, Conv2d, Conv2dConfig, Embedding, LayerNorm, Linear};
            use $nn::{ConvTranspose2d, ConvTranspose2dConfig, GroupNorm};
            use $nn::{loss, ops, rotary_emb};
            let like = |name: &str, dims: &[usize]| values(name, dims);
            let (weight, bias) = (like("weight", &[6, 8]), like("bias", &[6]));
            let (scale, shift) = (like("scale", &[8]), like("shift", &[8]));
            let kernel = like("kernel", &[4, 3, 3, 3]);
            let image = |x: &Tensor| x.transpose(0, 1)?.narrow(0, 0, 3)?.contiguous()?.unsqueeze(0);
            let (zeros, ones) = (scale.zeros_like().unwrap(), scale.ones_like().unwrap());
            let statistics = [&zeros, &ones].map(|t| t.narrow(0, 0, 3).unwrap());
            let config = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
            let conv = Conv2d::new(kernel, Some(like("bias", &[4])), config);
            let [mean, var] = statistics.map(|t| t.contiguous().unwrap());
            let (gamma, beta) = (like("gamma", &[3]), like("beta", &[3]));
            let norm = BatchNorm::new(3, mean, var, gamma, beta, 1e-5).unwrap();
            let (mean, var) = (like("mean", &[4]), like("var", &[4]).sqr().unwrap());
            let behind = BatchNorm::new(4, mean, var, like("g", &[4]), like("b", &[4]), 1e-5);
            let absorbed = conv.absorb_bn(&behind.unwrap()).unwrap();
            let turned = ConvTranspose2dConfig { padding: 1, stride: 2, ..Default::default() };
            let turned = ConvTranspose2d::new(like("t", &[3, 2, 3, 3]), None, turned);
            let groups = GroupNorm::new(like("g", &[4]), like("b", &[4]), 4, 2, 1e-5).unwrap();
            let deep = Conv2dConfig { padding: 1, groups: 3, ..Default::default() };
            let deep = Conv2d::new(like("d", &[3, 1, 3, 3]), None, deep);
            let linear = Linear::new(weight.clone(), Some(bias));
            let plain = Linear::new(weight, None);
            let no_bias = LayerNorm::new_no_bias(scale.clone(), 1e-5);
            let slow = (scale.clone(), shift);
            let rms = LayerNorm::rms_norm(scale, 1e-5);
            let ids = Tensor::new(&[[1u32, 0], [2, 2]], &Device::Cpu).unwrap();
            let labels = Tensor::new(&[1u32, 0, 7, 2], &Device::Cpu).unwrap();
            let (cos, sin) = (like("cos", &[4, 4]), like("sin", &[4, 4]));
            let training = norm.clone();
            let mut all: Vec<Box<dyn Fn(&Tensor) -> Result<Tensor>>> = vec![
                Box::new(move |x| linear.forward(x)),
                Box::new(move |x| plain.forward(x)),
                Box::new(move |x| conv.forward(&image(x)?)),
                Box::new(move |x| absorbed.forward(&image(x)?)),
                Box::new(move |x| norm.forward_t(&image(x)?, false)),
                Box::new(move |x| training.forward_t(&x.narrow(1, 0, 3)?, true)),
                Box::new(move |x| turned.forward(&image(x)?)),
                Box::new(move |x| deep.forward(&image(x)?)),
                Box::new(move |x| groups.forward(x)),
                Box::new(move |x| no_bias.forward(x)),
                Box::new(move |x| rms.forward(x)),
                Box::new(move |x| ops::layer_norm_slow(x, &slow.0, &slow.1, 1e-5)),
                Box::new(move |x| Embedding::new(x.get(0)?, 8).forward(&ids)),
                Box::new(|x| ops::softmax(x, 1)),
                Box::new(|x| ops::softmax(x, D::Minus1)),
                Box::new(|x| ops::silu(x)),
                Box::new(|x| ops::swiglu(x)),
                Box::new(move |x| loss::cross_entropy(&x.get(0)?, &labels)),
                Box::new(move |x| rotary_emb::rope_slow(&x.unsqueeze(0)?, &cos, &sin)),
            ];
            let activations = [
                Activation::Gelu,
                Activation::NewGelu,
                Activation::Relu,
                Activation::Relu2,
                Activation::Silu,
                Activation::Swish,
                Activation::HardSwish,
                Activation::Elu(0.3),
                Activation::LeakyRelu(0.1),
            ];
            for activation in activations {
                all.push(Box::new(move |x| activation.forward(x)));
            }
            all
        }
    };
}

layers!(candle_nn, stock);
use crate::nn as ours_nn;
layers!(ours_nn, ours);

#[test]
fn layers_are_candle_nns_with_its_names() {
    let x = values("x", &[2, 4, 8]);
    for (at, (ours, stock)) in ours().iter().zip(stock()).enumerate() {
        let (got, want) = (passed(&x, ours), passed(&x, stock));
        for (got, want) in got.iter().zip(&want) {
            assert!(distance(got, want) < 1e-5, "{at}: {got} instead of {want}");
        }
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "values beside candle-nn's, which have no gradient")]
fn what_candle_nn_has_no_gradient_for_has_one() {
    let x = values("x", &[2, 2, 4, 8]);
    let (scale, shift) = (values("scale", &[8]), values("shift", &[8]));
    let (cos, sin) = (values("cos", &[4, 4]), values("sin", &[4, 4]));
    let equal = |ours: &dyn Fn(&Tensor) -> Result<Tensor>,
                 stock: &dyn Fn(&Tensor) -> Result<Tensor>| {
        assert!(distance(&passed(&x, ours)[0], &stock(&x).unwrap()) < 1e-5);
    };
    equal(&|x| ops::softmax_last_dim(x), &|x| candle_nn::ops::softmax_last_dim(x));
    equal(&|x| ops::layer_norm(x, &scale, &shift, 1e-5), &|x| {
        candle_nn::ops::layer_norm(x, &scale, &shift, 1e-5)
    });
    equal(&|x| ops::rms_norm(x, &scale, 1e-5), &|x| candle_nn::ops::rms_norm(x, &scale, 1e-5));
    use candle_nn::rotary_emb as stock;
    equal(&|x| rotary_emb::rope(x, &cos, &sin), &|x| stock::rope(x, &cos, &sin));
    equal(&|x| rotary_emb::rope_i(x, &cos, &sin), &|x| stock::rope_i(x, &cos, &sin));
    equal(&|x| rotary_emb::rope_thd(x, &cos, &sin), &|x| stock::rope_thd(x, &cos, &sin));
}

#[test]
fn norm_parameters_are_f32_beside_half_ones_and_f64_beside_f64() {
    for (dtype, expected) in
        [(DType::BF16, DType::F32), (DType::F32, DType::F32), (DType::F64, DType::F64)]
    {
        let vars = VarMap::new();
        let vb = builder(&vars, dtype);
        assert_eq!(linear(2, 2, vb.pp("fc")).unwrap().weight().dtype(), dtype);
        let norm = layer_norm(2, 1e-5, vb.pp("ln")).unwrap();
        assert_eq!(norm.weight().dtype(), expected);
        let x = Tensor::ones((3, 2), dtype, &Device::Cpu).unwrap();
        assert_eq!(norm.forward(&x).unwrap().dtype(), dtype);
        let bn = batch_norm(2, 1e-5, vb.pp("bn")).unwrap();
        assert_eq!(bn.forward_t(&x, true).unwrap().dtype(), dtype);
        assert_eq!(bn.forward_t(&x, false).unwrap().dtype(), dtype);
        assert_eq!(bn.running_var().dtype(), DType::F32);
    }
}

#[test]
fn training_with_dropout_outside_of_a_context_is_an_error() {
    let (x, dropout) = (Tensor::ones(64, DType::F32, &Device::Cpu).unwrap(), Dropout::new(0.5));
    let error = dropout.forward(&x, true).unwrap_err().to_string();
    assert!(error.contains("Context::enter"), "{error}");
    let mut context = Context::new(1);
    let sum = |y: Result<Tensor>| flat(&y.unwrap()).iter().filter(|v| **v == 0.0).count();
    assert_eq!(sum(dropout.forward(&x, false)), 0);
    assert!(context.enter(|| sum(dropout.forward_t(&x, true))) > 0);
    assert_eq!(context.enter(|| sum(dropout.forward_t(&x, false))), 0);
    assert_eq!(context.evaluate(|| sum(dropout.forward_t(&x, true))), 0);
}

#[test]
fn activations_have_candle_nns_spelling() {
    for text in ["\"gelu\"", "\"gelu_new\"", "\"silu\"", "\"gelu_pytorch_tanh\"", "{\"elu\":0.5}"] {
        let stock: candle_nn::Activation = serde_json::from_str(text).unwrap();
        let ours: Activation = serde_json::from_str(text).unwrap();
        assert_eq!(format!("{ours:?}"), format!("{stock:?}"));
        assert_eq!(serde_json::to_string(&ours).unwrap(), serde_json::to_string(&stock).unwrap());
    }
}

#[test]
fn layers_and_losses_reach_the_options_of_operators() {
    let (table, x) = (values("table", &[5, 4]), values("x", &[3, 5]));
    let ids = Tensor::new(&[2u32, 0, 2], &Device::Cpu).unwrap();
    let layer = |t: &Tensor| Embedding::new(t.clone(), 4).with_padding_idx(2);
    let [_, gradient] = passed(&table, |t| layer(t).forward(&ids));
    let rows = gradient.to_vec2::<f32>().unwrap();
    assert!(rows[2] == [0.0; 4] && rows[0].iter().all(|g| *g != 0.0), "{rows:?}");
    let error = Embedding::new(table.clone(), 4).with_padding_idx(5).forward(&ids).unwrap_err();
    assert!(error.to_string().contains("padding 5 is none of 5 rows"), "{error}");

    let options = loss::CrossEntropyOptions {
        ignore_index: Some(0),
        label_smoothing: 0.25,
        ..Default::default()
    };
    let want = passed(&x, |x| crate::cross_entropy_with(x, &ids, options));
    let plain = passed(&x, |x| crate::cross_entropy(x, &ids));
    for dtype in [DType::U32, DType::I64, DType::U8, DType::I32] {
        let ids = ids.to_dtype(dtype).unwrap();
        for (want, got) in [
            (&want, passed(&x, |x| loss::cross_entropy_with(x, &ids, options))),
            (&plain, passed(&x, |x| loss::cross_entropy(x, &ids))),
        ] {
            assert_eq!([flat(&got[0]), flat(&got[1])], [flat(&want[0]), flat(&want[1])]);
        }
        layer(&table).forward(&ids).unwrap();
    }
    let ids = Tensor::new(&[1.9f32, 0.0, 2.0], &Device::Cpu).unwrap();
    for refused in [
        layer(&table).forward(&ids),
        loss::cross_entropy(&x, &ids),
        loss::cross_entropy_with(&x, &ids, options),
    ] {
        let error = refused.map(|y| y.to_string()).unwrap_err().to_string();
        assert!(error.contains("i64 or u32, not F32"), "{error}");
    }
}

#[test]
fn sdpa_has_candle_nns_arguments() {
    let slow = |t: &[Tensor], mask: &Tensor| {
        let repeated = |t: &Tensor| Tensor::cat(&[t, t], 1);
        let scores = (t[0].matmul(&repeated(&t[1])?.t()?.contiguous()?)? * 0.3)?;
        ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)?.matmul(&repeated(&t[2])?)
    };
    // Lengths of queries and keys, and the first key that is hidden from the first query.
    for (queries, keys, first_unseen) in [(4, 4, 1), (3, 5, 3), (1, 5, 5)] {
        let inputs = [("q", 2, queries), ("k", 1, keys), ("v", 1, keys)]
            .map(|(name, heads, t)| values(name, &[2, heads, t, 4]));
        let none = Tensor::zeros((queries, keys), DType::F32, &Device::Cpu).unwrap();
        let unseen = |i: usize| if i % keys >= i / keys + first_unseen { f32::MIN } else { 0.0 };
        let causal = Tensor::from_iter((0..queries * keys).map(unseen), &Device::Cpu).unwrap();
        let causal = causal.reshape((queries, keys)).unwrap();
        let mask = values("mask", &[queries, keys]);
        for (given, do_causal, wanted) in [
            (None, false, &none),
            (None, true, &causal),
            (Some(&mask), false, &mask),
            (Some(&mask), true, &mask),
        ] {
            let ours = |t: &[Tensor]| ops::sdpa(&t[0], &t[1], &t[2], given, do_causal, 0.3, 1.0);
            let got = run(&inputs, ours).unwrap();
            let want = run(&inputs, |t| slow(t, wanted)).unwrap();
            for (got, want) in got.iter().zip(&want) {
                let off = distance(got, want);
                assert!(off < 1e-5, "{queries} {keys} {do_causal}: off by {off}");
            }
        }
        let [q, k, v] = &inputs;
        let error = ops::sdpa(q, k, v, None, false, 0.3, 30.0).unwrap_err().to_string();
        assert!(error.contains("softcapping 30"), "{error}");
    }
}

#[test]
fn a_layer_larger_than_memory_is_an_error_that_names_it() {
    type Make = fn(usize, VarBuilder<'_>) -> Result<()>;
    let makes: [(&str, Make); 13] = [
        ("weight", |n, vb| linear(n, 10, vb).map(drop)),
        ("weight", |n, vb| linear_no_bias(10, n, vb).map(drop)),
        ("weight", |n, vb| embedding(n, 8, vb).map(drop)),
        ("weight", |n, vb| conv1d(n, 4, 3, Default::default(), vb).map(drop)),
        ("weight", |n, vb| conv2d(n, 64, 3, Default::default(), vb).map(drop)),
        ("weight", |n, vb| conv2d_no_bias(4, 4, n, Default::default(), vb).map(drop)),
        ("weight", |n, vb| conv_transpose1d(4, n, 3, Default::default(), vb).map(drop)),
        ("weight", |n, vb| conv_transpose2d(n, 4, 3, Default::default(), vb).map(drop)),
        ("weight", |n, vb| batch_norm(n, 1e-5, vb).map(drop)),
        ("running_mean", |n, vb| {
            let config = BatchNormConfig { affine: false, ..Default::default() };
            batch_norm(n, config, vb).map(drop)
        }),
        ("weight", |n, vb| group_norm(1, n, 1e-5, vb).map(drop)),
        ("weight", |n, vb| {
            let config = InstanceNormConfig { affine: true, ..Default::default() };
            instance_norm(n, config, vb).map(drop)
        }),
        ("weight", |n, vb| rms_norm(n, 1e-5, vb).map(drop)),
    ];
    for (name, make) in makes {
        for size in [1_000_000_000_000_000, i64::MAX as usize, usize::MAX] {
            let vars = VarMap::new();
            let error = make(size, builder(&vars, DType::F32).pp("a.b")).unwrap_err().to_string();
            let expected =
                [&format!("parameter `a.b.{name}` of shape ["), " bytes", &size.to_string()];
            assert!(expected.iter().all(|part| error.contains(*part)), "{size}: {error}");
            assert!(vars.all_vars().is_empty());
        }
    }
    let error = linear(1 << 50, 1, builder(&VarMap::new(), DType::F16)).unwrap_err().to_string();
    assert!(
        error.contains("parameter `weight` of shape [1, 1125899906842624] and type f16"),
        "{error}"
    );
    assert!(error.contains("would have 2251799813685248 bytes"), "{error}");
    let targets = vec!["*".to_owned()];
    let options = LoraOptions { rank: 1 << 50, alpha: 1.0, dropout: 0.0, targets };
    let vars = VarMap::new();
    let build = || linear(4, 4, builder(&vars, DType::F32).pp("q"));
    let error = lora(&options, build).unwrap_err().to_string();
    assert!(
        error.contains("parameter `q.lora_A.weight` of shape [1125899906842624, 4]"),
        "{error}"
    );
}

#[test]
fn norms_say_what_does_not_fit() {
    let (x, odd) = (values("x", &[2, 3]), values("w", &[4]));
    let error = crate::rms_norm(&x, &odd, 1e-5).unwrap_err().to_string();
    let expected =
        "rms_norm: the weight has shape [4], but the last dimension of the input [2, 3] is 3";
    assert!(error.starts_with(expected), "{error}");
    let error = crate::layer_norm(&x, &odd, &odd, 1e-5).unwrap_err().to_string();
    assert!(error.contains("the weight has shape [4] and the bias [4], but the last"), "{error}");
    let error = crate::group_norm(&x, 2, &odd, &odd, 1e-5).unwrap_err().to_string();
    assert!(error.contains("has 3 channels, which 2 groups must divide"), "{error}");
}
