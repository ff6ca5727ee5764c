//! Steps on candle's variables.

use candle_core::backprop::GradStore;
use candle_core::{DType as Type, Device, Result, Tensor, Var};
use candle_nn::{Module, Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use fused_optim::candle::VarOptimizer;
use fused_optim::{
    AdamP, AdamPHyper, AdamW, AdamWHyper, Applied, BertAdam, BertAdamHyper, Clip, CpuOptimizer,
    DType, FoundInf, HalfWeights, Lamb, LambHyper, Lion, LionHyper, Optimizer, ParamGroup,
    ParamMut, ScheduleFreeAdamW, ScheduleFreeAdamWHyper, Sgd, SgdHyper, StateDict, StepCtl,
};

use crate::common::Owned;
use crate::elementwise::OwnHyper;

/// Shapes of a matrix, a vector, a scalar and an empty tensor.
const SHAPES: [&[usize]; 4] = [&[6, 700], &[33], &[], &[0, 3]];

const CPU: Device = Device::Cpu;

fn values(shape: &[usize], seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 + seed * 104_729) % 1000) as f32 / 500.0 - 0.999;
    (0..shape.iter().product()).map(value).collect()
}

fn tensor(shape: &[usize], seed: usize, dtype: Type) -> Tensor {
    Tensor::from_vec(values(shape, seed), shape, &CPU).unwrap().to_dtype(dtype).unwrap()
}

fn var(shape: &[usize], seed: usize, dtype: Type) -> Var {
    Var::from_tensor(&tensor(shape, seed, dtype)).unwrap()
}

