//! Shards of samples in JSON lines.

use std::path::Path;

/// Writes `lens[shard]` samples to `dir/SHARD.jsonl`: 64 inputs, a label of ten classes, and the
/// sample's number over all shards.
pub(crate) fn write(dir: &Path, lens: &[usize]) {
    let mut rows = 0..;
    for (shard, len) in lens.iter().enumerate() {
        let lines: String = rows.by_ref().take(*len).map(line).collect();
        std::fs::write(dir.join(format!("{shard}.jsonl")), lines).unwrap();
    }
}

fn line(row: usize) -> String {
    let value = |k: usize| format!("{:.3}", ((row * 64 + k) as f32 * 0.731).sin());
    let inputs: Vec<_> = (0..64).map(value).collect();
    let (inputs, label) = (inputs.join(","), row % 10);
    format!("{{\"inputs\":[{inputs}],\"labels\":{label},\"row\":{row}}}\n")
}
