//! Checks that a loss depends on nothing that was computed before its step.

use std::hash::{Hash, Hasher};

use candle_core::{Tensor, TensorId};
use candle_ops::Tape;

use crate::{Error, Result};

/// Returns an error for a loss that depends on tensors that are older than `begin`.
pub(crate) fn check_age(loss: &Tensor, tape: &Tape, begin: &Tensor) -> Result<()> {
    let refused = |text: &str| Err(Error::InvalidArgument(text.to_owned()));
    let Some(begin) = age(begin.id()) else { return Ok(()) };
    let is_older = |id| age(id).is_some_and(|age| age < begin);
    if is_older(loss.id()) {
        return refused(
            "the loss was made before `step`, without its autocast, dropout and averages: run the forward pass within \
             the closure",
        );
    }
    if tape.graph_nodes(loss).into_iter().any(is_older) {
        return refused(
            "the loss depends on a tensor that was computed from variables before `step`, such as the state of an \
             earlier batch: call `detach` on what is carried over",
        );
    }
    Ok(())
}

/// A number that is larger for tensors created later: candle counts them. `None` if it cannot be
/// read. For other ways of training that check what a loss depends on
/// ([`Tape::graph_nodes`]).
#[must_use]
pub fn age(id: TensorId) -> Option<usize> {
    #[derive(Default)]
    struct Count(Option<usize>);
    impl Hasher for Count {
        fn write(&mut self, _: &[u8]) {}
        fn write_usize(&mut self, count: usize) {
            self.0 = Some(count);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    let mut count = Count::default();
    id.hash(&mut count);
    count.0
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn later_tensors_are_younger() {
        let [a, b] = [(); 2].map(|()| Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap());
        assert!(age(a.id()).unwrap() < age(b.id()).unwrap());
    }
}
