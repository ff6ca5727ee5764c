//! The first program of `amp`'s README.

use amp::{LossScaler, LossScalerOptions, has_non_finite};

fn main() -> amp::Result<()> {
    let mut scaler = LossScaler::new(LossScalerOptions::default())?;
    let mut weight = [1.0_f32; 4];
    for step in 0..4 {
        // Backward of the loss times the scale; in the second step a gradient overflows.
        let mut grads = weight.map(|w| 2.0 * w * scaler.scale());
        if step == 1 {
            grads[0] = f32::INFINITY;
        }
        let found_inf = has_non_finite(&grads); // of several ranks after their average, so equal on all
        if !found_inf {
            let inv_scale = scaler.inv_scale();
            weight.iter_mut().zip(&grads).for_each(|(w, grad)| *w -= 0.1 * grad * inv_scale);
        }
        scaler.update(found_inf)?;
    }
    println!("weights {weight:?}, loss scale {}", scaler.scale());
    assert_eq!(scaler.scale(), 32768.0); // halved by the overflow, whose step was skipped
    Ok(())
}
