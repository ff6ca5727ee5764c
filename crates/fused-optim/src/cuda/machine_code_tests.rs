//! NVRTC's machine code of the kernels: no spills, no generic accesses, 16 bytes at a time, few registers.

use std::env;

use cuda_rt::testing::{self, Limits};

use super::device::Program;
use super::table::Types;
use super::tune::LaunchShape;

/// Every form of every rule, and whether it sweeps twice.
const FORMS: [(&str, bool); 18] = [
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

/// All types: for every form with `KERNELS=all`, else for one, on one architecture.
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
    let all = |(form, twice): &(&str, bool), types| Program {
        rule: Some(((*form).into(), *twice)),
        types,
        shape: LaunchShape::DEFAULT,
    };
    let mut programs = vec![Program::LOOK];
    if env::var_os("KERNELS").is_some_and(|which| which == "all") {
        programs.extend(every_form(LaunchShape::DEFAULT));
        return programs;
    }
    let plain = Types { grad: 0, weight: 0, master: false };
    let half = Types { grad: 1, weight: 2, master: true };
    programs.extend(FORMS.iter().flat_map(|form| [plain, half].map(|types| all(form, types))));
    if arch == 90 {
        programs.extend(all_types().map(|types| all(&FORMS[3], types)));
        let shapes = LaunchShape::ALL.iter().filter(|shape| shape.blocks == 4);
        programs.extend(shapes.map(|shape| Program { shape: *shape, ..all(&FORMS[3], plain) }));
    }
    programs
}

/// Every form for all types.
fn every_form(shape: LaunchShape) -> impl Iterator<Item = Program> {
    FORMS.iter().flat_map(move |(form, twice)| {
        let rule = Some(((*form).to_owned(), *twice));
        all_types().map(move |types| Program { rule: rule.clone(), types, shape })
    })
}

/// A program's kernels.
fn limits(program: &Program) -> Vec<Limits> {
    let limits = |kernel, registers, wide_loads, wide_stores| Limits {
        kernel,
        registers,
        wide_loads,
        wide_stores,
    };
    let step = limits("step", 104, true, true);
    match &program.rule {
        None => vec![
            limits("look", 80, true, false),
            limits("look_part", 80, true, false),
            limits("average", 64, true, true),
        ],
        Some((_, false)) => vec![step],
        Some((_, true)) => {
            vec![limits("observe", 128, true, true), limits("conclude", 128, false, false), step]
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

/// All kernels that the tests on a device launch.
#[test]
#[ignore = "needs NVIDIA's NVRTC: benches/gpu/run.sh build"]
fn kernels_of_the_tests_fill_the_cache() {
    let shapes = LaunchShape::ALL.into_iter().filter(|shape| shape.blocks == 8);
    let tuned = shapes.flat_map(every_form).filter(|program| {
        let Types { grad, weight, master } = program.types;
        let rule = program.rule.as_ref().map(|(form, _)| form.as_str());
        let types = [(0, 0, false), (1, 2, true)].contains(&(grad, weight, master));
        types && matches!(rule, Some("AdamW<false>" | "Lamb"))
    });
    let all = [Program::LOOK].into_iter().chain(every_form(LaunchShape::DEFAULT)).chain(tuned);
    let all = all.map(|program| (Program::SOURCE, program.macros()));
    testing::fill_cache(all.chain([(super::tests::tree::SOURCE, Vec::new())]));
}
