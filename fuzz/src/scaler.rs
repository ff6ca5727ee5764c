//! Calls a gradient scaler in any order with any numbers.
//!
//! Input: a byte for policy and enabled, three floats and a byte of options, then five bytes for
//! each call: the call and the number of the optimizer (0 to 2) in one byte, and a float. Checks:
//! errors, scale, growth count, gradients and parameters equal those of a reference scaler written
//! from PyTorch's documentation.

use amp::{LossScaler, LossScalerOptions, Policy};

#[path = "../../crates/amp/tests/it/twin/mod.rs"]
mod twin;

use twin::{Op, compare};

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((&[mode, ref floats @ .., growth_interval], calls)) = data.split_first_chunk::<14>()
    else {
        return;
    };
    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
    let options = LossScalerOptions {
        init_scale: float(&floats[..4]),
        growth_factor: float(&floats[4..8]).into(),
        backoff_factor: float(&floats[8..]).into(),
        growth_interval: growth_interval.into(),
        policy: match mode & 1 {
            0 => Policy::Guarded { min_scale: 1.0 },
            _ => Policy::Torch,
        },
    };
    if LossScaler::new(options).is_err() {
        return;
    }
    let call = |&[code, ref number @ ..]: &[u8; 5]| {
        let (number, i) = (float(number), usize::from(code / 9) % 3);
        match code % 9 {
            0 => Op::Scale,
            1 => Op::Gradient(i, Some(number)),
            2 => Op::Gradient(i, None),
            3 => Op::Unscale(i),
            4 => Op::Step(i),
            5 => Op::Update,
            6 => Op::UpdateTo(number),
            7 => Op::Load(number as u64),
            _ => Op::SetGrowthInterval(number as u64),
        }
    };
    let calls: Vec<Op> = calls.as_chunks().0.iter().map(call).collect();
    compare(options, mode & 2 == 0, 3, &calls);
}
