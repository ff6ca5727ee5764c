//! What optimizers remember from step to step, on the device of `tests`: which gradients were looked at, launches.

#![expect(unsafe_code, reason = "kernels access the test's memory")]

use std::collections::HashMap;

use cuda_rt::Device;
use cuda_rt::testing::{Launched, TestBuffer, TestDevice};

use super::device::{Program, Tables, launch};
use super::fused::Fused;
use super::requests::group_table;
use super::rules::DeviceHyper;
use super::table::{
    Answer, Bytes, Chunk, Job, Plan, Progress, Request, SPAN, Shape, Tensor, Types,
};
use super::tests::{compare, kinds, test_device};
use super::tune::{LaunchShape, Search};
use super::{DType, DeviceParam, DeviceSlice, LossScale};
use crate::core::Core;
use crate::*;

/// Tensors of the device of this many elements, all of which are `value`.
fn filled(device: &TestDevice, counts: &[usize], value: f32) -> Vec<TestBuffer> {
    counts.iter().map(|count| device.upload(&vec![value; *count])).collect()
}

fn params(weights: &[TestBuffer], grads: &[TestBuffer]) -> Vec<DeviceParam> {
    let both = weights.iter().zip(grads);
    both.map(|(weight, grad)| DeviceParam::new(weight.slice(), Some(grad.slice()))).collect()
}

fn to_host(tensors: &[TestBuffer]) -> Vec<Vec<f32>> {
    tensors.iter().map(TestBuffer::get).collect()
}

/// What becomes of a gradient after it was looked at, the step's decision does not see.
#[test]
fn what_was_looked_at_is_not_looked_at_again() {
    let mut device = Fused::new(
        test_device(1),
        [ParamGroup::new(SgdHyper::default(), 0..3)],
        HalfWeights::Master,
    )
    .unwrap();
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), ..StepCtl::default() };
    let weights = filled(&device.device, &[20_000; 3], 0.0);
    let mut grads = filled(&device.device, &[20_000; 3], 3.0);
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&params(&weights, &grads)) }.unwrap();
    let mut norm_after = |looked: &[&[usize]]| {
        for part in looked {
            // SAFETY: as above.
            unsafe { device.look_part(part, &ctl, None) }.unwrap();
        }
        grads[1].set(&[0.0_f32; 20_000]);
        // SAFETY: as above.
        unsafe { device.step(&ctl, 0) }.unwrap();
        grads[1].set(&[3.0_f32; 20_000]);
        device.status().unwrap().grad_norm
    };
    let norm = |tensors: f64| (tensors * 20_000.0 * 9.0).sqrt();
    assert_eq!(norm_after(&[&[2], &[0, 1]]), norm(3.0));
    assert_eq!(norm_after(&[&[0, 2]]), norm(2.0));
    assert_eq!(norm_after(&[&[1]]), norm(3.0));
    assert_eq!(norm_after(&[]), norm(2.0));
    // SAFETY: as above.
    let missing = unsafe { device.look_part(&[3], &ctl, None) };
    assert!(matches!(missing, Err(Error::MissingParam { index: 3, .. })));
}

/// Looks count for the gradients that they were at, in the step they were for, and for no other.
#[test]
fn looks_ahead_are_of_the_gradients_that_the_step_has() {
    let groups = [ParamGroup::new(SgdHyper::default(), 0..2)];
    let mut device = Fused::new(test_device(1), groups, HalfWeights::Master).unwrap();
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..StepCtl::PLAIN };
    let weights = filled(&device.device, &[9000; 2], 0.0);
    let mut grads = [0; 2].map(|_| filled(&device.device, &[9000; 2], 3.0));
    let bound = grads.each_ref().map(|grads| params(&weights, grads));
    let at = grads.each_ref().map(|grads| {
        let slices = grads.iter().map(TestBuffer::slice);
        slices.enumerate().collect::<Vec<_>>()
    });
    assert!(!device.expect_stats(&ctl).unwrap(), "nothing is bound");
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&bound[0]) }.unwrap();
    assert!(!device.expect_stats(&StepCtl::PLAIN).unwrap(), "no look is needed");
    assert_eq!((device.bound_at(&at[0]), device.bound_at(&at[1])), (vec![0, 1], vec![]));
    // What is in the first gradients while they are looked at; which are stepped with, skipped.
    for (number, known, stepped, skipped, norm) in [
        (f32::NAN, false, 0, true, 0.0),
        (f32::NAN, false, 1, false, 162_000.0),
        (f32::NAN, true, 0, false, 162_000.0),
        (0.0, false, 0, false, 81_000.0),
    ] {
        // SAFETY: as above.
        unsafe { device.bind(&bound[0]) }.unwrap();
        assert!(device.expect_stats(&ctl).unwrap());
        let members = device.bound_at(&at[0]);
        grads[0][1].set(&[number; 9000]);
        // SAFETY: as above.
        unsafe { device.look_part(&members, &ctl, None) }.unwrap();
        grads[0][1].set(&[3.0_f32; 9000]);
        if known {
            device.forget_stats().unwrap();
        }
        // SAFETY: as above.
        unsafe { device.bind(&bound[stepped]) }.unwrap();
        // SAFETY: as above.
        unsafe { device.step(&ctl, 0) }.unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.last_skipped, status.grad_norm), (skipped, f64::sqrt(norm)));
    }
}

