//! A run as a program's own subscriber sees it, and as a Chrome trace.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use runner::hooks::Hook;
use runner::sinks::ChromeTrace;
use runner::{Result, Runner, RunnerBuilder};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::Value;

use crate::common::alone;
use crate::common::collector::Collector;
use crate::common::from_config;

const CONFIG: &str = "
    model = { type = 'Mlp', in_features = 64, hidden = [32, 32, 32], num_classes = 10 }
    optim_wrapper = { optimizer = { type = 'SGD', lr = 0.1 } }
    model_wrapper_cfg = { type = 'DistributedDataParallel', bucket_cap_mb = 0.002 }
    train_dataloader = { batch_size = 32, dataset = { type = 'Digits', split = 'train' } }
    train_cfg = { type = 'IterBasedTrainLoop', max_iters = 4, val_interval = 4 }
    val_dataloader = { batch_size = 64, dataset = { type = 'Digits', split = 'test' } }
    val_evaluator = { type = 'Accuracy' }
    log_level = 'INFO'
    [default_hooks]
    checkpoint = { by_epoch = false, interval = 4 }
    logger = { interval = 2 }
";

fn builder(dir: &Path, group: ProcessGroup) -> RunnerBuilder {
    let config = Config::from_text("digits.toml", CONFIG).unwrap();
    from_config(config).unwrap().work_dir(dir).process_group(group)
}

/// Runs `rank` on two threads.
fn two_ranks<T: Send>(rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = ProcessGroup::threads(2, Duration::from_secs(120)).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn subscriber_of_a_program_gets_spans_and_log_lines() {
    let dir = tempfile::tempdir().unwrap();
    let all = two_ranks(|group| {
        let run = || builder(dir.path(), group).console(false).log_file(false).build()?.train();
        Collector::during(&["runner", "train_log", "train_step"], || drop(run().unwrap()))
    });
    for (rank, lines) in all.iter().enumerate() {
        let train = lines.iter().position(|line| line.starts_with("open train ")).unwrap();
        assert_eq!(lines[train], format!("open train rank={rank} world_size=2"));
        let opened = |line: &String| line.strip_prefix("open ").map(str::to_owned);
        let spans: Vec<_> = lines[train..].iter().filter_map(opened).collect();
        let step = |iter| {
            let step = format!("step epoch=0 iter={iter}");
            ["data", &step, "train_step", "forward", "backward", "optimizer"].map(str::to_owned)
        };
        let mut expected = vec![format!("train rank={rank} world_size=2")];
        expected.extend((0..4).flat_map(step));
        expected.extend(["save name=iter_4", "evaluate split=val iter=4"].map(str::to_owned));
        assert_eq!(spans, expected);
        let text = lines.join("\n");
        // Only rank 0 logs.
        assert_eq!(text.contains("log message=Iter(train) [2/4]"), rank == 0, "{text}");
        assert_eq!(text.contains("log message=Iter(val) "), rank == 0, "{text}");
    }
    let stamp = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let stamp = stamp.filter(|path| path.join("vis_data").is_dir()).collect::<Vec<_>>();
    let [stamp] = &stamp[..] else { panic!("{stamp:?}") };
    let names = std::fs::read_dir(stamp).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["vis_data"], "there is a log file");
}

/// An event's time in microseconds, and when it ends.
fn slice(event: &Value) -> (f64, f64) {
    let start = event["ts"].as_f64().unwrap();
    (start, start + event["dur"].as_f64().unwrap_or(0.0))
}

#[test]
fn trace_shows_buckets_that_leave_while_backward_runs() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    two_ranks(|group| {
        let run = builder(&dir.path().join("run"), group).console(false).trace(&trace);
        drop(run.build().unwrap().train().unwrap());
    });
    for (rank, name) in ["trace.json", "trace.rank1.json"].iter().enumerate() {
        let text = std::fs::read_to_string(dir.path().join(name)).unwrap();
        let events: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert!(events.iter().all(|event| event["pid"] == rank));
        let of = |phase: &str, name: &str| -> Vec<&Value> {
            events.iter().filter(|e| e["ph"] == phase && e["name"] == name).collect()
        };
        for name in ["train", "save", "evaluate"] {
            assert_eq!(of("X", name).len(), 1, "{name}: {text}");
        }
        for name in ["step", "forward", "backward", "optimizer"] {
            assert_eq!(of("X", name).len(), 4, "{name}: {text}");
        }
        // In the first pass there is one bucket.
        let (begins, ends) = (of("b", "bucket"), of("e", "bucket"));
        assert!(begins.len() > 4 && begins.len() == ends.len(), "{text}");
        let backward: Vec<_> = of("X", "backward").into_iter().map(slice).collect();
        let finish: Vec<_> = of("X", "finish").into_iter().map(slice).collect();
        let pass_of = |event: &Value| event["args"]["pass"].as_u64().unwrap() as usize - 1;
        for begin in begins {
            let pass = pass_of(begin);
            let launched = slice(begin).0;
            let (from, to) = backward[pass];
            assert!(from <= launched && launched <= to, "launched outside of backward: {begin}");
            let end = ends.iter().find(|end| end["id"] == begin["id"]).unwrap();
            assert!(slice(end).0 <= finish[pass].1, "complete after `finish`: {end}");
        }
        // The calls of the communication thread are there, too.
        let threads = of("X", "call").into_iter().map(|e| e["tid"].as_u64().unwrap());
        assert!(threads.collect::<std::collections::BTreeSet<_>>().len() >= 2, "{text}");
    }
}

#[test]
fn trace_is_refused_beside_a_subscriber_of_the_program() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let own = ChromeTrace::create(&dir.path().join("own.json"), 0)?;
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let said = tracing::subscriber::with_default(own, || {
        builder(&dir.path().join("run"), group).trace(&trace).build().unwrap_err().to_string()
    });
    assert!(said.starts_with("trace: this program has a subscriber"), "{said}");
    assert!(!trace.exists() && !dir.path().join("run").exists());
    Ok(())
}

/// Limits the size of files once shared memory is there.
struct SmallFiles;

impl Hook for SmallFiles {
    fn name(&self) -> &'static str {
        "SmallFiles"
    }

    fn before_train(&mut self, _: &mut Runner) -> Result<()> {
        // SIGXFSZ, which comes with the error, would end the process if it were not caught.
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()).unwrap();
        let most = Some(20_000);
        setrlimit(Resource::Fsize, Rlimit { current: most, maximum: most }).unwrap();
        Ok(())
    }
}

#[test]
#[ignore = "started by the next test in its own process, which limits file sizes"]
fn with_small_files() {
    let Some(dir) = std::env::var_os("TRACE_DIR").map(std::path::PathBuf::from) else { return };
    let checkpoint = "checkpoint = { by_epoch = false, interval = 4 }";
    assert!(CONFIG.contains(checkpoint));
    let config = CONFIG.replace(checkpoint, "checkpoint = false");
    let config =
        Config::from_text("digits.toml", config.replace("max_iters = 4", "max_iters = 50"));
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let run = from_config(config.unwrap()).unwrap().work_dir(dir.join("run")).process_group(group);
    run.trace(dir.join("trace.json")).hook(Box::new(SmallFiles)).build().unwrap().train().unwrap();
}

#[test]
fn trace_ends_with_a_whole_line_on_a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = alone("trace::with_small_files");
    let output = command.env("TRACE_DIR", dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("the trace ends there"), "{output:?}");
    let text = std::fs::read_to_string(dir.path().join("trace.json")).unwrap();
    assert!(!serde_json::from_str::<Vec<Value>>(&text).unwrap().is_empty());
}
