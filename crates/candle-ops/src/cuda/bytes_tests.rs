//! Tests of the bytes that kernels read and write, by the counts of the fake GPU.

use candle_core::{DType, Device, Result, Tensor};

use super::Kernels;
use super::tests::{kernels, of_the_fake, run_on, with_kernels};
use crate::tests::values;
use crate::{add, relu};

/// Bytes that a kernel, launched by this thread, has read and written, each once per launch; `None`
/// on a real GPU. Waits for the launches.
pub(super) fn own_bytes(kernels: &Kernels, kernel: &str) -> Option<[u64; 2]> {
    type Prototype = unsafe extern "C" fn(*const libc::c_char, libc::c_int) -> u64;
    let function = of_the_fake(c"fake_gpu_moved")?;
    kernels.device.cuda_stream().synchronize().unwrap();
    let name = std::ffi::CString::new(kernel).unwrap();
    // SAFETY: that is the prototype of the function of this name.
    let moved: Prototype = unsafe { std::mem::transmute(function) };
    // SAFETY: a C string and a number.
    Some([0, 1].map(|written| unsafe { moved(name.as_ptr(), written) }))
}

/// Asserts the bytes that each of these kernels reads and writes in `call`.
pub(super) fn assert_bytes<R>(
    kernels: &Kernels,
    wanted: &[(&str, [usize; 2])],
    call: impl FnOnce() -> R,
) -> R {
    let count = || wanted.iter().map(|(name, _)| own_bytes(kernels, name)).collect::<Vec<_>>();
    let before = count();
    let result = call();
    for (i, after) in count().into_iter().enumerate() {
        let Some((after, before)) = after.zip(before[i]) else { break };
        let (name, wanted) = wanted[i];
        let moved = [0, 1].map(|i| after[i] - before[i]);
        assert_eq!(moved, wanted.map(|bytes| bytes as u64), "{name}");
    }
    result
}

#[test]
fn elementwise_kernels_move_each_tensor_once() {
    let kernels = kernels();
    let device = Device::Cuda(kernels.device.clone());
    for (dtype, size) in [(DType::F32, 4), (DType::F16, 2)] {
        let n = 4099;
        let inputs = [values("a", &[n]), values("b", &[n])].map(|t| t.to_dtype(dtype).unwrap());
        let wanted = [
            ("add", [2 * n * size, n * size]),
            ("relu", [n * size; 2]),
            ("relu_backward", [2 * n * size, n * size]),
        ];
        assert_bytes(&kernels, &wanted, || {
            let op = |t: &[Tensor]| relu(&add(&t[0], &t[1])?);
            with_kernels(&kernels, || run_on(&device, &inputs, &op))
        });
    }
}
