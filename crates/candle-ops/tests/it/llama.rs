//! Tests that compare `nn::Llama` with transformers' results, recorded by
//! `tests/vectors/record_llama.py`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module, Tensor};
use candle_ops::nn::llama::{Llama, LlamaCache};
use candle_ops::nn::lora::{LoraOptions, lora, save_peft};
use candle_ops::nn::{GenerateOptions, LlamaConfig, VarMap, pretrained, seeded};
use candle_ops::{Context, cross_entropy, record};

const CPU: Device = Device::Cpu;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/llama").join(name)
}

fn values(name: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(folder(name).join("values.safetensors"), &CPU).unwrap()
}

/// A model with the recorded weights.
fn load(name: &str, vars: &VarMap, dtype: DType) -> Llama {
    let config = LlamaConfig::load(folder(name).join("config.json")).unwrap();
    Llama::new(&config, pretrained(vars, folder(name), 0, dtype, &CPU).unwrap()).unwrap()
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    let [a, b] = [a, b].map(|t| t.to_dtype(DType::F32).unwrap());
    (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
}

fn largest(of: &Tensor) -> f32 {
    distance(of, &of.zeros_like().unwrap())
}

/// Mean loss of the next tokens.
fn loss(net: &Llama, tokens: &Tensor) -> candle_core::Result<Tensor> {
    let last = tokens.dim(1)? - 1;
    let logits = net.forward(&tokens.narrow(1, 0, last)?)?;
    cross_entropy(&logits.flatten_to(1)?, &tokens.narrow(1, 1, last)?.flatten_all()?)
}

#[test]
fn logits_gradients_and_text_equal_those_of_transformers() {
    for name in ["plain", "options"] {
        let (vars, values) = (VarMap::new(), values(name));
        let net = load(name, &vars, DType::F32);
        let tokens = &values["tokens"];
        let (logits, expected) = (net.forward(tokens).unwrap(), &values["logits"]);
        // Sums of f32 in another order, and angles of up to 40 that are rounded to f32.
        let off = distance(&logits, expected) / largest(expected);
        assert!(off <= 1e-5, "{name}: {off}");

        let (result, tape) = record(|| loss(&net, tokens));
        let result = result.unwrap();
        assert!(distance(&result, &values["loss"]) <= 1e-6 * largest(&values["loss"]), "{name}");
        let taped = tape.backward(&result).unwrap();
        let plain = loss(&net, tokens).unwrap().backward().unwrap();
        let all = vars.data().lock().unwrap();
        let recorded = values.keys().filter(|key| key.starts_with("gradient.")).count();
        assert_eq!(all.len(), recorded, "{name}");
        for (key, var) in all.iter() {
            let expected = &values[&format!("gradient.{key}")];
            for gradient in [taped.get(var).unwrap(), plain.get(var).unwrap()] {
                let off = distance(gradient, expected) / largest(expected);
                assert!(off <= 2e-5, "{name} {key}: {off}");
            }
        }

        let greedy = values["greedy"].to_dtype(DType::U32).unwrap().to_vec1::<u32>().unwrap();
        let prompt = tokens.get(0).unwrap().narrow(0, 0, 10).unwrap().to_dtype(DType::U32).unwrap();
        let options = GenerateOptions {
            temperature: 0.0,
            max_new_tokens: greedy.len(),
            ..Default::default()
        };
        assert_eq!(net.generate(&prompt.to_vec1::<u32>().unwrap(), &options).unwrap(), greedy);
    }
}

/// Texts are read at once, token by token, and in parts of several tokens.
#[test]
fn cached_logits_equal_those_of_whole_texts() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-7), (DType::BF16, 0.03)] {
        let net = load("plain", &VarMap::new(), dtype);
        let tokens = &values("plain")["tokens"];
        let whole = net.forward(tokens).unwrap();
        for parts in [vec![40], vec![1; 40], vec![7, 1, 1, 5, 16, 10]] {
            let (mut cache, mut logits) = (LlamaCache::default(), Vec::new());
            for count in parts {
                let part = tokens.narrow(1, cache.len(), count).unwrap();
                logits.push(net.forward_cached(&part, &mut cache).unwrap());
            }
            let logits = Tensor::cat(&logits, 1).unwrap();
            assert_eq!(logits.dtype(), dtype);
            let most = tolerance * largest(&whole);
            assert!(distance(&logits, &whole) <= most, "{dtype:?} {}", distance(&logits, &whole));
        }
    }
}

#[test]
fn an_error_leaves_the_cache_as_it_was() {
    let net = load("plain", &VarMap::new(), DType::F32);
    let tokens = |tokens: &[u32]| Tensor::new(tokens, &CPU).unwrap().unsqueeze(0).unwrap();
    let mut cache = LlamaCache::default();
    net.forward_cached(&tokens(&[1, 2]), &mut cache).unwrap();
    let kept = cache.clone();
    assert!(net.forward_cached(&tokens(&[3, 37]), &mut cache).is_err());
    let message = net.forward_cached(&tokens(&[1; 63]), &mut cache).unwrap_err().to_string();
    assert!(message.contains("65 tokens are more than max_position_embeddings, 64"), "{message}");
    let two = Tensor::zeros((2, 1), DType::U32, &CPU).unwrap();
    assert!(net.forward_cached(&two, &mut cache).is_err());
    assert_eq!(cache.len(), 2);
    let next = |cache: &mut LlamaCache| net.forward_cached(&tokens(&[3]), cache).unwrap();
    assert_eq!(distance(&next(&mut cache), &next(&mut kept.clone())), 0.0);
}

