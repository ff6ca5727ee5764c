//! Measures what half precision costs on the CPU: forward and backward of each operator in `f16`
//! and `bf16`, divided by that in `f32`; and under autocast, with casts of `f32` inputs, for the
//! operators that it runs in half precision. The shortest of several turns, in which all types
//! follow each other, on one thread. Prints a table in Markdown. The variables let the process keep
//! freed memory, as in a long run; else the zeroing of new pages is most of the time of small
//! operators.
//!
//! ```sh
//! export RAYON_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4294967296
//! cargo run --release -p gradstack-candle-ops --example half_precision -- 50
//! ```

#![expect(clippy::print_stdout, reason = "an example")]

use std::time::Instant;

use amp::{Autocast, CastRule};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    AttentionOptions, BatchNormOptions, Context, ConvOptions, CtcLossOptions, Window,
    adaptive_avg_pool2d, add, batch_norm, conv2d, cross_entropy, ctc_loss, dropout, embedding,
    gelu, group_norm, layer_norm, linear, log_softmax, max_pool2d, mul, record, relu, rms_norm,
    self_attention, silu, softmax,
};

type Op = fn(&[Tensor]) -> Result<Tensor>;

/// PyTorch's name, shapes of the inputs, and a call.
fn operators() -> Vec<(&'static str, Vec<&'static [usize]>, Op)> {
    const ROWS: &[usize] = &[1024, 512];
    const IMAGES: &[usize] = &[8, 64, 28, 28];
    const LINE: &[usize] = &[512];
    const CHANNELS: &[usize] = &[64];
    vec![
        ("linear", vec![ROWS, &[512, 512], LINE], |t| linear(&t[0], &t[1], Some(&t[2]))),
        ("conv2d", vec![IMAGES, &[64, 64, 3, 3]], |t| {
            conv2d(&t[0], &t[1], None, Window { stride: 1, padding: 1 })
        }),
        ("conv2d", vec![IMAGES, &[64, 1, 3, 3]], |t| {
            let options = ConvOptions { padding: 1, groups: 64, ..ConvOptions::default() };
            conv2d(&t[0], &t[1], None, options)
        }),
        ("scaled_dot_product_attention", vec![&[4, 128, 3 * 256]], |t| {
            self_attention(&t[0], AttentionOptions { heads: 8, causal: true })
        }),
        ("layer_norm", vec![ROWS, LINE, LINE], |t| layer_norm(&t[0], &t[1], &t[2], 1e-5)),
        ("rms_norm", vec![ROWS, LINE], |t| rms_norm(&t[0], &t[1], 1e-5)),
        ("group_norm", vec![IMAGES, CHANNELS, CHANNELS], |t| {
            group_norm(&t[0], 8, &t[1], &t[2], 1e-5)
        }),
        ("batch_norm", vec![IMAGES, CHANNELS, CHANNELS], |t| {
            let options = BatchNormOptions { eps: 1e-5, relu: false };
            Ok(batch_norm(&t[0], &t[1], &t[2], options)?.0)
        }),
        ("softmax", vec![ROWS], |t| softmax(&t[0])),
        ("log_softmax", vec![ROWS], |t| log_softmax(&t[0])),
        ("gelu", vec![ROWS], |t| gelu(&t[0])),
        ("silu", vec![ROWS], |t| silu(&t[0])),
        ("relu", vec![ROWS], |t| relu(&t[0])),
        ("add", vec![ROWS, ROWS], |t| add(&t[0], &t[1])),
        ("mul", vec![ROWS, LINE], |t| mul(&t[0], &t[1])),
        ("dropout", vec![ROWS], |t| dropout(&t[0], 0.1)),
        ("embedding", vec![&[4096, 512]], |t| {
            let ids = (0..1024).map(|i| i * 7919 % 4096).collect::<Vec<i64>>();
            embedding(&Tensor::new(ids, &Device::Cpu)?, &t[0])
        }),
        ("max_pool2d", vec![IMAGES], |t| max_pool2d(&t[0], 2, Window { stride: 2, padding: 0 })),
        ("adaptive_avg_pool2d", vec![IMAGES], |t| adaptive_avg_pool2d(&t[0], 7, 7)),
        ("cross_entropy_loss", vec![ROWS], |t| {
            cross_entropy(&t[0], &Tensor::new(vec![7_i64; 1024], &Device::Cpu)?)
        }),
        ("ctc_loss", vec![&[128, 8, 32]], |t| {
            let targets = (0..160).map(|i| 1 + i % 31).collect::<Vec<i64>>();
            let targets = Tensor::from_vec(targets, (8, 20), &Device::Cpu)?;
            ctc_loss(&t[0], &targets, &[128; 8], &[20; 8], CtcLossOptions::default())
        }),
    ]
}

/// Seconds of a forward and backward pass.
fn seconds(inputs: &[Tensor], op: Op, context: &mut Context) -> Result<f64> {
    let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let vars = vars.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>();
    let start = Instant::now();
    context.enter(|| {
        let (y, tape) = record(|| op(&vars));
        tape.backward(&y?)
    })?;
    Ok(start.elapsed().as_secs_f64())
}

fn main() -> Result<()> {
    let turns = std::env::args().nth(1).and_then(|turns| turns.parse().ok()).unwrap_or(15);
    println!("| operator | inputs | f32, ms | f16 | bf16 | f16 by autocast | bf16 by autocast |");
    println!("|---|---|---|---|---|---|---|");
    let policies = [Autocast::cpu().with_f16(), Autocast::cpu()];
    for (name, shapes, op) in operators() {
        let wide = shapes.iter().map(|shape| Tensor::randn(0f32, 1.0, *shape, &Device::Cpu));
        let wide = wide.collect::<Result<Vec<_>>>()?;
        let to = |dtype| wide.iter().map(|t| t.to_dtype(dtype)).collect::<Result<Vec<_>>>();
        let halves = [to(DType::F16)?, to(DType::BF16)?];
        let mut plain = Context::new(0);
        let mut lower = policies.clone().map(|policy| Context::new(0).with_autocast(policy));
        let mut times = [f64::INFINITY; 5];
        // The first turn warms up.
        for turn in 0..=turns {
            let [f16, bf16] = &mut lower;
            let all = [
                seconds(&wide, op, &mut plain)?,
                seconds(&halves[0], op, &mut plain)?,
                seconds(&halves[1], op, &mut plain)?,
                seconds(&wide, op, f16)?,
                seconds(&wide, op, bf16)?,
            ];
            if turn > 0 {
                times.iter_mut().zip(all).for_each(|(least, time)| *least = least.min(time));
            }
        }
        let [f32, ratios @ ..] = times;
        let is_lowered = policies[0].rule(name) == Some(CastRule::LowerPrecisionFp);
        let ratios: Vec<_> = ratios.iter().map(|time| format!("{:.2}", time / f32)).collect();
        let by_autocast = if is_lowered { ratios[2..].join(" | ") } else { " | ".to_owned() };
        println!(
            "| {name} | {shapes:?} | {:.2} | {} | {by_autocast} |",
            f32 * 1e3,
            ratios[..2].join(" | ")
        );
    }
    Ok(())
}
