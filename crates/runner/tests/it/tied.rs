//! Adapters of a layer whose weight another layer has, too.

use candle_core::{DType, Module, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use runner::engine::Model;
use runner::engine::candle::nn::{Embedding, Linear, embedding, linear, linear_no_bias};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, ops,
};
use runner::model::LoraOptions;

/// A language model with one weight for embedding and head.
struct Tied {
    wte: Embedding,
    mid: [Linear; 2],
    head: Linear,
}

impl Tied {
    /// Builds it with the head first or last.
    fn new(vb: &VarBuilder<'static>, head_first: bool) -> CandleResult<Self> {
        let head = || linear_no_bias(4, 7, vb.pp("wte"));
        let wte = || embedding(7, 4, vb.pp("wte"));
        // A layer that is used twice has one adapter.
        let mid = || {
            Ok::<_, candle_core::Error>([linear(4, 4, vb.pp("mid"))?, linear(4, 4, vb.pp("mid"))?])
        };
        let (wte, head, mid) = match head_first {
            true => {
                let head = head()?;
                (wte()?, head, mid()?)
            }
            false => {
                let (wte, mid) = (wte()?, mid()?);
                (wte, head()?, mid)
            }
        };
        Ok(Self { wte, mid, head })
    }

    fn logits(&self, batch: &TensorBatch) -> CandleResult<Tensor> {
        let x = self.wte.forward(batch.get("inputs")?)?;
        self.head.forward(&self.mid[1].forward(&self.mid[0].forward(&x)?)?)
    }
}

impl CandleModel for Tied {
    fn loss(&self, batch: &TensorBatch) -> CandleResult<Loss> {
        Ok(Loss::new(ops::cross_entropy(&self.logits(batch)?, batch.get("labels")?)?))
    }

    fn predict(&self, batch: &TensorBatch) -> CandleResult<Outputs> {
        Ok(Outputs::new().with("logits", self.logits(batch)?))
    }
}

fn engine(targets: &[&str], frozen: &[&str], head_first: bool) -> runner::Result<CandleEngine> {
    let lora = LoraOptions {
        rank: 2,
        alpha: 4.0,
        dropout: 0.0,
        targets: targets.iter().map(|target| (*target).to_owned()).collect(),
    };
    let frozen = frozen.iter().map(|pattern| (*pattern).to_owned()).collect();
    let options = CandleOptions { lora: Some(lora), frozen, ..CandleOptions::default() };
    CandleEngine::new(options, move |vb| Tied::new(&vb, head_first))
}

#[test]
fn adapter_of_a_tied_layer_is_refused_by_name() {
    for (targets, frozen) in [
        (&["wte", "mid"][..], &["*"][..]),
        (&["wte", "mid"], &[]),
        (&["wte"], &[]),
        (&["*"], &["wte*"]),
    ] {
        for head_first in [false, true] {
            let said = engine(targets, frozen, head_first).unwrap_err().to_string();
            assert!(
                said.contains(
                    "lora: layer `wte` gets an adapter, but a layer without adapter called `wte`"
                ) && said.contains("has the same weight `wte.weight` (tied)")
                    && said.contains("leave `wte` out of lora.targets"),
                "{said}"
            );
        }
    }
}

#[test]
fn adapters_beside_a_tied_layer_are_built() {
    for head_first in [false, true] {
        let built = engine(&["mid"], &["*"], head_first).unwrap();
        let names: Vec<_> = built.params().iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names, ["mid.lora_A.weight", "mid.lora_B.weight"]);
    }
}

/// A layer whose builder has another name for its weight.
#[test]
fn adapter_of_a_renamed_tied_layer_is_refused_by_both_names() {
    let lora = LoraOptions { rank: 2, alpha: 4.0, dropout: 0.0, targets: vec!["head".into()] };
    let options = CandleOptions { lora: Some(lora), ..CandleOptions::default() };
    let built = CandleEngine::new(options, |vb| {
        let wte = embedding(7, 4, vb.pp("wte"))?;
        let tied = vb.clone().rename_f(|name| name.replace("head.weight", "wte.weight"));
        let head = linear_no_bias(4, 7, tied.pp("head"))?;
        let mid = || linear(4, 4, vb.pp("mid"));
        assert_eq!(vb.dtype(), DType::F32);
        Ok(Tied { wte, head, mid: [mid()?, mid()?] })
    });
    let said = built.unwrap_err().to_string();
    assert!(
        said.contains("layer `head` gets an adapter") && said.contains("called `wte`"),
        "{said}"
    );
}
