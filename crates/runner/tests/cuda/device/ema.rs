//! Moving averages of a model on a GPU, compared with averages computed on the host number by
//! number.

use std::sync::Arc;

use fused_optim::SliceMut;
use half::{bf16, f16};
use parking_lot::Mutex;
use runner::data::Batch;
use runner::engine::Losses;
use runner::hooks::Hook;
use runner::{Result, Runner};

use crate::gpu;

use super::{Duration, GPU, MLP, OPTIM, ProcessGroup, RESNET, builder, everything, numbers_of};

/// Computes the averages by their definition, and compares them with the validated model.
struct Twin {
    share: fn(u64) -> Option<f64>,
    begin: usize,
    with_buffers: bool,
    updates: u64,
    averages: Arc<Mutex<Vec<Vec<f32>>>>,
}

/// All parameters, followed by all buffers if `with_buffers`, as f32; and their types.
fn values(runner: &mut Runner, with_buffers: bool) -> (Vec<Vec<f32>>, Vec<fused_optim::DType>) {
    let (mut all, mut types) = (Vec::new(), Vec::new());
    let mut copy = |slices: &mut [SliceMut<'_>]| {
        for slice in slices {
            types.push(slice.dtype());
            all.push(match slice {
                SliceMut::F32(v) => v.to_vec(),
                SliceMut::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
                SliceMut::Bf16(v) => v.iter().map(|x| x.to_f32()).collect(),
            });
        }
        Ok(())
    };
    runner.engine_mut().with_params(&mut copy).unwrap();
    if with_buffers {
        runner.engine_mut().with_buffers(&mut copy).unwrap();
    }
    (all, types)
}

impl Hook for Twin {
    fn name(&self) -> &'static str {
        "Twin"
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let begun = runner.position().iter + 1 >= self.begin;
        let (newest, _) = values(runner, self.with_buffers);
        let mut averages = self.averages.lock();
        if !begun || self.updates == 0 {
            *averages = newest;
        } else if let Some(share) = (self.share)(self.updates) {
            let share = share as f32;
            for (average, newest) in averages.iter_mut().flatten().zip(newest.iter().flatten()) {
                *average += share * (newest - *average);
            }
        }
        self.updates += u64::from(begun);
        Ok(())
    }

    fn before_val_iter(&mut self, runner: &mut Runner, _: usize, _: &mut Batch) -> Result<()> {
        let (mut expected, (validated, types)) =
            (self.averages.lock().clone(), values(runner, self.with_buffers));
        for (average, dtype) in expected.iter_mut().zip(types) {
            average.iter_mut().for_each(|x| match dtype {
                fused_optim::DType::F32 => {}
                fused_optim::DType::F16 => *x = f16::from_f32(*x).to_f32(),
                fused_optim::DType::Bf16 => *x = bf16::from_f32(*x).to_f32(),
            });
        }
        assert_eq!(bits(&validated), bits(&expected));
        Ok(())
    }
}

fn bits(all: &[Vec<f32>]) -> Vec<Vec<u32>> {
    all.iter().map(|one| one.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn averages_on_a_gpu_have_the_bits_of_the_host() {
    let _gpu = gpu::shared();
    let hook = |ema: &str| format!("custom_hooks = [{{ type = 'EMAHook', {ema} }}]");
    let half = everything("half_parameters = true, loss_scale = { init_scale = 256 }");
    let half = half.replace(
        "type = 'EMAHook', momentum = 0.1",
        "type = 'EMAHook', \
        ema_type = 'MomentumAnnealingEMA', momentum = 0.3, gamma = 3",
    );
    type Share = fn(u64) -> Option<f64>;
    let cases: [(String, usize, bool, Share); 3] = [
        (
            format!("{RESNET}\n{OPTIM}\n{}", hook("momentum = 0.1, update_buffers = true")),
            0,
            true,
            |_| Some(0.1),
        ),
        (format!("{MLP}\n{half}"), 0, false, |n| Some(f64::max(0.3, 3.0 / (3.0 + n as f64)))),
        (
            format!(
                "{MLP}\n{OPTIM}\n{}",
                hook("ema_type = 'StochasticWeightAverage', interval = 2, begin_iter = 3")
            ),
            3,
            false,
            |n| n.is_multiple_of(2).then(|| 1.0 / ((n / 2) as f64 + 1.0)),
        ),
    ];
    for (more, begin, with_buffers, share) in cases {
        let dir = tempfile::tempdir().unwrap();
        let averages = Arc::default();
        let twin = Twin { share, begin, with_buffers, updates: 0, averages: Arc::clone(&averages) };
        let more = format!(
            "{GPU}\n{more}
            val_dataloader = {{ batch_size = 200, dataset = {{ type = 'Digits', split = 'test' }} }}
            val_evaluator = {{ type = 'Accuracy' }}"
        );
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let builder = builder(dir.path(), &more, 8, false).unwrap().hook(Box::new(twin));
        let mut runner = builder.process_group(group).build().unwrap();
        runner.train().unwrap();
        let names = runner.engine_mut().params().iter().map(|spec| spec.name.clone());
        let mut names: Vec<_> = names.collect();
        if with_buffers {
            names.extend(runner.engine_mut().buffers().iter().map(|spec| spec.name.clone()));
        }
        let saved = numbers_of(&dir.path().join("iter_8/ema.safetensors"));
        let averages: Vec<Vec<f32>> = averages.lock().clone();
        assert_eq!(names.len(), averages.len());
        for (name, average) in names.iter().zip(averages) {
            let name = format!("average.{name}");
            let saved = saved.iter().find(|(saved, _)| *saved == name).map(|(_, x)| x.clone());
            assert_eq!(bits(&[saved.unwrap()]), bits(&[average]), "{name}");
        }
    }
}
