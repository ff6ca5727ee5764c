//! State of one tensor: created in its first step, saved, checked and loaded.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};
use std::{fmt, io};

use crate::cpu::pages::{Buffer, LINE, Pages};
use crate::cpu::quant::Codes;
use crate::cpu::{SLOTS, SlotMut};
use crate::error::{invalid, problem};
use crate::rule::Hyper;
use crate::state_dict::MASTER;
use crate::{DType, ParamLayout, ParamState, Result, Slice, StateProblem, cpu};

/// The state of one tensor. All vectors have the tensor's length, unless the rule is
/// [by tensor](Hyper::BY_TENSOR).
#[derive(Clone)]
pub(crate) struct TensorState {
    pub(crate) step: u64,
    /// The f32 master of a half weight; `None` if the weight is f32 or the optimizer keeps no
    /// masters.
    pub(crate) master: Option<Buffer>,
    /// In the order of the rule's slots.
    pub(crate) slots: Vec<Slot>,
}

impl TensorState {
    /// Initial state for a weight, aligned to cache lines as the weight is if the rule has one
    /// sweep.
    pub(crate) fn new<H: Hyper>(
        hyper: &H,
        weight: Slice<'_>,
        rows: usize,
        eight_bits: bool,
        pages: &mut Pages,
    ) -> Self {
        let offset = match weight {
            Slice::F32(weight) if !H::TWO_SWEEPS => page_offset(weight) % LINE,
            _ => 0,
        };
        let slots = hyper.slots().iter().enumerate();
        let slot = |(at, name): (usize, &&str)| match eight_bits {
            true => Slot::Codes(Codes::new(weight.len(), is_signed(name))),
            false => {
                let count = hyper.slot_len(at, weight.len(), rows);
                Slot::F32(Values::new(at, offset, hyper.initial(name), count, pages))
            }
        };
        Self { step: 0, master: None, slots: slots.map(slot).collect() }
    }

    /// Upper bound of the memory for vectors of these lengths, in values.
    pub(crate) fn room(lengths: impl Iterator<Item = usize>) -> usize {
        let own = lengths.map(|count| count.saturating_add(PAGE + LINE));
        own.fold(0, usize::saturating_add)
    }

    /// Copies the master from the weight if there is none yet.
    pub(crate) fn ensure_master(&mut self, weight: Slice<'_>, pages: &mut Pages) {
        if weight.dtype() != DType::F32 && self.master.is_none() {
            let mut master = pages.alloc(weight.len());
            cpu::widen_into(weight, &mut master);
            self.master = Some(master);
        }
    }

