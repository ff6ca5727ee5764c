//! Saving and loading an optimizer's state.
//!
//! Invariant: a saved state is checked as a whole, by its layout, before anything is changed.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Core, Tensor, Tensors, json_of};
use crate::cpu::pages::Pages;
use crate::error::{format, invalid, problem};
use crate::names::{self, Indices, PARAMS};
use crate::param::rows;
use crate::rule::Hyper;
use crate::state::TensorState;
use crate::state_dict::MASTER;
use crate::{
    Error, ParamGroup, ReadState, Result, StateDict, StateLayout, StateProblem, VisitState,
};

impl<H: Hyper> Core<H> {
    pub(crate) fn state_dict(&self) -> StateDict {
        let state = self.states().map(|(index, hyper, state)| (index, state.save(hyper)));
        StateDict { state: state.collect(), ..self.header() }
    }

    /// A state dict without states.
    fn header(&self) -> StateDict {
        let groups = self.groups.iter().map(group_to_json).collect();
        let named = self.tensors.keys().filter_map(|&index| Some((index, self.names.get(index)?)));
        StateDict {
            kind: H::KIND.into(),
            param_groups: Value::Array(groups).to_string(),
            state: BTreeMap::new(),
            params: named.map(|(index, param)| (index, param.clone())).collect(),
        }
    }

