//! The first program of `fused-optim`'s README.

use fused_optim::{
    AdamW, AdamWHyper, Applied, Clip, FoundInf, Optimizer, ParamMut, Slice, StepCtl,
};

fn main() -> fused_optim::Result<()> {
    let (mut weight, mut bias) = (vec![1.0_f32; 6], vec![0.0_f32; 2]);
    let mut adamw = AdamW::with_one_group(AdamWHyper { lr: 0.01, ..Default::default() }, 2)?;
    for step in 0..10 {
        // Gradients of a loss that was multiplied by 1024; in one step one of them overflows.
        let weight_grad = if step == 3 { [f32::INFINITY; 6] } else { [512.0; 6] };
        let bias_grad = [-1024.0; 2];
        let mut params = [
            ParamMut::new(&mut weight[..], Some(Slice::F32(&weight_grad))),
            ParamMut::new(&mut bias[..], Some(Slice::F32(&bias_grad))),
        ];
        // One call checks, unscales, clips and updates all tensors.
        let ctl = StepCtl {
            grad_scale: 1.0 / 1024.0,
            found_inf: FoundInf::Check,
            clip: Some(Clip::norm(1.0)),
        };
        let applied = adamw.step(&mut params, &ctl)?;
        assert_eq!(applied == Applied::SkippedNonFinite, step == 3);
    }
    println!("weight {}, bias {}", weight[0], bias[0]);
    assert!(weight[0] < 1.0 && bias[0] > 0.0);
    Ok(())
}
