//! Tests of grouped, dilated, one-dimensional and transposed convolutions, group normalization and
//! upsampling: each is compared with candle's own forward pass, finite differences, and itself in
//! half precision.

use candle_core::{Result, Tensor};

use crate::tests::{assert_differentiates, assert_rounds_once, distance, values};
use crate::*;

type Op<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Checks that the value equals candle's, that gradients of the loops and of the compositions equal
/// finite differences, that half-precision results are rounded once, and that a tape has the same
/// gradients.
fn check(what: &str, inputs: &[Tensor], ours: Op<'_>, stock: Op<'_>) {
    let apart = distance(&ours(inputs).unwrap(), &stock(inputs).unwrap());
    assert!(apart < 1e-5, "{what} is off by {apart}");
    assert_differentiates(what, inputs, ours);
    assert_rounds_once(what, inputs, ours);
    let vars: Vec<_> = inputs.iter().map(|t| candle_core::Var::from_tensor(t).unwrap()).collect();
    let loss = || {
        let tensors: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        ours(&tensors)?.sqr()?.mean_all()
    };
    let graph = loss().unwrap().backward().unwrap();
    let (loss, tape) = record(loss);
    let taped = tape.backward(&loss.unwrap()).unwrap();
    for var in &vars {
        let apart = distance(taped.get(var).unwrap(), graph.get(var).unwrap());
        assert!(apart < 1e-6, "{what}: the tape is off by {apart}");
    }
}

fn biased(y: Tensor, bias: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; y.rank()];
    shape[1] = bias.elem_count();
    y.broadcast_add(&bias.reshape(shape)?)
}

