//! The operators' rules, each broken once, and what they compute.

use std::ptr;

use half::{bf16, f16};
use npu_sim::ops;
use npu_sys::Plan;

use super::*;

const F32: AclDataType = AclDataType::FLOAT;

/// A tensor of numbers on the device, which owns its memory.
struct Numbers {
    memory: *mut c_void,
    tensor: *mut AclTensor,
    count: usize,
}

impl Numbers {
    fn new(numbers: &[f32]) -> Self {
        let memory = malloc(size_of_val(numbers));
        upload(memory, numbers);
        let tensor = tensor(memory, &[numbers.len() as i64], F32);
        Self { memory, tensor, count: numbers.len() }
    }

    fn read(&self) -> Vec<f32> {
        download(self.memory, self.count)
    }

    fn end(self) {
        end_tensor(self.tensor);
        free(self.memory);
    }
}

/// Runs a plan with all the workspace it wants, to its end.
pub(super) fn run(plan: Plan, stream: AclrtStream) -> Result<()> {
    let bytes = plan.workspace_bytes() as usize;
    let workspace = if bytes == 0 { ptr::null_mut() } else { malloc(bytes) };
    // SAFETY: as much workspace as wanted, alive until the stream is done.
    let run = unsafe { plan.run(workspace, stream) }.and_then(|()| synchronize(stream));
    if bytes > 0 {
        free(workspace);
    }
    run
}

/// Plans an operator of up to three tensors and two scalars.
type Planner = fn(
    *mut AclTensor,
    *mut AclTensor,
    *mut AclTensor,
    *mut AclScalar,
    *mut AclScalar,
) -> Result<Plan>;

