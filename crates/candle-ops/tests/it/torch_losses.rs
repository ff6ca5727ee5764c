//! Tests that compare losses with PyTorch's values and gradients, recorded by a script in
//! `tests/vectors`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use amp::Autocast;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::nn::loss;
use candle_ops::{Context, CtcLossOptions, Reduction, ctc_loss, log_softmax, record};
use serde::Deserialize;

#[derive(Deserialize)]
struct Recorded {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    loss: String,
    number: Option<f64>,
    inputs: Vec<Numbers>,
    constants: Vec<Numbers>,
    y: Numbers,
    gradients: Vec<Numbers>,
}

#[derive(Deserialize)]
struct Numbers {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Numbers {
    fn tensor(&self) -> Tensor {
        Tensor::from_slice(&self.values, &self.shape[..], &Device::Cpu).unwrap()
    }
}

impl Case {
    fn vars(&self, dtype: DType) -> Vec<Var> {
        let var = |input: &Numbers| Var::from_tensor(&input.tensor().to_dtype(dtype)?);
        self.inputs.iter().map(var).collect::<Result<_>>().unwrap()
    }

    fn apply(&self, vars: &[Var]) -> Result<Tensor> {
        let dtype = vars[0].dtype();
        let constants = self.constants.iter().map(|numbers| numbers.tensor().to_dtype(dtype));
        let constants = constants.collect::<Result<Vec<_>>>()?;
        let mut t = vars.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>();
        t.extend(constants);
        let number = self.number.unwrap_or_default();
        match self.loss.as_str() {
            "bce" => loss::binary_cross_entropy_with_logit(&t[0], &t[1]),
            "mse" => loss::mse(&t[0], &t[1]),
            "huber" => loss::huber(&t[0], &t[1], number),
            "smooth_l1" => loss::smooth_l1(&t[0], &t[1], number),
            "kl_div" => loss::kl_div(&t[0], &t[1]),
            "cosine_similarity" => loss::cosine_similarity(&t[0], &t[1], 1, number)?.sum_all(),
            "cosine_embedding" => loss::cosine_embedding(&t[0], &t[1], &t[2], number),
            "triplet_margin" => loss::triplet_margin(&t[0], &t[1], &t[2], number),
            "ctc_mean" | "ctc_sum" | "ctc_none" => ctc(&t, &self.loss, number as usize),
            other => panic!("no loss called {other}"),
        }
    }
}

/// With infinite losses as 0. The constants are labels, and numbers of frames and of labels.
fn ctc(t: &[Tensor], name: &str, blank: usize) -> Result<Tensor> {
    let reduction = match name {
        "ctc_mean" => Reduction::Mean,
        "ctc_sum" => Reduction::Sum,
        _ => Reduction::None,
    };
    let lengths = |t: &Tensor| -> Result<Vec<usize>> {
        let lengths = t.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        Ok(lengths.into_iter().map(|length| length as usize).collect())
    };
    let options = CtcLossOptions { blank, reduction, zero_infinity: true };
    let (frames, labels) = (lengths(&t[2])?, lengths(&t[3])?);
    let targets = t[1].to_dtype(DType::I64)?;
    let loss = ctc_loss(&log_softmax(&t[0])?, &targets, &frames, &labels, options)?;
    loss.sum_all()
}

/// The distance relative to the largest value.
fn off(got: &Tensor, wanted: &Numbers) -> f64 {
    let got = got.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let largest = wanted.values.iter().fold(1e-3_f64, |m, v| m.max(v.abs()));
    got.iter().zip(&wanted.values).fold(0_f64, |m, (a, b)| m.max((a - b).abs())) / largest
}

fn cases() -> Vec<Case> {
    let recorded: Recorded = serde_json::from_str(include_str!("../vectors/losses.json")).unwrap();
    assert_eq!(recorded.cases.len(), 16);
    recorded.cases
}

/// With candle's backward pass and with that of a tape. Recorded numbers have twelve digits.
#[test]
fn losses_are_pytorchs() {
    for (dtype, most) in [(DType::F64, 1e-10), (DType::F32, 2e-5)] {
        for (i, case) in cases().iter().enumerate() {
            let (what, vars) = (format!("case {i}, {}, {dtype:?}", case.loss), case.vars(dtype));
            let loss = case.apply(&vars).unwrap();
            let sum: f64 = case.y.values.iter().sum();
            let wanted = Numbers { shape: Vec::new(), values: vec![sum] };
            assert_eq!((loss.dtype(), loss.rank()), (dtype, 0), "{what}");
            assert!(off(&loss, &wanted) < most, "{what}: {}", off(&loss, &wanted));
            let (taped, tape) = record(|| case.apply(&vars));
            for gradients in [loss.backward().unwrap(), tape.backward(&taped.unwrap()).unwrap()] {
                for (var, wanted) in vars.iter().zip(&case.gradients) {
                    let off = off(gradients.get(var).unwrap(), wanted);
                    assert!(off < most, "{what}: a gradient is off by {off}");
                }
            }
        }
    }
}

/// In half precision, and under autocast, losses equal those of the same numbers in `f32`.
#[test]
fn losses_of_halves_are_in_f32() {
    for (i, case) in cases().iter().enumerate() {
        for dtype in [DType::F16, DType::BF16] {
            let vars = case.vars(dtype);
            let wide = |var: &Var| Var::from_tensor(&var.to_dtype(DType::F32).unwrap()).unwrap();
            let wide: Vec<_> = vars.iter().map(wide).collect();
            let [half, exact] = [&vars, &wide].map(|vars| case.apply(vars).unwrap());
            let mut context = Context::new(0).with_autocast(Autocast::cuda());
            let under = context.enter(|| case.apply(&vars)).unwrap();
            for got in [&half, &under] {
                assert_eq!(got.dtype(), DType::F32, "case {i}");
                let [a, b] = [got, &exact].map(|x| x.to_scalar::<f32>().unwrap());
                assert!((a - b).abs() <= 0.02 * b.abs(), "case {i}: {a} and {b}");
            }
            let gradients = half.backward().unwrap();
            let exact = exact.backward().unwrap();
            for (var, wide) in vars.iter().zip(&wide) {
                let gradient = exact.get(wide).unwrap();
                let shape = gradient.dims().to_vec();
                let values = gradient.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
                let wanted = Numbers { shape, values: values.to_vec1().unwrap() };
                let off = off(gradients.get(var).unwrap(), &wanted);
                assert!(off < 0.02, "case {i}, {}: off by {off}", case.loss);
            }
        }
    }
    // Sums of halves would end at 2048.
    let ones = Tensor::ones(5000, DType::F16, &Device::Cpu).unwrap();
    let loss = loss::mse(&ones, &ones.zeros_like().unwrap()).unwrap();
    assert_eq!(loss.to_scalar::<f32>().unwrap(), 1.0);
}
