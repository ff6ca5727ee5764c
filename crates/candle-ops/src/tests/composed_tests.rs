//! Tests that compare networks trained by compositions, or by a GPU's kernels, with networks
//! trained by the CPU's loops.

use amp::Autocast;
use candle_core::{DType, Device, Error, Module, ModuleT, Result, Tensor, Var};

use crate::nn::{self, BatchNorm, Conv2d, Conv2dConfig, VarBuilder, VarMap, conv2d_no_bias};
use crate::tests::{distance, flat, run, values};
use crate::*;

/// Logits of images, in training or in evaluation.
type Network = Box<dyn Fn(&Tensor, bool) -> Result<Tensor>>;

type Build = fn(VarBuilder<'_>) -> Result<Network>;

/// A residual network for images of 8 x 8: a stem with a pool, a block, and one that halves the
/// image.
fn resnet(vb: VarBuilder<'_>) -> Result<Network> {
    let conv = |from, to, kernel, stride, name: &str| {
        let config = Conv2dConfig { stride, padding: kernel / 2, ..Default::default() };
        conv2d_no_bias(from, to, kernel, config, vb.pp(name))
    };
    let norm = |width, relu, name: &str| {
        let norm = nn::batch_norm(width, 1e-5, vb.pp(name))?;
        Ok::<_, Error>(if relu { norm.with_relu() } else { norm })
    };
    let stem = (conv(1, 4, 3, 1, "conv")?, norm(4, true, "bn")?);
    let one = (
        (conv(4, 4, 3, 1, "one.conv1")?, norm(4, true, "one.bn1")?),
        (conv(4, 4, 3, 1, "one.conv2")?, norm(4, false, "one.bn2")?),
    );
    let two = (
        (conv(4, 8, 3, 2, "two.conv1")?, norm(8, true, "two.bn1")?),
        (conv(8, 8, 3, 1, "two.conv2")?, norm(8, false, "two.bn2")?),
    );
    let shortcut = (conv(4, 8, 1, 2, "two.conv")?, norm(8, false, "two.bn")?);
    let fc = nn::linear(8, 10, vb.pp("fc"))?;
    Ok(Box::new(move |images, train| {
        let apply = |(conv, norm): &(Conv2d, BatchNorm), x: &Tensor| {
            norm.forward_t(&conv.forward(x)?, train)
        };
        let x = apply(&stem, &normalize(images, &Normalization::default(), DType::F32)?)?;
        let x = max_pool2d(&x, 3, Window { stride: 2, padding: 1 })?;
        let x = add_relu(&apply(&one.1, &apply(&one.0, &x)?)?, &x)?;
        let x = add_relu(&apply(&two.1, &apply(&two.0, &x)?)?, &apply(&shortcut, &x)?)?;
        fc.forward(&global_avg_pool(&x)?)
    }))
}

fn mlp(vb: VarBuilder<'_>) -> Result<Network> {
    let (fc1, fc2) = (nn::linear(64, 16, vb.pp("fc1"))?, nn::linear(16, 10, vb.pp("fc2"))?);
    Ok(Box::new(move |images, _| {
        let by = Normalization { mean: vec![0.5], std: vec![0.3] };
        let x = normalize(images, &by, DType::F32)?.flatten_from(1)?;
        fc2.forward(&relu(&fc1.forward(&x)?)?)
    }))
}

/// A transformer block over the lines of an image.
fn transformer(vb: VarBuilder<'_>) -> Result<Network> {
    let embed = nn::linear(8, 16, vb.pp("embed"))?;
    let position = vb.get((8, 16), "position")?;
    let (norm1, norm2) =
        (nn::layer_norm(16, 1e-5, vb.pp("norm1"))?, nn::layer_norm(16, 1e-5, vb.pp("norm2"))?);
    let (pack, unpack) = (nn::linear(16, 48, vb.pp("pack"))?, nn::linear(16, 16, vb.pp("unpack"))?);
    let (fc1, fc2) = (nn::linear(16, 32, vb.pp("fc1"))?, nn::linear(32, 16, vb.pp("fc2"))?);
    let head = nn::linear(16, 10, vb.pp("head"))?;
    Ok(Box::new(move |images, _| {
        let x = normalize(images, &Normalization::default(), DType::F32)?.squeeze(1)?;
        let x = add(&embed.forward(&x)?, &position)?;
        let options = AttentionOptions { heads: 2, causal: true };
        let y = self_attention(&pack.forward(&norm1.forward(&x)?)?, options)?;
        let x = add(&x, &unpack.forward(&y)?)?;
        let y = fc2.forward(&gelu(&fc1.forward(&norm2.forward(&x)?)?)?)?;
        head.forward(&add(&x, &y)?.mean(1)?)
    }))
}

/// Ten images of 8 x 8 and their labels, different for each step.
fn batch(step: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let pixels = (0..640).map(|i| ((i * 37 + step * 91) % 256) as u8).collect();
    let labels: Vec<i64> = (0..10).map(|i| ((i * 7 + step) % 10) as i64).collect();
    Ok((Tensor::from_vec(pixels, (10, 1, 8, 8), device)?, Tensor::from_vec(labels, 10, device)?))
}

/// Losses of three steps of gradient descent, and all final values: gradients, parameters, buffers,
/// logits.
fn train(build: Build, device: &Device, policy: &Autocast) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
    let map = VarMap::new();
    let network = build(VarBuilder::from_varmap(&map, DType::F32, device))?;
    let mut vars: Vec<(String, Var)> =
        map.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    vars.sort_by(|(a, _), (b, _)| a.cmp(b));
    // Norm layers are initialized with constants.
    let is_drawn = |name: &str| !name.contains("bn") && !name.contains("norm");
    for (name, var) in vars.iter().filter(|(name, _)| is_drawn(name)) {
        let inputs = var.elem_count() / var.dim(0)?;
        var.set(&(values(name, var.dims()) / (inputs as f64).sqrt())?.to_device(device)?)?;
    }
    let (mut losses, mut numbers) = (Vec::new(), Vec::new());
    for step in 0..3 {
        let (images, labels) = batch(step, device)?;
        let loss = autocast(policy, || cross_entropy(&network(&images, true)?, &labels))?;
        losses.push(loss.to_scalar()?);
        let grads = loss.backward()?;
        numbers.clear();
        for (name, var) in &vars {
            let Some(grad) = grads.get(var) else {
                assert!(name.contains("running"), "{name} has no gradient");
                continue;
            };
            numbers.push(flat(grad));
            var.set(&(var.as_tensor() - (grad * 0.01)?)?)?;
        }
    }
    numbers.extend(vars.iter().map(|(_, var)| flat(var)));
    numbers.push(flat(&network(&batch(3, device)?.0, false)?));
    Ok((losses, numbers))
}

