//! The search of `compile`: which way of doing an operation is fastest for a shape, found by trying.
//!
//! An operation with several ways calls [`run`] with a key (its shapes) and the ways, which are
//! numbers. While an engine has a search open on this thread ([`open`]), the first call with a key
//! tries all of them and remembers the best; without one, the default is taken. What was found
//! belongs to the engine, not to the thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::conv::WAYS;

/// What has been found so far.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// How often each way is tried.
    pub rounds: usize,
    found: BTreeMap<String, Found>,
}

/// The outcome for one key.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Found {
    way: usize,
    /// Whether it was faster than the default.
    is_faster: bool,
}

thread_local! {
    static OPEN: RefCell<Option<Search>> = const { RefCell::new(None) };
}

impl Search {
    pub fn new(rounds: usize) -> Self {
        Self { rounds, found: BTreeMap::new() }
    }

    /// How many shapes were looked at, and for how many another way than the default was taken.
    pub fn counts(&self) -> (usize, usize) {
        let better = self.found.values().filter(|found| found.is_faster);
        (self.found.len(), better.count())
    }

    /// What has been found, as JSON; empty if that is nothing.
    pub fn to_text(&self) -> String {
        match self.found.is_empty() {
            true => String::new(),
            false => serde_json::to_string(&self.found).unwrap_or_default(),
        }
    }

    /// Adds what another search has found.
    pub fn take_text(&mut self, text: &str) -> Result<(), String> {
        let found: BTreeMap<String, Found> =
            serde_json::from_str(text).map_err(|e| e.to_string())?;
        match found.values().find(|found| found.way >= WAYS.len()) {
            Some(found) => Err(format!("there is no way {}", found.way)),
            None => {
                self.found.extend(found);
                Ok(())
            }
        }
    }
}

/// Runs `call` with `search` open on this thread.
pub fn open<R>(search: &mut Option<Search>, call: impl FnOnce() -> R) -> R {
    /// Brings the search back however the call ends.
    struct Open<'a>(&'a mut Option<Search>);
    impl Drop for Open<'_> {
        fn drop(&mut self) {
            *self.0 = OPEN.take();
        }
    }
    OPEN.set(search.take());
    let _open = Open(search);
    call()
}

/// Runs `call` without the search that is open on this thread, if one is.
pub fn pause<R>(call: impl FnOnce() -> R) -> R {
    /// Opens it again however the call ends.
    struct Paused(Option<Search>);
    impl Drop for Paused {
        fn drop(&mut self) {
            OPEN.set(self.0.take());
        }
    }
    let _paused = Paused(OPEN.take());
    call()
}

/// Does an operation in the way that is best for `key`, or, without a search, by `default`.
pub(super) fn run<R>(
    key: impl FnOnce() -> String,
    default: usize,
    ways: impl FnOnce() -> Vec<usize>,
    mut operation: impl FnMut(usize) -> R,
) -> R {
    let open = OPEN.with_borrow(|open| open.as_ref().map(|search| search.rounds));
    let Some(rounds) = open else { return operation(default) };
    let key = key();
    let known = OPEN.with_borrow(|open| open.as_ref()?.found.get(&key).map(|found| found.way));
    if let Some(way) = known {
        return operation(way);
    }
    let mut time = |way: usize| {
        let times = (0..rounds.max(1)).map(|_| {
            let start = Instant::now();
            let _result = operation(way);
            start.elapsed()
        });
        times.min().unwrap_or_default()
    };
    // Once for nothing: the first call pays for cold memory.
    time(default);
    let by_default = time(default);
    let (mut found, mut best) = (Found { way: default, is_faster: false }, by_default);
    for way in ways().into_iter().filter(|way| *way != default) {
        let took = time(way);
        if took < best {
            (found, best) = (Found { way, is_faster: true }, took);
        }
    }
    OPEN.with_borrow_mut(|open| open.as_mut().map(|search| search.found.insert(key, found)));
    operation(found.way)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_tried_once_for_each_key() {
        let calls = std::cell::Cell::new(0);
        let call = |key: &str, ways: &[usize]| {
            let operation = |way| {
                calls.set(calls.get() + 1);
                way
            };
            run(|| key.to_owned(), 40, || ways.to_vec(), operation)
        };
        assert_eq!((call("a", &[1]), calls.take()), (40, 1), "no search, no trying");
        let mut search = Some(Search::new(3));
        let found = open(&mut search, || {
            let found = call("a", &[40, 1, 80]);
            assert!([40, 1, 80].contains(&found));
            // The default twice, once for nothing; the two others; and what was asked for.
            assert_eq!(calls.take(), 3 + 3 + 3 + 3 + 1);
            assert_eq!((call("a", &[7]), calls.take()), (found, 1));
            found
        });
        let counts = (1, usize::from(found != 40));
        assert_eq!(search.as_ref().unwrap().counts(), counts);
        assert_eq!(open(&mut search, || call("b", &[40])), 40);
        assert_eq!(search.as_ref().unwrap().counts().0, 2);
        assert_eq!(call("a", &[1]), 40, "the search is the engine's");
    }

    #[test]
    fn what_was_found_is_not_tried_again() {
        let found = r#"{"a":{"way":2,"is_faster":true}}"#;
        let mut search = Search::new(1);
        assert_eq!(search.to_text(), "");
        search.take_text(found).unwrap();
        assert_eq!((search.to_text(), search.counts()), (found.to_owned(), (1, 1)));
        let none = || panic!("nothing is to be tried");
        let way = open(&mut Some(search.clone()), || run(|| "a".to_owned(), 0, none, |way| way));
        assert_eq!(way, 2);
        for bad in ["", "{", r#"{"a":{"way":99,"is_faster":true}}"#] {
            assert!(search.take_text(bad).is_err(), "{bad}");
        }
        assert_eq!(search.to_text(), found);
    }

    #[test]
    fn a_paused_search_learns_nothing_and_goes_on() {
        let mut search = Some(Search::new(1));
        let call = |key: &str| run(|| key.to_owned(), 0, || vec![1], |way| way);
        open(&mut search, || {
            assert_eq!(pause(|| call("a")), 0);
            call("b");
        });
        assert_eq!(search.unwrap().found.keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn the_search_comes_back_from_a_panic() {
        let mut search = Some(Search::new(1));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            open(&mut search, || panic!("an operation's"));
        }));
        assert!(panicked.is_err() && search.is_some());
    }
}
