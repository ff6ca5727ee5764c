//! The loops in scalar code, which define the results; `x86_64.rs` compiles the same code for wider
//! registers.

use half::{bf16, f16};

use super::prefetch::prefetch;
use super::sum::{LANES, fold_lanes};
use super::{BLOCK, Block, FirstSweep, GradMap, Kernel, LINE, Rule, Sums, TwoSweeps};

/// Declares functions whose loops are compiled for each instruction set and dispatched to the
/// widest.
macro_rules! loops {
    ($($(#[$meta:meta])* fn $name:ident $(<const $flag:ident: bool>)? (
        $($arg:ident: $type:ty),*
    ) -> $output:ty $body:block)*) => {$(
        $(#[$meta])*
        pub(crate) fn $name<'a $(, const $flag: bool)?>($($arg: $type),*) -> $output {
            struct Loop<'a $(, const $flag: bool)?> {
                $($arg: $type,)*
            }
            impl<$(const $flag: bool)?> $crate::cpu::Kernel for Loop<'_ $(, $flag)?> {
                type Output = $output;
                #[inline(always)]
                fn run(self) -> Self::Output {
                    let Self { $($arg),* } = self;
                    $body
                }
            }
            $crate::cpu::dispatch(Loop::<'a $(, $flag)?> { $($arg),* })
        }
    )*};
}
pub(super) use loops;

/// A rule over the elements of one block.
pub(super) struct Sweep<'a, R, const N: usize> {
    pub(super) rule: R,
    pub(super) block: Block<'a>,
}

impl<R: Rule<N>, const N: usize> Kernel for Sweep<'_, R, N> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let whole = self.block.param.len() / LINE * LINE;
        by_rows::<_, N, LINE>(&self.rule, self.block.split_off(whole));
        by_rows::<_, N, 1>(&self.rule, self.block);
    }
}

/// Updates the elements of a block of whole rows, of `LENGTH` elements.
#[inline(always)]
fn by_rows<R: Rule<N>, const N: usize, const LENGTH: usize>(rule: &R, block: Block<'_>) {
    let Block { map, param, grad, slots, .. } = block;
    let param = param.as_chunks_mut::<LENGTH>().0;
    // Slices of one length, so that the loop below needs no further check.
    let grad = &grad.as_chunks::<LENGTH>().0[..param.len()];
    let mut slots = slots.into_iter().map(|slot| slot.as_chunks_mut::<LENGTH>().0);
    let state: [_; N] = std::array::from_fn(|_| {
        &mut slots.next().expect("a rule has at most as many")[..param.len()]
    });
    for row in 0..param.len() {
        if block.prefetch && LENGTH > 1 {
            prefetch(param[row].as_ptr());
            prefetch(grad[row].as_ptr());
            state.iter().for_each(|slot| prefetch(slot[row].as_ptr()));
        }
        let mut new_param = param[row];
        let mut new: [_; N] = std::array::from_fn(|slot| state[slot][row]);
        for i in 0..LENGTH {
            let old = std::array::from_fn(|slot| new[slot][i]);
            let (new_p, new_state) = rule.update(new_param[i], map.apply(grad[row][i]), old);
            new_param[i] = new_p;
            for slot in 0..N {
                new[slot][i] = new_state[slot];
            }
        }
        param[row] = new_param;
        for slot in 0..N {
            state[slot][row] = new[slot];
        }
    }
}

/// The first of two sweeps: new state, directions, and the sums of each block.
pub(super) struct StateSweep<'a, R> {
    pub(super) rule: R,
    pub(super) block: Block<'a>,
    pub(super) directions: &'a mut [f32],
    /// Gets one more element per block.
    pub(super) sums: &'a mut Vec<Sums>,
}

impl<R: TwoSweeps> Kernel for StateSweep<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.by_blocks::<false>();
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn run_wide(self) {
        self.by_blocks::<true>();
    }
}

impl<R: TwoSweeps> StateSweep<'_, R> {
    #[inline(always)]
    fn by_blocks<const FMA: bool>(self) {
        let Self { rule, block: Block { map, cols, param, grad, slots: [m, v, _], .. }, .. } = self;
        let (count, length) = (param.len(), cols.min(BLOCK));
        for start in (0..count).step_by(length) {
            let block = start..count.min(start + length);
            let (param, grad) = (&param[block.clone()], &grad[block.clone()]);
            let state = [&mut m[block.clone()], &mut v[block.clone()]];
            let one = Observed { rule, map, param, grad, state, u: &mut self.directions[block] };
            let [a, b, c, d] = fold_all(one.by_rows::<FMA>());
            self.sums.push(match R::COSINE {
                true => Sums { pp: a, pu: b, gg: c, gp: d, ..Sums::default() },
                false => Sums { pp: a, uu: b, ..Sums::default() },
            });
        }
    }
}

