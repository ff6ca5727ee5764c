//! State that optimizers keep between steps: gradient statistics, kept launches, bound tensors. On
//! the device of `tests`.

#![expect(unsafe_code, reason = "kernels access the test's memory")]

use std::collections::HashMap;

use bytemuck::{bytes_of, cast_slice};
use cuda_rt::Device;
use cuda_rt::testing::{Launched, TestBuffer, TestDevice};

use super::device::{Program, Tables, launch};
use super::requests::group_table;
use super::rules::DeviceHyper;
use super::table::{Chunk, DeviceStatus, Job, Plan, Progress, Request, SPAN, Shape, Tensor, Types};
use super::tests::{compare, kinds, test_device};
use super::tune::Search;
use super::{CudaOptimizer, DType, DeviceParam, DeviceSlice, LaunchShape, LossScale};
use crate::core::Core;
use crate::*;

fn optimizer<H: DeviceHyper>(
    groups: impl IntoIterator<Item = ParamGroup<H>>,
) -> CudaOptimizer<H, TestDevice> {
    CudaOptimizer::new(test_device(1), groups, HalfWeights::Master).unwrap()
}

/// Tensors of these element counts on the device, filled with `value`.
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

/// The step does not see a change of a gradient after its statistics were taken.
#[test]
fn step_reads_only_gradients_without_statistics() {
    let mut device = optimizer([ParamGroup::new(SgdHyper::default(), 0..3)]);
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), ..StepCtl::default() };
    let weights = filled(&device.device, &[20_000; 3], 0.0);
    let mut grads = filled(&device.device, &[20_000; 3], 3.0);
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&params(&weights, &grads)) }.unwrap();
    let mut norm_after = |parts: &[&[usize]]| {
        for part in parts {
            // SAFETY: as above.
            unsafe { device.take_grad_stats(part, &ctl, None) }.unwrap();
        }
        grads[1].set(&[0.0_f32; 20_000]);
        // SAFETY: as above.
        unsafe { device.step(&ctl) }.unwrap();
        grads[1].set(&[3.0_f32; 20_000]);
        device.status().unwrap().grad_norm
    };
    let norm = |tensors: f64| (tensors * 20_000.0 * 9.0).sqrt();
    assert_eq!(norm_after(&[&[2], &[0, 1]]), norm(3.0));
    assert_eq!(norm_after(&[&[0, 2]]), norm(2.0));
    assert_eq!(norm_after(&[&[1]]), norm(3.0));
    assert_eq!(norm_after(&[]), norm(2.0));
    // SAFETY: as above.
    let missing = unsafe { device.take_grad_stats(&[3], &ctl, None) };
    assert!(matches!(missing, Err(Error::MissingParam { index: 3, .. })));
}

/// Statistics count only in the next step and only for the gradients that it has.
#[test]
fn statistics_of_other_gradients_are_discarded() {
    let groups = [ParamGroup::new(SgdHyper::default(), 0..2)];
    let mut device = optimizer(groups);
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..StepCtl::PLAIN };
    let weights = filled(&device.device, &[9000; 2], 0.0);
    let mut grads = [0; 2].map(|_| filled(&device.device, &[9000; 2], 3.0));
    let bound = grads.each_ref().map(|grads| params(&weights, grads));
    let at = grads.each_ref().map(|grads| {
        let slices = grads.iter().map(TestBuffer::slice);
        slices.enumerate().collect::<Vec<_>>()
    });
    assert!(!device.prepare_stats(&ctl).unwrap(), "nothing is bound");
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&bound[0]) }.unwrap();
    assert!(!device.prepare_stats(&StepCtl::PLAIN).unwrap(), "no statistics are needed");
    assert_eq!((device.bound_at(&at[0]), device.bound_at(&at[1])), (vec![0, 1], vec![]));
    // A value of the first gradients while statistics are taken, whether these are discarded, which
    // gradients are stepped with, whether the step is skipped, and the squared norm.
    for (number, known, stepped, skipped, norm) in [
        (f32::NAN, false, 0, true, 0.0),
        (f32::NAN, false, 1, false, 162_000.0),
        (f32::NAN, true, 0, false, 162_000.0),
        (0.0, false, 0, false, 81_000.0),
    ] {
        // SAFETY: as above.
        unsafe { device.bind(&bound[0]) }.unwrap();
        assert!(device.prepare_stats(&ctl).unwrap());
        let members = device.bound_at(&at[0]);
        grads[0][1].set(&[number; 9000]);
        // SAFETY: as above.
        unsafe { device.take_grad_stats(&members, &ctl, None) }.unwrap();
        grads[0][1].set(&[3.0_f32; 9000]);
        if known {
            device.forget_stats().unwrap();
        }
        // SAFETY: as above.
        unsafe { device.bind(&bound[stepped]) }.unwrap();
        // SAFETY: as above.
        unsafe { device.step(&ctl) }.unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.last_skipped, status.grad_norm), (skipped, f64::sqrt(norm)));
    }
}

