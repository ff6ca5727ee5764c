//! Chooses how a rank copies into its stage: through the caches, or past them with non-temporal
//! stores.
//!
//! A stage that a peer has read is in the peer's cache, and storing into it moves every line back.
//! If the two cores share a cache, that costs almost nothing. Between chips it costs ten times as
//! much as storing past the caches, after which the peer reads from memory. A program cannot know
//! where its peer runs, and that changes: the system moves threads, a hypervisor moves cores. So
//! each rank times its copies, occasionally one by the other route, and uses the faster route.
//! Ranks may use different routes, because readers see no difference.

use std::cell::Cell;
use std::time::Instant;

use crate::memory::Route;

/// Streaming is used if a cached copy takes this many times as long; the reader then waits for
/// memory.
const STREAM_RATIO: f32 = 3.0;
/// One chunk in this many takes the other route, to measure it.
const EXPLORE: u64 = 256;
/// The first such chunk; by then all stages have been written. The next ones, too, until the other
/// route is known.
const FIRST: u64 = 64;
/// One chunk in this many is timed.
const TIMED: u64 = 4;
/// Smallest copy that is timed; for smaller ones reading the clock takes too long.
const MIN_BYTES: usize = 16 << 10;

/// Times of the latest copies by each route, in nanoseconds per byte; 0 if unknown.
#[derive(Debug, Default)]
pub(super) struct RouteTuner {
    cached: Cell<[f32; 3]>,
    streamed: Cell<[f32; 3]>,
}

impl RouteTuner {
    /// Calls `copy`, which stages `bytes` for chunk `number` of the group, with the route to take.
    pub(super) fn timed_copy(&self, number: u64, bytes: usize, copy: impl FnOnce(Route)) {
        let explores = self.explores(number, bytes);
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

    /// Whether chunk `number` takes the other route.
    fn explores(&self, number: u64, bytes: usize) -> bool {
        let is_unknown = self.streamed.get().contains(&0.0);
        number % EXPLORE == FIRST || (is_unknown && number > FIRST && bytes >= MIN_BYTES)
    }

    /// The better route according to the latest times.
    pub(super) fn route(&self) -> Route {
        // The minimum, because other threads may have interrupted a copy.
        let best = |times: &Cell<[f32; 3]>| times.get().into_iter().fold(f32::INFINITY, f32::min);
        let (cached, streamed) = (best(&self.cached), best(&self.streamed));
        if streamed > 0.0 && cached > STREAM_RATIO * streamed {
            Route::Streamed
        } else {
            Route::Cached
        }
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

    fn noted(tuner: &RouteTuner, route: Route, time: f32) -> Route {
        tuner.note(route, time);
        tuner.route()
    }

    #[test]
    fn streams_if_all_recent_cached_copies_are_slow() {
        let tuner = RouteTuner::default();
        assert_eq!(tuner.route(), Route::Cached);
        for _ in 0..3 {
            assert_eq!(noted(&tuner, Route::Cached, 0.4), Route::Cached);
        }
        assert_eq!(noted(&tuner, Route::Streamed, 0.03), Route::Cached);
        assert_eq!(noted(&tuner, Route::Streamed, 0.03), Route::Cached);
        assert_eq!(noted(&tuner, Route::Streamed, 0.03), Route::Streamed);
        // Two copies were interrupted.
        assert_eq!(noted(&tuner, Route::Streamed, 9.0), Route::Streamed);
        assert_eq!(noted(&tuner, Route::Streamed, 9.0), Route::Streamed);
        // The peer shares a cache again.
        assert_eq!(noted(&tuner, Route::Cached, 0.05), Route::Cached);
    }

    #[test]
    fn interrupted_copies_do_not_change_the_route() {
        let tuner = RouteTuner::default();
        for _ in 0..3 {
            tuner.note(Route::Cached, 0.05);
            tuner.note(Route::Streamed, 0.03);
        }
        assert_eq!(noted(&tuner, Route::Cached, 50.0), Route::Cached);
        assert_eq!(noted(&tuner, Route::Cached, 50.0), Route::Cached);
    }

    #[test]
    fn three_chunks_in_a_row_explore_an_unknown_route() {
        let tuner = RouteTuner::default();
        let explores = |&number: &u64| {
            let explores = tuner.explores(number, MIN_BYTES);
            if explores {
                tuner.note(Route::Streamed, 1.0);
            }
            explores
        };
        let explored: Vec<u64> = (0..2 * EXPLORE).filter(explores).collect();
        assert_eq!(explored, [FIRST, FIRST + 1, FIRST + 2, FIRST + EXPLORE]);
    }

    #[test]
    fn one_chunk_in_256_takes_the_other_route() {
        let tuner = RouteTuner::default();
        let mut routes = vec![];
        for number in 0..2 * EXPLORE {
            tuner.timed_copy(number, 0, |route| routes.push(route));
        }
        let other = |&number: &usize| routes[number] == Route::Streamed;
        let expected = [FIRST, FIRST + EXPLORE].map(|number| number as usize);
        assert_eq!((0..routes.len()).filter(other).collect::<Vec<_>>(), expected);
    }
}
