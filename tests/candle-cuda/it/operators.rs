//! candle's operators on the fake GPU, compared with the CPU: values, and gradients if any.
//!
//! The code under test is candle's own CUDA backend and its kernels, executed by the fake GPU. Both
//! sides may have the same error (candle's gradients of some operators are wrong); these tests only
//! require that they are equal.

#![expect(clippy::disallowed_methods, reason = "both sides are candle's own, wrong or right")]

use candle_core::{D, DType, Device, Result, Tensor, Var};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Numbers between 0.25 and 2, of either sign and all different: none lies at a kink, none is far
/// from 1.
fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let draw = |i: usize| {
        let x = ((i + 31 * seed) * 7919 % 10007) as f64 / 10007.0;
        (0.25 + 1.75 * x) * if (i * 5 + seed).is_multiple_of(3) { -1.0 } else { 1.0 }
    };
    Tensor::from_iter((0..count).map(draw), &Device::Cpu)?.reshape(shape)
}

fn cuda() -> Result<Device> {
    Device::new_cuda(0)
}

/// How far two sides may be apart, as a part of the largest number: some roundings of the type.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 1e-5,
        DType::F16 => 1e-2,
        DType::BF16 => 6e-2,
        _ => 0.0,
    }
}

fn assert_near(what: &str, cuda: &Tensor, cpu: &Tensor) -> Result<()> {
    assert_within(tolerance(cuda.dtype()), what, cuda, cpu)
}

fn assert_within(tolerance: f64, what: &str, cuda: &Tensor, cpu: &Tensor) -> Result<()> {
    assert_eq!(cuda.dims(), cpu.dims(), "{what}");
    let flat = |tensor: &Tensor| {
        tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()
    };
    let (got, wanted) = (flat(cuda)?, flat(cpu)?);
    let largest = wanted.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
        let near = (got - wanted).abs() <= tolerance * largest;
        assert!(
            near || got == wanted,
            "{what}, {:?}[{i}]: {got}, on the CPU {wanted}",
            cuda.dtype()
        );
    }
    Ok(())
}

/// Of inputs of these shapes: what `f` gives, and the gradients of a weighted sum of it.
///
/// Numbers of 16 bits are computed with in f32 on the CPU, which has no products of bf16.
fn outcome(
    device: &Device,
    dtype: DType,
    shapes: &[&[usize]],
    f: &impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let there = |tensor: Tensor| {
        let wide = device.is_cpu() && dtype.size_in_bytes() == 2;
        tensor.to_dtype(dtype)?.to_dtype(if wide { DType::F32 } else { dtype })?.to_device(device)
    };
    let input = |(i, shape): (usize, &&[usize])| Var::from_tensor(&there(numbers(shape, i)?)?);
    let inputs = shapes.iter().enumerate().map(input).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = inputs.iter().map(|var| var.as_tensor().clone()).collect();
    let out = f(&tensors)?;
    let weights = there(numbers(out.dims(), 77)?)?.to_dtype(out.dtype())?;
    let grads = (&out * weights)?.sum_all()?.backward()?;
    let grads = inputs.iter().map(|var| grads.get(var).expect("each input counts").clone());
    Ok([out].into_iter().chain(grads).collect())
}

fn compare_for(
    dtypes: &[DType],
    what: &str,
    shapes: &[&[usize]],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    for &dtype in dtypes {
        let (cuda, cpu) =
            (outcome(&cuda()?, dtype, shapes, &f)?, outcome(&Device::Cpu, dtype, shapes, &f)?);
        for (i, (cuda, cpu)) in cuda.iter().zip(&cpu).enumerate() {
            let part = if i == 0 { "value".into() } else { format!("gradient {}", i - 1) };
            assert_near(&format!("{what}: {part}"), cuda, cpu)?;
        }
    }
    Ok(())
}

