//! The first program of `train-step`'s README.

use train_step::fused_optim::{AdamW, AdamWHyper, DType, Optimizer, ParamGroup};
use train_step::{
    Floor, Param, Paramwise, RunLength, SchedulerConfig, Schedules, Shape, TensorSpec,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let spec = |name: &str, shape: &[usize]| TensorSpec {
        name: name.into(),
        shape: shape.into(),
        dtype: DType::F32,
    };
    let params = [spec("fc.weight", &[4, 16]), spec("fc.bias", &[4]), spec("norm.weight", &[4])];

    // Two groups: matrices with weight decay, norms and biases without.
    let hyper = AdamWHyper { lr: 0.01, weight_decay: 0.1, ..AdamWHyper::default() };
    let groups = Paramwise::no_decay_for_norms_and_biases().groups(&params);
    let groups = groups.into_iter().map(|group| {
        let weight_decay = hyper.weight_decay * group.hyper.weight_decay;
        ParamGroup::new(AdamWHyper { weight_decay, ..hyper.clone() }, group.params)
    });
    let mut adamw = AdamW::new(groups)?;

    // Ten steps of warm-up, and a cosine over the rest of a hundred.
    let warm_up = Shape::Linear { start_factor: 0.1, end_factor: 1.0 };
    let cosine = Shape::CosineAnnealing { t_max: None, floor: Floor::Ratio(0.01) };
    let configs = vec![
        SchedulerConfig { end: Some(10), ..SchedulerConfig::by_iters(Param::Lr, warm_up) },
        SchedulerConfig { begin: 10, ..SchedulerConfig::by_iters(Param::Lr, cosine) },
    ];
    let mut schedules = Schedules::new(configs, RunLength::of_iters(100), &[], &mut adamw)?;
    assert_eq!((adamw.group_count(), adamw.lr(0)?, adamw.lr(1)?), (2, 0.001, 0.001));
    for _ in 0..100 {
        // forward, backward, adamw.step(..)
        schedules.step_iters(1, &mut adamw)?;
    }
    assert!(adamw.lr(0)? < 0.0002);
    // In a checkpoint: `schedules.all()`, by serde; later `schedules.resume(&saved)`.
    Ok(())
}
