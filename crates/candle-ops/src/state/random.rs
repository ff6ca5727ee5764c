//! The random numbers of training.
//!
//! They come from ChaCha8: seed and word position are all of their state, so a run that resumes from a checkpoint draws
//! what it would have drawn.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A stream of random words.
#[derive(Clone, Debug)]
pub(crate) struct Random(ChaCha8Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Number of words drawn.
    pub(crate) fn position(&self) -> u64 {
        u64::try_from(self.0.get_word_pos()).unwrap_or(u64::MAX)
    }

    /// Draws a word.
    pub(crate) fn next(&mut self) -> u32 {
        self.0.next_u32()
    }

    pub(crate) fn set_position(&mut self, position: u64) {
        self.0.set_word_pos(position.into());
    }
}

impl Default for Random {
    fn default() -> Self {
        Self::new(0)
    }
}
