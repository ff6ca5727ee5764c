//! Parameter groups: factors of learning rate and weight decay for some parameters, as MMEngine's
//! `paramwise_cfg`.
//!
//! Follows: mmengine 0.10.7, `optim/optimizer/default_constructor.py`. There rules depend on the
//! class of a layer. An engine lists parameters, not layers, so here the kind of a layer is derived
//! from its parameters, those with one dotted prefix. It is a norm layer if its `weight` has one
//! dimension, and a depth-wise convolution if its `weight` has four and the second is 1 (as is that
//! of a convolution over one channel, in MMEngine as well). PReLU and RMS norm therefore count as
//! norm layers, which they do not in MMEngine.
//!
//! Parameters with equal factors form one group, in the order of their first parameters; MMEngine
//! creates one group per parameter, with the same effect, except that rules with a norm over a
//! group (BertAdam) here use the norm over all of its parameters.

use std::borrow::Cow;

use fused_optim::ParamGroup;

use crate::TensorSpec;

/// Factors of the optimizer's hyper-parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Factor of the learning rate.
    pub lr: f64,
    /// Factor of the weight decay.
    pub weight_decay: f64,
}

impl Default for Multipliers {
    /// Returns factors of 1.
    fn default() -> Self {
        Self { lr: 1.0, weight_decay: 1.0 }
    }
}

/// Rules that assign factors to parameters. `None` changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Paramwise {
    /// Factors by a part of the name; the longest matching part applies (among equally long ones
    /// the first in alphabetical order), and then no other rule. Names without a prefix are
    /// searched with a leading dot.
    pub custom_keys: Vec<(String, Multipliers)>,
    /// Learning rate of a `bias`, except in norm layers.
    pub bias_lr_mult: Option<f64>,
    /// Weight decay of a `bias`, unless the rule for norm layers applies.
    pub bias_decay_mult: Option<f64>,
    /// Weight decay of norm layers.
    pub norm_decay_mult: Option<f64>,
    /// Weight decay of depth-wise convolutions, unless a rule above applies.
    pub dwconv_decay_mult: Option<f64>,
    /// Weight decay of any parameter of one dimension, unless a rule above applies.
    pub flat_decay_mult: Option<f64>,
}

impl Paramwise {
    /// No weight decay for norm layers, biases, and other parameters of one dimension, as most
    /// recipes for transformers have it.
    #[must_use]
    pub fn no_decay_for_norms_and_biases() -> Self {
        let none = Some(0.0);
        Self {
            bias_decay_mult: none,
            norm_decay_mult: none,
            flat_decay_mult: none,
            ..Self::default()
        }
    }

    /// Returns the groups of `params`, by index; at least one.
    #[must_use]
    pub fn groups(&self, params: &[TensorSpec]) -> Vec<ParamGroup<Multipliers>> {
        let mut groups: Vec<ParamGroup<Multipliers>> = Vec::new();
        for (index, param) in params.iter().enumerate() {
            let multipliers = self.multipliers(param, params);
            match groups.iter_mut().find(|group| group.hyper == multipliers) {
                Some(group) => group.params.push(index),
                None => groups.push(ParamGroup::new(multipliers, [index])),
            }
        }
        if groups.is_empty() {
            groups.push(ParamGroup::new(Multipliers::default(), []));
        }
        groups
    }

    /// Returns a text that names the custom keys that no name contains, and the names.
    #[must_use]
    pub fn unmatched(&self, params: &[TensorSpec]) -> Option<String> {
        let in_no_name = |key: &&str| !params.iter().any(|p| dotted(&p.name).contains(*key));
        let keys = self.custom_keys.iter().map(|(key, _)| key.as_str());
        let keys: Vec<_> = keys.filter(in_no_name).map(|key| format!("`{key}`")).collect();
        if keys.is_empty() {
            return None;
        }
        let names: Vec<_> = params.iter().map(|param| param.name.as_str()).collect();
        let shown = &names[..names.len().min(MAX_NAMES)];
        let more = names.len() - shown.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        Some(format!(
            "no parameter's name contains {} of custom_keys, so they have no effect: a key is a \
             part of the name, not a regular expression or pattern; the parameters are {}{more}",
            keys.join(", "),
            shown.join(", ")
        ))
    }

