//! Receivers of scalars that a configuration names: a program's own beside the built-in ones.

use std::fs::File;
use std::io::Write;
use std::time::Duration;

use collective::ProcessGroup;
use runner::config::Config;
use runner::data::Batch;
use runner::engine::Losses;
use runner::hooks::Hook;
use runner::sinks::{RunInfo, ScalarRecord, VIS_BACKENDS, VisBackend};
use runner::{Result, Runner, RunnerBuilder};
use serde_json::Value;

use crate::common::from_config;

/// Writes `STEP,NAME,VALUE`.
struct Csv(String, Option<File>);

impl VisBackend for Csv {
    fn open(&mut self, run: &RunInfo<'_>) -> Result<()> {
        assert!(run.config.unwrap().contains("CsvVisBackend") && run.name.starts_with("digits_20"));
        self.1 = File::create(run.dir.join(&self.0)).ok();
        Ok(())
    }

    fn add_scalars(&mut self, record: &ScalarRecord<'_>) -> Result<()> {
        for (name, value) in record.scalars {
            writeln!(self.1.as_mut().unwrap(), "{},{name},{value}", record.step).unwrap();
        }
        Ok(())
    }
}

fn read(backends: &str) -> Result<RunnerBuilder> {
    let text = format!(
        "model = {{ type = 'Mlp', in_features = 64, hidden = [8], num_classes = 10 }}
         train_dataloader = {{ batch_size = 64, dataset = {{ type = 'Digits' }} }}
         val_dataloader = {{ batch_size = 64, dataset = {{ type = 'Digits', split = 'test' }} }}
         val_evaluator = {{ type = 'Accuracy' }}
         train_cfg = {{ max_epochs = 1 }}
         optim_wrapper.optimizer = {{ type = 'SGD', lr = 0.05 }}
         vis_backends = {backends}"
    );
    from_config(Config::from_text("digits.toml", text)?)
}

#[test]
fn own_backend_gets_the_scalars_that_the_others_get() {
    let build = |section: &mut runner::config::Section| -> Result<Box<dyn VisBackend>> {
        Ok(Box::new(Csv(section.or("file", "scalars.csv".to_owned())?, None)))
    };
    VIS_BACKENDS.register("CsvVisBackend", build).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let backends = "[{ type = 'LocalVisBackend' }, { type = 'TensorboardVisBackend' },
                     { type = 'CsvVisBackend', file = 'mine.csv' }]";
    let run = read(backends).unwrap().process_group(group).work_dir(dir.path());
    run.build().unwrap().train().unwrap();
    let runs = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path().join("vis_data"));
    let vis = runs.into_iter().find(|p| p.is_dir()).unwrap();
    let mut expected = String::new();
    for line in std::fs::read_to_string(vis.join("scalars.json")).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        for (name, value) in line.as_object().unwrap() {
            if !["epoch", "iter", "step"].contains(&name.as_str()) {
                expected += &format!("{},{name},{value}\n", line["step"]);
            }
        }
    }
    let parse = |text: &str| {
        let mut rows: Vec<(u64, String, f64)> = text
            .lines()
            .map(|line| {
                let mut parts = line.split(',');
                let step = parts.next().unwrap().parse().unwrap();
                let name = parts.next().unwrap().to_owned();
                (step, name, parts.next().unwrap().parse().unwrap())
            })
            .collect();
        rows.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        rows
    };
    let written = parse(&std::fs::read_to_string(vis.join("mine.csv")).unwrap());
    assert!(written.iter().any(|row| row.1 == "accuracy"), "{written:?}");
    assert_eq!(written, parse(&expected));
    let names = std::fs::read_dir(&vis).unwrap().map(|e| e.unwrap().file_name());
    let events = names.filter(|name| name.to_string_lossy().starts_with("events.out.tfevents"));
    assert_eq!(events.count(), 1);
}

/// The example of the documentation of `Hook`.
struct Report;

impl Hook for Report {
    fn name(&self) -> &'static str {
        "Report"
    }

    fn after_train_iter(&mut self, runner: &mut Runner, batch: &Batch, _: &Losses) -> Result<()> {
        let samples = batch.get("labels")?.shape()[0];
        runner.scalars_mut().push("samples", samples as f64);
        Ok(())
    }

    fn after_train_epoch(&mut self, runner: &mut Runner) -> Result<()> {
        let (epoch, rate) = (runner.position().epoch + 1, runner.lr());
        runner.logger().info(&format!("epoch {epoch} ends at rate {rate}"));
        Ok(())
    }
}

#[test]
fn hook_logs_a_line_and_a_scalar() {
    let dir = tempfile::tempdir().unwrap();
    let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
    let run = read("[]").unwrap().process_group(group).work_dir(dir.path());
    run.hook(Box::new(Report)).build().unwrap().train().unwrap();
    let runs = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path());
    let run = runs.into_iter().find(|p| p.join("vis_data").is_dir()).unwrap();
    let scalars = std::fs::read_to_string(run.join("vis_data/scalars.json")).unwrap();
    let first: Value = serde_json::from_str(scalars.lines().next().unwrap()).unwrap();
    assert_eq!(first["samples"], 64.0, "{scalars}");
    let name = format!("{}.log", run.file_name().unwrap().to_str().unwrap());
    let log = std::fs::read_to_string(run.join(name)).unwrap();
    assert!(log.contains(" - INFO - epoch 1 ends at rate 0.05\n"), "{log}");
    assert!(log.contains("samples: 64.0000"), "{log}");
}

#[test]
fn backend_that_is_not_there_is_refused_by_name() {
    for (backends, says) in [
        ("[{ type = 'TensorBoardVisBackend' }]", "did you mean `TensorboardVisBackend`?"),
        (
            "[{ type = 'WandbVisBackend' }]",
            "`examples/trackers/follow.py` sends `scalars.json` there",
        ),
        ("[{ type = 'AimVisBackend' }]", "what it shows is in `scalars.json`"),
        ("[{ type = 'LocalVisBackend', save_dir = 'x' }]", "unknown key `save_dir`"),
    ] {
        let said = read(backends).unwrap_err().to_string();
        assert!(said.contains(says), "{said}");
    }
}
