//! A thousand steps need no more memory than the first ones.

use std::sync::Arc;

use fused_optim::Slice;
use parking_lot::Mutex;
use runner::data::{Dataset, Draw};
use runner::engine::candle::{CandleEngine, CandleOptions};
use runner::engine::{Engine, GradSink, Model, SharedSink};
use runner::zoo::{Digits, ResNet, ResNetOptions, Split};

use crate::common::alone;
use crate::common::step::train_step;

struct Ignore;

impl GradSink for Ignore {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> train_step::Result<()> {
        Ok(())
    }
}

/// Resident memory of this process.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn steps_leak_no_memory() {
    let output = alone("engine_memory::run_a_thousand_steps").output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "started in its own process by `steps_leak_no_memory`"]
fn run_a_thousand_steps() {
    let options = ResNetOptions {
        in_channels: 1,
        num_classes: 10,
        width: 4,
        blocks: vec![1],
        ..ResNetOptions::default()
    };
    let mut engine =
        CandleEngine::new(CandleOptions::default(), |vb| ResNet::new(&options, vb)).unwrap();
    let batch = Digits::new(Split::Train, 0).unwrap().batch(&[1, 2, 3, 4].map(Draw::from)).unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Ignore));
    let mut steps = |count: usize| {
        for _ in 0..count {
            train_step(&mut engine, None, &batch, 1.0, &sink).unwrap();
            engine.with_params(&mut |_| Ok(())).unwrap();
            engine.eval(&batch).unwrap();
        }
    };
    steps(100);
    let before = resident_kib();
    steps(1000);
    // A graph that is not freed would take at least 20 KiB per step; an allocator varies by a few
    // pages.
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 2048, "{grown} KiB more");
}
