//! Tests that compare the tape with candle's own graph.

use std::sync::Arc;

use candle_core::D;
use proptest::prelude::*;

use super::*;
use crate::{add, add_relu, cross_entropy, dropout, gelu, layer_norm, linear, relu, softmax};

/// One step of a random program over square matrices.
#[derive(Clone, Copy, Debug)]
enum Step {
    Relu(usize),
    Gelu(usize),
    Softmax(usize),
    Add(usize, usize),
    AddRelu(usize, usize),
    Linear(usize, usize),
    LayerNorm(usize),
    Dropout(usize),
    Reshaped(usize),
    // Operators of candle.
    Plus(usize, usize),
    Times(usize, usize),
    Transpose(usize),
    Reshape(usize),
    Mean(usize),
    Detach(usize),
}

const WIDTH: usize = 4;
const VARS: usize = 3;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..15, any::<prop::sample::Index>(), any::<prop::sample::Index>());
    prop::collection::vec(step, 1..20).prop_map(|steps| {
        let step =
            |(at, (kind, a, b)): (usize, (i32, prop::sample::Index, prop::sample::Index))| {
                let (a, b) = (a.index(VARS + at), b.index(VARS + at));
                match kind {
                    0 => Step::Relu(a),
                    1 => Step::Gelu(a),
                    2 => Step::Softmax(a),
                    3 => Step::Add(a, b),
                    4 => Step::AddRelu(a, b),
                    5 => Step::Linear(a, b),
                    6 => Step::LayerNorm(a),
                    7 => Step::Dropout(a),
                    8 => Step::Plus(a, b),
                    9 => Step::Times(a, b),
                    10 => Step::Transpose(a),
                    11 => Step::Reshape(a),
                    12 => Step::Mean(a),
                    13 => Step::Reshaped(a),
                    _ => Step::Detach(a),
                }
            };
        steps.into_iter().enumerate().map(step).collect()
    })
}

/// The sum of all results of a program.
fn run_steps(vars: &[Tensor], steps: &[Step]) -> Result<Tensor> {
    let mut values = vars.to_vec();
    for step in steps {
        let value = |i: usize| &values[i];
        let next = match *step {
            Step::Relu(a) => relu(value(a)),
            Step::Gelu(a) => gelu(value(a)),
            Step::Softmax(a) => softmax(value(a)),
            Step::Add(a, b) => add(value(a), value(b)),
            Step::AddRelu(a, b) => add_relu(value(a), value(b)),
            Step::Linear(a, b) => linear(value(a), value(b), None)? * 0.5,
            Step::LayerNorm(a) => {
                let (gamma, beta) = (vars[0].get(0)?, vars[1].get(1)?);
                layer_norm(value(a), &gamma, &beta, 1.0)
            }
            Step::Dropout(a) => dropout(value(a), 0.25),
            Step::Reshaped(a) => {
                let x = gelu(&value(a).reshape((2, 8))?)?;
                (relu(&x.flatten_all()?)? + relu(&x.reshape(16)?)?)?.reshape((WIDTH, WIDTH))
            }
            Step::Plus(a, b) => value(a) + value(b),
            Step::Times(a, b) => value(a) * (value(b) * 0.25)?,
            Step::Transpose(a) => value(a).t(),
            Step::Reshape(a) => value(a).reshape((2, 8))?.reshape((WIDTH, WIDTH)),
            Step::Mean(a) => value(a).broadcast_sub(&value(a).mean_keepdim(D::Minus1)?),
            Step::Detach(a) => Ok(value(a).detach()),
        }?;
        values.push((next * 0.5)?);
    }
    values.iter().try_fold(Tensor::zeros((), DType::F64, &Device::Cpu)?, |sum, value| {
        sum + value.sum_all()?
    })
}

fn numbers(i: usize) -> Vec<f64> {
    (0..WIDTH * WIDTH).map(|j| ((i * 37 + j * 11) % 17) as f64 / 9.0 - 0.9).collect()
}

