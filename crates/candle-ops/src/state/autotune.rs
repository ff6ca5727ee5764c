//! Autotuning: selects the fastest algorithm of an operation for a shape, by timing.
//!
//! An operation with several algorithms calls [`run`] with a key (its shapes) and their indices. In
//! training, if autotuning is enabled in the entered [`Context`], the first call with a key times
//! all of them and caches the fastest, or the default if none is faster by more than the noise.
//! Otherwise the default is used.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::context::{self, Mode};
use crate::error::{Error, Result};

/// Number of algorithms of an operation with several ones.
pub(crate) const ALGORITHMS: usize = 11;

/// The algorithms found so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Autotune {
    /// Number of timings per algorithm.
    rounds: usize,
    cache: BTreeMap<String, Choice>,
}

/// The fastest algorithm for a key.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Choice {
    #[serde(rename = "way")]
    pub(crate) algorithm: usize,
    /// Whether it was faster than the default.
    pub(crate) is_faster: bool,
}

/// Summary of the algorithms found so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AutotuneSummary {
    /// Number of timed combinations of operation and shapes.
    pub timed: usize,
    /// Number of these for which another algorithm than the default was faster.
    pub improved: usize,
}

impl Autotune {
    pub(crate) const fn new(rounds: usize) -> Self {
        Self { rounds, cache: BTreeMap::new() }
    }

    pub(crate) fn summary(&self) -> AutotuneSummary {
        let improved = self.cache.values().filter(|choice| choice.is_faster).count();
        AutotuneSummary { timed: self.cache.len(), improved }
    }

    /// The cache as JSON; empty text if it is empty.
    pub(crate) fn to_json(&self) -> String {
        match self.cache.is_empty() {
            true => String::new(),
            false => serde_json::to_string(&self.cache).unwrap_or_default(),
        }
    }

    /// Adds the entries of a cache.
    pub(crate) fn load_json(&mut self, text: &str) -> Result<()> {
        let cache: BTreeMap<String, Choice> = serde_json::from_str(text)?;
        if let Some((key, choice)) = cache.iter().find(|(_, choice)| choice.algorithm >= ALGORITHMS)
        {
            let (key, algorithm) = (key.clone(), choice.algorithm);
            return Err(Error::UnknownAlgorithm { key, algorithm, algorithms: ALGORITHMS });
        }
        self.cache.extend(cache);
        Ok(())
    }
}

/// Runs an operation by the fastest algorithm for `key`, or, without autotuning, by `default`.
pub(crate) fn run<R>(
    key: impl FnOnce() -> String,
    default: usize,
    algorithms: impl FnOnce() -> Vec<usize>,
    mut operation: impl FnMut(usize) -> R,
) -> R {
    let time = |rounds: usize| {
        let mut time = |algorithm: usize| {
            let times = (0..rounds.max(1)).map(|_| {
                let start = Instant::now();
                let _result = operation(algorithm);
                start.elapsed()
            });
            times.min().unwrap_or_default()
        };
        Some(choose(default, &algorithms(), &mut time))
    };
    let algorithm = chosen(key, time).unwrap_or(default);
    operation(algorithm)
}

/// The algorithm for `key`, from the cache or selected by `time`, which is given the number of
/// timings per algorithm. `None` without autotuning, or if `time` selects none.
pub(crate) fn chosen(
    key: impl FnOnce() -> String,
    time: impl FnOnce(usize) -> Option<Choice>,
) -> Option<usize> {
    let rounds = rounds()?;
    let key = key();
    if let Some(algorithm) = cached(&key) {
        return Some(algorithm);
    }
    let choice = time(rounds)?;
    insert(key, choice);
    Some(choice.algorithm)
}

/// Number of timings per algorithm in the entered context, if autotuning is enabled.
pub(crate) fn rounds() -> Option<usize> {
    context::with(|context| match context.mode {
        Mode::Training => context.autotune.as_ref().map(|autotune| autotune.rounds),
        Mode::Outside | Mode::Evaluation => None,
    })
}

fn cached(key: &str) -> Option<usize> {
    context::with(|context| {
        context.autotune.as_ref()?.cache.get(key).map(|choice| choice.algorithm)
    })
}

fn insert(key: String, choice: Choice) {
    context::with(|context| {
        context.autotune.as_mut().map(|autotune| autotune.cache.insert(key, choice))
    });
}

/// The fastest algorithm, if the slower of two timings of it is less than the faster of two of the
/// default by [`MARGIN`]. The second timings are taken at the end, one after the other, so that a
/// change of the machine's speed affects both.
fn choose(
    default: usize,
    algorithms: &[usize],
    time: &mut impl FnMut(usize) -> Duration,
) -> Choice {
    let kept = Choice { algorithm: default, is_faster: false };
    // Twice: the first calls warm the caches.
    time(default);
    let first = time(default);
    let others = algorithms.iter().filter(|algorithm| **algorithm != default);
    let timed = others.map(|algorithm| (time(*algorithm), *algorithm));
    let Some((took, algorithm)) = timed.min() else { return kept };
    let (slowest, fastest) = (took.max(time(algorithm)), first.min(time(default)));
    match slowest.as_secs_f64() < fastest.as_secs_f64() * (1.0 - MARGIN) {
        true => Choice { algorithm, is_faster: true },
        false => kept,
    }
}

