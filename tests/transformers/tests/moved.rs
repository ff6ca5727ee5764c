//! Moved models beside stock candle's: the same forward, gradients of differences, and where
//! stock's end.

use std::collections::HashMap;

use candle::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models as stock;

/// Parameters by name.
type Parameters = Vec<(String, Tensor)>;

/// The parameters that `build` asks for, the same numbers at each call.
fn parameters<M>(build: impl Fn(VarBuilder<'_>) -> Result<M>) -> Parameters {
    let map = VarMap::new();
    build(VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu)).unwrap();
    let data = map.data().lock().unwrap();
    let mut all: Parameters =
        data.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (at, (name, tensor)) in all.iter_mut().enumerate() {
        let center = if tensor.rank() == 1 && name.ends_with("weight") { 1.0 } else { 0.0 };
        let value = |i: usize| center + 0.5 * ((i * 37 + at * 101) as f64 * 0.7).sin();
        let values: Vec<f64> = (0..tensor.elem_count()).map(value).collect();
        *tensor = Tensor::from_vec(values, tensor.shape(), &Device::Cpu).unwrap();
    }
    all
}

/// A builder over variables of these parameters.
fn builder(all: &Parameters, dtype: DType) -> (HashMap<String, Var>, VarBuilder<'static>) {
    let var = |(name, value): &(String, Tensor)| {
        (name.clone(), Var::from_tensor(&value.to_dtype(dtype).unwrap()).unwrap())
    };
    let vars: HashMap<_, _> = all.iter().map(var).collect();
    let tensors = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    (vars, VarBuilder::from_tensors(tensors, dtype, &Device::Cpu))
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// A loss that weighs each value.
fn loss(y: &Tensor) -> Result<Tensor> {
    let weights: Vec<f64> = (0..y.elem_count()).map(|i| (i as f64 * 1.3).cos()).collect();
    (y * Tensor::from_vec(weights, y.shape(), &Device::Cpu)?.to_dtype(y.dtype())?)?.sum_all()
}

/// Gradients in `f64` of some numbers of each parameter, beside differences.
fn differentiates(all: &Parameters, forward: impl Fn(VarBuilder<'_>) -> Result<Tensor>) {
    let (vars, vb) = builder(all, DType::F64);
    let gradients = loss(&forward(vb).unwrap()).unwrap().backward().unwrap();
    for (at, (name, value)) in all.iter().enumerate() {
        let gradient = gradients.get(&vars[name]).unwrap_or_else(|| panic!("{name} has none"));
        let gradient = flat(gradient);
        let largest = gradient.iter().fold(1e-3_f64, |most, g| most.max(g.abs()));
        let count = gradient.len();
        for i in [0, count / 3, count / 2, count - 1] {
            let step = 2f64.powi(-17);
            let moved = |by: f64| {
                let mut other = all.clone();
                let mut values = flat(value);
                values[i] += by;
                other[at].1 = Tensor::from_vec(values, value.shape(), &Device::Cpu).unwrap();
                let y = forward(builder(&other, DType::F64).1).unwrap();
                loss(&y).unwrap().to_scalar::<f64>().unwrap()
            };
            let difference = (moved(step) - moved(-step)) / (2.0 * step);
            let off = (difference - gradient[i]).abs() / largest;
            assert!(off < 1e-6, "{name}[{i}]: {} instead of {difference}", gradient[i]);
        }
    }
}

/// The parameters that get no gradient from stock candle, of those that are used.
fn without_gradient(
    all: &Parameters,
    forward: impl Fn(VarBuilder<'_>) -> Result<Tensor>,
) -> Vec<String> {
    let (vars, vb) = builder(all, DType::F32);
    let gradients = loss(&forward(vb).unwrap()).unwrap().backward().unwrap();
    all.iter()
        .map(|(name, _)| name)
        .filter(|name| gradients.get(&vars[*name]).is_none())
        .cloned()
        .collect()
}

fn assert_equal(a: &Tensor, b: &Tensor) {
    let (a, b) = (flat(a), flat(b));
    let largest = b.iter().fold(1e-3_f64, |most, v| most.max(v.abs()));
    let off = a.iter().zip(&b).fold(0f64, |most, (a, b)| most.max((a - b).abs())) / largest;
    assert!(a.len() == b.len() && off < 1e-5, "off by {off}");
}

fn ids() -> Tensor {
    Tensor::new(&[[1u32, 5, 2, 7, 7], [3, 0, 6, 4, 1]], &Device::Cpu).unwrap()
}

const BERT: &str = r#"{"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "max_position_embeddings": 8,
    "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-5, "pad_token_id": 0}"#;

#[test]
fn bert_is_stock_candles_and_has_right_gradients() {
    let ours = |vb: VarBuilder<'_>| {
        let model = moved_models::bert::BertModel::load(vb, &serde_json::from_str(BERT).unwrap())?;
        model.forward(&ids(), &ids().zeros_like()?, None)
    };
    let stock = |vb: VarBuilder<'_>| {
        let model = stock::bert::BertModel::load(vb, &serde_json::from_str(BERT).unwrap())?;
        model.forward(&ids(), &ids().zeros_like()?, None)
    };
    let all = parameters(|vb| ours(vb));
    // Stock's layer norm knows no `f64`.
    let want = stock(builder(&all, DType::F32).1).unwrap();
    for dtype in [DType::F32, DType::F64] {
        assert_equal(&ours(builder(&all, dtype).1).unwrap(), &want);
    }
    differentiates(&all, ours);
    // The layer norm at its end cuts the graph: nothing is trained.
    assert_eq!(without_gradient(&all, stock).len(), all.len());
}

fn llama(layers: usize) -> serde_json::Value {
    serde_json::json!({"hidden_size": 8, "intermediate_size": 12, "vocab_size": 11, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "bos_token_id": 0, "eos_token_id": 1, "rope_scaling": null, "max_position_embeddings": 16,
        "tie_word_embeddings": false})
}

macro_rules! llama {
    ($name:ident, $models:path) => {
        fn $name(vb: VarBuilder<'_>) -> Result<Tensor> {
            use $models::{Cache, Llama, LlamaConfig};
            let config: LlamaConfig = serde_json::from_value(llama(2)).unwrap();
            let config = config.into_config(false);
            let mut cache = Cache::new(false, vb.dtype(), &config, &Device::Cpu)?;
            Llama::load(vb, &config)?.forward(&ids(), 0, &mut cache)
        }
    };
}

llama!(moved_llama, moved_models::llama);
llama!(stock_llama, candle_transformers::models::llama);

#[test]
fn llama_is_stock_candles_and_has_right_gradients() {
    let all = parameters(moved_llama);
    assert_equal(
        &moved_llama(builder(&all, DType::F64).1).unwrap(),
        &stock_llama(builder(&all, DType::F32).1).unwrap(),
    );
    differentiates(&all, moved_llama);
    // RMS norm cuts the graph: the output projection alone is trained.
    let without = without_gradient(&all, stock_llama);
    assert_eq!(without.len(), all.len() - 1);
    assert!(!without.contains(&"lm_head.weight".to_owned()));
}
