//! Tests of all names in PyTorch's lists, and of all operators of this crate, with and without
//! autocast.

use std::collections::BTreeMap;
use std::path::Path;

use amp::{Autocast, CastRule};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::tests::{flat, run, values};
use crate::*;

/// PyTorch's registrations: device, operator, rule.
fn registered() -> BTreeMap<String, BTreeMap<String, String>> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../amp/tests/vectors/autocast_policy.json");
    let all: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let list = |device: &str| serde_json::from_value(all[device].clone()).unwrap();
    ["cpu", "cuda"].map(|device| (device.to_owned(), list(device))).into()
}

fn policies() -> [(&'static str, Autocast, DType); 4] {
    let (cpu, cuda) = (Autocast::cpu, Autocast::cuda);
    [
        ("cpu", cpu().with_f16(), DType::F16),
        ("cpu", cpu().with_bf16(), DType::BF16),
        ("cuda", cuda().with_f16(), DType::F16),
        ("cuda", cuda().with_bf16(), DType::BF16),
    ]
}

/// The expected types of the inputs of an operator with this rule.
fn wanted(rule: Option<&str>, low: DType, inputs: &[DType]) -> Vec<DType> {
    let all = |dtype| {
        let to = |input: &DType| if input.is_float() { dtype } else { *input };
        inputs.iter().map(to).collect()
    };
    match rule {
        None => inputs.to_vec(),
        Some("lower_precision_fp") => all(low),
        Some("promote") => {
            let narrow = inputs.iter().all(|input| !input.is_float() || *input == low);
            all(if narrow { low } else { DType::F32 })
        }
        Some("fp32" | "fp32_set_opt_dtype" | "fp32_append_dtype") => all(DType::F32),
        Some(other) => panic!("no rule called {other}"),
    }
}

#[test]
fn every_listed_name_casts_as_its_rule_says() {
    let lists = registered();
    let ones = |dtype| Tensor::ones(2, dtype, &Device::Cpu).unwrap();
    for (device, policy, low) in policies() {
        let other = if low == DType::F16 { DType::BF16 } else { DType::F16 };
        for (op, rule) in &lists[device] {
            for types in [
                [DType::F32, DType::F32, DType::I64],
                [low, DType::F32, DType::I64],
                [low, low, DType::U8],
                [low, other, DType::I64],
            ] {
                let inputs = types.map(ones);
                let got = autocast(&policy, || cast(op, [&inputs[0], &inputs[1], &inputs[2]]));
                if rule == "banned" {
                    assert!(got.unwrap_err().to_string().contains(op.as_str()), "{device} {op}");
                    continue;
                }
                let got = got.unwrap().map(|tensor| tensor.dtype());
                assert_eq!(got[..], wanted(Some(rule), low, &types), "{device} {op} {types:?}");
            }
        }
    }
}

type Op = fn(&[Tensor]) -> Result<Tensor>;

/// The operators of this crate: PyTorch's name, shapes of the floating-point inputs, and a call.
fn operators() -> Vec<(&'static str, Vec<&'static [usize]>, Op)> {
    let image: &[usize] = &[2, 3, 4, 4];
    vec![
        ("conv2d", vec![image, &[2, 3, 3, 3], &[2]], |t| {
            conv2d(&t[0], &t[1], Some(&t[2]), Window::default())
        }),
        ("linear", vec![&[4, 3], &[2, 3]], |t| linear(&t[0], &t[1], None)),
        ("scaled_dot_product_attention", vec![&[1, 3, 12]], |t| {
            self_attention(&t[0], AttentionOptions { heads: 2, causal: true })
        }),
        ("scaled_dot_product_attention", vec![&[1, 2, 3, 4], &[1, 1, 5, 4], &[1, 1, 5, 4]], |t| {
            let options = SdpaOptions { causal: true, ..Default::default() };
            scaled_dot_product_attention(&t[0], &t[1], &t[2], options)
        }),
        ("cross_entropy_loss", vec![&[3, 4]], |t| {
            cross_entropy(&t[0], &Tensor::new(&[0i64, 3, 1], &Device::Cpu)?)
        }),
        ("softmax", vec![&[3, 4]], |t| softmax(&t[0])),
        ("layer_norm", vec![&[3, 4], &[4], &[4]], |t| layer_norm(&t[0], &t[1], &t[2], 1e-5)),
        ("batch_norm", vec![image, &[3], &[3]], |t| {
            let options = BatchNormOptions { eps: 1e-5, relu: true };
            Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0)
        }),
        ("batch_norm", vec![image, &[3], &[3]], |t| {
            let given = |value: f32| Tensor::new(&[value; 3], &Device::Cpu);
            let statistics = Statistics { mean: given(0.5)?, var: given(2.0)? };
            let options = BatchNormOptions { eps: 1e-5, relu: false };
            batch_norm_with(&t[0], &t[1], &t[2], &statistics, options)
        }),
        ("embedding", vec![&[5, 3]], |t| {
            embedding(&Tensor::new(&[4i64, 0, 4], &Device::Cpu)?, &t[0])
        }),
        ("gelu", vec![&[7]], |t| gelu(&t[0])),
        ("silu", vec![&[7]], |t| silu(&t[0])),
        ("silu", vec![&[7], &[7]], |t| swiglu(&t[0], &t[1])),
        ("rms_norm", vec![&[3, 4], &[4]], |t| rms_norm(&t[0], &t[1], 1e-5)),
        ("rope", vec![&[1, 2, 3, 4], &[3, 2], &[3, 2]], |t| rope_i(&t[0], &t[1], &t[2])),
        ("relu", vec![&[7]], |t| relu(&t[0])),
        ("add", vec![&[2, 7], &[7]], |t| add(&t[0], &t[1])),
        ("add", vec![&[7], &[7]], |t| add_relu(&t[0], &t[1])),
        ("max_pool2d", vec![image], |t| max_pool2d(&t[0], 2, Window::default())),
        ("adaptive_max_pool2d", vec![image], |t| adaptive_max_pool2d(&t[0], 3, 1)),
        ("ctc_loss", vec![&[3, 1, 4]], |t| {
            let targets = Tensor::new(&[[2i64]], &Device::Cpu)?;
            ctc_loss(&t[0], &targets, &[3], &[1], CtcLossOptions::default())
        }),
        ("adaptive_avg_pool2d", vec![image], |t| global_avg_pool(&t[0])),
    ]
}

