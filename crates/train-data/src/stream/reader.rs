//! `Reader`: a rank's records in order, pass after pass, window by window.

use std::collections::VecDeque;
use std::sync::Arc;

use rand_chacha::rand_core::SeedableRng;

use super::StreamOptions;
use super::position::{Cursor, StreamLayout, StreamPosition};
use super::source::{Records, Source};
use crate::sampler::shuffle;
use crate::workers::{IS_STOPPED, catch, is_stopped};
use crate::{BoxError, Error, Result, Sample, SampleRng};

/// A record with its origin.
pub(super) struct Record {
    pub(super) sample: Sample,
    pub(super) origin: Origin,
}

/// Origin of a record, for its random numbers and for errors.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    pass: u64,
    shard: usize,
    place: u64,
}

pub(super) struct Reader {
    source: Arc<dyn Source>,
    options: StreamOptions,
    layout: StreamLayout,
    /// The rank's shards of the pass, in order.
    order: Vec<usize>,
    /// Shard `order[cursor.shard]`, if open.
    records: Option<Box<dyn Records>>,
    cursor: Cursor,
    /// Start of the window, its remaining records, and the number taken.
    start: Cursor,
    window: VecDeque<Record>,
    taken: usize,
}

impl Reader {
    pub(super) fn new(
        source: Arc<dyn Source>,
        options: StreamOptions,
        layout: StreamLayout,
    ) -> Self {
        let start = Cursor::default();
        let (records, window) = (None, VecDeque::new());
        let (order, cursor, taken) = (Vec::new(), start, 0);
        let mut reader =
            Self { source, options, layout, order, records, cursor, start, window, taken };
        reader.order = reader.order_of(0);
        reader
    }

    /// Returns the rank's next record; `None` at the end of a stream that does not repeat. After an
    /// error the position is before the window that contains it.
    ///
    /// With the last record of a window the next window is read, so that the position tells whether
    /// the pass has ended.
    pub(super) fn next(&mut self) -> Result<Option<Record>> {
        if self.window.is_empty() {
            self.fill()?;
        }
        let record = self.window.pop_front();
        self.taken += usize::from(record.is_some());
        if self.window.is_empty() && record.is_some() {
            let filled = catch(|| self.fill());
            if !matches!(filled, Ok(Ok(()))) {
                // The next call reads again, to fail itself.
                (self.cursor, self.records) = (self.start, None);
                self.order = self.order_of(self.start.pass);
            }
        }
        Ok(record)
    }

    /// Returns the position from which [`next`](Self::next) continues.
    pub(super) fn position(&self) -> StreamPosition {
        let (start, taken) =
            if self.window.is_empty() { (self.cursor, 0) } else { (self.start, self.taken) };
        StreamPosition { start, taken, layout: self.layout }
    }

    /// Resumes at a position of the same layout.
    pub(super) fn resume(&mut self, position: &StreamPosition) -> Result<()> {
        self.layout.check(position)?;
        (self.window, self.records) = (VecDeque::new(), None);
        self.cursor = position.start;
        self.order = self.order_of(self.cursor.pass);
        if position.taken > 0 {
            self.fill()?;
            if self.start != position.start || self.window.len() < position.taken {
                return Err(Error::Position("it is behind the end of the shards".into()));
            }
            self.window.drain(..position.taken);
            self.taken = position.taken;
        }
        Ok(())
    }

    /// Reads the next window with a record, if there is one.
    fn fill(&mut self) -> Result<()> {
        // A window is empty at the end of a pass, and always in a pass in which the rank has no
        // record.
        for _ in 0..MAX_EMPTY {
            (self.start, self.taken) = (self.cursor, 0);
            match self.read_window() {
                Ok(window) if window.is_empty() && self.options.repeat => {
                    self.cursor = Cursor { pass: self.cursor.pass + 1, ..Cursor::default() };
                    self.order = self.order_of(self.cursor.pass);
                }
                Ok(window) => {
                    self.window = window.into();
                    return Ok(());
                }
                Err(error) => {
                    (self.cursor, self.records) = (self.start, None);
                    return Err(error);
                }
            }
        }
        let StreamOptions { rank, world_size, .. } = self.options;
        Err(Error::Options(format!(
            "rank {rank} of {world_size} finds no record in {MAX_EMPTY} passes: list shards that have records, at \
             least as many as ranks"
        )))
    }

