//! Compares bucket layouts with those that PyTorch made for the same parameters.

use std::fs;
use std::path::PathBuf;

use collective::DType;
use collective::reducer::{BucketPlan, ParamInfo};
use serde::Deserialize;
use serde::de::DeserializeOwned;

const MIB: usize = 1 << 20;

fn read<T: DeserializeOwned>(name: &str) -> T {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/ddp");
    serde_json::from_str(&fs::read_to_string(dir.join(name)).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Model {
    model: String,
    params: Vec<(String, usize)>,
    caps: Vec<usize>,
    buckets_as_computed: Vec<Vec<usize>>,
}

impl Model {
    fn params(&self) -> Vec<ParamInfo> {
        let info = |(name, count): &(String, usize)| ParamInfo::new(name, *count, DType::F32);
        self.params.iter().map(info).collect()
    }
}

/// One bucket as a communication hook of PyTorch received it.
#[derive(Debug, Deserialize, PartialEq)]
struct Seen {
    index: usize,
    bytes: usize,
    n: usize,
    first: String,
    last: String,
    is_last: bool,
}

fn seen(params: &[ParamInfo], plan: &BucketPlan) -> Vec<Seen> {
    let buckets = plan.buckets().iter().enumerate();
    let see = |(index, bucket): (usize, &collective::reducer::BucketSpec)| Seen {
        index,
        bytes: bucket.count * bucket.dtype.size(),
        n: bucket.params.len(),
        first: params[bucket.params[0]].name.clone(),
        last: params[*bucket.params.last().unwrap()].name.clone(),
        is_last: index + 1 == plan.buckets().len(),
    };
    buckets.map(see).collect()
}

fn order(params: &[ParamInfo], names: &[String]) -> Vec<usize> {
    let index = |name: &String| params.iter().position(|param| param.name == *name).unwrap();
    names.iter().map(index).collect()
}

/// The order in which autograd finishes ResNet-18's gradients: of a batch norm the weight before
/// the bias, of a block the shortcut first.
fn resnet18_arrival() -> Vec<String> {
    let mut names = vec!["fc.bias".to_owned(), "fc.weight".to_owned()];
    let norm = |names: &mut Vec<String>, conv: &str, norm: &str| {
        names.extend([format!("{norm}.weight"), format!("{norm}.bias"), format!("{conv}.weight")]);
    };
    for layer in (1..=4).rev() {
        for block in (0..2).rev() {
            let at = format!("layer{layer}.{block}");
            if block == 0 && layer > 1 {
                norm(&mut names, &format!("{at}.downsample.0"), &format!("{at}.downsample.1"));
            }
            norm(&mut names, &format!("{at}.conv2"), &format!("{at}.bn2"));
            norm(&mut names, &format!("{at}.conv1"), &format!("{at}.bn1"));
        }
    }
    norm(&mut names, "conv1", "bn1");
    names
}

#[test]
fn registered_layouts_match_pytorch() {
    let models: Vec<Model> = read("buckets.json");
    assert_eq!(models.len(), 2);
    for model in models {
        let plan = BucketPlan::registered(&model.params(), &model.caps).unwrap();
        let got: Vec<_> = plan.buckets().iter().rev().map(|bucket| bucket.params.clone()).collect();
        assert_eq!(got, model.buckets_as_computed, "{}", model.model);
    }
}

#[test]
fn resnet18_buckets_match_pytorch_for_three_iterations() {
    let params = read::<Vec<Model>>("buckets.json")[0].params();
    let trace: std::collections::HashMap<String, Vec<Vec<Seen>>> = read("ddp_bucket_trace.json");
    let order = order(&params, &resnet18_arrival());
    // The sizes of `resnet18_cap1` show that one cap of 4 MiB was in force, whatever its name.
    for (name, caps) in [("resnet18", [MIB, 25 * MIB]), ("resnet18_cap1", [4 * MIB, 4 * MIB])] {
        let first = BucketPlan::registered(&params, &[usize::MAX]).unwrap();
        assert_eq!(seen(&params, &first), trace[name][0], "{name}");
        let later = BucketPlan::arrived(&params, &order, &caps).unwrap();
        assert_eq!(seen(&params, &later), trace[name][1], "{name}");
        assert_eq!(seen(&params, &later), trace[name][2], "{name}");
    }
}

#[test]
fn layouts_match_pytorch_if_layers_run_in_another_order() {
    let params: Vec<_> = ["c", "a", "b"]
        .iter()
        .flat_map(|layer| {
            let name = |part: &str| format!("{layer}.{part}");
            [("weight", 360_000), ("bias", 600)]
                .map(|(part, count)| ParamInfo::new(name(part), count, DType::F32))
        })
        .collect();
    let trace: std::collections::HashMap<String, Vec<Vec<Seen>>> = read("ddp_bucket_trace.json");
    let arrival = ["c.bias", "c.weight", "b.bias", "b.weight", "a.bias", "a.weight"];
    let order = order(&params, &arrival.map(str::to_owned));
    let first = BucketPlan::registered(&params, &[usize::MAX]).unwrap();
    let later = BucketPlan::arrived(&params, &order, &[MIB, MIB]).unwrap();
    assert_eq!(seen(&params, &first), trace["reordered"][0]);
    assert_eq!(seen(&params, &later), trace["reordered"][1]);
    // A static graph's layout is rebuilt one iteration later.
    assert_eq!(seen(&params, &first), trace["reordered_static"][0]);
    assert_eq!(seen(&params, &first), trace["reordered_static"][1]);
    assert_eq!(seen(&params, &later), trace["reordered_static"][2]);
    // With unused parameters to be found, the first layout stays.
    let kept = BucketPlan::registered(&params, &[MIB, MIB]).unwrap();
    for iteration in &trace["reordered_find_unused"] {
        assert_eq!(&seen(&params, &kept), iteration);
    }
}
