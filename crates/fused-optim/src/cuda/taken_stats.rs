//! Which gradients' statistics were taken before the step that they are for.

use std::ops::Range;

/// By tensor that is bound.
#[derive(Debug)]
pub(super) struct TakenStats {
    /// Its chunks of `look`.
    chunks: Vec<Range<u32>>,
    done: Vec<bool>,
    /// What the host asked for then, as it was sent.
    request: Vec<u8>,
    /// Whether there was any since [`forget`](Self::forget).
    begun: bool,
}

impl TakenStats {
    pub(super) fn new(chunks: Vec<Range<u32>>) -> Self {
        Self { done: vec![false; chunks.len()], chunks, request: Vec::new(), begun: false }
    }

    /// The chunks of some tensors that are about to be looked at. Statistics with other numbers no longer
    /// count.
    pub(super) fn begin(&mut self, tensors: &[usize], request: &[u8]) -> Vec<Range<u32>> {
        self.begun = true;
        if self.request != request {
            self.done.fill(false);
            self.request = request.to_vec();
        }
        let mut chunks: Vec<_> = tensors.iter().map(|at| self.chunks[*at].clone()).collect();
        chunks.sort_unstable_by_key(|range| range.start);
        join(chunks.into_iter())
    }

    /// They have been looked at.
    pub(super) fn end(&mut self, tensors: &[usize]) {
        tensors.iter().for_each(|at| self.done[*at] = true);
    }

    /// The chunks that a step with these numbers has still to look at.
    pub(super) fn left(&self, request: &[u8]) -> Vec<Range<u32>> {
        let none = self.request != request;
        let all = self.chunks.iter().zip(&self.done);
        join(all.filter(|(_, done)| none || !**done).map(|(chunks, _)| chunks.clone()))
    }

    /// The next step's gradients are others. True if some of these were looked at.
    pub(super) fn forget(&mut self) -> bool {
        self.done.fill(false);
        std::mem::take(&mut self.begun)
    }
}

/// Ranges in order, each as one with the next where that begins where it ends.
fn join(all: impl Iterator<Item = Range<u32>>) -> Vec<Range<u32>> {
    let mut joined: Vec<Range<u32>> = Vec::new();
    for next in all.filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end >= next.start => last.end = last.end.max(next.end),
            _ => joined.push(next),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_what_nobody_looked_at_with_these_numbers() {
        let pairs = |all: Vec<Range<u32>>| -> Vec<_> {
            all.iter().map(|range| (range.start, range.end)).collect()
        };
        let look = |taken: &mut TakenStats, tensors: &[usize], request: u8| {
            let chunks = taken.begin(tensors, &[request]);
            taken.end(tensors);
            pairs(chunks)
        };
        let mut taken = TakenStats::new(vec![0..3, 3..3, 3..4, 4..9, 9..10]);
        assert_eq!(pairs(taken.left(&[1])), [(0, 10)]);
        assert_eq!(look(&mut taken, &[3, 1, 2], 1), [(3, 9)]);
        assert_eq!(pairs(taken.left(&[1])), [(0, 3), (9, 10)]);
        assert_eq!(pairs(taken.left(&[2])), [(0, 10)]);
        assert_eq!(look(&mut taken, &[0, 4, 4], 1), [(0, 3), (9, 10)]);
        assert!(taken.left(&[1]).is_empty());
        assert_eq!(look(&mut taken, &[0], 2), [(0, 3)]);
        assert_eq!(pairs(taken.left(&[2])), [(3, 10)]);
        assert_eq!(pairs(taken.begin(&[1, 2], &[2])), [(3, 4)]);
        assert_eq!(pairs(taken.left(&[2])), [(3, 10)]);
        assert!(taken.forget() && !taken.forget());
        assert_eq!(pairs(taken.left(&[2])), [(0, 10)]);
    }
}
