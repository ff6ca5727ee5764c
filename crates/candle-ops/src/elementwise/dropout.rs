//! Dropout, with the random numbers of the entered [`Context`](crate::Context).

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, Layout, Result, Shape, Storage, Tensor, bail, op};

use super::of_halves;
use crate::context::{self, Mode};
use crate::cpu::real::Real;
use crate::graph::custom_op::{Differentiable, apply1};
use crate::graph::{device, operator};
use crate::sizes::Words;
use crate::state::random::Random;

/// In training ([`Context::enter`](crate::Context::enter)), each element is zero with probability
/// `p`, else `x / (1 - p)`; in evaluation and outside of a context, the result is `x`. Draws one
/// random word per element; the gradient uses the same mask.
///
/// Any shape; the factor is rounded to the dtype. A dropped NaN or infinity becomes NaN, because
/// zero times it is NaN.
///
/// candle-nn's own `Dropout` uses a generator that cannot be seeded: a run with it does not resume
/// exactly.
///
/// # Errors
///
/// `p` not in `[0, 1)`; an unsupported dtype.
pub fn dropout(x: &Tensor, p: f32) -> Result<Tensor> {
    match Factors::draw(p, x.elem_count())? {
        Some(factors) => factors.multiply(x),
        None => Ok(x.clone()),
    }
}

/// Factors of dropout, 0 or `1 / (1 - p)`: a part of the context's random stream, drawn again for
/// each use.
#[derive(Clone, Debug)]
pub(crate) struct Factors {
    random: Random,
    start: u64,
    keep: f32,
    /// Random words below this number drop an element: the fraction `p` of all 2^32 words.
    end: u64,
}

impl Factors {
    /// Takes the next `count` words of the stream; `None` outside of training.
    ///
    /// # Errors
    ///
    /// `p` not in `[0, 1)`.
    pub(crate) fn draw(p: f32, count: usize) -> Result<Option<Self>> {
        if !(0.0..1.0).contains(&p) {
            bail!("dropout: p is {p}, not at least 0 and less than 1")
        }
        Ok(context::with(|context| {
            if context.mode != Mode::Training || p == 0.0 {
                return None;
            }
            let (random, start) = (context.random.clone(), context.random.position());
            context.random.set_position(start.wrapping_add(count as u64));
            let end = (f64::from(p) * 4_294_967_296.0) as u64;
            Some(Self { random, start, keep: (1.0 - p).recip(), end })
        }))
    }

    /// Writes the factors from index `first` on.
    pub(crate) fn write<T: Real>(&self, first: usize, to: &mut [T]) {
        let mut random = self.random.clone();
        random.set_position(self.start.wrapping_add(first as u64));
        let keep = T::of(self.keep.into());
        for factor in to {
            *factor = if u64::from(random.next()) < self.end { T::ZERO } else { keep };
        }
    }

    /// The words that a kernel draws for the factors.
    pub(crate) fn words(&self) -> Words {
        let base = context::with(|context| {
            context.random_base.as_ref().map(|base| (base.at.clone(), base.position))
        });
        let (base, from) = base.unzip();
        Words {
            key: self.random.key(),
            base,
            position: self.start.wrapping_sub(from.unwrap_or(0)),
            end: u32::try_from(self.end).expect("p is less than 1"),
            keep: self.keep,
        }
    }

    /// Multiplies `x` by the factors.
    pub(crate) fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        if let Some(kernels) = device::kernels(x) {
            let y = kernels.dropout(&x.contiguous()?, self.words())?;
            context::drawn_by_kernel(x.elem_count());
            return Ok(y);
        }
        let mut factors = vec![0_f32; x.elem_count()];
        self.write(0, &mut factors);
        let mask = operator::tensor(factors, x.shape(), x.dtype())?.to_device(x.device())?;
        apply1(Masked(mask), [x])
    }
}

/// candle's product with a constant mask of the same shape and type, as an operator of this crate.
struct Masked(Tensor);

impl Differentiable<1> for Masked {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn forward(&self, [(x, layout)]: [(&CpuStorage, &Layout); 1]) -> Result<(CpuStorage, Shape)> {
        let (mask, mask_layout) = self.0.storage_and_layout();
        let Storage::Cpu(mask) = &*mask else { bail!("dropout: the mask is on a GPU") };
        let y = match of_halves([(x, layout), (mask, mask_layout)], |x, factor| x * factor)? {
            Some(y) => y,
            None => x.binary_impl::<op::Mul>(mask, layout, mask_layout)?,
        };
        Ok((y, layout.shape().clone()))
    }

    fn cuda_forward(
        &self,
        [(x, layout)]: [(&CudaStorage, &Layout); 1],
    ) -> Result<(CudaStorage, Shape)> {
        let (mask, mask_layout) = self.0.storage_and_layout();
        let Storage::Cuda(mask) = &*mask else { bail!("dropout: the mask is on the CPU") };
        Ok((x.binary_impl::<op::Mul>(mask, layout, mask_layout)?, layout.shape().clone()))
    }

    fn backward(&self, _: [&Tensor; 1], _y: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let (storage, layout) = dy.storage_and_layout();
        let Storage::Cpu(values) = &*storage else { return Ok([Some((dy * &self.0)?)]) };
        let (dx, shape) = self.forward([(values, layout)])?;
        Ok([Some(Tensor::from_storage(Storage::Cpu(dx), shape, BackpropOp::none(), false))])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;
    use crate::Context;

    fn ones(dtype: DType) -> Var {
        Var::from_tensor(&Tensor::ones((100, 100), dtype, &Device::Cpu).unwrap()).unwrap()
    }

    fn values(x: &Tensor) -> Vec<f32> {
        x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn training_drops_and_scales_and_evaluation_does_nothing() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (x, mut context) = (ones(dtype), Context::new(7));
            let y = context.enter(|| dropout(&x, 0.25)).unwrap();
            let kept = values(&y);
            let zeros = kept.iter().filter(|v| **v == 0.0).count();
            // The binomial distribution has mean 2500 and deviation 43.
            assert!((2250..2750).contains(&zeros), "{zeros}");
            let scale = Tensor::new(4.0_f32 / 3.0, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let scale = values(&scale)[0];
            assert!(kept.iter().all(|v| *v == 0.0 || *v == scale));
            // The gradient has the same mask.
            let gradients = y.sum_all().unwrap().backward().unwrap();
            assert_eq!(values(gradients.get(&x).unwrap()), kept);
            assert_eq!(values(&dropout(&x, 0.25).unwrap()), vec![1.0; 10_000]);
            assert_eq!(values(&context.evaluate(|| dropout(&x, 0.25)).unwrap()), vec![1.0; 10_000]);
            assert_eq!(context.random_position(), 10_000);
        }
        for p in [-0.1, 1.0, f32::NAN] {
            assert!(dropout(&ones(DType::F32), p).is_err(), "{p}");
        }
    }

    #[test]
    fn seed_and_position_are_all_of_the_random_state() {
        let x = ones(DType::F32);
        let mut whole = Context::new(3);
        let draw = |context: &mut Context| values(&context.enter(|| dropout(&x, 0.5)).unwrap());
        let first = draw(&mut whole);
        let (position, second) = (whole.random_position(), draw(&mut whole));
        assert_ne!(first, second);
        let mut resumed = Context::new(9);
        resumed.set_seed(3);
        resumed.set_random_position(position);
        assert_eq!(draw(&mut resumed), second);
    }
}
