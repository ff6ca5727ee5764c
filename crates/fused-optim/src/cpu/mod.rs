//! Update loops on the CPU.
//!
//! Tensors are split into blocks of [`BLOCK`] elements ([`plan`]), and blocks into one share per
//! thread ([`threads`]). A block's half gradient is converted to f32 in a scratch buffer, the rule
//! runs over f32 slices, and a half weight is rounded while all of it is still in the first-level
//! cache ([`piece`]). So one sweep over memory is enough, and a rule is written once, for f32, for
//! all types of weight and gradient. Rules that need sums over a tensor first do two sweeps
//! ([`sum`]).
//!
//! Invariant: an element's result depends on that element, and on sums whose order is fixed by the
//! tensor's layout; the loops of [`scalar`] are compiled for every instruction set (no
//! reassociation, and fused multiply-adds only where the product is exact). Hence threads,
//! alignment and processor never change a bit.
//!
//! On aarch64 there is no dispatch: NEON is part of the target, and the compiler vectorizes the
//! loops by four. f16 conversion is left to `half`, which detects `fp16` and converts four at a
//! time with `fcvtl` and `fcvtn`; the intrinsics for these are not stable yet.

pub(crate) mod pages;
mod piece;
pub(crate) mod plan;
mod prefetch;
pub(crate) mod quant;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd_limit;
pub(crate) mod sum;
pub(crate) mod threads;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use self::pages::LINE;
use crate::{Slice, SliceMut};
pub(crate) use piece::{Block, Piece, SLOTS, Scratch, SlotMut, step_key};
pub(crate) use plan::BLOCK;
pub(crate) use prefetch::Prefetching;
pub(crate) use scalar::sum_of_squares;
pub(crate) use sum::{Reduction, reduce};

/// Scaling and clamping of a gradient before the rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GradMap {
    /// Factor; negative to maximize.
    pub(crate) scale: f32,
    /// The product is clamped to `-limit ..= limit`; infinity for no clamping.
    pub(crate) limit: f32,
}

impl GradMap {
    pub(crate) const IDENTITY: Self = Self { scale: 1.0, limit: f32::INFINITY };

    /// A NaN stays NaN.
    #[inline(always)]
    fn apply(self, grad: f32) -> f32 {
        let g = grad * self.scale;
        let g = if g > self.limit { self.limit } else { g };
        if g < -self.limit { -self.limit } else { g }
    }
}

/// One element's update: the definition of an optimizer with `N` state values per element.
pub(crate) trait Rule<const N: usize>: Copy {
    /// New parameter and state from parameter, gradient and state. Must be `#[inline(always)]`.
    fn update(&self, param: f32, grad: f32, state: [f32; N]) -> (f32, [f32; N]);
}

/// One element's update where the new parameter depends on sums over the tensor: the first sweep
/// updates the state and sums products of directions, the second computes the same directions again
/// and the new parameters. Every method must be `#[inline(always)]`.
pub(crate) trait TwoSweeps: Copy {
    /// Whether the first sweep sums `p·p`, `p·u`, `g·g` and `g·p`; otherwise it sums `p·p` and
    /// `u·u`.
    const COSINE: bool;
    /// New state from gradient and state.
    fn state(&self, grad: f32, state: [f32; 2]) -> [f32; 2];
    /// Direction of the update, from the new state.
    fn direction(&self, param: f32, grad: f32, state: [f32; 2]) -> f32;
    /// The new parameter; `factor` was computed from the sums.
    fn new_param(&self, factor: f32, param: f32, direction: f32) -> f32;
}

/// A loop that is compiled once per instruction set. Its methods must be `#[inline(always)]`.
trait Kernel: Sized {
    type Output;
    fn run(self) -> Self::Output;
    /// The same bits, for 32 registers of 64 bytes and `mul_add` as one instruction.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn run_wide(self) -> Self::Output {
        self.run()
    }
}

/// Runs a loop with the widest instructions that the processor has and the environment allows.
fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(all(test, target_arch = "x86_64"))]
    if let Some(choice) = tests::FORCED.get() {
        return match x86_64::Isa::all().nth(choice) {
            Some(isa) => isa.run(kernel),
            None => kernel.run(),
        };
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(isa) = x86_64::Isa::detect() {
        return isa.run(kernel);
    }
    kernel.run()
}

