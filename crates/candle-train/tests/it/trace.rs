//! The spans of a step that a subscriber gets.

use candle_core::Module;
use candle_ops::cross_entropy;
use candle_train::{AdamWHyper, Trainer};

use super::collector::Collector;
use super::{batch, model, ranks};

#[test]
fn step_is_a_span_with_backward_and_its_buckets() {
    let all = ranks(2, |group| {
        let (vars, net) = model(1);
        let mut train = Trainer::builder(&vars).group(group).build(AdamWHyper::default()).unwrap();
        let (x, y) = batch(&[0, 1, 2, 3]);
        Collector::during(&["candle_train", "train_step", "collective"], || {
            train.step(|| cross_entropy(&net.forward(&x)?, &y)).unwrap();
        })
    });
    for (rank, lines) in all.iter().enumerate() {
        let names = lines.iter().filter_map(|line| line.strip_prefix("open ")?.split(' ').next());
        let opened: Vec<_> = names.filter(|name| *name != "call").collect();
        assert_eq!(opened, ["step", "forward", "backward", "bucket", "finish", "optimizer"]);
        assert!(lines.contains(&format!("open step rank={rank}")), "{lines:?}");
        let at = |line: &str| lines.iter().position(|other| other.starts_with(line)).unwrap();
        assert!(at("open bucket") < at("close backward"), "{lines:?}");
        assert_eq!(lines.last().unwrap(), "close step");
    }
}
