//! Valid names near a misspelt one, for messages.

use super::tree::Span;
use crate::Result;

/// Edit distance of two names, ignoring case.
pub(super) fn distance(a: &str, b: &str) -> usize {
    strsim::damerau_levenshtein(&a.to_lowercase(), &b.to_lowercase())
}

/// Returns whether `name` is an abbreviation of `whole`: letters left out, at least a third left.
fn is_cut_short(name: &str, whole: &str) -> bool {
    let mut letters = whole.chars();
    3 * name.len() >= whole.len() && name.chars().all(|c| letters.any(|l| l == c))
}

/// Returns whether this edit distance is small enough to be a misspelling.
pub(super) fn near(distance: usize, name: &str) -> bool {
    distance <= 1 + name.len() / 3
}

/// Returns the choice called `name`; if there is none, an error at `place` with the nearest name.
pub(crate) fn choose<T: Clone>(
    kind: &str,
    name: &str,
    choices: &[(&str, T)],
    place: &Span,
) -> Result<T> {
    let chosen = choices.iter().find(|(known, _)| *known == name);
    chosen.map(|(_, choice)| choice.clone()).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        place.error(unknown(kind, name, &names))
    })
}

/// Text "unknown KIND `x`; did you mean `y`? (valid: ...)".
pub(crate) fn unknown<S: AsRef<str>>(kind: &str, name: &str, valid: &[S]) -> String {
    let valid: Vec<_> = valid.iter().map(AsRef::as_ref).collect();
    let nearest = valid.iter().map(|v| (distance(v, name), v)).min();
    let nearest = nearest.filter(|(distance, _)| near(*distance, name)).map(|(_, nearest)| nearest);
    // An abbreviation has a large edit distance to the full name.
    let whole = || valid.iter().filter(|v| is_cut_short(name, v)).min_by_key(|v| v.len());
    let hint = match nearest.or_else(whole) {
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None => String::new(),
    };
    let mut names = valid.clone();
    names.sort_unstable();
    names.dedup();
    format!("unknown {kind} `{name}`{hint} (valid: {})", names.join(", "))
}