/// In all float types.
fn compare(what: &str, shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<()> {
    compare_for(&FLOATS, what, shapes, f)
}

/// Of what has no gradient: `f` makes its tensors on the device.
fn same(what: &str, f: impl Fn(&Device) -> Result<Tensor>) -> Result<()> {
    assert_near(what, &f(&cuda()?)?, &f(&Device::Cpu)?)
}

/// Of what is rounded once, to nearest, on both sides.
fn equal(what: &str, f: impl Fn(&Device) -> Result<Tensor>) -> Result<()> {
    assert_within(0.0, what, &f(&cuda()?)?, &f(&Device::Cpu)?)
}

#[test]
fn matrix_products() -> Result<()> {
    compare("matmul", &[&[3, 5], &[5, 4]], |t| t[0].matmul(&t[1]))?;
    compare("batched", &[&[2, 3, 5], &[2, 5, 4]], |t| t[0].matmul(&t[1]))?;
    compare("by batches of heads", &[&[2, 3, 4, 5], &[2, 3, 5, 6]], |t| t[0].matmul(&t[1]))?;
    compare("left transposed", &[&[5, 3], &[5, 4]], |t| t[0].t()?.matmul(&t[1]))?;
    compare("right transposed", &[&[3, 5], &[4, 5]], |t| t[0].matmul(&t[1].t()?))?;
    compare("a row", &[&[1, 5], &[5, 4]], |t| t[0].matmul(&t[1]))?;
    compare("a column", &[&[3, 5], &[5, 1]], |t| t[0].matmul(&t[1]))?;
    compare("part of one", &[&[6, 5], &[5, 4]], |t| t[0].narrow(0, 2, 3)?.matmul(&t[1]))?;
    compare("one for all", &[&[2, 3, 5], &[5, 4]], |t| t[0].broadcast_matmul(&t[1]))?;
    compare("large", &[&[70, 130], &[130, 40]], |t| t[0].matmul(&t[1]))
}

#[test]
fn convolutions() -> Result<()> {
    let inputs: [&[usize]; 2] = [&[2, 4, 7, 6], &[6, 4, 3, 3]];
    compare("conv2d", &inputs, |t| t[0].conv2d(&t[1], 0, 1, 1, 1))?;
    compare("padded", &inputs, |t| t[0].conv2d(&t[1], 1, 1, 1, 1))?;
    compare("of stride 2", &[&[2, 4, 7, 7], inputs[1]], |t| t[0].conv2d(&t[1], 1, 2, 1, 1))?;
    compare("dilated", &inputs, |t| t[0].conv2d(&t[1], 2, 1, 2, 1))?;
    compare("in groups", &[inputs[0], &[6, 2, 3, 3]], |t| t[0].conv2d(&t[1], 1, 1, 1, 2))?;
    compare("1 x 1", &[inputs[0], &[6, 4, 1, 1]], |t| t[0].conv2d(&t[1], 0, 1, 1, 1))?;
    compare("transposed", &[inputs[0], &[4, 6, 3, 3]], |t| {
        t[0].conv_transpose2d(&t[1], 1, 0, 1, 1)
    })?;
    compare_for(&[DType::F32], "conv1d", &[&[2, 4, 9], &[6, 4, 3]], |t| {
        t[0].conv1d(&t[1], 1, 1, 1, 1)
    })
}

#[test]
fn pools_and_interpolation() -> Result<()> {
    compare("avg_pool2d", &[&[2, 3, 6, 6]], |t| t[0].avg_pool2d(2))?;
    compare("max_pool2d", &[&[2, 3, 6, 6]], |t| t[0].max_pool2d(2))?;
    compare("upsample_nearest2d", &[&[2, 3, 4, 4]], |t| t[0].upsample_nearest2d(8, 8))?;
    same("upsample_bilinear2d", |device| {
        let image = numbers(&[2, 3, 4, 5], 1)?.to_dtype(DType::F32)?.to_device(device)?;
        image.upsample_bilinear2d(8, 9, false)
    })
}

#[test]
fn elementwise_with_broadcasts() -> Result<()> {
    let inputs: [&[usize]; 2] = [&[3, 4, 5], &[4, 1]];
    compare("add", &inputs, |t| t[0].broadcast_add(&t[1]))?;
    compare("sub", &inputs, |t| t[0].broadcast_sub(&t[1]))?;
    compare("mul", &inputs, |t| t[0].broadcast_mul(&t[1]))?;
    compare("div", &inputs, |t| t[0].broadcast_div(&t[1]))?;
    compare("both broadcast", &[&[3, 1], &[1, 5]], |t| t[0].broadcast_add(&t[1]))?;
    let inputs: [&[usize]; 2] = [&[1500], &[1500]];
    compare("contiguous", &inputs, |t| t[0].mul(&t[1]))?;
    compare("maximum", &inputs, |t| t[0].maximum(&t[1]))?;
    compare("minimum", &inputs, |t| t[0].minimum(&t[1]))?;
    compare("affine", &[&[1500]], |t| t[0].affine(1.5, -0.25))?;
    compare("affine, transposed", &[&[3, 5]], |t| t[0].t()?.affine(1.5, -0.25))?;
    compare("clamp", &[&[50]], |t| t[0].clamp(-0.5, 0.7))
}

#[test]
fn one_operation_has_the_bits_of_the_cpu() -> Result<()> {
    type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let all: [(&str, Binary); 5] = [
        ("add", |a, b| a + b),
        ("sub", |a, b| a - b),
        ("mul", |a, b| a * b),
        ("div", |a, b| a / b),
        ("add, transposed", |a, b| a.t()? + b.t()?),
    ];
    for (name, f) in all {
        for dtype in FLOATS {
            equal(name, |device| {
                let side = |seed| numbers(&[37, 50], seed)?.to_dtype(dtype)?.to_device(device);
                f(&side(1)?, &side(2)?)
            })?;
        }
    }
    Ok(())
}

#[test]
fn unary() -> Result<()> {
    type Unary = fn(&Tensor) -> Result<Tensor>;
    let all: [(&str, Unary); 15] = [
        ("exp", Tensor::exp),
        ("sin", Tensor::sin),
        ("cos", Tensor::cos),
        ("tanh", Tensor::tanh),
        ("erf", Tensor::erf),
        ("abs", Tensor::abs),
        ("neg", Tensor::neg),
        ("recip", Tensor::recip),
        ("sqr", Tensor::sqr),
        ("relu", Tensor::relu),
        ("silu", Tensor::silu),
        ("gelu", Tensor::gelu),
        ("gelu_erf", Tensor::gelu_erf),
        ("elu", |x| x.elu(0.5)),
        ("transposed", |x| x.t()?.exp()),
    ];
    for (name, f) in all {
        compare(name, &[&[30, 40]], |t| f(&t[0]))?;
    }
    let of_positive: [(&str, Unary); 3] =
        [("log", Tensor::log), ("sqrt", Tensor::sqrt), ("powf", |x| x.powf(1.5))];
    for (name, f) in of_positive {
        compare(name, &[&[30, 40]], |t| f(&t[0].abs()?))?;
    }
    let whole: [(&str, Unary); 4] = [
        ("ceil", Tensor::ceil),
        ("floor", Tensor::floor),
        ("round", Tensor::round),
        ("sign", Tensor::sign),
    ];
    for (name, f) in whole {
        for dtype in FLOATS {
            same(name, |device| f(&numbers(&[300], 4)?.to_dtype(dtype)?.to_device(device)?))?;
        }
    }
    Ok(())
}

#[test]
fn reductions() -> Result<()> {
    let input: [&[usize]; 1] = [&[3, 70, 5]];
    compare("sum of the last", &input, |t| t[0].sum_keepdim(D::Minus1))?;
    compare("sum of the middle", &input, |t| t[0].sum(1))?;
    compare("sum of two", &input, |t| t[0].sum_keepdim((0, 2)))?;
    compare("mean", &input, |t| t[0].mean(1))?;
    compare("mean of all", &input, |t| t[0].mean_all())?;
    compare("max", &input, |t| t[0].max_keepdim(1))?;
    compare("min", &input, |t| t[0].min(D::Minus1))?;
    compare("var", &input, |t| t[0].var_keepdim(1))?;
    compare("more than a block", &[&[2, 3000]], |t| t[0].sum(1))?;
    // The gradient of its largest element is a difference that 16 bits do not hold.
    compare_for(&[DType::F32, DType::F64], "log_sum_exp", &input, |t| t[0].log_sum_exp(1))?;
    for dtype in [DType::F32, DType::F16, DType::U32, DType::U8, DType::I64] {
        let input = |device: &Device| {
            numbers(&[4, 90], 2)?.affine(5.0, 15.0)?.abs()?.to_dtype(dtype)?.to_device(device)
        };
        same("max of any type", |device| input(device)?.max(1))?;
        same("sum of any type", |device| input(device)?.sum(0))?;
    }
    same("argmax", |device| numbers(&[4, 90], 2)?.to_device(device)?.argmax(1))?;
    same("argmin", |device| numbers(&[4, 90], 2)?.to_device(device)?.argmin(0))
}

#[test]
fn what_transformers_are_made_of() -> Result<()> {
    compare("softmax", &[&[2, 3, 9]], |t| candle_nn::ops::softmax(&t[0], D::Minus1))?;
    compare("log_softmax", &[&[6, 9]], |t| candle_nn::ops::log_softmax(&t[0], D::Minus1))?;
    compare("layer norm", &[&[4, 16], &[16], &[16]], |t| {
        let centred = t[0].broadcast_sub(&t[0].mean_keepdim(1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(1)? + 1e-5)?.sqrt()?;
        centred.broadcast_div(&deviation)?.broadcast_mul(&t[1])?.broadcast_add(&t[2])
    })?;
    compare("attention", &[&[2, 2, 5, 8], &[2, 2, 5, 8], &[2, 2, 5, 8]], |t| {
        let scores = (t[0].matmul(&t[1].t()?)? * 0.35)?;
        candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&t[2])
    })?;
    compare("heads", &[&[2, 5, 12]], |t| {
        t[0].reshape((2, 5, 3, 4))?.transpose(1, 2)?.contiguous()?.transpose(2, 3)?.sqr()
    })?;
    let input = |device: &Device, dtype| numbers(&[6, 40], 3)?.to_dtype(dtype)?.to_device(device);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        same("fused softmax", |device| candle_nn::ops::softmax_last_dim(&input(device, dtype)?))?;
        same("fused layer norm", |device| {
            let alpha = numbers(&[40], 5)?.to_dtype(dtype)?.to_device(device)?;
            candle_nn::ops::layer_norm(&input(device, dtype)?, &alpha, &alpha, 1e-5)
        })?;
    }
    Ok(())
}