    /// State dict with these states, read from a device.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn state_dict_with(
        &self,
        states: impl IntoIterator<Item = (usize, TensorState)>,
    ) -> StateDict {
        let mut core = self.clone();
        for (index, state) in states {
            core.tensors.entry(index).and_modify(|tensor| tensor.state = Some(state));
        }
        core.state_dict()
    }

    pub(crate) fn state_layout(&self) -> StateLayout {
        let StateDict { kind, param_groups, params, .. } = self.header();
        let state = self.states().map(|(index, hyper, state)| (index, state.layout(hyper)));
        StateLayout { kind, param_groups, state: state.collect(), params }
    }

    pub(crate) fn visit_state(&self, visit: &mut VisitState<'_>) -> Result<()> {
        for (index, hyper, state) in self.states() {
            for (name, vector) in state.vectors_of(hyper) {
                visit(index, name, &vector.values()).map_err(format("write the state"))?;
            }
        }
        Ok(())
    }

    /// The states by index, with the hyper-parameters of their groups.
    fn states(&self) -> impl Iterator<Item = (usize, &H, &TensorState)> {
        self.tensors.iter().filter_map(|(&index, tensor)| {
            Some((index, &self.groups[tensor.group].hyper, tensor.state.as_ref()?))
        })
    }

    pub(crate) fn load_state_dict(&mut self, dict: &StateDict) -> Result<()> {
        self.load_state(&dict.layout(), &mut |index, name, values| {
            values.copy_from_slice(&dict.state[&index].tensors[name]);
            Ok(())
        })
    }

    /// As [`Optimizer::check_state`](crate::Optimizer::check_state).
    pub(crate) fn check_state(&self, saved: &StateLayout) -> Result<()> {
        self.checked(saved, |index| self.own_count(index)).map(drop)
    }

    /// As [`Optimizer::load_state`](crate::Optimizer::load_state).
    pub(crate) fn load_state(
        &mut self,
        saved: &StateLayout,
        read: &mut ReadState<'_>,
    ) -> Result<()> {
        let (groups, indices) = self.checked(saved, |index| self.own_count(index))?;
        self.groups = groups;
        let own = std::mem::take(&mut self.tensors);
        // A failed read leaves the tensors not read yet without a state.
        self.tensors = own
            .iter()
            .map(|(index, own)| (*index, Tensor { group: own.group, state: None }))
            .collect();
        let mut pages = self.pages_for(saved, &indices, &own);
        for (index, own) in own {
            let Some(from) = indices.get(&index) else { continue };
            let hyper = &self.groups[own.group].hyper;
            let read = |name: &str, values: &mut [f32]| read(*from, name, values);
            let saved = &saved.state[from];
            let state =
                TensorState::load(saved, hyper, own.state, self.eight_bits, &mut pages, read);
            let state = Some(state.map_err(format("read the state"))?);
            self.tensors.insert(index, Tensor { group: own.group, state });
        }
        Ok(())
    }

    fn own_count(&self, index: usize) -> Option<usize> {
        self.tensors[&index].state.as_ref()?.lengths().next()
    }

    /// Memory for the saved vectors that do not fit a tensor's own state.
    fn pages_for(&self, saved: &StateLayout, indices: &Indices, own: &Tensors) -> Pages {
        let new = indices.iter().filter_map(|(index, from)| {
            let (tensor, saved) = (&own[index], &saved.state[from]);
            let hyper = &self.groups[tensor.group].hyper;
            let fits = tensor.state.as_ref().is_some_and(|own| own.has_layout(saved, hyper));
            (!fits).then_some(saved)
        });
        let room = new.map(|saved| {
            let kept = saved.tensors.iter().filter(|(name, _)| !self.eight_bits || *name == MASTER);
            TensorState::room(kept.map(|(_, count)| *count))
        });
        Pages::new(room.fold(0, usize::saturating_add))
    }

    /// The core after a load, and the states for the device to keep. `known` is the length of a
    /// tensor; `None` where the device does not know it.
    #[cfg(any(feature = "cuda", feature = "npu"))]
    pub(crate) fn load_for_device(
        &self,
        dict: &StateDict,
        known: impl Fn(usize) -> Option<usize>,
    ) -> Result<(Self, BTreeMap<usize, TensorState>)> {
        let layout = dict.layout();
        self.checked(&layout, known)?;
        let mut core = self.clone();
        core.load_state_dict(dict)?;
        let take = |(index, tensor): (&usize, &mut Tensor)| Some((*index, tensor.state.take()?));
        let states = core.tensors.iter_mut().filter_map(take).collect();
        Ok((core, states))
    }

    /// Checks a saved state. Returns its groups, and the saved index of each of this optimizer's
    /// tensors that has a saved state. `known` is the length of a tensor's own state, if it has
    /// one.
    pub(crate) fn checked(
        &self,
        saved: &StateLayout,
        known: impl Fn(usize) -> Option<usize>,
    ) -> Result<(Vec<ParamGroup<H>>, Indices)> {
        if saved.kind != H::KIND {
            return Err(Error::WrongKind { expected: H::KIND, got: saved.kind.clone() });
        }
        let own: Vec<_> = self.groups.iter().map(|group| &*group.params).collect();
        let (json, matched) = names::matched(saved, &self.names, &own)?;
        let groups = self.groups_from_json(json)?;
        let unknown = saved.state.keys().find(|index| !self.tensors.contains_key(index));
        if let (Some(index), None) = (unknown, &matched) {
            return Err(problem(format!("state.{index}"), StateProblem::Unknown));
        }
        let mut indices = Indices::new();
        for (&index, tensor) in &self.tensors {
            let from = matched.as_ref().map_or(Some(&index), |matched| matched.get(&index));
            let Some((from, state)) = from.and_then(|from| Some((*from, saved.state.get(from)?)))
            else {
                continue;
            };
            let hyper = &groups[tensor.group].hyper;
            let count = self.named_count(index);
            TensorState::check(index, state, hyper, known(index).or(count))?;
            let shape = self.names.get(index).and_then(|param| param.shape.as_deref());
            if let (Some(shape), true) = (shape, H::BY_TENSOR)
                && !TensorState::is_saved_for(state, hyper, count.unwrap_or(0), rows(shape))
            {
                return Err(invalid(format!("state.{index}"), format!("not of shape {shape:?}")));
            }
            indices.insert(index, from);
        }
        Ok((groups, indices))
    }

    /// The saved groups; an error if their tensors are not those of this optimizer's groups.
    fn groups_from_json(&self, saved: Vec<Value>) -> Result<Vec<ParamGroup<H>>> {
        if saved.len() != self.groups.len() {
            let text = format!("expected {} groups, got {}", self.groups.len(), saved.len());
            return Err(invalid("param_groups", text));
        }
        let groups = saved.into_iter().zip(&self.groups).enumerate();
        groups.map(|(at, (saved, own))| group_from_json(at, saved, own)).collect()
    }
}

