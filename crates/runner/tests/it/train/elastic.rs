//! Runs that resume with another number of ranks or another batch size, compared with an
//! uninterrupted run.

use parking_lot::Mutex;
use runner::data::Workers;
use runner::engine::Losses;

use super::midway::{Notes, Numbered};
use super::*;

/// Steps of four batches; the learning rate follows a cosine over the whole run.
const ELASTIC: &str = r#"
default_hooks.checkpoint = { by_epoch = false, interval = 10 }
model = { type = "Mlp", in_features = 64, hidden = [8], num_classes = 10 }
train_dataloader = { batch_size = 64, dataset = { type = "Digits" } }
train_cfg = { by_epoch = false, max_iters = 50 }
randomness.seed = 3
[optim_wrapper]
type = "OptimWrapper"
accumulative_counts = 4
clip_grad = { max_norm = 100.0 }
optimizer = { type = "SGD", lr = 0.1, momentum = 0.9 }
[[custom_hooks]]
type = "EMAHook"
momentum = 0.1
[[param_scheduler]]
type = "CosineAnnealingLR"
by_epoch = false
"#;

/// Records learning rate and gradient norm of each step.
#[derive(Clone, Default)]
struct Steps(Arc<Mutex<Vec<(f64, f64)>>>);

impl Hook for Steps {
    fn name(&self) -> &'static str {
        "Steps"
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let scalars = runner.optim_wrapper().log_scalars();
        let norm = scalars.iter().find(|(name, _)| *name == "grad_norm");
        if let (Some((_, norm)), 0) = (norm, runner.group().rank()) {
            self.0.lock().push((runner.lr(), *norm));
        }
        Ok(())
    }
}

/// Result of a run: its steps, and how often each sample was seen.
struct Done {
    steps: Vec<(f64, f64)>,
    seen: Vec<usize>,
    last: std::path::PathBuf,
    log: String,
}

/// Number of samples in the data set of these runs.
const SAMPLES: usize = 160;

/// Number of ranks, batch size per rank, batches per step, and the iteration before which they are
/// killed.
type Phase = (usize, usize, usize, usize);

/// Trains in one phase after another.
fn train(config: &str, phases: &[Phase]) -> Done {
    let dir = tempfile::tempdir().unwrap();
    let infinite = config.contains("max_iters");
    let (steps, notes) = (Steps::default(), Notes::default());
    for (index, &(ranks, batch, counts, stop)) in phases.iter().enumerate() {
        let counts = format!("accumulative_counts = {counts}");
        let config = config.replace("accumulative_counts = 4", &counts);
        let outcome = run(&config, dir.path(), ranks, |builder, _| {
            // The uninterrupted run uses no workers.
            let workers = Workers::new([0, 1, 3][index % 3]).persistent();
            let loader =
                DataLoaderConfig::new(Numbered(SAMPLES), batch).shuffled().workers(workers);
            let loader = DataLoaderConfig { infinite, ..loader };
            let stop = before_iter(stop, |_| Err(Error::data("killed")));
            let builder = builder.train_dataloader(loader).resume(index > 0).elastic(true);
            builder.hook(Box::new(steps.clone())).hook(Box::new(notes.clone())).hook(stop)
        });
        for outcome in outcome {
            assert_eq!(outcome.is_err(), index + 1 < phases.len(), "{outcome:?}");
        }
    }
    let mut seen = vec![0; SAMPLES];
    notes.0.lock().iter().for_each(|sample| seen[*sample as usize] += 1);
    let last = std::fs::read_to_string(dir.path().join("last_checkpoint")).unwrap();
    let log = log(dir.path());
    let last = dir.keep().join(last);
    let steps = steps.0.lock().clone();
    Done { steps, seen, last, log }
}

/// Compares a run whose number of ranks changes with the uninterrupted one. The learning rate may
/// differ by `slack`, its change in one iteration of the larger number of ranks, and norms by the
/// resulting difference of weights. Batches have four samples, steps four batches.
fn assert_follows(config: &str, phases: &[(usize, usize)], slack: f64) {
    let phases: Vec<_> = phases.iter().map(|&(ranks, stop)| (ranks, 4, 4, stop)).collect();
    assert_follows_in(config, &phases, slack);
}