#[test]
fn indices() -> Result<()> {
    for kind in [DType::U32, DType::I64, DType::U8] {
        let ids = |device: &Device, ids: &[u32], shape: &[usize]| {
            Tensor::from_slice(ids, shape, &Device::Cpu)?.to_dtype(kind)?.to_device(device)
        };
        let rows = [4, 0, 2, 2, 1];
        compare("index_select", &[&[5, 3]], |t| {
            t[0].index_select(&ids(t[0].device(), &rows, &[5])?, 0)
        })?;
        compare("of the last", &[&[2, 5]], |t| {
            t[0].index_select(&ids(t[0].device(), &rows, &[5])?, 1)
        })?;
        compare("gather", &[&[5, 4]], |t| {
            t[0].gather(&ids(t[0].device(), &[3, 0, 1, 1, 2], &[5, 1])?, 1)
        })?;
        compare("scatter_add", &[&[5, 2], &[5, 2]], |t| {
            let at = ids(t[0].device(), &[1, 0, 1, 1, 0, 0, 1, 1, 0, 1], &[5, 2])?;
            t[0].scatter_add(&at, &t[1], 1)
        })?;
        compare("index_add", &[&[6, 3], &[5, 3]], |t| {
            t[0].index_add(&ids(t[0].device(), &rows, &[5])?, &t[1], 0)
        })?;
    }
    compare("embedding", &[&[7, 3]], |t| {
        t[0].embedding(&Tensor::new(&[1_u32, 6, 6, 0], t[0].device())?)
    })?;
    compare("cross entropy", &[&[6, 4]], |t| {
        let labels = Tensor::new(&[0_u32, 3, 1, 1, 2, 0], t[0].device())?;
        candle_nn::loss::cross_entropy(&t[0], &labels)
    })
}