fn assert_equal(what: &str, got: &[Tensor], wanted: &[Tensor]) {
    assert_eq!(got.len(), wanted.len());
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert_eq!(got.dtype(), wanted.dtype(), "{what}: tensor {i}");
        assert_eq!(flat(got), flat(wanted), "{what}: tensor {i}");
    }
}

/// Under a policy an operator equals, bit by bit, the operator with inputs cast beforehand,
/// including the backward pass; the gradients of `f32` inputs are `f32`.
#[test]
fn every_operator_casts_as_the_lists_say() {
    let lists = registered();
    for (device, policy, low) in policies() {
        for (op, shapes, call) in operators() {
            let what = format!("{op} on {device} in {low:?}");
            let inputs: Vec<_> = shapes.iter().map(|shape| values(op, shape)).collect();
            let rule = lists[device].get(op).map(String::as_str);
            let types = wanted(rule, low, &vec![DType::F32; inputs.len()]);
            let by_hand = |tensors: &[Tensor]| -> Result<Tensor> {
                let tensors = tensors.iter().zip(&types).map(|(t, to)| t.to_dtype(*to));
                call(&tensors.collect::<Result<Vec<_>>>()?)
            };
            let got = run(&inputs, |tensors| autocast(&policy, || call(tensors))).unwrap();
            assert_equal(&what, &got, &run(&inputs, by_hand).unwrap());
            assert!(got[1..].iter().all(|gradient| gradient.dtype() == DType::F32), "{what}");
            // A custom rule for this name is applied as well.
            for (rule, to) in [(CastRule::LowerPrecisionFp, low), (CastRule::Fp32, DType::F32)] {
                let policy = policy.clone().with_rule(op, rule);
                let by_hand = |tensors: &[Tensor]| -> Result<Tensor> {
                    let tensors = tensors.iter().map(|tensor| tensor.to_dtype(to));
                    call(&tensors.collect::<Result<Vec<_>>>()?)
                };
                let got = run(&inputs, |tensors| autocast(&policy, || call(tensors))).unwrap();
                assert_equal(&what, &got, &run(&inputs, by_hand).unwrap());
            }
            let banned = policy.clone().with_rule(op, CastRule::Banned);
            let error = autocast(&banned, || call(&inputs)).unwrap_err().to_string();
            assert!(error.contains(op), "{what}: {error}");
        }
    }
}

