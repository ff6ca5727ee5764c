//! Operators that are whole steps: what they compute, and each of their rules broken once.

use std::ptr;

use npu_sim::{LATER, ops, ops_without};
use npu_sys::Plan;

use super::operators::run;
use super::*;

const F32: AclDataType = AclDataType::FLOAT;
const SECOND: [Soc; 2] = [Soc::Ascend910B, Soc::Ascend910C];

/// A list of vectors on the device, which owns their memory.
struct Vectors {
    list: *mut AclTensorList,
    memory: Vec<(*mut c_void, usize)>,
}

impl Vectors {
    fn new<T>(vectors: &[&[T]], dtype: AclDataType) -> Self {
        Self::shaped(vectors, dtype, |count| vec![count])
    }

    fn shaped<T>(vectors: &[&[T]], dtype: AclDataType, dims: fn(i64) -> Vec<i64>) -> Self {
        let one = |numbers: &&[T]| {
            let memory = malloc(size_of_val(*numbers).max(64));
            upload(memory, numbers);
            (tensor(memory, &dims(numbers.len() as i64), dtype), (memory, numbers.len()))
        };
        let (tensors, memory): (Vec<_>, Vec<_>) = vectors.iter().map(one).unzip();
        let tensors: Vec<_> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
        // SAFETY: as many tensors as is said.
        let list = unsafe { nnop().aclCreateTensorList(tensors.as_ptr(), tensors.len() as u64) };
        Self { list: list.unwrap(), memory }
    }

    fn f32s(vectors: &[&[f32]]) -> Self {
        Self::new(vectors, F32)
    }

    fn read(&self) -> Vec<Vec<f32>> {
        self.memory.iter().map(|(memory, count)| download(*memory, *count)).collect()
    }

    fn end(self) {
        // SAFETY: of `new`.
        unsafe { nnop().aclDestroyTensorList(self.list) }.unwrap();
        self.memory.into_iter().for_each(|(memory, _)| free(memory));
    }
}

/// One number on the device.
struct One(*mut c_void, *mut AclTensor);

impl One {
    fn new<T>(number: T, dtype: AclDataType) -> Self {
        let memory = malloc(64);
        upload(memory, &[number]);
        Self(memory, tensor(memory, &[1], dtype))
    }

    fn set(&self, number: f32) {
        upload(self.0, &[number]);
    }

    fn end(self) {
        end_tensor(self.1);
        free(self.0);
    }
}

#[derive(Clone, Copy)]
struct Sgd {
    lists: [*const AclTensorList; 3],
    scale: *const AclTensor,
    /// Decay, momentum, learning rate, dampening.
    numbers: [f32; 4],
    nesterov: bool,
    maximize: bool,
    first: bool,
}

impl Sgd {
    fn of(p: &Vectors, g: &Vectors, buffer: &Vectors) -> Self {
        let lists = [p, g, buffer].map(|vectors| vectors.list.cast_const());
        let (scale, numbers) = (ptr::null(), [0.5, 0.5, 0.25, 0.0]);
        Self { lists, scale, numbers, nesterov: false, maximize: false, first: false }
    }

    fn plan(self) -> Result<Plan> {
        let ([p, g, buffer], [decay, momentum, lr, dampening]) = (self.lists, self.numbers);
        let (nesterov, maximize, first) = (self.nesterov, self.maximize, self.first);
        // SAFETY: lists and tensors that exist, or that the simulator says do not.
        unsafe {
            let scale = self.scale;
            let ops = ops();
            ops.aclnnFusedSgd(
                p, g, buffer, scale, decay, momentum, lr, dampening, nesterov, maximize, first,
            )
        }
    }
}

