//! Checks NVRTC's machine code of the kernels: no spills, no generic accesses, accesses of 16
//! bytes, register limits.

use cuda_rt::testing::{self, Limits};

use super::Program;

fn limits(kernel: &'static str, registers: u32, wide: bool) -> Limits {
    Limits {
        kernel,
        registers,
        wide_loads: wide,
        wide_stores: wide,
        loads_at_once: 0,
        products_at_once: 0,
    }
}

/// A cast accesses the wider type by 16 bytes, and has four loads in flight.
fn cast_limits(types: [u32; 2]) -> Limits {
    let [from, to] = types.map(|number| if number == 0 { 4 } else { 2 });
    Limits {
        wide_loads: from >= to,
        wide_stores: to >= from,
        loads_at_once: 4,
        ..limits("cast", 64, true)
    }
}

fn programs(_arch: i32) -> Vec<testing::Program> {
    let scaler = vec![limits("unscale", 96, true), limits("update", 40, false)];
    let casts = [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]];
    let casts = casts.map(|types| (Program { cast: Some(types) }, vec![cast_limits(types)]));
    let all = [(Program::SCALER, scaler)].into_iter().chain(casts);
    let program = |(program, kernels): (Program, _)| testing::Program {
        source: Program::SOURCE,
        macros: program.macros(),
        kernels,
    };
    all.map(program).collect()
}

#[test]
#[ignore = "needs NVIDIA's NVRTC and nvdisasm: .ci/kernels"]
fn kernels_compile_without_spills_for_every_architecture() {
    let problems = testing::machine_code_problems(programs);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// All kernels that the tests on a device launch.
#[test]
#[ignore = "needs NVIDIA's NVRTC: benches/gpu/build.sh"]
fn kernels_of_the_tests_fill_the_cache() {
    let programs = programs(0).into_iter();
    testing::fill_cache(programs.map(|program| (program.source, program.macros)));
}
