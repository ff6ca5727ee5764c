//! [`Averaged`]: any optimizer, with an average of the weights for evaluation.

use std::collections::BTreeMap;

use crate::core::check_len;
use crate::error::{format as format_error, invalid};
use crate::layout::{ReadState, StateLayout, VisitState};
use crate::{
    Applied, Ema, Error, Grad, HyperParam, Optimizer, ParamMut, ParamSpec, Result, Slice,
    StateDict, StepCtl,
};

/// Weight of the past in an average of weights, see [`Averaged`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightAverage {
    /// Exponential moving average: `average ← decay·average + (1 − decay)·weight` after each step.
    /// It begins with the weights after the first step.
    Ema {
        /// In `0 ..= 1`; 0.999 is usual.
        decay: f64,
    },
    /// Stochastic weight averaging: the mean of the weights after each step from the one with this
    /// number on, counted from 1; before it, the weights themselves. For up to about a million
    /// steps: a new weight's share is rounded to 24 bits.
    Swa {
        /// First step of the mean.
        start: u64,
    },
}

impl WeightAverage {
    /// Weight of the past after step `step` of a tensor, counted from 1.
    fn decay(self, step: u64) -> f32 {
        match self {
            Self::Ema { .. } if step <= 1 => 0.0,
            Self::Ema { decay } => decay as f32,
            Self::Swa { start } => {
                let before = step.saturating_sub(start.max(1)) as f64;
                (before / (before + 1.0)) as f32
            }
        }
    }
}

/// An optimizer on the CPU that also averages the weights. Evaluation uses the averages
/// ([`eval_weights`](Optimizer::eval_weights)), training does not. They are updated in the sweep of
/// the step, in f32, from the f32 masters of half weights; a skipped step does not change them.
/// They are saved with the state, as `weight_average`. An EMA can be added to a state without
/// averages: it begins at the next step.
///
/// ```
/// use fused_optim::{Averaged, Optimizer, ParamMut, Sgd, SgdHyper, Slice, StepCtl, WeightAverage};
///
/// let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1)?;
/// let mut optimizer = Averaged::new(sgd, WeightAverage::Ema { decay: 0.5 })?;
/// let (mut weight, mut average) = ([4.0_f32], [0.0]);
/// for grad in [[2.0_f32], [2.0]] {
///     let mut params = [ParamMut::new(&mut weight[..], Some(Slice::F32(&grad)))];
///     let _ = optimizer.step(&mut params, &StepCtl::default())?;
/// }
/// optimizer.eval_weights(0, Slice::F32(&weight), &mut average)?;
/// assert_eq!((weight, average), ([2.0], [2.5]));
/// # Ok::<(), fused_optim::Error>(())
/// ```
#[derive(Debug)]
pub struct Averaged<O> {
    optimizer: O,
    rule: WeightAverage,
    averages: BTreeMap<usize, Average>,
    /// Shapes by tensor index, if known.
    specs: Vec<ParamSpec>,
}

/// The average of a tensor.
#[derive(Clone, Debug, Default)]
struct Average {
    values: Vec<f32>,
    /// Steps that the tensor has taken.
    step: u64,
}

impl<O: Optimizer> Averaged<O> {
    /// Adds an average to an optimizer.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidHyper`] for a decay outside of `0 ..= 1`; [`Error::Unsupported`] for an
    /// optimizer that [evaluates other weights](Optimizer::has_eval_weights) already, or steps on a
    /// device.
    pub fn new(mut optimizer: O, rule: WeightAverage) -> Result<Self> {
        if let WeightAverage::Ema { decay } = rule
            && !(0.0..=1.0).contains(&decay)
        {
            return Err(Error::InvalidHyper { name: "decay", value: decay });
        }
        if optimizer.has_eval_weights() {
            let what = "an average of the weights of an optimizer that evaluates averages";
            return Err(Error::Unsupported { what });
        }
        if optimizer.as_device().is_some() {
            return Err(Error::Unsupported { what: "an average of weights on a device" });
        }
        Ok(Self { optimizer, rule, averages: BTreeMap::new(), specs: Vec::new() })
    }

    /// The optimizer without the average.
    pub const fn optimizer(&self) -> &O {
        &self.optimizer
    }

