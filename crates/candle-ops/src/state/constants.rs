//! Tensors that depend only on shapes, such as the causal mask: built and copied to the device once
//! per context.
//!
//! While a step is captured as a CUDA graph they could not be copied. Outside of a
//! [`Context`](crate::Context) each is built when it is used.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor};

use crate::context::{self, Mode};

/// Constants by operator and shapes.
pub(crate) type Constants = HashMap<(&'static str, Vec<usize>), Tensor>;

/// Maximum number of constants in a context.
const MAX_CONSTANTS: usize = 256;

/// The constant of this operator for these shapes, from the entered context or from `build`.
pub(crate) fn constant(
    operator: &'static str,
    shapes: &[usize],
    device: &Device,
    build: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    let key = (operator, shapes.to_vec());
    let kept = context::with(|context| context.constants.get(&key).cloned());
    if let Some(kept) = kept.filter(|kept| kept.device().same_device(device)) {
        return Ok(kept);
    }
    let built = build()?;
    context::with(|context| {
        if context.mode != Mode::Outside && context.constants.len() < MAX_CONSTANTS {
            context.constants.insert(key, built.clone());
        }
    });
    Ok(built)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Context;

    #[test]
    fn a_constant_is_built_once_per_context_and_shape() {
        let mut built = 0;
        let mut get = |shapes: &[usize]| {
            let build = || {
                built += 1;
                Tensor::new(built as f32, &Device::Cpu)
            };
            constant("test", shapes, &Device::Cpu, build).unwrap().to_scalar::<f32>().unwrap()
        };
        let mut context = Context::new(0);
        assert_eq!(context.enter(|| [get(&[1]), get(&[2]), get(&[1])]), [1.0, 2.0, 1.0]);
        assert_eq!([get(&[1]), get(&[1])], [3.0, 4.0]);
        assert_eq!(context.evaluate(|| get(&[2])), 2.0);
    }
}
