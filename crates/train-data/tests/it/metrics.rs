//! Tests that compare metrics with torchmetrics', over any number of ranks and for invalid input.

use std::process::Command;

use half::{bf16, f16};
use proptest::prelude::*;
use serde::Deserialize;
use train_data::metrics::{
    Accuracy, Average, AveragePrecision, ClassScore, ConfusionMatrix, CrossEntropy, Evaluator,
    Fields, MeanLoss, Metric, Perplexity, Score,
};
use train_data::{Array, ArrayData, Batch, BoxError};

/// The output of `vectors/metrics.py`.
#[derive(Deserialize)]
struct Vectors {
    thresholds: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    classes: usize,
    ignore_index: Option<i64>,
    shape: Vec<usize>,
    /// In units of 1/32.
    logits: Vec<i16>,
    label_shape: Vec<usize>,
    labels: Vec<i64>,
    expected: std::collections::BTreeMap<String, Vec<f64>>,
}

/// Logits of each type.
fn logits_of(case: &Case) -> [ArrayData; 3] {
    let floats: Vec<f32> = case.logits.iter().map(|units| f32::from(*units) / 32.0).collect();
    let halves: Vec<f16> = floats.iter().map(|value| f16::from_f32(*value)).collect();
    let brains: Vec<bf16> = floats.iter().map(|value| bf16::from_f32(*value)).collect();
    assert!(halves.iter().zip(&floats).all(|(half, float)| half.to_f32() == *float));
    assert!(brains.iter().zip(&floats).all(|(brain, float)| brain.to_f32() == *float));
    [floats.into(), halves.into(), brains.into()]
}

/// Labels of each type that can hold them.
fn labels_of(case: &Case) -> Vec<ArrayData> {
    let narrow: Vec<i32> = case.labels.iter().map(|label| i32::try_from(*label).unwrap()).collect();
    let bytes: Option<Vec<u8>> =
        case.labels.iter().map(|label| u8::try_from(*label).ok()).collect();
    [Some(case.labels.clone().into()), Some(narrow.into()), bytes.map(Into::into)]
        .into_iter()
        .flatten()
        .collect()
}

/// The metric that the script calls `name`, and the unit of its numbers.
fn metric_of(name: &str, case: &Case, thresholds: usize) -> (Box<dyn Metric>, f64) {
    let fields = Fields { ignore_index: case.ignore_index, ..Fields::default() };
    let (kind, average) = name.split_once(' ').unwrap_or((name, ""));
    let score = |score| {
        let average = match average {
            "micro" => Average::Micro,
            "macro" => Average::Macro,
            "weighted" => Average::Weighted,
            _ => Average::None,
        };
        ClassScore::new(score, case.classes).with_average(average).with_fields(fields.clone())
    };
    let metric: Box<dyn Metric> = match kind {
        "precision" => Box::new(score(Score::Precision)),
        "recall" => Box::new(score(Score::Recall)),
        "f1" => Box::new(score(Score::F1)),
        "mIoU" => Box::new(score(Score::Iou)),
        "mAP" => {
            let average = match average {
                "macro" => Average::Macro,
                "weighted" => Average::Weighted,
                _ => Average::None,
            };
            let metric = AveragePrecision::new(case.classes, thresholds);
            Box::new(metric.with_average(average).with_fields(fields))
        }
        "accuracy" => Box::new(Accuracy::new([average.parse().unwrap()]).with_fields(fields)),
        "confusion_matrix" => {
            return (Box::new(ConfusionMatrix::new(case.classes).with_fields(fields)), 1.0);
        }
        "perplexity" => return (Box::new(Perplexity::new().with_fields(fields)), 1.0),
        "loss" => return (Box::new(CrossEntropy::new().with_fields(fields)), 1.0),
        other => panic!("{other}"),
    };
    (metric, 100.0)
}

