//! The trap in what puts one tensor into another: `scatter` and `scatter_add`.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::super::{CandleEngine, CandleOptions, ops};
use super::sequences::formed;
use super::tests::{Chain, Keep, batch, between, derived, indices, layer, noise, places};
use crate::engine::SharedSink;

type Put = fn(&Tensor, &Tensor, &Tensor, usize) -> Result<Tensor>;

#[test]
fn a_scatter_into_what_has_a_gradient_is_named() {
    let says = |what: &str, put: Put, sizes: &[(usize, usize)]| {
        for (dim, count, of_constant) in
            sizes.iter().flat_map(|(d, c)| [(*d, *c, true), (*d, *c, false)])
        {
            let middle = move |x: &Tensor| {
                let mut dims = x.dims().to_vec();
                dims[dim] = count;
                let z = if of_constant { noise(&dims)? } else { derived(x, dim, count)? };
                put(x, &places(x, dim, count)?, &z, dim)?.tanh()
            };
            let said = between(&[2, 3, 8, 8], middle).unwrap_err();
            let operator = format!("candle's own `{what}`");
            let (behind, case) = ("`first.weight` and of one more", (dim, count, of_constant));
            assert!(said.contains(behind) && said.contains(&operator), "{case:?}: {said}");
        }
    };
    says("scatter", |x, i, z, dim| x.scatter(i, z, dim), &[(3, 3), (3, 1), (2, 7), (1, 2), (0, 1)]);
    let all = [(3, 8), (2, 8), (1, 4), (0, 2)];
    says("scatter_add", |x, i, z, dim| x.scatter_add(i, z, dim), &all);
    // Several to one place, and none to some.
    let crowded: Put = |x, i, z, dim| {
        let i = ((i.to_dtype(DType::F64)? * 1.5)?.to_dtype(DType::U32)?, x.dim(dim)? as u32);
        let i = i.0.flatten_all()?.to_vec1::<u32>()?.iter().map(|v| v % i.1).collect::<Vec<_>>();
        x.scatter_add(&Tensor::from_vec(i, z.shape(), x.device())?, z, dim)
    };
    says("scatter_add", crowded, &all[..2]);
    // A mask, as people write it: one number everywhere.
    for value in [0.0, 1.0, -2.5] {
        let middle = move |x: &Tensor| {
            let i = places(x, 3, 3)?;
            x.scatter(&i, &i.to_dtype(DType::F32)?.affine(0.0, value)?, 3)
        };
        let error = between(&[2, 3, 8, 8], middle).unwrap_err();
        assert!(error.contains("`scatter`"), "{error}");
        let relu = move |x: &Tensor| middle(&x.relu()?)?.relu();
        let error = between(&[2, 3, 8, 8], relu).unwrap_err();
        assert!(error.contains("`scatter`"), "{error}");
    }
}