/// One block in its first sweep.
struct Observed<'a, R> {
    rule: R,
    map: GradMap,
    param: &'a [f32],
    grad: &'a [f32],
    state: [&'a mut [f32]; 2],
    /// Directions.
    u: &'a mut [f32],
}

impl<R: TwoSweeps> Observed<'_, R> {
    /// By rows of lanes, so that the roots and quotients of one row overlap with the sums of
    /// others.
    #[inline(always)]
    fn by_rows<const FMA: bool>(self) -> [[f64; LANES]; 4] {
        let Self { rule, map, param, grad, state: [m, v], u } = self;
        let mut sums = [[0.0; LANES]; 4];
        let (p_rows, p_tail) = param.as_chunks();
        let (g_rows, g_tail) = grad.as_chunks();
        let (m_rows, m_tail) = m.as_chunks_mut();
        let (v_rows, v_tail) = v.as_chunks_mut();
        let (u_rows, u_tail) = u.as_chunks_mut();
        let states = m_rows.iter_mut().zip(v_rows);
        for (((p, g), (m, v)), u) in p_rows.iter().zip(g_rows).zip(states).zip(u_rows) {
            let g = g.map(|g| map.apply(g));
            let directions = direct(&rule, p, &g, m, v);
            add_row::<R, FMA>(&mut sums, p, &directions, &g);
            *u = directions;
        }
        if p_tail.is_empty() {
            return sums;
        }
        for i in 0..p_tail.len() {
            let g = map.apply(g_tail[i]);
            let state = rule.state(g, [m_tail[i], v_tail[i]]);
            [m_tail[i], v_tail[i]] = state;
            u_tail[i] = rule.direction(p_tail[i], g, state);
        }
        add_tail::<R>(sums, p_tail, u_tail, g_tail, map)
    }
}

/// Updates the state of a row, and returns its directions.
#[inline(always)]
fn direct<R: TwoSweeps>(
    rule: &R,
    p: &[f32; LANES],
    g: &[f32; LANES],
    m: &mut [f32; LANES],
    v: &mut [f32; LANES],
) -> [f32; LANES] {
    let mut u = [0.0; LANES];
    for lane in 0..LANES {
        let state = rule.state(g[lane], [m[lane], v[lane]]);
        [m[lane], v[lane]] = state;
        u[lane] = rule.direction(p[lane], g[lane], state);
    }
    u
}

#[inline(always)]
fn add_row<R: TwoSweeps, const FMA: bool>(
    [pp, second, gg, gp]: &mut [[f64; LANES]; 4],
    p: &[f32; LANES],
    u: &[f32; LANES],
    g: &[f32; LANES],
) {
    add_products::<FMA>(pp, p, p);
    if R::COSINE {
        add_products::<FMA>(second, p, u);
        add_products::<FMA>(gg, g, g);
        add_products::<FMA>(gp, g, p);
    } else {
        add_products::<FMA>(second, u, u);
    }
}

/// Adds the elements after the last whole row. Not inlined, and by value, so that the compiler
/// keeps the rows' sums in vector registers.
#[inline(never)]
fn add_tail<R: TwoSweeps>(
    [mut pp, mut second, mut gg, mut gp]: [[f64; LANES]; 4],
    p: &[f32],
    u: &[f32],
    g: &[f32],
    map: GradMap,
) -> [[f64; LANES]; 4] {
    for lane in 0..p.len() {
        let [p, u, g] = [p[lane], u[lane], map.apply(g[lane])].map(f64::from);
        pp[lane] += p * p;
        if R::COSINE {
            second[lane] += p * u;
            gg[lane] += g * g;
            gp[lane] += g * p;
        } else {
            second[lane] += u * u;
        }
    }
    [pp, second, gg, gp]
}

/// The product of two f32 in f64 has at most 48 bits and so is exact: a fused multiply-add gives
/// the same bits.
#[inline(always)]
fn add_products<const FMA: bool>(sum: &mut [f64; LANES], a: &[f32; LANES], b: &[f32; LANES]) {
    for lane in 0..LANES {
        let (a, b) = (f64::from(a[lane]), f64::from(b[lane]));
        sum[lane] = if FMA { a.mul_add(b, sum[lane]) } else { sum[lane] + a * b };
    }
}

/// Not inlined, for the same reason as [`add_tail`].
#[inline(never)]
fn fold_all(sums: [[f64; LANES]; 4]) -> [f64; 4] {
    sums.map(fold_lanes)
}

/// The second of two sweeps, row by row, with kept directions or by computing them again.
pub(super) struct SecondSweep<'a, R> {
    pub(super) rule: R,
    pub(super) first: FirstSweep<'a>,
    pub(super) block: Block<'a>,
}

