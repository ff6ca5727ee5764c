//! The loops, written plainly, one element after another. This is the definition; `x86_64.rs`
//! compiles these same lines for wider registers.

use half::{bf16, f16};

use super::sum::{LANES, fold_lanes};
use super::{GradMap, Kernel, Rule, TwoSweeps};

/// A rule over the elements of one block.
pub(super) struct Sweep<'a, R, const N: usize> {
    pub(super) rule: R,
    pub(super) map: GradMap,
    pub(super) param: &'a mut [f32],
    pub(super) grad: &'a [f32],
    pub(super) state: [&'a mut [f32]; N],
}

impl<R: Rule<N>, const N: usize> Kernel for Sweep<'_, R, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // Slices of one length, so that the loop below needs no further check.
        let count = self.param.len();
        let param = &mut self.param[..count];
        let grad = &self.grad[..count];
        let state = self.state.map(|slot| &mut slot[..count]);
        for i in 0..count {
            let old = std::array::from_fn(|slot| state[slot][i]);
            let (new_param, new) = self.rule.update(param[i], self.map.apply(grad[i]), old);
            param[i] = new_param;
            for slot in 0..N {
                state[slot][i] = new[slot];
            }
        }
    }
}

/// The first of two sweeps: new state, and sums by lanes: of `p·p` and `u·u`, or, if `COSINE`, of
/// `p·p`, `p·u`, `g·g` and `g·p`.
pub(super) struct Observe<'a, R, const COSINE: bool> {
    pub(super) rule: R,
    pub(super) map: GradMap,
    pub(super) param: &'a [f32],
    pub(super) grad: &'a [f32],
    pub(super) state: [&'a mut [f32]; 2],
}

impl<R: TwoSweeps, const COSINE: bool> Kernel for Observe<'_, R, COSINE> {
    type Output = [[f64; LANES]; 4];

    #[inline(always)]
    fn run(self) -> Self::Output {
        self.by_parts::<false>()
    }

    /// The product of two f32 has at most 48 bits and so is exact in f64; whether it is rounded before
    /// the sum is changes no bit.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn run_wide(self) -> Self::Output {
        if COSINE { self.by_rows() } else { self.by_parts::<true>() }
    }
}

impl<R: TwoSweeps, const COSINE: bool> Observe<'_, R, COSINE> {
    /// By parts of a few rows of lanes: directions of one are computed while the sums of another
    /// wait for their additions, and memory for both.
    #[inline(always)]
    fn by_parts<const FMA: bool>(self) -> [[f64; LANES]; 4] {
        let count = self.param.len();
        let (param, grad) = (&self.param[..count], &self.grad[..count]);
        let [m, v] = self.state.map(|slot| &mut slot[..count]);
        let mut sums = [[0.0; LANES]; 4];
        let (mut mapped, mut directions) = ([0.0; PART], [0.0; PART]);
        for start in (0..count).step_by(PART) {
            let count = PART.min(count - start);
            let (p, grad) = (&param[start..][..count], &grad[start..][..count]);
            let (m, v) = (&mut m[start..][..count], &mut v[start..][..count]);
            let (g, u) = (&mut mapped[..count], &mut directions[..count]);
            for i in 0..count {
                g[i] = self.map.apply(grad[i]);
                let state = self.rule.state(g[i], [m[i], v[i]]);
                [m[i], v[i]] = state;
                u[i] = self.rule.direction(p[i], g[i], state);
            }
            if COSINE {
                add_cosine(&mut sums, p, u, g);
            } else {
                add_products::<FMA>(&mut sums[0], p, p);
                add_products::<FMA>(&mut sums[1], u, u);
            }
        }
        sums
    }

    /// Row by row of lanes, where there are registers for all sums at once.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn by_rows(self) -> [[f64; LANES]; 4] {
        let Self { rule, map, param, grad, state: [m, v] } = self;
        let whole = param.len() / LANES * LANES;
        let (p_rows, p_tail) = param.as_chunks::<LANES>();
        let (m, m_tail) = m[..param.len()].split_at_mut(whole);
        let (v, v_tail) = v[..param.len()].split_at_mut(whole);
        let rows = grad.as_chunks::<LANES>().0.iter();
        let rows = rows.zip(m.as_chunks_mut::<LANES>().0).zip(v.as_chunks_mut::<LANES>().0);
        let mut sums = [[0.0; LANES]; 4];
        let [pp, pu, gg, gp] = &mut sums;
        for (p, ((grad, m), v)) in p_rows.iter().zip(rows) {
            let (mut g, mut u) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                g[lane] = map.apply(grad[lane]);
                let state = rule.state(g[lane], [m[lane], v[lane]]);
                [m[lane], v[lane]] = state;
                u[lane] = rule.direction(p[lane], g[lane], state);
            }
            for lane in 0..LANES {
                let [p, u, g] = [p[lane], u[lane], g[lane]].map(f64::from);
                pp[lane] = p.mul_add(p, pp[lane]);
                pu[lane] = p.mul_add(u, pu[lane]);
                gg[lane] = g.mul_add(g, gg[lane]);
                gp[lane] = g.mul_add(p, gp[lane]);
            }
        }
        let grad = &grad[whole..];
        let tail =
            Self { rule, map, param: p_tail, grad, state: [m_tail, v_tail] }.by_parts::<true>();
        for (sum, more) in sums.as_flattened_mut().iter_mut().zip(tail.as_flattened()) {
            *sum += more;
        }
        sums
    }
}

