//! Our side of `side_by_side/optim.sh`: times this repository's optimizers, the ceiling, and the
//! peers of `torch_optim.py`, and prints the table.
//!
//! ```text
//! side_by_side_optim PYTHON SCRIPT PLACES ROUNDS THREADS WORK...
//! ```
//!
//! A Python process, controlled by lines of text, starts a process for each peer. All programs of a
//! work are created first, take two steps, and must agree on the sum of squares of the weights.
//! Then, in each round, each in turn takes one untimed step and some timed ones; the fastest of all
//! rounds counts. Everything is repeated in newly allocated memory for each of PLACES placements,
//! since the placement of memory pages is random and changes times. A time is the median over the
//! placements, and so is a ratio. Works are listed in [`WORKS`].

#![expect(clippy::print_stdout, reason = "this program's result is what it prints")]

use std::error::Error;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use amp::{CastTo, cast};
use benches::ceiling::{Pattern, Stream};
use benches::tensors::{resnet50, step, tensors, transformer};
use fused_optim::{
    Adadelta, AdadeltaHyper, Adam, AdamHyper, AdamP, AdamPHyper, AdamW, AdamWHyper, BertAdam,
    BertAdamHyper, Clip, FoundInf, Lamb, LambHyper, Optimizer, RmsProp, RmsPropHyper, RmsPropTf,
    RmsPropTfHyper, Sgd, SgdHyper, StepCtl,
};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A comparison: name, title, optimizer, tensors, memory accesses, peers.
type Work = (&'static str, &'static str, &'static str, Tensors, Pattern, &'static [&'static str]);

#[derive(Clone, Copy)]
enum Tensors {
    ResNet50,
    Transformer,
    /// Ten thousand tensors of 64 elements.
    Small,
}

impl Tensors {
    fn counts(self) -> Vec<usize> {
        match self {
            Self::ResNet50 => resnet50(),
            Self::Transformer => transformer(),
            Self::Small => vec![64; 10_000],
        }
    }
}

/// `flat` is our optimizer on one tensor with as many elements.
const WORKS: [Work; 13] = {
    use Pattern::{CheckThenTwoStates, OneState, TwoStates, TwoSweeps};
    use Tensors::{ResNet50, Small, Transformer};
    const FOREACH: &[&str] = &["foreach"];
    const TIMM: &[&str] = &["timm"];
    const SGD: &[&str] = &["fused", "foreach", "resumed"];
    const ADAMW: &[&str] = &["fused", "deepspeed", "foreach", "flat"];
    [
        ("adamw", "AdamW, ResNet-50", "adamw", ResNet50, TwoStates, ADAMW),
        ("adamw-110m", "AdamW, transformer", "adamw", Transformer, TwoStates, ADAMW),
        ("adamw-small", "AdamW, 10,000 of 64", "adamw", Small, TwoStates, ADAMW),
        ("sgd", "SGD momentum, ResNet-50", "sgd", ResNet50, OneState, SGD),
        ("sgd-110m", "SGD momentum, transformer", "sgd", Transformer, OneState, SGD),
        ("amp", "AMP step, ResNet-50", "amp", ResNet50, CheckThenTwoStates, &["fused"]),
        ("adadelta", "Adadelta, ResNet-50", "adadelta", ResNet50, TwoStates, FOREACH),
        ("adam", "Adam, ResNet-50", "adam", ResNet50, TwoStates, &["fused", "foreach"]),
        ("adamp", "AdamP, ResNet-50", "adamp", ResNet50, TwoSweeps, TIMM),
        ("bert_adam", "BertAdam, ResNet-50", "bert_adam", ResNet50, CheckThenTwoStates, &["loop"]),
        ("lamb", "Lamb, ResNet-50", "lamb", ResNet50, TwoSweeps, TIMM),
        ("rmsprop", "RMSprop, ResNet-50", "rmsprop", ResNet50, OneState, FOREACH),
        ("rmsprop_tf", "RMSpropTF, ResNet-50", "rmsprop_tf", ResNet50, OneState, TIMM),
    ]
};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [python, script, places, rounds, threads, works @ ..] = args.as_slice() else {
        return Err(
            "PYTHON SCRIPT PLACES ROUNDS THREADS WORK...; see the head of the source".into()
        );
    };
    let (places, rounds): (usize, usize) = (places.parse()?, rounds.parse()?);
    let threads: usize = threads.parse()?;
    let mut peers = Peers::start(python, script, threads)?;
    println!("\n{threads} threads; {}\n", peers.ask("versions")?);
    println!("| what | ours | peer | its time | ratio | at most | GB/s | ceiling | of it |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for name in works {
        if name == "casts" {
            casts(places * rounds)?;
            continue;
        }
        let work = WORKS.iter().find(|work| work.0 == name);
        let work = work.ok_or_else(|| format!("no work {name}"))?;
        let turns = (0..places.max(1)).map(|_| turns(work, rounds, threads, &mut peers));
        print(work, &turns.collect::<Result<Vec<_>>>()?);
    }
    Ok(())
}

/// A program that is timed.
enum Side<'a> {
    Local(Box<dyn FnMut() -> Duration + 'a>),
    Peer(&'static str),
}

impl Side<'_> {
    /// The fastest of `steps` steps, in seconds, after an untimed one.
    fn time(&mut self, rule: &str, steps: usize, peers: &mut Peers) -> Result<f64> {
        // Threads of the previous program may still be spinning.
        std::thread::sleep(Duration::from_millis(10));
        match self {
            Self::Local(step) => {
                step();
                let times = (0..steps).map(|_| step().as_secs_f64());
                Ok(times.fold(f64::INFINITY, f64::min))
            }
            Self::Peer(name) => {
                let answer = peers.ask(&format!("time {name} {rule} {steps}"))?;
                Ok(answer.split(' ').next().unwrap_or_default().parse()?)
            }
        }
    }
}

/// The fastest step of ours, of the ceiling, and of each peer, or the reason why it is missing.
type Turns = Vec<std::result::Result<f64, String>>;

/// Creates all programs of a work and times them in turn.
fn turns(work: &Work, rounds: usize, threads: usize, peers: &mut Peers) -> Result<Turns> {
    let &(_, title, rule, tensors_of, pattern, names) = work;
    let counts = tensors_of.counts();
    let mut ours = Ours::new(rule, &counts, threads)?;
    let sum = ours.check();
    let mut stream = Stream::new(pattern, &counts, threads);
    let mut sides = vec![
        Ok(Side::Local(Box::new(move || ours.step()))),
        Ok(Side::Local(Box::new(move || timed(|| stream.run())))),
    ];
    let list: Vec<String> = counts.iter().map(usize::to_string).collect();
    peers.ask(&format!("tensors {}", list.join(" ")))?;
    for &name in names {
        if name == "flat" {
            let mut flat = Ours::new(rule, &[counts.iter().sum()], threads)?;
            sides.push(Ok(Side::Local(Box::new(move || flat.step()))));
            continue;
        }
        sides.push(match peers.ask(&format!("make {name} {rule}")) {
            Ok(theirs) => {
                check(title, name, sum, theirs.parse()?)?;
                Ok(Side::Peer(name))
            }
            Err(why) => Err(why.to_string()),
        });
    }
    let mut best: Turns = vec![Ok(f64::INFINITY); sides.len()];
    for round in 0..=rounds {
        for (side, best) in sides.iter_mut().zip(&mut best) {
            match side {
                // Short turns, so that all run under the same conditions.
                Ok(side) => {
                    let so_far = best.clone()?;
                    let steps = (0.05 / so_far).ceil().clamp(2.0, 100.0) as usize;
                    let steps = if round == 0 { 1 } else { steps };
                    *best = Ok(so_far.min(side.time(rule, steps, peers)?));
                }
                Err(why) => *best = Err(why.clone()),
            }
        }
    }
    peers.ask("drop")?;
    Ok(best)
}

/// Prints a line for each peer of a work, from its times in each placement.
fn print(work: &Work, places: &[Turns]) {
    let &(_, title, _, tensors_of, pattern, names) = work;
    let bytes = tensors_of.counts().iter().sum::<usize>() * pattern.bytes();
    let rate = |seconds: f64| bytes as f64 / seconds * 1e-9;
    // `NaN` for a missing peer, which is missing in all placements.
    let at = |turns: &Turns, side: usize| turns[side].clone().unwrap_or(f64::NAN);
    let median = |figure: &dyn Fn(&Turns) -> f64| {
        let mut all: Vec<f64> = places.iter().map(figure).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let (ours, ceiling) = (median(&|turns| at(turns, 0)), median(&|turns| at(turns, 1)));
    let of_it = 100.0 * median(&|turns| at(turns, 1) / at(turns, 0));
    let line = |peer: &str| {
        let rates = format!("{:.1} | {:.1} | {of_it:.0} %", rate(ours), rate(ceiling));
        println!("| {title} | {} | {peer} | {rates} |", time(ours));
    };
    for (side, name) in names.iter().enumerate().map(|(at, name)| (at + 2, name)) {
        if let Err(why) = &places[0][side] {
            println!("| {title} | | {name} | {why} | | | | | |");
            continue;
        }
        let theirs = median(&|turns| at(turns, side));
        let ratio = median(&|turns| at(turns, side) / at(turns, 0));
        let most = median(&|turns| at(turns, side) / at(turns, 1));
        line(&format!("{name} | {} | {ratio:.2} | {most:.2}", time(theirs)));
    }
    if places[0][2..].iter().all(std::result::Result::is_err) {
        line("none | | |");
    }
}

/// Returns an error if a peer has computed something else, except for timm's Lamb, whose ratio of
/// norms differs.
fn check(title: &str, peer: &str, ours: f64, theirs: f64) -> Result<()> {
    let apart = (ours / theirs - 1.0).abs();
    if apart < 1e-5 || (title.starts_with("Lamb") && apart < 0.1) {
        return Ok(());
    }
    Err(format!("{title}: weights have squares of {ours} here, {theirs} by {peer}").into())
}

/// Weights, gradients and an optimizer.
struct Ours {
    optimizer: Box<dyn Optimizer>,
    weights: Vec<Vec<f32>>,
    grads: Vec<Vec<f32>>,
    ctl: StepCtl,
    /// Scaled gradients, from which an AMP step restores its gradients, like the peer.
    source: Option<Vec<Vec<f32>>>,
}

impl Ours {
    fn new(rule: &str, counts: &[usize], threads: usize) -> Result<Self> {
        let mut optimizer = optimizer(rule, counts.len())?;
        optimizer.set_threads(threads);
        let (weights, mut grads) = (tensors(counts), tensors(counts));
        let (mut ctl, mut source) = (StepCtl::PLAIN, None);
        if rule == "amp" {
            ctl = StepCtl {
                grad_scale: 1.0 / SCALE,
                found_inf: FoundInf::Check,
                clip: Some(Clip::norm(1.0)),
            };
            grads.iter_mut().flatten().for_each(|x| *x *= SCALE);
            source = Some(grads.clone());
        }
        Ok(Self { optimizer, weights, grads, ctl, source })
    }

    /// Takes two steps; returns the sum of squares of all weights.
    fn check(&mut self) -> f64 {
        self.step();
        self.step();
        let square = |x: &f32| f64::from(*x) * f64::from(*x);
        self.weights.iter().flatten().map(square).sum()
    }

    fn step(&mut self) -> Duration {
        if let Some(source) = &self.source {
            self.grads.iter_mut().zip(source).for_each(|(grad, x)| grad.copy_from_slice(x));
        }
        let Self { optimizer, weights, grads, ctl, .. } = self;
        timed(|| step(&mut **optimizer, weights, grads, ctl))
    }
}

/// The loss scale of an AMP step.
const SCALE: f32 = 65536.0;

/// Our optimizer with the hyperparameters of `torch_optim.py`.
fn optimizer(rule: &str, n: usize) -> Result<Box<dyn Optimizer>> {
    Ok(match rule {
        "adamw" | "amp" => Box::new(AdamW::with_one_group(AdamWHyper::default(), n)?),
        "adam" => Box::new(Adam::with_one_group(AdamHyper::default(), n)?),
        "adadelta" => Box::new(Adadelta::with_one_group(AdadeltaHyper::default(), n)?),
        "adamp" => Box::new(AdamP::with_one_group(AdamPHyper::default(), n)?),
        "bert_adam" => {
            let hyper = BertAdamHyper { lr: 1e-3, ..BertAdamHyper::default() };
            Box::new(BertAdam::with_one_group(hyper, n)?)
        }
        "lamb" => Box::new(Lamb::with_one_group(LambHyper::default(), n)?),
        "rmsprop" => Box::new(RmsProp::with_one_group(RmsPropHyper::default(), n)?),
        "rmsprop_tf" => Box::new(RmsPropTf::with_one_group(RmsPropTfHyper::default(), n)?),
        "sgd" => {
            let hyper =
                SgdHyper { lr: 1e-2, momentum: 0.9, weight_decay: 1e-4, ..SgdHyper::default() };
            Box::new(Sgd::with_one_group(hyper, n)?)
        }
        _ => return Err(format!("no rule {rule}").into()),
    })
}

/// Compares casts with the `half` crate's; the ceiling is a `memcpy` of as many bytes; one thread.
fn casts(rounds: usize) -> Result<()> {
    for (place, count) in [("4 K, cache", 4 << 10), ("33 M, memory", 32 << 20)] {
        let wide: Vec<f32> = (0..count).map(|i| (i % 1999) as f32 - 999.5).collect();
        let (mut f16s, mut f16s_too) = (vec![f16::ZERO; count], vec![f16::ZERO; count]);
        let (mut bf16s, mut bf16s_too) = (vec![bf16::ZERO; count], vec![bf16::ZERO; count]);
        let (from, mut to) = (vec![1_u8; 3 * count], vec![1_u8; 3 * count]);
        let mut all: [(_, Box<dyn FnMut() + '_>); 5] = [
            ("ceiling", Box::new(|| black_box(&mut to[..]).copy_from_slice(black_box(&from)))),
            ("f16", Box::new(|| ours(&wide, &mut f16s))),
            (
                "f16",
                Box::new(|| black_box(&mut f16s_too[..]).convert_from_f32_slice(black_box(&wide))),
            ),
            ("bf16", Box::new(|| ours(&wide, &mut bf16s))),
            (
                "bf16",
                Box::new(|| black_box(&mut bf16s_too[..]).convert_from_f32_slice(black_box(&wide))),
            ),
        ];
        let times = ((1 << 23) / count).max(1);
        let mut best = [f64::INFINITY; 5];
        for _ in 0..5 * rounds {
            for ((_, cast), best) in all.iter_mut().zip(&mut best) {
                let took = timed(|| (0..times).for_each(|_| cast()));
                *best = best.min(took.as_secs_f64() / times as f64);
            }
        }
        let rate = |seconds: f64| (6 * count) as f64 / seconds * 1e-9;
        for at in [1, 3] {
            println!(
                "| f32 to {}, {place} | {} | half | {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.0} % |",
                all[at].0,
                time(best[at]),
                time(best[at + 1]),
                best[at + 1] / best[at],
                best[at + 1] / best[0],
                rate(best[at]),
                rate(best[0]),
                100.0 * best[0] / best[at],
            );
        }
    }
    Ok(())
}

fn ours<D>(wide: &[f32], narrow: &mut [D])
where
    f32: CastTo<D>,
{
    cast(black_box(wide), black_box(narrow)).expect("buffers of one length");
}

/// For example `16.1 ms`.
fn time(seconds: f64) -> String {
    match seconds {
        0.1.. => format!("{:.0} ms", seconds * 1e3),
        0.01.. => format!("{:.1} ms", seconds * 1e3),
        0.001.. => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.3} µs", seconds * 1e6),
    }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// The Python process.
struct Peers {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peers {
    fn start(python: &str, script: &str, threads: usize) -> Result<Self> {
        let mut command = Command::new(python);
        // DeepSpeed's OpenMP reads the number of threads only from here.
        command.args([script, &threads.to_string()]).env("OMP_NUM_THREADS", threads.to_string());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = process.stdin.take().ok_or("no pipe to the peers")?;
        let from = BufReader::new(process.stdout.take().ok_or("no pipe from the peers")?);
        Ok(Self { process, to, from })
    }

    /// Returns the answer after `ok`; any other answer is an error.
    fn ask(&mut self, question: &str) -> Result<String> {
        writeln!(self.to, "{question}")?;
        self.to.flush()?;
        let mut answer = String::new();
        self.from.read_line(&mut answer)?;
        match answer.trim_end().split_once(' ') {
            Some(("ok", rest)) => Ok(rest.into()),
            Some(("no", why)) => Err(why.into()),
            _ if answer.trim_end() == "ok" => Ok(String::new()),
            _ => Err(format!("the peers' process said {answer:?} to {:.40}", question).into()),
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}