    /// Returns the layout without averages, and the averages, empty, by their index.
    fn split(&self, saved: &StateLayout) -> Result<(StateLayout, BTreeMap<usize, Average>)> {
        let (mut layout, mut averages) = (saved.clone(), BTreeMap::new());
        for (index, state) in &mut layout.state {
            let key = || format!("state.{index}.{NAME}");
            let Some(len) = state.tensors.remove(NAME) else {
                if matches!(self.rule, WeightAverage::Swa { .. }) {
                    let reason = "it is missing: the mean is that of all steps, so it has to begin with the run";
                    return Err(invalid(key(), reason));
                }
                continue;
            };
            let others = state.tensors.values().copied().max();
            let spec = saved.params.get(index).or_else(|| self.specs.get(*index));
            let shape = spec.and_then(|spec| spec.shape.as_ref());
            let known = shape.map(|shape| shape.iter().product()).or(others);
            if known.is_some_and(|known| known != len) {
                return Err(invalid(key(), format!("it has {len} elements")));
            }
            averages.insert(*index, Average { values: vec![0.0; len], step: state.step });
        }
        Ok((layout, averages))
    }
}

/// An error for a rule that has a vector of the average's name.
fn taken(index: usize) -> Error {
    invalid(format!("state.{index}.{NAME}"), "the optimizer has a vector of this name")
}

/// Name of the average in a state.
const NAME: &str = "weight_average";