fn assert_follows_in(config: &str, phases: &[Phase], slack: f64) {
    let (ranks, batch, counts, _) = phases[0];
    let whole = train(config, &[(ranks, batch, counts, usize::MAX)]);
    let changed = train(config, phases);
    assert!(!changed.log.contains("WARNING"), "{phases:?}: {}", changed.log);
    let steps = || whole.steps.iter().zip(&changed.steps).enumerate();
    let both = format!("{phases:?}: {:?} {:?}", whole.steps, changed.steps);
    assert_eq!(whole.steps.len(), changed.steps.len(), "{both}");
    for (step, ((lr, norm), (other_lr, other_norm))) in steps() {
        assert!((lr - other_lr).abs() <= slack + 1e-12, "{step}: lr {lr} {other_lr}");
        let tolerance = if slack == 0.0 { 1e-5 } else { 0.02 };
        assert!((norm / other_norm - 1.0).abs() < tolerance, "{step}: norm {norm} {other_norm}");
    }
    assert_eq!(whole.seen, changed.seen, "{phases:?}");
    for entry in std::fs::read_dir(&changed.last).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.starts_with("gradients"), "{phases:?}: {name} in {:?}", changed.last);
    }
    // The model of a checkpoint is EMAHook's average, which is updated equally often.
    let models = [&whole, &changed].map(|done| {
        let bytes = std::fs::read(done.last.join("model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        let bytes = |name| tensors.tensor(name).unwrap().data().as_chunks().0.to_vec();
        let values = names.into_iter().flat_map(bytes);
        values.map(f32::from_le_bytes).collect::<Vec<_>>()
    });
    let off = models[0].iter().zip(&models[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < if slack == 0.0 { 1e-5 } else { 0.01 }, "{phases:?}: {off}");
    for done in [whole, changed] {
        std::fs::remove_dir_all(done.last.parent().unwrap()).unwrap();
    }
}

/// Maximum change per iteration of a cosine over 50 iterations from 0.1.
const SLOPE: f64 = 0.1 / 2.0 * std::f64::consts::PI / 50.0;

#[test]
fn two_ranks_resume_as_four() {
    // Killed after two batches of a step; the run ends with a step of two.
    assert_follows(ELASTIC, &[(2, 10), (4, usize::MAX)], SLOPE);
}

#[test]
fn two_ranks_resume_as_one() {
    assert_follows(ELASTIC, &[(2, 10), (1, usize::MAX)], 0.0);
}

#[test]
fn two_ranks_of_eight_samples_resume_as_four_of_four() {
    assert_follows_in(ELASTIC, &[(2, 8, 4, 10), (4, 4, 4, usize::MAX)], 0.0);
    // After an epoch of 10 batches.
    let config = ELASTIC
        .replace("by_epoch = false, interval = 10", "interval = 1")
        .replace("by_epoch = false, max_iters = 50", "max_epochs = 3")
        .replace("\nby_epoch = false", "\nconvert_to_iter_based = true");
    assert_follows_in(&config, &[(2, 8, 2, 10), (4, 4, 2, usize::MAX)], 0.0);
}

#[test]
fn another_batch_size_with_equal_steps_matches_the_uninterrupted_run() {
    // Killed after two batches of a step.
    assert_follows_in(ELASTIC, &[(1, 8, 4, 10), (1, 4, 8, usize::MAX)], 0.0);
    assert_follows_in(ELASTIC, &[(2, 4, 4, 10), (2, 8, 2, 15), (2, 4, 4, usize::MAX)], SLOPE);
    // Inside an epoch of 20 batches, and at its end.
    let config = ELASTIC
        .replace("by_epoch = false, max_iters = 50", "max_epochs = 3")
        .replace("\nby_epoch = false", "\nconvert_to_iter_based = true");
    assert_follows_in(&config, &[(1, 8, 4, 10), (1, 4, 8, usize::MAX)], 0.0);
    assert_follows_in(&config, &[(1, 8, 3, 20), (1, 4, 6, usize::MAX)], 0.0);
}

#[test]
fn four_ranks_resume_as_one() {
    assert_follows(ELASTIC, &[(4, 10), (1, usize::MAX)], 0.0);
}

#[test]
fn two_ranks_resume_as_four_and_two_again() {
    assert_follows(ELASTIC, &[(2, 10), (4, 10), (2, usize::MAX)], SLOPE);
    // The third phase is killed and resumed unchanged.
    assert_follows(ELASTIC, &[(2, 10), (4, 10), (4, 15), (1, 80), (1, usize::MAX)], SLOPE);
}

/// 20 batches per epoch on two ranks.
const BY_EPOCH: &str = r#"
[[param_scheduler]]
type = "LinearLR"
start_factor = 0.1
end = 15
by_epoch = false
[[param_scheduler]]
type = "StepLR"
step_size = 1
gamma = 0.5
"#;

#[test]
fn number_of_ranks_changes_inside_an_epoch() {
    let config = ELASTIC
        .replace("by_epoch = false, max_iters = 50", "max_epochs = 3")
        .replace("\nby_epoch = false", "\nconvert_to_iter_based = true");
    let config = format!("{config}{BY_EPOCH}");
    // The warm-up has the largest change.
    let slope = 0.1 * 0.9 / 14.0;
    assert_follows_in(&config, &[(2, 4, 8, 10), (4, 4, 8, 15), (1, 4, 8, usize::MAX)], slope);
    assert_follows_in(&config, &[(2, 4, 8, 20), (1, 4, 8, usize::MAX)], 0.0);
}

#[test]
fn epoch_length_is_rounded_up_for_each_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    // 12 batches per epoch on two ranks and 23 on one.
    let config = ELASTIC.replace("by_epoch = false, max_iters = 50", "max_epochs = 3");
    let steps = Steps::default();
    for (ranks, stop) in [(2, 10), (1, usize::MAX)] {
        let outcome = run(&config, dir.path(), ranks, |builder, _| {
            let stop = before_iter(stop, |_| Err(Error::data("killed")));
            let builder = builder.resume(ranks == 1).elastic(true);
            builder.hook(Box::new(steps.clone())).hook(stop)
        });
        assert!(outcome.iter().all(|o| o.is_err() == (ranks == 2)), "{outcome:?}");
    }
    let last = std::fs::read_to_string(dir.path().join("last_checkpoint")).unwrap();
    let state = std::fs::read(dir.path().join(&last).join("state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    assert_eq!((last.as_str(), &state["position"]["iter"]), ("iter_36", &69.into()));
    // Steps after every fourth batch of two ranks, after every eighth of one, and at the end.
    let steps = steps.0.lock().clone();
    assert_eq!(steps.len(), 2 + (4 + 3 + 46_usize).div_ceil(8), "{steps:?}");
    assert!(!walk(dir.path()).iter().any(|f| f.to_string_lossy().contains("iter_36/gradients")));
    assert!(steps.last().unwrap().0 < 0.01, "{steps:?}");
}

/// Runs by iterations over whole passes, in which steps and batches are not multiples of each
/// other.
#[test]
fn three_ranks_resume_and_are_resumed() {
    let config = ELASTIC.replace("max_iters = 50", "max_iters = 49");
    for phases in [&[(2, 10), (3, usize::MAX)][..], &[(3, 10), (2, 30), (5, usize::MAX)]] {
        let (dir, steps) = (tempfile::tempdir().unwrap(), Steps::default());
        let last = phases.len() - 1;
        // The last phase is followed by one without anything left to do.
        for (index, (ranks, stop)) in phases.iter().copied().chain([(4, 0)]).enumerate() {
            let outcome = run(&config, dir.path(), ranks, |builder, _| {
                let stop = before_iter(stop, |_| Err(Error::data("killed")));
                let builder = builder.resume(index > 0).elastic(true);
                builder.hook(Box::new(steps.clone())).hook(stop)
            });
            assert!(outcome.iter().all(|o| o.is_err() == (index < last)), "{outcome:?}");
        }
        assert!(
            log(dir.path()).contains("nothing to do: already trained for"),
            "{}",
            log(dir.path())
        );
        let name = std::fs::read_to_string(dir.path().join("last_checkpoint")).unwrap();
        let files = walk(&dir.path().join(&name));
        assert!(!files.iter().any(|f| f.to_string_lossy().contains("gradients")), "{files:?}");
        let steps = steps.0.lock().clone();
        let first = phases[0].0 as f64;
        // The number of steps equals that of an uninterrupted run, except for steps of another
        // size.
        let sizes =
            phases.iter().map(|phase| (4.0 * first / phase.0 as f64).round() * phase.0 as f64);
        let (least, most) =
            sizes.fold((f64::MAX, 0.0_f64), |(a, b), size| (a.min(size), b.max(size)));
        let range = 49.0 * first / most - 1.0..=49.0 * first / least + 3.0;
        assert!(range.contains(&(steps.len() as f64)), "{} not in {range:?}", steps.len());
        assert!(steps.windows(2).all(|pair| pair[1].0 <= pair[0].0), "{steps:?}");
        assert!(steps.last().unwrap().0 < 4.0 * SLOPE, "{steps:?}");
    }
}

#[test]
fn step_of_another_size_has_a_scaled_learning_rate() {
    let dir = tempfile::tempdir().unwrap();
    let config = ELASTIC.replace("accumulative_counts = 4", "accumulative_counts = 1");
    let infinite = "batch_size = 64, sampler = { type = \"InfiniteSampler\" }";
    let config = config.replace("batch_size = 64", infinite);
    let config = format!("auto_scale_lr = {{ enable = true, base_batch_size = 128 }}\n{config}");
    let rates = |name: &str, phases: &[(usize, usize)]| {
        let steps = Steps::default();
        for (index, &(ranks, stop)) in phases.iter().enumerate() {
            run(&config, &dir.path().join(name), ranks, |builder, _| {
                let stop = before_iter(stop, |_| Err(Error::data("killed")));
                let builder = builder.resume(index > 0).elastic(true);
                builder.hook(Box::new(steps.clone())).hook(stop)
            });
        }
        let steps = steps.0.lock().clone();
        steps.iter().map(|step| step.0).collect::<Vec<_>>()
    };
    let two = rates("two", &[(2, usize::MAX)]);
    // Half as many steps of twice the size: twice the rate at the same position of the cosine.
    let four = rates("four", &[(2, 10), (4, usize::MAX)]);
    let expected = (10..50).step_by(2).map(|at| 2.0 * two[at]);
    let expected: Vec<_> = two[..10].iter().copied().chain(expected).collect();
    assert_eq!(four.len(), expected.len());
    let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-9;
    assert!(four.iter().zip(&expected).all(near), "{four:?} {expected:?}");
    assert!(log(&dir.path().join("four")).contains("a step has 256 samples instead of 128"));
    // One rank accumulates two batches.
    let one = rates("one", &[(2, 10), (1, usize::MAX)]);
    assert!(one.len() == two.len() && one.iter().zip(&two).all(near), "{one:?} {two:?}");
}
