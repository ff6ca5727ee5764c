//! One tensor's sweep on a CPU.
//!
//! A tensor is walked in blocks of [`BLOCK`] elements. A half gradient is widened into a block on
//! the stack, the rule runs over f32 slices, and a half weight is rounded from the master while
//! both are still in the first-level cache. So memory is swept once, and a rule is written once,
//! for f32, whatever the types of weight and gradient.
//!
//! Invariant: an element's result depends on that element alone, and every instruction set compiles
//! the loops of [`scalar`] (no reassociation, no fused multiply-add). Hence block size, alignment
//! and processor never change a bit.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::{Slice, SliceMut};

/// One element's update: the definition of an optimizer with `N` state values per element.
pub(crate) trait Rule<const N: usize>: Copy {
    /// New parameter and state from parameter, gradient and state. Must be `#[inline(always)]`.
    fn update(&self, param: f32, grad: f32, state: [f32; N]) -> (f32, [f32; N]);
}

/// A loop that is compiled once per instruction set. `run` must be `#[inline(always)]`.
trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

/// Runs a loop with the widest instructions this processor has.
fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if let Some(isa) = x86_64::Isa::detect() {
        return isa.run(kernel);
    }
    kernel.run()
}

/// Applies `rule` to every element of a block.
///
/// # Panics
///
/// If the slices differ in length.
pub(crate) fn sweep<R: Rule<N>, const N: usize>(
    rule: &R,
    param: &mut [f32],
    grad: &[f32],
    state: [&mut [f32]; N],
) {
    dispatch(scalar::Sweep { rule: *rule, param, grad, state });
}

/// Walks one tensor: `block(range, param, grad)` updates the f32 parameters of one range, then the
/// half weight, if it is one, is rounded from them.
///
/// `master` is `Some` exactly if the weight is half.
pub(crate) fn walk(
    weight: SliceMut<'_>,
    master: Option<&mut [f32]>,
    grad: Slice<'_>,
    mut block: impl FnMut(Range<usize>, &mut [f32], &[f32]),
) {
    let (param, mut copy) = match (weight, master) {
        (SliceMut::F32(weight), None) => (weight, None),
        (half, Some(master)) => (master, Some(half)),
        (_, None) => unreachable!("the step gave every half weight a master"),
    };
    let mut wide = [0.0; BLOCK];
    for start in (0..param.len()).step_by(BLOCK) {
        let range = start..param.len().min(start + BLOCK);
        let param = &mut param[range.clone()];
        block(range.clone(), param, load(grad, range.clone(), &mut wide));
        match &mut copy {
            None => {}
            Some(SliceMut::F16(half)) => to_f16(param, &mut half[range]),
            Some(SliceMut::Bf16(half)) => {
                dispatch(scalar::ToBf16 { input: param, output: &mut half[range] });
            }
            Some(SliceMut::F32(_)) => unreachable!("an f32 weight has no master"),
        }
    }
}

/// Whether any element times `scale` is infinite or NaN.
pub(crate) fn has_non_finite(grad: Slice<'_>, scale: f32) -> bool {
    let mut wide = [0.0; BLOCK];
    (0..grad.len()).step_by(BLOCK).any(|start| {
        let range = start..grad.len().min(start + BLOCK);
        dispatch(scalar::HasNonFinite { input: load(grad, range, &mut wide), scale })
    })
}

/// The f32 values of a half weight, exactly.
pub(crate) fn widen(weight: Slice<'_>) -> Vec<f32> {
    let mut wide = vec![0.0; weight.len()];
    widen_into(weight, &mut wide);
    wide
}

/// A range of a gradient as f32: itself if it is, else widened into `wide`.
fn load<'a>(grad: Slice<'a>, range: Range<usize>, wide: &'a mut [f32; BLOCK]) -> &'a [f32] {
    let wide = &mut wide[..range.len()];
    match grad {
        Slice::F32(grad) => return &grad[range],
        Slice::F16(grad) => widen_into(Slice::F16(&grad[range]), wide),
        Slice::Bf16(grad) => widen_into(Slice::Bf16(&grad[range]), wide),
    }
    wide
}

fn widen_into(input: Slice<'_>, output: &mut [f32]) {
    match input {
        Slice::F32(input) => output.copy_from_slice(input),
        Slice::F16(input) => from_f16(input, output),
        Slice::Bf16(input) => dispatch(scalar::FromBf16 { input, output }),
    }
}

/// Exact.
fn from_f16(input: &[f16], output: &mut [f32]) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if let Some(f16c) = x86_64::F16c::detect() {
        done = f16c.widen(input, output);
    }
    input[done..].convert_to_f32_slice(&mut output[done..]);
}

/// Rounds to nearest even.
fn to_f16(input: &[f32], output: &mut [f16]) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if let Some(f16c) = x86_64::F16c::detect() {
        done = f16c.narrow(input, output);
    }
    output[done..].convert_from_f32_slice(&input[done..]);
}