/// If `prepare` returns equal `Launches`, those kept from an earlier step do what this step does.
#[test]
fn equal_launches_have_the_effect_of_the_step() {
    kept_launches::<AdamWHyper>();
    kept_launches::<LambHyper>();
}

/// Arguments of steps, of which a random one changes at a time.
struct StepArgs {
    random: u64,
    ctl: StepCtl,
    lr: f64,
    /// The tensor without a gradient, and which of `grads` the others have.
    missing: usize,
    at: usize,
    grads: [Vec<Vec<f32>>; 2],
}

impl StepArgs {
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
    let mut args = StepArgs { random: 0x9e37_79b9, ctl, lr: 0.1, missing: 3, at: 0, grads };
    let groups = || [ParamGroup::new(H::default(), 0..3)];
    let fused = || optimizer(groups());
    // One calls `step`, the other repeats kept launches.
    let mut both = [fused(), fused()];
    let buffers =
        |fused: &CudaOptimizer<H, TestDevice>, value| filled(&fused.device, &[3000; 3], value);
    let weights = both.each_ref().map(|fused| buffers(fused, 1.0));
    let mut grads = both.each_ref().map(|fused| [buffers(fused, 0.5), buffers(fused, 0.5)]);
    let (mut kept, mut again) = (HashMap::<_, Vec<Launched>>::new(), 0);
    for _ in 0..200 {
        args.change();
        for ((fused, weights), grads) in both.iter_mut().zip(&weights).zip(&mut grads) {
            fused.core.set_hyper_param(0, HyperParam::Lr, args.lr).unwrap();
            // SAFETY: all buffers live as long as the device; here and below.
            unsafe { fused.bind(&args.params(weights, grads)) }.unwrap();
        }
        let [steps, keeps] = &mut both;
        // SAFETY: as above.
        unsafe { steps.step(&args.ctl) }.unwrap();
        let launches = keeps.prepare(&args.ctl).unwrap();
        keeps.device.launched.lock().unwrap().clear();
        match kept.get(&launches) {
            Some(kept) => {
                again += 1;
                for (kernel, blocks, job) in kept {
                    // SAFETY: as above; equal `launches` are those of the bound tables.
                    unsafe { keeps.device.launch(kernel, *blocks, job) }.unwrap();
                }
            }
            None => {
                // SAFETY: as above.
                unsafe { keeps.step(&args.ctl) }.unwrap();
                kept.insert(launches, keeps.device.launched.lock().unwrap().clone());
            }
        }
        assert_eq!(steps.status().unwrap(), keeps.status().unwrap());
        assert_eq!(to_host(&weights[0]), to_host(&weights[1]));
    }
    assert!(to_host(&weights[0]).iter().flatten().all(|weight| weight.is_finite()));
    assert!(again > 20 && kept.len() > 4, "{again} of {}", kept.len());
}

/// A norm in device memory acts as the same value on the host, also when kept launches run again.
#[test]
fn total_norm_in_device_memory_equals_the_value_on_the_host() {
    total_norms(AdamWHyper::default());
    total_norms(LambHyper { use_global_grad_norm: true, ..Default::default() });
}

fn total_norms<H: DeviceHyper>(hyper: H) {
    let fused = || {
        let groups = [ParamGroup::new(hyper.clone(), 0..2)];
        optimizer(groups)
    };
    let (mut host, mut at) = (fused(), fused());
    let tensors = |fused: &CudaOptimizer<H, TestDevice>, x| filled(&fused.device, &[3000, 50], x);
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
        unsafe { host.step(&ctl(clip.with_total_norm(norm.into()))) }.unwrap();
        let launches = at.prepare(&ctl(clip_at)).unwrap();
        at.device.launched.lock().unwrap().clear();
        if let Some((first, kept)) = &kept {
            assert_eq!(launches, *first);
            for (kernel, blocks, job) in kept {
                // SAFETY: as above; `prepare` has returned the `Launches` of the kept step.
                unsafe { at.device.launch(kernel, *blocks, job) }.unwrap();
            }
        } else {
            // SAFETY: as above.
            unsafe { at.step(&ctl(clip_at)) }.unwrap();
            kept = Some((launches, at.device.launched.lock().unwrap().clone()));
        }
        let status = at.status().unwrap();
        assert_eq!((status, status.last_skipped), (host.status().unwrap(), skipped), "{case}");
        assert!(skipped || status.grad_norm.to_bits() == f64::from(norm).to_bits(), "{case}");
        assert_eq!(bits(&at_weights), bits(&host_weights), "{case}");
        let saved =
            |fused: &CudaOptimizer<H, TestDevice>| fused.state_dict().unwrap().to_safetensors();
        assert_eq!(saved(&at).unwrap(), saved(&host).unwrap(), "{case}");
    }
}

