//! Search for the fastest launch parameters of `step`, cached on disk.
//!
//! Launch parameters change the time of a step and no bit of its result. The fastest ones depend on
//! the device and on types, number and lengths of the tensors. So each candidate is timed on
//! tensors of the same lengths, allocated for the search; weights and state are not touched.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cuda_rt::{Device, Entry};

use super::device::Program;
use super::rules::DeviceHyper;
use super::table::Types;
use super::{CudaOptimizer, DType, DeviceParam, DeviceSlice, LaunchShape, Tuned};
use crate::{ParamGroup, Result, StepCtl};

/// Options of a search.
#[derive(Clone, Debug)]
pub(super) struct Search<'a> {
    pub(super) candidates: &'a [LaunchShape],
    /// Folder of the cache; `None`: no cache.
    pub(super) folder: Option<PathBuf>,
}

impl Search<'_> {
    pub(super) fn new() -> Self {
        Self {
            candidates: &LaunchShape::ALL,
            folder: cuda_rt::cache_folder().map(|all| all.join("launches")),
        }
    }
}

/// Tensors of one rule type and types, and the group of the first.
type Classes = BTreeMap<(String, Types), (usize, Vec<DeviceParam>)>;

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: DeviceHyper, D: Device> CudaOptimizer<H, D> {
    /// As [`tune`](Self::tune), with options.
    pub(super) fn tune_with(
        &mut self,
        params: &[DeviceParam],
        search: &Search<'_>,
    ) -> Result<Vec<Tuned>> {
        self.validate(params)?;
        let (mut tuned, mut found) = (Vec::new(), BTreeMap::new());
        for ((rule, types), (group, params)) in self.tensors_by_class(params) {
            let device = self.device.name()?;
            let like = format!("{device}\n{rule} {types:?}\n{}", size_class(&params));
            let entry = (search.folder.clone())
                .map(|folder| Entry::new(folder, Program::SOURCE, &[like], (0, 0)));
            let cached = entry.as_ref().and_then(Entry::read);
            let cached = cached.and_then(|text| LaunchShape::from_text(&text));
            let searched = match cached {
                Some(_) => Vec::new(),
                None => self.search(group, (&rule, types), &params, search.candidates)?,
            };
            let shape = cached.unwrap_or_else(|| best(&searched));
            if let (None, Some(entry)) = (cached, entry) {
                entry.write(shape.to_text().as_bytes());
            }
            found.insert((rule, types), shape);
            let DeviceParam { weight, grad, .. } = params[0];
            let types = (weight.dtype, grad.map_or(weight.dtype, |grad| grad.dtype));
            tuned.push(Tuned { types, shape, searched });
        }
        self.unbind()?;
        self.launch_shapes.extend(found);
        Ok(tuned)
    }

    /// The tensors of each class.
    fn tensors_by_class(&self, params: &[DeviceParam]) -> Classes {
        let mut classes = Classes::new();
        for (index, group) in self.core.members() {
            let param = &params[index];
            if param.weight.len > 0 {
                let class = self.class_of(group, param);
                classes.entry(class).or_insert((group, Vec::new())).1.push(*param);
            }
        }
        classes
    }

    /// Time of a step with each candidate, on new tensors of these lengths.
    fn search(
        &self,
        group: usize,
        class: (&str, Types),
        params: &[DeviceParam],
        candidates: &[LaunchShape],
    ) -> Result<Vec<(LaunchShape, Duration)>> {
        let (mut memory, mut tensors, mut elements) = (Vec::new(), Vec::new(), 0);
        for param in params {
            let DeviceSlice { len, dtype, .. } = param.weight;
            elements += len;
            if elements > MAX_ELEMENTS && !tensors.is_empty() {
                break;
            }
            let mut alloc = |dtype: DType| {
                memory.push(self.device.alloc(len * dtype.size())?);
                let ptr = D::address(&memory[memory.len() - 1]);
                Result::Ok(DeviceSlice { ptr, len, dtype })
            };
            let grad = alloc(param.grad.map_or(dtype, |grad| grad.dtype))?;
            tensors.push(DeviceParam {
                rows: param.rows,
                ..DeviceParam::new(alloc(dtype)?, Some(grad))
            });
        }
        let hyper = self.core.groups()[group].hyper.clone();
        let groups = [ParamGroup::new(hyper, 0..tensors.len())];
        let mut twin = Self::new(self.device.clone(), groups, self.core.half_weights)?;
        let mut times = vec![Duration::MAX; candidates.len()];
        for _ in 0..ROUNDS {
            for (shape, best) in candidates.iter().zip(&mut times) {
                twin.launch_shapes.insert((class.0.into(), class.1), *shape);
                twin.unbind()?;
                // SAFETY: `memory` has these lengths, is used by nothing else, and outlives the
                // steps of `twin`: `status` waits for the stream.
                #[expect(unsafe_code, reason = "an address is only a number")]
                unsafe { twin.bind(&tensors) }?;
                *best = (*best).min(twin.time_of_a_step()?);
            }
        }
        Ok(candidates.iter().copied().zip(times).collect())
    }

    /// Average time of a step, after one step to warm up.
    fn time_of_a_step(&mut self) -> Result<Duration> {
        let mut run = |steps: u32| {
            let start = Instant::now();
            for _ in 0..steps {
                // SAFETY: the bound tensors are valid until `search` returns.
                #[expect(unsafe_code, reason = "kernels write the bound tensors")]
                unsafe { self.step(&StepCtl::PLAIN) }?;
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

/// Key of the cache: number of tensors and of all their elements, each rounded down to a power of
/// two.
fn size_class(params: &[DeviceParam]) -> String {
    let elements: usize = params.iter().map(|param| param.weight.len).sum();
    format!("2^{} tensors of 2^{} elements", params.len().ilog2(), elements.ilog2())
}

/// Maximum number of elements of a search, unless one tensor has more: far more than fit the
/// device's cache.
const MAX_ELEMENTS: usize = 32 << 20;
const ROUNDS: usize = 3;
const STEPS: u32 = 8;
