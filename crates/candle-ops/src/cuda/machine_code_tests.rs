//! Tests of the kernels' machine code by NVRTC: no spills, no generic accesses, few registers,
//! accesses of 16 bytes, products of whole tiles without branches.

use cuda_rt::testing::{self, Limits};

use super::{KERNELS, SOURCE, macros};

/// Maximum number of registers per thread: two blocks of 256 threads fit the 65,536 registers of a
/// multiprocessor.
const REGISTERS: u32 = 96;

fn limits(kernel: &'static str, arch: i32, is_half: bool) -> Limits {
    let name = kernel.strip_suffix("_masked").unwrap_or(kernel);
    let registers = match name {
        // One block.
        _ if name != kernel => 200,
        "attention_backward" | "attention_backward_keys" if arch >= 100 => 200,
        "attention" | "attention_backward" | "attention_backward_keys" => 128,
        _ => REGISTERS,
    };
    let (wide_loads, wide_stores) = match name {
        // Gathers, and rows of any alignment.
        "col2im" | "max_pool" | "max_pool_backward" | "fold_columns" => (false, false),
        "layer_norm" | "layer_norm_backward" | "softmax" | "softmax_backward" => (false, false),
        "layer_norm_wide" | "layer_norm_wide_backward" => (false, false),
        "cross_entropy" | "cross_entropy_backward" => (false, false),
        // Indices, and one column per thread.
        "ends_of_ids" | "embedding_backward" => (false, false),
        "fold_parts_last" | "track" => (false, false),
        // Tiles, whose rows have any alignment.
        "transpose" => (false, false),
        // Few numbers are read or written.
        "moments" | "norm_sums" | "mean_pool" | "moments_last" | "norm_sums_last"
        | "column_sums" | "cast_from_f32" => (true, false),
        "mean_pool_backward" | "cast_to_f32" => (false, true),
        // Uses asynchronous copies to shared memory, and words of pairs.
        "attention" | "attention_backward" | "attention_backward_keys" => (false, false),
        // Numbers of 16 bits.
        "attention_dropped" | "attention_hidden" => (false, false),
        // Reads bytes for 16 bytes of results.
        "scale_bytes" => (false, true),
        _ => (true, true),
    };
    // In flight together.
    let loads_at_once = match kernel {
        "column_sums" | "cast_from_f32" | "cast_to_f32" => 4,
        "gelu_backward_sums" | "cast_from_f32_sums" => 2,
        _ => 0,
    };
    // All scores of a whole tile: 16 queries by 64 keys. On sm_80 shuffles come with a branch, so
    // the sums of values are apart.
    let products_at_once = if kernel == "attention" && is_half { 32 } else { 0 };
    Limits { kernel, registers, wide_loads, wide_stores, loads_at_once, products_at_once }
}

#[test]
#[ignore = "needs NVIDIA's NVRTC and nvdisasm: .ci/kernels"]
fn kernels_compile_without_spills_for_every_architecture() {
    let problems = testing::machine_code_problems(|arch| {
        let program = |macros: Vec<String>| {
            // Tensor cores are used from sm_80 on.
            let is_half = macros[0] != "-DTYPE=F32" && arch >= 80;
            let kernels = KERNELS.iter().map(|kernel| limits(kernel, arch, is_half)).collect();
            testing::Program { source: SOURCE, macros, kernels }
        };
        macros().map(program).into()
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Compiles all kernels of this crate.
#[test]
#[ignore = "needs NVIDIA's NVRTC: benches/gpu/build.sh"]
fn kernels_of_the_tests_fill_the_cache() {
    testing::fill_cache(macros().into_iter().map(|macros| (SOURCE, macros)));
}
