//! The compute types of operators: `f32` for tensors of `f32` and half precision, `f64` for tensors
//! of `f64`.
//!
//! An operator is written once, for any [`Real`]. Training runs in `f32`. In `f64` the same
//! formulas are compared with finite differences, whose error is then far smaller than a wrong
//! term.

use std::borrow::Cow;
use std::fmt::Debug;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Range, Sub, SubAssign};

use amp::CastTo;
use candle_core::backend::BackendStorage;
use candle_core::cpu::erf::erfc_f64;
use candle_core::{CpuStorage, DType, Result, WithDType, bail};

/// `f32` or `f64`: arithmetic, and conversion from and to tensor storage.
pub(crate) trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    /// The nearest value.
    fn of(value: f64) -> Self;

    fn to_f64(self) -> f64;

    fn is_nan(self) -> bool;

    fn sqrt(self) -> Self;

    fn ln(self) -> Self;

    /// `e^self`, vectorized where possible.
    fn quick_exp(self) -> Self;

    /// The hyperbolic tangent, vectorized where possible.
    fn quick_tanh(self) -> Self;

    /// GELU: `self` times the standard normal distribution function of it, and the derivative of
    /// that.
    fn gelu(self) -> (Self, Self);

    /// Elements of a tensor, widened if their type is narrower.
    fn read(storage: &CpuStorage, range: Range<usize>) -> Result<Cow<'_, [Self]>>;

    /// Elements for a tensor, rounded once to nearest even if its type is narrower.
    fn store(values: Cow<'_, [Self]>, dtype: DType) -> Result<CpuStorage>;

    fn of_f32s(values: Vec<f32>) -> Vec<Self>;

    /// `1 / self`.
    #[inline(always)]
    fn recip(self) -> Self {
        Self::ONE / self
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = Self::NEG_INFINITY;

    #[inline(always)]
    fn of(value: f64) -> Self {
        value as Self
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self.into()
    }

    #[inline(always)]
    fn is_nan(self) -> bool {
        self.is_nan()
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    fn ln(self) -> Self {
        self.ln()
    }

    /// Has an error of at most 2 ulp for results that are normal numbers, and returns 0 below; NaN
    /// is propagated, overflow is infinite. Uses plain arithmetic, so that loops of it are
    /// vectorized, unlike calls of the system's function.
    ///
    /// `e^x = 2^n e^r` with `|r| <= ln 2 / 2`, and the Taylor series of `e^r` with seven terms.
    #[inline(always)]
    fn quick_exp(self) -> Self {
        // Adding and subtracting 1.5 * 2^23 rounds to an integer.
        const ROUND: f32 = 12_582_912.0;
        // ln 2 as the sum of a number with few bits, whose products are exact, and the rest.
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        let clamped = self.clamp(-87.3, 89.0);
        let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
        let n = rounded - ROUND;
        let r = clamped - n * LN2_HIGH - n * LN2_LOW;
        let mut e = 1.0 / 5040.0;
        for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            e = e * r + factor;
        }
        // `n` as an integer, from the significand: a conversion, which saturates, takes several
        // instructions. For NaN it is any number, since the product is NaN anyway.
        let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
        // Two factors, since 2^128 is not an f32.
        let half = n >> 1;
        let power = |n: i32| Self::from_bits((n.wrapping_add(127) << 23).cast_unsigned());
        let e = e * power(half) * power(n.wrapping_sub(half));
        if self < -87.3 { 0.0 } else { e }
    }

    /// Has an error of at most 3 ulp. Up to 0.625 in magnitude it is Cephes' polynomial (`tanhf`),
    /// beyond `1 - 2 / (e^2x + 1)`.
    #[inline(always)]
    fn quick_tanh(self) -> Self {
        let size = self.abs();
        let square = self * self;
        let mut series = -5.704_988_7e-3;
        for factor in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -0.333_332_8] {
            series = series * square + factor;
        }
        let small = self + self * square * series;
        // NaN takes the polynomial, which propagates it.
        let bounded = if size > 10.0 { 10.0 } else { size };
        let large = 1.0 - 2.0 / ((2.0 * bounded).quick_exp() + 1.0);
        if size > 0.625 { large.copysign(self) } else { small }
    }

    /// Abramowitz and Stegun's 7.1.26: `1 - erf(u)` is a polynomial in `1 / (1 + 0.3275911 u)`
    /// times `exp(-u^2)`, within 1.5e-7; the density needs the same exponential.
    #[inline(always)]
    fn gelu(self) -> (Self, Self) {
        // Clamped, since infinity times zero is NaN; the results do not change beyond.
        let bounded = self.clamp(-13.0, 13.0);
        let u = bounded.abs() * std::f32::consts::FRAC_1_SQRT_2;
        let gauss = (-u * u).quick_exp();
        let t = (1.0 + 0.327_591_1 * u).recip();
        let mut tail = 1.061_405_4;
        for factor in [-1.453_152_1, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
            tail = tail * t + factor;
        }
        let tail = 0.5 * tail * t * gauss;
        let (x, probability) = if self < 0.0 { (bounded, tail) } else { (self, 1.0 - tail) };
        // 1 / sqrt(2 pi).
        let density = 0.398_942_3 * gauss;
        (x * probability, probability + bounded * density)
    }

    fn of_f32s(values: Vec<f32>) -> Vec<Self> {
        values
    }

    fn read(storage: &CpuStorage, range: Range<usize>) -> Result<Cow<'_, [Self]>> {
        Ok(match storage {
            CpuStorage::F32(v) => Cow::Borrowed(&v[range]),
            CpuStorage::F16(v) => Cow::Owned(cast(&v[range])),
            CpuStorage::BF16(v) => Cow::Owned(cast(&v[range])),
            other => bail!("expected f32, f16 or bf16, got {:?}", other.dtype()),
        })
    }

    fn store(values: Cow<'_, [Self]>, dtype: DType) -> Result<CpuStorage> {
        Ok(match dtype {
            DType::F64 => CpuStorage::F64(values.iter().copied().map(f64::from).collect()),
            DType::F32 => CpuStorage::F32(values.into_owned()),
            DType::F16 => CpuStorage::F16(cast(&values)),
            DType::BF16 => CpuStorage::BF16(cast(&values)),
            other => bail!("expected f64, f32, f16 or bf16, got {other:?}"),
        })
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = Self::NEG_INFINITY;

    fn of(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }

    fn sqrt(self) -> Self {
        self.sqrt()
    }

    fn ln(self) -> Self {
        self.ln()
    }

    fn quick_exp(self) -> Self {
        self.exp()
    }

    fn quick_tanh(self) -> Self {
        self.tanh()
    }

    fn gelu(self) -> (Self, Self) {
        let probability = 0.5 * erfc_f64(-self * std::f64::consts::FRAC_1_SQRT_2);
        // Clamped as above.
        let bounded = self.clamp(-40.0, 40.0);
        let density = (-0.5 * bounded * bounded).exp() / std::f64::consts::TAU.sqrt();
        let x = if self < 0.0 { bounded } else { self };
        (x * probability, probability + bounded * density)
    }

    fn of_f32s(values: Vec<f32>) -> Vec<Self> {
        values.into_iter().map(Self::from).collect()
    }

    fn read(storage: &CpuStorage, range: Range<usize>) -> Result<Cow<'_, [Self]>> {
        match storage {
            CpuStorage::F64(v) => Ok(Cow::Borrowed(&v[range])),
            narrower => {
                let values = f32::read(narrower, range)?;
                Ok(Cow::Owned(values.iter().map(|v| Self::from(*v)).collect()))
            }
        }
    }

    fn store(values: Cow<'_, [Self]>, dtype: DType) -> Result<CpuStorage> {
        match dtype {
            DType::F64 => Ok(CpuStorage::F64(values.into_owned())),
            // The gradient of a narrower input with one of f64.
            DType::F32 => Ok(CpuStorage::F32(narrowed(&values))),
            DType::F16 => Ok(CpuStorage::F16(narrowed(&values))),
            DType::BF16 => Ok(CpuStorage::BF16(narrowed(&values))),
            other => bail!("expected f64, f32, f16 or bf16, got {other:?}"),
        }
    }
}