/// PyTorch's layout: hyper-parameters and `params` in one object.
fn group_to_json<H: Hyper>(group: &ParamGroup<H>) -> Value {
    let mut json = json_of(&group.hyper).unwrap_or_default();
    json.insert(PARAMS.to_owned(), group.params.clone().into());
    json.into()
}

fn group_from_json<H: Hyper>(
    at: usize,
    mut saved: Value,
    own: &ParamGroup<H>,
) -> Result<ParamGroup<H>> {
    let key = format!("param_groups[{at}]");
    let invalid = |text: String| invalid(&*key, text);
    let params = saved.as_object_mut().and_then(|group| group.remove(PARAMS));
    if params != Some(own.params.clone().into()) {
        return Err(invalid(format!("`params` differ from this optimizer's: {:?}", own.params)));
    }
    let hyper = H::deserialize(&saved).map_err(|error| invalid(error.to_string()))?;
    // Serde reads a missing field as its default; a saved group must have all.
    if let Some(key) = json_of(&own.hyper)?.keys().find(|key| saved.get(key).is_none()) {
        return Err(invalid(format!("missing field `{key}`")));
    }
    hyper.validate().map_err(|error| invalid(error.to_string()))?;
    Ok(ParamGroup { hyper, params: own.params.clone() })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use crate::{
        Adafactor, AdafactorHyper, AdamW, AdamWHyper, Applied, Error, Optimizer, ParamMut,
        ParamSpec, Slice, StateDict, StepCtl,
    };

    fn named(mut optimizer: impl Optimizer, names: [&str; 2]) -> impl Optimizer {
        let shape = |name: &str| if name == "half" { vec![3] } else { vec![4, 2] };
        let specs = names.map(|name| ParamSpec::new(name, &shape(name)));
        optimizer.set_param_names(&specs).unwrap();
        optimizer
    }

    fn adamw(names: [&str; 2]) -> impl Optimizer {
        named(AdamW::with_one_group(AdamWHyper::default(), 2).unwrap(), names)
    }

    fn step(optimizer: &mut impl Optimizer) {
        let (mut half, mut full) = ([f16::ONE; 3], [0.5; 8]);
        let (halves, fulls) = ([f16::from_f32(0.25); 3], [0.125; 8]);
        let mut params = [
            ParamMut::new(&mut half[..], Some(Slice::F16(&halves))),
            ParamMut::new(&mut full[..], Some(Slice::F32(&fulls))).with_shape(&[4, 2]),
        ];
        assert_eq!(optimizer.step(&mut params, &StepCtl::PLAIN).unwrap(), Applied::Applied);
    }

    fn load(
        optimizer: &mut impl Optimizer,
        saved: &StateDict,
        failing: usize,
    ) -> crate::Result<()> {
        let mut reads = 0;
        optimizer.load_state(&saved.layout(), &mut |index, name, values| {
            reads += 1;
            if reads == failing {
                return Err(std::io::Error::other("no longer there"));
            }
            values.copy_from_slice(&saved.state[&index].tensors[name]);
            Ok(())
        })
    }

    #[test]
    fn vectors_are_visited_in_the_order_of_the_layout() {
        let mut optimizer = adamw(["half", "full"]);
        assert_eq!(optimizer.state_layout().unwrap(), optimizer.state_dict().unwrap().layout());
        step(&mut optimizer);
        let (dict, layout) = (optimizer.state_dict().unwrap(), optimizer.state_layout().unwrap());
        assert_eq!(layout, dict.layout());
        let mut visited = Vec::new();
        optimizer
            .visit_state(&mut |index, name, values| {
                visited.push((index, name.to_owned(), values.to_vec()));
                Ok(())
            })
            .unwrap();
        let expected = dict.state.iter().flat_map(|(index, state)| {
            state.tensors.iter().map(|(name, values)| (*index, name.clone(), values.clone()))
        });
        assert_eq!(visited, expected.collect::<Vec<_>>());
        assert_eq!(visited.len(), 5);
    }

    #[test]
    fn a_state_is_loaded_one_vector_at_a_time() {
        let mut saved = adamw(["half", "full"]);
        step(&mut saved);
        let dict = saved.state_dict().unwrap();
        // A new optimizer, one with vectors of its own, and one in another order.
        for (names, steps) in [(["half", "full"], 0), (["half", "full"], 2), (["full", "half"], 0)]
        {
            let mut other = adamw(names);
            (0..steps).for_each(|_| step(&mut other));
            other.check_state(&dict.layout()).unwrap();
            load(&mut other, &dict, 0).unwrap();
            let loaded = other.state_dict().unwrap();
            for (index, state) in &loaded.state {
                let name = &loaded.params[index].name;
                let from = dict.params.iter().find(|(_, param)| param.name == *name).unwrap().0;
                assert_eq!(*state, dict.state[from], "{name}");
            }
            assert_eq!(loaded.state.len(), 2);
        }
    }

    #[test]
    fn a_check_finds_what_a_load_refuses_and_changes_nothing() {
        let mut optimizer = adamw(["half", "full"]);
        step(&mut optimizer);
        let dict = optimizer.state_dict().unwrap();
        let mut odd = Vec::new();
        let changes: [fn(&mut StateDict); 7] = [
            |dict| dict.kind = "sgd".to_owned(),
            |dict| dict.param_groups = "[]".to_owned(),
            |dict| dict.state.get_mut(&0).unwrap().step = 0,
            |dict| drop(dict.state.get_mut(&1).unwrap().tensors.remove("exp_avg")),
            |dict| dict.state.get_mut(&1).unwrap().tensors.get_mut("exp_avg").unwrap().push(0.0),
            |dict| drop(dict.state.insert(7, dict.state[&0].clone())),
            |dict| dict.params.get_mut(&0).unwrap().name = "other".to_owned(),
        ];
        for change in changes {
            let mut other = dict.clone();
            change(&mut other);
            odd.push(other);
        }
        for other in odd {
            let checked = optimizer.check_state(&other.layout()).unwrap_err().to_string();
            assert_eq!(optimizer.load_state_dict(&other).unwrap_err().to_string(), checked);
            assert_eq!(load(&mut optimizer, &other, 0).unwrap_err().to_string(), checked);
            assert_eq!(optimizer.state_dict().unwrap(), dict);
        }
        assert!(matches!(load(&mut optimizer, &dict, 3), Err(Error::Format { .. })));
        load(&mut optimizer, &dict, 0).unwrap();
        assert_eq!(optimizer.state_dict().unwrap(), dict);
    }

    #[test]
    fn states_by_tensor_and_in_eight_bits_are_loaded_too() {
        fn check(mut optimizer: impl Optimizer + Clone) {
            let mut new = optimizer.clone();
            (0..3).for_each(|_| step(&mut optimizer));
            let dict = optimizer.state_dict().unwrap();
            load(&mut new, &dict, 0).unwrap();
            assert_eq!(new.state_dict().unwrap(), dict);
        }
        check(Adafactor::with_one_group(AdafactorHyper::default(), 2).unwrap());
        check(AdamW::with_one_group(AdamWHyper::default(), 2).unwrap().with_8bit_state());
    }
}
