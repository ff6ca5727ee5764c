//! Tests that compare LSTM and GRU with PyTorch's results, recorded by a script in `tests/vectors`,
//! and with candle-nn's.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use amp::Autocast;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::nn::rnn::{GRUConfig, LSTMConfig, RNN};
use candle_ops::nn::{Gru, Lstm, LstmState, RnnConfig, VarBuilder, VarMap};
use candle_ops::{Context, linear, record};
use serde::Deserialize;

#[derive(Deserialize)]
struct Recorded {
    cases: Vec<Case>,
}

type Named = BTreeMap<String, Numbers>;

#[derive(Deserialize)]
struct Case {
    kind: String,
    layers: usize,
    bidirectional: bool,
    bias: bool,
    lengths: Option<Vec<usize>>,
    inputs: Named,
    outputs: Named,
    dy: Named,
    gradients: Named,
}

#[derive(Deserialize)]
struct Numbers {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Numbers {
    fn tensor(&self, dtype: DType) -> Tensor {
        let tensor = Tensor::from_slice(&self.values, &self.shape[..], &Device::Cpu);
        tensor.unwrap().to_dtype(dtype).unwrap()
    }
}

fn cases() -> Vec<Case> {
    let recorded: Recorded = serde_json::from_str(include_str!("../vectors/rnn.json")).unwrap();
    assert_eq!(recorded.cases.len(), 18);
    recorded.cases
}

impl Case {
    fn what(&self) -> String {
        let Self { kind, layers, bidirectional, bias, lengths, .. } = self;
        format!("{kind}, {layers} layers, {bidirectional}, {bias}, {lengths:?}")
    }

    /// The parameters, `x`, and the initial states if there are.
    fn vars(&self, dtype: DType) -> VarMap {
        let vars = VarMap::new();
        let mut all = vars.data().lock().unwrap();
        for (name, numbers) in &self.inputs {
            all.insert(name.clone(), Var::from_tensor(&numbers.tensor(dtype)).unwrap());
        }
        drop(all);
        vars
    }

    /// The outputs in the order of their names: cell states, hidden states, outputs.
    fn apply(&self, vars: &VarMap) -> Result<Vec<Tensor>> {
        let of = |name: &str| vars.data().lock().unwrap().get(name).map(|v| v.as_tensor().clone());
        let (x, lengths) = (of("x").unwrap(), self.lengths.as_deref());
        let config = RnnConfig {
            num_layers: self.layers,
            bias: self.bias,
            bidirectional: self.bidirectional,
            ..RnnConfig::default()
        };
        let vb = VarBuilder::from_varmap(vars, x.dtype(), &Device::Cpu);
        if self.kind == "gru" {
            let (y, h) = Gru::new(2, 3, config, vb)?.forward_with(&x, of("h").as_ref(), lengths)?;
            return Ok(vec![h, y]);
        }
        let state = of("h").zip(of("c")).map(|(h, c)| LstmState { h, c });
        let lstm = Lstm::new(2, 3, config, vb)?;
        let (y, LstmState { h, c }) = lstm.forward_with(&x, state.as_ref(), lengths)?;
        Ok(vec![c, h, y])
    }

