//! The first program of `train-log`'s README.

use train_log::TrainLog;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rank = 0; // candle-train's `train.rank()`: all ranks make the same calls, rank 0 writes
    let mut log = TrainLog::create("work_dirs/line", "line", rank)?.tensorboard()?.total(200);
    let (mut w, lr) = (0.0, 0.1);
    for step in 1..=200 {
        let loss = (w - 3.0_f64).powi(2);
        w -= lr * 2.0 * (w - 3.0);
        if log.is_due(step) {
            log.step(step, &[("lr", lr), ("loss", loss)])?;
        }
    }
    log.evaluation("val", 200, &[("error", (w - 3.0).abs())])?;
    log.logger().info("done");
    Ok(())
}
