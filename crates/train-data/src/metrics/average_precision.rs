//! `AveragePrecision`: the area under precision as a function of recall, at fixed thresholds.

use super::class_score::Average;
use super::fields::ClassDim;
use super::{Fields, Metric, per_cent, zeros};
use crate::{Array, Batch, BoxError};

/// Mean average precision of a classification, in per cent, reported as `mAP`; with
/// [`Average::None`] as `AP_0`, `AP_1` and so on.
///
/// At threshold `t`, a sample is predicted as class `c` if the softmax of its logits is at least
/// `t` there. With precision `P_t` and recall `R_t` of the class at thresholds
/// `t = 0, 1/(n-1), ..., 1`, `AP_c` is the sum over `t` of `(R_t - R_(t+1)) P_t`, where `R` is 0
/// after the last threshold. It approaches the area under the curve with a threshold at every
/// sample as `n` grows; that area is not computable from sums.
///
/// Follows: torchmetrics 1.9.0, `MulticlassAveragePrecision(thresholds=n)`, where a class without
/// labels counts as 0 in [`Average::Macro`], too. torchmetrics takes outputs that all are in
/// `[0, 1]` for probabilities; here they are always logits.
#[derive(Clone, Debug)]
pub struct AveragePrecision {
    classes: usize,
    thresholds: usize,
    average: Average,
    fields: Fields,
    /// For each class, numbers of labelled samples and of all samples, by the number of thresholds
    /// reached.
    state: Vec<f64>,
}

impl AveragePrecision {
    /// Average precision of `classes` classes at `thresholds` thresholds, averaged by
    /// [`Average::Macro`].
    ///
    /// # Panics
    ///
    /// With fewer than two thresholds; with more than 2^28 counts, two for each class and
    /// threshold.
    #[must_use]
    pub fn new(classes: usize, thresholds: usize) -> Self {
        assert!(thresholds >= 2, "`thresholds` must be at least 2");
        let (average, fields) = (Average::default(), Fields::default());
        let state = zeros(classes, thresholds.saturating_add(1).saturating_mul(2));
        Self { classes, thresholds, average, fields, state }
    }

    /// Sets the average.
    ///
    /// # Panics
    ///
    /// With [`Average::Micro`], which this metric does not have.
    #[must_use]
    pub fn with_average(self, average: Average) -> Self {
        assert_ne!(average, Average::Micro, "AveragePrecision has no micro average");
        Self { average, ..self }
    }

    /// Sets the fields to read.
    #[must_use]
    pub fn with_fields(self, fields: Fields) -> Self {
        Self { fields, ..self }
    }

    const fn bins(&self) -> usize {
        self.thresholds + 1
    }

    /// Returns the average precision of a class, and its number of labels.
    fn of_class(&self, class: usize) -> (f64, f64) {
        let (right, all) =
            self.state[2 * class * self.bins()..][..2 * self.bins()].split_at(self.bins());
        let labelled: f64 = right.iter().sum();
        let (mut right_above, mut all_above, mut area) = (0.0, 0.0, 0.0);
        for (right, all) in right.iter().zip(all).skip(1).rev() {
            right_above += right;
            all_above += all;
            area += per_cent(*right, labelled) * (per_cent(right_above, all_above) / 100.0);
        }
        (area, labelled)
    }
}

impl Metric for AveragePrecision {
    fn names(&self) -> Option<Vec<String>> {
        Some(self.average.names(NAMES, self.classes))
    }

    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let rows = self.fields.rows(batch, outputs, ClassDim::Second)?;
        rows.check_classes(self.classes)?;
        let (bins, thresholds, state) = (self.bins(), self.thresholds, &mut self.state);
        let mut shares = vec![0.0; self.classes];
        rows.for_each(|label, row| {
            softmax(row, &mut shares);
            for (class, share) in shares.iter().enumerate() {
                let (right, all) = state[2 * class * bins..][..2 * bins].split_at_mut(bins);
                let at = reached(*share, thresholds);
                all[at] += 1.0;
                right[at] += f64::from(u8::from(class == label));
            }
        })
    }

    fn state(&mut self) -> &mut [f64] {
        &mut self.state
    }

    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        let of_classes = (0..self.classes).map(|class| self.of_class(class));
        let (scores, labelled): (Vec<_>, Vec<_>) = of_classes.unzip();
        if labelled.iter().all(|count| *count == 0.0) {
            return Err("there are no labels".into());
        }
        Ok(self.average.of_classes(NAMES, &scores, &labelled, |_| true))
    }

    fn reset(&mut self) {
        self.state.fill(0.0);
    }
}

const NAMES: [&str; 2] = ["mAP", "AP"];

/// The softmax of `row`; NaN throughout if any is.
fn softmax(row: &[f32], shares: &mut [f64]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (share, logit) in shares.iter_mut().zip(row) {
        *share = f64::from(logit - largest).exp();
        sum += *share;
    }
    shares.iter_mut().for_each(|share| *share /= sum);
}

/// Number of thresholds among `0, 1/(n-1), ..., 1` that are at most `share`; 0 if it is NaN.
fn reached(share: f64, thresholds: usize) -> usize {
    let last = (thresholds - 1) as f64;
    // Rounding may have moved the product to the threshold above or below.
    let near = (share * last) as usize;
    let reaches = |at: usize| share >= at as f64 / last;
    (near.saturating_sub(1)..=near + 1)
        .filter(|at| *at < thresholds && reaches(*at))
        .max()
        .map_or(0, |at| at + 1)
}