#[test]
fn choices_and_comparisons() -> Result<()> {
    compare("where_cond", &[&[3, 4], &[3, 4]], |t| {
        t[0].detach().gt(&t[1].detach())?.where_cond(&t[0], &t[1])
    })?;
    compare("where_cond, transposed", &[&[3, 4], &[4, 3]], |t| {
        t[0].detach().gt(0.5)?.where_cond(&t[0], &t[1].t()?)
    })?;
    type Compare = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let all: [(&str, Compare); 6] = [
        ("eq", |a, b| a.eq(b)),
        ("ne", |a, b| a.ne(b)),
        ("lt", |a, b| a.lt(b)),
        ("le", |a, b| a.le(b)),
        ("gt", |a, b| a.gt(b)),
        ("ge", |a, b| a.ge(b)),
    ];
    for (name, f) in all {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::I64] {
            same(name, |device| {
                let side = |seed| numbers(&[40], seed)?.round()?.abs()?.to_dtype(dtype);
                f(&side(1)?.to_device(device)?, &side(2)?.to_device(device)?)
            })?;
        }
    }
    Ok(())
}

#[test]
fn casts() -> Result<()> {
    let all = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::U32];
    for from in all {
        for to in all {
            equal(&format!("{from:?} to {to:?}"), |device| {
                numbers(&[9, 8], 1)?
                    .affine(3.0, 0.1)?
                    .abs()?
                    .to_dtype(from)?
                    .to_device(device)?
                    .t()?
                    .to_dtype(to)
            })?;
        }
    }
    compare("there and back", &[&[20]], |t| {
        t[0].to_dtype(DType::F32)?.sqr()?.to_dtype(t[0].dtype())
    })
}

