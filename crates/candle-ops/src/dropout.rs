//! Dropout, and the random numbers of a training step.
//!
//! An engine opens its numbers on this thread for the length of a training step ([`open`]); without
//! them, as in an evaluation, nothing is dropped. They come from ChaCha8, so seed and word position
//! are all there is to know of them, and a run that goes on from a checkpoint draws what it would have.

use std::cell::RefCell;

use candle_core::{Result, Tensor, bail};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::operator;

thread_local! {
    static OPEN: RefCell<Option<ChaCha8Rng>> = const { RefCell::new(None) };
}

/// An engine's random numbers.
#[derive(Clone, Debug)]
pub struct Random(Option<ChaCha8Rng>);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(Some(ChaCha8Rng::seed_from_u64(seed)))
    }

    /// How many words have been drawn.
    pub fn position(&self) -> u64 {
        let position = self.0.as_ref().map_or(0, ChaCha8Rng::get_word_pos);
        u64::try_from(position).unwrap_or(u64::MAX)
    }

    pub fn set_position(&mut self, position: u64) {
        if let Some(rng) = &mut self.0 {
            rng.set_word_pos(position.into());
        }
    }
}

/// What is open on this thread.
#[cfg(feature = "cuda")]
pub fn now() -> Random {
    Random(OPEN.with_borrow(Clone::clone))
}

/// Goes on from there.
#[cfg(feature = "cuda")]
pub fn go_back(random: Random) {
    OPEN.set(random.0);
}

/// Runs `call`, a training step, with `random` open on this thread.
pub fn open<R>(random: &mut Random, call: impl FnOnce() -> R) -> R {
    /// Brings the numbers back however the call ends.
    struct Open<'a>(&'a mut Random);
    impl Drop for Open<'_> {
        fn drop(&mut self) {
            self.0.0 = OPEN.take();
        }
    }
    OPEN.set(random.0.take());
    let _open = Open(random);
    call()
}

/// In a training step, zero with probability `p`, else `x / (1 - p)`; in an evaluation, `x`. Element by
/// element, one word drawn for each; the mask is also the gradient's.
///
/// Any shape; the factor is rounded to the dtype. NaN and infinity that are dropped
/// become NaN, since zero times them is.
///
/// candle-nn's own `Dropout` draws from numbers that nobody can put back: a run with it does not resume
/// exactly.
///
/// # Errors
///
/// `p` not in `[0, 1)`; another dtype.
pub fn dropout(x: &Tensor, p: f32) -> Result<Tensor> {
    if !(0.0..1.0).contains(&p) {
        bail!("dropout: p is {p}, not at least 0 and less than 1")
    }
    let mask = OPEN.with_borrow_mut(|open| {
        let keep = (1.0 - p).recip();
        // Below this of 2^32 it is dropped.
        let limit = (f64::from(p) * 4_294_967_296.0) as u64;
        let draw = |rng: &mut ChaCha8Rng| {
            if u64::from(rng.next_u32()) < limit { 0.0 } else { keep }
        };
        let rng = open.as_mut().filter(|_| p > 0.0)?;
        Some((0..x.elem_count()).map(|_| draw(rng)).collect::<Vec<f32>>())
    });
    match mask {
        Some(mask) => x * operator::tensor(mask, x.shape(), x.dtype())?.to_device(x.device())?,
        None => Ok(x.clone()),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    fn ones(dtype: DType) -> Var {
        Var::from_tensor(&Tensor::ones((100, 100), dtype, &Device::Cpu).unwrap()).unwrap()
    }

    fn values(x: &Tensor) -> Vec<f32> {
        x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn a_step_drops_and_scales_and_an_evaluation_does_nothing() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (x, mut random) = (ones(dtype), Random::new(7));
            let y = open(&mut random, || dropout(&x, 0.25)).unwrap();
            let kept = values(&y);
            let zeros = kept.iter().filter(|v| **v == 0.0).count();
            // Binomial: 2500, with a deviation of 43.
            assert!((2250..2750).contains(&zeros), "{zeros}");
            let scale = Tensor::new(4.0_f32 / 3.0, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let scale = values(&scale)[0];
            assert!(kept.iter().all(|v| *v == 0.0 || *v == scale));
            // The gradient is of the same elements.
            let gradients = y.sum_all().unwrap().backward().unwrap();
            assert_eq!(values(gradients.get(&x).unwrap()), kept);
            assert_eq!(values(&dropout(&x, 0.25).unwrap()), vec![1.0; 10_000]);
            assert_eq!(random.position(), 10_000);
        }
        for p in [-0.1, 1.0, f32::NAN] {
            assert!(dropout(&ones(DType::F32), p).is_err(), "{p}");
        }
    }

    #[test]
    fn seed_and_position_are_all_there_is() {
        let x = ones(DType::F32);
        let mut whole = Random::new(3);
        let draw = |random: &mut Random| values(&open(random, || dropout(&x, 0.5)).unwrap());
        let first = draw(&mut whole);
        let (position, second) = (whole.position(), draw(&mut whole));
        assert_ne!(first, second);
        let mut resumed = Random::new(3);
        resumed.set_position(position);
        assert_eq!(draw(&mut resumed), second);
    }
}
