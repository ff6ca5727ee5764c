//! The state shared by operators: random numbers, autocast, autotuning, constants, CUDA kernels.
//!
//! A [`Context`] is entered for a pass ([`Context::enter`]): until the call returns, the operators
//! on this thread read and update it. Code that runs within a pass uses the entered context through
//! the functions of this module. Outside of a context, operators use defaults: dropout has no
//! effect, inputs are not cast, each algorithm is the default one, and on a GPU operators are
//! compositions of candle's own.
//!
//! Invariant: an entered context belongs to its thread, and is returned to its owner when the call
//! ends, also by a panic.

use std::cell::RefCell;
use std::mem;
use std::sync::Arc;

use amp::Autocast;
#[cfg(feature = "cuda")]
use amp::Cast;
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::Tensor;

use super::autotune::{Autotune, AutotuneSummary};
use super::constants::Constants;
use super::random::Random;
use crate::error::Result;
use crate::kernels::DeviceKernels;
use crate::known_inputs::KnownInputs;

thread_local! {
    static CURRENT: RefCell<Context> = RefCell::default();
}

/// The state shared by operators during a pass.
///
/// # Examples
///
/// ```
/// use amp::Autocast;
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_ops::Context;
///
/// let weight = Var::zeros((10, 64), DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
/// let labels = Tensor::new(&[3_i64, 5], &Device::Cpu)?;
///
/// let mut context = Context::new(7).with_autocast(Autocast::cpu());
/// let gradients = context.enter(|| {
///     let logits = candle_ops::linear(&candle_ops::dropout(&x, 0.5)?, &weight, None)?;
///     assert_eq!(logits.dtype(), DType::BF16);
///     candle_ops::cross_entropy(&logits, &labels)?.backward()
/// })?;
/// assert_eq!(gradients.get(&weight).unwrap().dtype(), DType::F32);
/// assert_eq!(context.random_position(), 2 * 64);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Context {
    pub(crate) mode: Mode,
    pub(crate) random: Random,
    pub(crate) random_base: Option<RandomBase>,
    pub(crate) autocast: Option<Region>,
    pub(crate) autotune: Option<Autotune>,
    pub(crate) constants: Constants,
    pub(crate) kernels: Option<Arc<dyn DeviceKernels>>,
    pub(crate) known_inputs: Option<KnownInputs>,
}

/// The kind of pass for which a context is entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No context is entered.
    #[default]
    Outside,
    Training,
    Evaluation,
}

/// The current autocast policy.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) policy: Autocast,
    /// Number of operators that ran in the lower precision.
    pub(crate) lowered: usize,
}

impl Region {
    pub(crate) const fn new(policy: Autocast) -> Self {
        Self { policy, lowered: 0 }
    }
}

/// A position of random numbers in memory of the device, see [`with_random_base`].
#[derive(Clone, Debug)]
pub(crate) struct RandomBase {
    /// One number of `i64`.
    pub(crate) at: Tensor,
    /// The same number.
    pub(crate) position: u64,
    /// Number of words drawn by kernels since.
    pub(crate) drawn: u64,
}

impl Context {
    /// A context with random numbers seeded by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { random: Random::new(seed), ..Self::default() }
    }

    /// Casts the inputs of operators by `policy`, see [`autocast`](crate::autocast()).
    #[must_use]
    pub fn with_autocast(mut self, policy: Autocast) -> Self {
        self.set_autocast(Some(policy));
        self
    }

    /// Sets the policy for casts from now on, or disables them.
    pub fn set_autocast(&mut self, policy: Option<Autocast>) {
        self.autocast = policy.map(Region::new);
    }

    /// Times the algorithms of each convolution shape in training, each `rounds` times, and uses
    /// the fastest, or the default if none is faster by more than the noise.
    #[must_use]
    pub fn with_autotune(mut self, rounds: usize) -> Self {
        self.set_autotune(Some(rounds));
        self
    }

    /// Enables [autotuning](Self::with_autotune) from now on, with an empty cache; `None` disables
    /// it.
    pub fn set_autotune(&mut self, rounds: Option<usize>) {
        self.autotune = rounds.map(Autotune::new);
    }

    /// The algorithms found so far, as JSON; empty if there are none.
    pub fn autotune_cache(&self) -> String {
        self.autotune.as_ref().map_or_else(String::new, Autotune::to_json)
    }

    /// Adds the entries of another context's [`autotune_cache`](Self::autotune_cache). Without
    /// autotuning this does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::AutotuneCache`](crate::Error::AutotuneCache) and
    /// [`Error::UnknownAlgorithm`](crate::Error::UnknownAlgorithm), before anything is added.
    pub fn load_autotune_cache(&mut self, cache: &str) -> Result<()> {
        self.autotune.as_mut().map_or(Ok(()), |autotune| autotune.load_json(cache))
    }

    /// Summary of the algorithms found so far; `None` without autotuning.
    pub fn autotune_summary(&self) -> Option<AutotuneSummary> {
        self.autotune.as_ref().map(Autotune::summary)
    }

    /// Restarts the random numbers with `seed`.
    pub fn set_seed(&mut self, seed: u64) {
        self.random = Random::new(seed);
    }

    /// Number of random words drawn so far. Together with the seed this is the whole random state.
    pub fn random_position(&self) -> u64 {
        self.random.position()
    }

    /// Moves to a position returned by [`random_position`](Self::random_position).
    pub fn set_random_position(&mut self, position: u64) {
        self.random.set_position(position);
    }

    /// Runs `call`, a training pass (forward, backward or both), with this context on this thread,
    /// instead of the current one.
    pub fn enter<R>(&mut self, call: impl FnOnce() -> R) -> R {
        self.enter_as(Mode::Training, call)
    }

    /// Like [`enter`](Self::enter), for a forward pass of evaluation: without dropout, and without
    /// autotuning.
    pub fn evaluate<R>(&mut self, call: impl FnOnce() -> R) -> R {
        self.enter_as(Mode::Evaluation, call)
    }

    fn enter_as<R>(&mut self, mode: Mode, call: impl FnOnce() -> R) -> R {
        /// Restores both contexts when dropped.
        struct Entered<'a> {
            context: &'a mut Context,
            outer: Context,
        }
        impl Drop for Entered<'_> {
            fn drop(&mut self) {
                *self.context = CURRENT.replace(mem::take(&mut self.outer));
                self.context.mode = Mode::Outside;
            }
        }
        let outer = CURRENT.replace(Self { mode, ..mem::take(self) });
        let _entered = Entered { context: self, outer };
        call()
    }
}