fn vars() -> Vec<Tensor> {
    let var = |i| {
        let values = Tensor::from_vec(numbers(i), (WIDTH, WIDTH), &Device::Cpu).unwrap();
        Var::from_tensor(&values).unwrap().into_inner()
    };
    (0..VARS).map(var).collect()
}

fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_close(a: &Tensor, b: &Tensor) {
    for (a, b) in values(a).into_iter().zip(values(b)) {
        assert!((a - b).abs() <= 1e-12 * (1.0 + a.abs()), "{a} and {b}");
    }
}

/// Runs a pass in a context with random numbers for dropout.
fn in_context<R>(call: impl FnOnce() -> R) -> R {
    crate::Context::new(5).enter(call)
}

/// Gradients as reported by `backward_with`.
fn told(tape: Tape, loss: &Tensor) -> Vec<(TensorId, Tensor)> {
    let told = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&told);
    tape.backward_with(loss, loss.ones_like().unwrap(), move |id, gradient| {
        kept.lock().push((id, gradient));
        Ok(())
    })
    .unwrap();
    std::mem::take(&mut *told.lock())
}

proptest! {
    #[test]
    fn random_programs_have_the_gradients_of_candles_graph(steps in steps()) {
        let vars = vars();
        let loss = in_context(|| run_steps(&vars, &steps)).unwrap();
        let expected = loss.backward().unwrap();
        let (taped, tape) = in_context(|| record(|| run_steps(&vars, &steps)));
        let taped = taped.unwrap();
        prop_assert_eq!(values(&taped), values(&loss));
        let gradients = tape.backward(&taped).unwrap();
        for var in &vars {
            match (expected.get(var), gradients.get(var)) {
                (Some(expected), Some(gradient)) => assert_close(gradient, expected),
                (expected, gradient) => {
                    prop_assert_eq!(expected.is_some(), gradient.is_some());
                }
            }
        }
        // The same with tensors of `Sources`, each of which is reported once.
        let sources = Sources::new(&Device::Cpu).unwrap();
        let shape = (WIDTH, WIDTH).into();
        let of = |i| sources.tensor("w", CpuStorage::F64(numbers(i)), &shape).unwrap();
        let own: Vec<_> = (0..VARS).map(of).collect();
        let (taped, tape) = in_context(|| sources.record(|| run_steps(&own, &steps)));
        let told = told(tape, &taped.unwrap());
        for (own, var) in own.iter().zip(&vars) {
            let mut told = told.iter().filter(|(id, _)| *id == own.id());
            if let Some(expected) = expected.get(var) {
                assert_close(&told.next().unwrap().1, expected);
            }
            prop_assert!(told.next().is_none());
        }
    }
}

/// An operator in candle's graph that records its backward pass.
struct Noted(&'static str, Arc<Mutex<Vec<String>>>);

impl CustomOp1 for Noted {
    fn name(&self) -> &'static str {
        "noted"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        self.1.lock().push(self.0.to_owned());
        Ok(Some(dy.clone()))
    }
}

