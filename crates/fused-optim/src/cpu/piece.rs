//! Some neighbouring blocks of one tensor, with everything that belongs to them.
//!
//! Pieces of one tensor share nothing, so each may be on a thread of its own; that is checked by the
//! borrow checker, not argued for.

use std::ops::Range;

use super::pages::Buffer;
use super::plan::Layout;
use super::quant::CodesMut;
use super::{BLOCK, GradMap, Sums, load, narrow, narrow_at_random, scalar, widen_into};
use crate::{DType, Ema, Grad, SliceMut};

/// Blocks `blocks` of a tensor. Every slice begins where the first of them does.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) layout: Layout,
    pub(crate) blocks: Range<usize>,
    /// The first element of these blocks.
    pub(crate) start: usize,
    pub(crate) map: GradMap,
    pub(crate) weight: SliceMut<'a>,
    /// The f32 values of a half weight, which is rounded from them; without, it is all there is.
    pub(crate) master: Option<&'a mut [f32]>,
    /// Rounds a half weight at random, by this key of seed, tensor and step; to nearest even without.
    pub(crate) rounding: Option<u64>,
    pub(crate) grad: Grad<'a>,
    /// In the order of the rule's slots; those it has not are empty.
    pub(crate) slots: [SlotMut<'a>; SLOTS],
    pub(crate) ema: Option<Ema<'a>>,
}

/// State values of one name.
#[derive(Debug)]
pub(crate) enum SlotMut<'a> {
    /// As they are; none if the rule has no such slot.
    F32(&'a mut [f32]),
    /// In eight bits. A rule with rows has none of these: a group may not lie in two blocks.
    Codes(CodesMut<'a>),
}

impl Default for SlotMut<'_> {
    fn default() -> Self {
        Self::F32(&mut [])
    }
}

impl SlotMut<'_> {
    fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(values) => {
                let at = at.min(values.len());
                let (a, b) = values.split_at_mut(at);
                (Self::F32(a), Self::F32(b))
            }
            Self::Codes(codes) => {
                let (a, b) = codes.split_at(at);
                (Self::Codes(a), Self::Codes(b))
            }
        }
    }

    /// The values of a range, in `buffer` if they are to be decoded; none of a slot that is shorter.
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

    /// All values; none of those in eight bits, which a rule by tensor has not.
    pub(crate) const fn all(&mut self) -> &mut [f32] {
        match self {
            Self::F32(values) => values,
            Self::Codes(_) => &mut [],
        }
    }

    /// Takes back what [`load`](Self::load) decoded; `from` is the place in the tensor.
    fn store(&mut self, range: Range<usize>, buffer: &[f32; BLOCK], from: usize) {
        if let Self::Codes(codes) = self {
            codes.encode(range.start, &buffer[..range.len()], |key| block_key(key, from));
        }
    }
}

/// What a rule is given of one block or several: slices of one length.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    pub(crate) map: GradMap,
    /// Elements of the tensor's rows: this is some whole rows, or blocks of one.
    pub(crate) cols: usize,
    pub(crate) param: &'a mut [f32],
    pub(crate) grad: &'a [f32],
    /// In the order of the rule's slots; those it has not are empty.
    pub(crate) slots: [&'a mut [f32]; SLOTS],
}

impl Block<'_> {
    /// Takes the first `count` elements out of it.
    pub(crate) fn split_off(&mut self, count: usize) -> Self {
        Block {
            map: self.map,
            cols: self.cols,
            param: self.param.split_off_mut(..count).unwrap_or_default(),
            grad: self.grad.split_off(..count).unwrap_or_default(),
            slots: self
                .slots
                .each_mut()
                .map(|slot| slot.split_off_mut(..count).unwrap_or_default()),
        }
    }
}

/// Buffers of a thread. To take those of whole tensors anew at each step would cost page faults.
#[derive(Debug)]
pub(crate) struct Scratch {
    param: [f32; BLOCK],
    grad: [f32; BLOCK],
    slots: [[f32; BLOCK]; SLOTS],
    /// Of a tensor's blocks.
    pub(crate) sums: Vec<Sums>,
    /// Of a tensor, to be gone through backwards.
    pub(crate) spans: Vec<(usize, Range<usize>)>,
    /// Of a tensor's last elements.
    pub(crate) directions: Buffer,
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
        }
    }
}