/// Reads or changes the entered context, or a default outside of one.
pub(crate) fn with<R>(call: impl FnOnce(&mut Context) -> R) -> R {
    CURRENT.with_borrow_mut(call)
}

/// Runs `call` with another value for a field of the entered context. Also returns the final state
/// of that value.
pub(crate) fn replacing<T: Default, R>(
    field: fn(&mut Context) -> &mut T,
    value: T,
    call: impl FnOnce() -> R,
) -> (R, T) {
    /// Restores the outer value when dropped.
    struct Replaced<T: Default> {
        field: fn(&mut Context) -> &mut T,
        outer: T,
    }
    impl<T: Default> Replaced<T> {
        fn swap(&mut self) {
            with(|context| mem::swap((self.field)(context), &mut self.outer));
        }
    }
    impl<T: Default> Drop for Replaced<T> {
        fn drop(&mut self) {
            self.swap();
        }
    }
    let mut replaced = Replaced { field, outer: value };
    replaced.swap();
    let result = call();
    let value = with(|context| mem::take(field(context)));
    (result, value)
}

/// The half-precision type to which products cast `f32` under the entered policy.
#[cfg(feature = "cuda")]
pub(crate) fn half_of_products() -> Option<DType> {
    let cast = with(|context| {
        let region = context.autocast.as_ref()?;
        region.policy.cast("linear", &[amp::DType::F32]).ok()
    });
    match cast {
        Some(Cast::Inputs(amp::DType::F16)) => Some(DType::F16),
        Some(Cast::Inputs(amp::DType::Bf16)) => Some(DType::BF16),
        _ => None,
    }
}

/// Number of random words drawn so far by the entered context, see [`Context::random_position`].
pub fn random_position() -> u64 {
    with(|context| context.random_position())
}

/// Moves the random numbers of the entered context, see [`Context::set_random_position`]: for a
/// pass that is repeated.
pub fn set_random_position(position: u64) {
    with(|context| context.set_random_position(position));
}

/// The key of the entered context's random numbers: the seed's.
pub fn random_key() -> [u64; 4] {
    with(|context| context.random.key())
}

/// Runs `call`, in which kernels read the present position of random numbers from the tensor `at`,
/// a number of `i64` on the device: a CUDA graph of the call draws from the position that `at` has
/// when it is launched. Also returns the number of words that kernels have drawn; others were drawn
/// on the host.
pub fn with_random_base<R>(at: &Tensor, call: impl FnOnce() -> R) -> (R, u64) {
    let base = RandomBase { at: at.clone(), position: random_position(), drawn: 0 };
    let (result, base) = replacing(|context| &mut context.random_base, Some(base), call);
    (result, base.map_or(0, |base| base.drawn))
}

/// Counts words that a kernel has drawn.
pub(crate) fn drawn_by_kernel(count: usize) {
    with(|context| {
        if let Some(base) = &mut context.random_base {
            base.drawn = base.drawn.wrapping_add(count as u64);
        }
    });
}

/// Runs `call` without autotuning, which is restored afterwards.
pub fn without_autotune<R>(call: impl FnOnce() -> R) -> R {
    replacing(|context| &mut context.autotune, None, call).0
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;

    #[test]
    fn a_context_returns_to_its_owner_after_a_panic() {
        let mut context = Context::new(1).with_autotune(3);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            context.enter(|| panic!("in an operator"));
        }));
        assert!(panicked.is_err() && context.autotune.is_some());
        assert_eq!(
            with(|outside| (outside.mode, outside.autotune.is_none())),
            (Mode::Outside, true)
        );
    }

    #[test]
    fn contexts_nest_and_belong_to_their_thread() {
        let x = Tensor::ones(100, DType::F32, &Device::Cpu).unwrap();
        let draw = || crate::dropout(&x, 0.5).unwrap();
        let (mut outer, mut inner) = (Context::new(1), Context::new(2));
        outer.enter(|| {
            draw();
            inner.enter(|| [draw(), draw()]);
            inner.evaluate(draw);
            std::thread::scope(|scope| scope.spawn(draw).join().unwrap());
        });
        assert_eq!((outer.random_position(), inner.random_position()), (100, 200));
    }

    #[test]
    fn a_pass_is_run_again_with_the_same_random_numbers() {
        let x = Tensor::ones(100, DType::F32, &Device::Cpu).unwrap();
        let draw = || crate::dropout(&x, 0.5).unwrap().to_vec1::<f32>().unwrap();
        Context::new(1).enter(|| {
            let (start, first) = (random_position(), draw());
            assert_ne!(draw(), first);
            set_random_position(start);
            assert_eq!(draw(), first);
        });
    }
}