#[test]
fn a_gradient_is_told_once_complete_and_before_backward_goes_on() {
    let (sources, events) = (Sources::new(&Device::Cpu).unwrap(), Arc::default());
    let shape = (WIDTH, WIDTH).into();
    let of = |name: &str, i| sources.tensor(name, CpuStorage::F64(numbers(i)), &shape).unwrap();
    let (a, b, c, d) = (of("a", 0), of("b", 1), of("c", 2), of("d", 3));
    let labels = Tensor::new(&[3_i64, 0, 1, 2], &Device::Cpu).unwrap();
    let note = |x: &Tensor, name| x.apply_op1(Noted(name, Arc::clone(&events)));
    let (loss, tape) = sources.record(|| {
        // `a` is used at both ends, `b` and `c` by candle, `d` by an operator of the tape.
        let x = note(&add(&a, &a)?, "first")?.matmul(&b)?;
        let x = note(&x, "second")?.matmul(&c)?;
        let x = linear(&note(&x, "third")?, &d, None)?;
        cross_entropy(&add(&note(&x, "fourth")?, &a)?, &labels)
    });
    let (loss, kept) = (loss.unwrap(), Arc::clone(&events));
    let names = [(a.id(), "a"), (b.id(), "b"), (c.id(), "c"), (d.id(), "d")];
    tape.backward_with(&loss, loss.ones_like().unwrap(), move |id, _| {
        let (_, name) = names.iter().find(|(named, _)| *named == id).unwrap();
        kept.lock().push((*name).to_owned());
        Ok(())
    })
    .unwrap();
    let expected = ["fourth", "d", "third", "c", "second", "b", "first", "a"];
    assert_eq!(*events.lock(), expected);
}

#[test]
fn a_residual_stream_of_candles_sums_is_left_to_candle() {
    let vars = vars();
    let run = |add: fn(&Tensor, &Tensor) -> Result<Tensor>| {
        (0..100)
            .try_fold(vars[0].clone(), |x, _| add(&x, &gelu(&linear(&x, &vars[1], None)?)?))?
            .mean_all()
    };
    let plus: fn(&Tensor, &Tensor) -> Result<Tensor> = |a, b| (a + b)? * 0.5;
    let (loss, tape) = record(|| run(plus));
    assert!(tape.repeats > REPEATS && tape.entries.len() < 20, "{tape:?}");
    let (gradients, loss) = (tape.backward(&loss.unwrap()).unwrap(), run(plus).unwrap());
    let expected = loss.backward().unwrap();
    vars[..2].iter().for_each(|var| {
        assert_close(gradients.get(var).unwrap(), expected.get(var).unwrap());
    });
    // With the operators of this crate all of it is on the tape.
    let (_, tape) = record(|| run(add));
    assert_eq!((tape.repeats, tape.entries.len()), (0, 300));
}

#[test]
fn what_ready_refuses_ends_the_pass_and_the_next_is_right() {
    let vars = vars();
    let forward = || relu(&add(&vars[0], &vars[1])?)?.sum_all();
    let (loss, tape) = record(forward);
    let loss = loss.unwrap();
    let refused = tape.backward_with(&loss, loss.ones_like().unwrap(), |_, _| bail!("no more"));
    assert!(refused.unwrap_err().to_string().starts_with("no more"));
    let (loss, tape) = record(forward);
    let loss = loss.unwrap();
    assert_eq!(told(tape, &loss).len(), 2);
    let other = Tensor::new(1.0_f32, &Device::Cpu).unwrap();
    let error = Tape::default().backward_with(&loss, other, |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("not alike"), "{error}");
    // Outside of a tape, and of one particular tape.
    let gradients = forward().unwrap().backward().unwrap();
    assert!(gradients.get(&vars[1]).is_some());
    assert!(Tape::default().backward(&forward().unwrap()).unwrap().get(&vars[0]).is_some());
}

#[test]
fn a_gradient_that_would_be_lost_is_an_error() {
    let var = vars().remove(0);
    let error = |result: Result<()>| result.unwrap_err().to_string();
    // With candle's own backward.
    let (loss, tape) = record(|| relu(&var)?.sum_all());
    let loss = loss.unwrap();
    let text = error(loss.backward().map(drop));
    assert!(text.contains("`Tape::backward`"), "{text}");
    // A pass within another.
    let (inner_loss, inner) = record(|| relu(&var)?.sum_all());
    let mut inner = Some((inner, inner_loss.unwrap()));
    let nested = tape.backward_with(&loss, loss.ones_like().unwrap(), move |_, _| {
        let (tape, loss) = inner.take().unwrap();
        tape.backward(&loss).map(drop)
    });
    assert!(error(nested).contains("within `ready`"));
    // A result of another tape.
    let (y, inner) = record(|| relu(&var));
    let y = y.unwrap();
    let (loss, tape) = record(|| gelu(&y)?.sum_all());
    let text = error(tape.backward(&loss.unwrap()).map(drop));
    assert!(text.contains("another tape"), "{text}");
    drop(inner);
}

