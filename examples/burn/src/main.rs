//! A burn program on two processes, with everything of `train_step::Trainer`.
//!
//! ```sh
//! cargo run --manifest-path examples/burn/Cargo.toml
//! ```
//!
//! `plain.rs` is a loop of burn's, `full.rs` the same with averages, a loss scale, clipping,
//! accumulation, a schedule and exact resume, `lend.rs` the adapter. This file starts the second as
//! ranks, and fails unless
//!
//! * two ranks in f32, each with half of every batch, have the losses of the plain loop, to
//!   [`TOLERANCE`];
//! * two ranks with everything, in f16 and in bf16, stopped after half of the epochs and started
//!   again, have the losses of two that were not stopped, bit by bit.

mod full;
mod plain;

use std::error::Error;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use burn_two_processes::mlp::{BATCHES, EPOCHS};
use train_step::Trainer;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const RANKS: usize = 2;
/// Largest relative difference of two losses: sums are taken in another order, and each optimizer
/// rounds in its own way.
const TOLERANCE: f64 = 1e-4;

fn main() -> Result<()> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => check(),
        [what, epochs, path] => train_rank(what, epochs.parse()?, Path::new(path)),
        _ => Err("arguments: none, or f32, f16 or bf16, the number of epochs, and a path".into()),
    }
}

/// One rank. Rank 0 prints the losses of the whole batches.
fn train_rank(what: &str, epochs: usize, path: &Path) -> Result<()> {
    let options = match what {
        "f32" => Trainer::builder(),
        "bf16" => full::options().bf16(),
        _ => full::options(),
    };
    let losses = full::train(options, epochs, path)?;
    if std::env::var("RANK").map_or(true, |rank| rank == "0") {
        losses.iter().for_each(|loss| println!("{loss:?}"));
    }
    Ok(())
}

fn check() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("burn-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let checked = check_in(&folder);
    std::fs::remove_dir_all(&folder)?;
    checked
}

fn check_in(folder: &Path) -> Result<()> {
    let (plain, ours) = (plain::train(), start("f32", EPOCHS, &folder.join("f32"))?);
    for (step, (our, burn)) in ours.iter().zip(&plain).enumerate() {
        if (our - burn).abs() > TOLERANCE * burn.abs() {
            return Err(format!("step {step}: the losses are {our} and {burn}").into());
        }
    }
    let last = EPOCHS * BATCHES - 1;
    println!("f32: {RANKS} ranks end at a loss of {}, one process at {}", ours[last], plain[last]);
    for what in ["f16", "bf16"] {
        let undisturbed = start(what, EPOCHS, &folder.join(format!("{what}.undisturbed")))?;
        let path = folder.join(what);
        let stopped = [start(what, EPOCHS / 2, &path)?, start(what, EPOCHS, &path)?].concat();
        if stopped != undisturbed {
            return Err(format!("{what}: resumed {stopped:?}, undisturbed {undisturbed:?}").into());
        }
        println!("{what}, with everything: {}, resumed or not", stopped[last]);
    }
    Ok(())
}

/// Runs the ranks. Returns the losses that rank 0 prints.
fn start(what: &str, epochs: usize, path: &Path) -> Result<Vec<f64>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args([what, &epochs.to_string()])
            .arg(path)
            .envs([("RANK", rank.to_string()), ("WORLD_SIZE", RANKS.to_string())])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)])
            .stdout(Stdio::piped())
            .spawn()
    };
    let ranks = (0..RANKS).map(start).collect::<std::io::Result<Vec<_>>>()?;
    let mut losses = Vec::new();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("rank {rank}: {}", output.status).into());
        }
        for line in String::from_utf8(output.stdout)?.lines() {
            losses.push(line.parse()?);
        }
    }
    Ok(losses)
}
