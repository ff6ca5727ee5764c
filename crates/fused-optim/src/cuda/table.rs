//! What kernels are told, as plain data: the structs of `optim.cu`, and how tensors become lists of
//! chunks and trees of sums. Pure; nothing here touches a device.

use std::ops::Range;

use crate::cpu::plan::{BLOCK, Layout};

/// Declares a struct as C lays it out: the fields in order, each at a multiple of its size, so that
/// there is no padding; `launch.h` of the tests has the compiler compare the sizes.
macro_rules! c_struct {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        #[repr(C)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }

        impl Bytes for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
        }
    };
}

/// The bytes a device is sent.
pub(super) trait Bytes {
    fn put(&self, out: &mut Vec<u8>);

    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut out);
        out
    }
}

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Bytes for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_ne_bytes());
            }
        }
    )*};
}
number!(u32, u64, f32, f64);

impl<T: Bytes, const N: usize> Bytes for [T; N] {
    fn put(&self, out: &mut Vec<u8>) {
        self[..].put(out);
    }
}

impl<T: Bytes> Bytes for [T] {
    fn put(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|x| x.put(out));
    }
}

c_struct! {
    /// A tensor of the step; addresses are 0 where there is nothing.
    Tensor {
        grad: u64, weight: u64, master: u64, slot: [u64; 3], ema: u64,
        count: u64, cols: u64, first: u64, row: u64,
        group: u32, grad_type: u32, clear: u32, project: u32, ema_decay: f32, unused: u32,
    }
}

c_struct! {
    /// The `index`-th stretch of a tensor.
    Chunk { tensor: u32, index: u32, }
}

c_struct! {
    /// A group's hyper-parameters, and its own clip.
    Group { h: [f64; 12], max: f64, own_clip: u32, maximize: u32, }
}

c_struct! {
    /// How far a tensor is.
    Progress { step: u64, scale: f32, limit: f32, projected: u32, unused: u32, }
}

c_struct! {
    /// Adds up to 32 neighbours of `order[from..]` into value `to`.
    Fold { from: u32, count: u32, to: u32, }
}

c_struct! {
    /// The half of `Ctl` that the host writes.
    Request {
        max_norm: f64, total_norm: f64, total_norm_at: u64, growth: f64, backoff: f64, interval: f64,
        min_scale: f32, limit: f32, grad_scale: f32,
        scaled: u32, known: u32, check: u32, unit: u32, unused: u32,
    }
}

c_struct! {
    /// The half of `Ctl` that the device writes.
    Answer {
        norm: f64, tracker: u64, skipped: u64,
        loss_scale: f32, at_floor: u32, skip: u32, bad: u32, arrived: u32, more: u32,
    }
}

c_struct! {
    /// The argument of every kernel.
    Job {
        tensor: u64, chunk: u64, group: u64, progress: u64, ctl: u64, found_inf: u64, sum: u64,
        arrived: u64, factor: u64, order: u64, fold: u64, level: u64,
        chunks: u32, tensors: u32, groups: u32, levels: u32, first: u32, share: f32,
    }
}

impl Answer {
    /// Where the growth tracker is in `Ctl`.
    pub(super) const TRACKER: usize = size_of::<Request>() + 8;
    /// Where the loss scale is in `Ctl`.
    pub(super) const LOSS_SCALE: usize = size_of::<Request>() + 24;
    /// Where it is noted that a gradient was not finite.
    pub(super) const BAD: usize = size_of::<Request>() + 36;

    /// Reads what [`Bytes::bytes`] writes.
    pub(super) fn from_bytes(bytes: &[u8; size_of::<Self>()]) -> Self {
        let (words, _) = bytes.as_chunks::<4>();
        let word = |at: usize| u32::from_ne_bytes(words[at]);
        let (pairs, _) = bytes.as_chunks::<8>();
        let pair = |at: usize| u64::from_ne_bytes(pairs[at]);
        Self {
            norm: f64::from_bits(pair(0)),
            tracker: pair(1),
            skipped: pair(2),
            loss_scale: f32::from_bits(word(6)),
            at_floor: word(7),
            skip: word(8),
            bad: word(9),
            arrived: word(10),
            more: word(11),
        }
    }
}