impl<O: Optimizer> Optimizer for Averaged<O> {
    fn kind(&self) -> &'static str {
        self.optimizer.kind()
    }

    fn step(&mut self, params: &mut [ParamMut<'_>], ctl: &StepCtl) -> Result<Applied> {
        let mut averages = std::mem::take(&mut self.averages);
        for (index, param) in params.iter().enumerate().filter(|(_, param)| param.grad.is_some()) {
            let Average { values, step } = averages.entry(index).or_default();
            if *step == 0 {
                values.resize(param.weight.len(), 0.0);
            }
        }
        let mut all = Vec::with_capacity(params.len());
        let mut rest = averages.iter_mut().peekable();
        for (index, param) in params.iter_mut().enumerate() {
            let average = rest.next_if(|(of, _)| **of == index).map(|(_, average)| average);
            let grad = param.grad.as_mut().map(|grad| match grad {
                Grad::Keep(grad) => Grad::Keep(*grad),
                Grad::Clear(grad) => Grad::Clear(grad.reborrow()),
            });
            let ema = average
                .filter(|_| grad.is_some())
                .map(|Average { values, step }| Ema { values, decay: self.rule.decay(*step + 1) });
            all.push(ParamMut { weight: param.weight.reborrow(), grad, rows: param.rows, ema });
        }
        let applied = self.optimizer.step(&mut all, ctl);
        drop(all);
        if matches!(applied, Ok(Applied::Applied)) {
            let has_grad = |index: &usize| params[*index].grad.is_some();
            let stepped = averages.iter_mut().filter(|(index, _)| has_grad(index));
            stepped.for_each(|(_, average)| average.step += 1);
        }
        if averages.values().any(|average| average.step == 1) {
            // Tensors in no group are not updated, and have no state.
            let known = self.optimizer.state_layout()?.state;
            averages.retain(|index, _| known.contains_key(index));
        }
        averages.retain(|_, average| average.step > 0);
        self.averages = averages;
        applied
    }

    fn state_dict(&self) -> Result<StateDict> {
        let mut dict = self.optimizer.state_dict()?;
        for (index, Average { values, .. }) in &self.averages {
            if let Some(state) = dict.state.get_mut(index)
                && state.tensors.insert(NAME.to_owned(), values.clone()).is_some()
            {
                return Err(taken(*index));
            }
        }
        Ok(dict)
    }

    fn set_param_names(&mut self, params: &[ParamSpec]) -> Result<()> {
        self.optimizer.set_param_names(params)?;
        self.specs = params.to_vec();
        Ok(())
    }

    fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        let read = &mut |index: usize, name: &str, values: &mut [f32]| {
            values.copy_from_slice(&dict.state[&index].tensors[name]);
            Ok(())
        };
        let saved = dict.layout();
        self.check_state(&saved)?;
        self.load_state(&saved, read)
    }

    fn state_layout(&self) -> Result<StateLayout> {
        let mut layout = self.optimizer.state_layout()?;
        for (index, Average { values, .. }) in &self.averages {
            if let Some(state) = layout.state.get_mut(index)
                && state.tensors.insert(NAME.to_owned(), values.len()).is_some()
            {
                return Err(taken(*index));
            }
        }
        Ok(layout)
    }

    fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        // In the order of a layout: by the tensor, then by the name.
        let mut rest = self.averages.iter().peekable();
        self.optimizer.visit_state(&mut |index, name, values| {
            let is_before = |of: usize| (of, NAME) < (index, name);
            while let Some((of, average)) = rest.next_if(|(of, _)| is_before(**of)) {
                visit(*of, NAME, &average.values)?;
            }
            visit(index, name, values)
        })?;
        let mut rest = rest.map(|(of, average)| visit(*of, NAME, &average.values));
        rest.try_for_each(|visited| visited).map_err(format_error("write the state"))
    }

    fn check_state(&mut self, saved: &StateLayout) -> Result<()> {
        let (layout, _) = self.split(saved)?;
        self.optimizer.check_state(&layout)
    }

    fn load_state(&mut self, saved: &StateLayout, read: &mut ReadState<'_>) -> Result<()> {
        let (layout, mut averages) = self.split(saved)?;
        self.optimizer.load_state(&layout, read)?;
        for (index, Average { values, .. }) in &mut averages {
            read(*index, NAME, values).map_err(format_error("read the state"))?;
        }
        // By their names in this optimizer, if both have some.
        let own = |saved_index: usize| {
            let name = &saved.params.get(&saved_index)?.name;
            self.specs.iter().position(|spec| spec.name == *name)
        };
        let averages = averages.into_iter();
        self.averages =
            averages.map(|(index, average)| (own(index).unwrap_or(index), average)).collect();
        Ok(())
    }

    fn group_count(&self) -> usize {
        self.optimizer.group_count()
    }

    fn hyper_param(&self, group: usize, param: HyperParam) -> Result<Option<f64>> {
        self.optimizer.hyper_param(group, param)
    }

    fn set_hyper_param(&mut self, group: usize, param: HyperParam, value: f64) -> Result<()> {
        self.optimizer.set_hyper_param(group, param, value)
    }

    fn has_eval_weights(&self) -> bool {
        true
    }

    fn eval_weights(&self, index: usize, weight: Slice<'_>, output: &mut [f32]) -> Result<()> {
        let Some(Average { values, .. }) = self.averages.get(&index) else {
            return self.optimizer.eval_weights(index, weight, output);
        };
        check_len(index, "evaluation weight", values.len(), output.len())?;
        output.copy_from_slice(values);
        Ok(())
    }

    fn refresh_masters(&mut self) -> Result<()> {
        self.optimizer.refresh_masters()
    }

    fn set_threads(&mut self, threads: usize) {
        self.optimizer.set_threads(threads);
    }

    fn grad_norm(&self) -> Option<f64> {
        self.optimizer.grad_norm()
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::{AdamW, AdamWHyper, ParamGroup, ScheduleFreeAdamW, Sgd, SgdHyper, SliceMut};

    const LENS: [usize; 3] = [5, 33, 1];

    fn adamw(rule: WeightAverage) -> Averaged<AdamW> {
        let groups = [
            ParamGroup::new(AdamWHyper::default(), [0, 2]),
            ParamGroup::new(AdamWHyper::default(), [1]),
        ];
        Averaged::new(AdamW::new(groups).unwrap(), rule).unwrap()
    }

    fn grads(step: usize) -> Vec<Vec<f32>> {
        let value = |tensor: usize, i: usize| ((step * 31 + tensor * 7 + i) as f32 * 0.37).sin();
        let tensors = LENS.iter().enumerate();
        tensors.map(|(tensor, len)| (0..*len).map(|i| value(tensor, i)).collect()).collect()
    }

    /// Steps of an optimizer; the second tensor has no gradient in the odd ones, the third one of
    /// step 4 is not finite. Returns the weights after each step.
    fn run(
        optimizer: &mut impl Optimizer,
        weights: &mut [Vec<f32>],
        steps: std::ops::Range<usize>,
    ) -> Vec<Vec<Vec<f32>>> {
        let ctl = StepCtl { found_inf: crate::FoundInf::Check, ..StepCtl::default() };
        let mut all = Vec::new();
        for step in steps {
            let mut grads = grads(step);
            if step == 4 {
                grads[2][0] = f32::NAN;
            }
            let mut params: Vec<_> = (weights.iter_mut().zip(&grads).enumerate())
                .map(|(index, (weight, grad))| {
                    let grad = (index != 1 || step % 2 == 0).then_some(Slice::F32(grad));
                    ParamMut::new(&mut weight[..], grad)
                })
                .collect();
            let applied = optimizer.step(&mut params, &ctl).unwrap();
            assert_eq!(applied == Applied::SkippedNonFinite, step == 4);
            all.push(weights.to_vec());
        }
        all
    }

    fn start() -> Vec<Vec<f32>> {
        LENS.iter().map(|len| vec![0.5; *len]).collect()
    }

    fn averages(optimizer: &impl Optimizer, weights: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let average = |(index, weight): (usize, &Vec<f32>)| {
            let mut values = vec![0.0; weight.len()];
            optimizer.eval_weights(index, Slice::F32(weight), &mut values).unwrap();
            values
        };
        weights.iter().enumerate().map(average).collect()
    }

    #[test]
    fn averages_are_those_of_the_weights_after_each_step() {
        for rule in [WeightAverage::Ema { decay: 0.75 }, WeightAverage::Swa { start: 3 }] {
            let (mut plain, mut weights) = (start(), start());
            let mut optimizer = adamw(rule);
            let all = run(&mut optimizer, &mut weights, 0..8);
            // Training does not change.
            let mut without = AdamW::new([
                ParamGroup::new(AdamWHyper::default(), [0, 2]),
                ParamGroup::new(AdamWHyper::default(), [1]),
            ])
            .unwrap();
            assert_eq!(run(&mut without, &mut plain, 0..8), all);
            let found = averages(&optimizer, &weights);
            for (tensor, found) in found.iter().enumerate() {
                let steps = (0..8).filter(|step| *step != 4 && (tensor != 1 || step % 2 == 0));
                let taken: Vec<_> = steps.map(|step| &all[step][tensor]).collect();
                for (i, found) in found.iter().enumerate() {
                    let mut expected = f64::from(taken[0][i]);
                    for (index, weights) in taken.iter().enumerate().skip(1) {
                        let weight = f64::from(weights[i]);
                        expected = match rule {
                            WeightAverage::Ema { decay } => {
                                decay * expected + (1.0 - decay) * weight
                            }
                            WeightAverage::Swa { .. } if index < 3 => weight,
                            WeightAverage::Swa { .. } => {
                                let count = (index - 1) as f64;
                                expected + (weight - expected) / count
                            }
                        };
                    }
                    if let WeightAverage::Swa { .. } = rule {
                        let mean = taken[2..].iter().map(|all| f64::from(all[i])).sum::<f64>();
                        expected = mean / (taken.len() - 2) as f64;
                    }
                    assert!((expected - f64::from(*found)).abs() < 1e-6, "{rule:?} {tensor} {i}");
                }
            }
        }
    }

    #[test]
    fn state_with_averages_resumes_with_the_same_bits() {
        for rule in [WeightAverage::Swa { start: 2 }, WeightAverage::Ema { decay: 0.5 }] {
            resumes(rule);
        }
    }

    fn resumes(rule: WeightAverage) {
        let specs: Vec<_> =
            ["a", "b", "c"].iter().zip(LENS).map(|(n, l)| ParamSpec::new(*n, &[l])).collect();
        let named = || {
            let mut optimizer = adamw(rule);
            optimizer.set_param_names(&specs).unwrap();
            optimizer
        };
        let (mut whole, mut weights) = (named(), start());
        run(&mut whole, &mut weights, 0..6);
        let (mut first, mut others) = (named(), start());
        run(&mut first, &mut others, 0..3);
        let dict = first.state_dict().unwrap();
        assert_eq!(dict.layout(), first.state_layout().unwrap());
        let mut visited = Vec::new();
        let visit = &mut |index: usize, name: &str, values: &[f32]| {
            visited.push((index, name.to_owned(), values.to_vec()));
            Ok(())
        };
        first.visit_state(visit).unwrap();
        let vectors = dict.state.iter().flat_map(|(index, state)| {
            let vectors = state.tensors.iter();
            vectors.map(|(name, values)| (*index, name.clone(), values.clone()))
        });
        assert_eq!(visited, vectors.collect::<Vec<_>>());
        let dict = StateDict::from_safetensors(&dict.to_safetensors().unwrap()).unwrap();
        let mut resumed = named();
        resumed.load_state_dict(&dict).unwrap();
        run(&mut resumed, &mut others, 3..6);
        assert_eq!(others, weights);
        assert_eq!(averages(&resumed, &others), averages(&whole, &weights));
        // A state without averages, and one with averages of another length.
        let mut plain = dict.clone();
        plain.state.values_mut().for_each(|state| drop(state.tensors.remove(NAME)));
        let loaded = named().load_state_dict(&plain);
        assert_eq!(loaded.is_ok(), matches!(rule, WeightAverage::Ema { .. }), "{loaded:?}");
        let mut other = dict.clone();
        other.state.get_mut(&0).unwrap().tensors.insert(NAME.to_owned(), vec![0.0; 4]);
        let before = resumed.state_dict().unwrap();
        let error = resumed.load_state_dict(&other).unwrap_err().to_string();
        assert!(error.contains("state.0.weight_average"), "{error}");
        assert_eq!(resumed.state_dict().unwrap(), before);
    }

    #[test]
    fn averages_of_half_weights_are_those_of_their_masters() {
        let sgd = Sgd::with_one_group(SgdHyper { lr: 1e-3, ..SgdHyper::default() }, 1).unwrap();
        let mut optimizer = Averaged::new(sgd, WeightAverage::Ema { decay: 0.5 }).unwrap();
        let mut weight = [bf16::ONE];
        for _ in 0..2 {
            let mut params = [ParamMut::new(SliceMut::Bf16(&mut weight), Some(Slice::F32(&[1.0])))];
            let _ = optimizer.step(&mut params, &StepCtl::default()).unwrap();
        }
        let mut average = [0.0];
        optimizer.eval_weights(0, Slice::Bf16(&weight), &mut average).unwrap();
        assert!((average[0] - 0.9985).abs() < 1e-6, "{average:?}");
    }

    #[test]
    fn tensors_in_no_group_have_no_average() {
        let groups = [ParamGroup::new(AdamWHyper::default(), [0])];
        let rule = WeightAverage::Ema { decay: 0.5 };
        let mut optimizer = Averaged::new(AdamW::new(groups).unwrap(), rule).unwrap();
        let mut weights = vec![vec![0.5; 3], vec![0.25; 2]];
        for _ in 0..2 {
            let (first, rest) = weights.split_at_mut(1);
            let mut params = [
                ParamMut::new(&mut first[0][..], Some(Slice::F32(&[1.0; 3]))),
                ParamMut::new(&mut rest[0][..], Some(Slice::F32(&[1.0; 2]))),
            ];
            let _ = optimizer.step(&mut params, &StepCtl::default()).unwrap();
        }
        assert_eq!(averages(&optimizer, &weights)[1], [0.25, 0.25]);
        assert_eq!(optimizer.state_dict().unwrap().layout(), optimizer.state_layout().unwrap());
    }

    #[test]
    fn decays_out_of_range_and_optimizers_with_averages_are_refused() {
        let sgd = || Sgd::with_one_group(SgdHyper::default(), 1).unwrap();
        for decay in [-0.1, 1.1, f64::NAN] {
            assert!(Averaged::new(sgd(), WeightAverage::Ema { decay }).is_err());
        }
        let rule = WeightAverage::Ema { decay: 0.9 };
        let free = ScheduleFreeAdamW::with_one_group(Default::default(), 1).unwrap();
        assert!(Averaged::new(free, rule).is_err());
        assert!(Averaged::new(Averaged::new(sgd(), rule).unwrap(), rule).is_err());
    }
}
