//! TensorBoard reads the event files. `TENSORBOARD_PYTHON` is a Python that can import it, by
//! default `python3`.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use serde_json::Value;

use crate::common::from_config;

const CONFIG: &str = r#"
model = { type = "Mlp", in_features = 64, hidden = [8], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
val_dataloader = { batch_size = 64, dataset = { type = "Digits", split = "test" } }
val_evaluator = { type = "Accuracy" }
train_cfg = { max_epochs = 2 }
visualizer = { type = "Visualizer", vis_backends = [{ type = "TensorboardVisBackend" }] }
[optim_wrapper]
type = "OptimWrapper"
optimizer = { type = "SGD", lr = 0.05 }
"#;

/// Prints every scalar in a directory: tag to steps and values.
const READ: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()
def values(tag):
    if tag in tags["scalars"]:
        return [[e.step, e.value] for e in events.Scalars(tag)]
    return [[e.step, float(e.tensor_proto.float_val[0])] for e in events.Tensors(tag)]
print(json.dumps({tag: values(tag) for tag in tags["scalars"] + tags["tensors"]}))
"#;

#[test]
#[ignore = "needs TensorBoard: TENSORBOARD_PYTHON, or python3, imports tensorboard"]
fn tensorboard_loads_the_event_files() {
    let python = std::env::var("TENSORBOARD_PYTHON").unwrap_or_else(|_| "python3".into());
    let dir = tempfile::tempdir().unwrap();
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let builder = from_config(Config::from_text("c.toml", CONFIG).unwrap()).unwrap();
    builder.process_group(group).work_dir(dir.path()).build().unwrap().train().unwrap();
    let runs = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path().join("vis_data"));
    let vis = runs.into_iter().find(|p| p.is_dir()).unwrap();
    let mut expected: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for line in std::fs::read_to_string(vis.join("scalars.json")).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        for (tag, value) in line.as_object().unwrap().iter().filter(|(tag, _)| *tag != "step") {
            let value = value.as_f64().unwrap() as f32;
            expected.entry(tag.clone()).or_default().push((line["step"].as_u64().unwrap(), value));
        }
    }
    let output = Command::new(&python).args(["-c", READ]).arg(&vis).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read: BTreeMap<String, Vec<(u64, f32)>> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(read.contains_key("loss") && read.contains_key("accuracy"), "{read:?}");
    assert_eq!(read, expected);
}
