//! Mutants of the kernels' source: the comparison with the CPU must fail for each.

use super::super::device::Program;
use super::*;

/// A part of the kernels' source, and its replacement.
const MUTANTS: &[(&str, &str)] = &[
    // The loops and their tails.
    ("count / V * V : 0", "count / V * V + V : 0"),
    ("packed + lane(); i < count", "packed + lane(); i + 1 < count"),
    ("i += WARP * V", "i += 2 * WARP * V"),
    ("is_aligned<V>() ?", "true ?"),
    ("c += warp_count()", "c += warp_count() + 1"),
    ("row * cols + from", "from"),
    // Gradient, average and copy.
    ("return limited(g);", "return g;"),
    ("g < -limit ? -limit : g", "g < -limit ? limit : g"),
    ("if (clear) {", "if (false) {"),
    ("1 - ema_decay", "ema_decay"),
    ("bits + 0x7fffu + (bits >> 16 & 1u)", "bits + 0x8000u"),
    ("group.maximize ? -total : total", "total"),
    // Sums: their order, their parts, the thread that folds them.
    ("fold_array<N / 2>(x) + fold_array<N / 2>(x + N / 2)", "x[0] + fold_array<N - 1>(x + 1)"),
    ("from += at_once", "from += 2 * at_once"),
    ("k + i < fold.count ?", "k + i + 1 < fold.count ?"),
    ("lane() < members ?", "lane() + 1 < members ?"),
    ("*own = 0;", ""),
    ("!= members - 1", "!= 0"),
    ("before == gridDim.x - 1", "before == 0"),
    ("nonfinite |= !is_finite(x);", ""),
    ("atomicOr(&ctl.nonfinite, 1u)", "atomicAdd(&ctl.arrived, 0u)"),
    ("c = job.first + warp_index()", "c = job.first + warp_index() + 1"),
    ("job.groups + own;", "job.groups;"),
    ("add_to_tree(sums, job.arrived + own", "add_to_tree(sums, job.arrived"),
    ("job.progress[at].step++;", "if (at) job.progress[at].step++;"),
    ("norm + 1e-6", "norm + 1e-12"),
    ("ctl.skip = skip;", "ctl.skip = 0;"),
    // Two sweeps.
    ("left[k] += left[step * apart * K + k]", "left[0] += left[step * apart * K]"),
    ("if (!by_rows) fold_rows<R::SUMS>(sums, 1, rows, per_row);", ""),
    ("t.row + span.row", "t.row"),
    ("__syncthreads_and(all)", "all"),
    ("by_rows ? row * per_row * R::SUMS : 0", "0"),
    ("projected = by_rows || whole", "projected = whole"),
    (
        "const Span span = span_of(t.cols, chunk.index, SPAN);",
        "const Span span = span_of(t.cols, chunk.index, SWEEP);",
    ),
];

/// The comparison fails with each mutant and passes without.
#[test]
fn every_mutant_of_the_kernels_is_detected_on_the_shim() {
    let kind = Kind::new(DType::F16, DType::Bf16, HalfWeights::Master);
    let hyper = AdamPHyper { weight_decay: 0.1, ..Default::default() };
    let hypers = [hyper, AdamPHyper { maximize: true, ..hyper }];
    // The last spans more chunks than a warp has threads.
    let sizes =
        [(8, 2), (70_001, 0), (3, 0), (36_000, 2), (1025, 5), (64, 16), (0, 0), (540_000, 0)];
    let run = |planted, seed: u64| {
        let device = TestDevice::on_the_shim(SHIM, seed, planted);
        // A mutant must compile.
        let types = Types { grad: 1, weight: 2, master: true };
        let rule = Some(("AdamP".into(), true));
        let program = Program { rule, types, shape: LaunchShape::DEFAULT };
        Program::SHARED.kernel(&device, "finish_grad_stats").unwrap();
        program.kernel(&device, "step").unwrap();
        let sizes = if seed == 0 { &sizes[..] } else { &sizes[..7] };
        let compare = || compare(hypers, device, &[kind], sizes, seed);
        // A fault counts as detected.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(compare))
            .unwrap_or_else(|_| Err("a fault".into()))
    };
    for seed in 0..4 {
        assert_eq!(run(None, seed), Ok(()));
    }
    let undetected = |planted: &&(&'static str, &'static str)| {
        (0..4).rev().all(|seed| run(Some(**planted), seed).is_ok())
    };
    let undetected: Vec<_> = MUTANTS.iter().filter(undetected).collect();
    assert!(undetected.is_empty(), "not detected: {undetected:#?}");
}