/// Where `ready` says the same, the launches of an earlier step, as a graph keeps them, are those of this one,
/// whatever it is told.
#[test]
fn launches_that_are_said_to_be_the_same_are() {
    kept_launches::<AdamWHyper>();
    kept_launches::<LambHyper>();
}

/// What steps are told, one thing changed after the other by chance.
struct Told {
    random: u64,
    ctl: StepCtl,
    lr: f64,
    /// The tensor that has no gradient, and which gradients the others have.
    missing: usize,
    at: usize,
    grads: [Vec<Vec<f32>>; 2],
}

impl Told {
    fn below(&mut self, end: u64) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % end) as usize
    }

    fn change(&mut self) {
        let number = self.below(9);
        match self.below(7) {
            0 => self.ctl.clip = (number < 4).then(|| Clip::norm(0.5)),
            1 => self.ctl.found_inf = [FoundInf::Check, FoundInf::Known(false)][number % 2],
            2 => self.missing = number,
            3 => self.at = number % 2,
            4 => self.ctl.grad_scale = 1.0 + number as f32,
            5 => self.grads[self.at][number / 3][7] = [f32::INFINITY, 0.5, 9.0][number % 3],
            _ => self.lr = 0.1 / (1.0 + number as f64),
        }
        if self.ctl.found_inf != FoundInf::Check {
            self.grads.iter_mut().flatten().for_each(|grad| grad[7] = 0.5);
        }
    }

    /// Copies the gradients to their buffers.
    fn params(&self, weights: &[TestBuffer], grads: &mut [Vec<TestBuffer>; 2]) -> Vec<DeviceParam> {
        for (grad, values) in grads.iter_mut().flatten().zip(self.grads.iter().flatten()) {
            grad.set(values);
        }
        let mut params = params(weights, &grads[self.at]);
        params.iter_mut().skip(self.missing).take(1).for_each(|param| param.grad = None);
        params
    }
}

fn kept_launches<H: DeviceHyper + Default>() {
    let numbers = |number| vec![vec![number; 3000]; 3];
    let (grads, ctl) = ([numbers(0.5), numbers(0.5)], StepCtl::PLAIN);
    let mut told = Told { random: 0x9e37_79b9, ctl, lr: 0.1, missing: 3, at: 0, grads };
    let groups = || [ParamGroup::new(H::default(), 0..3)];
    let fused = || Fused::new(test_device(1), groups(), HalfWeights::Master).unwrap();
    // One steps, one has kept launches.
    let mut both = [fused(), fused()];
    let buffers = |fused: &Fused<H, TestDevice>, value| filled(&fused.device, &[3000; 3], value);
    let weights = both.each_ref().map(|fused| buffers(fused, 1.0));
    let mut grads = both.each_ref().map(|fused| [buffers(fused, 0.5), buffers(fused, 0.5)]);
    let (mut kept, mut again) = (HashMap::<_, Vec<Launched>>::new(), 0);
    for _ in 0..200 {
        told.change();
        for ((fused, weights), grads) in both.iter_mut().zip(&weights).zip(&mut grads) {
            fused.core.set_hyper_param(0, HyperParam::Lr, told.lr).unwrap();
            // SAFETY: all buffers live as long as the device; here and below.
            unsafe { fused.bind(&told.params(weights, grads)) }.unwrap();
        }
        let [steps, keeps] = &mut both;
        // SAFETY: as above.
        unsafe { steps.step(&told.ctl, 0) }.unwrap();
        let launches = keeps.ready(&told.ctl).unwrap();
        keeps.device.launched.lock().unwrap().clear();
        match kept.get(&launches) {
            Some(kept) => {
                again += 1;
                for (kernel, blocks, job) in kept {
                    // SAFETY: as above; the tables are those that are bound, or `ready` would have said otherwise.
                    unsafe { keeps.device.launch(kernel, *blocks, job) }.unwrap();
                }
            }
            None => {
                // SAFETY: as above.
                unsafe { keeps.step(&told.ctl, 0) }.unwrap();
                kept.insert(launches, keeps.device.launched.lock().unwrap().clone());
            }
        }
        assert_eq!(steps.status().unwrap(), keeps.status().unwrap());
        assert_eq!(to_host(&weights[0]), to_host(&weights[1]));
    }
    assert!(to_host(&weights[0]).iter().flatten().all(|weight| weight.is_finite()));
    assert!(again > 20 && kept.len() > 4, "{again} of {}", kept.len());
}

