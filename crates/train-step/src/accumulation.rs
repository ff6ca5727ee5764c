//! Gradient accumulation: the role of each batch, accumulated or stepping, and the divisor of its
//! loss.

/// Counts batches towards the next optimizer step, by MMEngine's rule.
///
/// Every `counts`-th batch steps, and so does the last of the run; a remainder shorter than
/// `counts` is divided by its own length, so that no step is weaker than another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accumulation {
    counts: usize,
    seen: usize,
    max: Option<usize>,
    excess: f64,
}

/// Role of one batch in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchRole {
    /// Divisor of the loss.
    pub divisor: f64,
    /// Whether the optimizer steps after this batch; gradients are exchanged in its backward pass.
    pub steps: bool,
}

impl Accumulation {
    /// Steps every `counts` batches; 0 counts as 1.
    #[must_use]
    pub fn new(counts: usize) -> Self {
        Self { counts: counts.max(1), seen: 0, max: None, excess: 0.0 }
    }

    /// Number of batches per step.
    #[must_use]
    pub const fn counts(&self) -> usize {
        self.counts
    }

    /// Sets the number of batches per step from now on; 0 counts as 1.
    pub fn set_counts(&mut self, counts: usize) {
        self.counts = counts.max(1);
    }

    /// Number of accumulated batches, and number of batches of their step. The first step is the
    /// one with the excess.
    #[must_use]
    pub fn pending(self) -> (usize, usize) {
        let pending = if Some(self.seen) == self.max { 0 } else { self.seen % self.counts };
        (pending, self.step_len())
    }

    /// Returns whether the next batch is part of the first step.
    #[must_use]
    pub fn is_first_step(self) -> bool {
        self.seen < self.counts && Some(self.seen) != self.max
    }

    /// Sets the number of batches seen so far and the number of batches of the run.
    pub fn initialize_count_status(&mut self, seen: usize, max: usize) {
        (self.seen, self.max) = (seen, Some(max));
    }

    /// Sets the number of batches by which the gradients of the first step exceed its own batches;
    /// negative if there are fewer.
    pub fn set_excess(&mut self, excess: f64) {
        self.excess = excess;
    }

    /// Number of batches in the next batch's step.
    fn step_len(self) -> usize {
        let remainder = self.max.map_or(0, |max| max % self.counts);
        let in_remainder = self.max.is_some_and(|max| self.seen >= max - remainder);
        if in_remainder && remainder > 0 { remainder } else { self.counts }
    }

    /// Returns the role of the next batch.
    pub fn next_batch(&mut self) -> BatchRole {
        let excess = if self.is_first_step() { self.excess } else { 0.0 };
        let divisor = self.step_len() as f64 + excess;
        self.seen += 1;
        BatchRole {
            divisor,
            steps: self.seen.is_multiple_of(self.counts) || Some(self.seen) == self.max,
        }
    }
}