#[test]
fn a_region_ends_with_its_call_and_belongs_to_its_thread() {
    let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
    let product = || linear(&x, &x, None).unwrap().dtype();
    let (cpu, off) = (Autocast::cpu(), Autocast::cpu().with_enabled(false));
    let lowered = autocast(&cpu, || {
        assert_eq!(product(), DType::BF16);
        assert_eq!(autocast(&off, product), DType::F32);
        assert_eq!(autocast(&Autocast::cuda(), product), DType::F16);
        assert_eq!(product(), DType::BF16);
        std::thread::scope(|scope| {
            assert_eq!(scope.spawn(product).join().unwrap(), DType::F32);
        });
        lowered_operators()
    });
    assert_eq!(lowered_operators(), 0);
    assert_eq!(lowered, 3, "with those of the inner regions");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        autocast(&cpu, || panic!("an operator's"));
    }));
    assert!(panicked.is_err());
    assert_eq!(product(), DType::F32);
}

#[test]
fn sums_of_two_types_have_the_wider_one() {
    let ones = |dtype| Tensor::ones(3, dtype, &Device::Cpu).unwrap();
    use DType::{BF16, F16, F32, F64};
    for (a, b, sum) in [(F16, F32, F32), (BF16, F16, F32), (F16, F16, F16), (F32, F64, F64)] {
        for (a, b) in [(a, b), (b, a)] {
            assert_eq!(add(&ones(a), &ones(b)).unwrap().dtype(), sum);
        }
    }
    assert_eq!(add_relu(&ones(BF16), &ones(F32)).unwrap().dtype(), F32);
}

#[test]
fn a_weight_is_cast_once_on_a_tape() {
    let [w, x] = ["w", "x"].map(|name| values(name, &[3, 3]));
    let w = Var::from_tensor(&w).unwrap();
    let once = |t: &Tensor| cast("linear", [t]).unwrap()[0].id();
    let policy = Autocast::cpu();
    let twice = |t: &Tensor| autocast(&policy, || once(t) == once(t));
    let (same, _tape) = record(|| [twice(&w), twice(&x)]);
    assert_eq!(same, [true, false], "of what may change, a cast for each use");
    assert!(!twice(&w), "outside of a tape a weight may change between uses");
    let (first, _tape) = record(|| autocast(&policy, || once(&w)));
    let (second, _tape) = record(|| autocast(&policy, || once(&w)));
    assert_ne!(first, second, "each forward pass has its own");
    // The gradient is the sum over both uses.
    let product = |w: &Tensor| {
        let y = autocast(&policy, || linear(&linear(&x, w, None)?, w, None))?;
        y.to_dtype(DType::F32)?.sum_all()
    };
    let (loss, tape) = record(|| product(&w).unwrap());
    let on_tape = tape.backward(&loss).unwrap();
    let in_graph = product(&w).unwrap().backward().unwrap();
    assert_eq!(on_tape.get(&w).unwrap().dtype(), DType::F32);
    let gradients = [on_tape, in_graph].map(|gradients| flat(gradients.get(&w).unwrap()));
    for (a, b) in gradients[0].iter().zip(&gradients[1]) {
        // A sum in bf16 and one in f32.
        assert!((a - b).abs() <= b.abs() / 64.0, "{a} and {b}");
    }
}

#[test]
fn operands_of_two_types_are_advised() {
    let (half, full) =
        (Tensor::ones(2, DType::F16, &Device::Cpu), Tensor::ones(2, DType::F32, &Device::Cpu));
    let (half, full) = (half.unwrap(), full.unwrap());
    let advice = |error: candle_core::Error| mixed_types_advice(&error).is_some();
    assert!(advice((&half + &full).unwrap_err()) && advice((&full * &half).unwrap_err().bt()));
    assert!(!advice(half.reshape(3).unwrap_err()));
    assert!(!advice((&full + full.to_dtype(DType::F64).unwrap()).unwrap_err()));
}
