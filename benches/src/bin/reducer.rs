//! Time to average a model's gradients: `Reducer` without overlap, compared with one all-reduce for
//! each tensor.
//!
//! ```text
//! launch --nproc-per-node 2 -- reducer ROUNDS [BUCKET_MIB]
//! ```
//!
//! The gradients are those of a ResNet-18 of width 64, and 2,000 tensors of 512 elements, in
//! ordinary memory, written again before each measurement. Compared are: an all-reduce of each
//! tensor in place; of a copy of each, as where a tensor's memory is not the caller's to write; the
//! reducer, whose averages are read in its buckets; and with a copy of the averages to the tensors.
//! They run in turn, each as often first as the others.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, reason = "the output is the result")]

use std::hint::black_box;
use std::time::Instant;

use collective::reducer::{ParamInfo, Reducer, ReducerOptions};
use collective::{DType, ProcessGroup, ReduceOp};

const VARIANTS: [&str; 4] =
    ["all-reduce of each", "of a copy of each", "reducer", "reducer, copied out"];

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse().unwrap()).collect();
    let rounds = args.first().copied().unwrap_or(31);
    let group = collective::init().unwrap();
    for (name, sizes) in [("resnet64", resnet(64)), ("2000 x 512", vec![512; 2000])] {
        let mut options = ReducerOptions::default();
        if let Some(mib) = args.get(1) {
            options.bucket_bytes = mib << 20;
        }
        let param = |(i, &count): (usize, &usize)| ParamInfo::new(i.to_string(), count, DType::F32);
        let params = sizes.iter().enumerate().map(param).collect();
        let mut reducer = Reducer::new(group.clone(), params, options).unwrap();
        let mut gradients: Vec<Vec<f32>> = sizes.iter().map(|&count| vec![0.0; count]).collect();
        let mut copies = gradients.clone();
        let mut times = [const { Vec::new() }; 4];
        // The first two rounds bring the buckets into their order and the memory into use.
        for round in 0..rounds + 2 {
            for turn in 0..4 {
                let variant = (round + turn) % 4;
                let seconds = measure(variant, &group, &mut gradients, &mut copies, &mut reducer);
                if round >= 2 {
                    times[variant].push(seconds);
                }
            }
        }
        if group.rank() == 0 {
            report(name, &times);
        }
    }
}

/// Sizes of a ResNet-18's tensors, in order of registration.
fn resnet(width: usize) -> Vec<usize> {
    let mut sizes = vec![width * 9, width, width];
    let mut from = width;
    for stage in 0..4 {
        let to = width << stage;
        for block in 0..2 {
            sizes.extend([from * to * 9, to, to, to * to * 9, to, to]);
            if stage > 0 && block == 0 {
                sizes.extend([from * to, to, to]);
            }
            from = to;
        }
    }
    sizes.extend([from * 10, 10]);
    sizes
}

fn measure(
    variant: usize,
    group: &ProcessGroup,
    gradients: &mut [Vec<f32>],
    copies: &mut [Vec<f32>],
    reducer: &mut Reducer,
) -> f64 {
    gradients.iter_mut().for_each(|g| g.fill(black_box(1.0)));
    group.barrier().unwrap();
    let start = Instant::now();
    if variant < 2 {
        for (gradient, copy) in gradients.iter_mut().zip(copies).rev() {
            let average = match variant {
                0 => gradient,
                _ => {
                    copy.copy_from_slice(gradient);
                    copy
                }
            };
            group.all_reduce(&mut average[..], ReduceOp::Avg).unwrap();
        }
        return start.elapsed().as_secs_f64();
    }
    reducer.prepare(true).unwrap();
    for (index, gradient) in gradients.iter().enumerate().rev() {
        reducer.ready(index, &gradient[..]).unwrap();
    }
    reducer.finish().unwrap();
    if variant == 3 {
        for (index, gradient) in gradients.iter_mut().enumerate() {
            gradient.copy_from_slice(reducer.grad(index).unwrap());
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    reducer.zero_grad();
    seconds
}

/// Prints medians, and each variant's ratio to the first: the median over the rounds, and where
/// half of them lie.
fn report(name: &str, times: &[Vec<f64>; 4]) {
    for (variant, own) in VARIANTS.iter().zip(times) {
        let ratios = sorted(own.iter().zip(&times[0]).map(|(own, each)| own / each).collect());
        let own = sorted(own.clone());
        let part = |values: &[f64], quarter: usize| values[(values.len() - 1) * quarter / 4];
        println!(
            "| {name} | {variant} | {:.2} | {:.2} | {:.2} | {:.2} to {:.2} |",
            part(&own, 0) * 1e3,
            part(&own, 2) * 1e3,
            part(&ratios, 2),
            part(&ratios, 1),
            part(&ratios, 3),
        );
    }
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}