    /// The outputs, and the sum of their products with `dy`, in `f32` at least.
    fn loss(&self, vars: &VarMap) -> Result<(Vec<Tensor>, Tensor)> {
        let outputs = self.apply(vars)?;
        let mut loss = Tensor::zeros((), DType::F64, &Device::Cpu)?;
        for (y, dy) in outputs.iter().zip(self.dy.values()) {
            loss = (loss + (y.to_dtype(DType::F64)? * dy.tensor(DType::F64))?.sum_all()?)?;
        }
        Ok((outputs, loss))
    }
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The distance relative to the largest value.
fn off(got: &Tensor, wanted: &[f64]) -> f64 {
    let largest = wanted.iter().fold(1e-3_f64, |m, v| m.max(v.abs()));
    flat(got).iter().zip(wanted).fold(0_f64, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// With candle's backward pass and with that of a tape. Recorded numbers have ten digits.
#[test]
fn lstm_and_gru_are_pytorchs() {
    for case in cases() {
        for (dtype, most) in
            [(DType::F64, 1e-8), (DType::F32, 1e-5), (DType::F16, 0.03), (DType::BF16, 0.08)]
        {
            let (what, vars) = (format!("{}, {dtype:?}", case.what()), case.vars(dtype));
            let (outputs, loss) = case.loss(&vars).unwrap();
            assert_eq!(outputs.len(), case.outputs.len());
            for (got, (name, wanted)) in outputs.iter().zip(&case.outputs) {
                assert_eq!((got.dims(), got.dtype()), (&wanted.shape[..], dtype), "{what}: {name}");
                let off = off(got, &wanted.values);
                assert!(off < most, "{what}: {name} is off by {off}");
            }
            let (taped, tape) = record(|| case.loss(&vars));
            let both = [loss.backward().unwrap(), tape.backward(&taped.unwrap().1).unwrap()];
            for gradients in both {
                for (name, wanted) in &case.gradients {
                    let var = vars.data().lock().unwrap()[name].clone();
                    let off = off(gradients.get(&var).unwrap(), &wanted.values);
                    assert!(off < most, "{what}: the gradient of {name} is off by {off}");
                }
            }
        }
    }
}

/// Behind a layer in half precision, as under autocast; candle-nn's LSTM is an error there.
#[test]
fn autocast_keeps_parameters_in_f32() {
    for policy in [Autocast::cpu(), Autocast::cuda()] {
        for case in cases() {
            let vars = case.vars(DType::F32);
            let mut context = Context::new(0).with_autocast(policy.clone());
            let (outputs, loss) = context.enter(|| case.loss(&vars)).unwrap();
            let gradients = loss.backward().unwrap();
            for (got, (name, wanted)) in outputs.iter().zip(&case.outputs) {
                assert!(matches!(got.dtype(), DType::F16 | DType::BF16));
                assert!(off(got, &wanted.values) < 0.08, "{}: {name}", case.what());
            }
            for (name, wanted) in &case.gradients {
                let var = vars.data().lock().unwrap()[name].clone();
                let gradient = gradients.get(&var).unwrap();
                assert_eq!(gradient.dtype(), DType::F32);
                assert!(off(gradient, &wanted.values) < 0.08, "{}: {name}", case.what());
            }
        }
    }
    let x = Tensor::ones((2, 4, 2), DType::F32, &Device::Cpu).unwrap();
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let lstm = Lstm::new(2, 3, RnnConfig::default(), vb.pp("lstm")).unwrap();
    let weight = vb.get((2, 2), "weight").unwrap();
    let mut context = Context::new(0).with_autocast(Autocast::cpu());
    let (y, _) = context.enter(|| lstm.forward(&linear(&x, &weight, None)?)).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
}

/// The same parameters, by the same names.
#[test]
fn values_are_candle_nns() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let x = Tensor::randn(0f32, 1.0, (3, 6, 5), &Device::Cpu).unwrap();
    let (y, state) =
        Lstm::new(5, 17, RnnConfig::default(), vb.pp("lstm")).unwrap().forward(&x).unwrap();
    let stock = candle_ops::nn::lstm(5, 17, LSTMConfig::default(), vb.pp("lstm")).unwrap();
    let states = stock.seq(&x).unwrap();
    assert!(off(&y, &flat(&stock.states_to_tensor(&states).unwrap())) < 1e-5);
    assert!(off(&state.c, &flat(&states[5].c)) < 1e-5);
    let (y, _) = Gru::new(5, 17, RnnConfig::default(), vb.pp("gru")).unwrap().forward(&x).unwrap();
    let stock = candle_ops::nn::gru(5, 17, GRUConfig::default(), vb.pp("gru")).unwrap();
    let states = stock.seq(&x).unwrap();
    assert!(off(&y, &flat(&stock.states_to_tensor(&states).unwrap())) < 1e-5);
}

#[test]
fn dropout_is_between_layers_in_training() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let x = Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu).unwrap();
    let mut context = Context::new(5);
    for (num_layers, drawn) in [(1, 0), (3, 2 * 2 * 3 * 8)] {
        let config = RnnConfig { num_layers, dropout: 0.5, ..RnnConfig::default() };
        let lstm = Lstm::new(4, 8, config, vb.pp(num_layers)).unwrap();
        let whole = lstm.forward(&x).unwrap().0;
        let evaluated = context.evaluate(|| lstm.forward(&x)).unwrap().0;
        assert_eq!(flat(&whole), flat(&evaluated));
        let trained = context.enter(|| lstm.forward(&x)).unwrap().0;
        assert_eq!(context.random_position(), drawn);
        assert_eq!(flat(&whole) == flat(&trained), drawn == 0);
    }
}

#[test]
fn what_does_not_fit_is_an_error_and_nothing_is_empty() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let of = |shape: [usize; 3]| Tensor::ones(&shape[..], DType::F32, &Device::Cpu).unwrap();
    let lstm = Lstm::new(4, 8, RnnConfig::default(), vb.pp("lstm")).unwrap();
    let with = |x: [usize; 3], state: Option<[usize; 3]>, lengths: Option<&[usize]>| {
        let state = state.map(|shape| LstmState { h: of(shape), c: of(shape) });
        lstm.forward_with(&of(x), state.as_ref(), lengths).unwrap_err().to_string()
    };
    assert!(with([2, 3, 5], None, None).contains("does not fit a weight"));
    assert!(with([2, 3, 4], Some([1, 3, 8]), None).contains("a state of shape [1, 3, 8]"));
    assert!(with([2, 3, 4], None, Some(&[3])).contains("lengths [3] for 2 samples"));
    assert!(with([2, 3, 4], None, Some(&[3, 4])).contains("of 3 steps"));
    for config in [
        RnnConfig { num_layers: 0, ..RnnConfig::default() },
        RnnConfig { dropout: 1.0, ..RnnConfig::default() },
    ] {
        let error = Gru::new(4, 8, config, vb.pp("gru")).unwrap_err().to_string();
        assert!(error.contains("at least one layer"), "{error}");
    }
    for (x, lengths) in [([0, 3, 4], &[][..]), ([2, 0, 4], &[0, 0]), ([2, 3, 4], &[0, 0])] {
        let x = Var::from_tensor(&of(x)).unwrap();
        let (y, state) = lstm.forward_with(&x, None, Some(lengths)).unwrap();
        assert!(flat(&y).iter().chain(&flat(&state.c)).all(|v| *v == 0.0));
        y.sum_all().unwrap().backward().unwrap();
    }
}