    /// Reads state from a device; `read(i)` returns the values of slot `i`, or of the master for
    /// `i == slots`.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn read(
        step: u64,
        slots: usize,
        master: bool,
        read: impl Fn(usize) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let slot = |at| {
            let buffer = Buffer::from(read(at)?);
            Ok(Slot::F32(Values { start: 0, count: buffer.len(), buffer }))
        };
        let master = master.then(|| read(slots)).transpose()?.map(Buffer::from);
        Ok(Self { step, master, slots: (0..slots).map(slot).collect::<Result<_>>()? })
    }

    /// The values of the slots, then of the master, to copy to a device.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn vectors(&self) -> impl Iterator<Item = &[f32]> {
        let slots = self.slots.iter().map(|slot| match slot {
            Slot::F32(values) => &values[..],
            Slot::Codes(_) => unreachable!("no device's state is in eight bits"),
        });
        slots.chain(self.master.as_deref())
    }

    /// Lengths of the slots, then of the master.
    #[inline]
    pub(crate) fn lengths(&self) -> impl Iterator<Item = usize> {
        let slots = self.slots.iter().map(Slot::len);
        slots.chain(self.master.as_ref().map(|master| master.len()))
    }

    /// Whether all vectors have the lengths for a tensor of `count` elements in `rows` rows.
    pub(crate) fn fits<H: Hyper>(&self, hyper: &H, count: usize, rows: usize) -> bool {
        let mut slots = self.slots.iter().enumerate();
        slots.all(|(at, slot)| slot.len() == hyper.slot_len(at, count, rows))
            && self.master.as_ref().is_none_or(|master| master.len() == count)
    }

    pub(crate) fn save<H: Hyper>(&self, hyper: &H) -> ParamState {
        let tensors = self.vectors_of(hyper).into_iter();
        let tensors = tensors.map(|(name, vector)| (name.to_owned(), vector.values().into_owned()));
        ParamState { step: self.step, tensors: tensors.collect() }
    }

    pub(crate) fn layout<H: Hyper>(&self, hyper: &H) -> ParamLayout {
        let lengths = self.vectors_of(hyper).into_iter();
        let tensors = lengths.map(|(name, vector)| (name.to_owned(), vector.len())).collect();
        ParamLayout { step: self.step, tensors }
    }

    /// The saved vectors, in order of their names.
    pub(crate) fn vectors_of<H: Hyper>(&self, hyper: &H) -> Vec<(&'static str, Vector<'_>)> {
        let slots = hyper.slots().iter().copied().zip(self.slots.iter().map(Vector::Slot));
        let used = slots.filter(|(_, vector)| !H::BY_TENSOR || vector.len() > 0);
        let mut all: Vec<_> = used.collect();
        all.extend(self.master.as_ref().map(|master| (MASTER, Vector::Master(master))));
        all.sort_by_key(|(name, _)| *name);
        all
    }

    /// Checks one tensor's saved state; `count` is its length if known, `rows` the number of its
    /// rows if its shape is known.
    pub(crate) fn check<H: Hyper>(
        index: usize,
        saved: &ParamLayout,
        hyper: &H,
        mut count: Option<usize>,
    ) -> Result<()> {
        let slots = hyper.slots();
        let key = |name: &str| format!("state.{index}.{name}");
        if !(1..=i64::MAX as u64).contains(&saved.step) {
            return Err(invalid(key("step"), format!("{} is not a step count", saved.step)));
        }
        for (name, &got) in &saved.tensors {
            if name != MASTER && !slots.contains(&name.as_str()) {
                return Err(problem(key(name), StateProblem::Unknown));
            }
            let expected = *count.get_or_insert(got);
            if got != expected && !H::BY_TENSOR {
                return Err(problem(key(name), StateProblem::Length { expected, got }));
            }
        }
        let missing = slots.iter().find(|name| !saved.tensors.contains_key(**name));
        match missing.filter(|_| !H::BY_TENSOR) {
            Some(name) => Err(problem(key(name), StateProblem::Missing)),
            None => Ok(()),
        }
    }

    /// Whether a saved state of a rule by tensor has the lengths for a tensor of `count` elements
    /// in `rows` rows.
    pub(crate) fn is_saved_for<H: Hyper>(
        saved: &ParamLayout,
        hyper: &H,
        count: usize,
        rows: usize,
    ) -> bool {
        let mut slots = hyper.slots().iter().enumerate();
        slots.all(|(at, name)| saved_len(saved, name) == hyper.slot_len(at, count, rows))
            && saved.tensors.get(MASTER).is_none_or(|master| *master == count)
    }

    /// Whether this state has the vectors of a saved one.
    pub(crate) fn has_layout<H: Hyper>(&self, saved: &ParamLayout, hyper: &H) -> bool {
        let names = hyper.slots().iter().zip(&self.slots);
        let mut lengths = names.map(|(name, slot)| slot.len() == saved_len(saved, name));
        let master = self.master.as_ref().map(|master| master.len());
        lengths.all(|is_equal| is_equal) && master == saved.tensors.get(MASTER).copied()
    }

    /// Reads one tensor's [checked](Self::check) state, into `own` if it has the same vectors.
    /// Infinities and NaNs are accepted: everything that can be saved can be loaded.
    pub(crate) fn load<H: Hyper>(
        saved: &ParamLayout,
        hyper: &H,
        own: Option<Self>,
        eight_bits: bool,
        pages: &mut Pages,
        mut read: impl FnMut(&str, &mut [f32]) -> io::Result<()>,
    ) -> io::Result<Self> {
        let new = || Self {
            step: 0,
            master: saved.tensors.get(MASTER).map(|count| pages.alloc(*count)),
            slots: hyper
                .slots()
                .iter()
                .enumerate()
                .map(|(at, name)| {
                    let count = saved_len(saved, name);
                    match eight_bits {
                        true => Slot::Codes(Codes::new(count, is_signed(name))),
                        // The weight's alignment is not known here.
                        false => Slot::F32(Values::new(at, 0, 0.0, count, pages)),
                    }
                })
                .collect(),
        };
        let mut state = own.filter(|own| own.has_layout(saved, hyper)).unwrap_or_else(new);
        state.step = saved.step;
        let names = hyper.slots().iter().zip(&mut state.slots);
        for (name, slot) in names.filter(|(name, _)| saved.tensors.contains_key(**name)) {
            match slot {
                Slot::F32(values) => read(name, values)?,
                Slot::Codes(codes) => {
                    let mut values = vec![0.0; codes.len()];
                    read(name, &mut values)?;
                    codes.view(0).encode(0, &values, |key| key as u32);
                }
            }
        }
        if let Some(master) = &mut state.master {
            read(MASTER, master)?;
        }
        Ok(state)
    }
}

