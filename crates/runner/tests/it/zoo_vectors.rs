//! The zoo's networks compared with torchvision's and PyTorch's, with the same parameters:
//! `vectors/zoo.pth`.

use std::collections::HashMap;

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use runner::engine::candle::ops;
use runner::zoo::{Gpt, GptOptions, ResNet, ResNetOptions};

fn vectors() -> HashMap<String, Tensor> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/zoo.pth");
    candle_core::pickle::read_all(path).unwrap().into_iter().collect()
}

/// Builds a model on variables with the values of the file.
fn build<M>(
    of: &str,
    vectors: &HashMap<String, Tensor>,
    build: impl FnOnce(VarBuilder<'static>) -> Result<M>,
) -> (M, VarMap) {
    let vars = VarMap::new();
    let model = build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).unwrap();
    let named = vars.data().lock().unwrap().clone();
    let count = vectors.keys().filter(|name| name.starts_with(of)).count();
    assert_eq!(named.len(), count, "{:?}", named.keys());
    for (name, var) in named {
        var.set(&vectors[&format!("{of}{name}")]).unwrap();
    }
    (model, vars)
}

/// Largest difference, relative to the largest value.
fn apart(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let largest = |t: Tensor| t.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
    largest((a - b).unwrap()) / largest(b.clone())
}

#[test]
fn resnet_with_bottlenecks_matches_torchvision() {
    let vectors = vectors();
    let options = ResNetOptions {
        in_channels: 3,
        num_classes: 5,
        width: 4,
        blocks: vec![1, 2],
        bottleneck: true,
        stem_kernel: 7,
        stem_stride: 2,
        stem_max_pool: true,
        ..ResNetOptions::default()
    };
    let (net, _) = build("resnet.", &vectors, |vb| ResNet::new(&options, vb));
    for (train, wanted) in [(true, "logits_of_training"), (false, "logits")] {
        let logits = net.forward_t(&vectors["images"], train).unwrap();
        let off = apart(&logits, &vectors[wanted]);
        assert!(off < 1e-5, "{wanted} are off by {off}");
    }
}

#[test]
fn gpt_and_gradients_of_its_tied_embedding_match_pytorch() {
    let vectors = vectors();
    let options = GptOptions { vocab_size: 19, context: 6, width: 8, heads: 2, layers: 2 };
    let (net, vars) = build("gpt.", &vectors, |vb| Gpt::new(&options, vb));
    let text = &vectors["text"];
    let (inputs, labels) = (text.narrow(1, 0, 6).unwrap(), text.narrow(1, 1, 6).unwrap());
    let (logits, tape) = ops::record(|| {
        let logits = net.forward(&inputs.contiguous()?)?;
        let loss = ops::cross_entropy(&logits.flatten_to(1)?, &labels.contiguous()?.flatten_all()?);
        Ok::<_, candle_core::Error>((logits, loss?))
    });
    let (logits, loss) = logits.unwrap();
    let off = apart(&logits, &vectors["logits_of_text"]);
    assert!(off < 1e-5, "logits are off by {off}");
    assert!(apart(&loss.reshape(1).unwrap(), &vectors["loss_of_text"]) < 1e-6);
    let gradients = tape.backward(&loss).unwrap();
    let vars = vars.data().lock().unwrap();
    assert_eq!(vars.len(), 2 + 2 * 12 + 2);
    for (name, var) in &*vars {
        let off = apart(gradients.get(var).unwrap(), &vectors[&format!("gradient.{name}")]);
        assert!(off < 1e-5, "the gradient of {name} is off by {off}");
    }
}