fn narrowed<D: WithDType>(values: &[f64]) -> Vec<D> {
    values.iter().copied().map(D::from_f64).collect()
}

fn cast<S: CastTo<D>, D: Copy + Default>(values: &[S]) -> Vec<D> {
    let mut out = vec![D::default(); values.len()];
    amp::cast(values, &mut out).expect("the output has the input's length");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_tanh_is_exact_to_three_ulp() {
        for i in -120_000..=120_000 {
            let x = i as f32 * 1e-4;
            let (got, exact) = (f64::from(x.quick_tanh()), f64::from(x).tanh());
            let ulp = f64::from(exact as f32).abs() * f64::from(f32::EPSILON);
            assert!((got - exact).abs() <= 3.0 * ulp, "{x}: {got}, not {exact}");
        }
        assert_eq!([1e30_f32, f32::INFINITY, -1e30].map(Real::quick_tanh), [1.0, 1.0, -1.0]);
        assert!(Real::quick_tanh(f32::NAN).is_nan());
    }

    #[test]
    fn quick_exp_is_exact_to_two_ulp() {
        let exp = Real::quick_exp;
        for i in -873_000..=887_000 {
            let x = i as f32 * 1e-4;
            let (got, exact) = (f64::from(exp(x)), f64::from(x).exp());
            let ulp = f64::from(exact as f32).abs() * f64::from(f32::EPSILON);
            assert!((got - exact).abs() <= 2.0 * ulp, "{x}: {got} is not {exact}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-90.0_f32), 0.0);
        let ends = (exp(0.0_f32), exp(89.0_f32), exp(f32::INFINITY));
        assert_eq!(ends, (1.0, f32::INFINITY, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }
}