impl<R: TwoSweeps> Kernel for SecondSweep<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { rule, first: FirstSweep { factors, directions }, block } = self;
        let Block { map, cols, param, grad, slots: [m, v, _], .. } = block;
        let count = param.len();
        for (row, start) in (0..count).step_by(cols).enumerate() {
            let (end, factor) = (count.min(start + cols), factors[row]);
            let param = &mut param[start..end];
            if let Some(directions) = directions {
                for (p, u) in param.iter_mut().zip(&directions[start..end]) {
                    *p = rule.new_param(factor, *p, *u);
                }
                continue;
            }
            let (grad, m, v) = (&grad[start..end], &m[start..end], &v[start..end]);
            for i in 0..end - start {
                let u = rule.direction(param[i], map.apply(grad[i]), [m[i], v[i]]);
                param[i] = rule.new_param(factor, param[i], u);
            }
        }
    }
}

loops! {
    /// The bits of the largest magnitude after `map`; those of NaNs are larger than infinity's.
    ///
    /// Without its sign a float is finite exactly if its bits, as an integer, are below those of
    /// infinity; the largest decides for all.
    fn largest(input: &'a [f32], map: GradMap) -> u32 {
        let mut largest = 0;
        for x in input {
            largest = largest.max(map.apply(*x).to_bits() & 0x7fff_ffff);
        }
        largest
    }

    /// The sum of squares after `map`. Without a limit the comparisons are left out.
    fn sum_of_squares(input: &'a [f32], map: GradMap) -> f64 {
        fold_lanes(if map.limit == f32::INFINITY {
            squares(input, |x| x * map.scale)
        } else {
            squares(input, |x| map.apply(x))
        })
    }

    /// Scales and clamps gradients in place.
    fn map_in_place(values: &'a mut [f32], map: GradMap) -> () {
        for x in values {
            *x = map.apply(*x);
        }
    }

    /// Updates a moving average of parameters.
    fn move_average(values: &'a mut [f32], param: &'a [f32], decay: f32) -> () {
        let rest = 1.0 - decay;
        for (value, param) in values.iter_mut().zip(param) {
            *value = *value * decay + *param * rest;
        }
    }

    /// f32 to bf16 with stochastic rounding: up with the probability of the distance to the value
    /// below, so that the expected value is exact. The random bits are a function of `key` and the
    /// element's index.
    fn to_bf16_stochastic(input: &'a [f32], output: &'a mut [bf16], key: u32) -> () {
        for (i, (x, y)) in input.iter().zip(output).enumerate() {
            // The 16 dropped bits are a fraction of a unit; adding 16 random bits carries
            // into the unit with that probability. Infinities and NaNs are not rounded.
            let bits = x.to_bits();
            let up = bits.wrapping_add(random(key, i) >> 16);
            let special = (bits >> 16) | if x.is_nan() { 0x40 } else { 0 };
            *y = bf16::from_bits(if x.is_finite() { (up >> 16) as u16 } else { special as u16 });
        }
    }

    /// The same to f16.
    fn to_f16_stochastic(input: &'a [f32], output: &'a mut [f16], key: u32) -> () {
        for (i, (x, y)) in input.iter().zip(output).enumerate() {
            let bits = x.to_bits();
            let sign = (bits >> 16) & 0x8000;
            let magnitude = bits & 0x7fff_ffff;
            let random = random(key, i);
            // Normal halves: 13 bits are dropped, and the exponent's bias changes from 127 to 15.
            // From 65504 on the carry gives the bits of infinity, as it should.
            let normal =
                ((magnitude.wrapping_add(random >> 19) >> 13).wrapping_sub(112 << 10)).min(0x7c00);
            // Below 2^-14, which is 1024 units, the unit of a half is 2^-24. The products are
            // exact.
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

    /// f32 to bf16, rounded to nearest even; a NaN stays NaN, with its sign.
    fn to_bf16(input: &'a [f32], output: &'a mut [bf16]) -> () {
        for (x, y) in input.iter().zip(output) {
            let bits = x.to_bits();
            // Adds just below half a unit, and one more if that makes the result even.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            // Rounding could turn a NaN into infinity; truncate it instead and make it quiet.
            let nan = (bits >> 16) | 0x40;
            *y = bf16::from_bits(if x.is_nan() { nan as u16 } else { rounded as u16 });
        }
    }

    /// bf16 to f32, exactly.
    fn from_bf16(input: &'a [bf16], output: &'a mut [f32]) -> () {
        for (x, y) in input.iter().zip(output) {
            *y = f32::from_bits(u32::from(x.to_bits()) << 16);
        }
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

/// 32 pseudo-random bits for element `i` under `key`: a counter through an integer hash of two
/// multiplications, in which every input bit changes about half of the output bits.
#[inline(always)]
pub(super) fn random(key: u32, i: usize) -> u32 {
    let mut x = key.wrapping_add((i as u32).wrapping_mul(0x9e37_79b9));
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}
