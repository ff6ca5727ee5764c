//! How tensors lie in flat buffers, and which of them take a step together. Pure.

use std::ops::Range;

use crate::DType;

/// Tensors begin at multiples of so many numbers: of 64 bytes whatever the type.
const ALIGN: usize = 32;

/// A tensor in a flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) index: usize,
    /// Its first number.
    pub(super) start: usize,
    pub(super) count: usize,
    pub(super) rows: usize,
    /// Steps it has taken.
    pub(super) step: u64,
    /// Whether its master was taken from its weight.
    pub(super) mastered: bool,
}

impl Entry {
    /// With what follows it up to the next.
    fn end(&self) -> usize {
        (self.start + self.count).next_multiple_of(ALIGN)
    }
}

/// What tensors of one flat buffer have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) group: usize,
    pub(super) weight: DType,
    pub(super) grad: DType,
}

/// Puts tensors of `(index, count, rows)` one behind the other.
pub(super) fn entries(tensors: impl IntoIterator<Item = (usize, usize, usize)>) -> Vec<Entry> {
    let mut start = 0;
    let place = |(index, count, rows)| {
        let entry = Entry { index, start, count, rows, step: 0, mastered: false };
        start = entry.end();
        entry
    };
    tensors.into_iter().map(place).collect()
}

/// Numbers of a buffer that holds them.
pub(super) fn room(entries: &[Entry]) -> usize {
    entries.last().map_or(0, Entry::end)
}

/// Neighbouring tensors that take the same step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Which flat buffer.
    pub(super) flat: usize,
    /// Places in the list of entries.
    pub(super) entries: Range<usize>,
    pub(super) start: usize,
    pub(super) count: usize,
    /// The step they take, from 1.
    pub(super) step: u64,
}

/// The longest spans of tensors that have a gradient and are at the same step.
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
    fn tensors_begin_at_multiples_and_do_not_meet() {
        let entries = entries([(3, 1, 0), (5, 0, 0), (6, 32, 4), (7, 33, 0)]);
        assert_eq!(entries.iter().map(|e| e.start).collect::<Vec<_>>(), [0, 32, 32, 64]);
        assert_eq!(room(&entries), 128);
    }

    #[test]
    fn spans_end_where_a_gradient_is_missing_or_the_step_differs() {
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
