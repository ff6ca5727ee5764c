//! Our side of `llama.sh`: tokens a second of training steps of a small Llama (width 256, 4 layers,
//! 8 heads with 4 of keys, SwiGLU of 688, 128 tokens, 16 samples), the median of `ROUNDS` steps.
//!
//! ```text
//! side_by_side_llama f32|bf16 ROUNDS
//! ```

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, reason = "the script reads the output")]

use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor};
use candle_ops::cross_entropy;
use candle_ops::nn::{Llama, LlamaConfig, VarMap};
use candle_train::{AdamWHyper, Trainer, seeded};

const VOCABULARY: usize = 512;
const SAMPLES: usize = 16;
const COUNT: usize = 128;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dtype, rounds] = &args[..] else { panic!("see the head of this file") };
    let config = LlamaConfig {
        vocab_size: VOCABULARY,
        hidden_size: 256,
        intermediate_size: 688,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        ..LlamaConfig::default()
    };
    let vars = VarMap::new();
    let net = Llama::new(&config, seeded(&vars, 0, DType::F32, &Device::Cpu)).unwrap();
    let train = Trainer::builder(&vars).check_gradients(false);
    let train = if dtype == "bf16" { train.bf16() } else { train };
    let mut train = train.build(AdamWHyper::default()).unwrap();
    let text = |start: usize| {
        let tokens = (0..SAMPLES * COUNT).map(|i| ((start + i) * 7919 % VOCABULARY) as u32);
        Tensor::from_iter(tokens, &Device::Cpu).unwrap()
    };
    let (tokens, next) = (text(0).reshape((SAMPLES, COUNT)).unwrap(), text(1));
    let mut step = || {
        let start = Instant::now();
        train.step(|| cross_entropy(&net.forward(&tokens)?.flatten_to(1)?, &next)).unwrap();
        start.elapsed().as_secs_f64()
    };
    step();
    let mut times: Vec<f64> = (0..rounds.parse().unwrap()).map(|_| step()).collect();
    times.sort_by(f64::total_cmp);
    println!("{:.0}", (SAMPLES * COUNT) as f64 / times[times.len() / 2]);
}