fn floats(var: &Tensor) -> Vec<f32> {
    var.to_dtype(Type::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// An empty store of gradients; candle creates stores only in a backward pass.
fn no_grads() -> GradStore {
    Var::zeros(1, Type::F32, &CPU).unwrap().sum_all().unwrap().backward().unwrap()
}

/// Steps variables and slices with equal optimizers and compares bits. The vector has no gradient
/// in one step.
fn assert_same_bits<O: Optimizer + Clone>(
    optimizer: O,
    (dtype, own): (Type, DType),
    grad: (Type, DType),
) {
    let vars = SHAPES.iter().map(|shape| var(shape, 7, dtype)).collect();
    let mut slices: Vec<_> =
        SHAPES.iter().map(|shape| Owned::new(own, &values(shape, 7))).collect();
    let (mut twin, ctl) = (optimizer.clone(), StepCtl { grad_scale: 0.5, ..StepCtl::PLAIN });
    let mut optimizer = VarOptimizer::with_optimizer(vars, optimizer).unwrap();
    for step in 0..4 {
        let has_grad = |index: usize| step != 2 || index != 1;
        let mut store = no_grads();
        for (index, var) in optimizer.vars().iter().enumerate().filter(|(i, _)| has_grad(*i)) {
            store.insert(var, tensor(SHAPES[index], step, grad.0));
        }
        assert_eq!(optimizer.step_with(&store, &ctl).unwrap(), Applied::Applied);

        let grads = SHAPES.map(|shape| Owned::new(grad.1, &values(shape, step)));
        let mut params: Vec<_> = (slices.iter_mut().zip(&grads).zip(SHAPES).enumerate())
            .map(|(index, ((weight, grad), shape))| {
                let grad = has_grad(index).then(|| grad.all());
                ParamMut::new(weight.all_mut(), grad).with_shape(shape)
            })
            .collect();
        let _applied = twin.step(&mut params, &ctl).unwrap();
    }
    for (var, slice) in optimizer.vars().iter().zip(&slices) {
        let (got, expected) = (Owned::new(own, &floats(var)), slice);
        assert_eq!(got.bits(), expected.bits(), "{}", twin.kind());
    }
    assert_eq!(optimizer.optimizer().state_dict().unwrap(), twin.state_dict().unwrap());
}

#[test]
fn variables_have_the_bits_of_slices() {
    let count = SHAPES.len();
    let (f32, f16, bf16) =
        ((Type::F32, DType::F32), (Type::F16, DType::F16), (Type::BF16, DType::Bf16));
    let adamw = AdamW::with_one_group(AdamWHyper { lr: 0.1, ..Default::default() }, count).unwrap();
    for (weight, grad) in [(f32, f32), (f16, f16), (bf16, bf16), (f16, f32), (f32, bf16)] {
        assert_same_bits(adamw.clone(), weight, grad);
        assert_same_bits(adamw.clone().with_threads(3), weight, grad);
        assert_same_bits(adamw.clone().with_half_weights(HalfWeights::Nearest), weight, grad);
    }
    let sgd = SgdHyper { lr: 0.1, momentum: 0.9, ..Default::default() };
    assert_same_bits(Sgd::with_one_group(sgd, count).unwrap(), f32, f32);
    let lion = LionHyper { lr: 0.1, ..Default::default() };
    assert_same_bits(Lion::with_one_group(lion, count).unwrap(), f32, f32);
    assert_same_bits(Lamb::with_one_group(LambHyper::default(), count).unwrap(), f32, f32);
    assert_same_bits(AdamP::with_one_group(AdamPHyper::default(), count).unwrap(), f32, f32);
    assert_same_bits(BertAdam::with_one_group(BertAdamHyper::default(), count).unwrap(), f32, f32);
    assert_same_bits(CpuOptimizer::with_one_group(OwnHyper::default(), count).unwrap(), f32, f32);
}

fn net(vars: &VarMap) -> Result<impl Module> {
    let builder = VarBuilder::from_varmap(vars, Type::F32, &CPU);
    let first = candle_nn::linear(8, 16, builder.pp("first"))?;
    Ok(candle_nn::seq().add(first).add_fn(Tensor::tanh).add(candle_nn::linear(
        16,
        1,
        builder.pp("second"),
    )?))
}

/// Trains for `steps` steps and returns the losses.
fn train(
    vars: &VarMap,
    optimizer: &mut impl candle_nn::Optimizer,
    steps: usize,
) -> Result<Vec<f32>> {
    let net = net(vars)?;
    let (inputs, targets) = (tensor(&[32, 8], 1, Type::F32), tensor(&[32, 1], 2, Type::F32));
    let step = |_| {
        let loss = (net.forward(&inputs)? - &targets)?.sqr()?.mean_all()?;
        optimizer.backward_step(&loss)?;
        loss.to_scalar()
    };
    (0..steps).map(step).collect()
}

/// The variables of [`net`], with the same values in each map.
fn vars() -> VarMap {
    let mut vars = VarMap::new();
    net(&vars).unwrap();
    let all = [("first", [16, 8]), ("second", [1, 16])];
    for (name, [outputs, inputs]) in all {
        let weight = (tensor(&[outputs, inputs], 3, Type::F32) * 0.3).unwrap();
        vars.set_one(format!("{name}.weight"), weight).unwrap();
        vars.set_one(format!("{name}.bias"), tensor(&[outputs], 4, Type::F32)).unwrap();
    }
    vars
}

#[test]
fn losses_agree_with_candles_adamw() {
    let (ours, theirs) = (vars(), vars());
    let hyper = AdamWHyper { lr: 0.01, ..Default::default() };
    let mut fused = VarOptimizer::<AdamW>::from_var_map(&ours, hyper).unwrap();
    let params = ParamsAdamW { lr: 0.01, ..Default::default() };
    let mut candle = candle_nn::AdamW::new(theirs.all_vars(), params).unwrap();
    let ours = train(&ours, &mut fused, 50).unwrap();
    let theirs = train(&theirs, &mut candle, 50).unwrap();
    assert!(theirs[49] < 0.5 * theirs[0], "{theirs:?}");
    // A unit in the last place per operator and step, which training may amplify.
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * b.abs();
    assert!(ours.iter().zip(&theirs).all(near), "{ours:?} {theirs:?}");
}

#[test]
fn training_resumes_with_the_same_bits() {
    let hyper = AdamWHyper { lr: 0.01, ..Default::default() };
    let whole = vars();
    let mut adamw = VarOptimizer::<AdamW>::from_var_map(&whole, hyper).unwrap();
    let losses = train(&whole, &mut adamw, 7).unwrap();

    let first = vars();
    let mut adamw = VarOptimizer::<AdamW>::from_var_map(&first, hyper).unwrap();
    train(&first, &mut adamw, 3).unwrap();
    let bytes = adamw.state_dict().unwrap().to_safetensors().unwrap();
    // In another order: the state is loaded by name.
    let second = first.data().lock().unwrap().clone();
    let map = VarMap::new();
    map.data().lock().unwrap().extend(second.into_iter().collect::<Vec<_>>().into_iter().rev());
    let mut adamw = VarOptimizer::<AdamW>::from_var_map(&map, AdamWHyper::default()).unwrap();
    adamw.load_state_dict(&StateDict::from_safetensors(&bytes).unwrap()).unwrap();
    assert_eq!(adamw.learning_rate(), 0.01);
    assert_eq!(train(&map, &mut adamw, 4).unwrap(), losses[3..]);
}

/// By index, `VarMap::all_vars` would put moments on other variables after a restart.
#[test]
fn state_without_names_is_neither_saved_nor_loaded() {
    let fails = |result: Result<()>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let (map, hyper) = (vars(), AdamWHyper::default());
    let mut nameless = VarOptimizer::<AdamW>::new(map.all_vars(), hyper).unwrap();
    train(&map, &mut nameless, 1).unwrap();
    let nowhere = "the variables have no names, and the order of `VarMap::all_vars` differs between processes: make \
                   the optimizer with `VarOptimizer::from_var_map`";
    fails(nameless.state_dict().map(drop), nowhere);
    let mut named = VarOptimizer::<AdamW>::from_var_map(&map, hyper).unwrap();
    train(&map, &mut named, 1).unwrap();
    let saved = named.state_dict().unwrap();
    fails(nameless.load_state_dict(&saved), nowhere);
    let by_index = nameless.optimizer().state_dict().unwrap();
    fails(named.load_state_dict(&by_index), "the state has no names");
    assert_eq!(named.state_dict().unwrap(), saved);

    // In the order of another process, by name.
    let others: Vec<_> = map.data().lock().unwrap().clone().into_iter().collect();
    let count = others.len();
    let adamw = AdamW::with_one_group(hyper, count).unwrap();
    let mut other = VarOptimizer::with_names(others.into_iter().rev(), adamw).unwrap();
    other.load_state_dict(&saved).unwrap();
    let loaded = other.state_dict().unwrap();
    for (index, spec) in &loaded.params {
        let (was, _) = saved.params.iter().find(|(_, old)| old.name == spec.name).unwrap();
        assert_eq!(loaded.state[index], saved.state[was], "{}", spec.name);
    }
}

#[test]
fn a_variable_without_a_gradient_is_not_updated() {
    let vars = vec![var(&[3], 1, Type::F32), var(&[3], 2, Type::F32)];
    let mut sgd = VarOptimizer::<Sgd>::new(vars.clone(), SgdHyper::default()).unwrap();
    sgd.backward_step(&vars[0].sum_all().unwrap()).unwrap();
    assert_ne!(floats(&vars[0]), values(&[3], 1));
    assert_eq!(floats(&vars[1]), values(&[3], 2));
    let state = sgd.optimizer().state_dict().unwrap().state;
    assert_eq!(state.keys().copied().collect::<Vec<_>>(), [0]);
}

#[test]
fn gradients_may_be_non_contiguous() {
    let (one, other) = (var(&[2, 3], 1, Type::F32), var(&[2, 3], 1, Type::F32));
    let grad = tensor(&[3, 2], 5, Type::F32).t().unwrap();
    let step = |var: &Var, grad: Tensor| {
        let mut sgd = VarOptimizer::<Sgd>::new(vec![var.clone()], SgdHyper::default()).unwrap();
        let mut grads = no_grads();
        grads.insert(var, grad);
        sgd.step(&grads).unwrap();
    };
    step(&one, grad.contiguous().unwrap());
    step(&other, grad);
    assert_eq!(floats(&one), floats(&other));
}

#[test]
fn a_step_skips_infinities_and_clips() {
    let weight = var(&[2], 1, Type::F32);
    let mut sgd = VarOptimizer::<Sgd>::new(vec![weight.clone()], SgdHyper::default()).unwrap();
    let ctl = StepCtl { found_inf: FoundInf::Check, clip: Some(Clip::norm(1.0)), ..StepCtl::PLAIN };
    let mut grads = no_grads();
    grads.insert(&weight, Tensor::new(&[f32::INFINITY, 1.0], &CPU).unwrap());
    assert_eq!(sgd.step_with(&grads, &ctl).unwrap(), Applied::SkippedNonFinite);
    assert_eq!(floats(&weight), values(&[2], 1));
    grads.insert(&weight, Tensor::new(&[3.0_f32, 4.0], &CPU).unwrap());
    assert_eq!(sgd.step_with(&grads, &ctl).unwrap(), Applied::Applied);
    assert_eq!(sgd.optimizer().grad_norm(), Some(5.0));
}

#[test]
fn errors_name_the_variable_and_change_nothing() {
    // With RUST_BACKTRACE candle's errors contain a backtrace.
    fn fails<T>(result: Result<T>, text: &str) {
        let error = result.err().unwrap().to_string();
        assert!(error.contains(text), "{error}");
    }
    let new = |vars: &[&Var]| VarOptimizer::<AdamW>::from_slice(vars, AdamWHyper::default());
    let double = var(&[1], 1, Type::F64);
    fails(new(&[&double]), "variable 0 is F64 on Cpu; expected f32, f16 or bf16 on Cpu");
    let map = VarMap::new();
    map.data().lock().unwrap().insert("w".to_owned(), double);
    let named = VarOptimizer::<AdamW>::from_var_map(&map, AdamWHyper::default());
    fails(named, "`w` is F64 on Cpu");
    // As candle's optimizers, it ignores integer variables.
    assert!(new(&[&var(&[1], 1, Type::U32)]).unwrap().vars().is_empty());

    let map = VarMap::new();
    let (a, b) = (var(&[2], 1, Type::F32), var(&[2], 2, Type::F32));
    let named = [("a".to_owned(), a.clone()), ("b".to_owned(), b.clone())];
    map.data().lock().unwrap().extend(named);
    let mut adamw = VarOptimizer::<AdamW>::from_var_map(&map, AdamWHyper::default()).unwrap();
    let mut grads = no_grads();
    grads.insert(&a, tensor(&[2], 3, Type::F32));
    grads.insert(&b, tensor(&[1], 3, Type::F32));
    fails(adamw.step(&grads), "`b` has shape [2], its gradient [1]");
    for wrong in [tensor(&[2], 3, Type::F64), a.as_tensor().clone(), b.as_tensor().clone()] {
        grads.insert(&b, wrong);
        let text = "gradient of `b`: expected f32, f16 or bf16 on the CPU, not sharing memory with a variable";
        fails(adamw.step(&grads), text);
    }
    let mut twice = new(&[&a, &b, &a]).unwrap();
    fails(twice.step(&grads), "variable 2");
    fails(twice.step(&grads), "the variable is listed twice");

    grads.insert(&b, tensor(&[2], 3, Type::F32));
    adamw.set_learning_rate(-1.0);
    assert_eq!(adamw.learning_rate(), 1e-3);
    fails(adamw.step(&grads), "set_learning_rate: invalid learning rate: -1");
    assert_eq!((floats(&a), floats(&b)), (values(&[2], 1), values(&[2], 2)));
    adamw.set_learning_rate(0.5);
    adamw.step(&grads).unwrap();
    assert_ne!(floats(&b), values(&[2], 2));
}

/// Variables of three types in two groups, and one in no group.
fn schedule_free() -> VarOptimizer<Box<dyn Optimizer>> {
    let hyper = |b1| ScheduleFreeAdamWHyper { lr: 0.1, betas: (b1, 0.9), ..Default::default() };
    let groups = [ParamGroup::new(hyper(0.9), [0, 2]), ParamGroup::new(hyper(0.5), [1, 3])];
    let types = [Type::F32, Type::F16, Type::BF16, Type::F32, Type::BF16];
    let vars = types.iter().enumerate().map(|(seed, dtype)| var(&[3, 2], seed, *dtype));
    let named = vars.enumerate().map(|(index, var)| (format!("w{index}"), var));
    let optimizer: Box<dyn Optimizer> = Box::new(ScheduleFreeAdamW::new(groups).unwrap());
    VarOptimizer::with_names(named, optimizer).unwrap()
}

/// Gradients of all variables but the fourth.
fn step_schedule_free(optimizer: &mut VarOptimizer<Box<dyn Optimizer>>, step: usize) {
    let grads: Vec<_> = (0..5)
        .map(|index| (index != 3).then(|| tensor(&[3, 2], 10 * step + index, Type::F32)))
        .collect();
    let _applied = optimizer.step_tensors(&grads, &StepCtl::PLAIN).unwrap();
}

#[test]
fn averaged_weights_are_lent_for_evaluation_through_a_box() {
    let mut optimizer = schedule_free();
    assert!(optimizer.optimizer().has_eval_weights());
    (0..3).for_each(|step| step_schedule_free(&mut optimizer, step));
    let bits = |optimizer: &VarOptimizer<_>| {
        optimizer.vars().iter().map(|var| floats(var)).collect::<Vec<_>>()
    };
    let trained = bits(&optimizer);
    let dict = optimizer.state_dict().unwrap();
    let expected: Vec<Vec<f32>> = (0..5)
        .map(|index| {
            let Some(state) = dict.state.get(&index) else { return trained[index].clone() };
            let b1 = [0.9, 0.5][index % 2];
            let y = state.tensors.get("master").unwrap_or(&trained[index]);
            let x =
                |(y, z): (&f32, &f32)| ((f64::from(*y) - (1.0 - b1) * f64::from(*z)) / b1) as f32;
            let x: Vec<f32> = y.iter().zip(&state.tensors["z"]).map(x).collect();
            let x = Tensor::from_vec(x, 6, &CPU).unwrap();
            floats(&x.to_dtype(optimizer.vars()[index].dtype()).unwrap())
        })
        .collect();
    assert_eq!(optimizer.with_eval_weights(|| bits(&optimizer)).unwrap(), expected);
    assert_ne!(expected[0], trained[0]);
    assert_eq!(expected[3..], trained[3..]);
    assert_eq!(bits(&optimizer), trained);
    let panics = || optimizer.with_eval_weights(|| panic!("in an evaluation"));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).unwrap_err();
    assert_eq!(bits(&optimizer), trained);

    // Training goes on as without the evaluation.
    let mut undisturbed = schedule_free();
    (0..4).for_each(|step| step_schedule_free(&mut undisturbed, step));
    step_schedule_free(&mut optimizer, 3);
    assert_eq!(bits(&optimizer), bits(&undisturbed));
    assert_eq!(optimizer.state_dict().unwrap().state, undisturbed.state_dict().unwrap().state);
}

#[test]
fn other_rules_evaluate_the_weights_that_they_train() {
    let optimizer = VarOptimizer::with_optimizer(
        vec![var(&[3], 1, Type::BF16)],
        AdamW::with_one_group(AdamWHyper::default(), 1).unwrap(),
    )
    .unwrap();
    assert!(optimizer.eval_tensor(0).unwrap().is_none());
    let mut weights = [0.0; 3];
    let weight = [1.0, -2.0, 0.5];
    let own = optimizer.optimizer();
    own.eval_weights(0, fused_optim::Slice::F32(&weight), &mut weights).unwrap();
    assert_eq!(weights, weight);
    let short = own.eval_weights(0, fused_optim::Slice::F32(&weight[..2]), &mut weights);
    assert!(short.unwrap_err().to_string().contains("evaluation weight"));
}
