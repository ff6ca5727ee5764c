//! `Named`: values by name, in the order they were added.

use std::collections::HashMap;

/// Values by name, in the order they were added.
///
/// Among few names one is searched from the first on, among many by an index. So the time of each
/// operation does not depend on the number of names, apart from copies to close gaps.
#[derive(Clone)]
pub(crate) struct Named<T> {
    /// `None` is a value that was taken, only with an index.
    entries: Vec<Option<(String, T)>>,
    /// If there are more than [`FEW`] entries. Boxed, as most samples have none.
    index: Option<Box<Index>>,
}

#[derive(Clone)]
struct Index {
    /// Place of each name among the entries.
    places: HashMap<String, usize>,
    /// Number of values that were taken and are still among the entries.
    gaps: usize,
}

impl<T> Named<T> {
    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.index.as_ref().map_or(0, |index| index.gaps)
    }

    /// Place of `name`, for [`at_mut`](Self::at_mut): `expected`, if it is there. Samples of one
    /// source have their fields in the same order, so that the search is seldom needed.
    pub(crate) fn find(&self, expected: usize, name: &str) -> Option<usize> {
        let is_there = |entry: &Option<(String, T)>| entry.as_ref().is_some_and(|e| e.0 == name);
        if self.entries.get(expected).is_some_and(is_there) {
            return Some(expected);
        }
        match &self.index {
            Some(index) => index.places.get(name).copied(),
            None => self.entries.iter().position(is_there),
        }
    }

    /// The value at a place returned by [`find`](Self::find).
    pub(crate) fn at_mut(&mut self, place: usize) -> Option<&mut T> {
        self.entries.get_mut(place)?.as_mut().map(|(_, value)| value)
    }

    /// The value of `name`, searched as by [`find`](Self::find).
    pub(crate) fn get(&self, expected: usize, name: &str) -> Option<&T> {
        let place = self.find(expected, name)?;
        self.entries[place].as_ref().map(|(_, value)| value)
    }

    /// Returns whether there is a value of `name`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.find(0, name).is_some()
    }

    /// Adds a value, or replaces that of the same name in place.
    pub(crate) fn set(&mut self, name: String, value: T) {
        let place = self.find(self.entries.len(), &name);
        if let Some(old) = place.and_then(|place| self.at_mut(place)) {
            *old = value;
            return;
        }
        if let Some(index) = &mut self.index {
            index.places.insert(name.clone(), self.entries.len());
        }
        self.entries.push(Some((name, value)));
        if self.index.is_none() && self.entries.len() > FEW {
            self.reindex();
        }
    }

    /// Removes the value of `name`.
    pub(crate) fn take(&mut self, name: &str) -> Option<T> {
        let place = self.find(0, name)?;
        let Some(index) = &mut self.index else {
            return self.entries.remove(place).map(|(_, value)| value);
        };
        index.places.remove(name);
        index.gaps += 1;
        let (_, value) = self.entries[place].take()?;
        if index.gaps > self.entries.len() / 2 {
            self.entries.retain(Option::is_some);
            self.reindex();
        }
        Some(value)
    }

    /// Names and values in the order they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.entries.iter().flatten().map(|(name, value)| (name.as_str(), value))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut T)> {
        self.entries.iter_mut().flatten().map(|(name, value)| (name.as_str(), value))
    }

    pub(crate) fn into_iter(self) -> impl Iterator<Item = (String, T)> {
        self.entries.into_iter().flatten()
    }

    fn reindex(&mut self) {
        let places = self.entries.iter().enumerate();
        let places = places.filter_map(|(place, entry)| Some((entry.as_ref()?.0.clone(), place)));
        let index = || Box::new(Index { places: places.collect(), gaps: 0 });
        self.index = (self.entries.len() > FEW).then(index);
    }
}

impl<T> Default for Named<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), index: None }
    }
}

impl<T: PartialEq> PartialEq for Named<T> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Named<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Most entries that are searched one after another.
const FEW: usize = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Beside a list that is searched from the first entry on.
        #[test]
        fn values_are_those_of_a_plain_list(
            calls in prop::collection::vec((0..5_u8, 0..60_u16, 0..60_usize), 0..400),
        ) {
            let (mut named, mut plain) = (Named::default(), Vec::<(String, usize)>::new());
            for (at, (kind, name, expected)) in calls.into_iter().enumerate() {
                let name = name.to_string();
                let place = plain.iter().position(|(known, _)| *known == name);
                match (kind, place) {
                    (0, _) => {
                        let taken = place.map(|place| plain.remove(place).1);
                        prop_assert_eq!(named.take(&name), taken);
                    }
                    (1, _) => {
                        let found = place.map(|place| &plain[place].1);
                        prop_assert_eq!(named.get(expected, &name), found);
                        prop_assert_eq!(named.has(&name), place.is_some());
                    }
                    (_, Some(place)) => {
                        named.set(name, at);
                        plain[place].1 = at;
                    }
                    (_, None) => {
                        named.set(name.clone(), at);
                        plain.push((name, at));
                    }
                }
                prop_assert_eq!(named.len(), plain.len());
                prop_assert!(named.iter().eq(plain.iter().map(|(n, value)| (n.as_str(), value))));
            }
            prop_assert_eq!(&named, &named.clone());
            prop_assert!(named.into_iter().eq(plain));
        }
    }
}