#[test]
fn conv2d_with_groups_and_dilation_is_candles() {
    for (channels, outputs, kernel, stride, padding, dilation, groups) in [
        (4, 6, 3, 1, 1, 1, 2),
        (4, 4, 3, 2, 1, 1, 4),
        (3, 6, 3, 1, 2, 2, 3),
        (2, 3, 3, 1, 2, 2, 1),
        (2, 3, 2, 2, 1, 3, 1),
        (6, 3, 2, 1, 0, 2, 3),
        (4, 4, 1, 1, 0, 1, 4),
    ] {
        let inputs = [
            values("x", &[2, channels, 7, 6]),
            values("w", &[outputs, channels / groups, kernel, kernel]),
            values("b", &[outputs]),
        ];
        let options = ConvOptions { stride, padding, dilation, groups };
        check(
            &format!("{channels} {outputs} {kernel} {options:?}"),
            &inputs,
            &|t| conv2d(&t[0], &t[1], Some(&t[2]), options),
            &|t| biased(t[0].conv2d(&t[1], padding, stride, dilation, groups)?, &t[2]),
        );
        let plain = |t: &[Tensor]| conv2d(&t[0], &t[1], None, options);
        assert_differentiates("without a bias", &inputs[..2], plain);
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the value of candle's is right")]
fn conv1d_is_candles() {
    for (stride, padding, dilation, groups) in
        [(1, 0, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (3, 1, 1, 4)]
    {
        let inputs = [values("x", &[3, 4, 9]), values("w", &[4, 4 / groups, 3]), values("b", &[4])];
        let options = ConvOptions { stride, padding, dilation, groups };
        check(
            &format!("{options:?}"),
            &inputs,
            &|t| conv1d(&t[0], &t[1], Some(&t[2]), options),
            &|t| biased(t[0].conv1d(&t[1], padding, stride, dilation, groups)?, &t[2]),
        );
    }
}

#[test]
fn conv_transpose_is_candles() {
    for (stride, padding, output_padding, dilation) in
        [(1, 0, 0, 1), (2, 1, 1, 1), (2, 0, 0, 2), (1, 1, 1, 2), (3, 1, 2, 1)]
    {
        let inputs = [values("x", &[2, 3, 4, 3]), values("w", &[3, 2, 3, 3]), values("b", &[2])];
        let options = ConvTransposeOptions {
            stride,
            padding,
            output_padding,
            dilation,
            ..Default::default()
        };
        let what = format!("{options:?}");
        check(&what, &inputs, &|t| conv_transpose2d(&t[0], &t[1], Some(&t[2]), options), &|t| {
            let y = t[0].conv_transpose2d(&t[1], padding, output_padding, stride, dilation)?;
            biased(y, &t[2])
        });
        let inputs = [values("x", &[2, 3, 5]), values("w", &[3, 2, 3]), values("b", &[2])];
        check(&what, &inputs, &|t| conv_transpose1d(&t[0], &t[1], Some(&t[2]), options), &|t| {
            // candle's own operator mixes up samples without padding.
            let each = (0..2).map(|at| {
                let x = t[0].narrow(0, at, 1)?;
                x.conv_transpose1d(&t[1], padding, output_padding, stride, dilation, 1)
            });
            biased(Tensor::cat(&each.collect::<Result<Vec<_>>>()?, 0)?, &t[2])
        });
    }
    let options = ConvTransposeOptions { stride: 2, groups: 2, ..Default::default() };
    let inputs = [values("x", &[2, 4, 4, 3]), values("w", &[4, 3, 2, 2]), values("b", &[6])];
    check("groups", &inputs, &|t| conv_transpose2d(&t[0], &t[1], Some(&t[2]), options), &|t| {
        let half = |at: usize| {
            t[0].narrow(1, 2 * at, 2)?.conv_transpose2d(&t[1].narrow(0, 2 * at, 2)?, 0, 0, 2, 1)
        };
        biased(Tensor::cat(&[half(0)?, half(1)?], 1)?, &t[2])
    });
}

#[test]
fn convolutions_refuse_what_does_not_fit() {
    let (x, weight) = (values("x", &[1, 4, 5, 5]), values("w", &[4, 2, 3, 3]));
    let conv = |groups, dilation| {
        let options = ConvOptions { groups, dilation, ..Default::default() };
        conv2d(&x, &weight, None, options).unwrap_err().to_string()
    };
    assert!(conv(3, 1).contains("3 groups"), "{}", conv(3, 1));
    assert!(conv(0, 1).contains("0 groups"));
    assert!(conv(4, 1).contains("channels"));
    assert!(conv(2, 0).contains("dilation"));
    assert!(conv(2, 3).contains("does not fit"));
    let transposed =
        |options| conv_transpose2d(&x, &weight, None, options).unwrap_err().to_string();
    let one = ConvTransposeOptions::default();
    assert!(transposed(ConvTransposeOptions { output_padding: 1, ..one }).contains("add more"));
    assert!(transposed(ConvTransposeOptions { padding: 4, ..one }).contains("nothing"));
    assert!(transposed(ConvTransposeOptions { stride: 0, ..one }).contains("does not fit"));
    assert!(transposed(ConvTransposeOptions { groups: 3, ..one }).contains("does not fit"));
}

#[test]
fn group_norm_is_candles() {
    for groups in [1, 2, 4] {
        for shape in [&[2, 4, 3, 2][..], &[3, 4, 5]] {
            let inputs = [values("x", shape), values("g", &[4]), values("b", &[4])];
            check(
                &format!("{groups} {shape:?}"),
                &inputs,
                &|t| group_norm(&t[0], groups, &t[1], &t[2], 1e-5),
                &|t| {
                    let of =
                        candle_nn::GroupNorm::new(t[1].clone(), t[2].clone(), 4, groups, 1e-5)?;
                    candle_core::Module::forward(&of, &t[0])
                },
            );
        }
    }
    let (x, c) = (values("x", &[2, 4, 3]), values("c", &[4]));
    let error = group_norm(&x, 3, &c, &c, 1e-5).unwrap_err().to_string();
    assert!(error.contains("3 groups"), "{error}");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the value of candle's is right")]
fn upsample_is_candles() {
    let inputs = [values("x", &[2, 3, 4, 3])];
    for (height, width) in [(8, 6), (5, 7), (4, 3), (2, 9), (1, 1)] {
        let what = format!("{height} {width}");
        check(&what, &inputs, &|t| upsample_nearest2d(&t[0], height, width), &|t| {
            t[0].upsample_nearest2d(height, width)
        });
        for corners in [false, true] {
            check(
                &format!("{what} {corners}"),
                &inputs,
                &|t| upsample_bilinear2d(&t[0], height, width, corners),
                &|t| t[0].upsample_bilinear2d(height, width, corners),
            );
        }
    }
    assert!(upsample_nearest2d(&inputs[0], 0, 3).is_err());
}
