//! Tests of the device that a product runs on, and of the size of tensors.

use candle_core::{DType, Device, Tensor};

use super::matmul::{Matrices, ONE};
use super::tests::kernels;
use crate::tests::flat;

/// Also right after work on another GPU of the process.
#[test]
fn a_product_runs_on_the_device_of_its_kernels() {
    let on = kernels();
    let device = Device::Cuda(on.device.clone());
    let [a, b] = [(); 2].map(|()| Tensor::ones((16, 16), DType::F32, &device).unwrap());
    let c = on.empty((16, 16), DType::F32).unwrap();
    let at = [on.address(&a).unwrap(), on.address(&b).unwrap(), c.at];
    let Ok(other) = Device::new_cuda_with_stream(1) else { return };
    let work = Tensor::zeros(4, DType::F32, &other).unwrap();
    let matrices = at.map(|at| Matrices::new(at, DType::F32, 0));
    // SAFETY: three tensors of these extents.
    unsafe { on.multiply(1, [16; 3], matrices, ONE) }.unwrap();
    assert_eq!(flat(&c.tensor().to_device(&Device::Cpu).unwrap()), [16.0; 256]);
    drop(work);
}

#[test]
fn tensors_that_are_too_large_are_reported() {
    let kernels = kernels();
    assert!(kernels.fits((1 << 31) - 1));
    assert_eq!(kernels.too_large(), None);
    assert!(!kernels.fits(1 << 32) && !kernels.fits(1 << 31));
    assert_eq!(kernels.too_large(), Some(1 << 32));
}