#[test]
fn an_operator_that_fails_leaves_its_inputs_to_the_next() {
    struct Failing;
    impl Differentiable<1> for Failing {
        fn name(&self) -> &'static str {
            "failing"
        }
        fn backward(&self, _: [&Tensor; 1], _: &Tensor, _: &Tensor) -> Result<[Option<Tensor>; 1]> {
            Ok([None])
        }
    }
    let var = vars().remove(0);
    let (loss, tape) = record(|| {
        let x = (&var * 2.0)?;
        assert!(crate::graph::custom_op::apply1(Failing, [&x]).is_err());
        add(&x, &x)?.sum_all()
    });
    let gradients = tape.backward(&loss.unwrap()).unwrap();
    assert_eq!(values(gradients.get(&var).unwrap())[0], 4.0);
}

#[test]
fn a_source_outside_of_a_pass_says_so() {
    let sources = Sources::new(&Device::Cpu).unwrap();
    let shape = (WIDTH, WIDTH).into();
    let own = sources.tensor("own", CpuStorage::F64(numbers(0)), &shape).unwrap();
    let error = own.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(error.contains("Tape::backward_with"), "{error}");
}

#[test]
fn backward_frees_what_it_has_used() {
    struct Counted(Arc<()>);
    impl Differentiable<1> for Counted {
        fn name(&self) -> &'static str {
            "counted"
        }
        fn forward(&self, [(x, l)]: [(&CpuStorage, &Layout); 1]) -> Result<(CpuStorage, Shape)> {
            Ok((x.try_clone(l)?, l.shape().clone()))
        }
        fn backward(
            &self,
            _: [&Tensor; 1],
            _: &Tensor,
            dy: &Tensor,
        ) -> Result<[Option<Tensor>; 1]> {
            Ok([Some((dy * Arc::strong_count(&self.0) as f64)?)])
        }
    }
    let (count, var) = (Arc::new(()), vars().remove(0));
    let (loss, tape) = record(|| {
        let one = |x: &Tensor| crate::graph::custom_op::apply1(Counted(Arc::clone(&count)), [x]);
        one(&one(&one(&var)?)?)?.sum_all()
    });
    let gradients = tape.backward(&loss.unwrap()).unwrap();
    // With the one here there are four, then three, then two.
    assert_eq!(values(gradients.get(&var).unwrap())[0], 24.0);
}

/// candle would add the gradient of a reshape to zeros.
#[test]
fn the_gradient_of_a_reshape_is_handed_on() {
    let [w, x] = [&vars()[0], &vars()[1]].map(|var| Var::from_tensor(var).unwrap());
    let dy = Tensor::from_vec(numbers(1), 16, &Device::Cpu).unwrap();
    // The gradient of an operator's result is passed on; for a variable, whose gradient may be
    // changed, it is a copy.
    for (is_result, is_copy) in [(true, false), (false, true)] {
        let (y, tape) = record(|| {
            let of = if is_result { add(&w, &x.detach())? } else { w.as_tensor().clone() };
            add(&of.reshape((2, 8))?.flatten_all()?, &dy)
        });
        let given = dy.clone();
        let ready = move |_, gradient: Tensor| {
            assert_eq!(gradient.dims(), [WIDTH, WIDTH]);
            assert_eq!(values(&gradient), values(&given));
            assert_eq!(place(&gradient) != place(&given), is_copy);
            Ok(())
        };
        tape.backward_with(&y.unwrap(), dy.clone(), ready).unwrap();
    }
}