#[test]
fn generated_text_is_that_of_the_seed_and_ends_at_a_stop_token() {
    let net = load("plain", &VarMap::new(), DType::F32);
    let options = GenerateOptions { max_new_tokens: 30, ..Default::default() };
    let with_seed = |seed| {
        let options = GenerateOptions { seed, ..options.clone() };
        net.generate(&[1, 2, 3], &options).unwrap()
    };
    assert_eq!(with_seed(1), with_seed(1));
    assert_ne!(with_seed(1), with_seed(2));
    let whole = with_seed(0);
    assert_eq!(whole.len(), 30);
    let stop = whole[20];
    let expected = whole.iter().position(|token| *token == stop).unwrap();
    let ended = GenerateOptions { stop_tokens: vec![stop], ..options.clone() };
    assert_eq!(net.generate(&[1, 2, 3], &ended).unwrap(), whole[..expected]);
    // The last token that is drawn needs no position.
    let long = GenerateOptions { max_new_tokens: 1000, ..options.clone() };
    assert_eq!(net.generate(&[1, 2, 3], &long).unwrap().len(), 62);
    assert!(net.generate(&[], &options).is_err());
    assert!(net.generate(&[1; 65], &options).is_err());
    let none = GenerateOptions { max_new_tokens: 0, ..options };
    assert!(net.generate(&[1], &none).unwrap().is_empty());
}

/// `LLAMA_FOLDER=.. cargo test`, then `record_llama.py FOLDER`, reads the file by transformers.
#[test]
fn a_saved_model_is_loaded_again() {
    let own = std::env::temp_dir().join(format!("llama-{}", std::process::id()));
    let (folder, is_kept) = match std::env::var_os("LLAMA_FOLDER") {
        Some(folder) => (folder.into(), true),
        None => (own, false),
    };
    std::fs::create_dir_all(&folder).unwrap();
    let vars = VarMap::new();
    let net = load("plain", &vars, DType::F32);
    vars.save(folder.join("model.safetensors")).unwrap();
    net.config().save(folder.join("config.json")).unwrap();

    let config = LlamaConfig::load(folder.join("config.json")).unwrap();
    assert_eq!(config, *net.config());
    let mut other = VarMap::new();
    let copy = Llama::new(&config, seeded(&other, 1, DType::F32, &CPU)).unwrap();
    other.load(folder.join("model.safetensors")).unwrap();
    let tokens = &values("plain")["tokens"];
    assert_eq!(distance(&net.forward(tokens).unwrap(), &copy.forward(tokens).unwrap()), 0.0);
    if !is_kept {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn only_adapters_of_a_pretrained_model_are_variables() {
    let (vars, plain) = (VarMap::new(), load("plain", &VarMap::new(), DType::F32));
    let options = LoraOptions {
        rank: 2,
        alpha: 4.0,
        dropout: 0.5,
        targets: vec!["*.q_proj".into(), "*.v_proj".into(), "*.mlp.*".into()],
    };
    let vb = pretrained(&vars, folder("plain").join("model.safetensors"), 3, DType::F32, &CPU);
    let vb = vb.unwrap();
    let net = lora(&options, || Llama::new(plain.config(), vb)).unwrap();
    let names: Vec<String> = vars.data().lock().unwrap().keys().cloned().collect();
    assert_eq!(names.len(), 2 * 5 * 2);
    assert!(names.contains(&"model.layers.1.mlp.up_proj.lora_A.weight".to_owned()));
    assert!(names.iter().all(|name| name.contains(".lora_")), "{names:?}");
    let tokens = &values("plain")["tokens"];
    assert_eq!(distance(&net.forward(tokens).unwrap(), &plain.forward(tokens).unwrap()), 0.0);
    let mut context = Context::new(0);
    let gradients = context.enter(|| loss(&net, tokens)?.backward()).unwrap();
    assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));

    let folder = std::env::temp_dir().join(format!("peft-{}", std::process::id()));
    save_peft(&vars, &options, &folder).unwrap();
    let saved = candle_core::safetensors::load(folder.join("adapter_model.safetensors"), &CPU);
    let saved = saved.unwrap();
    assert_eq!(saved.len(), names.len());
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    assert_eq!(saved[name].dims(), [2, 16]);
    let config = std::fs::read(folder.join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!((&config["r"], config["target_modules"].as_array().unwrap().len()), (&2.into(), 10));
    std::fs::remove_dir_all(folder).unwrap();
    assert!(save_peft(&VarMap::new(), &options, "unused").is_err());
}

#[test]
fn missing_tensors_and_files_are_named() {
    let error = |config: &LlamaConfig| {
        let vb = pretrained(&VarMap::new(), folder("plain"), 0, DType::F32, &CPU).unwrap();
        Llama::new(config, vb).unwrap_err().to_string()
    };
    let config = LlamaConfig::load(folder("plain").join("config.json")).unwrap();
    let deeper = LlamaConfig { num_hidden_layers: 3, ..config.clone() };
    let message = error(&deeper);
    assert!(message.contains("has no `model.layers.2."), "{message}");
    let wider = LlamaConfig { intermediate_size: 32, ..config };
    let message = error(&wider);
    assert!(message.contains("shape [24, 16], the model expects [32, 16]"), "{message}");
    let open = |path: PathBuf| match pretrained(&VarMap::new(), path, 0, DType::F32, &CPU) {
        Ok(_) => panic!("it was opened"),
        Err(error) => error.to_string(),
    };
    let message = open(folder("none"));
    assert!(message.contains("llama/none: No such file"), "{message}");
    assert!(open(folder("plain").join("config.json")).contains("config.json: "));
}