/// Elements per block: four f32 streams of it, and the stack copy, fit a first-level cache.
const BLOCK: usize = 1024;

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::core::Hyper;
    use crate::{adamw, sgd};

    /// Any bits: NaN payloads, infinities, subnormals.
    fn any_floats(max: usize) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..max)
    }

    /// The bits a rule leaves behind, without and with each instruction set.
    fn bits<R: Rule<N>, const N: usize>(rule: R, data: &[f32], offset: usize) -> Vec<Vec<u32>> {
        let n = data.len() / (N + 2);
        let run = |with: &dyn Fn(scalar::Sweep<'_, R, N>)| {
            // One element of padding per offset: the slices start unaligned.
            let mut rows: Vec<Vec<f32>> = (0..N + 2)
                .map(|row| {
                    let mut row_data = vec![0.0; offset];
                    row_data.extend(&data[row * n..(row + 1) * n]);
                    row_data
                })
                .collect();
            let grad = rows.pop().unwrap();
            let mut slices = rows.iter_mut().map(|row| &mut row[offset..]);
            let param = slices.next().unwrap();
            let state = std::array::from_fn(|_| slices.next().unwrap());
            with(scalar::Sweep { rule, param, grad: &grad[offset..], state });
            // A NaN's payload may depend on the order of operands; that it is one may not.
            let canonical = |x: &f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
            rows.iter().flatten().map(canonical).collect::<Vec<u32>>()
        };
        #[cfg(target_arch = "x86_64")]
        let wide = x86_64::Isa::all().map(|isa| run(&|kernel| isa.run(kernel)));
        #[cfg(not(target_arch = "x86_64"))]
        let wide = [];
        std::iter::once(run(&|kernel| kernel.run())).chain(wide).collect()
    }

    fn same(all: &[Vec<u32>]) -> bool {
        all.iter().all(|one| *one == all[0])
    }

    proptest! {
        #[test]
        fn every_instruction_set_equals_the_scalar_rule(data in any_floats(400), offset in 0..17_usize) {
            let adamw = adamw::AdamWHyper::default().rule(3, 0.25);
            prop_assert!(same(&bits::<_, 2>(adamw, &data, offset)));
            prop_assert!(same(&bits::<_, 3>(adamw, &data, offset)));
            let hyper = sgd::SgdHyper { momentum: 0.9, weight_decay: 0.1, ..Default::default() };
            let sgd = hyper.rule(3, 0.25).rule;
            prop_assert!(same(&bits::<_, 0>(sgd, &data, offset)));
            prop_assert!(same(&bits::<_, 1>(sgd, &data, offset)));
            prop_assert!(same(&bits::<_, 1>(sgd::Nesterov(sgd), &data, offset)));
        }

        #[test]
        fn finite_test_agrees_with_std(data in any_floats(3000), scale in 0.0_f32..2.0) {
            let expected = data.iter().any(|x| !(x * scale).is_finite());
            prop_assert_eq!(has_non_finite(Slice::F32(&data), scale), expected);
        }

        #[test]
        fn bf16_rounding_agrees_with_half(data in any_floats(100)) {
            let mut out = vec![bf16::ZERO; data.len()];
            dispatch(scalar::ToBf16 { input: &data, output: &mut out });
            for (x, y) in data.iter().zip(&out) {
                prop_assert_eq!(y.to_bits(), bf16::from_f32(*x).to_bits());
            }
        }
    }

    #[test]
    fn f16_conversions_agree_with_half() {
        // Every half and the f32s around it, at lengths that are no multiple of eight.
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for halves in halves.chunks(1021) {
            let wide = widen(Slice::F16(halves));
            let scalar: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
            let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&wide), bits(&scalar));
            for nudge in [-4097_i32, -4096, -1, 0, 1, 4095, 4096, 4097] {
                let near = |x: &f32| f32::from_bits(x.to_bits().wrapping_add_signed(nudge));
                let inputs: Vec<f32> = wide.iter().map(near).collect();
                let mut narrow = vec![f16::ZERO; inputs.len()];
                to_f16(&inputs, &mut narrow);
                for (x, y) in inputs.iter().zip(&narrow) {
                    assert_eq!(y.to_bits(), f16::from_f32(*x).to_bits(), "{:#x}", x.to_bits());
                }
            }
        }
    }

    #[test]
    fn one_bad_element_anywhere_is_found() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for at in [0, 1, 15, 16, 1023, 1024, 2047, 2500] {
                let mut f32s = vec![f32::MAX; 2501];
                f32s[at] = bad;
                assert!(has_non_finite(Slice::F32(&f32s), 1.0), "{bad} at {at}");
                let mut f16s = vec![f16::MAX; 2501];
                f16s[at] = f16::from_f32(bad);
                assert!(has_non_finite(Slice::F16(&f16s), 1.0), "{bad} at {at}");
                let mut bf16s = vec![bf16::MIN; 2501];
                bf16s[at] = bf16::from_f32(bad);
                assert!(has_non_finite(Slice::Bf16(&bf16s), 1.0), "{bad} at {at}");
            }
        }
        assert!(!has_non_finite(Slice::F32(&[f32::MAX, f32::MIN, 1e-45, -0.0]), 1.0));
        assert!(has_non_finite(Slice::F32(&[1.0, f32::MAX]), 2.0), "the product overflows");
        assert!(!has_non_finite(Slice::F32(&[]), 1.0));
    }

    #[test]
    fn bf16_widens_every_value_exactly() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        for (wide, narrow) in widen(Slice::Bf16(&all)).iter().zip(&all) {
            assert_eq!(wide.to_bits(), u32::from(narrow.to_bits()) << 16);
        }
    }
}