#[test]
fn what_puts_one_tensor_into_another_rightly_is_left_alone() {
    let fine = |middle: fn(&Tensor) -> Result<Tensor>| {
        between(&[2, 3, 8, 8], middle).unwrap();
        between(&[2, 3, 8, 8], move |x| middle(&x.relu()?)?.relu()).unwrap();
    };
    fine(|x| ops::scatter(x, &places(x, 3, 3)?, &noise(&[2, 4, 8, 3])?, 3));
    fine(|x| ops::scatter(x, &places(x, 2, 5)?, &derived(x, 2, 5)?, 2));
    fine(|x| ops::scatter_add(x, &places(x, 3, 3)?, &noise(&[2, 4, 8, 3])?, 3));
    fine(|x| ops::scatter_add(x, &places(x, 2, 12)?, &derived(x, 2, 12)?, 2));
    // Into a constant.
    fine(|x| noise(&[2, 4, 8, 8])?.scatter(&places(x, 3, 3)?, &derived(x, 3, 3)?, 3));
    fine(|x| noise(&[2, 4, 8, 8])?.scatter_add(&places(x, 3, 8)?, &derived(x, 3, 8)?, 3));
    for of_constant in [true, false] {
        let source = move |x: &Tensor, count| {
            if of_constant { noise(&[2, 4, 8, count]) } else { derived(x, 3, count) }
        };
        let fine = |middle: fn(&Tensor, &Tensor) -> Result<Tensor>, count| {
            between(&[2, 3, 8, 8], move |x| middle(x, &source(x, count)?)).unwrap();
            between(&[2, 3, 8, 8], move |x| {
                let x = x.relu()?;
                middle(&x, &source(&x, count)?.relu()?)?.relu()
            })
            .unwrap();
        };
        fine(|x, z| x.index_add(&indices(&[1, 4, 6], &[3])?, z, 3), 3);
        fine(|x, z| x.index_add(&indices(&[1, 1, 4, 6, 6], &[5])?, z, 3), 5);
        fine(|x, z| x.slice_scatter(z, 3, 2), 3);
        fine(|x, z| x.slice_assign(&[0..2, 0..4, 0..8, 1..4], z), 3);
        fine(|x, z| x.slice_scatter(&(z + x.narrow(3, 2, 3)?)?, 3, 2), 3);
        fine(|x, z| x.slice_scatter0(&z.narrow(0, 0, 1)?.contiguous()?, 1), 8);
        fine(|x, z| x.gt(z)?.where_cond(x, z), 8);
        fine(|x, z| x.maximum(z), 8);
        fine(|x, z| x + z, 8);
        fine(|x, z| x * z, 8);
        fine(|x, z| Tensor::cat(&[&x.narrow(3, 0, 5)?, z], 3), 3);
        fine(|x, z| x.gather(&places(x, 3, 8)?, 3)? + z, 8);
        fine(|x, z| x.broadcast_add(z), 1);
        fine(|x, z| x.broadcast_mul(&z.relu()?), 1);
    }
    fine(|x| x.index_select(&indices(&[7, 6, 5, 4, 3, 2, 1, 0], &[8])?, 3));
    fine(|x| x.pad_with_zeros(3, 1, 0)?.narrow(3, 0, 8));
    fine(|x| x.clamp(-0.3, 0.3));
    fine(|x| candle_nn::ops::leaky_relu(x, 0.01));
    fine(|x| x.roll(3, 2)? * x.flip(&[2])?);
    // Attention's masks, and one that cuts.
    fine(|x| {
        let mask = noise(&[2, 4, 8, 8])?.gt(0.0)?;
        let low = Tensor::new(f32::NEG_INFINITY, x.device())?.broadcast_as(x.shape())?;
        candle_nn::ops::softmax(&mask.where_cond(x, &low)?, 3)
    });
    fine(|x| {
        let mask = noise(&[2, 4, 8, 8])?.gt(0.0)?.to_dtype(DType::F32)?;
        candle_nn::ops::softmax(&(x + (&mask * -1e9)?)?, 3)? + (x * mask)?
    });
    // Numbers that were added as they would have been written; nobody can tell.
    fine(|x| {
        let i = indices(&[1, 4, 6], &[3])?;
        let z = (noise(&[2, 4, 8, 3])? - x.index_select(&i, 3)?.detach())?;
        x.index_add(&i, &z, 3)
    });
}

/// What is made of `x`, and `z`, `count` numbers for each of its lines along `dim`: what is right, and last what
/// is not.
const OPS: [Put; 16] = [
    |x, i, z, dim| ops::scatter(x, i, z, dim),
    |x, i, z, dim| ops::scatter_add(x, i, z, dim),
    |x, _, z, dim| x.broadcast_add(&z.sum_keepdim(dim)?),
    |x, _, z, dim| x.broadcast_mul(&z.narrow(dim, 0, 1)?),
    |x, _, z, dim| x + spread(z, x.dim(dim)?, dim)?,
    |x, _, z, dim| x - spread(z, x.dim(dim)?, dim)?.relu()?,
    |x, _, z, dim| x * spread(z, x.dim(dim)?, dim)?,
    |x, _, z, dim| x.maximum(&spread(z, x.dim(dim)?, dim)?),
    |x, _, z, dim| {
        let z = spread(z, x.dim(dim)?, dim)?;
        x.gt(&z)?.where_cond(x, &(z * 0.5)?)
    },
    |x, _, z, dim| x.index_add(&few(z.dim(dim)?, x.dim(dim)?)?, z, dim),
    |x, _, z, dim| {
        let count = x.dim(dim)?.min(z.dim(dim)?);
        x.slice_scatter(&z.narrow(dim, 0, count)?.contiguous()?, dim, x.dim(dim)? - count)
    },
    |x, _, z, dim| Tensor::cat(&[z, x], dim)?.narrow(dim, 0, x.dim(dim)?),
    |x, _, z, dim| candle_nn::ops::leaky_relu(x, 0.1)?.broadcast_add(&z.narrow(dim, 0, 1)?.relu()?),
    |x, i, z, dim| x.broadcast_add(&(x.contiguous()?.gather(i, dim)? * z)?.sum_keepdim(dim)?),
    |x, i, z, dim| x.scatter(i, z, dim),
    |x, i, z, dim| x.scatter_add(i, z, dim),
];