/// Applies `rule` to every element of a block, with its first `N` state vectors.
///
/// Vector loads across two cache lines are slower, so the elements before the weight's first whole
/// cache line are updated separately, unless the block is short.
pub(crate) fn sweep<R: Rule<N>, const N: usize>(rule: &R, mut block: Block<'_>) {
    if block.param.len() > 16 * LINE {
        let place = block.param.as_ptr().addr() / size_of::<f32>();
        let head = place.next_multiple_of(LINE) - place;
        if head > 0 {
            dispatch(scalar::Sweep { rule: *rule, block: block.split_off(head) });
        }
    }
    dispatch(scalar::Sweep { rule: *rule, block });
}

/// The first sweep of some blocks: updates the state, writes directions, and pushes the sums of
/// each block.
pub(crate) fn first_sweep<R: TwoSweeps>(
    rule: &R,
    block: Block<'_>,
    directions: &mut [f32],
    sums: &mut Vec<Sums>,
) {
    dispatch(scalar::StateSweep { rule: *rule, block, directions, sums });
}

/// The second sweep of some blocks: updates the parameters.
pub(crate) fn second_sweep<R: TwoSweeps>(rule: &R, first: FirstSweep<'_>, block: Block<'_>) {
    dispatch(scalar::SecondSweep { rule: *rule, first, block });
}

/// Results of the first sweep for the second.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FirstSweep<'a> {
    /// Factors of rows, from the block's first row.
    pub(crate) factors: &'a [f32],
    /// The block's directions, if they were kept; otherwise they are computed again.
    pub(crate) directions: Option<&'a [f32]>,
}

/// Sums of the first sweep: products of parameter `p`, direction `u` and gradient `g`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub(crate) pp: f64,
    pub(crate) uu: f64,
    pub(crate) gg: f64,
    pub(crate) gp: f64,
    pub(crate) pu: f64,
}

impl Sums {
    /// Adds sums of parts by the tree of [`sum`]; `parts` are overwritten.
    pub(crate) fn fold(parts: &mut [Self]) -> Self {
        let add = |a: Self, b: Self| Self {
            pp: a.pp + b.pp,
            uu: a.uu + b.uu,
            gg: a.gg + b.gg,
            gp: a.gp + b.gp,
            pu: a.pu + b.pu,
        };
        sum::tree(parts, add).unwrap_or_default()
    }
}

/// Scales and clamps gradients in place; 16-bit ones in f32, rounded to nearest even.
pub(crate) fn map(grad: SliceMut<'_>, map: GradMap) {
    match grad {
        SliceMut::F32(values) => scalar::map_in_place(values, map),
        mut half => {
            let mut wide = [0.0; BLOCK];
            for start in (0..half.len()).step_by(BLOCK) {
                let range = start..half.len().min(start + BLOCK);
                let values = &mut wide[..range.len()];
                let mut half = half.part(range);
                widen_into(half.as_slice(), values);
                scalar::map_in_place(values, map);
                narrow(values, &mut half, None);
            }
        }
    }
}

/// A range of a gradient as f32, converted in `wide` if it is 16-bit.
fn load<'a>(grad: Slice<'a>, range: Range<usize>, wide: &'a mut [f32; BLOCK]) -> &'a [f32] {
    if let Slice::F32(grad) = grad {
        return &grad[range];
    }
    let wide = &mut wide[..range.len()];
    widen_into(grad.part(range), wide);
    wide
}

/// Rounds to nearest even, or stochastically if there is a `key`, the seed of the random bits.
fn narrow(input: &[f32], output: &mut SliceMut<'_>, key: Option<u32>) {
    match (output, key) {
        (SliceMut::F32(output), _) => output.copy_from_slice(input),
        (SliceMut::F16(output), None) => to_f16(input, output),
        (SliceMut::F16(output), Some(key)) => scalar::to_f16_stochastic(input, output, key),
        (SliceMut::Bf16(output), None) => scalar::to_bf16(input, output),
        (SliceMut::Bf16(output), Some(key)) => scalar::to_bf16_stochastic(input, output, key),
    }
}

/// Converts to f32, exactly.
pub(crate) fn widen_into(input: Slice<'_>, output: &mut [f32]) {
    match input {
        Slice::F32(input) => output.copy_from_slice(input),
        Slice::F16(input) => from_f16(input, output),
        Slice::Bf16(input) => scalar::from_bf16(input, output),
    }
}

/// Converts to f32, exactly.
fn from_f16(input: &[f16], output: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    let done = x86_64::Isa::detect().map_or(0, |isa| isa.widen(input, output));
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    input[done..].convert_to_f32_slice(&mut output[done..]);
}