/// Length of a saved vector; 0 if there is none.
fn saved_len(saved: &ParamLayout, name: &str) -> usize {
    saved.tensors.get(name).copied().unwrap_or(0)
}

/// One of a tensor's saved vectors.
pub(crate) enum Vector<'a> {
    Slot(&'a Slot),
    Master(&'a Buffer),
}

impl<'a> Vector<'a> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Slot(slot) => slot.len(),
            Self::Master(master) => master.len(),
        }
    }

    pub(crate) fn values(&self) -> Cow<'a, [f32]> {
        match self {
            Self::Slot(Slot::F32(values)) => Cow::Borrowed(values),
            Self::Slot(Slot::Codes(codes)) => Cow::Owned(codes.values()),
            Self::Master(master) => Cow::Borrowed(master),
        }
    }
}

/// State values of one name.
#[derive(Clone)]
pub(crate) enum Slot {
    F32(Values),
    /// In eight bits.
    Codes(Codes),
}

impl Slot {
    #[inline]
    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Codes(codes) => codes.len(),
        }
    }

    pub(crate) fn values(&self) -> Cow<'_, [f32]> {
        Vector::Slot(self).values()
    }

    /// The values; `None` for codes.
    #[inline]
    pub(crate) fn as_f32_mut(&mut self) -> Option<&mut [f32]> {
        match self {
            Self::F32(values) => Some(values),
            Self::Codes(_) => None,
        }
    }

    /// `key` seeds the stochastic rounding of this tensor's step.
    #[inline]
    pub(crate) fn view(&mut self, key: impl FnOnce() -> u64) -> SlotMut<'_> {
        match self {
            Self::F32(values) => SlotMut::F32(values),
            Self::Codes(codes) => SlotMut::Codes(codes.view(key())),
        }
    }
}

/// Whether values can be negative: second moments and their maxima cannot.
fn is_signed(slot: &str) -> bool {
    slot == "exp_avg"
}

/// State values in f32.
///
/// Each long vector of a tensor starts at a different offset in a page: otherwise the streams of a
/// sweep would map to the same few cache sets.
#[derive(Clone)]
pub(crate) struct Values {
    buffer: Buffer,
    start: usize,
    count: usize,
}

impl Values {
    /// The `at`-th vector of a tensor, which starts `offset` elements after the start of a cache
    /// line.
    fn new(at: usize, offset: usize, initial: f32, count: usize, pages: &mut Pages) -> Self {
        // Short vectors may start in any cache line.
        let (wanted, unit) = match count {
            ..LONG => (offset, LINE),
            LONG.. => ((at + 1) * PAGE / (SLOTS + 1) + offset, PAGE),
        };
        let mut buffer = pages.alloc(count + unit);
        let start = (wanted + PAGE - page_offset(&buffer)) % unit;
        if initial != 0.0 {
            buffer.fill(initial);
        }
        Self { buffer, start, count }
    }
}

impl Deref for Values {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        &self.buffer[self.start..][..self.count]
    }
}

impl DerefMut for Values {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[self.start..][..self.count]
    }
}

/// Offset of the first element in its page, in elements.
fn page_offset(values: &[f32]) -> usize {
    values.as_ptr().addr() / size_of::<f32>() % PAGE
}

/// Elements per page.
const PAGE: usize = 4096 / size_of::<f32>();
/// Shortest vector that is offset in a page, at the cost of one more page.
const LONG: usize = 16 * PAGE;

impl fmt::Debug for TensorState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorState")
            .field("step", &self.step)
            .field("count", &self.lengths().next())
            .finish_non_exhaustive()
    }
}