/// A total norm in device memory has the effect of the same value on the host, also when kept launches run again.
#[test]
fn total_norm_in_device_memory_equals_the_value_on_the_host() {
    total_norms(AdamWHyper::default());
    total_norms(LambHyper { use_global_grad_norm: true, ..Default::default() });
}

fn total_norms<H: DeviceHyper>(hyper: H) {
    let fused = || {
        let groups = [ParamGroup::new(hyper.clone(), 0..2)];
        Fused::new(test_device(1), groups, HalfWeights::Master).unwrap()
    };
    let (mut host, mut at) = (fused(), fused());
    let tensors = |fused: &Fused<H, TestDevice>, x| filled(&fused.device, &[3000, 50], x);
    let (host_weights, at_weights) = (tensors(&host, 1.0), tensors(&at, 1.0));
    let (mut host_grads, mut at_grads) = (tensors(&host, 3.0), tensors(&at, 3.0));
    // SAFETY: all buffers live as long as the devices; here and below.
    unsafe { host.bind(&params(&host_weights, &host_grads)) }.unwrap();
    // SAFETY: as above.
    unsafe { at.bind(&params(&at_weights, &at_grads)) }.unwrap();
    // Its address is a multiple of 4 only.
    let mut buffer = at.device.upload_at(1, &[0.0_f32]);
    let clip = ClipNorm::new(1.5);
    // SAFETY: as above.
    let clip_at = unsafe { clip.with_total_norm_at(buffer.slice().ptr) };
    let bits = |tensors| to_host(tensors).concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let mut kept: Option<(_, Vec<Launched>)> = None;
    let (check, known) = (FoundInf::Check, FoundInf::Known(false));
    for (norm, grad, found_inf, skipped) in [
        (7.25, 3.0, check, false),
        (0.1_f32, 3.0, check, false),
        (f32::NAN, 3.0, check, true),
        (f32::INFINITY, 3.0, check, true),
        (0.0, 3.0, known, false),
        (f32::INFINITY, 3.0, known, false),
        (7.25, 3.0, FoundInf::Known(true), true),
        // The norm is checked instead of the gradients.
        (7.25, f32::INFINITY, check, false),
    ] {
        let case = format!("{} norm {norm}, gradient {grad}, {found_inf:?}", H::KIND);
        buffer.set(&[norm]);
        host_grads[1].set(&[grad; 50]);
        at_grads[1].set(&[grad; 50]);
        let ctl = |clip| StepCtl { grad_scale: 0.5, found_inf, clip: Some(Clip::Norm(clip)) };
        // SAFETY: as above.
        unsafe { host.step(&ctl(clip.with_total_norm(norm.into())), 0) }.unwrap();
        let launches = at.ready(&ctl(clip_at)).unwrap();
        at.device.launched.lock().unwrap().clear();
        if let Some((first, kept)) = &kept {
            assert_eq!(launches, *first);
            for (kernel, blocks, job) in kept {
                // SAFETY: as above; `ready` has returned the launches of the step that is kept.
                unsafe { at.device.launch(kernel, *blocks, job) }.unwrap();
            }
        } else {
            // SAFETY: as above.
            unsafe { at.step(&ctl(clip_at), 0) }.unwrap();
            kept = Some((launches, at.device.launched.lock().unwrap().clone()));
        }
        let status = at.status().unwrap();
        assert_eq!((status, status.last_skipped), (host.status().unwrap(), skipped), "{case}");
        assert!(skipped || status.grad_norm.to_bits() == f64::from(norm).to_bits(), "{case}");
        assert_eq!(bits(&at_weights), bits(&host_weights), "{case}");
        let saved = |fused: &Fused<H, TestDevice>| fused.state_dict().unwrap().to_safetensors();
        assert_eq!(saved(&at).unwrap(), saved(&host).unwrap(), "{case}");
    }
    // SAFETY: no step is launched.
    let misaligned = unsafe { clip.with_total_norm_at(buffer.slice().ptr + 2) };
    let before = host.status().unwrap();
    for (clip, expected) in [
        (misaligned, format!("device pointer {:#x} is not aligned to f32", buffer.slice().ptr + 2)),
        // SAFETY: no step is launched.
        (unsafe { clip.with_total_norm_at(0) }, "invalid address of total_norm: 0".into()),
    ] {
        let ctl = StepCtl { clip: Some(Clip::Norm(clip)), ..StepCtl::PLAIN };
        // SAFETY: as above.
        let error = unsafe { host.step(&ctl, 0) }.unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    assert_eq!(host.status().unwrap(), before);
}

/// A search changes nothing but launches, and is made once for tensors alike.
#[test]
fn what_a_search_finds_is_kept() {
    let folder = std::env::temp_dir().join(format!("launches-test-{}", std::process::id()));
    let among = [LaunchShape::ALL[0], LaunchShape::ALL[17]];
    let mut sizes = vec![1000, 0, 3000];
    let groups = || [ParamGroup::new(AdamWHyper::default(), 0..3)];
    let mut device = Fused::new(test_device(1), groups(), HalfWeights::Master).unwrap();
    let mut twin = Core::new(groups()).unwrap();
    let weights = filled(&device.device, &sizes, 0.25);
    let (grads, lent) = (to_host(&weights), filled(&device.device, &sizes, 0.25));
    let (lent, mut twins) = (params(&weights, &lent), to_host(&weights));
    let search = Search { among: &among, folder: Some(folder.clone()) };
    let mut found = Vec::new();
    for step in 0..3 {
        if step > 0 {
            found.push(device.tune(&lent, &search).unwrap());
        }
        let mut params: Vec<ParamMut<'_>> = (twins.iter_mut().zip(&grads))
            .map(|(weight, grad)| ParamMut::new(SliceMut::F32(weight), Some(Slice::F32(grad))))
            .collect();
        assert_eq!(twin.step(&mut params, &StepCtl::PLAIN).unwrap(), Applied::Applied);
        // SAFETY: all buffers live as long as the device; here and below.
        unsafe { device.bind(&lent) }.unwrap();
        // SAFETY: as above.
        unsafe { device.step(&StepCtl::PLAIN, 0) }.unwrap();
        assert_eq!(to_host(&weights), twins, "step {step}");
    }
    assert_eq!(found[0].len(), 1);
    let (first, again) = (&found[0][0], &found[1][0]);
    assert_eq!(first.types, (DType::F32, DType::F32));
    assert_eq!(first.searched.iter().map(|(shape, _)| *shape).collect::<Vec<_>>(), among);
    let fastest = first.searched.iter().min_by_key(|(_, time)| *time).unwrap().0;
    assert_eq!((first.shape, again.shape, again.searched.len()), (fastest, fastest, 0));
    // Tensors of another size are searched anew, those that do not fit are refused.
    sizes[0] = 9000;
    let slice = |len: &usize| DeviceSlice { ptr: 0, len: *len, dtype: DType::F32 };
    let mut others: Vec<DeviceParam> =
        sizes.iter().map(|len| DeviceParam::new(slice(len), None)).collect();
    let mut fresh = Fused::new(test_device(1), groups(), HalfWeights::Master).unwrap();
    assert_eq!(fresh.tune(&others, &search).unwrap()[0].searched.len(), 2);
    others.pop();
    assert!(matches!(fresh.tune(&others, &search), Err(Error::MissingParam { index: 2, .. })));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Weights and gradients of all types in one optimizer, in groups of other hyper-parameters and forms.
#[test]
fn tensors_of_all_types_in_one_step() {
    let sizes: Vec<_> = (0..28).map(|i| ([0, 1, 33, 1025, 4097, 17_000][i % 6], 0)).collect();
    for how in [HalfWeights::Master, HalfWeights::Nearest] {
        let mut kinds = kinds();
        kinds.retain(|kind| kind.how == how || kind.weight == DType::F32);
        // The first says how half weights are treated.
        kinds.rotate_right(1);
        assert_eq!(kinds[0].how, how);
        let adam = AdamHyper { amsgrad: true, ..Default::default() };
        let hypers = [adam, AdamHyper { amsgrad: false, maximize: true, ..adam }];
        assert_eq!(compare(hypers, test_device(1), &kinds, &sizes, 1), Ok(()));
        let lamb = LambHyper { use_global_grad_norm: true, ..Default::default() };
        let hypers = [lamb, LambHyper { adam: true, ..lamb }];
        assert_eq!(compare(hypers, test_device(2), &kinds, &sizes, 2), Ok(()));
    }
}

/// No tensor, none with a gradient, none with an element: steps like others, which the loss scale counts.
#[test]
fn a_step_of_nothing_is_a_step() {
    fn step_of<H: DeviceHyper>(hyper: H, grads: [bool; 2]) {
        let count = grads.len();
        let mut device =
            Fused::new(test_device(1), [ParamGroup::new(hyper, 0..count)], HalfWeights::Master)
                .unwrap();
        device.set_loss_scale(Some(LossScale { scale: 4.0, ..Default::default() })).unwrap();
        let empty = DeviceSlice { ptr: 0, len: 0, dtype: DType::F16 };
        let params = grads.map(|has| DeviceParam::new(empty, has.then_some(empty)));
        // SAFETY: no tensor has an element; here and below.
        unsafe { device.bind(&params) }.unwrap();
        let ctl =
            StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..StepCtl::PLAIN };
        let looked: Vec<usize> = (0..count).filter(|index| grads[*index]).collect();
        // SAFETY: as above.
        unsafe { device.look_part(&looked, &ctl, None) }.unwrap();
        // SAFETY: as above.
        unsafe { device.step(&ctl, 0) }.unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.last_skipped, status.grad_norm), (false, 0.0));
        assert_eq!((status.growth_tracker, status.loss_scale), (1, Some(4.0)));
        let steps: Vec<u64> = device.state_dict().unwrap().state.values().map(|s| s.step).collect();
        assert_eq!(steps, vec![1; looked.len()]);
    }
    for grads in [[false, false], [true, false], [true, true]] {
        step_of(SgdHyper::default(), grads);
        step_of(LambHyper { use_global_grad_norm: true, ..Default::default() }, grads);
        step_of(AdamPHyper::default(), grads);
    }
    let none: [ParamGroup<SgdHyper>; 0] = [];
    let mut device = Fused::new(test_device(1), none, HalfWeights::Master).unwrap();
    // SAFETY: as above.
    unsafe { device.bind(&[]) }.unwrap();
    // SAFETY: as above.
    unsafe { device.step(&StepCtl::default(), 0) }.unwrap();
    assert!(!device.status().unwrap().last_skipped);
}