#[test]
fn invalid_addresses_of_a_total_norm_are_errors() {
    let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
    let mut device = optimizer(groups);
    let (weights, grads) = (filled(&device.device, &[9], 1.0), filled(&device.device, &[9], 3.0));
    // SAFETY: the buffers live as long as the device.
    unsafe { device.bind(&params(&weights, &grads)) }.unwrap();
    for (address, expected) in [
        (0, "invalid address of total_norm: 0"),
        (0x7f02, "device pointer 0x7f02 is not aligned to f32"),
    ] {
        // SAFETY: the address is not read, since no step is launched.
        let clip = unsafe { ClipNorm::new(1.0).with_total_norm_at(address) };
        let ctl = StepCtl { clip: Some(Clip::Norm(clip)), ..StepCtl::PLAIN };
        // SAFETY: as above.
        let error = unsafe { device.step(&ctl) }.unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
    assert!(device.device.launched.lock().unwrap().is_empty());
}

/// A search changes no bit of later steps; its result is cached for tensors of its size class.
#[test]
fn search_result_is_cached() {
    let folder = std::env::temp_dir().join(format!("launches-test-{}", std::process::id()));
    let candidates = [LaunchShape::ALL[0], LaunchShape::ALL[17]];
    let mut sizes = vec![1000, 0, 3000];
    let groups = || [ParamGroup::new(AdamWHyper::default(), 0..3)];
    let mut device = optimizer(groups());
    let mut twin = Core::new(groups()).unwrap();
    let weights = filled(&device.device, &sizes, 0.25);
    let (grads, lent) = (to_host(&weights), filled(&device.device, &sizes, 0.25));
    let (lent, mut twins) = (params(&weights, &lent), to_host(&weights));
    let search = Search { candidates: &candidates, folder: Some(folder.clone()) };
    let mut found = Vec::new();
    for step in 0..3 {
        if step > 0 {
            found.push(device.tune_with(&lent, &search).unwrap());
        }
        let mut params: Vec<ParamMut<'_>> = (twins.iter_mut().zip(&grads))
            .map(|(weight, grad)| ParamMut::new(SliceMut::F32(weight), Some(Slice::F32(grad))))
            .collect();
        assert_eq!(twin.step(&mut params, &StepCtl::PLAIN).unwrap(), Applied::Applied);
        // SAFETY: all buffers live as long as the device; here and below.
        unsafe { device.bind(&lent) }.unwrap();
        // SAFETY: as above.
        unsafe { device.step(&StepCtl::PLAIN) }.unwrap();
        assert_eq!(to_host(&weights), twins, "step {step}");
    }
    assert_eq!(found[0].len(), 1);
    let (first, again) = (&found[0][0], &found[1][0]);
    assert_eq!(first.types, (DType::F32, DType::F32));
    assert_eq!(first.searched.iter().map(|(shape, _)| *shape).collect::<Vec<_>>(), candidates);
    let fastest = first.searched.iter().min_by_key(|(_, time)| *time).unwrap().0;
    assert_eq!((first.shape, again.shape, again.searched.len()), (fastest, fastest, 0));
    // Tensors of another size class are searched again; too few tensors are an error.
    sizes[0] = 9000;
    let slice = |len: &usize| DeviceSlice { ptr: 0, len: *len, dtype: DType::F32 };
    let mut others: Vec<DeviceParam> =
        sizes.iter().map(|len| DeviceParam::new(slice(len), None)).collect();
    let mut fresh = optimizer(groups());
    assert_eq!(fresh.tune_with(&others, &search).unwrap()[0].searched.len(), 2);
    others.pop();
    assert!(matches!(fresh.tune_with(&others, &search), Err(Error::MissingParam { index: 2, .. })));
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Weights and gradients of all types in one optimizer, in groups of unequal hyper-parameters.
#[test]
fn tensors_of_all_types_in_one_step() {
    let sizes: Vec<_> = (0..28).map(|i| ([0, 1, 33, 1025, 4097, 17_000][i % 6], 0)).collect();
    for how in [HalfWeights::Master, HalfWeights::Nearest] {
        let mut kinds = kinds();
        kinds.retain(|kind| kind.how == how || kind.weight == DType::F32);
        // The first sets the optimizer's `HalfWeights`.
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

/// A step without tensors, gradients or elements counts for the loss scale like others.
#[test]
fn empty_steps_count() {
    fn step_of<H: DeviceHyper>(hyper: H, grads: [bool; 2]) {
        let count = grads.len();
        let mut device = optimizer([ParamGroup::new(hyper, 0..count)]);
        device.set_loss_scale(Some(LossScale { scale: 4.0, ..Default::default() })).unwrap();
        let empty = DeviceSlice { ptr: 0, len: 0, dtype: DType::F16 };
        let params = grads.map(|has| DeviceParam::new(empty, has.then_some(empty)));
        // SAFETY: no tensor has an element; here and below.
        unsafe { device.bind(&params) }.unwrap();
        let ctl =
            StepCtl { clip: Some(Clip::norm(1.0)), found_inf: FoundInf::Check, ..StepCtl::PLAIN };
        let with_grad: Vec<usize> = (0..count).filter(|index| grads[*index]).collect();
        // SAFETY: as above.
        unsafe { device.take_grad_stats(&with_grad, &ctl, None) }.unwrap();
        // SAFETY: as above.
        unsafe { device.step(&ctl) }.unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.last_skipped, status.grad_norm), (false, 0.0));
        assert_eq!((status.growth_tracker, status.loss_scale), (1, Some(4.0)));
        let steps: Vec<u64> = device.state_dict().unwrap().state.values().map(|s| s.step).collect();
        assert_eq!(steps, vec![1; with_grad.len()]);
    }
    for grads in [[false, false], [true, false], [true, true]] {
        step_of(SgdHyper::default(), grads);
        step_of(LambHyper { use_global_grad_norm: true, ..Default::default() }, grads);
        step_of(AdamPHyper::default(), grads);
    }
    let none: [ParamGroup<SgdHyper>; 0] = [];
    let mut device = optimizer(none);
    // SAFETY: as above.
    unsafe { device.bind(&[]) }.unwrap();
    // SAFETY: as above.
    unsafe { device.step(&StepCtl::default()) }.unwrap();
    assert!(!device.status().unwrap().last_skipped);
}

/// A non-zero `found_inf` in device memory skips a step as the optimizer's own check does.
#[test]
fn nonzero_found_inf_skips_the_step() {
    let on = test_device(1);
    let mut found_inf = on.alloc(8).unwrap();
    let [weight, grad] = [1.0; 2].map(|one| on.upload(&[one; 100]));
    let param = DeviceParam::new(weight.slice(), Some(grad.slice()));
    let groups = [ParamGroup::new(SgdHyper { lr: 0.25, ..Default::default() }, 0..1)];
    let mut device = CudaOptimizer::new(on.clone(), groups, HalfWeights::Master).unwrap();
    device.set_loss_scale(Some(LossScale { scale: 4.0, ..Default::default() })).unwrap();
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&[param]) }.unwrap();
    // The gradients are divided by the loss scale of each step.
    for (found, weight_after, scale, skipped) in [
        (0_u32, 0.9375, 4.0, 0),
        (1, 0.9375, 2.0, 1),
        (0, 0.8125, 2.0, 1),
        (u32::MAX, 0.8125, 1.0, 2),
    ] {
        // The second half: its address is a multiple of 4 only.
        on.write(&mut found_inf, 4, &found.to_ne_bytes()).unwrap();
        // SAFETY: as above.
        unsafe { device.step_unless(&StepCtl::PLAIN, TestDevice::address(&found_inf) + 4) }
            .unwrap();
        let status = device.status().unwrap();
        assert_eq!((status.last_skipped, status.skipped), (found != 0, skipped));
        assert_eq!(status.loss_scale, Some(scale));
        assert_eq!(weight.get::<f32>(), [weight_after; 100]);
    }
}

