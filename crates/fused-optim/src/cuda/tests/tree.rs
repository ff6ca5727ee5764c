//! `add_to_tree` of `device.h` for as many sums as in large models, and a step of as many tensors.

use cuda_rt::Device;

use super::*;
use crate::cpu::sum;

pub(in super::super) const SOURCE: &str = r#"
struct TreeJob { const double* x; double* sums; u32* arrived; double* total; u64 count; };
extern "C" __global__ void __launch_bounds__(THREADS, 2) tree(const TreeJob job) {
  for (u32 i = warp_index(); i < job.count; i += warp_count()) {
    double sum = job.x[i];
    if (add_to_tree(job.sums, job.arrived, i, (u32)job.count, sum) && lane() == 0) *job.total = sum;
  }
}
"#;

const LAUNCH: &str = r#"
extern "C" const char* shim_launch(const char*, u32, const void* job, u32 blocks, u64 seed,
                                   const u64* ranges, u32 range_count) {
  auto body = [](const void* job) { tree(*(const TreeJob*)job); };
  return shim::launch(body, job, blocks, THREADS, seed, ranges, range_count);
}
"#;

#[test]
fn trees_of_all_depths_equal_the_cpu() {
    let device = TestDevice::new(Shim { launch: LAUNCH, types: |_, _| 0 }, 1);
    let kernel = device.kernel(SOURCE, &[], "tree").unwrap();
    let send = |bytes: &[u8]| {
        let mut memory = device.alloc(bytes.len()).unwrap();
        device.write(&mut memory, 0, bytes).unwrap();
        memory
    };
    for count in [1, 2, 31, 32, 33, 64, 1000, 1023, 1024, 1025, 1056, 1057, 2_100, 33_000] {
        // Values of very different size, so that another order gives another sum.
        let value = |i: usize| 0.1 * 7.3_f64.powi(i as i32 * 29 % 31 - 15);
        let x: Vec<f64> = (0..count).map(value).collect();
        let expected = sum::tree(&mut x.clone(), |a, b| a + b).unwrap();
        for blocks in [1, 2, 3] {
            let memory = [
                bytemuck::cast_slice(&x).to_vec(),
                vec![0; 8 * count],
                vec![0; 4 * count],
                vec![0; 8],
            ];
            let memory = memory.map(|bytes| send(&bytes));
            let [x, sums, arrived, total] = memory.each_ref().map(TestDevice::address);
            // SAFETY: a `TreeJob` of memory of this size.
            unsafe { device.launch(&kernel, blocks, &[x, sums, arrived, total, count as u64]) }
                .unwrap();
            let (mut bytes, mut counts) = ([0; 8], vec![0; 4 * count]);
            device.read(&memory[3], 0, &mut bytes).unwrap();
            device.read(&memory[2], 0, &mut counts).unwrap();
            assert_eq!(f64::from_ne_bytes(bytes), expected, "{count} in {blocks} blocks");
            assert!(counts.iter().all(|byte| *byte == 0), "{count} in {blocks} blocks");
        }
    }
}

/// One block computes the factors of all tensors, 256 at a time.
#[test]
fn more_tensors_than_a_block_has_threads() {
    let sizes: Vec<_> = (0..1100).map(|i| (i % 5, 0)).collect();
    let own = AdamWHyper { lr: 0.01, ..Default::default() };
    let hypers = [AdamWHyper { maximize: true, ..own }, own];
    assert_eq!(compare(hypers, test_device(1), &kinds()[..1], &sizes, 1), Ok(()));
}