/// Another's verdict, which is on the device, skips a step as the optimizer's own does.
#[test]
fn a_step_is_skipped_by_the_verdict_of_others() {
    let on = test_device(1);
    let mut verdict = on.alloc(8).unwrap();
    let [weight, grad] = [1.0; 2].map(|one| on.upload(&[one; 100]));
    let param = DeviceParam::new(weight.slice(), Some(grad.slice()));
    let groups = [ParamGroup::new(SgdHyper { lr: 0.25, ..Default::default() }, 0..1)];
    let mut device = Fused::new(on.clone(), groups, HalfWeights::Master).unwrap();
    device.set_loss_scale(Some(LossScale { scale: 4.0, ..Default::default() })).unwrap();
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&[param]) }.unwrap();
    // Gradients are of one loss scale after the other.
    for (found, weight_after, scale, skipped) in [
        (0_u32, 0.9375, 4.0, 0),
        (1, 0.9375, 2.0, 1),
        (0, 0.8125, 2.0, 1),
        (u32::MAX, 0.8125, 1.0, 2),
    ] {
        // Its second half: an address need not be a multiple of 8.
        on.write(&mut verdict, 4, &found.to_ne_bytes()).unwrap();
        // SAFETY: as above.
        unsafe { device.step(&StepCtl::PLAIN, TestDevice::address(&verdict) + 4) }.unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.last_skipped, status.skipped), (found != 0, skipped));
        assert_eq!(status.loss_scale, Some(scale));
        assert_eq!(weight.get::<f32>(), [weight_after; 100]);
    }
}

