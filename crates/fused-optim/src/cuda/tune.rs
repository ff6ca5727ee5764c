//! Which launch is fastest for tensors like these: a search that is made once and kept on disk.
//!
//! How `step` goes through memory changes no bit, only its time, and which way is best differs from device to
//! device, with the tensors' types, and with how many and how large they are. So the candidates are timed on
//! tensors of the same lengths, made for the search and dropped after it; neither weights nor state are touched.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cuda_rt::{Device, Entry};

use super::device::Program;
use super::fused::Fused;
use super::rules::DeviceHyper;
use super::table::Types;
use super::{DType, DeviceParam, DeviceSlice};
use crate::{ParamGroup, Result, StepCtl};

/// How a step's kernels go through memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaunchShape {
    /// Blocks of 256 threads for each multiprocessor, at most.
    pub blocks: u32,
    /// Elements that a warp takes at a time.
    pub sweep: u32,
    /// Elements of each stream that a thread moves at a time; 0 is four, or eight where there are halves.
    pub pack: u32,
}

impl LaunchShape {
    /// Without a search.
    pub(super) const DEFAULT: Self = Self { blocks: 4, sweep: 4096, pack: 0 };

    /// What a search tries.
    pub(super) const ALL: [Self; 18] = {
        let (mut all, mut at) = ([Self::DEFAULT; 18], 0);
        while at < all.len() {
            all[at] = Self {
                blocks: [2, 4, 8][at % 3],
                sweep: [1024, 4096, 16384][at / 3 % 3],
                pack: [4, 8][at / 9],
            };
            at += 1;
        }
        all
    };

    fn to_text(self) -> String {
        format!("{} {} {}", self.blocks, self.sweep, self.pack)
    }

    /// What [`to_text`](Self::to_text) has written, if it is one that a search tries.
    fn from_text(text: &[u8]) -> Option<Self> {
        let all = [Self::DEFAULT].into_iter().chain(Self::ALL);
        all.into_iter().find(|shape| shape.to_text().as_bytes() == text)
    }
}

/// What became of tensors that are stepped in one launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// Types of weight and gradient.
    pub types: (DType, DType),
    /// How they are stepped from now on.
    pub shape: LaunchShape,
    /// What a step took with each candidate; empty if the answer was found on disk.
    pub searched: Vec<(LaunchShape, Duration)>,
}

/// A search.
#[derive(Clone, Debug)]
pub(super) struct Search<'a> {
    pub(super) among: &'a [LaunchShape],
    /// Where answers are kept.
    pub(super) folder: Option<PathBuf>,
}

impl Search<'_> {
    pub(super) fn new() -> Self {
        Self {
            among: &LaunchShape::ALL,
            folder: cuda_rt::cache_folder().map(|all| all.join("launches")),
        }
    }
}

/// Tensors of one form and types, and the group of the first of them.
type Classes = BTreeMap<(String, Types), (usize, Vec<DeviceParam>)>;

impl<H: DeviceHyper, D: Device> Fused<H, D> {
    /// As [`CudaOptimizer::tune`](super::CudaOptimizer::tune).
    pub(super) fn tune(
        &mut self,
        params: &[DeviceParam],
        search: &Search<'_>,
    ) -> Result<Vec<Tuned>> {
        self.validate(params)?;
        let (mut tuned, mut found) = (Vec::new(), BTreeMap::new());
        for ((form, types), (group, params)) in self.kinds(params) {
            let device = self.device.name()?;
            let like = format!("{device}\n{form} {types:?}\n{}", size_class(&params));
            let entry = (search.folder.clone())
                .map(|folder| Entry::new(folder, Program::SOURCE, &[like], (0, 0)));
            let kept = entry.as_ref().and_then(Entry::read);
            let kept = kept.and_then(|text| LaunchShape::from_text(&text));
            let searched = match kept {
                Some(_) => Vec::new(),
                None => self.search(group, (&form, types), &params, search.among)?,
            };
            let shape = kept.unwrap_or_else(|| best(&searched));
            if let (None, Some(entry)) = (kept, entry) {
                entry.write(shape.to_text().as_bytes());
            }
            found.insert((form, types), shape);
            let DeviceParam { weight, grad, .. } = params[0];
            let types = (weight.dtype, grad.map_or(weight.dtype, |grad| grad.dtype));
            tuned.push(Tuned { types, shape, searched });
        }
        self.unbind()?;
        self.launch_shapes.extend(found);
        Ok(tuned)
    }

