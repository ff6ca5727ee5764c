//! Compares two values of a metric, by the rule derived from its name.

use crate::schedulers::Comparison;
use crate::{Error, Result};

/// Name parts of metrics for which greater, or smaller, values are better: MMEngine's lists, with
/// additions for this crate's metrics.
const GREATER: [&str; 12] = [
    "acc",
    "top",
    "AR@",
    "auc",
    "precision",
    "mAP",
    "mDice",
    "mIoU",
    "mAcc",
    "aAcc",
    "recall",
    "f1",
];
const LESS: [&str; 2] = ["loss", "perplexity"];

/// Returns the rule derived from a metric's name by MMEngine's lists.
pub(super) fn rule_of(name: &str) -> Result<Comparison> {
    rule_by(name, &[], &[])
}

/// Returns the rule derived from a metric's name: the whole name is compared first, then parts of
/// it. `greater` and `less` replace MMEngine's lists unless empty.
pub(super) fn rule_by(name: &str, greater: &[String], less: &[String]) -> Result<Comparison> {
    let or = |given: &[String], default: &[&str]| match given {
        [] => default.iter().map(|known| known.to_lowercase()).collect::<Vec<_>>(),
        given => given.iter().map(|known| known.to_lowercase()).collect(),
    };
    let known = [(or(greater, &GREATER), Comparison::Greater), (or(less, &LESS), Comparison::Less)];
    let lower = name.to_lowercase();
    let whole = known.iter().find(|(names, _)| names.contains(&lower));
    let part = || known.iter().find(|(names, _)| names.iter().any(|part| lower.contains(part)));
    whole.or_else(part).map(|(_, rule)| *rule).ok_or_else(|| {
        Error::config(format!(
            "cannot derive from the name `{name}` whether less or greater is better: set `rule`"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_imply_rules() {
        for name in ["acc", "accuracy", "digits/accuracy", "top5", "coco/bbox_mAP_50", "AR@100"] {
            assert_eq!(rule_of(name).unwrap(), Comparison::Greater, "{name}");
        }
        for name in ["loss", "loss_cls", "val/Loss", "perplexity"] {
            assert_eq!(rule_of(name).unwrap(), Comparison::Less, "{name}");
        }
        let error = rule_of("distance").unwrap_err().to_string();
        assert!(error.contains("`distance`") && error.contains("`rule`"), "{error}");
    }
}