/// As many numbers along `dim` as that, those of `z` one after another.
fn spread(z: &Tensor, count: usize, dim: usize) -> Result<Tensor> {
    z.contiguous()?.index_select(&few(count, z.dim(dim)?)?, dim)
}

/// `count` places of so many.
fn few(count: usize, of: usize) -> Result<Tensor> {
    let places: Vec<_> = (0..count).map(|i| (i % of) as u32).collect();
    indices(&places, &[count])
}

/// What the first step says of one of [`OPS`].
fn step(
    seed: u64,
    (dims, dim, count): ([usize; 3], usize, usize),
    op: usize,
    of_constant: bool,
    form: usize,
    dtype: fused_optim::DType,
) -> std::result::Result<(), String> {
    let mut of_z = dims;
    of_z[dim] = count;
    let mut engine = CandleEngine::new(CandleOptions { dtype, seed, ..Default::default() }, |vb| {
        let uniform = Init::Uniform { lo: -1.0, up: 1.0 };
        let before = vb.get_with_hints(&dims, "before", uniform)?;
        let source = vb.get_with_hints(&of_z, "source", uniform)?;
        let after = vb.get_with_hints(&[dims[0], 1, 1], "after", uniform)?;
        let put = move |x: &Tensor| {
            let x = formed(&(x * &before)?, form)?;
            let z = formed(&source, form)?;
            let z = if of_constant { z.detach() } else { z };
            OPS[op](&x, &places(&x, dim, count)?, &z, dim)?.broadcast_mul(&after)
        };
        Ok(Chain(vec![layer(put)]))
    })
    .unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    crate::testing::train_step(&mut engine, &batch(&dims), 1.0, &sink)
        .map(drop)
        .map_err(|e| e.to_string())
}

/// The gradient of what is +1 or -1 is nothing but rounding, and by chance like that of a scatter.
#[test]
fn what_is_added_to_signs_is_left_alone() {
    for seed in 0..500 {
        step(seed, ([3, 4, 1], 1, 1), 9, true, 3, fused_optim::DType::F16).unwrap();
    }
}

/// Next to nothing added to a number of 16 bits leaves it as it was, as a place that nothing was added to is.
#[test]
fn a_scatter_add_of_next_to_nothing_is_named() {
    for seed in 0..500 {
        let said = step(seed, ([3, 5, 5], 0, 3), 15, false, 0, fused_optim::DType::F16);
        assert!(said.is_err_and(|error| error.contains("candle's own `scatter_add`")), "{seed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Of a few numbers and of more, of any type and computed in several ways: `scatter` and `scatter_add` are
    /// named, and whatever else is made of two tensors is not.
    #[test]
    fn a_random_put_is_judged_rightly(
        seed in any::<u64>(), dims in [1usize..6, 1usize..6, 1usize..6], dim in 0usize..3,
        count in 1usize..7, op in 0..OPS.len(), of_constant in any::<bool>(), form in 0usize..4,
        type_of in 0usize..3,
    ) {
        use fused_optim::DType::{Bf16, F16, F32};
        let count = if op == 15 { dims[dim] } else { count };
        let sizes = (dims, dim, count);
        let said = step(seed, sizes, op, of_constant, form, [F32, F16, Bf16][type_of]);
        // Of few lines, and of fewer bits, it could be chance; where nothing is kept, nobody knows.
        let lines = dims.iter().product::<usize>() / dims[dim];
        let is_kept = op == 15 && dims[dim] > 1 || count < dims[dim];
        let is_shown = is_kept && !of_constant && form < 3 && lines >= [2, 8, 16][type_of] && !(op == 15 && type_of == 2);
        if op <= 13 {
            prop_assert!(said.is_ok(), "{said:?}");
        } else if is_shown {
            let error = said.expect_err("nothing");
            let operator = ["scatter", "scatter_add"][op - 14];
            prop_assert!(error.contains(&format!("candle's own `{operator}`")), "{error}");
        }
    }
}