    /// The classes of tensors, a missing gradient being of the weight's type.
    fn kinds(&self, params: &[DeviceParam]) -> Classes {
        let mut kinds = Classes::new();
        for (index, group) in self.core.members() {
            let param = &params[index];
            let DeviceSlice { len, dtype, .. } = param.weight;
            if len == 0 {
                continue;
            }
            let types = Types {
                grad: param.grad.map_or(dtype, |grad| grad.dtype).number(),
                weight: dtype.number(),
                master: self.wants_master(dtype),
            };
            let form = self.core.groups()[group].hyper.form();
            kinds.entry((form, types)).or_insert((group, Vec::new())).1.push(*param);
        }
        kinds
    }

    /// What a step of tensors like these takes with each candidate.
    fn search(
        &self,
        group: usize,
        class: (&str, Types),
        params: &[DeviceParam],
        among: &[LaunchShape],
    ) -> Result<Vec<(LaunchShape, Duration)>> {
        let (mut memory, mut alike, mut elements) = (Vec::new(), Vec::new(), 0);
        for param in params {
            let DeviceSlice { len, dtype, .. } = param.weight;
            elements += len;
            if elements > ENOUGH && !alike.is_empty() {
                break;
            }
            let mut lend = |dtype: DType| {
                memory.push(self.device.alloc(len * dtype.size())?);
                let ptr = D::address(&memory[memory.len() - 1]);
                Result::Ok(DeviceSlice { ptr, len, dtype })
            };
            let grad = lend(param.grad.map_or(dtype, |grad| grad.dtype))?;
            alike.push(DeviceParam {
                rows: param.rows,
                ..DeviceParam::new(lend(dtype)?, Some(grad))
            });
        }
        let hyper = self.core.groups()[group].hyper.clone();
        let groups = [ParamGroup::new(hyper, 0..alike.len())];
        let mut twin = Self::new(self.device.clone(), groups, self.core.half_weights)?;
        let mut times = vec![Duration::MAX; among.len()];
        for _ in 0..ROUNDS {
            for (shape, best) in among.iter().zip(&mut times) {
                twin.launch_shapes.insert((class.0.into(), class.1), *shape);
                twin.unbind()?;
                // SAFETY: `memory` is so long, nobody else's, and lives longer than `twin` uses it: `status`
                // waits for the stream.
                #[expect(unsafe_code, reason = "an address is only a number")]
                unsafe { twin.bind(&alike) }?;
                *best = (*best).min(twin.time_of_a_step()?);
            }
        }
        Ok(among.iter().copied().zip(times).collect())
    }

    /// Of some steps after one that does not count.
    fn time_of_a_step(&mut self) -> Result<Duration> {
        let mut run = |steps: u32| {
            let start = Instant::now();
            for _ in 0..steps {
                // SAFETY: what is bound is there until `search` returns.
                #[expect(unsafe_code, reason = "kernels write where `bind` was told")]
                unsafe { self.step(&StepCtl::PLAIN, 0) }?;
            }
            self.status().map(|_| start.elapsed() / steps)
        };
        run(1)?;
        run(STEPS)
    }
}

fn best(searched: &[(LaunchShape, Duration)]) -> LaunchShape {
    let fastest = searched.iter().min_by_key(|(_, time)| *time);
    fastest.map_or(LaunchShape::DEFAULT, |(shape, _)| *shape)
}

/// Tensors between which no search is expected to differ: how many there are and of how many elements
/// together, each as a power of two.
fn size_class(params: &[DeviceParam]) -> String {
    let elements: usize = params.iter().map(|param| param.weight.len).sum();
    format!("2^{} tensors of 2^{} elements", params.len().ilog2(), elements.ilog2())
}

/// Elements of a search: more fit no cache either.
const ENOUGH: usize = 32 << 20;
const ROUNDS: usize = 3;
const STEPS: u32 = 8;