/// A group that comes later begins with its first step, and the others go on.
#[test]
fn a_group_may_be_added_between_steps() {
    let group = |at: usize| {
        let hyper = SgdHyper { lr: 0.5 + at as f64, momentum: 0.9, ..Default::default() };
        ParamGroup::new(hyper, [at])
    };
    let mut device = Fused::new(test_device(1), [group(0)], HalfWeights::Master).unwrap();
    let mut cpu = Core::new([group(0)]).unwrap();
    device.set_loss_scale(Some(LossScale { scale: 8.0, ..Default::default() })).unwrap();
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..StepCtl::PLAIN };
    let weights = filled(&device.device, &[5000; 2], 1.0);
    let (grads, mut twins) = (filled(&device.device, &[5000; 2], 3.0), to_host(&weights));
    let params = params(&weights, &grads);
    let grads = to_host(&grads);
    for step in 0..4 {
        if step == 2 {
            device.add_param_group(group(1)).unwrap();
            cpu.add_param_group(group(1)).unwrap();
            // SAFETY: all buffers live as long as the device; here and below.
            assert!(unsafe { device.step(&ctl, 0) }.is_err(), "not bound again");
        }
        // SAFETY: as above.
        unsafe { device.bind(&params) }.unwrap();
        // Refused, it changes nothing: the tensors are still bound.
        let refused = device.add_param_group(group(0));
        assert!(matches!(refused, Err(Error::DuplicateParam { index: 0 })));
        // SAFETY: as above.
        unsafe { device.step(&ctl, 0) }.unwrap();
        let both = twins.iter_mut().zip(&grads);
        let mut params: Vec<_> =
            both.map(|(w, g)| ParamMut::new(SliceMut::F32(w), Some(Slice::F32(g)))).collect();
        let unscaled = StepCtl { grad_scale: 1.0 / 8.0, ..ctl };
        assert_eq!(cpu.step(&mut params, &unscaled).unwrap(), Applied::Applied);
        assert_eq!(to_host(&weights), twins, "step {step}");
        assert_eq!(device.state_dict().unwrap(), cpu.state_dict(), "step {step}");
    }
    assert_eq!(device.status().unwrap().growth_tracker, 4);
}

