//! A piece: neighbouring blocks of one tensor, with their weights, gradients and state.
//!
//! The pieces of a tensor are disjoint slices, so each may be on its own thread; the borrow checker
//! proves this.

use std::ops::Range;

use super::pages::Buffer;
use super::plan::Layout;
use super::quant::CodesMut;
use super::{BLOCK, GradMap, Prefetching, Sums, load, narrow, scalar, widen_into};
use crate::param::split_off;
use crate::{DType, Ema, Grad, SliceMut};

/// Blocks `blocks` of a tensor. Every slice starts with the first of them.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) layout: Layout,
    pub(crate) blocks: Range<usize>,
    /// The first element of these blocks.
    pub(crate) start: usize,
    pub(crate) map: GradMap,
    pub(crate) weight: SliceMut<'a>,
    /// The f32 master of a half weight, if it has one.
    pub(crate) master: Option<&'a mut [f32]>,
    /// Key for stochastic rounding of a half weight, made of seed, tensor and step; `None` rounds
    /// to nearest even.
    pub(crate) rounding: Option<u64>,
    pub(crate) grad: Grad<'a>,
    /// In the order of the rule's slots; empty beyond them.
    pub(crate) slots: [SlotMut<'a>; SLOTS],
    pub(crate) ema: Option<Ema<'a>>,
}

/// State values of one slot.
#[derive(Debug)]
pub(crate) enum SlotMut<'a> {
    /// In f32; empty if the rule has no such slot.
    F32(&'a mut [f32]),
    /// In eight bits. Not for rules by rows: a quantization group must not span two blocks.
    Codes(CodesMut<'a>),
}

impl Default for SlotMut<'_> {
    fn default() -> Self {
        Self::F32(&mut [])
    }
}

impl SlotMut<'_> {
    /// Splits off the first `count` values; none if the slot is empty.
    fn split_off(&mut self, count: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(split_off(values, count)),
            Self::Codes(codes) => Self::Codes(codes.split_off(count)),
        }
    }

    /// The values of a range, decoded in `buffer` if they are codes; empty if the slot is shorter.
    fn load<'a>(&'a mut self, range: Range<usize>, buffer: &'a mut [f32; BLOCK]) -> &'a mut [f32] {
        match self {
            Self::F32(values) => values.get_mut(range).unwrap_or_default(),
            Self::Codes(codes) => {
                let buffer = &mut buffer[..range.len()];
                codes.decode(range.start, buffer);
                buffer
            }
        }
    }

    /// All values in f32; empty for codes, which a rule by tensor does not have.
    pub(crate) const fn all(&mut self) -> &mut [f32] {
        match self {
            Self::F32(values) => values,
            Self::Codes(_) => &mut [],
        }
    }

    /// Encodes the values that [`load`](Self::load) decoded; `from` is their index in the tensor.
    fn store(&mut self, range: Range<usize>, buffer: &[f32; BLOCK], from: usize) {
        if let Self::Codes(codes) = self {
            codes.encode(range.start, &buffer[..range.len()], |key| block_key(key, from));
        }
    }
}

/// Slices of one block or several, all of one length, as a rule updates them.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    pub(crate) map: GradMap,
    /// Elements per row of the tensor. The slices are whole rows, or blocks of one row.
    pub(crate) cols: usize,
    /// Whether a sweep prefetches.
    pub(crate) prefetch: bool,
    pub(crate) param: &'a mut [f32],
    pub(crate) grad: &'a [f32],
    /// In the order of the rule's slots; empty beyond them.
    pub(crate) slots: [&'a mut [f32]; SLOTS],
}

impl Block<'_> {
    /// Splits off the first `count` elements.
    #[inline]
    pub(crate) fn split_off(&mut self, count: usize) -> Self {
        Block {
            map: self.map,
            cols: self.cols,
            prefetch: self.prefetch,
            param: split_off(&mut self.param, count),
            grad: self.grad.split_off(..count).unwrap_or_default(),
            slots: self.slots.each_mut().map(|slot| split_off(slot, count)),
        }
    }
}

/// Scratch memory of a thread, kept between steps: allocating the long buffers in each step would
/// cost page faults.
#[derive(Debug)]
pub(crate) struct Scratch {
    param: [f32; BLOCK],
    grad: [f32; BLOCK],
    slots: [[f32; BLOCK]; SLOTS],
    /// Sums of a tensor's blocks.
    pub(crate) sums: Vec<Sums>,
    /// A tensor's spans, for the backward sweep.
    pub(crate) spans: Vec<(usize, Range<usize>)>,
    /// Directions of a tensor's last elements.
    pub(crate) directions: Buffer,
    pub(crate) prefetching: Prefetching,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            param: [0.0; BLOCK],
            grad: [0.0; BLOCK],
            slots: [[0.0; BLOCK]; SLOTS],
            sums: Vec::new(),
            spans: Vec::new(),
            directions: Buffer::default(),
            prefetching: Prefetching::default(),
        }
    }
}

