//! How a rank copies into its stage: through the caches or past them.
//!
//! A stage that a peer has read lies in the peer's cache, and storing into it takes every line back.
//! Where the two cores share a cache that costs next to nothing. Between chips it costs ten times a
//! store past the caches, after which the peer reads from memory. Nothing tells a program where its
//! peer runs, and it changes: the system moves threads, a hypervisor whole cores. So each rank times
//! its own copies, now and then one of the other kind, and goes the way that is cheaper by far. The
//! peers need not agree: to a reader the two look the same.

use std::cell::Cell;
use std::time::Instant;

use crate::span::Route;

/// How much longer a copy through the caches must take before going past them pays: the reader then
/// has memory to wait for.
const FAR: f32 = 3.0;
/// One chunk in so many goes the other way, to know what that costs now.
const EXPLORE: u64 = 256;
/// Which one of them: late enough that all of the stages have been touched before.
const FIRST: u64 = 64;
/// One chunk in so many is timed.
const TIMED: u64 = 4;
/// Less than this takes too little time to be told from reading the clock.
const MIN_BYTES: usize = 16 << 10;

/// The latest copies of each kind, in nanoseconds a byte.
#[derive(Debug, Default)]
pub(super) struct Pace {
    cached: Cell<[f32; 3]>,
    streamed: Cell<[f32; 3]>,
}

impl Pace {
    /// Has `copy` stage `bytes` for chunk `number` of the group.
    pub(super) fn stage(&self, number: u64, bytes: usize, copy: impl FnOnce(Route)) {
        let explores = number % EXPLORE == FIRST;
        let route = match (self.route(), explores) {
            (Route::Cached, false) | (Route::Streamed, true) => Route::Cached,
            (Route::Streamed, false) | (Route::Cached, true) => Route::Streamed,
        };
        if bytes < MIN_BYTES || !(explores || number.is_multiple_of(TIMED)) {
            return copy(route);
        }
        let start = Instant::now();
        copy(route);
        self.note(route, start.elapsed().as_nanos() as f32 / bytes as f32);
    }

    /// The better way, as far as is known.
    pub(super) fn route(&self) -> Route {
        // The best of the latest: others may have had the core in between. Nothing known is 0.
        let best = |times: &Cell<[f32; 3]>| times.get().into_iter().fold(f32::INFINITY, f32::min);
        let (cached, streamed) = (best(&self.cached), best(&self.streamed));
        if streamed > 0.0 && cached > FAR * streamed { Route::Streamed } else { Route::Cached }
    }

    fn note(&self, route: Route, time: f32) {
        let times = match route {
            Route::Cached => &self.cached,
            Route::Streamed => &self.streamed,
        };
        let [a, b, _] = times.get();
        times.set([time, a, b]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(pace: &Pace, route: Route, time: f32) -> Route {
        pace.note(route, time);
        pace.route()
    }

    #[test]
    fn goes_past_the_caches_when_all_that_is_known_says_so() {
        let pace = Pace::default();
        assert_eq!(pace.route(), Route::Cached);
        for _ in 0..3 {
            assert_eq!(noted(&pace, Route::Cached, 0.4), Route::Cached);
        }
        assert_eq!(noted(&pace, Route::Streamed, 0.03), Route::Cached);
        assert_eq!(noted(&pace, Route::Streamed, 0.03), Route::Cached);
        assert_eq!(noted(&pace, Route::Streamed, 0.03), Route::Streamed);
        // Two that were interrupted.
        assert_eq!(noted(&pace, Route::Streamed, 9.0), Route::Streamed);
        assert_eq!(noted(&pace, Route::Streamed, 9.0), Route::Streamed);
        // The peer is near again.
        assert_eq!(noted(&pace, Route::Cached, 0.05), Route::Cached);
    }

    #[test]
    fn an_interruption_sends_nobody_past_the_caches() {
        let pace = Pace::default();
        for _ in 0..3 {
            pace.note(Route::Cached, 0.05);
            pace.note(Route::Streamed, 0.03);
        }
        assert_eq!(noted(&pace, Route::Cached, 50.0), Route::Cached);
        assert_eq!(noted(&pace, Route::Cached, 50.0), Route::Cached);
    }

    #[test]
    fn one_chunk_in_many_goes_the_other_way() {
        let pace = Pace::default();
        let mut routes = vec![];
        for number in 0..2 * EXPLORE {
            pace.stage(number, 0, |route| routes.push(route));
        }
        let other = |&number: &usize| routes[number] == Route::Streamed;
        let expected = [FIRST, FIRST + EXPLORE].map(|number| number as usize);
        assert_eq!((0..routes.len()).filter(other).collect::<Vec<_>>(), expected);
    }
}