/// Types that a kernel is compiled for, and whether the weight has a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Types {
    pub(super) grad: u32,
    pub(super) weight: u32,
    pub(super) master: bool,
}

/// Elements whose sum one warp takes: `SPAN` of `device.h`.
pub(super) const SPAN: usize = 16 * BLOCK;

/// A tensor as the tables are made from it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) group: usize,
    /// Tensors of one class are swept in one launch.
    pub(super) class: usize,
}

/// The tensors of one launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Class {
    pub(super) members: Vec<u32>,
    pub(super) sweep: Vec<Chunk>,
    /// Of the first of two sweeps.
    pub(super) observe: Vec<Chunk>,
    pub(super) rows: u64,
}

/// All lists of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// By number of the class.
    pub(super) classes: Vec<Class>,
    /// By tensor: its first chunk of `observe`, its first row.
    pub(super) places: Vec<(u64, u64)>,
    pub(super) look: Vec<Chunk>,
    pub(super) order: Vec<u32>,
    pub(super) folds: Vec<Fold>,
    /// Where each level of folds begins, and where the last ends.
    pub(super) levels: Vec<u32>,
    /// Values that the folds need room for.
    pub(super) values: u32,
}

impl Plan {
    /// `by_rows`: whether the rule's sums are of rows. `sweeps`: of each class, the elements that a warp sweeps
    /// at a time.
    pub(super) fn new(shapes: &[Shape], groups: usize, by_rows: bool, sweeps: &[usize]) -> Self {
        let mut plan = Self::default();
        plan.classes.resize(sweeps.len(), Class::default());
        for (at, shape) in shapes.iter().enumerate() {
            let tensor = at as u32;
            let class = &mut plan.classes[shape.class];
            plan.places.push((class.observe.len() as u64, class.rows));
            plan.look.extend(chunks(tensor, Layout::new(shape.count, 0), SPAN));
            if shape.count > 0 {
                let layout = Layout::new(shape.count, if by_rows { shape.rows } else { 0 });
                class.members.push(tensor);
                class.sweep.extend(chunks(tensor, layout, sweeps[shape.class]));
                class.observe.extend(chunks(tensor, layout, SPAN));
                class.rows += (layout.count() / layout.cols()) as u64;
            }
        }
        plan.draw_folds(shapes, groups);
        plan
    }

    /// Of each of `tensors`, its chunks of `look`.
    pub(super) fn look_chunks(&self, tensors: usize) -> Vec<Range<u32>> {
        let mut rest = self.look.chunk_by(|a, b| a.tensor == b.tensor).peekable();
        let mut end = 0;
        let chunks = |tensor| {
            let own = rest.next_if(|chunks| chunks[0].tensor == tensor as u32);
            let start = end;
            end += own.map_or(0, <[_]>::len) as u32;
            start..end
        };
        (0..tensors).map(chunks).collect()
    }

    /// Values: a sum for each tensor, that of all, one for each group; then one for each chunk of
    /// `look`, which kernels fold to their tensor's by themselves; then whatever lies between.
    fn draw_folds(&mut self, shapes: &[Shape], groups: usize) {
        let (tensors, groups) = (shapes.len() as u32, groups as u32);
        self.values = tensors + 1 + groups + self.look.len() as u32;
        let mut levels: Vec<Vec<(Vec<u32>, u32)>> = Vec::new();
        fold((0..tensors).collect(), tensors, &mut levels, &mut self.values);
        for group in 0..groups {
            let of =
                |(at, shape): (usize, &Shape)| (shape.group == group as usize).then_some(at as u32);
            let members = shapes.iter().enumerate().filter_map(of).collect();
            fold(members, tensors + 1 + group, &mut levels, &mut self.values);
        }
        for level in levels {
            self.levels.push(self.folds.len() as u32);
            for (parts, to) in level {
                let (from, count) = (self.order.len() as u32, parts.len() as u32);
                self.folds.push(Fold { from, count, to });
                self.order.extend(parts);
            }
        }
        self.levels.push(self.folds.len() as u32);
    }
}

