//! Compares the kernels with the CPU implementation, bit for bit: on the GPU that
//! `$CUDA_TEST_DEVICE` names, or else compiled for the CPU. Tests whose names end with
//! `on_the_shim` need the latter.

#![expect(unsafe_code, reason = "kernels access the test's memory")]

use cuda_rt::Device;
use cuda_rt::testing::{Element, Shim, TestBuffer, TestDevice};
use half::{bf16, f16};

use super::scaler::Scaler;
use super::{CudaError, DType, DeviceSlice, Program, cast_on};
use crate::*;

const SHIM: Shim = Shim { launch: include_str!("launch.h"), types: |_, _| 0 };

fn device(seed: u64) -> TestDevice {
    TestDevice::new(SHIM, seed)
}

/// Pseudorandom floats: any bits, values near the limits of f16, and small integers.
fn floats(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) as u32
    };
    let one = |i: usize| match i % 4 {
        0 => f32::from_bits(next()),
        1 => f32::from_bits(next() >> 4 | 0x3000_0000),
        2 => f32::from_bits(next() & 0x8fff_ffff | 0x3000_0000),
        _ => (next() % 2000) as f32 - 1000.0,
    };
    (0..count).map(one).collect()
}

/// Casts `input[skip..]` on the device to a possibly unaligned address.
fn on_device<S: Element, D: Element>(device: &TestDevice, input: &[S], skip: usize) -> Vec<D> {
    let from = device.upload_at(skip, &input[skip..]);
    let to = device.upload_at(skip % 2, &vec![D::ZERO; input.len() - skip]);
    // SAFETY: two allocations.
    unsafe { cast_on(device, from.slice(), to.slice()) }.unwrap();
    to.get()
}