#[test]
fn copies_and_views() -> Result<()> {
    compare("narrow", &[&[4, 6]], |t| t[0].narrow(1, 2, 3))?;
    compare("cat of the first", &[&[2, 3], &[4, 3]], |t| Tensor::cat(t, 0))?;
    compare("cat of the last", &[&[2, 3], &[2, 4]], |t| Tensor::cat(t, 1))?;
    compare("stack", &[&[2, 3], &[2, 3]], |t| Tensor::stack(t, 1))?;
    compare("permute", &[&[2, 3, 4]], |t| t[0].permute((2, 0, 1))?.contiguous())?;
    compare("reshape", &[&[2, 3, 4]], |t| t[0].transpose(0, 1)?.reshape((6, 4)))?;
    compare("expand", &[&[3, 1]], |t| t[0].expand((3, 5))?.contiguous())?;
    compare("pad", &[&[2, 3]], |t| t[0].pad_with_zeros(1, 2, 1))?;
    compare("flatten", &[&[2, 3, 4]], |t| t[0].flatten_from(1))?;
    compare("repeat", &[&[2, 3]], |t| t[0].repeat((2, 1)))?;
    compare("slice_scatter", &[&[5, 3], &[2, 3]], |t| t[0].slice_scatter(&t[1], 0, 1))?;
    for dtype in
        [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64]
    {
        same("zeros", |device| Tensor::zeros((3, 4), dtype, device))?;
        same("ones", |device| Tensor::ones((3, 4), dtype, device))?;
        same("a copy of a part", |device| {
            let whole = numbers(&[6, 8], 1)?.abs()?.to_dtype(dtype)?.to_device(device)?;
            let to = Tensor::zeros((6, 8), dtype, device)?;
            to.slice_set(&whole.narrow(1, 3, 2)?.contiguous()?, 1, 5)?;
            Ok(to)
        })?;
    }
    same("arange", |device| Tensor::arange(0_u32, 10, device))?;
    same("sorted", |device| Ok(numbers(&[4, 50], 1)?.to_device(device)?.sort_last_dim(true)?.0))?;
    same("cumsum", |device| numbers(&[4, 50], 1)?.to_device(device)?.cumsum(1))
}

#[test]
fn random_numbers_have_their_distribution() -> Result<()> {
    let device = cuda()?;
    device.set_seed(5)?;
    let mean = |x: &Tensor| x.mean_all()?.to_scalar::<f32>();
    let uniform = Tensor::rand(0_f32, 1.0, 10001, &device)?;
    let normal = Tensor::randn(1_f32, 2.0, 10001, &device)?;
    assert!(
        (mean(&uniform)? - 0.5).abs() < 0.02 && (mean(&uniform.sqr()?)? - 1.0 / 3.0).abs() < 0.02
    );
    assert!(
        (mean(&normal)? - 1.0).abs() < 0.1 && (mean(&(&normal - 1.0)?.sqr()?)? - 4.0).abs() < 0.3
    );
    device.set_seed(5)?;
    assert_near(
        "the same again",
        &Tensor::rand(0_f32, 1.0, 10001, &device)?,
        &uniform.to_device(&Device::Cpu)?,
    )?;
    let other = Tensor::rand(0_f32, 1.0, 10001, &device)?;
    assert!(mean(&(other - uniform)?.abs()?)? > 0.1, "drawn twice");
    Ok(())
}