/// Rounds to nearest even.
fn to_f16(input: &[f32], output: &mut [f16]) {
    #[cfg(target_arch = "x86_64")]
    let done = x86_64::Isa::detect().map_or(0, |isa| isa.narrow(input, output));
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    output[done..].convert_from_f32_slice(&input[done..]);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::rule::Hyper;
    use crate::{
        AdadeltaHyper, AdafactorHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, LambHyper,
        LionHyper, MuonHyper, RmsPropHyper, RmsPropTfHyper, ScheduleFreeAdamWHyper, SgdHyper,
    };

    thread_local! {
        /// Index of the instruction set that `dispatch` uses; past the last, plain code.
        pub(super) static FORCED: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// Any bits: NaN payloads, infinities, subnormals.
    fn any_floats(max: usize) -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..max)
    }

    /// Results of `run` with each instruction set, and without.
    pub(super) fn on_each_isa<T>(mut run: impl FnMut() -> T) -> Vec<T> {
        let mut all = Vec::new();
        for choice in 0..3 {
            FORCED.set(Some(choice));
            all.push(run());
        }
        FORCED.set(None);
        all
    }

    /// The bits, with one value for all NaNs: a NaN's payload may depend on the order of operands.
    fn canonical(x: &f32) -> u32 {
        if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
    }

    fn widen(input: Slice<'_>) -> Vec<f32> {
        let mut wide = vec![0.0; input.len()];
        widen_into(input, &mut wide);
        wide
    }

    /// Parameter, state and sums after a rule's sweeps over blocks of `at_once` elements, with the
    /// first sweep's directions if `keep`.
    fn swept<H: Hyper>(
        hyper: &H,
        data: &[f32],
        (offset, cols): (usize, usize),
        at_once: usize,
        keep: bool,
    ) -> (Vec<u32>, Vec<[u64; 5]>) {
        let n = data.len() / (SLOTS + 2);
        let rule = hyper.rule(3, 1);
        let factors: Vec<f32> = (0..=n).map(|row| row as f32 / 8.0 - 0.5).collect();
        let map = GradMap { scale: 0.25, limit: 2.0 };
        // One element of padding per offset: the slices start unaligned.
        let row = |row: usize| [&vec![0.0; offset], &data[row * n..(row + 1) * n]].concat();
        let mut rows: [Vec<f32>; SLOTS + 2] = std::array::from_fn(row);
        let (mut sums, mut directions) = (Vec::new(), vec![0.0; n]);
        for sweep in [false, true] {
            for start in (0..n).step_by(at_once) {
                let range = offset + start..offset + n.min(start + at_once);
                let [param, grad, slots @ ..] = &mut rows;
                let slots = slots.each_mut().map(|slot| &mut slot[range.clone()]);
                let (param, grad) = (&mut param[range.clone()], &grad[range]);
                let prefetch = start / at_once % 2 == 1;
                let block = Block { map, cols, prefetch, param, grad, slots };
                let directions = &mut directions[start..][..block.param.len()];
                match sweep {
                    true => {
                        let directions = Some(&*directions).filter(|_| keep || H::BY_TENSOR);
                        H::sweep(
                            &rule,
                            FirstSweep { factors: &factors[start / cols..], directions },
                            block,
                        );
                    }
                    false => H::first_sweep(&rule, block, directions, &mut sums),
                }
            }
        }
        let bits = |s: &Sums| {
            [s.pp, s.uu, s.gg, s.gp, s.pu].map(|x| if x.is_nan() { 0 } else { x.to_bits() })
        };
        (rows.iter().flatten().map(canonical).collect(), sums.iter().map(bits).collect())
    }

    /// Results are the same for each instruction set, for several rows at once and each row alone,
    /// and for directions that are kept and computed again.
    fn assert_same<H: Hyper>(hyper: H, data: &[f32], place: (usize, usize)) {
        for keep in [false, true] {
            let all = on_each_isa(|| swept(&hyper, data, place, data.len() + 1, keep));
            assert!(all.iter().all(|one| *one == all[0]), "{}", H::KIND);
            assert_eq!(swept(&hyper, data, place, place.1, !keep), all[0], "{}", H::KIND);
        }
    }

    proptest! {
        #[test]
        fn every_instruction_set_equals_the_scalar_rule(
            data in any_floats(400),
            offset in (0..17_usize, prop_oneof![1..40_usize, Just(BLOCK + 1)]),
        ) {
            let data = &data;
            for amsgrad in [false, true] {
                assert_same(AdamHyper { amsgrad, weight_decay: 0.1, ..Default::default() }, data, offset);
                assert_same(AdamWHyper { amsgrad, ..Default::default() }, data, offset);
                let nesterov = amsgrad;
                assert_same(AdamPHyper { nesterov, ..Default::default() }, data, offset);
            }
            assert_same(AdadeltaHyper::default(), data, offset);
            assert_same(AdafactorHyper::default(), data, offset);
            assert_same(MuonHyper::default(), data, offset);
            assert_same(BertAdamHyper::default(), data, offset);
            assert_same(LambHyper::default(), data, offset);
            assert_same(LionHyper::default(), data, offset);
            assert_same(ScheduleFreeAdamWHyper::default(), data, offset);
            for (momentum, centered) in [(0.0, false), (0.9, false), (0.0, true), (0.9, true)] {
                assert_same(RmsPropHyper { momentum, centered, ..Default::default() }, data, offset);
                assert_same(RmsPropTfHyper { momentum, centered, ..Default::default() }, data, offset);
                let nesterov = momentum > 0.0 && centered;
                let sgd = SgdHyper { momentum, nesterov, weight_decay: 0.1, ..Default::default() };
                assert_same(sgd, data, offset);
            }
        }

        #[test]
        fn reductions_agree_with_a_plain_loop(data in any_floats(3000), scale in 0.0_f32..2.0) {
            let map = GradMap { scale, ..GradMap::IDENTITY };
            let plain: Vec<f64> = data.iter().map(|x| f64::from(x * scale).abs()).collect();
            let finite = plain.iter().all(|x| x.is_finite());
            let all = on_each_isa(|| {
                [Reduction::Squares, Reduction::MaxAbs, Reduction::Powers(2.0)]
                    .map(|what| reduce(&[Slice::F32(&data)], what, map, 1)[0])
            });
            for [squares, largest, powers] in &all {
                prop_assert_eq!(squares.is_finite(), finite);
                prop_assert_eq!(largest.is_finite(), finite);
                if finite {
                    let sum: f64 = plain.iter().map(|x| x * x).sum();
                    prop_assert!((squares - sum).abs() <= 1e-12 * sum);
                    prop_assert!((powers - sum).abs() <= 1e-12 * sum);
                    prop_assert_eq!(*largest, plain.iter().copied().fold(0.0, f64::max));
                    prop_assert_eq!(all[0].map(f64::to_bits), [*squares, *largest, *powers].map(f64::to_bits));
                    // The code path with a limit gives the same bits if no element exceeds it.
                    let limited = GradMap { limit: f32::MAX, ..map };
                    let limited = reduce(&[Slice::F32(&data)], Reduction::Squares, limited, 1)[0];
                    prop_assert_eq!(limited.to_bits(), squares.to_bits());
                }
            }
        }

        #[test]
        fn stochastic_rounding_gives_a_neighbour_and_the_same_bits_on_every_isa(data in any_floats(300), key: u32) {
            let all = on_each_isa(|| {
                let (mut f16s, mut bf16s) = (vec![f16::ZERO; data.len()], vec![bf16::ZERO; data.len()]);
                narrow(&data, &mut SliceMut::F16(&mut f16s), Some(key));
                narrow(&data, &mut SliceMut::Bf16(&mut bf16s), Some(key));
                (f16s, bf16s)
            });
            let bits = |(a, b): &(Vec<f16>, Vec<bf16>)| {
                (a.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), b.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            };
            prop_assert!(all.iter().all(|one| bits(one) == bits(&all[0])));
            for (x, (h, b)) in data.iter().zip(all[0].0.iter().zip(&all[0].1)) {
                // The neighbours: the truncated magnitude, and one unit above.
                let near_bf16 = [(x.to_bits() >> 16) as u16, ((x.to_bits() >> 16) as u16).wrapping_add(1)];
                let near = near_bf16.contains(&b.to_bits());
                prop_assert_eq!(x.is_nan(), b.is_nan());
                prop_assert!(near || x.is_nan());
                let nearest = f16::from_f32(*x).to_bits();
                let near_f16 = [nearest.wrapping_sub(1), nearest, nearest.wrapping_add(1)];
                let near = near_f16.contains(&h.to_bits());
                prop_assert_eq!(x.is_nan(), h.is_nan());
                prop_assert!(near || x.is_nan(), "{} {}", x, h);
                prop_assert_eq!(h.is_sign_negative(), x.is_sign_negative());
                prop_assert_eq!(b.is_sign_negative(), x.is_sign_negative());
            }
        }

        #[test]
        fn bf16_rounding_agrees_with_half(data in any_floats(100)) {
            let mut out = vec![bf16::ZERO; data.len()];
            scalar::to_bf16(&data, &mut out);
            for (x, y) in data.iter().zip(&out) {
                prop_assert_eq!(y.to_bits(), bf16::from_f32(*x).to_bits());
            }
        }
    }

    #[test]
    fn f16_conversions_agree_with_half() {
        // Every half and the f32s around it, at lengths that are not a multiple of eight.
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
    fn stochastic_rounding_is_unbiased() {
        // Of 2^16 elements the mean is within five deviations of at most half a unit / 2^8.
        for x in [1.0 + 0.3 / 128.0, -3.7e-5, 6.1e-5, 1.234e-6, 0.1, 1000.3, 65_500.0_f32] {
            let input = vec![x; 1 << 16];
            let mut f16s = vec![f16::ZERO; input.len()];
            let mut bf16s = vec![bf16::ZERO; input.len()];
            for (at, chunk) in input.chunks(BLOCK).enumerate() {
                let range = at * BLOCK..at * BLOCK + chunk.len();
                let key = Some(at as u32 * 77);
                narrow(chunk, &mut SliceMut::F16(&mut f16s[range.clone()]), key);
                narrow(chunk, &mut SliceMut::Bf16(&mut bf16s[range]), key);
            }
            let mean = |all: &mut dyn Iterator<Item = f32>| {
                all.map(f64::from).sum::<f64>() / input.len() as f64
            };
            let unit = |half: f32, next: f32| f64::from((next - half).abs());
            let below = f16::from_f32(x).to_bits();
            let f16_unit = unit(f16::from_bits(below).to_f32(), f16::from_bits(below - 1).to_f32());
            let below = bf16::from_f32(x).to_bits();
            let bf16_unit =
                unit(bf16::from_bits(below).to_f32(), bf16::from_bits(below - 1).to_f32());
            let f16_mean = mean(&mut f16s.iter().map(|x| x.to_f32()));
            let bf16_mean = mean(&mut bf16s.iter().map(|x| x.to_f32()));
            assert!((f16_mean - f64::from(x)).abs() < 5.0 * f16_unit / 512.0, "{x}: {f16_mean}");
            assert!((bf16_mean - f64::from(x)).abs() < 5.0 * bf16_unit / 512.0, "{x}: {bf16_mean}");
        }
    }

    #[test]
    fn one_non_finite_element_anywhere_is_found() {
        let finite = |grad: Slice<'_>, scale| {
            let map = GradMap { scale, ..GradMap::IDENTITY };
            let both = [Reduction::Squares, Reduction::MaxAbs];
            let both = both.map(|what| what.fold(&mut reduce(&[grad], what, map, 1)).is_finite());
            assert_eq!(both[0], both[1]);
            both[0]
        };
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for at in [0, 1, 15, 16, 1023, 1024, 2047, 2500] {
                let mut f32s = vec![f32::MAX; 2501];
                f32s[at] = bad;
                assert!(!finite(Slice::F32(&f32s), 1.0), "{bad} at {at}");
                let mut f16s = vec![f16::MAX; 2501];
                f16s[at] = f16::from_f32(bad);
                assert!(!finite(Slice::F16(&f16s), 1.0), "{bad} at {at}");
                let mut bf16s = vec![bf16::MIN; 2501];
                bf16s[at] = bf16::from_f32(bad);
                assert!(!finite(Slice::Bf16(&bf16s), 1.0), "{bad} at {at}");
            }
        }
        assert!(finite(Slice::F32(&[f32::MAX, f32::MIN, 1e-45, -0.0]), 1.0));
        assert!(!finite(Slice::F32(&[1.0, f32::MAX]), 2.0), "the product overflows");
        assert!(finite(Slice::F32(&[]), 1.0));
    }

    #[test]
    fn bf16_widens_every_value_exactly() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        for (wide, narrow) in widen(Slice::Bf16(&all)).iter().zip(&all) {
            assert_eq!(wide.to_bits(), u32::from(narrow.to_bits()) << 16);
        }
    }
}