/// A group that is added later starts at its first step; the others continue.
#[test]
fn group_added_between_steps_starts_at_its_first_step() {
    let group = |at: usize| {
        let hyper = SgdHyper { lr: 0.5 + at as f64, momentum: 0.9, ..Default::default() };
        ParamGroup::new(hyper, [at])
    };
    let mut device = optimizer([group(0)]);
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
            let error = unsafe { device.step(&ctl) }.unwrap_err();
            assert_eq!(error.to_string(), "`step` called before `bind`");
        }
        // SAFETY: as above.
        unsafe { device.bind(&params) }.unwrap();
        // An error changes nothing: the tensors are still bound.
        let duplicate = device.add_param_group(group(0));
        assert!(matches!(duplicate, Err(Error::DuplicateParam { index: 0 })));
        // SAFETY: as above.
        unsafe { device.step(&ctl) }.unwrap();
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

/// The status of the last step is kept when the tables are dropped and built again.
#[test]
fn status_outlives_the_tables() {
    let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
    let mut device = optimizer(groups);
    device.set_loss_scale(Some(LossScale { scale: 8.0, ..Default::default() })).unwrap();
    let (weights, grads) = (filled(&device.device, &[4], 1.0), filled(&device.device, &[4], 4.0));
    let ctl = StepCtl { clip: Some(Clip::norm(1.0)), ..StepCtl::PLAIN };
    // SAFETY: all buffers live as long as the device; here and below.
    unsafe { device.bind(&params(&weights, &grads)) }.unwrap();
    // SAFETY: as above.
    unsafe { device.step(&ctl) }.unwrap();
    let status = device.status().unwrap();
    assert_eq!((status.grad_norm, status.growth_tracker), (1.0, 1));
    device.refresh_masters().unwrap();
    assert_eq!(device.status().unwrap(), status);
    // SAFETY: as above.
    unsafe { device.bind(&params(&weights, &grads)) }.unwrap();
    assert_eq!(device.status().unwrap(), status);
}

