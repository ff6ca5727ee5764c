//! Tests of cross entropy with its options, and of labels and indices of `u32`.

use candle_core::{DType, Device, Result, Tensor};

use crate::tests::{assert_differentiates, assert_rounds_once, assert_same, flat, run, values};
use crate::{
    CrossEntropyOptions, composed, cross_entropy, cross_entropy_with, embedding,
    embedding_with_padding,
};

const IGNORED: i64 = -100;

fn labels(labels: &[i64]) -> Tensor {
    Tensor::new(labels, &Device::Cpu).unwrap()
}

/// PyTorch's formula, composed of candle's operators.
fn slow(logits: &Tensor, labels: &[i64], of: CrossEntropyOptions<'_>) -> Result<Tensor> {
    let (_, classes) = logits.dims2()?;
    let smoothing = f64::from(of.label_smoothing);
    let losses = candle_nn::ops::log_softmax(logits, 1)?.neg()?;
    let ones = Tensor::ones(classes, logits.dtype(), &Device::Cpu)?;
    let weight = of.weight.unwrap_or(&ones).to_dtype(logits.dtype())?;
    let losses = losses.broadcast_mul(&weight)?;
    let (mut total, mut divisor) = (Tensor::zeros((), logits.dtype(), &Device::Cpu)?, 0.0);
    for (row, label) in labels.iter().enumerate().filter(|(_, l)| Some(**l) != of.ignore_index) {
        let (row, class) = (losses.get(row)?, usize::try_from(*label).unwrap());
        let all = (row.sum_all()? * (smoothing / classes as f64))?;
        total = ((total + (row.get(class)? * (1.0 - smoothing))?)? + all)?;
        divisor += weight.get(class)?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
    }
    total / divisor
}

#[test]
fn cross_entropy_has_pytorchs_options() {
    let classes = [3, 0, IGNORED, 2, 0];
    let kept = [3, 0, 1, 2, 0];
    let weight = Tensor::new(&[0.5_f32, 2.0, 0.0, 1.25], &Device::Cpu).unwrap();
    let inputs = [(values("x", &[5, 4]) * 3.0).unwrap()];
    for weight in [None, Some(&weight)] {
        for label_smoothing in [0.0, 0.25, 1.0] {
            for (ignore_index, all) in [(None, kept), (Some(IGNORED), classes), (Some(0), kept)] {
                let options = CrossEntropyOptions { weight, ignore_index, label_smoothing };
                let ours = |t: &[Tensor]| cross_entropy_with(&t[0], &labels(&all), options);
                let what = format!("cross_entropy {options:?}");
                assert_same(&what, &inputs, ours, |t| slow(&t[0], &all, options));
                assert_rounds_once(&what, &inputs, ours);
                if label_smoothing < 1.0 {
                    assert_differentiates(&what, &inputs, ours);
                }
            }
        }
    }
}

#[test]
fn a_batch_of_ignored_labels_has_no_gradient() {
    let ignored = labels(&[IGNORED; 2]);
    let options = CrossEntropyOptions { ignore_index: Some(IGNORED), ..Default::default() };
    let loss = |t: &[Tensor]| cross_entropy_with(&t[0], &ignored, options);
    let inputs = [values("x", &[2, 3])];
    for all in [run(&inputs, loss).unwrap(), composed(|| run(&inputs, loss).unwrap())] {
        assert!(flat(&all[0])[0].is_nan());
        assert_eq!(flat(&all[1]), [0.0; 6]);
    }
    // NaN in an ignored row does not affect the loss.
    let x = Tensor::new(&[[f32::NAN, 0.0], [1.0, 1.0]], &Device::Cpu).unwrap();
    let some = || cross_entropy_with(&x, &labels(&[IGNORED, 1]), options).unwrap();
    for loss in [some(), composed(some)] {
        assert!((flat(&loss)[0] - std::f32::consts::LN_2).abs() < 1e-6);
    }
}

