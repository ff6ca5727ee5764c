//! Prints the tables of `collective::sim`'s documentation: the cost of an all-reduce by each
//! algorithm.
//!
//! `cargo run --release -p gradstack-collective --example cost_table >
//! crates/collective/src/sim/cost_table.md`
//!
//! 4,096 ranks send up to 33 million messages for a number, so it takes almost a minute.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::time::Duration;

use collective::sim::{Algorithm, Network, Placement, simulate};
use collective::{
    DType, Determinism, ReduceOp,
    backend::{OpDesc, Verb},
};

/// Sizes in bytes, with their names.
const SIZES: [(usize, &str); 6] = [
    (4, "4 B"),
    (1 << 10, "1 KiB"),
    (64 << 10, "64 KiB"),
    (1 << 20, "1 MiB"),
    (16 << 20, "16 MiB"),
    (128 << 20, "128 MiB"),
];

fn main() {
    // An argument selects the rows that contain it, for example `"4096 | ring"`.
    let only = std::env::args().nth(1).unwrap_or_default();
    let wanted = |ranks: usize, algorithm| format!("| {ranks} | {algorithm} |").contains(&only);
    println!("One rank on each machine:\n\n{}", head());
    for ranks in [8, 64, 512, 4096] {
        for algorithm in [
            Algorithm::Flat,
            Algorithm::Direct,
            Algorithm::Ring,
            Algorithm::RecursiveDoubling,
            Algorithm::HalvingDoubling,
        ] {
            if wanted(ranks, algorithm) {
                println!("{}", row(ranks, algorithm, 1));
            }
        }
    }
    println!("\nEight ranks on each machine, which share its interface:\n\n{}", head());
    for ranks in [64, 512, 4096] {
        for algorithm in [
            Algorithm::Ring,
            Algorithm::RecursiveDoubling,
            Algorithm::HalvingDoubling,
            Algorithm::TwoLevel,
        ] {
            if wanted(ranks, algorithm) {
                println!("{}", row(ranks, algorithm, 8));
            }
        }
    }
}

fn head() -> String {
    let sizes: Vec<_> = SIZES.iter().map(|(_, name)| *name).collect();
    let line = vec!["---:"; SIZES.len()];
    format!("| ranks | algorithm | {} |\n|---:|---|{}|", sizes.join(" | "), line.join("|"))
}

/// One row of a table.
pub(crate) fn row(ranks: usize, algorithm: Algorithm, per_machine: usize) -> String {
    let network = Network::default().with_placement(Placement::Blocks(per_machine));
    let times = SIZES.map(|(bytes, _)| {
        let op = OpDesc {
            verb: Verb::AllReduce,
            dtype: DType::F32,
            op: Some(ReduceOp::Sum),
            root: None,
            count: bytes / 4,
        };
        let report = simulate(&network, ranks, &op, Determinism::Fast, Some(algorithm));
        text(report.expect("every algorithm does an all-reduce").time)
    });
    format!("| {ranks} | {algorithm} | {} |", times.join(" | "))
}

/// Formats with three digits.
fn text(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let (value, unit) = match seconds {
        s if s < 999.5e-6 => (s * 1e6, "us"),
        s if s < 999.5e-3 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}
