//! Activations as operators: a function of one number and its derivative.

use candle_core::{Result, Shape, Tensor};

use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::graph::operator::{Input, Operator, apply1};

/// A function of one number, with its parameters.
pub(crate) trait Activation: Copy + Send + Sync + 'static {
    const NAME: &'static str;

    /// The function and its derivative.
    fn at<T: Real>(self, x: T) -> (T, T);
}

/// Applies a function to each element.
pub(crate) fn apply<A: Activation>(activation: A, x: Tensor) -> Result<Tensor> {
    apply1(Pointwise(activation), [x])
}

struct Pointwise<A>(A);

impl<A: Activation> Operator<1> for Pointwise<A> {
    const NAME: &'static str = A::NAME;

    fn forward<T: Real>(&self, [x]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let mut y = x.values::<T>()?.into_owned();
        simd::run(Values(&mut y, self.0));
        Ok((y, x.shape().clone()))
    }

    fn backward<T: Real>(
        &self,
        [x]: [Input<'_>; 1],
        _y: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (x, mut dx) = (x.values::<T>()?, dy.values::<T>()?.into_owned());
        simd::run(Gradient { x: &x, dx: &mut dx, activation: self.0 });
        Ok([Some(dx)])
    }
}

/// Applies the function in place.
struct Values<'a, A, T>(&'a mut [T], A);

impl<A: Activation, T: Real> Kernel for Values<'_, A, T> {
    #[inline(always)]
    fn run(self) {
        for v in self.0 {
            *v = self.1.at(*v).0;
        }
    }
}

struct Gradient<'a, A, T> {
    x: &'a [T],
    /// The gradient of the result, replaced by that of `x`.
    dx: &'a mut [T],
    activation: A,
}

impl<A: Activation, T: Real> Kernel for Gradient<'_, A, T> {
    #[inline(always)]
    fn run(self) {
        for (dx, x) in self.dx.iter_mut().zip(self.x) {
            *dx *= self.activation.at(*x).1;
        }
    }
}