/// Elements whose directions are computed before they are summed; whole rows of lanes.
const PART: usize = 8 * LANES;

/// Adds the products of two slices of one length to lanes, from the first.
#[inline(always)]
fn add_products<const FMA: bool>(lanes: &mut [f64; LANES], a: &[f32], b: &[f32]) {
    let add = |sum: &mut f64, a: f32, b: f32| {
        let (a, b) = (f64::from(a), f64::from(b));
        *sum = if FMA { a.mul_add(b, *sum) } else { *sum + a * b };
    };
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            add(&mut lanes[lane], a[lane], b[lane]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        add(lane, *a, *b);
    }
}

/// The second of two sweeps.
pub(super) struct Move<'a, R> {
    pub(super) rule: R,
    pub(super) factor: f32,
    pub(super) map: GradMap,
    pub(super) param: &'a mut [f32],
    pub(super) grad: &'a [f32],
    pub(super) state: [&'a [f32]; 2],
}

impl<R: TwoSweeps> Kernel for Move<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let count = self.param.len();
        let (param, grad) = (&mut self.param[..count], &self.grad[..count]);
        let [m, v] = self.state.map(|slot| &slot[..count]);
        for i in 0..count {
            let g = self.map.apply(grad[i]);
            let direction = self.rule.direction(param[i], g, [m[i], v[i]]);
            param[i] = self.rule.moved(self.factor, param[i], direction);
        }
    }
}

/// The bits of the largest magnitude after `map`; those of NaNs are larger than infinity's.
pub(super) struct Largest<'a> {
    pub(super) input: &'a [f32],
    pub(super) map: GradMap,
}

impl Kernel for Largest<'_> {
    type Output = u32;

    /// Without its sign a float is finite exactly if its bits, as an integer, are below those of
    /// infinity; the largest decides for all.
    #[inline(always)]
    fn run(self) -> u32 {
        let mut largest = 0;
        for x in self.input {
            largest = largest.max(self.map.apply(*x).to_bits() & 0x7fff_ffff);
        }
        largest
    }
}

/// The sum of squares after `map`.
pub(super) struct Squares<'a> {
    pub(super) input: &'a [f32],
    pub(super) map: GradMap,
}

impl Kernel for Squares<'_> {
    type Output = f64;

    /// Without a limit there is nothing to compare with.
    #[inline(always)]
    fn run(self) -> f64 {
        let GradMap { scale, limit } = self.map;
        fold_lanes(if limit == f32::INFINITY {
            squares(self.input, |x| x * scale)
        } else {
            squares(self.input, |x| self.map.apply(x))
        })
    }
}

#[inline(always)]
fn squares(input: &[f32], map: impl Fn(f32) -> f32) -> [f64; LANES] {
    let mut lanes = [0.0; LANES];
    let (rows, tail) = input.as_chunks::<LANES>();
    for row in rows {
        for lane in 0..LANES {
            let x = f64::from(map(row[lane]));
            lanes[lane] += x * x;
        }
    }
    for lane in 0..tail.len() {
        let x = f64::from(map(tail[lane]));
        lanes[lane] += x * x;
    }
    lanes
}

/// Adds `p·p`, `p·u`, `g·g` and `g·p` of slices of one length to lanes, from the first. The same bits
/// as four times [`add_products`], with each value taken to f64 once.
#[inline(always)]
fn add_cosine(sums: &mut [[f64; LANES]; 4], p: &[f32], u: &[f32], g: &[f32]) {
    let (p, p_tail) = p.as_chunks::<LANES>();
    let ((u, u_tail), (g, g_tail)) = (u.as_chunks::<LANES>(), g.as_chunks::<LANES>());
    let [pp, pu, gg, gp] = sums;
    for ((p, u), g) in p.iter().zip(u).zip(g) {
        for lane in 0..LANES {
            let [p, u, g] = [p[lane], u[lane], g[lane]].map(f64::from);
            pp[lane] += p * p;
            pu[lane] += p * u;
            gg[lane] += g * g;
            gp[lane] += g * p;
        }
    }
    for lane in 0..p_tail.len() {
        let [p, u, g] = [p_tail[lane], u_tail[lane], g_tail[lane]].map(f64::from);
        pp[lane] += p * p;
        pu[lane] += p * u;
        gg[lane] += g * g;
        gp[lane] += g * p;
    }
}