/// What an optimizer on the CPU saved in another order goes to the tensors of its names.
#[test]
fn state_is_loaded_by_name() {
    let groups = || [ParamGroup::new(AdamWHyper::default(), 0..2)];
    let names = |names: [&str; 2]| names.map(|name| ParamSpec::new(name, &[3]));
    let mut cpu = AdamW::new(groups()).unwrap();
    cpu.set_param_names(&names(["a", "b"])).unwrap();
    let (mut a, mut b) = ([1.0_f32; 3], [2.0_f32; 3]);
    let param = |weight, grad| ParamMut::new(SliceMut::F32(weight), Some(Slice::F32(grad)));
    let both = &mut [param(&mut a, &[0.5; 3]), param(&mut b, &[-3.0; 3])];
    let _ = cpu.step(both, &StepCtl::PLAIN).unwrap();

    let mut device = Fused::new(test_device(1), groups(), HalfWeights::Master).unwrap();
    device.core.set_param_names(&names(["b", "a"])).unwrap();
    let weights = [b, a, b].map(|weight| device.device.upload(&weight));
    let grads = filled(&device.device, &[3; 3], 1.0);
    let params = params(&weights, &grads);
    // SAFETY: all buffers live as long as the device; here and below.
    let three = unsafe { device.bind(&params) }.unwrap_err();
    assert!(matches!(three, Error::ParamCount { expected: 2, got: 3 }));
    // SAFETY: as above.
    unsafe { device.bind(&params[..2]) }.unwrap();
    let (saved, before) = (cpu.state_dict().unwrap(), device.state_dict().unwrap());
    let mut wrong = saved.clone();
    wrong.params.get_mut(&0).unwrap().name = "c".into();
    let error = device.load_state_dict(&wrong).unwrap_err().to_string();
    assert_eq!(error, "state dict, a: missing");
    assert_eq!(device.state_dict().unwrap(), before);
    device.load_state_dict(&saved).unwrap();
    let loaded = device.state_dict().unwrap();
    assert_eq!((&loaded.state[&0], &loaded.state[&1]), (&saved.state[&1], &saved.state[&0]));
    assert_eq!((&*loaded.params[&0].name, &*loaded.params[&1].name), ("b", "a"));
}