#[test]
fn cross_entropy_refuses_options_that_do_not_fit() {
    let x = values("x", &[2, 3]);
    let of = |all: [i64; 2], options: &CrossEntropyOptions<'_>| {
        cross_entropy_with(&x, &labels(&all), *options).unwrap_err().to_string()
    };
    let none = CrossEntropyOptions::default();
    let ignored = CrossEntropyOptions { ignore_index: Some(7), ..none };
    for (all, options) in [([IGNORED, 0], &none), ([7, IGNORED], &ignored)] {
        let error = of(all, options);
        assert!(error.contains("label -100 is none of 3 classes"), "{error}");
    }
    for label_smoothing in [-0.1, 1.1, f32::NAN] {
        let error = of([0, 1], &CrossEntropyOptions { label_smoothing, ..none });
        assert!(error.contains("not from 0 to 1"), "{error}");
    }
    let weight = Tensor::new(&[1.0_f32, 2.0], &Device::Cpu).unwrap();
    let error = of([0, 1], &CrossEntropyOptions { weight: Some(&weight), ..none });
    assert!(error.contains("weights of shape [2] for 3 classes"), "{error}");
}

#[test]
fn labels_and_indices_of_u32_are_those_of_i64() {
    let to = |t: &Tensor, dtype| t.to_dtype(dtype).unwrap();
    let all = labels(&[3, 0, 2]);
    let options = CrossEntropyOptions { ignore_index: Some(0), ..Default::default() };
    let (x, w) = ([values("x", &[3, 4])], [values("w", &[5, 7])]);
    type Op<'a> = &'a dyn Fn(&[Tensor], &Tensor) -> Result<Tensor>;
    let loss: Op<'_> = &|t, labels| cross_entropy(&t[0], labels);
    let loss_with: Op<'_> = &|t, labels| cross_entropy_with(&t[0], labels, options);
    let rows: Op<'_> = &|t, ids| embedding(ids, &t[0]);
    let padded: Op<'_> = &|t, ids| embedding_with_padding(ids, &t[0], 3);
    for (inputs, op) in [(&x, loss), (&x, loss_with), (&w, rows), (&w, padded)] {
        let of = |dtype| run(inputs, |t| op(t, &to(&all, dtype))).unwrap();
        let same = |a: &[Tensor], b: &[Tensor]| {
            a.iter().zip(b).for_each(|(a, b)| assert_eq!(flat(a), flat(b)));
        };
        same(&of(DType::U32), &of(DType::I64));
        same(&composed(|| of(DType::U32)), &composed(|| of(DType::I64)));
        let error = op(inputs, &to(&all, DType::U8)).unwrap_err().to_string();
        assert!(error.contains("labels and indices must be i64 or u32, not U8"), "{error}");
    }
    let far = Tensor::new(&[u32::MAX], &Device::Cpu).unwrap();
    let error = embedding(&far, &w[0]).unwrap_err().to_string();
    assert!(error.contains("index 4294967295 is none of 5 rows"), "{error}");
    // A `u32` label cannot be -100.
    let options = CrossEntropyOptions { ignore_index: Some(u32::MAX.into()), ..options };
    let far = Tensor::new(&[u32::MAX, 1], &Device::Cpu).unwrap();
    assert!(cross_entropy_with(&values("x", &[2, 3]), &far, options).is_ok());
}

#[test]
fn padding_has_no_gradient() {
    let ids = Tensor::new(&[[2_i64, 0, 2], [1, 1, 3]], &Device::Cpu).unwrap();
    let inputs = [values("w", &[5, 7])];
    let padded = |t: &[Tensor]| embedding_with_padding(&ids, &t[0], 2);
    let all = run(&inputs, |t| embedding(&ids, &t[0])).unwrap();
    for own in [run(&inputs, padded).unwrap(), composed(|| run(&inputs, padded).unwrap())] {
        assert_eq!(flat(&own[0]), flat(&all[0]));
        for row in 0..5 {
            let (own, all) = (own[1].get(row).unwrap(), all[1].get(row).unwrap());
            let wanted = if row == 2 { vec![0.0; 7] } else { flat(&all) };
            assert_eq!(flat(&own), wanted, "row {row}");
        }
    }
    assert_rounds_once("embedding with padding", &inputs, padded);
    let error = embedding_with_padding(&ids, &inputs[0], 5).unwrap_err().to_string();
    assert!(error.contains("padding 5 is none of 5 rows"), "{error}");
}
