//! The first program of `cuda-rt`'s README.

use cuda_rt::{Device, Gpu};

const SOURCE: &str = r#"
struct Job { u64 x, count; };
extern "C" __global__ void __launch_bounds__(THREADS, 2) twice(const Job job) {
  const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
  if (i < job.count) store_one<F32>(job.x, i, 2 * load_one<F32>(job.x, i));
}
"#;

fn twice(x: &[f32]) -> cuda_rt::Result<Vec<f32>> {
    let gpu = Gpu::new(0)?;
    let kernel = gpu.kernel(SOURCE, &[], "twice")?; // compiled by NVRTC, then cached on disk
    let mut bytes: Vec<u8> = x.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let mut memory = gpu.alloc(bytes.len())?;
    gpu.write(&mut memory, 0, &bytes)?;
    let job = [Gpu::address(&memory), x.len() as u64];
    // SAFETY: the argument is the kernel's struct; the memory is read, and freed, after the kernel
    // has run.
    unsafe { gpu.launch(&kernel, (x.len() as u32).div_ceil(256), &job) }?;
    gpu.read(&memory, 0, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|x| f32::from_ne_bytes([x[0], x[1], x[2], x[3]])).collect())
}

fn main() {
    match twice(&[1.0, 2.0, 3.0]) {
        Ok(doubled) => assert_eq!(doubled, [2.0, 4.0, 6.0]),
        Err(reason) => println!("no CUDA: {reason}"), // every path that was tried, and what to install
    }
}