/// Numbers that f32 has exactly, so that the formula is written out without rounding.
#[test]
fn a_step_of_sgd_is_pytorchs() {
    for soc in SECOND {
        let sim = session_on(soc);
        on_device(0);
        let stream = new_stream();
        let p = Vectors::f32s(&[&[1.0, -2.0], &[4.0]]);
        let g = Vectors::f32s(&[&[0.5, 1.0], &[-1.0]]);
        // The first step ignores the contents of the buffer.
        let buffer = Vectors::f32s(&[&[f32::NAN; 2], &[f32::NAN]]);
        let plain = Sgd::of(&p, &g, &buffer);
        // g + p/2, and of that a quarter.
        run(Sgd { first: true, ..plain }.plan().unwrap(), stream).unwrap();
        assert_eq!(buffer.read(), [vec![1.0, 0.0], vec![1.0]]);
        assert_eq!(p.read(), [vec![0.75, -2.0], vec![3.75]]);
        // g + p/2 = 0.875, 0, 0.875; half the buffer and three quarters of that.
        let damped = Sgd { numbers: [0.5, 0.5, 0.25, 0.25], ..plain };
        run(damped.plan().unwrap(), stream).unwrap();
        assert_eq!(buffer.read(), [vec![1.15625, 0.0], vec![1.15625]]);
        assert_eq!(p.read(), [vec![0.4609375, -2.0], vec![3.4609375]]);
        assert_eq!(g.read(), [vec![0.5, 1.0], vec![-1.0]]);
        // Gradients are divided by the scale and left so; they are turned round only within.
        let scale = One::new(2.0_f32, F32);
        let ahead = Sgd {
            numbers: [0.0, 0.5, 1.0, 0.0],
            nesterov: true,
            maximize: true,
            scale: scale.1,
            ..plain
        };
        run(ahead.plan().unwrap(), stream).unwrap();
        assert_eq!(g.read(), [vec![0.25, 0.5], vec![-0.5]]);
        assert_eq!(buffer.read(), [vec![0.328125, -0.5], vec![1.078125]]);
        let step = [-0.25 + 0.328125 / 2.0, -0.5 - 0.25, 0.5 + 1.078125 / 2.0];
        let expected = [vec![0.4609375 - step[0], -2.0 - step[1]], vec![3.4609375 - step[2]]];
        assert_eq!(p.read(), expected);
        // Without momentum there is no buffer: null, or a list of nothing.
        let before = p.read();
        let bare =
            Sgd { lists: [p.list, g.list, ptr::null()], numbers: [0.0, 0.0, 2.0, 0.0], ..plain };
        run(bare.plan().unwrap(), stream).unwrap();
        let expected = [vec![before[0][0] - 0.5, before[0][1] - 1.0], vec![before[1][0] + 1.0]];
        assert_eq!(p.read(), expected);
        // A scale of zero is seen where it is used.
        scale.set(0.0);
        run(ahead.plan().unwrap(), stream).unwrap_err();
        one_violation(&sim, "documents forbid");
        scale.end();
        [p, g, buffer].into_iter().for_each(Vectors::end);
        end_stream(stream);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn the_rules_of_sgd_hold() {
    let sim = session();
    on_device(0);
    let two: [&[f32]; 2] = [&[1.0, 2.0], &[3.0]];
    let [p, g, buffer] = [two; 3].map(|vectors| Vectors::f32s(&vectors));
    let (none, short) = (ptr::null(), Vectors::f32s(&two[..1]));
    let (other, halves) = (Vectors::f32s(&[&[1.0], &[3.0]]), [1_u16, 2]);
    let halves = Vectors::new(&[&halves[..], &halves[..1]], AclDataType::FLOAT16);
    let integers = Vectors::new::<i32>(&[&[1, 2], &[3]], AclDataType::INT32);
    let empty = Vectors::shaped(&two, F32, |_| vec![0]);
    let deep = Vectors::shaped(&two, F32, |count| [vec![1; 8], vec![count]].concat());
    let (pair, integer) = (One::new([1.0_f32; 2], F32), One::new(1_i32, AclDataType::INT32));
    end_tensor(pair.1);
    let pair = One(pair.0, tensor(pair.0, &[2], F32));
    let plain = Sgd::of(&p, &g, &buffer);
    let with = |at: usize, list: *const AclTensorList| {
        let mut changed = plain;
        changed.lists[at] = list;
        changed
    };
    let all = |vectors: &Vectors| Sgd { lists: [vectors.list; 3], ..plain };
    let numbers = |numbers| Sgd { numbers, ..plain };
    let ahead = |numbers| Sgd { numbers, nesterov: true, ..plain };
    let broken = [
        (with(0, none), 161_001),
        (with(1, none), 161_001),
        (with(1, short.list), 161_002),
        (with(2, short.list), 161_002),
        (with(1, other.list), 161_002),
        (with(2, other.list), 161_002),
        (with(1, halves.list), 161_002),
        (with(2, halves.list), 161_002),
        (all(&integers), 161_002),
        (all(&empty), 161_002),
        (all(&deep), 161_002),
        (numbers([-0.5, 0.5, 0.25, 0.0]), 161_002),
        (numbers([0.5, -0.5, 0.25, 0.0]), 161_002),
        (numbers([0.5, 0.5, -0.25, 0.0]), 161_002),
        (numbers([0.5, 0.5, 0.25, -0.5]), 161_002),
        // A buffer goes with momentum, momentum with a buffer, and a look ahead with both.
        (numbers([0.5, 0.0, 0.25, 0.0]), 161_002),
        (numbers([0.5, 1e-7, 0.25, 0.0]), 161_002),
        (with(2, none), 161_002),
        (ahead([0.5, 0.5, 0.25, 0.5]), 161_002),
        (Sgd { lists: [p.list, g.list, none], ..ahead([0.5, 0.0, 0.25, 0.0]) }, 161_002),
        (Sgd { scale: pair.1, ..plain }, 161_002),
        (Sgd { scale: integer.1, ..plain }, 161_002),
    ];
    for (at, (sgd, expected)) in broken.into_iter().enumerate() {
        let planned = sgd.plan();
        assert!(planned.is_err(), "{at}");
        assert_eq!(code(planned), expected, "{at}");
    }
    [p, g, buffer, short, other, halves, integers, empty, deep].into_iter().for_each(Vectors::end);
    pair.end();
    integer.end();
    assert_eq!(sim.finish(), [""; 0]);
}

#[derive(Clone, Copy)]
struct AdamW {
    /// Parameters, gradients, moments, maxima, steps.
    lists: [*const AclTensorList; 6],
    scale: *const AclTensor,
    found: *const AclTensor,
    /// Learning rate, both rates of decay, decay, epsilon.
    numbers: [f64; 5],
    amsgrad: bool,
    maximize: bool,
}

impl AdamW {
    fn of(lists: [&Vectors; 6]) -> Self {
        let lists = lists.map(|vectors| vectors.list.cast_const());
        let numbers = [0.1, 0.875, 0.96875, 0.5, 1e-8];
        let none = ptr::null();
        Self { lists, scale: none, found: none, numbers, amsgrad: false, maximize: false }
    }

    fn plan(self) -> Result<Plan> {
        let ([p, g, m, v, most, steps], scale, found) = (self.lists, self.scale, self.found);
        let [lr, b1, b2, decay, eps] = self.numbers;
        let (amsgrad, max) = (self.amsgrad, self.maximize);
        // SAFETY: lists and tensors that exist, or that the simulator says do not.
        unsafe {
            let ops = ops();
            ops.aclnnFusedAdamw(
                p, g, m, v, most, steps, scale, found, lr, b1, b2, decay, eps, amsgrad, max,
            )
        }
    }
}

/// A number's step, in f64: parameter, moments, and the largest second moment.
fn adamw([p, g, m, v, most]: [f64; 5], step: i32, amsgrad: bool) -> [f64; 4] {
    let (m, v) = (0.875 * m + 0.125 * g, 0.96875 * v + 0.03125 * g * g);
    let most = if amsgrad { most.max(v) } else { most };
    let root = if amsgrad { most } else { v };
    let (bias1, bias2) = (1.0 - 0.875_f64.powi(step), 1.0 - 0.96875_f64.powi(step));
    let direction = m / bias1 / ((root / bias2).sqrt() + 1e-8);
    [p * (1.0 - 0.1 * 0.5) - 0.1 * direction, m, v, most]
}

#[test]
fn a_step_of_adamw_is_pytorchs_one_more_than_it_is_told() {
    for (soc, amsgrad, whole) in [
        (Soc::Ascend910B, false, true),
        (Soc::Ascend910B, true, false),
        (Soc::Ascend910C, true, true),
    ] {
        let sim = session_on(soc);
        on_device(0);
        let stream = new_stream();
        let of = |a: [f32; 2], b: f32| Vectors::f32s(&[&a, &[b]]);
        let (p, g) = (of([1.0, -2.0], 4.0), of([0.5, 1.0], -1.0));
        let (m, v, most) = (of([0.5, 0.25], -2.0), of([4.0, 1.0], 0.5), of([1.0, 8.0], 0.25));
        // Each tensor has a step of its own.
        let steps = match whole {
            true => Vectors::new::<i64>(&[&[1], &[6]], AclDataType::INT64),
            false => Vectors::f32s(&[&[1.0], &[6.0]]),
        };
        let plain = AdamW { amsgrad, ..AdamW::of([&p, &g, &m, &v, &most, &steps]) };
        let flat = |vectors: &Vectors| vectors.read().concat();
        let state = || [flat(&p), flat(&m), flat(&v), flat(&most)];
        let follows = |before: &[Vec<f32>; 4], turned: f64, what: &str| {
            let (after, g) = (state(), flat(&g));
            for (place, step) in [2, 2, 7].into_iter().enumerate() {
                let [p, m, v, most] = [0, 1, 2, 3].map(|at: usize| f64::from(before[at][place]));
                let expected = adamw([p, turned * f64::from(g[place]), m, v, most], step, amsgrad);
                for (list, expected) in expected.into_iter().enumerate() {
                    let got = f64::from(after[list][place]);
                    let close = (got - expected).abs() <= 1e-6 * expected.abs().max(0.1);
                    assert!(close, "{what}: list {list}, place {place}: {got}, not {expected}");
                }
            }
        };
        let before = state();
        run(plain.plan().unwrap(), stream).unwrap();
        follows(&before, 1.0, "plain");
        let (scale, found) = (One::new(2.0_f32, F32), One::new(1.0_f32, F32));
        let told = AdamW { scale: scale.1, found: found.1, maximize: true, ..plain };
        let before = state();
        run(told.plan().unwrap(), stream).unwrap();
        assert_eq!(state(), before, "what is not finite is skipped");
        found.set(0.0);
        run(told.plan().unwrap(), stream).unwrap();
        follows(&before, -0.5, "scaled and turned round");
        assert_eq!(flat(&g), [0.5, 1.0, -1.0]);
        // No maxima are asked for without amsgrad.
        let mut without = plain;
        without.lists[4] = ptr::null();
        let planned = without.plan();
        if amsgrad {
            assert_eq!(code(planned), 161_002);
        } else {
            run(planned.unwrap(), stream).unwrap();
        }
        // No steps at all are seen where they are used.
        upload(steps.memory[0].0, &[0_u64]);
        run(plain.plan().unwrap(), stream).unwrap_err();
        one_violation(&sim, "documents forbid");
        scale.end();
        found.end();
        [p, g, m, v, most, steps].into_iter().for_each(Vectors::end);
        end_stream(stream);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn the_rules_of_adamw_hold() {
    let sim = session();
    on_device(0);
    let two: [&[f32]; 2] = [&[1.0, 2.0], &[3.0]];
    let [p, g, m, v, most] = [two; 5].map(|vectors| Vectors::f32s(&vectors));
    let steps = Vectors::f32s(&[&[1.0], &[1.0]]);
    let short = Vectors::f32s(&two[..1]);
    let other = Vectors::f32s(&[&[1.0], &[3.0]]);
    let halves = [1_u16, 2];
    let halves = Vectors::new(&[&halves[..], &halves[..1]], AclDataType::BF16);
    let integers = Vectors::new::<i32>(&[&[1], &[3]], AclDataType::INT32);
    let doubles = One::new(1.0_f64, AclDataType::DOUBLE);
    let plain = AdamW::of([&p, &g, &m, &v, &most, &steps]);
    let with = |at: usize, list: *const AclTensorList| {
        let mut changed = plain;
        changed.lists[at] = list;
        changed
    };
    let mut broken = Vec::new();
    for at in [0, 1, 2, 3, 5] {
        broken.push((with(at, ptr::null()), 161_001));
    }
    for at in 1..6 {
        broken.push((with(at, short.list), 161_002));
    }
    for at in 1..5 {
        broken.extend([(with(at, other.list), 161_002), (with(at, halves.list), 161_002)]);
    }
    for at in 0..4 {
        let mut numbers = plain.numbers;
        numbers[at] = -0.5;
        broken.push((AdamW { numbers, ..plain }, 161_002));
    }
    broken.extend([
        // Steps are one number each, of f32 or i64.
        (with(5, p.list), 161_002),
        (with(5, integers.list), 161_002),
        (AdamW { lists: [integers.list; 6], ..plain }, 161_002),
        (AdamW { amsgrad: true, ..with(4, ptr::null()) }, 161_002),
        (AdamW { scale: doubles.1, ..plain }, 161_002),
        (AdamW { found: doubles.1, ..plain }, 161_002),
    ]);
    for (at, (adamw, expected)) in broken.into_iter().enumerate() {
        let planned = adamw.plan();
        assert!(planned.is_err(), "{at}");
        assert_eq!(code(planned), expected, "{at}");
    }
    [p, g, m, v, most, steps, short, other, halves, integers].into_iter().for_each(Vectors::end);
    doubles.end();
    assert_eq!(sim.finish(), [""; 0]);
}

/// Plans a step of the scale, which doubles or halves.
fn scale_step(scale: &One, tracker: &One, found: &One, interval: i64) -> Result<Plan> {
    let [s, t, f] = [scale, tracker, found].map(|one| one.1.cast_const());
    // SAFETY: tensors that exist.
    unsafe { ops().aclnnAmpUpdateScale(s, t, f, 2.0, 0.5, interval, s, t) }
}

#[test]
fn the_scale_grows_and_backs_off_as_pytorchs() {
    let sim = session();
    on_device(0);
    let stream = new_stream();
    let (scale, tracker) = (One::new(8.0_f32, F32), One::new(0_i32, AclDataType::INT32));
    let found = One::new(0.0_f32, F32);
    for (flag, expected, after) in [
        (0.0, 8.0, 1),
        (0.0, 16.0, 0),
        (0.0, 16.0, 1),
        (1.0, 8.0, 0),
        (f32::NAN, 4.0, 0),
        (0.0, 4.0, 1),
    ] {
        found.set(flag);
        run(scale_step(&scale, &tracker, &found, 2).unwrap(), stream).unwrap();
        let seen = (download::<f32>(scale.0, 1)[0], download::<i32>(tracker.0, 1)[0]);
        assert_eq!(seen, (expected, after));
    }
    // A scale that would become infinite stays, and its growth tracker restarts.
    scale.set(f32::MAX);
    run(scale_step(&scale, &tracker, &found, 2).unwrap(), stream).unwrap();
    let seen = (download::<f32>(scale.0, 1)[0], download::<i32>(tracker.0, 1)[0]);
    assert_eq!(seen, (f32::MAX, 0));
    for interval in [0, -1, 1 << 31] {
        assert_eq!(code(scale_step(&scale, &tracker, &found, interval)), 561_002);
    }
    assert_eq!(code(scale_step(&tracker, &tracker, &found, 2)), 161_002);
    assert_eq!(code(scale_step(&scale, &scale, &found, 2)), 161_002);
    let half = One::new(0_u16, AclDataType::FLOAT16);
    assert_eq!(code(scale_step(&scale, &tracker, &half, 2)), 161_002);
    let null = One(ptr::null_mut(), ptr::null_mut());
    assert_eq!(code(scale_step(&null, &tracker, &found, 2)), 161_001);
    let wide = tensor(scale.0, &[2], F32);
    assert_eq!(code(scale_step(&One(scale.0, wide), &tracker, &found, 2)), 561_002);
    end_tensor(wide);
    [scale, tracker, found, half].into_iter().for_each(One::end);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn the_first_chips_and_older_versions_have_none_of_them() {
    let sim = session_on(Soc::Ascend910A);
    on_device(0);
    let [a, b, c] = [(); 3].map(|()| Vectors::f32s(&[&[1.0]]));
    let number = One::new(1.0_f32, F32);
    assert_eq!(code(Sgd::of(&a, &b, &c).plan()), 561_003);
    assert_eq!(code(AdamW::of([&a, &b, &c, &a, &b, &c]).plan()), 561_003);
    assert_eq!(code(scale_step(&number, &number, &number, 2)), 561_003);
    let older = ops_without(LATER);
    assert!(LATER.iter().all(|name| ops().has(name) && !older.has(name)));
    let of_8_1 = Ops::SYMBOLS.iter().filter(|row| row.since == "8.1").map(|row| row.name);
    let of_8_1: Vec<_> = of_8_1.filter(|name| !name.ends_with("GetWorkspaceSize")).collect();
    assert!(of_8_1.iter().all(|name| older.has(name)) && of_8_1.len() == 39 - 1);
    [a, b, c].into_iter().for_each(Vectors::end);
    number.end();
    assert_eq!(sim.finish(), [""; 0]);
}