/// Tensors of more elements than 32 bits can tell, of which only the ends are there.
#[test]
fn the_far_end_of_a_tensor_is_found() {
    let on = test_device(1);
    for count in [(1_usize << 31) + 5000, (1 << 33) + 32_769] {
        let shape = Shape { count, rows: 0, group: 0, class: 0 };
        let sweep = LaunchShape::DEFAULT.sweep as usize;
        let plan = Plan::new(&[shape], 1, false, &[sweep]);
        let end = on.upload(&[1.0_f32; 40_000]);
        let begin = end.slice().ptr.wrapping_sub(4 * (count - 40_000) as u64);
        let tensor = Tensor {
            grad: begin,
            weight: begin,
            count: count as u64,
            cols: count as u64,
            ..Tensor::default()
        };
        let progress = Progress { scale: 1.0, limit: f32::INFINITY, ..Progress::default() };
        let hyper = SgdHyper { lr: 0.5, ..Default::default() };
        let groups = [ParamGroup::new(hyper, [0])];
        let mut tables = Tables::new(&on);
        let last = |chunks: &[Chunk], many: usize| chunks[chunks.len() - many..].bytes();
        let ctl = [
            Request { limit: f32::INFINITY, grad_scale: 1.0, ..Request::default() }.bytes(),
            Answer::default().bytes(),
        ];
        let sums = tables.memory(&vec![0; 8 * plan.values as usize]).unwrap();
        let chunks = plan.look.len() as u32;
        let look = Job {
            tensor: tables.send(&tensor.bytes()).unwrap(),
            chunk: tables.send(&plan.look.bytes()).unwrap(),
            group: tables.send(&group_table(&groups).bytes()).unwrap(),
            progress: tables.send(&progress.bytes()).unwrap(),
            ctl: tables.send(&ctl.concat()).unwrap(),
            sum: TestDevice::address(&sums),
            arrived: tables.send(&vec![0; 4 * plan.look.len()]).unwrap(),
            first: chunks - 2,
            chunks,
            tensors: 1,
            groups: 1,
            ..Job::default()
        };
        let kernel = Program::LOOK.kernel(&on, "look_part").unwrap();
        // SAFETY: what the last chunks are of is there.
        unsafe { launch(&on, &kernel, 1, &look) }.unwrap();
        let mut bytes = [0; 16];
        // Behind the sums of the tensor, of all and of the group.
        on.read(&sums, 8 * (1 + chunks as usize), &mut bytes).unwrap();
        let (sums, _) = bytes.as_chunks();
        let sums = [0, 1].map(|at| f64::from_ne_bytes(sums[at]));
        assert_eq!(sums, [SPAN as f64, (count % SPAN) as f64]);
        let types = Types { grad: 0, weight: 0, master: false };
        let rule = Some((hyper.form(), false));
        let program = Program { rule, types, shape: LaunchShape::DEFAULT };
        let chunk = tables.send(&last(&plan.classes[0].sweep, 3)).unwrap();
        let kernel = program.kernel(&on, "step").unwrap();
        // SAFETY: as above.
        unsafe { launch(&on, &kernel, 1, &Job { chunk, chunks: 3, ..look }) }.unwrap();
        let moved = 2 * sweep + count % sweep;
        let end = end.get::<f32>();
        let (still, moved) = end.split_at(end.len() - moved);
        assert!(still.iter().all(|x| *x == 1.0) && moved.iter().all(|x| *x == 0.5));
    }
}