/// State that an optimizer on the CPU saved in another order is loaded by name.
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

    let mut device = optimizer(groups());
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

/// Tensors of more than 2^31 elements, of which only the ends are in memory.
#[test]
fn ends_of_large_tensors_are_updated() {
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
        let last = |chunks: &[Chunk], many: usize| {
            cast_slice::<_, u8>(&chunks[chunks.len() - many..]).to_vec()
        };
        let request = Request { limit: f32::INFINITY, grad_scale: 1.0, ..Request::default() };
        let ctl = [bytes_of(&request), bytes_of(&DeviceStatus::default())].concat();
        let sums = tables.upload(&vec![0; 8 * plan.values as usize]).unwrap();
        let chunks = plan.stats.len() as u32;
        let stats_job = Job {
            tensor: tables.add(bytes_of(&tensor)).unwrap(),
            chunk: tables.add(cast_slice(&plan.stats)).unwrap(),
            group: tables.add(cast_slice(&group_table(&groups))).unwrap(),
            progress: tables.add(bytes_of(&progress)).unwrap(),
            ctl: tables.add(&ctl).unwrap(),
            sum: TestDevice::address(&sums),
            arrived: tables.add(&vec![0; 4 * plan.stats.len()]).unwrap(),
            first: chunks - 2,
            chunks,
            tensors: 1,
            groups: 1,
            ..Job::default()
        };
        let kernel = Program::SHARED.kernel(&on, "grad_stats").unwrap();
        // SAFETY: the elements of the last chunks are in memory.
        unsafe { launch(&on, &kernel, 1, &stats_job) }.unwrap();
        let mut bytes = [0; 16];
        // After the sums of the tensor, of all and of the group.
        on.read(&sums, 8 * (1 + chunks as usize), &mut bytes).unwrap();
        let (sums, _) = bytes.as_chunks();
        let sums = [0, 1].map(|at| f64::from_ne_bytes(sums[at]));
        assert_eq!(sums, [SPAN as f64, (count % SPAN) as f64]);
        let types = Types { grad: 0, weight: 0, master: false };
        let rule = Some((hyper.rule_type(), false));
        let program = Program { rule, types, shape: LaunchShape::DEFAULT };
        let chunk = tables.add(&last(&plan.classes[0].sweep, 3)).unwrap();
        let kernel = program.kernel(&on, "step").unwrap();
        // SAFETY: as above.
        unsafe { launch(&on, &kernel, 1, &Job { chunk, chunks: 3, ..stats_job }) }.unwrap();
        let updated = 2 * sweep + count % sweep;
        let end = end.get::<f32>();
        let (unchanged, updated) = end.split_at(end.len() - updated);
        assert!(unchanged.iter().all(|x| *x == 1.0) && updated.iter().all(|x| *x == 0.5));
    }
}
