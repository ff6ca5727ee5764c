//! `compile`: convolutions are timed once a shape, and a resumed run keeps its choices.

use candle_core::{DType, Device, ModuleT, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_ops::nn;
use candle_train::{CompileMode, CompileOptions, SgdHyper, Trainer};

use super::recovery::alone;

fn trainer(options: CompileOptions) -> (nn::Conv2d, Trainer) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let conv = nn::conv2d(2, 3, 3, nn::Conv2dConfig::default(), vb).unwrap();
    let builder = Trainer::builder(&vars).group(alone()).compile(options);
    (conv, builder.build(SgdHyper::default()).unwrap())
}

fn loss(conv: &nn::Conv2d) -> Result<Tensor> {
    conv.forward_t(&Tensor::ones((2, 2, 6, 6), DType::F32, &Device::Cpu)?, true)?.sqr()?.mean_all()
}

#[test]
fn convolutions_are_timed_once_and_resumed_as_they_were_chosen() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("run");
    let (conv, mut train) = trainer(CompileOptions::default());
    train.step(|| loss(&conv)).unwrap();
    let report = train.compile_report().unwrap();
    let [autotuning] = &report.applied[..] else { panic!("{report}") };
    assert!(autotuning.starts_with("autotuning of convolutions"), "{report}");
    assert!(!autotuning.contains("(0 shapes"), "{report}");
    train.step(|| loss(&conv)).unwrap();
    assert_eq!(train.compile_report().unwrap(), report);
    train.save(&path, 1).unwrap();
    drop(train);

    let (_, mut train) = trainer(CompileOptions::default());
    assert!(train.compile_report().unwrap().applied[0].contains("(0 shapes"));
    train.resume(&path).unwrap();
    assert_eq!(train.compile_report().unwrap(), report);
}

#[test]
fn report_says_why_steps_are_no_graphs() {
    let mode = CompileMode::MaxAutotune;
    let (_, train) = trainer(CompileOptions { mode, ..CompileOptions::default() });
    let report = train.compile_report().unwrap().to_string();
    assert!(report.contains("steps as one graph: the CPU has no kernel launches"), "{report}");
    assert!(report.contains("mode `max-autotune`: the CPU has no modes"), "{report}");
}