    fn multipliers(&self, param: &TensorSpec, all: &[TensorSpec]) -> Multipliers {
        let (prefix, name) = split(&param.name);
        let full = dotted(&param.name);
        let fitting = self.custom_keys.iter().filter(|(key, _)| full.contains(key.as_str()));
        let longest = fitting.min_by_key(|(key, _)| (std::cmp::Reverse(key.len()), key));
        if let Some((_, multipliers)) = longest {
            return *multipliers;
        }
        let weight = all.iter().find(|spec| split(&spec.name) == (prefix, "weight"));
        let shape = weight.map_or(&[][..], |weight| &weight.shape);
        let is_norm = shape.len() == 1;
        let is_depth_wise = matches!(shape, [_, 1, _, _]);
        let is_bias = name == "bias";
        let mut multipliers = Multipliers::default();
        if let (true, false, Some(by)) = (is_bias, is_norm, self.bias_lr_mult) {
            multipliers.lr = by;
        }
        let rules = [
            (is_norm, self.norm_decay_mult),
            (is_bias, self.bias_decay_mult),
            (is_depth_wise, self.dwconv_decay_mult),
            (param.shape.len() == 1, self.flat_decay_mult),
        ];
        let applies = |(applies, by): (bool, Option<f64>)| by.filter(|_| applies);
        if let Some(by) = rules.into_iter().find_map(applies) {
            multipliers.weight_decay = by;
        }
        multipliers
    }
}

/// Number of parameters that a warning names.
const MAX_NAMES: usize = 50;

/// Name as custom keys are searched in it: one without a prefix has a leading dot.
fn dotted(name: &str) -> Cow<'_, str> {
    if name.contains('.') { name.into() } else { format!(".{name}").into() }
}

/// Splits a name into the layer's prefix and the parameter's own name.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

#[cfg(test)]
mod tests {
    use fused_optim::DType;
    use serde_json::Value;

    use super::*;

    fn read(cfg: &Value) -> Paramwise {
        let number = |key: &str| cfg[key].as_f64();
        let custom = cfg["custom_keys"].as_object().into_iter().flatten();
        Paramwise {
            custom_keys: custom
                .map(|(key, by)| {
                    let of = |name: &str| by[name].as_f64().unwrap_or(1.0);
                    let by = Multipliers { lr: of("lr_mult"), weight_decay: of("decay_mult") };
                    (key.clone(), by)
                })
                .collect(),
            bias_lr_mult: number("bias_lr_mult"),
            bias_decay_mult: number("bias_decay_mult"),
            norm_decay_mult: number("norm_decay_mult"),
            dwconv_decay_mult: number("dwconv_decay_mult"),
            flat_decay_mult: number("flat_decay_mult"),
        }
    }

    /// Compares every group that MMEngine created for a network with layers of every kind.
    #[test]
    fn groups_match_mmengine() {
        let text = include_str!("../tests/vectors/paramwise.json");
        let recorded: Value = serde_json::from_str(text).unwrap();
        let spec = |param: &Value| TensorSpec {
            name: param[0].as_str().unwrap().to_owned(),
            shape: serde_json::from_value(param[1].clone()).unwrap(),
            dtype: DType::F32,
        };
        let params: Vec<_> = recorded["params"].as_array().unwrap().iter().map(spec).collect();
        let mut rows = 0;
        for case in recorded["cases"].as_array().unwrap() {
            let groups = read(&case["paramwise_cfg"]).groups(&params);
            for row in case["groups"].as_array().unwrap() {
                let index = params.iter().position(|p| p.name == row[0].as_str().unwrap()).unwrap();
                let mut own = groups.iter().filter(|group| group.params.contains(&index));
                let by = own.next().unwrap().hyper;
                assert!(own.next().is_none(), "{index} is in two groups");
                // Learning rate and weight decay of the recording are 0.1 and 0.01.
                let (lr, decay) = (row[1].as_f64().unwrap(), row[2].as_f64().unwrap());
                let what = format!("{} of {}", params[index].name, case["paramwise_cfg"]);
                assert_eq!((0.1 * by.lr, 0.01 * by.weight_decay), (lr, decay), "{what}");
                rows += 1;
            }
        }
        assert_eq!(rows, 180);
    }

    #[test]
    fn equal_factors_form_one_group_in_order_of_appearance() {
        let spec = |name: &str, shape: &[usize]| TensorSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            dtype: DType::F32,
        };
        let params = [spec("a.weight", &[2, 2]), spec("a.bias", &[2]), spec("b.weight", &[2, 2])];
        let paramwise = Paramwise { bias_lr_mult: Some(2.0), ..Paramwise::default() };
        let groups = paramwise.groups(&params);
        let twice = Multipliers { lr: 2.0, weight_decay: 1.0 };
        let expected =
            [ParamGroup::new(Multipliers::default(), [0, 2]), ParamGroup::new(twice, [1])];
        assert_eq!(groups, expected);
        assert_eq!(Paramwise::default().groups(&[]).len(), 1);
    }
}