/// Fraction of the default's time below which a difference is noise: the best of several timings of
/// one algorithm differ by this much on an idle machine.
const MARGIN: f64 = 0.03;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Context;

    /// The choice between a default, 0, and two others, 1 and 2, for their successive times in
    /// milliseconds.
    fn chosen(times: [&[u64]; 3]) -> (usize, bool) {
        let mut times = times.map(|times| times.iter());
        let mut time = |algorithm: usize| {
            let next: Option<&u64> = times[algorithm].next();
            Duration::from_millis(*next.expect("timed more often than expected"))
        };
        let choice = choose(0, &[0, 1, 2], &mut time);
        (choice.algorithm, choice.is_faster)
    }

    #[test]
    fn the_default_is_kept_unless_another_is_faster_by_more_than_the_noise() {
        assert_eq!(chosen([&[150, 100, 100], &[90, 90], &[80, 80]]), (2, true));
        assert_eq!(
            chosen([&[150, 100, 100], &[99, 99], &[98, 98]]),
            (0, false),
            "within the margin"
        );
        assert_eq!(chosen([&[150, 100, 100], &[80, 99], &[120]]), (0, false), "once by chance");
        assert_eq!(chosen([&[150, 100, 75], &[80, 75], &[90]]), (0, false), "a slow start");
        assert_eq!(chosen([&[150, 100, 100], &[101, 101], &[102]]), (0, false));
    }

    #[test]
    fn algorithms_are_timed_once_per_key() {
        let calls = std::cell::Cell::new(0);
        let call = |key: &str, algorithms: &[usize]| {
            let operation = |algorithm| {
                calls.set(calls.get() + 1);
                algorithm
            };
            run(|| key.to_owned(), 40, || algorithms.to_vec(), operation)
        };
        assert_eq!((call("a", &[1]), calls.take()), (40, 1), "outside of a context");
        let mut context = Context::new(0).with_autotune(3);
        assert_eq!((context.evaluate(|| call("a", &[1])), calls.take()), (40, 1));
        let found = context.enter(|| {
            let found = call("a", &[40, 1, 80]);
            assert!([40, 1, 80].contains(&found));
            // The default twice, the two others once, one of them and the default again, and the
            // call itself.
            assert_eq!(calls.take(), 3 + 3 + 3 + 3 + 3 + 3 + 1);
            assert_eq!((call("a", &[7]), calls.take()), (found, 1));
            found
        });
        let improved = usize::from(found != 40);
        assert_eq!(context.autotune_summary(), Some(AutotuneSummary { timed: 1, improved }));
        assert_eq!(context.enter(|| call("b", &[40])), 40);
        assert_eq!(context.autotune_summary().unwrap().timed, 2);
    }

    #[test]
    fn a_loaded_cache_is_not_timed_again() {
        let cache = r#"{"a":{"way":2,"is_faster":true}}"#;
        let mut context = Context::new(0);
        context.load_autotune_cache(cache).unwrap();
        assert_eq!((context.autotune_cache(), context.autotune_summary()), (String::new(), None));
        context.set_autotune(Some(1));
        assert_eq!(context.autotune_cache(), "");
        context.load_autotune_cache(cache).unwrap();
        let found = AutotuneSummary { timed: 1, improved: 1 };
        assert_eq!(
            (context.autotune_cache(), context.autotune_summary().unwrap()),
            (cache.to_owned(), found)
        );
        let none = || panic!("nothing is timed");
        assert_eq!(context.enter(|| run(|| "a".to_owned(), 0, none, |algorithm| algorithm)), 2);
        for bad in ["", "{"] {
            let error = context.load_autotune_cache(bad).unwrap_err();
            assert!(matches!(error, Error::AutotuneCache(_)), "{error}");
        }
        let other = r#"{"a":{"way":99,"is_faster":true}}"#;
        let error = context.load_autotune_cache(other).unwrap_err().to_string();
        assert_eq!(error, "algorithm 99 of `a` is none of this version's 11");
        assert_eq!(context.autotune_cache(), cache);
    }

    #[test]
    fn without_autotune_times_nothing_and_autotuning_continues_after() {
        let mut context = Context::new(0).with_autotune(1);
        let call = |key: &str| run(|| key.to_owned(), 0, || vec![1], |algorithm| algorithm);
        context.enter(|| {
            assert_eq!(context::without_autotune(|| call("a")), 0);
            call("b");
        });
        let keys: Vec<_> = context.autotune.unwrap().cache.into_keys().collect();
        assert_eq!(keys, ["b"]);
    }
}
