//! Our side of `rnn.sh`: median milliseconds of forward and backward of an LSTM or GRU, hidden and
//! input size 128, 64 steps, 32 samples, `f32`.
//!
//! ```text
//! side_by_side_rnn lstm|gru ours|stock ROUNDS
//! ```

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, reason = "the script reads the output")]

use std::hint::black_box;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::RNN;
use candle_nn::rnn::{GRUConfig, LSTMConfig};
use candle_ops::nn::{Gru, Lstm, RnnConfig, VarBuilder, VarMap};
use candle_ops::record;

const SIZE: usize = 128;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, whose, rounds] = &args[..] else { panic!("see the head of this file") };
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let x = Tensor::randn(0_f32, 1.0, (32, 64, SIZE), &Device::Cpu).unwrap();
    let net: Net = match (kind.as_str(), whose.as_str()) {
        ("lstm", "ours") => {
            let net = Lstm::new(SIZE, SIZE, RnnConfig::default(), vb).unwrap();
            Box::new(move |x| Ok(net.forward(x)?.0))
        }
        ("gru", "ours") => {
            let net = Gru::new(SIZE, SIZE, RnnConfig::default(), vb).unwrap();
            Box::new(move |x| Ok(net.forward(x)?.0))
        }
        ("lstm", _) => stock(candle_nn::lstm(SIZE, SIZE, LSTMConfig::default(), vb).unwrap()),
        _ => stock(candle_nn::gru(SIZE, SIZE, GRUConfig::default(), vb).unwrap()),
    };
    let step = || {
        let start = Instant::now();
        if whose == "ours" {
            let (loss, tape) = record(|| net(&x)?.sqr()?.mean_all());
            black_box(tape.backward(&loss.unwrap()).unwrap());
        } else {
            black_box(net(&x).unwrap().sqr().unwrap().mean_all().unwrap().backward().unwrap());
        }
        start.elapsed().as_secs_f64() * 1e3
    };
    step();
    let mut times: Vec<f64> = (0..rounds.parse().unwrap()).map(|_| step()).collect();
    times.sort_by(f64::total_cmp);
    println!("{:.3}", times[times.len() / 2]);
}

type Net = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

fn stock(net: impl RNN + 'static) -> Net {
    Box::new(move |x| net.states_to_tensor(&net.seq(x)?))
}
