//! The arguments of kernels as plain data: the structs of `optim.cu`, and the division of tensors
//! into chunks and trees of sums. No device is used here.

use std::mem::offset_of;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::cpu::plan::{BLOCK, Layout};

/// Declares a struct with the layout of C, which the compiler checks to be without padding.
/// `launch.h` of the tests checks the sizes in C++.
macro_rules! c_struct {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
        #[repr(C)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }
    };
}

c_struct! {
    /// A tensor of the step. An address is 0 if there is no such vector.
    Tensor {
        grad: u64, weight: u64, master: u64, slot: [u64; 3], ema: u64,
        count: u64, cols: u64, first: u64, row: u64,
        group: u32, grad_type: u32, clear: u32, project: u32, ema_decay: f32, unused: u32,
    }
}

c_struct! {
    /// The `index`-th chunk of a tensor.
    Chunk { tensor: u32, index: u32, }
}

c_struct! {
    /// A group's hyper-parameters, and the clipping by its rule.
    Group { h: [f64; 12], max: f64, own_clip: u32, maximize: u32, }
}

c_struct! {
    /// A tensor's step count, and numbers of the current step.
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
    DeviceStatus {
        norm: f64, tracker: u64, skipped: u64,
        loss_scale: f32, at_floor: u32, skip: u32, nonfinite: u32, arrived: u32, padding: u32,
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

impl DeviceStatus {
    /// Offset of the growth tracker in `Ctl`.
    pub(super) const TRACKER: usize = size_of::<Request>() + offset_of!(Self, tracker);
    /// Offset of the loss scale in `Ctl`.
    pub(super) const LOSS_SCALE: usize = size_of::<Request>() + offset_of!(Self, loss_scale);
    /// Offset of `nonfinite` in `Ctl`.
    pub(super) const NONFINITE: usize = size_of::<Request>() + offset_of!(Self, nonfinite);
}

/// The types that a kernel is compiled for, by number, and whether the weight has a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Types {
    pub(super) grad: u32,
    pub(super) weight: u32,
    pub(super) master: bool,
}

/// Number of elements that one warp sums: `SPAN` of `device.h`.
pub(super) const SPAN: usize = 16 * BLOCK;

/// The properties of a tensor on which the plan depends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) group: usize,
    /// Index of the class: tensors that are updated in one launch.
    pub(super) class: usize,
}

/// The tensors of one launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Class {
    pub(super) members: Vec<u32>,
    pub(super) sweep: Vec<Chunk>,
    /// Chunks of the first of two sweeps.
    pub(super) first_sweep: Vec<Chunk>,
    pub(super) rows: u64,
}

/// The lists of chunks and sums of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// By index of the class.
    pub(super) classes: Vec<Class>,
    /// By tensor: index of its first chunk of `first_sweep` and of its first row, in its class.
    pub(super) offsets: Vec<(u64, u64)>,
    /// Chunks of gradients for statistics.
    pub(super) stats: Vec<Chunk>,
    pub(super) order: Vec<u32>,
    pub(super) folds: Vec<Fold>,
    /// Start of each level in `folds`, then the end of the last.
    pub(super) levels: Vec<u32>,
    /// Number of values of the folds.
    pub(super) values: u32,
}

impl Plan {
    /// `by_rows`: whether the rule has sums per row. `sweeps`: for each class, the number of
    /// elements that a warp updates at a time.
    pub(super) fn new(shapes: &[Shape], groups: usize, by_rows: bool, sweeps: &[usize]) -> Self {
        let mut plan = Self::default();
        plan.classes.resize(sweeps.len(), Class::default());
        for (at, shape) in shapes.iter().enumerate() {
            let tensor = at as u32;
            let class = &mut plan.classes[shape.class];
            plan.offsets.push((class.first_sweep.len() as u64, class.rows));
            plan.stats.extend(chunks(tensor, Layout::new(shape.count, 0), SPAN));
            if shape.count > 0 {
                let layout = Layout::new(shape.count, if by_rows { shape.rows } else { 0 });
                class.members.push(tensor);
                class.sweep.extend(chunks(tensor, layout, sweeps[shape.class]));
                class.first_sweep.extend(chunks(tensor, layout, SPAN));
                class.rows += (layout.count() / layout.cols()) as u64;
            }
        }
        plan.plan_folds(shapes, groups);
        plan
    }

    /// Range of each tensor's chunks in `stats`.
    pub(super) fn stats_chunks(&self, tensors: usize) -> Vec<Range<u32>> {
        let mut rest = self.stats.chunk_by(|a, b| a.tensor == b.tensor).peekable();
        let mut end = 0;
        let chunks = |tensor| {
            let own = rest.next_if(|chunks| chunks[0].tensor == tensor as u32);
            let start = end;
            end += own.map_or(0, <[_]>::len) as u32;
            start..end
        };
        (0..tensors).map(chunks).collect()
    }

    /// Plans the sums of tensors. The values are: a sum of each tensor, of all, and of each group;
    /// sums of the chunks of `stats`, which the kernels add to their tensor's sum; intermediate
    /// sums.
    fn plan_folds(&mut self, shapes: &[Shape], groups: usize) {
        let (tensors, groups) = (shapes.len() as u32, groups as u32);
        self.values = tensors + 1 + groups + self.stats.len() as u32;
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

/// Chunks of a tensor of at most `size` elements, none of which crosses rows.
pub(super) fn chunks(tensor: u32, layout: Layout, size: usize) -> impl Iterator<Item = Chunk> {
    let per_row = layout.cols().div_ceil(size);
    let rows = layout.count().checked_div(layout.cols()).unwrap_or(0);
    let chunks = u32::try_from(rows * per_row).expect("a tensor has fewer than 2^32 chunks");
    (0..chunks).map(move |index| Chunk { tensor, index })
}

/// Plans the pairwise sum of values `parts` into value `to`, 32 neighbours at a time.
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
        fn folds_equal_the_sums_of_the_cpu(
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
    fn sizes_are_those_in_the_header() {
        let sizes = [
            (size_of::<Tensor>(), 112),
            (size_of::<Chunk>(), 8),
            (size_of::<Group>(), 112),
            (size_of::<Progress>(), 24),
            (size_of::<Fold>(), 12),
            (size_of::<Request>(), 80),
            (size_of::<DeviceStatus>(), 48),
            (size_of::<Job>(), 120),
        ];
        assert!(sizes.iter().all(|(size, c)| size == c), "{sizes:?}");
    }
}
