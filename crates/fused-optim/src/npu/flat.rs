//! Layout of tensors in flat buffers, and spans of tensors that are updated together. Pure
//! arithmetic.

use std::ops::Range;

use crate::DType;

/// Alignment of tensors in elements: at least 64 bytes for all types.
const ALIGN: usize = 32;

/// A tensor in a flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) index: usize,
    /// Its first element.
    pub(super) start: usize,
    pub(super) count: usize,
    pub(super) rows: usize,
    /// Number of steps taken.
    pub(super) step: u64,
    /// Whether its master was copied from its weight.
    pub(super) has_master: bool,
}

impl Entry {
    /// End, including the padding.
    fn end(&self) -> usize {
        (self.start + self.count).next_multiple_of(ALIGN)
    }
}

/// Group and types of the tensors of one flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) group: usize,
    pub(super) weight: DType,
    pub(super) grad: DType,
}

/// Lays out tensors `(index, count, rows)` one after the other.
pub(super) fn entries(tensors: impl IntoIterator<Item = (usize, usize, usize)>) -> Vec<Entry> {
    let mut start = 0;
    let place = |(index, count, rows)| {
        let entry = Entry { index, start, count, rows, step: 0, has_master: false };
        start = entry.end();
        entry
    };
    tensors.into_iter().map(place).collect()
}

/// Length of their buffer in elements.
pub(super) fn buffer_len(entries: &[Entry]) -> usize {
    entries.last().map_or(0, Entry::end)
}

/// Neighbouring tensors with the same step count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Index of the flat buffer.
    pub(super) flat: usize,
    /// Indices of the entries.
    pub(super) entries: Range<usize>,
    pub(super) start: usize,
    pub(super) count: usize,
    /// The step count after this step, from 1.
    pub(super) step: u64,
}

/// The longest spans of tensors that have a gradient and the same step count.
pub(super) fn spans(flat: usize, entries: &[Entry], has_grad: impl Fn(usize) -> bool) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for (at, entry) in entries.iter().enumerate().filter(|(_, entry)| has_grad(entry.index)) {
        let step = entry.step + 1;
        match spans.last_mut() {
            Some(last) if last.entries.end == at && last.step == step => {
                last.entries.end = at + 1;
                last.count = entry.end() - last.start;
            }
            _ => {
                let (start, count) = (entry.start, entry.end() - entry.start);
                spans.push(Span { flat, entries: at..at + 1, start, count, step });
            }
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_aligned_and_disjoint() {
        let entries = entries([(3, 1, 0), (5, 0, 0), (6, 32, 4), (7, 33, 0)]);
        assert_eq!(entries.iter().map(|e| e.start).collect::<Vec<_>>(), [0, 32, 32, 64]);
        assert_eq!(buffer_len(&entries), 128);
    }

    #[test]
    fn spans_end_at_missing_gradients_and_other_step_counts() {
        let mut entries = entries((0..6).map(|index| (index, 10, 0)));
        let all = spans(0, &entries, |_| true);
        assert_eq!((all.len(), all[0].count, all[0].step), (1, 192, 1));
        entries[4].step = 7;
        let found = spans(1, &entries, |index| index != 1);
        let seen: Vec<_> =
            found.iter().map(|s| (s.entries.clone(), s.start, s.count, s.step)).collect();
        assert_eq!(
            seen,
            [(0..1, 0, 32, 1), (2..4, 64, 64, 1), (4..5, 128, 32, 8), (5..6, 160, 32, 1)]
        );
        assert_eq!(spans(0, &entries, |_| false), []);
    }
}
