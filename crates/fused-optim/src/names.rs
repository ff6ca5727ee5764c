//! Names of parameters, and matching of saved state by name.
//!
//! An optimizer identifies a parameter by its index in the list passed to each step. If that order
//! differs between processes (as that of candle's `VarMap` does), indices do not identify saved
//! state. So an optimizer with [names](ParamSpec) saves them, and loads state by name.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::error::{invalid, problem};
use crate::{Error, ParamSpec, Result, StateLayout, StateProblem};

/// Returns an error if two parameters have the same name.
pub(crate) fn check_unique(params: &[ParamSpec]) -> Result<()> {
    let mut known = BTreeSet::new();
    match params.iter().find(|param| !known.insert(&param.name)) {
        Some(param) => Err(Error::DuplicateName { name: param.name.clone() }),
        None => Ok(()),
    }
}

/// The saved index of each of an optimizer's tensors.
pub(crate) type Indices = BTreeMap<usize, usize>;

/// Matches a saved state with an optimizer with these names, whose groups have the indices
/// `groups`. Returns the saved groups with this optimizer's indices, and the saved index of each of
/// its tensors; `None` if either has no names: state is then matched by index.
pub(crate) fn matched(
    saved: &StateLayout,
    names: &[ParamSpec],
    groups: &[&[usize]],
) -> Result<(Vec<Value>, Option<Indices>)> {
    let json = parse_groups(&saved.param_groups)?;
    if names.is_empty() || saved.params.is_empty() {
        return Ok((json, None));
    }
    let indices = own_indices(&saved.params, names, groups)?;
    let json = reordered_groups(json, &indices, names, groups)?;
    if let Some(index) = saved.state.keys().find(|index| !indices.contains_key(index)) {
        return Err(problem(format!("state.{index}"), StateProblem::Unknown));
    }
    Ok((json, Some(indices.into_iter().map(|(saved, own)| (own, saved)).collect())))
}

/// Maps each saved index to this optimizer's index of the same name and shape.
fn own_indices(
    saved: &BTreeMap<usize, ParamSpec>,
    names: &[ParamSpec],
    groups: &[&[usize]],
) -> Result<BTreeMap<usize, usize>> {
    let mut by_name = BTreeMap::new();
    for (index, param) in saved {
        if let Some((other, _)) = by_name.insert(&*param.name, (*index, &param.shape)) {
            return Err(invalid(&param.name, format!("name of parameters {other} and {index}")));
        }
    }
    let mut indices = BTreeMap::new();
    for own in groups.iter().copied().flatten() {
        let ParamSpec { name, shape } = names.get(*own).ok_or_else(|| {
            invalid(format!("parameter {own}"), "this optimizer has no name for it")
        })?;
        let saved = by_name.remove(&**name).ok_or_else(|| problem(name, StateProblem::Missing))?;
        if let (Some(expected), (_, Some(got))) = (shape, saved)
            && expected != got
        {
            return Err(invalid(name, format!("expected shape {expected:?}, got {got:?}")));
        }
        indices.insert(saved.0, *own);
    }
    match by_name.keys().next() {
        Some(name) => Err(problem(*name, StateProblem::Unknown)),
        None => Ok(indices),
    }
}

/// Returns the saved groups with this optimizer's indices. Each group must have the same parameters
/// as this optimizer's group of the same index: schedulers address groups by index.
fn reordered_groups(
    mut all: Vec<Value>,
    indices: &BTreeMap<usize, usize>,
    names: &[ParamSpec],
    groups: &[&[usize]],
) -> Result<Vec<Value>> {
    for (at, (group, own)) in all.iter_mut().zip(groups).enumerate() {
        let key = format!("param_groups[{at}]");
        let invalid = |text: String| invalid(&key, text);
        let params = group.get(PARAMS).and_then(Value::as_array);
        let params = params.ok_or_else(|| invalid("no array `params`".to_owned()))?;
        let translate = |index: &Value| indices.get(&usize::try_from(index.as_u64()?).ok()?);
        let mut rest: BTreeSet<usize> = own.iter().copied().collect();
        for index in params {
            let own = translate(index).ok_or_else(|| invalid(format!("{index} has no name")))?;
            if !rest.remove(own) {
                let name = &names[*own].name;
                return Err(invalid(format!(
                    "has `{name}`, which is not in this optimizer's group"
                )));
            }
        }
        if let Some(own) = rest.first() {
            let name = &names[*own].name;
            return Err(invalid(format!("lacks `{name}`, which is in this optimizer's group")));
        }
        group[PARAMS] = Value::from(own.to_vec());
    }
    Ok(all)
}

/// The groups of a saved state as JSON.
fn parse_groups(text: &str) -> Result<Vec<Value>> {
    serde_json::from_str(text)
        .map_err(|source| Error::Format { action: "read param_groups", source: source.into() })
}

/// The key of a group's indices.
pub(crate) const PARAMS: &str = "params";