fn compare(text: &str) {
    let vectors: Vectors = serde_json::from_str(text).unwrap();
    let mut compared = 0;
    for case in &vectors.cases {
        for logits in logits_of(case) {
            for labels in labels_of(case) {
                let kind = format!("{} {}", logits.type_name(), labels.type_name());
                let labels = Array::new(&case.label_shape[..], labels).unwrap();
                let batch = Batch::new().with("labels", labels);
                let outputs =
                    [("logits".to_owned(), Array::new(&case.shape[..], logits.clone()).unwrap())];
                for (name, expected) in &case.expected {
                    let (mut metric, unit) = metric_of(name, case, vectors.thresholds);
                    metric.update(&batch, &outputs).unwrap();
                    let numbers = metric.compute().unwrap();
                    let names: Vec<_> = numbers.iter().map(|(name, _)| name.clone()).collect();
                    assert_eq!(metric.names().unwrap(), names);
                    assert_eq!(numbers.len(), expected.len(), "{}: {name}", case.name);
                    for ((number, value), expected) in numbers.iter().zip(expected) {
                        // torchmetrics divides in f32.
                        let error = (value / unit - expected).abs();
                        let tolerance = 1e-6 * expected.abs().max(f64::from(f32::MIN_POSITIVE));
                        assert!(
                            error <= tolerance,
                            "{}, {kind}, {number}: {value} {expected}",
                            case.name
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 1000, "{compared}");
}

#[test]
fn metrics_equal_torchmetrics() {
    compare(include_str!("../vectors/metrics.json"));
}

#[test]
#[ignore = "needs torchmetrics: TORCH_PYTHON, or python3, imports it and torch"]
fn metrics_equal_torchmetrics_on_other_data() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/metrics.py");
    for seed in 1..4 {
        let output = Command::new(&python).args([script, &seed.to_string()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        compare(&String::from_utf8(output.stdout).unwrap());
    }
}

const CLASSES: usize = 4;

/// All class metrics and losses.
fn evaluator() -> Evaluator {
    let scores = [Score::Precision, Score::Recall, Score::F1, Score::Iou];
    let evaluator = Evaluator::new()
        .with(Accuracy::new([1, 3]))
        .with(AveragePrecision::new(CLASSES, 9))
        .with(ConfusionMatrix::new(CLASSES))
        .with(Perplexity::new())
        .with(CrossEntropy::new())
        .with(MeanLoss::new(["own"]));
    scores.into_iter().fold(evaluator, |all, score| all.with(ClassScore::new(score, CLASSES)))
}

fn batch_of(rows: &[([f32; CLASSES], i64, f32)]) -> (Batch, Vec<(String, Array)>) {
    let labels: Vec<_> = rows.iter().map(|(_, label, _)| *label).collect();
    let logits: Vec<_> = rows.iter().flat_map(|(row, ..)| *row).collect();
    let losses: Vec<_> = rows.iter().map(|(.., loss)| *loss).collect();
    let batch = Batch::new().with("labels", Array::new([rows.len()], labels).unwrap());
    let logits = Array::new([rows.len(), CLASSES], logits).unwrap();
    let losses = Array::new([rows.len()], losses).unwrap();
    (batch, vec![("logits".to_owned(), logits), ("own".to_owned(), losses)])
}

fn bits(evaluator: &Evaluator) -> Vec<(String, u64)> {
    let numbers = evaluator.compute().unwrap().into_iter();
    numbers.map(|(name, value)| (name, value.to_bits())).collect()
}

/// Logits of a model, or of one that has diverged.
fn any_logits() -> impl Strategy<Value = [f32; CLASSES]> {
    let [usual, huge] = [9.0, f32::MAX].map(|most| prop::array::uniform4(-most..most));
    prop_oneof![3 => usual, 1 => huge]
}

/// Losses of a model, or of one that has diverged: any float, also infinite or NaN.
fn any_loss() -> impl Strategy<Value = f32> {
    prop_oneof![6 => -1e4f32..1e4, 2 => -f32::MAX..f32::MAX, 1 => any::<f32>()]
}

proptest! {
    /// Samples may be distributed over ranks and batches in any way, and ranks may have none.
    #[test]
    fn ranks_sum_to_the_bits_of_one(
        rows in prop::collection::vec((any_logits(), 0..CLASSES as i64, any_loss()), 1..40),
        spread in prop::collection::vec((0usize..7, any::<bool>()), 40), ranks in 1usize..7,
    ) {
        let mut one = evaluator();
        let (batch, outputs) = batch_of(&rows);
        one.update(&batch, &outputs).unwrap();
        let expected = bits(&one);
        let mut totals: Vec<f64> = Vec::new();
        for rank in 0..ranks {
            let mut mine = evaluator();
            let mut waiting = Vec::new();
            for (row, (of, ends)) in rows.iter().zip(&spread) {
                if of % ranks == rank {
                    waiting.push(*row);
                }
                if *ends {
                    let (batch, outputs) = batch_of(&std::mem::take(&mut waiting));
                    mine.update(&batch, &outputs).unwrap();
                }
            }
            let (batch, outputs) = batch_of(&waiting);
            mine.update(&batch, &outputs).unwrap();
            mine.reduce(|state| {
                totals.resize(state.len(), 0.0);
                totals.iter_mut().zip(state).for_each(|(total, value)| *total += *value);
                Ok::<(), BoxError>(())
            }).unwrap();
        }
        // The state before is replaced.
        one.reset();
        one.reduce(|state| {
            state.copy_from_slice(&totals);
            Ok::<(), BoxError>(())
        }).unwrap();
        prop_assert_eq!(bits(&one), expected);
    }

    #[test]
    fn cross_entropy_is_the_plain_formula(row in prop::collection::vec(-60f32..60.0, 1..70), label: prop::sample::Index) {
        let (label, classes) = (label.index(row.len()), row.len());
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        let expected = sum.ln() - f64::from(row[label]);
        let mut metric = CrossEntropy::new();
        let batch = Batch::new().with("labels", Array::new([1], vec![label as i64]).unwrap());
        metric.update(&batch, &[("logits".to_owned(), Array::new([1, classes], row).unwrap())]).unwrap();
        let value = metric.compute().unwrap()[0].1;
        // A logit is below 64, so its difference to the largest one has an error of at most 2^-18
        // in f32.
        prop_assert!((value - expected).abs() < 4e-6, "{} {}", value, expected);
    }
}

proptest! {
    /// Logits of pixels are not contiguous; the result is the same as for samples.
    #[test]
    fn pixels_count_as_samples(
        values in prop::collection::vec(-3i8..3, 2 * 3 * 150), labels in prop::collection::vec(0i64..3, 2 * 150),
        inner in 1usize..=150,
    ) {
        let value = |sample: usize, class, pixel| f32::from(values[(sample * 3 + class) * inner + pixel]);
        let places = (0..2).flat_map(|sample| (0..inner).map(move |pixel| (sample, pixel)));
        let rows: Vec<f32> = places.flat_map(|(s, p)| [0, 1, 2].map(|class| value(s, class, p))).collect();
        let pixels: Vec<f32> = values[..6 * inner].iter().map(|value| f32::from(*value)).collect();
        let labels = labels[..2 * inner].to_vec();
        let (mut of_pixels, mut of_rows) = (ConfusionMatrix::new(3), ConfusionMatrix::new(3));
        let logits = Array::new([2, 3, inner], pixels).unwrap();
        update(&mut of_pixels, logits, Array::new([2, inner], labels.clone()).unwrap()).unwrap();
        let logits = Array::new([2 * inner, 3], rows).unwrap();
        update(&mut of_rows, logits, Array::new([2 * inner], labels).unwrap()).unwrap();
        prop_assert_eq!(of_pixels.state(), of_rows.state());
    }
}

fn update(metric: &mut dyn Metric, logits: Array, labels: Array) -> Result<(), String> {
    let batch = Batch::new().with("labels", labels);
    metric.update(&batch, &[("logits".to_owned(), logits)]).map_err(|error| error.to_string())
}

fn number(metric: &dyn Metric, at: usize) -> f64 {
    metric.compute().unwrap()[at].1
}

#[test]
fn a_row_with_nan_predicts_nothing() {
    let logits = || Array::new([3, 2], vec![2.0_f32, 1.0, f32::NAN, 1.0, 0.0, 3.0]).unwrap();
    let labels = || Array::new([3], vec![0_i64, 1, 1]).unwrap();
    let mut accuracy = Accuracy::new([1, 2]);
    update(&mut accuracy, logits(), labels()).unwrap();
    assert!((number(&accuracy, 0) - 200.0 / 3.0).abs() < 1e-12);
    assert!((number(&accuracy, 1) - 200.0 / 3.0).abs() < 1e-12);
    let mut precision = ClassScore::new(Score::Precision, 2);
    update(&mut precision, logits(), labels()).unwrap();
    assert_eq!(number(&precision, 0), 100.0);
    let mut recall = ClassScore::new(Score::Recall, 2).with_average(Average::None);
    update(&mut recall, logits(), labels()).unwrap();
    assert_eq!([number(&recall, 0), number(&recall, 1)], [100.0, 50.0]);
    let mut matrix = ConfusionMatrix::new(2);
    update(&mut matrix, logits(), labels()).unwrap();
    assert_eq!(matrix.rows().collect::<Vec<_>>(), [[1.0, 0.0], [0.0, 1.0]]);
    let mut precision = AveragePrecision::new(2, 3).with_average(Average::None);
    update(&mut precision, logits(), labels()).unwrap();
    // Softmax of 3 is the only one of class 1 that reaches a threshold above 0.
    assert!((number(&precision, 1) - 50.0).abs() < 1e-12);
    let mut loss = CrossEntropy::new();
    update(&mut loss, logits(), labels()).unwrap();
    assert!(number(&loss, 0).is_nan());
}

/// As documented; in torchmetrics it is open which of them comes first.
#[test]
fn of_equal_logits_the_first_comes_first() {
    let mut accuracy = Accuracy::new([1, 2]);
    let logits = Array::new([2, 3], vec![1.0_f32; 6]).unwrap();
    update(&mut accuracy, logits, Array::new([2], vec![0_i64, 1]).unwrap()).unwrap();
    assert_eq!([number(&accuracy, 0), number(&accuracy, 1)], [50.0, 100.0]);
}

#[test]
fn wrong_shapes_types_and_labels_are_errors() {
    let logits = || Array::new([2, 3], vec![0.0_f32; 6]).unwrap();
    let labels = |labels: [i64; 2]| Array::new([2], labels.to_vec()).unwrap();
    let mut all: [Box<dyn Metric>; 5] = [
        Box::new(Accuracy::default()),
        Box::new(ClassScore::new(Score::F1, 3)),
        Box::new(ConfusionMatrix::new(3)),
        Box::new(AveragePrecision::new(3, 5)),
        Box::new(Perplexity::new()),
    ];
    for metric in &mut all {
        for wrong in [3, -1] {
            let error = update(metric, logits(), labels([0, wrong])).unwrap_err();
            assert!(
                error.starts_with(&format!("label {wrong} (number 1 of the batch)")),
                "{error}"
            );
            assert!(
                error.contains("not one of 3 classes") && error.contains("`ignore_index`"),
                "{error}"
            );
        }
        let error = update(metric, logits(), Array::new([3], vec![0_i64; 3]).unwrap()).unwrap_err();
        assert!(error.contains("shapes [2, 3] and [3]"), "{error}");
        let error =
            update(metric, logits(), Array::new([2], vec![0.0_f32; 2]).unwrap()).unwrap_err();
        assert_eq!(error, "`labels` must be i64, i32 or u8, got f32");
        let none = Array::new([2, 0], Vec::<f32>::new()).unwrap();
        let error = update(metric, none, labels([0, 1])).unwrap_err();
        assert!(error.contains("at least one class"), "{error}");
        let error = metric.update(&Batch::new(), &[]).unwrap_err().to_string();
        assert_eq!(error, "the model has no output `logits`; it has []");
    }
    for metric in &mut all[1..4] {
        let four = Array::new([2, 4], vec![0.0_f32; 8]).unwrap();
        let error = update(metric, four, labels([0, 1])).unwrap_err();
        assert_eq!(error, "the logits are of 4 classes, `num_classes` is 3");
    }
    let error = update(&mut Accuracy::new([4]), logits(), labels([0, 1])).unwrap_err();
    assert_eq!(error, "`topk` is 4, and the output has 3 classes: set a smaller `topk`");
    let predicted = Array::new([2], vec![0_i32, 9]).unwrap();
    let error = update(&mut ConfusionMatrix::new(3), predicted, labels([0, 1])).unwrap_err();
    assert_eq!(error, "`logits` predicts 9, of 3 classes");
}

#[test]
fn more_counts_than_memory_are_refused() {
    let makes: [fn(usize); 4] = [
        |n| drop(ConfusionMatrix::new(n)),
        |n| drop(ClassScore::new(Score::F1, n)),
        |n| drop(AveragePrecision::new(n, 5)),
        |n| drop(AveragePrecision::new(5, n)),
    ];
    for make in makes {
        for count in [1 << 30, 1 << 62, usize::MAX] {
            let panic = std::panic::catch_unwind(|| make(count)).unwrap_err();
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(text.contains("classes are more than 268435456"), "{text}");
        }
    }
}

#[test]
fn a_metric_of_nothing_is_an_error() {
    let all: [&dyn Metric; 6] = [
        &Accuracy::default(),
        &ClassScore::new(Score::F1, 3),
        &ConfusionMatrix::new(3),
        &AveragePrecision::new(3, 5),
        &Perplexity::new(),
        &MeanLoss::default(),
    ];
    for metric in all {
        let error = metric.compute().unwrap_err().to_string();
        assert!(error.starts_with("there are no "), "{error}");
    }
}

#[test]
fn losses_are_weighted_by_samples() {
    let mut metric = MeanLoss::new(["loss", "extra"]);
    for (len, loss, extra) in
        [(3, vec![1.0_f32, 2.0, 6.0], vec![2.0_f32]), (1, vec![7.0], vec![6.0])]
    {
        let batch = Batch::new().with("inputs", Array::new([len], vec![0_u8; len]).unwrap());
        let extra = Array::new([], extra).unwrap();
        let outputs =
            [("extra".to_owned(), extra), ("loss".to_owned(), Array::new([len], loss).unwrap())];
        metric.update(&batch, &outputs).unwrap();
    }
    assert_eq!(metric.compute().unwrap(), [("loss".to_owned(), 4.0), ("extra".to_owned(), 3.0)]);
    let batch = Batch::new().with("inputs", Array::new([3], vec![0_u8; 3]).unwrap());
    let wrong = Array::new([2], vec![0.0_f32; 2]).unwrap();
    let error = metric.update(&batch, &[("loss".to_owned(), wrong)]).unwrap_err().to_string();
    assert_eq!(
        error,
        "`loss` must be one number, or one for each sample, got shape [2] of 3 samples"
    );
}

#[test]
fn losses_of_a_diverged_model_are_huge_or_infinite() {
    let samples = 80;
    let batch = Batch::new().with("labels", Array::new([samples], vec![0_i64; samples]).unwrap());
    for loss in [1e22_f32, 2e19, 1e30, 3e38, f32::MAX, -1e30, f32::INFINITY, f32::NEG_INFINITY] {
        for values in [vec![loss; samples], vec![loss]] {
            let mut mean = MeanLoss::default();
            let losses = Array::new([values.len()], values).unwrap();
            mean.update(&batch, &[("loss".to_owned(), losses)]).unwrap();
            assert_eq!(number(&mean, 0), f64::from(loss));
            mean.reset();
            assert!(mean.compute().is_err());
        }
    }
    for logit in [1e22_f32, 1e30, 3e38, f32::MAX] {
        let rows = vec![[0.0, logit]; samples].concat();
        let outputs = [("logits".to_owned(), Array::new([samples, 2], rows).unwrap())];
        let (mut loss, mut perplexity) = (CrossEntropy::new(), Perplexity::new());
        for _ in 0..3 {
            loss.update(&batch, &outputs).unwrap();
            perplexity.update(&batch, &outputs).unwrap();
        }
        assert_eq!(number(&loss, 0), f64::from(logit));
        assert_eq!(number(&perplexity, 0), f64::INFINITY);
        // Several ranks: the states are added up.
        loss.state().iter_mut().for_each(|part| *part *= 7.0);
        assert_eq!(number(&loss, 0), f64::from(logit));
    }
    // A label that the model holds impossible.
    let outputs = |logit: f32| {
        let rows = vec![[f32::NEG_INFINITY, logit]; samples].concat();
        [("logits".to_owned(), Array::new([samples, 2], rows).unwrap())]
    };
    let mut perplexity = Perplexity::new();
    perplexity.update(&batch, &outputs(1.0)).unwrap();
    assert_eq!(number(&perplexity, 0), f64::INFINITY);
    let mut perplexity = Perplexity::new();
    perplexity.update(&batch, &outputs(f32::NAN)).unwrap();
    assert!(number(&perplexity, 0).is_nan());
}

#[test]
fn the_mean_of_no_samples_has_no_weight() {
    let mut mean = MeanLoss::default();
    for (len, loss) in [(2, 3.0), (0, f32::NAN)] {
        let batch = Batch::new().with("labels", Array::new([len], vec![0_i64; len]).unwrap());
        mean.update(&batch, &[("loss".to_owned(), Array::scalar(loss))]).unwrap();
    }
    assert_eq!(number(&mean, 0), 3.0);
}

/// A metric that returns this number of records of a batch.
struct Records(usize, Vec<serde_json::Value>);

impl Metric for Records {
    fn update(&mut self, _: &Batch, _: &[(String, Array)]) -> Result<(), BoxError> {
        self.1.extend(vec![1.into(); self.0]);
        Ok(())
    }
    fn records(&mut self) -> Option<&mut Vec<serde_json::Value>> {
        Some(&mut self.1)
    }
    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        Ok(vec![("count".into(), self.1.len() as f64)])
    }
    fn reset(&mut self) {
        self.1.clear();
    }
}

#[test]
fn an_evaluator_names_the_metric_that_failed() {
    let batch = || Batch::new().with("inputs", Array::new([2], vec![0_u8; 2]).unwrap());
    let mut evaluator =
        Evaluator::from(Records(2, Vec::new())).with_prefix("more", Accuracy::new([1, 2]));
    assert_eq!(evaluator.names(), None);
    let error = evaluator.update(&batch(), &[]).unwrap_err().to_string();
    assert_eq!(error, "metric `Accuracy`: the model has no output `logits`; it has []");
    let mut evaluator = Evaluator::from(Records(1, Vec::new()));
    let error = evaluator.update(&batch(), &[]).unwrap_err().to_string();
    assert!(error.starts_with("metric `Records`: 1 records of a batch of 2 samples: "), "{error}");
    evaluator.reduce(|_| Err("there is no state")).unwrap();
    let twice = Evaluator::from(Records(1, Vec::new())).with(Records(1, Vec::new()));
    let error = twice.compute().unwrap_err().to_string();
    assert_eq!(error, "metric `Records`: another metric is called `count`, too: give one a prefix");
}

#[test]
fn a_prefix_takes_the_place_of_a_metrics_own() {
    let evaluator = Evaluator::new()
        .with_prefix("val", Accuracy::new([1, 5]))
        .with_prefix("val", Accuracy::default());
    assert_eq!(evaluator.names().unwrap(), ["val/top1", "val/top5", "val/accuracy"]);
}