/// A tensor's stretches of at most `size` elements, none of which lies in two rows.
pub(super) fn chunks(tensor: u32, layout: Layout, size: usize) -> impl Iterator<Item = Chunk> {
    let per_row = layout.cols().div_ceil(size);
    let rows = layout.count().checked_div(layout.cols()).unwrap_or(0);
    let chunks = u32::try_from(rows * per_row).expect("a tensor has fewer than 2^32 chunks");
    (0..chunks).map(move |index| Chunk { tensor, index })
}

/// Adds the tree of neighbours over values `parts`, 32 at a time, which ends in value `to`.
fn fold(mut parts: Vec<u32>, to: u32, levels: &mut Vec<Vec<(Vec<u32>, u32)>>, values: &mut u32) {
    let mut level = 0;
    while !parts.is_empty() {
        if levels.len() == level {
            levels.push(Vec::new());
        }
        let last = parts.len() <= 32;
        let mut sums = Vec::new();
        for some in parts.chunks(32) {
            let sum = if last { to } else { *values };
            *values += u32::from(!last);
            levels[level].push((some.to_vec(), sum));
            sums.push(sum);
        }
        parts = if last { Vec::new() } else { sums };
        level += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cpu::sum::tree;

    proptest! {
        #[test]
        fn folds_are_the_tree_of_the_cpu(
            counts in prop::collection::vec((0..3_usize, 0..40_000_usize), 1..3000),
        ) {
            let shape = |&(group, count): &(usize, usize)| Shape { count, rows: 0, group, class: 0 };
            let shapes: Vec<Shape> = counts.iter().map(shape).collect();
            let plan = Plan::new(&shapes, 3, false, &[4096]);
            let mut values = vec![0.0; plan.values as usize];
            let mut sums: Vec<f64> = (0..shapes.len()).map(|t| 1.0 / (1 + t) as f64).collect();
            values[..sums.len()].copy_from_slice(&sums);
            for level in plan.levels.windows(2) {
                for f in &plan.folds[level[0] as usize..level[1] as usize] {
                    let from = &plan.order[f.from as usize..][..f.count as usize];
                    let mut lanes: Vec<f64> = from.iter().map(|i| values[*i as usize]).collect();
                    lanes.resize(32, 0.0);
                    values[f.to as usize] = tree(&mut lanes, |a, b| a + b).unwrap();
                }
            }
            for group in 0..3 {
                let of = shapes.iter().zip(&sums).filter(|(shape, _)| shape.group == group);
                let mut of: Vec<f64> = of.map(|(_, sum)| *sum).collect();
                let sum = tree(&mut of, |a, b| a + b).unwrap_or(0.0);
                prop_assert_eq!(values[sums.len() + 1 + group], sum);
            }
            let total = tree(&mut sums, |a, b| a + b).unwrap();
            prop_assert_eq!(values[shapes.len()], total);
        }
    }

    #[test]
    fn structs_have_no_padding() {
        // The numbers of `launch.h`.
        let sizes = [
            (Tensor::default().bytes().len(), size_of::<Tensor>(), 112),
            (Chunk::default().bytes().len(), size_of::<Chunk>(), 8),
            (Group::default().bytes().len(), size_of::<Group>(), 112),
            (Progress::default().bytes().len(), size_of::<Progress>(), 24),
            (Fold::default().bytes().len(), size_of::<Fold>(), 12),
            (Request::default().bytes().len(), size_of::<Request>(), 80),
            (Answer::default().bytes().len(), size_of::<Answer>(), 48),
            (Job::default().bytes().len(), size_of::<Job>(), 120),
        ];
        assert!(sizes.iter().all(|(bytes, size, c)| bytes == size && size == c), "{sizes:?}");
    }

    #[test]
    fn answers_are_read_as_they_are_written() {
        let answer = Answer {
            norm: 1.5,
            tracker: 2,
            skipped: 3,
            loss_scale: 4.5,
            at_floor: 5,
            skip: 6,
            bad: 7,
            arrived: 8,
            more: 9,
        };
        let bytes: [u8; size_of::<Answer>()] = answer.bytes().try_into().unwrap();
        assert_eq!(Answer::from_bytes(&bytes), answer);
    }
}
