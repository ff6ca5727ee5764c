//! NVRTC's machine code of the kernels: no spills, no generic accesses, 16 bytes at a time, few
//! registers.

use std::env;

use cuda_rt::testing::{self, Limits};

use super::LaunchShape;
use super::device::Program;
use super::table::Types;

/// Every rule type, and whether it has two sweeps.
const RULE_TYPES: [(&str, bool); 18] = [
    ("Adadelta", false),
    ("Adam<false>", false),
    ("Adam<true>", false),
    ("AdamW<false>", false),
    ("AdamW<true>", false),
    ("AdamP", true),
    ("BertAdam", false),
    ("Lamb", true),
    ("RmsProp<false, false>", false),
    ("RmsProp<false, true>", false),
    ("RmsProp<true, false>", false),
    ("RmsProp<true, true>", false),
    ("RmsPropTf<false, false>", false),
    ("RmsPropTf<false, true>", false),
    ("RmsPropTf<true, true>", false),
    ("Sgd<false, false>", false),
    ("Sgd<true, false>", false),
    ("Sgd<true, true>", false),
];

/// All types. Compiled for every rule type with `$KERNELS=all`, else for one, on one architecture.
fn all_types() -> impl Iterator<Item = Types> {
    (0..3).flat_map(|grad| {
        [(0, false), (1, false), (2, false), (1, true), (2, true)].map(|(weight, master)| Types {
            grad,
            weight,
            master,
        })
    })
}

fn programs(arch: i32) -> Vec<Program> {
    let all = |(rule, two_sweeps): &(&str, bool), types| Program {
        rule: Some(((*rule).into(), *two_sweeps)),
        types,
        shape: LaunchShape::DEFAULT,
    };
    let mut programs = vec![Program::SHARED];
    if env::var_os("KERNELS").is_some_and(|which| which == "all") {
        programs.extend(every_rule_type(LaunchShape::DEFAULT));
        return programs;
    }
    let plain = Types { grad: 0, weight: 0, master: false };
    let half = Types { grad: 1, weight: 2, master: true };
    let both = |rule| [plain, half].map(|types| all(rule, types));
    programs.extend(RULE_TYPES.iter().flat_map(both));
    if arch == 90 {
        programs.extend(all_types().map(|types| all(&RULE_TYPES[3], types)));
        let shapes = LaunchShape::ALL.iter().filter(|shape| shape.blocks == 4);
        programs
            .extend(shapes.map(|shape| Program { shape: *shape, ..all(&RULE_TYPES[3], plain) }));
    }
    programs
}

/// Every rule type for all types.
fn every_rule_type(shape: LaunchShape) -> impl Iterator<Item = Program> {
    RULE_TYPES.iter().flat_map(move |(rule, two_sweeps)| {
        let rule = Some(((*rule).to_owned(), *two_sweeps));
        all_types().map(move |types| Program { rule: rule.clone(), types, shape })
    })
}

/// The limits of a program's kernels.
fn limits(program: &Program) -> Vec<Limits> {
    let limits = |kernel, registers, wide_loads, wide_stores| Limits {
        kernel,
        registers,
        wide_loads,
        wide_stores,
        loads_at_once: 0,
        products_at_once: 0,
    };
    let step = limits("step", 104, true, true);
    match &program.rule {
        None => vec![
            limits("finish_grad_stats", 80, true, false),
            limits("grad_stats", 80, true, false),
            limits("average", 64, true, true),
        ],
        Some((_, false)) => vec![step],
        Some((_, true)) => {
            vec![
                limits("first_sweep", 128, true, true),
                limits("row_factors", 128, false, false),
                step,
            ]
        }
    }
}

#[test]
#[ignore = "needs NVIDIA's NVRTC and nvdisasm: .ci/kernels"]
fn kernels_compile_without_spills_for_every_architecture() {
    let checked = |program: Program| testing::Program {
        source: Program::SOURCE,
        macros: program.macros(),
        kernels: limits(&program),
    };
    let all = |arch| programs(arch).into_iter().map(checked).collect();
    let problems = testing::machine_code_problems(all);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Compiles all kernels that the tests on a device launch.
#[test]
#[ignore = "needs NVIDIA's NVRTC: benches/gpu/build.sh"]
fn kernels_of_the_tests_fill_the_cache() {
    let shapes = LaunchShape::ALL.into_iter().filter(|shape| shape.blocks == 8);
    let tuned = shapes.flat_map(every_rule_type).filter(|program| {
        let Types { grad, weight, master } = program.types;
        let rule = program.rule.as_ref().map(|(rule, _)| rule.as_str());
        let types = [(0, 0, false), (1, 2, true)].contains(&(grad, weight, master));
        types && matches!(rule, Some("AdamW<false>" | "Lamb"))
    });
    let all =
        [Program::SHARED].into_iter().chain(every_rule_type(LaunchShape::DEFAULT)).chain(tuned);
    let all = all.map(|program| (Program::SOURCE, program.macros()));
    testing::fill_cache(all.chain([(super::tests::tree::SOURCE, Vec::new())]));
}