#[test]
fn elementwise_operators_compute_their_formulas() {
    let sim = session();
    on_device(0);
    let stream = new_stream();
    let [a, b, c] = [[4.0, -9.0], [2.0, 0.5], [8.0, 4.0]].map(|x: [f32; 2]| Numbers::new(&x));
    let (two, three) = (scalar(2.0), scalar(3.0));
    let [x, y, z] = [&a, &b, &c].map(|numbers| numbers.tensor);
    // SAFETY: tensors and scalars that exist, as in every line below.
    let plans: [(Planner, [f32; 2]); 9] = unsafe {
        [
            (|x, _, _, two, _| ops().aclnnInplaceMuls(x, two), [8.0, -18.0]),
            (|x, y, _, two, _| ops().aclnnInplaceAdd(x, y, two), [12.0, -17.0]),
            (|x, _, _, two, three| ops().aclnnInplaceAdds(x, three, two), [18.0, -11.0]),
            (|x, y, z, two, _| ops().aclnnInplaceAddcmul(x, y, z, two), [50.0, -7.0]),
            (|x, y, z, two, _| ops().aclnnInplaceAddcdiv(x, z, y, two), [58.0, 9.0]),
            (|x, y, _, _, _| ops().aclnnInplaceDiv(x, y), [29.0, 18.0]),
            (|x, _, _, two, _| ops().aclnnInplaceDivs(x, two), [14.5, 9.0]),
            (|x, y, _, _, _| ops().aclnnInplaceMul(x, y), [29.0, 4.5]),
            (|x, _, z, _, _| ops().aclnnMaximum(x, z, x), [29.0, 4.5]),
        ]
    };
    for (plan, expected) in plans {
        run(plan(x, y, z, two, three).unwrap(), stream).unwrap();
        assert_eq!(a.read(), expected);
    }
    // SAFETY: as above.
    run(unsafe { ops().aclnnSqrt(z, x) }.unwrap(), stream).unwrap();
    assert_eq!(a.read(), [8.0f32.sqrt(), 2.0]);
    // SAFETY: as above.
    run(unsafe { ops().aclnnInplaceZero(x) }.unwrap(), stream).unwrap();
    assert_eq!(a.read(), [0.0, 0.0]);
    end_scalar(two);
    end_scalar(three);
    [a, b, c].into_iter().for_each(Numbers::end);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_plan_runs_once() {
    let sim = session();
    on_device(0);
    let (stream, a, two) = (new_stream(), Numbers::new(&[1.0]), scalar(2.0));
    // SAFETY: a tensor and a scalar that exist.
    let plan = unsafe { ops().aclnnInplaceMuls(a.tensor, two) }.unwrap();
    // SAFETY: the same plan twice is the mistake; the copy is never run in any other way.
    let again = unsafe { ptr::read(&raw const plan) };
    run(plan, stream).unwrap();
    assert_eq!(code(run(again, stream)), 161_002);
    one_violation(&sim, "ran already");
    assert_eq!(a.read(), [2.0]);
    end_scalar(two);
    a.end();
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn a_plan_that_never_runs_is_left() {
    let sim = session();
    on_device(0);
    let (a, two) = (Numbers::new(&[1.0]), scalar(2.0));
    // SAFETY: a tensor and a scalar that exist.
    drop(unsafe { ops().aclnnInplaceMuls(a.tensor, two) }.unwrap());
    end_scalar(two);
    a.end();
    assert_eq!(sim.finish(), ["1 executors are left"]);
}

#[test]
fn workspace_is_as_large_as_wanted_and_lives_on() {
    let sim = session();
    on_device(0);
    let (stream, a) = (new_stream(), Numbers::new(&[1.0, 2.0]));
    let sum = Numbers::new(&[0.0]);
    let dims = [0i64];
    // SAFETY: one number.
    let over = unsafe { nnop().aclCreateIntArray(dims.as_ptr(), 1) }.unwrap();
    // SAFETY: what exists, and an output that keeps the dimension.
    let plan = || unsafe { ops().aclnnReduceSum(a.tensor, over, true, F32, sum.tensor) }.unwrap();
    let wanted = plan();
    let bytes = wanted.workspace_bytes() as usize;
    assert!(bytes > 0);
    run(wanted, stream).unwrap();
    assert_eq!(sum.read(), [3.0]);
    // SAFETY: no workspace is the mistake.
    assert_eq!(code(unsafe { plan().run(ptr::null_mut(), stream) }), 161_002);
    one_violation(&sim, "workspace");
    let small = malloc(bytes - 1);
    // SAFETY: too little of it, as the stream finds.
    unsafe { plan().run(small, stream) }.unwrap();
    assert_eq!(code(synchronize(stream)), 361_001);
    one_violation(&sim, "workspace");
    free(small);
    let early = malloc(bytes);
    // SAFETY: freed before the stream is done, which is the mistake.
    unsafe { plan().run(early, stream) }.unwrap();
    free(early);
    assert_eq!(code(synchronize(stream)), 361_001);
    one_violation(&sim, "not allocated");
    // SAFETY: of above.
    unsafe { nnop().aclDestroyIntArray(over) }.unwrap();
    a.end();
    sum.end();
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn tensors_are_aligned_and_inside_and_destroyed_once() {
    let sim = session();
    on_device(0);
    let (stream, memory, two) = (new_stream(), malloc(64), scalar(2.0));
    assert!(try_tensor(memory.wrapping_byte_add(4), &[1], F32).is_err());
    one_violation(&sim, "multiple of 32");
    let beyond = tensor(memory, &[17], F32);
    // SAFETY: what exists; it reaches too far, as the stream finds.
    run(unsafe { ops().aclnnInplaceMuls(beyond, two) }.unwrap(), stream).unwrap_err();
    one_violation(&sim, "68 bytes at 0");
    end_tensor(beyond);
    // SAFETY: the simulator only looks it up.
    assert_eq!(code(unsafe { nnop().aclDestroyTensor(beyond) }), 161_002);
    one_violation(&sim, "does not exist");
    // SAFETY: as above.
    assert_eq!(code(unsafe { ops().aclnnInplaceMuls(beyond, two) }), 161_002);
    one_violation(&sim, "does not exist");
    // SAFETY: as above.
    assert_eq!(code(unsafe { ops().aclnnInplaceMuls(ptr::null_mut(), two) }), 161_001);
    end_scalar(two);
    free(memory);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

/// A list of the tensors, which it takes over.
fn list(tensors: &[*mut AclTensor]) -> *mut AclTensorList {
    let tensors: Vec<_> = tensors.iter().map(|tensor| tensor.cast_const()).collect();
    // SAFETY: as many tensors as is said.
    unsafe { nnop().aclCreateTensorList(tensors.as_ptr(), tensors.len() as u64) }.unwrap()
}

#[test]
fn a_list_owns_its_tensors() {
    let sim = session();
    on_device(0);
    let memory = malloc(64);
    let one = tensor(memory, &[16], F32);
    let tensors = list(&[one]);
    // SAFETY: of above.
    unsafe { nnop().aclDestroyTensorList(tensors) }.unwrap();
    // SAFETY: the simulator only looks it up; that the list took it along is the rule.
    assert_eq!(code(unsafe { nnop().aclDestroyTensor(one) }), 161_002);
    one_violation(&sim, "does not exist");
    free(memory);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn lists_are_short_and_not_for_every_chip() {
    for (soc, count, expected) in [
        (Soc::Ascend910B, 50, None),
        (Soc::Ascend910B, 51, Some(561_002)),
        (Soc::Ascend910A, 1, Some(561_003)),
    ] {
        let sim = session_on(soc);
        on_device(0);
        let (stream, memory, two) = (new_stream(), malloc(64), scalar(2.0));
        upload(memory, &[1.0f32; 16]);
        let tensors = list(&[tensor(memory, &[16], F32)].repeat(count));
        // SAFETY: lists and a scalar that exist.
        let planned = unsafe { ops().aclnnForeachMulScalarV2(tensors, two, tensors) };
        match expected {
            Some(expected) => assert_eq!(code(planned), expected),
            None => run(planned.unwrap(), stream).unwrap(),
        }
        end_scalar(two);
        free(memory);
        end_stream(stream);
        // The list's tensor is one under many names, so the list is left as it is.
        let left = sim.finish();
        assert_eq!(left, ["1 tensors are left", "1 lists of tensors are left"]);
    }
}

#[test]
fn foreach_operators_go_through_their_lists() {
    let sim = session();
    on_device(0);
    let stream = new_stream();
    let (a, b) = (Numbers::new(&[3.0, 4.0]), Numbers::new(&[-1.0, 2.0, 2.0]));
    let (p, q) = (Numbers::new(&[0.0]), Numbers::new(&[0.0]));
    let (vectors, norms) = (list(&[a.tensor, b.tensor]), list(&[p.tensor, q.tensor]));
    let order = scalar(2.0);
    // SAFETY: lists and a scalar that exist.
    run(unsafe { ops().aclnnForeachNorm(vectors, order, norms) }.unwrap(), stream).unwrap();
    assert_eq!((p.read(), q.read()), (vec![5.0], vec![3.0]));
    let factors = [scalar(10.0).cast_const(), scalar(-1.0).cast_const()];
    // SAFETY: two scalars.
    let factors = unsafe { nnop().aclCreateScalarList(factors.as_ptr(), 2) }.unwrap();
    // SAFETY: lists that exist.
    let plan = unsafe { ops().aclnnForeachMulScalarList(vectors, factors, vectors) }.unwrap();
    run(plan, stream).unwrap();
    assert_eq!((a.read(), b.read()), (vec![30.0, 40.0], vec![1.0, -2.0, -2.0]));
    // SAFETY: of above; what is in the lists goes with them.
    unsafe {
        nnop().aclDestroyScalarList(factors).unwrap();
        nnop().aclDestroyTensorList(vectors).unwrap();
        nnop().aclDestroyTensorList(norms).unwrap();
    }
    end_scalar(order);
    [a.memory, b.memory, p.memory, q.memory].into_iter().for_each(free);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn types_depend_on_the_chip() {
    for (soc, takes) in [(Soc::Ascend910A, false), (Soc::Ascend910B, true), (Soc::Ascend910C, true)]
    {
        let sim = session_on(soc);
        on_device(0);
        let (stream, memory, two) = (new_stream(), malloc(64), scalar(2.0));
        upload(memory, &[bf16::from_f32(1.5); 4]);
        let numbers = tensor(memory, &[4], AclDataType::BF16);
        // SAFETY: a tensor and a scalar that exist.
        let planned = unsafe { ops().aclnnInplaceMuls(numbers, two) };
        if takes {
            run(planned.unwrap(), stream).unwrap();
            assert_eq!(download::<u16>(memory, 4), [bf16::from_f32(3.0).to_bits(); 4]);
        } else {
            assert_eq!(code(planned), 161_002);
        }
        let integers = tensor(memory, &[4], AclDataType::INT32);
        // SAFETY: as above.
        assert_eq!(code(unsafe { ops().aclnnInplaceMuls(integers, two) }), 161_002);
        // SAFETY: as above; of two types.
        assert_eq!(code(unsafe { ops().aclnnInplaceMul(integers, numbers) }), 161_002);
        end_tensor(integers);
        end_tensor(numbers);
        end_scalar(two);
        free(memory);
        end_stream(stream);
        assert_eq!(sim.finish(), [""; 0]);
    }
}

#[test]
fn half_saturates_on_the_first_chip_and_says_so() {
    let sim = session_on(Soc::Ascend910A);
    on_device(0);
    let (stream, memory, status, two) = (new_stream(), malloc(64), malloc(64), scalar(2.0));
    upload(memory, &[f16::MAX, f16::ONE]);
    let numbers = tensor(memory, &[2], AclDataType::FLOAT16);
    let overflowed = || {
        // SAFETY: 64 bytes.
        unsafe { acl().aclrtGetOverflowStatus(status, 64, stream) }.unwrap();
        synchronize(stream).unwrap();
        download::<u8>(status, 64)[0] == 1
    };
    assert!(!overflowed());
    // SAFETY: a tensor and a scalar that exist.
    run(unsafe { ops().aclnnInplaceMuls(numbers, two) }.unwrap(), stream).unwrap();
    let expected = [f16::MAX, f16::from_f32(2.0)].map(f16::to_bits);
    assert_eq!(download::<u16>(memory, 2), expected);
    assert!(overflowed());
    // SAFETY: a stream.
    unsafe { acl().aclrtResetOverflowStatus(stream) }.unwrap();
    assert!(!overflowed());
    end_tensor(numbers);
    end_scalar(two);
    free(memory);
    free(status);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}

#[test]
fn the_fused_adamw_counts_one_more_step_than_it_is_told() {
    let sim = session();
    on_device(0);
    let stream = new_stream();
    let [p, m, v, g] = [[1.0], [0.0], [0.0], [0.5]].map(|x: [f32; 1]| Numbers::new(&x));
    let step = Numbers::new(&[0.0]);
    let [x, m_, v_, g_] = [&p, &m, &v, &g].map(|numbers| numbers.tensor);
    let none = ptr::null_mut();
    // SAFETY: tensors that exist; none for what only `amsgrad` needs.
    let plan = unsafe {
        let (lr, decay, eps) = (0.1, 0.01, 1e-8);
        ops().aclnnApplyAdamWV2(
            x,
            m_,
            v_,
            none,
            g_,
            step.tensor,
            lr,
            0.9,
            0.999,
            decay,
            eps,
            false,
            false,
        )
    };
    run(plan.unwrap(), stream).unwrap();
    // In the first step the bias correction makes the update lr * sign(g), after the decay.
    let expected = 1.0 - 0.1 * 0.01 - 0.1;
    assert!((p.read()[0] - expected).abs() < 1e-6, "{:?}", p.read());
    assert_eq!(step.read(), [0.0]);
    [p, m, v, g, step].into_iter().for_each(Numbers::end);
    end_stream(stream);
    assert_eq!(sim.finish(), [""; 0]);
}
