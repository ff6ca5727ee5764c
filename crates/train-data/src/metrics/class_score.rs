//! `ClassScore`: precision, recall, F1 and intersection over union, of classes or averaged.

use super::{Fields, Metric, per_cent, zeros};
use crate::{Array, Batch, BoxError};

/// Formula of a [`ClassScore`]. For a class, `P` samples are predicted as it, `L` are labelled as
/// it, `TP` are both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Score {
    /// `TP / P`, reported as `precision`.
    Precision,
    /// `TP / L`, reported as `recall`.
    Recall,
    /// `2 TP / (P + L)`, reported as `f1`.
    #[doc(alias = "F1Score")]
    F1,
    /// `TP / (P + L - TP)`, reported as `mIoU`, for a class as `IoU_0`. In segmentation the samples
    /// are all pixels of the data set, as in MMSegmentation's `IoUMetric`. torchmetrics'
    /// `segmentation.MeanIoU` differs: it averages over images.
    #[doc(alias = "MeanIoU")]
    #[doc(alias = "JaccardIndex")]
    Iou,
}

impl Score {
    /// Names of the average and of a class's score.
    const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Precision => ["precision"; 2],
            Self::Recall => ["recall"; 2],
            Self::F1 => ["f1"; 2],
            Self::Iou => ["mIoU", "IoU"],
        }
    }

    /// Numerator and denominator.
    const fn ratio(self, [right, predicted, labelled]: [f64; 3]) -> (f64, f64) {
        match self {
            Self::Precision => (right, predicted),
            Self::Recall => (right, labelled),
            Self::F1 => (2.0 * right, predicted + labelled),
            Self::Iou => (right, predicted + labelled - right),
        }
    }
}

/// How the scores of classes are averaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Average {
    /// The score of `TP`, `P` and `L` summed over all classes.
    Micro,
    /// The mean over the classes that have a prediction or a label.
    #[default]
    Macro,
    /// The mean, weighted by each class's number of labels.
    Weighted,
    /// No average: one value per class, reported as `precision_0`, `precision_1` and so on.
    None,
}

impl Average {
    /// Averages `scores`, or lists them by class; `counts` selects the classes of
    /// [`Macro`](Self::Macro). Not for [`Micro`](Self::Micro), which needs sums.
    pub(super) fn of_classes(
        self,
        [average, class]: [&str; 2],
        scores: &[f64],
        labelled: &[f64],
        counts: impl Fn(usize) -> bool,
    ) -> Vec<(String, f64)> {
        if self == Self::None {
            return scores
                .iter()
                .enumerate()
                .map(|(c, score)| (format!("{class}_{c}"), *score))
                .collect();
        }
        let weight = |c: usize| match self {
            Self::Weighted => labelled[c],
            _ => f64::from(u8::from(counts(c))),
        };
        let (mut sum, mut total) = (0.0, 0.0);
        for (c, score) in scores.iter().enumerate() {
            sum += weight(c) * score;
            total += weight(c);
        }
        vec![(average.to_owned(), if total == 0.0 { 0.0 } else { sum / total })]
    }

    pub(super) fn names(self, [average, class]: [&str; 2], classes: usize) -> Vec<String> {
        match self {
            Self::None => (0..classes).map(|c| format!("{class}_{c}")).collect(),
            _ => vec![average.to_owned()],
        }
    }
}

/// Precision, recall, F1 or intersection over union of a multiclass classification or segmentation,
/// in per cent. A score whose denominator is 0 is 0.
///
/// Follows: torchmetrics 1.9.0, `MulticlassPrecision`, `MulticlassRecall`, `MulticlassF1Score` and
/// `MulticlassJaccardIndex`. If `ignore_index` is one of the classes, averages of [`Score::Iou`]
/// leave it out.
///
/// ```
/// use train_data::metrics::{Average, ClassScore, Metric, Score};
/// use train_data::{Array, Batch};
///
/// let mut precision = ClassScore::new(Score::Precision, 3).with_average(Average::None);
/// let batch = Batch::new().with("labels", Array::new([4], vec![0_i64, 1, 2, 2])?);
/// let predicted = Array::new([4], vec![0_i64, 2, 2, 2])?;
/// precision.update(&batch, &[("logits".to_owned(), predicted)])?;
/// let scores = precision.compute()?;
/// let precision: Vec<_> = scores.iter().map(|(_, score)| score.round()).collect();
/// assert_eq!(precision, [100.0, 0.0, 67.0]);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClassScore {
    score: Score,
    average: Average,
    classes: usize,
    fields: Fields,
    /// Numbers of correct, predicted and labelled samples, each by class.
    state: Vec<f64>,
}

impl ClassScore {
    /// The score of `classes` classes, averaged by [`Average::Macro`].
    ///
    /// # Panics
    ///
    /// With more than 2^28 counts, three for each class.
    #[must_use]
    pub fn new(score: Score, classes: usize) -> Self {
        let (average, fields) = (Average::default(), Fields::default());
        Self { score, average, classes, fields, state: zeros(classes, 3) }
    }

    /// Sets the average.
    #[must_use]
    pub fn with_average(self, average: Average) -> Self {
        Self { average, ..self }
    }

    /// Sets the fields to read.
    #[must_use]
    pub fn with_fields(self, fields: Fields) -> Self {
        Self { fields, ..self }
    }

    /// Numbers of correct, predicted and labelled samples of a class.
    fn counts(&self, class: usize) -> [f64; 3] {
        [0, 1, 2].map(|row| self.state[row * self.classes + class])
    }
}

impl Metric for ClassScore {
    fn name(&self) -> &str {
        self.score.names()[0]
    }

    fn names(&self) -> Option<Vec<String>> {
        Some(self.average.names(self.score.names(), self.classes))
    }

    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let (classes, state) = (self.classes, &mut self.state);
        self.fields.for_each_class(batch, outputs, classes, |label, predicted| {
            state[2 * classes + label] += 1.0;
            let Some(predicted) = predicted else { return };
            state[classes + predicted] += 1.0;
            if predicted == label {
                state[label] += 1.0;
            }
        })
    }

    fn state(&mut self) -> &mut [f64] {
        &mut self.state
    }

    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        let labelled = &self.state[2 * self.classes..];
        if labelled.iter().all(|count| *count == 0.0) {
            return Err("there are no labels".into());
        }
        let ignored = self.fields.ignore_index.filter(|_| self.score == Score::Iou);
        let is_ignored = |class: usize| ignored == i64::try_from(class).ok();
        let ratios = (0..self.classes).map(|class| self.score.ratio(self.counts(class)));
        if self.average == Average::Micro {
            let kept = ratios.enumerate().filter(|(class, _)| !is_ignored(*class));
            let (part, whole) = kept.fold((0.0, 0.0), |sum, (_, r)| (sum.0 + r.0, sum.1 + r.1));
            return Ok(vec![(self.score.names()[0].to_owned(), per_cent(part, whole))]);
        }
        let scores: Vec<_> = ratios.map(|(part, whole)| per_cent(part, whole)).collect();
        let is_there = |class| self.counts(class)[1..].iter().any(|count| *count > 0.0);
        let counts = |class| is_there(class) && !is_ignored(class);
        Ok(self.average.of_classes(self.score.names(), &scores, labelled, counts))
    }

    fn reset(&mut self) {
        self.state.fill(0.0);
    }
}