/// Gradients, mapped in place.
pub(super) struct Map<'a> {
    pub(super) values: &'a mut [f32],
    pub(super) map: GradMap,
}

impl Kernel for Map<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for x in self.values {
            *x = self.map.apply(*x);
        }
    }
}

/// A moving average of parameters.
pub(super) struct Average<'a> {
    pub(super) param: &'a [f32],
    pub(super) values: &'a mut [f32],
    pub(super) decay: f32,
}

impl Kernel for Average<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rest = 1.0 - self.decay;
        for (value, param) in self.values.iter_mut().zip(self.param) {
            *value = *value * self.decay + *param * rest;
        }
    }
}

/// f32 to bf16 or f16, rounded up or down at random: up with the probability of the distance from
/// below, so that the mean is the value. `key` and the element's place make the random bits.
pub(super) struct Stochastic<'a, H> {
    pub(super) input: &'a [f32],
    pub(super) output: &'a mut [H],
    pub(super) key: u32,
}

/// 32 bits that look random, of element `i` under `key`: a counter through an integer hash of two
/// multiplications, every input bit of which changes about half of the output's.
#[inline(always)]
pub(super) fn random(key: u32, i: usize) -> u32 {
    let mut x = key.wrapping_add((i as u32).wrapping_mul(0x9e37_79b9));
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

impl Kernel for Stochastic<'_, bf16> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, (x, y)) in self.input.iter().zip(self.output).enumerate() {
            // The 16 bits that go are a fraction of a unit; adding as many random bits carries
            // into the unit exactly that often. It cannot carry an infinity or NaN further.
            let bits = x.to_bits();
            let up = bits.wrapping_add(random(self.key, i) >> 16);
            let special = (bits >> 16) | if x.is_nan() { 0x40 } else { 0 };
            *y = bf16::from_bits(if x.is_finite() { (up >> 16) as u16 } else { special as u16 });
        }
    }
}

impl Kernel for Stochastic<'_, f16> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (i, (x, y)) in self.input.iter().zip(self.output).enumerate() {
            let bits = x.to_bits();
            let sign = (bits >> 16) & 0x8000;
            let magnitude = bits & 0x7fff_ffff;
            let random = random(self.key, i);
            // Normal halves: 13 bits go, and the exponent's bias from 127 to 15. From 65504 on the
            // carry reaches the bits of infinity, as it should.
            let normal =
                ((magnitude.wrapping_add(random >> 19) >> 13).wrapping_sub(112 << 10)).min(0x7c00);
            // Below 2^-14, 1024 units, a half counts in units of 2^-24. The products are exact.
            let units = (f32::from_bits(magnitude) * 16_777_216.0).min(1024.0);
            let whole = units as u32;
            let above = (random >> 8) as f32 * (1.0 / 16_777_216.0) < units - whole as f32;
            let subnormal = whole + u32::from(above);
            let half = if magnitude < 113 << 23 { subnormal } else { normal };
            let half = if magnitude >= 143 << 23 { 0x7c00 } else { half };
            let half = if x.is_nan() { 0x7e00 } else { half };
            *y = f16::from_bits((sign | half) as u16);
        }
    }
}

/// f32 to bf16, rounded to nearest even; a NaN stays one, with its sign.
pub(super) struct ToBf16<'a> {
    pub(super) input: &'a [f32],
    pub(super) output: &'a mut [bf16],
}

impl Kernel for ToBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (x, y) in self.input.iter().zip(self.output) {
            let bits = x.to_bits();
            // Adds just below half a unit, and one more if that makes the result even.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // Rounding could carry a NaN into infinity; instead it is cut off and made quiet.
            let nan = (bits >> 16) | 0x40;
            *y = bf16::from_bits(if x.is_nan() { nan as u16 } else { rounded as u16 });
        }
    }
}

/// bf16 to f32, exactly.
pub(super) struct FromBf16<'a> {
    pub(super) input: &'a [bf16],
    pub(super) output: &'a mut [f32],
}

impl Kernel for FromBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (x, y) in self.input.iter().zip(self.output) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
    }
}