/// What is in it means nothing between two steps.
impl Clone for Scratch {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Piece<'_> {
    /// The blocks before `block` and the others.
    pub(crate) fn split_at(self, block: usize) -> (Self, Self) {
        let Self { layout, start, map, rounding, .. } = self;
        let at = layout.range(block).start - start;
        let (weight, weight_rest) = self.weight.split_at(at);
        let (master, master_rest) = self.master.map(|master| master.split_at_mut(at)).unzip();
        let (grad, grad_rest) = match self.grad {
            Grad::Keep(grad) => {
                (Grad::Keep(grad.part(0..at)), Grad::Keep(grad.part(at..grad.len())))
            }
            Grad::Clear(grad) => {
                let (a, b) = grad.split_at(at);
                (Grad::Clear(a), Grad::Clear(b))
            }
        };
        // A slot the rule has not is empty, whatever the piece.
        let [(a0, b0), (a1, b1), (a2, b2)] = self.slots.map(|slot| slot.split_at(at));
        let ema = self.ema.map(|Ema { values, decay }| {
            let (a, b) = values.split_at_mut(at);
            (Ema { values: a, decay }, Ema { values: b, decay })
        });
        let (ema, ema_rest) = ema.unzip();
        let blocks = self.blocks.start..block;
        let slots = [a0, a1, a2];
        let first = Self { layout, blocks, start, map, weight, master, rounding, grad, slots, ema };
        let others = Self {
            layout,
            blocks: block..self.blocks.end,
            start: start + at,
            map,
            weight: weight_rest,
            master: master_rest,
            rounding,
            grad: grad_rest,
            slots: [b0, b1, b2],
            ema: ema_rest,
        };
        (first, others)
    }

    /// Whether this is all of the tensor.
    pub(crate) fn is_whole(&self) -> bool {
        self.blocks == (0..self.layout.blocks())
    }

    /// How many elements can be visited at once: a block's if anything is widened into a buffer; 1, and
    /// so one block whatever its length, if each has random bits of its own.
    pub(crate) fn stride(&self) -> usize {
        let f32_only =
            self.weight.dtype() == DType::F32 && self.grad.as_slice().dtype() == DType::F32;
        let codes = self.slots.iter().any(|slot| matches!(slot, SlotMut::Codes(_)));
        match self.rounding {
            _ if f32_only && !codes => BLOCKS_AT_ONCE * BLOCK,
            Some(_) => 1,
            None => BLOCK,
        }
    }

    /// Lets `rule` work on some of the tensor's elements, a span of [`stride`](Self::stride). If it is
    /// the `last` to do so in this step, the half weight is rounded, the moving average brought up to
    /// date and the gradient cleared, as asked for.
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
        let result = rule(Block { map: self.map, cols: self.layout.cols(), param, grad, slots });
        for (slot, values) in self.slots.iter_mut().zip(&*wide_slots) {
            slot.store(range.clone(), values, from);
        }
        if last {
            match (half, key) {
                (Some(mut half), Some(key)) => narrow_at_random(param, &mut half, key),
                (Some(mut half), None) => narrow(param, &mut half),
                (None, _) => {}
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

/// A key for a tensor's step, from which every block has its own.
pub(crate) const fn step_key(seed: u64, tensor: usize, step: u64) -> u64 {
    mix(mix(seed ^ mix(tensor as u64)) ^ step)
}

const fn block_key(key: u64, start: usize) -> u32 {
    mix(key ^ start as u64) as u32
}

/// The finisher of the SplitMix64 generator: every input bit changes about half of the output's.
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Blocks visited at once where nothing stands between rule and memory. Their streams leave the
/// first-level cache, but a moving average and a gradient to clear are still met in the second.
const BLOCKS_AT_ONCE: usize = 8;

/// State vectors a rule can have.
pub(crate) const SLOTS: usize = 3;