#[test]
fn casts_equal_the_cpu_bit_for_bit() {
    let bits32 = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let bits_f16 = |values: &[f16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let bits_bf16 = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for (seed, skip) in [(1, 0), (2, 1), (3, 2), (4, 8)] {
        let wide = floats(seed, 50_001);
        let device = device(seed);
        let mut f16s = vec![f16::ZERO; wide.len() - skip];
        cast(&wide[skip..], &mut f16s).unwrap();
        let got = on_device::<f32, f16>(&device, &wide, skip);
        assert_eq!(bits_f16(&f16s), bits_f16(&got), "f32 to f16, {skip}");
        let mut bf16s = vec![bf16::ZERO; wide.len() - skip];
        cast(&wide[skip..], &mut bf16s).unwrap();
        let got = on_device::<f32, bf16>(&device, &wide, skip);
        assert_eq!(bits_bf16(&bf16s), bits_bf16(&got), "f32 to bf16, {skip}");
    }
    let device = device(7);
    let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let mut wide = vec![0.0_f32; f16s.len()];
    cast(&f16s, &mut wide).unwrap();
    assert_eq!(bits32(&wide), bits32(&on_device(&device, &f16s, 0)));
    cast(&bf16s, &mut wide).unwrap();
    assert_eq!(bits32(&wide), bits32(&on_device(&device, &bf16s, 0)));
    let (mut to_bf16, mut to_f16) = (bf16s.clone(), f16s.clone());
    cast(&f16s, &mut to_bf16).unwrap();
    let got = on_device::<f16, bf16>(&device, &f16s, 0);
    assert_eq!(bits_bf16(&to_bf16), bits_bf16(&got));
    cast(&bf16s, &mut to_f16).unwrap();
    let got = on_device::<bf16, f16>(&device, &bf16s, 0);
    assert_eq!(bits_f16(&to_f16), bits_f16(&got));
}

/// The sum of squares in the kernel's order: 16 lanes of each block of 1024 elements, lanes
/// pairwise, 16 blocks, 32 sums, 32 of those, and so on.
fn squares_twin(tensors: &[Vec<f32>], factor: f32) -> f64 {
    let tree = |values: &[f64], width: usize| {
        let mut values = values.to_vec();
        values.resize(width, 0.0);
        while values.len() > 1 {
            values = values.chunks(2).map(|pair| pair[0] + pair[1]).collect();
        }
        values[0]
    };
    let block = |values: &[f32]| {
        let mut lanes = [0.0; 16];
        for (i, x) in values.iter().enumerate() {
            lanes[i % 16] += f64::from(x * factor) * f64::from(x * factor);
        }
        tree(&lanes, 16)
    };
    let span = |values: &[f32]| tree(&values.chunks(1024).map(block).collect::<Vec<_>>(), 16);
    let mut sums: Vec<f64> = tensors.iter().flat_map(|t| t.chunks(1 << 14)).map(span).collect();
    while sums.len() > 1 {
        sums = sums.chunks(32).map(|some| tree(some, 32)).collect();
    }
    sums.first().copied().unwrap_or(0.0)
}

/// Finite values of tensors of several lengths, one of them `large`.
fn gradients(seed: u64, large: usize) -> Vec<Vec<f32>> {
    let finite = |x: f32| if x.is_finite() { x % 8.0 } else { 0.25 };
    let tensor = |count| floats(seed, count).into_iter().map(finite).collect();
    [0, 1, 5, 16_384, large, 1025].map(tensor).into()
}

/// Runs checks and updates on the device and on the CPU; returns the first difference.
fn compare(
    on: TestDevice,
    options: LossScalerOptions,
    seed: u64,
) -> std::result::Result<(), String> {
    let mut cpu = LossScaler::new(options).unwrap();
    let mut device = Scaler::new(on, &cpu).unwrap();
    for step in 0..12_u64 {
        let mut tensors = gradients(seed + step, if step == 3 { 700_000 } else { 20_000 });
        let bad = (seed + step).is_multiple_of(3);
        if bad {
            let at = seed as usize % tensors[4].len();
            tensors[4][at] = [f32::INFINITY, f32::NAN, f32::MAX][step as usize % 3];
        }
        // With an odd seed in three parts, whose sums are added.
        let cuts = if seed % 2 == 1 { [0, 2, 4, tensors.len()] } else { [0, 0, 0, tensors.len()] };
        let squares = |cut: &[usize]| squares_twin(&tensors[cut[0]..cut[1]], cpu.inv_scale());
        let twin_norm = cuts.windows(2).map(squares).fold(0.0, |a, b| a + b).sqrt();
        // Some tensors are not aligned to a pack.
        let skip = |at: usize| (at + seed as usize) % 4;
        let upload = |(at, t): (usize, &Vec<f32>)| device.device.upload_at(skip(at), t);
        let twins: Vec<TestBuffer> = tensors.iter().enumerate().map(upload).collect();
        let mut halves: Vec<f16> = (0..3000).map(|i| f16::from_f32(i as f32)).collect();
        halves[2999] = if step % 5 == 4 { f16::NEG_INFINITY } else { f16::ONE };
        let with_halves = step % 2 == 0;
        let uploaded = device.device.upload_at(1, &halves[1..]);
        let mut slices: Vec<DeviceSlice> = twins.iter().map(TestBuffer::slice).collect();
        slices.extend(with_halves.then(|| uploaded.slice()));
        // Halves are a separate part, since they are only checked.
        let part = |cut: &[usize]| &slices[cut[0]..cut[1]];
        let mut parts: Vec<&[DeviceSlice]> = cuts.windows(2).map(part).collect();
        parts.push(&slices[cuts[3]..]);
        device.bind(&parts).unwrap();
        for at in 0..parts.len() {
            // SAFETY: the buffers live until `status` has waited.
            unsafe { device.check_part(at, at < 3) }.unwrap();
        }
        let status = device.status().unwrap();
        let mut found = with_halves && has_non_finite(&halves);
        tensors.iter_mut().for_each(|t| found |= cpu.unscale(t));
        if status.found_inf != found {
            return Err(format!("step {step}: found {}", status.found_inf));
        }
        if !with_halves && !found && status.norm.to_bits() != twin_norm.to_bits() {
            return Err(format!("step {step}: norm {} instead of {twin_norm}", status.norm));
        }
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        let twins: Vec<f32> = twins.iter().flat_map(TestBuffer::get).collect();
        if !tensors.iter().flatten().zip(&twins).all(same) {
            return Err(format!("step {step}: gradients"));
        }
        let at_floor = cpu.update(found).is_err();
        device.update().unwrap();
        let status = device.status().unwrap();
        let got = (status.scale, status.growth_tracker, status.found_inf);
        if got != (cpu.scale(), cpu.growth_tracker(), false) || (at_floor && !status.at_floor) {
            return Err(format!("step {step}: {got:?}"));
        }
    }
    Ok(())
}

fn all_options() -> Vec<LossScalerOptions> {
    let base = LossScalerOptions { growth_interval: 2, ..Default::default() };
    let low = Policy::Guarded { min_scale: 0.25 };
    vec![
        base,
        LossScalerOptions { policy: Policy::Torch, growth_factor: 3.0, ..base },
        LossScalerOptions { init_scale: 0.5, growth_factor: 1.1, policy: low, ..base },
        LossScalerOptions { init_scale: 1.0, growth_interval: 1, policy: low, ..base },
        LossScalerOptions { init_scale: 0.5, growth_interval: 100, policy: low, ..base },
    ]
}

#[test]
fn scaler_equals_the_cpu_bit_for_bit() {
    for (seed, options) in all_options().into_iter().enumerate() {
        assert_eq!(compare(device(seed as u64), options, seed as u64), Ok(()), "{options:?}");
    }
}

/// The block size changes no bit.
#[test]
fn blocks_of_1024_threads_have_the_same_bits_on_the_shim() {
    let planted = Some(("THREADS = 256", "THREADS = 1024"));
    let wide = |seed| TestDevice::on_the_shim(SHIM, seed, planted);
    for (seed, options) in all_options().into_iter().enumerate().take(2) {
        assert_eq!(compare(wide(seed as u64), options, seed as u64), Ok(()), "{options:?}");
    }
    for skip in [0, 1] {
        let values = floats(skip as u64, 20_001);
        let mut halves = vec![f16::ZERO; values.len() - skip];
        cast(&values[skip..], &mut halves).unwrap();
        let got = on_device::<f32, f16>(&wide(3), &values, skip);
        assert!(halves.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

/// Mutations of the kernels' source that the comparison must detect: original and replacement.
const PLANTED: &[(&str, &str)] = &[
    ("scaler.found_inf |= scaler.bad", "scaler.found_inf = 0"),
    ("bad |= !is_finite(x) ||", "bad |="),
    ("(guarded && !is_finite(y))", "false"),
    ("if (pack) return g.template store", "if (pack) return; g.template store"),
    ("job.how & WRITES && factor != 1", "false"),
    ("job.how & ADDS ? scaler.squares : 0", "0"),
    ("inverse(scaler.scale)", "1 / (scaler.scale + 1)"),
    ("torch ? count != scaler.interval : count < scaler.interval", "count <= scaler.interval"),
    ("scaler.scale * scaler.backoff", "scaler.scale * 0.25"),
    ("lane() < members ?", "lane() + 1 < members ?"),
    ("*own = 0;", ""),
    ("!= members - 1", "!= 0"),
    ("? job.sum[0] : 0", "? job.sum[1] : 0"),
    ("scaler.found_inf = 0;\n", "\n"),
    ("c += warp_count()", "c += warp_count() + 1"),
    ("scaler.tracker++", "scaler.tracker += 2"),
    ("else scaler.at_floor = 1", ""),
];

#[test]
fn planted_mistakes_are_detected_on_the_shim() {
    let undetected = |planted: &&(&'static str, &'static str)| {
        all_options().into_iter().enumerate().all(|(seed, options)| {
            let device = TestDevice::on_the_shim(SHIM, seed as u64, Some(**planted));
            // The mutation must compile.
            Program::SCALER.kernel(&device, "unscale").unwrap();
            let run = || compare(device, options, seed as u64);
            // A panic counts as detection.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            result.is_ok_and(|result| result.is_ok())
        })
    };
    let undetected: Vec<_> = PLANTED.iter().filter(undetected).collect();
    assert!(undetected.is_empty(), "undetected: {undetected:#?}");
}

#[test]
fn unscale_rejects_half_gradients_and_check_accepts_them() {
    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
    let mut device = Scaler::new(device(0), &scaler).unwrap();
    let wide = device.device.upload(&[3.0_f32; 100]);
    let halves = device.device.upload(&[f16::ONE; 100]);
    device.bind(&[&[wide.slice()], &[halves.slice()]]).unwrap();
    // SAFETY: the buffers live until `get` has waited.
    let rejected = unsafe { device.check(true) };
    assert!(matches!(rejected, Err(CudaError::Unsupported { .. })), "{rejected:?}");
    // SAFETY: as above.
    unsafe { device.check(false) }.unwrap();
    assert!(wide.get::<f32>() == [3.0; 100] && !device.status().unwrap().found_inf);
}

#[test]
fn different_lengths_unaligned_pointers_and_unbound_parts_are_errors() {
    let on = device(0);
    let slice = |ptr, len, dtype| DeviceSlice { ptr, len, dtype };
    let cases = [
        (
            [slice(0, 1, DType::F32), slice(0, 2, DType::F16)],
            CudaError::LengthMismatch { expected: 1, got: 2 },
        ),
        (
            [slice(2, 1, DType::F32), slice(0, 1, DType::F16)],
            CudaError::Misaligned { ptr: 2, dtype: DType::F32 },
        ),
    ];
    for ([from, to], error) in cases {
        // SAFETY: the call fails before it reads.
        assert_eq!(unsafe { cast_on(&on, from, to) }, Err(error), "{from:?} {to:?}");
    }
    assert!(on.alloc(0).is_ok());
    let scaler = LossScaler::new(LossScalerOptions::default()).unwrap();
    let mut device = Scaler::new(on, &scaler).unwrap();
    // SAFETY: no gradient is bound.
    assert_eq!(unsafe { device.check(true) }, Err(CudaError::NotBound { part: 0 }));
}

/// Tensors with more than 2^32 elements or bytes, of which only the ends exist.
#[test]
fn kernels_reach_the_end_of_tensors_beyond_32_bit_offsets() {
    const SPAN: u64 = 1 << 14;
    for count in [(1_u64 << 31) + 5000, (1 << 33) + SPAN + 1] {
        let options = LossScalerOptions { init_scale: 2.0, ..Default::default() };
        let device = Scaler::new(device(0), &LossScaler::new(options).unwrap()).unwrap();
        let on = &device.device;
        let end = on.upload(&[2.0_f32; 40_000]);
        let begin = end.slice().ptr.wrapping_sub(4 * (count - 40_000));
        // The tensor, its last two chunks, space for sums.
        let chunk = |back| (count.div_ceil(SPAN) - back) << 32;
        let words = [begin, count, 0, chunk(2), chunk(1), 0, 0, 0];
        let bytes = words.map(u64::to_ne_bytes).concat();
        let mut memory = on.alloc(bytes.len()).unwrap();
        on.write(&mut memory, 0, &bytes).unwrap();
        let at = TestDevice::address(&memory);
        // The scale is at offset 56 of the scaler; `WRITES`, two chunks.
        let job = [at, at + 24, at + 40, device.scale_address() - 56, 1 << 32 | 2];
        let kernel = Program::SCALER.kernel(on, "unscale").unwrap();
        // SAFETY: the argument is an `UnscaleJob`, and the elements of its chunks exist.
        unsafe { on.launch(&kernel, 1, &job) }.unwrap();
        let checked = SPAN + count % SPAN;
        assert_eq!(device.status().unwrap().norm, (checked as f64).sqrt());
        let end = end.get::<f32>();
        let (still, halved) = end.split_at(end.len() - checked as usize);
        assert!(still.iter().all(|x| *x == 2.0) && halved.iter().all(|x| *x == 1.0));
    }
}