/// The contents are not used between steps, and so not cloned.
impl Clone for Scratch {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl<'a> Piece<'a> {
    /// Splits off the blocks before `block`.
    pub(crate) fn split_off(&mut self, block: usize) -> Self {
        let count = self.layout.range(block).start - self.start;
        let ema = |Ema { values, decay }: &mut Ema<'a>| Ema {
            values: split_off(values, count),
            decay: *decay,
        };
        let first = Self {
            layout: self.layout,
            blocks: self.blocks.start..block,
            start: self.start,
            map: self.map,
            weight: self.weight.split_off(count),
            master: self.master.as_mut().map(|master| split_off(master, count)),
            rounding: self.rounding,
            grad: match &mut self.grad {
                Grad::Keep(grad) => {
                    let first = grad.part(0..count);
                    *grad = grad.part(count..grad.len());
                    Grad::Keep(first)
                }
                Grad::Clear(grad) => Grad::Clear(grad.split_off(count)),
            },
            slots: self.slots.each_mut().map(|slot| slot.split_off(count)),
            ema: self.ema.as_mut().map(ema),
        };
        self.blocks.start = block;
        self.start += count;
        first
    }

    /// Whether this is the whole tensor.
    pub(crate) fn is_whole(&self) -> bool {
        self.blocks == (0..self.layout.blocks())
    }

    /// Largest number of elements per [`visit`](Self::visit): one block if something is converted
    /// in a buffer; 1, which means one block of any length, if each block has its own random bits.
    pub(crate) fn span_len(&self) -> usize {
        let f32_only =
            self.weight.dtype() == DType::F32 && self.grad.as_slice().dtype() == DType::F32;
        let codes = self.slots.iter().any(|slot| matches!(slot, SlotMut::Codes(_)));
        match self.rounding {
            _ if f32_only && !codes => BLOCKS_AT_ONCE * BLOCK,
            Some(_) => 1,
            None => BLOCK,
        }
    }

    /// Calls `rule` with a span of the tensor's elements, at most [`span_len`](Self::span_len)
    /// long. In the `last` sweep it then rounds the half weight, updates the moving average and
    /// clears the gradient, as requested.
    pub(crate) fn visit<T>(
        &mut self,
        elements: Range<usize>,
        last: bool,
        scratch: &mut Scratch,
        rule: impl FnOnce(Block<'_>) -> T,
    ) -> T {
        let from = elements.start;
        let range = from - self.start..elements.end - self.start;
        let Scratch { param: wide, grad: wide_grad, slots: wide_slots, .. } = scratch;
        let key = self.rounding.map(|key| block_key(key, from));
        let (param, half) = match &mut self.weight {
            SliceMut::F32(weight) => (&mut weight[range.clone()], None),
            half => {
                let half = half.part(range.clone());
                let param = match &mut self.master {
                    Some(master) => &mut master[range.clone()],
                    None => {
                        let wide = &mut wide[..range.len()];
                        widen_into(half.as_slice(), wide);
                        wide
                    }
                };
                (param, Some(half))
            }
        };
        let mut buffers = wide_slots.iter_mut();
        let slots = self
            .slots
            .each_mut()
            .map(|slot| slot.load(range.clone(), buffers.next().expect("a buffer for each slot")));
        let grad = load(self.grad.as_slice(), range.clone(), wide_grad);
        let result = rule(Block {
            map: self.map,
            cols: self.layout.cols(),
            prefetch: false,
            param,
            grad,
            slots,
        });
        for (slot, values) in self.slots.iter_mut().zip(&*wide_slots) {
            slot.store(range.clone(), values, from);
        }
        if last {
            if let Some(mut half) = half {
                narrow(param, &mut half, key);
            }
            if let Some(Ema { values, decay }) = &mut self.ema {
                let values = &mut values[range.clone()];
                scalar::move_average(values, param, *decay);
            }
            if let Grad::Clear(grad) = &mut self.grad {
                grad.part(range).clear();
            }
        }
        result
    }
}

/// Key of a tensor's step, from which the key of each block is derived.
pub(crate) const fn step_key(seed: u64, tensor: usize, step: u64) -> u64 {
    mix(mix(seed ^ mix(tensor as u64)) ^ step)
}

const fn block_key(key: u64, start: usize) -> u32 {
    mix(key ^ start as u64) as u32
}

/// The finalizer of the SplitMix64 generator: every input bit changes about half of the output
/// bits.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Blocks per visit if nothing is converted. Their streams exceed the first-level cache, but the
/// moving average and the gradient to clear still find them in the second.
const BLOCKS_AT_ONCE: usize = 8;

/// Largest number of state vectors of a rule.
pub(crate) const SLOTS: usize = 3;
