//! Records which gradients' statistics have been taken for the next step.

use std::ops::Range;

/// By bound tensor.
#[derive(Debug)]
pub(super) struct TakenStats {
    /// Its chunks of gradients.
    chunks: Vec<Range<u32>>,
    /// Whether its statistics have been taken.
    done: Vec<bool>,
    /// The uploaded `Request` that they were taken with.
    request: Vec<u8>,
    /// Whether any have been taken since [`forget`](Self::forget).
    begun: bool,
}

impl TakenStats {
    pub(super) fn new(chunks: Vec<Range<u32>>) -> Self {
        Self { done: vec![false; chunks.len()], chunks, request: Vec::new(), begun: false }
    }

    /// Returns the chunks of some tensors, whose statistics the caller then takes. Discards
    /// statistics taken with another request.
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

    /// Marks the statistics of these tensors as taken.
    pub(super) fn end(&mut self, tensors: &[usize]) {
        tensors.iter().for_each(|at| self.done[*at] = true);
    }

    /// The chunks whose statistics a step with this request still has to take.
    pub(super) fn remaining(&self, request: &[u8]) -> Vec<Range<u32>> {
        let none = self.request != request;
        let all = self.chunks.iter().zip(&self.done);
        join(all.filter(|(_, done)| none || !**done).map(|(chunks, _)| chunks.clone()))
    }

    /// Discards all statistics. Returns whether there were any.
    pub(super) fn forget(&mut self) -> bool {
        self.done.fill(false);
        std::mem::take(&mut self.begun)
    }
}

/// Joins adjacent ranges.
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
    fn remaining_chunks_are_those_without_statistics_for_this_request() {
        let pairs = |all: Vec<Range<u32>>| -> Vec<_> {
            all.iter().map(|range| (range.start, range.end)).collect()
        };
        let take = |taken: &mut TakenStats, tensors: &[usize], request: u8| {
            let chunks = taken.begin(tensors, &[request]);
            taken.end(tensors);
            pairs(chunks)
        };
        let mut taken = TakenStats::new(vec![0..3, 3..3, 3..4, 4..9, 9..10]);
        assert_eq!(pairs(taken.remaining(&[1])), [(0, 10)]);
        assert_eq!(take(&mut taken, &[3, 1, 2], 1), [(3, 9)]);
        assert_eq!(pairs(taken.remaining(&[1])), [(0, 3), (9, 10)]);
        assert_eq!(pairs(taken.remaining(&[2])), [(0, 10)]);
        assert_eq!(take(&mut taken, &[0, 4, 4], 1), [(0, 3), (9, 10)]);
        assert!(taken.remaining(&[1]).is_empty());
        assert_eq!(take(&mut taken, &[0], 2), [(0, 3)]);
        assert_eq!(pairs(taken.remaining(&[2])), [(3, 10)]);
        assert_eq!(pairs(taken.begin(&[1, 2], &[2])), [(3, 4)]);
        assert_eq!(pairs(taken.remaining(&[2])), [(3, 10)]);
        assert!(taken.forget() && !taken.forget());
        assert_eq!(pairs(taken.remaining(&[2])), [(0, 10)]);
    }
}