/// Tolerance: three steps amplify the rounding errors of a gradient.
const WITHIN: f32 = 1e-3;

/// Compares compositions on a device, or kernels there, with the loops of the CPU.
fn networks_train_alike(device: &Device, within_kernels: &dyn Fn(&mut dyn FnMut())) {
    let full = (Autocast::cpu().with_enabled(false), WITHIN);
    // f16 has eleven bits, and intermediate results are rounded, unlike in the CPU's loops.
    let half = (Autocast::cuda().with_f16(), 0.05);
    let all: [(&str, Build, &(Autocast, f32)); 4] = [
        ("resnet", resnet, &full),
        ("mlp", mlp, &full),
        ("transformer", transformer, &full),
        ("mlp in half", mlp, &half),
    ];
    for (what, build, (policy, within)) in all {
        let (losses, numbers) = train(build, &Device::Cpu, policy).unwrap();
        let mut other = None;
        within_kernels(&mut || {
            other = Some(composed(|| train(build, device, policy)).unwrap());
        });
        let (other_losses, other_numbers) = other.unwrap();
        for (a, b) in losses.iter().zip(&other_losses) {
            assert!((a - b).abs() <= within * a.abs(), "{what}: {losses:?} {other_losses:?}");
        }
        assert_eq!(numbers.len(), other_numbers.len());
        for (i, (a, b)) in numbers.iter().zip(&other_numbers).enumerate() {
            let largest = a.iter().fold(1e-3_f32, |m, v| m.max(v.abs()));
            let apart = a.iter().zip(b).fold(0_f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(apart <= within * largest, "{what}: tensor {i} is off by {apart} of {largest}");
        }
    }
}

#[test]
fn networks_train_alike_on_the_host() {
    networks_train_alike(&Device::Cpu, &|call| call());
}

#[cfg(feature = "cuda")]
#[test]
fn networks_train_alike_on_a_gpu() {
    let kernels = cuda::tests::kernels();
    let device = Device::Cuda(kernels.device.clone());
    networks_train_alike(&device, &|call| call());
    networks_train_alike(&device, &|call| cuda::tests::with_kernels(&kernels, call));
}

#[test]
fn nan_and_infinity_are_those_of_the_loops() {
    let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let matrix = |values: &[f32]| tensor(values).reshape((2, ())).unwrap();
    let pool = |values: &[f32]| {
        let window = Window { stride: 1, padding: 1 };
        max_pool2d(&tensor(values).reshape((1, 1, 1, ())).unwrap(), 3, window)
    };
    let loss = |logits: &[f32], label: i64| {
        let logits = tensor(logits).unsqueeze(0).unwrap();
        cross_entropy(&logits, &Tensor::new(&[label], &Device::Cpu).unwrap())
    };
    let results = || {
        [
            relu(&tensor(&[nan, infinity, -infinity, 0.0])).unwrap(),
            gelu(&tensor(&[nan, infinity, 20.0])).unwrap(),
            softmax(&matrix(&[1e30, -infinity, nan, 0.0])).unwrap(),
            pool(&[nan, 1.0]).unwrap(),
            pool(&[1.0, nan]).unwrap(),
            pool(&[1.0, infinity, -infinity]).unwrap(),
            loss(&[1e30, -1e30], 0).unwrap(),
            loss(&[3.0, -infinity], 0).unwrap(),
            loss(&[nan, 0.0], 1).unwrap(),
            loss(&[infinity, 0.0], 0).unwrap(),
        ]
    };
    for (i, (composed, loops)) in composed(results).iter().zip(results()).enumerate() {
        for (got, wanted) in flat(composed).into_iter().zip(flat(&loops)) {
            assert!(got == wanted || got.is_nan() && wanted.is_nan(), "{i}: {got}, not {wanted}");
        }
    }
    assert!(!graph::device::dispatches(&tensor(&[0.0])));
    composed(|| {
        assert!(graph::device::dispatches(&tensor(&[0.0])));
        assert!(loss(&[0.0, 0.0], 2).unwrap_err().to_string().contains("label 2"));
        let ids = Tensor::new(&[5_i64], &Device::Cpu).unwrap();
        let error = embedding(&ids, &matrix(&[0.0; 4])).unwrap_err().to_string();
        assert!(error.contains("index 5 is none of 2 rows"), "{error}");
    });
}

/// So many terms that a half-precision sum saturates.
#[test]
fn gradients_of_half_biases_and_windows_are_those_of_the_loops() {
    let dot = |y: Tensor| -> Result<Tensor> { y.to_dtype(DType::F32)?.sqr() };
    let linear = |t: &[Tensor]| dot(linear(&t[0], &t[1], Some(&t[2]))?);
    let conv = |t: &[Tensor]| dot(conv2d(&t[0], &t[1], Some(&t[2]), Window::default())?);
    let pool = |t: &[Tensor]| dot(max_pool2d(&t[0], 7, Window { stride: 1, padding: 3 })?);
    type Op<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;
    let cases: [(&str, Vec<Tensor>, Op<'_>, DType); 3] = [
        (
            "linear",
            vec![values("x", &[5000, 2]), values("w", &[2, 2]), values("b", &[2])],
            &linear,
            DType::BF16,
        ),
        (
            "conv2d",
            vec![values("x", &[2, 2, 60, 60]), values("w", &[2, 2, 3, 3]), values("b", &[2])],
            &conv,
            DType::F16,
        ),
        ("max_pool2d", vec![values("x", &[1, 1, 30, 30])], &pool, DType::BF16),
    ];
    for (what, inputs, op, dtype) in cases {
        let inputs: Vec<_> = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect();
        let loops = run(&inputs, op).unwrap();
        let last = inputs.len();
        let apart = distance(&composed(|| run(&inputs, op).unwrap())[last], &loops[last]);
        assert!(apart < 0.02, "{what}: {apart}");
    }
}
