//! Formats log lines as MMEngine does, so that parsers of its logs work, and the progress bar.

use std::fmt::Write;
use std::time::Duration;

use train_log::format::{bar, clock, scientific};

use super::{EvalSplit, Runner};
use crate::Result;

/// Formats
/// `Epoch(train) [1][10/24]  lr: 4.5217e-02  eta: 0:00:00  time: 0.0074  ...  loss: 2.3102`.
pub(crate) fn format_train_line(runner: &Runner, done: usize) -> Result<String> {
    let mut line = if runner.logs_by_epoch() {
        let len = runner.batches_per_epoch();
        let width = len.to_string().len();
        let epoch = runner.position().epoch + 1;
        // An epoch of a run by iterations is a pass over the data.
        let done = (done - 1) % len + 1;
        format!("Epoch(train) [{epoch}][{done:>width$}/{len}]  ")
    } else {
        let (iter, len) = (runner.position().iter + 1, runner.max_iters());
        let width = len.to_string().len();
        format!("Iter(train) [{iter:>width$}/{len}]  ")
    };
    for (index, (name, rate)) in runner.rates().iter().enumerate() {
        let before = if index > 0 { " " } else { "" };
        add(&mut line, format_args!("{before}{name}: {}", scientific(*rate)));
    }
    add(&mut line, format_args!("  eta: {}", clock(runner.eta())));
    // Times come first, as in MMEngine's lines, then the scalars of the model.
    let order = ["time", "data_time"];
    let all = runner.scalars().smoothed()?;
    let times = order.iter().filter_map(|name| all.iter().find(|s| s.0 == *name));
    let others = all.iter().filter(|s| !order.contains(&s.0));
    for (name, value) in times.chain(others) {
        add(&mut line, format_args!("  {name}: {value:.4}"));
    }
    Ok(line)
}

fn add(line: &mut String, text: std::fmt::Arguments<'_>) {
    line.write_fmt(text).expect("memory takes every text");
}

/// Formats `Epoch(val) [1][5/5]    accuracy: 97.4930  data_time: 0.0004  time: 0.0021`.
pub(crate) fn format_eval_line(
    runner: &Runner,
    split: EvalSplit,
    metrics: &[(String, f64)],
) -> String {
    let mut line = eval_head(runner, split, runner.eval_batches(split));
    for (name, value) in metrics {
        line += &format!("  {name}: {value:.4}");
    }
    let (data_time, time) = runner.eval_times(split);
    line + &format!("  data_time: {data_time:.4}  time: {time:.4}")
}

/// Formats `Epoch(val) [1][10/50]    eta: 0:00:01  time: 0.0026  data_time: 0.0002` during an
/// evaluation.
pub(crate) fn format_eval_progress(runner: &Runner, split: EvalSplit, done: usize) -> String {
    let (data_time, time) = runner.eval_times(split);
    let left = runner.eval_batches(split).saturating_sub(done);
    let eta = Duration::try_from_secs_f64(time * left as f64).unwrap_or_default();
    let head = eval_head(runner, split, done);
    format!("{head}  eta: {}  time: {time:.4}  data_time: {data_time:.4}", clock(eta))
}

fn eval_head(runner: &Runner, split: EvalSplit, done: usize) -> String {
    let len = runner.eval_batches(split);
    let width = len.to_string().len();
    let count = format!("[{done:>width$}/{len}]  ");
    let (name, by_epoch) = (split.name(), runner.logs_by_epoch());
    match split {
        EvalSplit::Val if by_epoch => format!("Epoch({name}) [{}]{count}", runner.val_epoch()),
        EvalSplit::Test if by_epoch => format!("Epoch({name}) {count}"),
        _ => format!("Iter({name}) {count}"),
    }
}

/// Formats the progress bar: epoch, if there are epochs, bar, iterations, loss, remaining time.
pub(crate) fn format_bar(runner: &Runner, done: usize) -> Result<String> {
    let (len, count) = match runner.is_by_epoch() {
        true => {
            let (epoch, epochs) = (runner.position().epoch + 1, runner.max_epochs());
            (runner.batches_per_epoch(), format!("Epoch {epoch}/{epochs} "))
        }
        false => (runner.max_iters(), String::new()),
    };
    let all = runner.scalars().smoothed()?;
    let loss = all.iter().find(|(n, _)| *n == "loss").map_or(f64::NAN, |s| s.1);
    Ok(format!(
        "{count}{} {done}/{len}  loss {loss:.4}  eta {}",
        bar(done, len),
        clock(runner.eta())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::Accuracy;
    use crate::testing::{blank, builder, sgd};

    /// Lines of MMEngine 0.10.7's log, after the time.
    #[test]
    fn lines_match_mmengine_exactly() {
        let dir = tempfile::tempdir().unwrap();
        let mut runner = builder(dir.path(), 24)
            .optim_wrapper(sgd(0.045_217_391_304_347_83))
            .validation(blank(5), Accuracy::default())
            .build()
            .unwrap();
        runner.set_eta(Duration::from_millis(999));
        for (name, value) in [
            ("data_time", 0.001_588_201_522_827_148_4),
            ("time", 0.007_432_246_208_190_918),
            ("grad_norm", 0.466_180_282_831_192),
            ("loss", 2.310_242_438_316_345),
            ("loss_cls", 2.310_242_438_316_345),
        ] {
            runner.scalars_mut().push(name, value);
        }
        assert_eq!(
            format_train_line(&runner, 10).unwrap(),
            "Epoch(train) [1][10/24]  lr: 4.5217e-02  eta: 0:00:00  time: 0.0074  \
             data_time: 0.0016  grad_norm: 0.4662  loss: 2.3102  loss_cls: 2.3102"
        );
        assert!(
            format_train_line(&runner, 5).unwrap().starts_with("Epoch(train) [1][ 5/24]  lr: ")
        );
        runner.position.epoch = 1;
        let (validation, _) = runner.eval_parts(EvalSplit::Val).unwrap();
        validation.times = (0.000_406_932_830_810_546_86, 0.002_072_620_391_845_703);
        let metrics = [("digits/accuracy".to_owned(), 9.427_609_427_609_427)];
        assert_eq!(
            format_eval_line(&runner, EvalSplit::Val, &metrics),
            "Epoch(val) [1][5/5]    digits/accuracy: 9.4276  data_time: 0.0004  time: 0.0021"
        );
        // A time budget ended inside the second epoch.
        runner.position.batch = 3;
        assert!(
            format_eval_line(&runner, EvalSplit::Val, &metrics)
                .starts_with("Epoch(val) [2][5/5]    digits/")
        );
    }

    #[test]
    fn progress_bar_grows_with_loss_and_eta() {
        let dir = tempfile::tempdir().unwrap();
        let mut runner = builder(dir.path(), 48).build().unwrap();
        runner.set_eta(Duration::from_secs(75));
        runner.scalars_mut().push("loss", 0.5);
        let bar = |done| format_bar(&runner, done).unwrap();
        let (empty, full) = (" ".repeat(24), "=".repeat(24));
        assert_eq!(bar(0), format!("Epoch 1/1 [{empty}] 0/48  loss 0.5000  eta 0:01:15"));
        assert!(bar(24).contains(&format!("[{}{}] 24/48", "=".repeat(12), " ".repeat(12))));
        assert!(bar(48).contains(&format!("[{full}] 48/48")));
    }
}
