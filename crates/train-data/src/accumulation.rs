//! Gradient accumulation: which batches only add up, which one steps, what each is divided by.

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

/// What one batch does to the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchRole {
    /// Divide the loss by this.
    pub divisor: f64,
    /// The optimizer steps after this batch; gradients are exchanged in its backward.
    pub steps: bool,
}

impl Accumulation {
    /// A step every `counts` batches; 0 counts as 1.
    #[must_use]
    pub fn new(counts: usize) -> Self {
        Self { counts: counts.max(1), seen: 0, max: None, excess: 0.0 }
    }

    /// Batches of a step.
    #[must_use]
    pub const fn counts(&self) -> usize {
        self.counts
    }

    /// Has a step every `counts` batches from now on; 0 counts as 1.
    pub fn set_counts(&mut self, counts: usize) {
        self.counts = counts.max(1);
    }

    /// Batches that wait for a step, and all batches of that step. The first step is the one with the excess.
    #[must_use]
    pub fn pending(self) -> (usize, usize) {
        let pending = if Some(self.seen) == self.max { 0 } else { self.seen % self.counts };
        (pending, self.step_len())
    }

    /// Whether the next batch is part of the first step.
    #[must_use]
    pub fn is_first_step(self) -> bool {
        self.seen < self.counts && Some(self.seen) != self.max
    }

    /// Tells how many batches have been seen and how many the run will see.
    pub fn initialize_count_status(&mut self, seen: usize, max: usize) {
        (self.seen, self.max) = (seen, Some(max));
    }

    /// Tells that the first step is of more gradients (or of less) than its batches, in batches.
    pub fn set_excess(&mut self, excess: f64) {
        self.excess = excess;
    }

    /// Number of batches of the next batch's step.
    fn step_len(self) -> usize {
        let remainder = self.max.map_or(0, |max| max % self.counts);
        let in_remainder = self.max.is_some_and(|max| self.seen >= max - remainder);
        if in_remainder && remainder > 0 { remainder } else { self.counts }
    }

    /// The role of the next batch.
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
