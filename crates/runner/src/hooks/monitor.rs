//! Which of two figures of a validation is the better one.

use crate::schedulers::Rule;
use crate::{Error, Result};

/// Names of figures that are better the greater they are, and the smaller: MMEngine's lists.
const GREATER: [&str; 10] =
    ["acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc"];
const LESS: [&str; 1] = ["loss"];

/// The rule that a figure's name suggests by MMEngine's lists.
pub(super) fn rule_of(name: &str) -> Result<Rule> {
    rule_by(name, &GREATER, &LESS)
}

/// The rule that a figure's name suggests: the whole name first, then a part of it. `greater` and
/// `less` replace MMEngine's lists unless they are empty.
pub(super) fn rule_by<S: AsRef<str>>(name: &str, greater: &[S], less: &[S]) -> Result<Rule> {
    let or = |given: &[S], default: &[&'static str]| -> Vec<String> {
        match given {
            [] => default.iter().map(|s| (*s).to_owned()).collect(),
            given => given.iter().map(|s| s.as_ref().to_owned()).collect(),
        }
    };
    let (greater, less) = (or(greater, &GREATER), or(less, &LESS));
    let is = |known: &String| known.eq_ignore_ascii_case(name);
    let contains = |known: &String| name.to_lowercase().contains(&known.to_lowercase());
    if greater.iter().any(is) {
        return Ok(Rule::Greater);
    }
    if less.iter().any(is) {
        return Ok(Rule::Less);
    }
    match (greater.iter().any(contains), less.iter().any(contains)) {
        (true, _) => Ok(Rule::Greater),
        (false, true) => Ok(Rule::Less),
        _ => Err(Error::Config(format!(
            "whether `{name}` should be less or greater is not known from its name: set `rule`"
        ))),
    }
}

/// Whether `a` is better than `b`.
pub(super) fn is_better(rule: Rule, a: f64, b: f64) -> bool {
    match rule {
        Rule::Less => a < b,
        Rule::Greater => a > b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_suggest_rules() {
        for name in ["acc", "accuracy", "digits/accuracy", "top5", "coco/bbox_mAP_50", "AR@100"] {
            assert_eq!(rule_of(name).unwrap(), Rule::Greater, "{name}");
        }
        for name in ["loss", "loss_cls", "val/Loss"] {
            assert_eq!(rule_of(name).unwrap(), Rule::Less, "{name}");
        }
        let error = rule_of("perplexity").unwrap_err().to_string();
        assert!(error.contains("`perplexity`") && error.contains("`rule`"), "{error}");
    }
}