    /// Reads the rank's records up to the size of a window or the end of the pass, and shuffles
    /// them.
    fn read_window(&mut self) -> Result<Vec<Record>> {
        let mut window = Vec::new();
        while window.len() < self.options.shuffle_buffer.max(1)
            && let Some(record) = self.read()?
        {
            window.push(record);
        }
        let Cursor { pass, window: number, .. } = self.start;
        self.cursor.window += u64::from(!window.is_empty());
        shuffle(&mut window, &mut random([self.options.seed, pass, SHUFFLE, 1 + number]));
        Ok(window)
    }

    /// Reads the rank's next record of the pass in the order of its shards; `None` at the end of
    /// the pass.
    fn read(&mut self) -> Result<Option<Record>> {
        while let Some(&shard) = self.order.get(self.cursor.shard) {
            let Cursor { pass, place, record, .. } = self.cursor;
            let origin = Origin { pass, shard, place };
            let named = |source| origin.error(&*self.source, source);
            if is_stopped() {
                return Err(named(IS_STOPPED.into()));
            }
            let records = match &mut self.records {
                Some(records) => records,
                closed => closed.insert(self.source.open(shard, place).map_err(named)?),
            };
            let is_own = !self.options.shares(self.layout.shards)
                || record % self.options.world_size as u64 == self.options.rank as u64;
            let read = if is_own {
                records.next()
            } else {
                records.skip().map(|is_there| is_there.then(Sample::new))
            };
            if let Some(sample) = read.map_err(named)? {
                (self.cursor.place, self.cursor.record) = (records.place(), record + 1);
                if is_own {
                    return Ok(Some(Record { sample, origin }));
                }
            } else {
                (self.cursor.place, self.cursor.shard) = (0, self.cursor.shard + 1);
                self.records = None;
            }
        }
        Ok(None)
    }

    /// Returns the rank's shards of a pass: every `world_size`-th, or all if ranks share them.
    fn order_of(&self, pass: u64) -> Vec<usize> {
        let StreamOptions { shuffle_buffer, seed, rank, world_size, .. } = self.options;
        let mut order: Vec<_> = (0..self.layout.shards).collect();
        if shuffle_buffer > 0 {
            shuffle(&mut order, &mut random([seed, pass, SHUFFLE, 0]));
        }
        if self.options.shares(self.layout.shards) {
            return order;
        }
        order.into_iter().skip(rank).step_by(world_size).collect()
    }
}

impl Origin {
    /// Returns the record's random numbers, which depend only on seed, pass, shard and position.
    pub(super) fn random(self, seed: u64) -> SampleRng {
        random([seed, self.pass, self.shard as u64, self.place])
    }

    /// Creates an error of this record.
    pub(super) fn error(self, source: &dyn Source, error: BoxError) -> Error {
        Error::Record {
            shard: source.shards()[self.shard].name.clone(),
            unit: source.unit(),
            place: self.place,
            source: error,
        }
    }
}

fn random(key: [u64; 4]) -> SampleRng {
    let mut bytes = [0; 32];
    for (part, number) in bytes.chunks_exact_mut(8).zip(key) {
        part.copy_from_slice(&number.to_le_bytes());
    }
    SampleRng::from_seed(bytes)
}

/// Key in place of a shard's index for permuting shards, or, with 1 added to a window's number, its
/// records.
const SHUFFLE: u64 = u64::MAX;
/// Number of consecutive passes without a record of the rank after which the reader gives up.
const MAX_EMPTY: usize = 1000;
