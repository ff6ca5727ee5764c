//! `Fields`: names of the output and the labels that a metric reads, and the rows of both.

use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;

use crate::{Array, ArrayData, Batch, BoxError};

/// Names of the model's output and the batch's labels that a metric reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields {
    /// Name of the model's output, by default `logits`: `f32`, `f16` or `bf16`.
    /// [`ClassScore`](super::ClassScore) and [`ConfusionMatrix`](super::ConfusionMatrix) also take
    /// predicted classes, `i64`, `i32` or `u8`.
    pub output: String,
    /// Name of the batch's field, by default `labels`: `i64`, `i32` or `u8`.
    pub labels: String,
    /// Label of ignored samples, by default none. It is -100 in PyTorch's losses, 255 in
    /// MMSegmentation.
    pub ignore_index: Option<i64>,
}

impl Default for Fields {
    fn default() -> Self {
        Self { output: "logits".to_owned(), labels: "labels".to_owned(), ignore_index: None }
    }
}

/// Dimension of the classes in logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClassDim {
    /// The second: `[batch, classes, ...]`, labels `[batch, ...]`.
    Second,
    /// The last: `[batch, ..., classes]`, labels `[batch, ...]`.
    Last,
}

/// Logits and labels.
pub(super) struct Rows<'a> {
    logits: Cow<'a, [f32]>,
    labels: Labels<'a>,
    pub(super) classes: usize,
    /// Distance between two logits of a row.
    inner: usize,
}

/// Labels, each validated when read.
struct Labels<'a> {
    values: Cow<'a, [i64]>,
    ignore_index: Option<i64>,
}

impl Labels<'_> {
    /// Returns label `at`, which is below `classes`; `None` for `ignore_index`.
    fn get(&self, at: usize, classes: usize) -> Result<Option<usize>, BoxError> {
        let label = self.values[at];
        if Some(label) == self.ignore_index {
            return Ok(None);
        }
        let class = usize::try_from(label).ok().filter(|class| *class < classes);
        let why = || {
            format!(
                "label {label} (number {at} of the batch) is not one of {classes} classes; if its samples are to be left \
                 out, set `ignore_index`"
            )
        };
        class.map(Some).ok_or_else(|| why().into())
    }
}

impl Fields {
    /// Returns the output and the labels.
    fn find<'a>(
        &self,
        batch: &'a Batch,
        outputs: &'a [(String, Array)],
    ) -> Result<(&'a Array, &'a Array, Labels<'a>), BoxError> {
        let output = find_output(outputs, &self.output)?;
        let labels = batch.get(&self.labels)?;
        let values = to_classes(labels).ok_or_else(|| {
            let (name, found) = (&self.labels, labels.data().type_name());
            format!("`{name}` must be i64, i32 or u8, got {found}")
        })?;
        Ok((output, labels, Labels { values, ignore_index: self.ignore_index }))
    }

    /// Returns logits and labels after checking their shapes.
    pub(super) fn rows<'a>(
        &self,
        batch: &'a Batch,
        outputs: &'a [(String, Array)],
        dim: ClassDim,
    ) -> Result<Rows<'a>, BoxError> {
        let (output, label_array, labels) = self.find(batch, outputs)?;
        let logits = to_floats(output).ok_or_else(|| {
            let (name, found) = (&self.output, output.data().type_name());
            format!("`{name}` must be f32, f16 or bf16 logits, got {found}")
        })?;
        let mut shape = output.shape().to_vec();
        let at = if dim == ClassDim::Second { 1 } else { shape.len().saturating_sub(1) };
        let classes = if shape.len() > 1 { shape.remove(at) } else { 0 };
        if classes == 0 || shape != label_array.shape() {
            let wanted = match dim {
                ClassDim::Second => "[batch, classes, ...]",
                ClassDim::Last => "[batch, ..., classes]",
            };
            return Err(format!(
                "`{}` must have shape {wanted} with at least one class and `{}` the same without classes, got shapes \
                 {:?} and {:?}",
                self.output,
                self.labels,
                output.shape(),
                label_array.shape()
            )
            .into());
        }
        let inner = shape[at..].iter().product();
        Ok(Rows { logits, labels, classes, inner })
    }

    /// Calls `visit` with each label and the predicted class, if any; both are below `classes`.
    pub(super) fn for_each_class(
        &self,
        batch: &Batch,
        outputs: &[(String, Array)],
        classes: usize,
        mut visit: impl FnMut(usize, Option<usize>),
    ) -> Result<(), BoxError> {
        let (output, label_array, labels) = self.find(batch, outputs)?;
        let Some(found) = to_classes(output) else {
            let rows = self.rows(batch, outputs, ClassDim::Second)?;
            rows.check_classes(classes)?;
            return rows.for_each(|label, row| visit(label, argmax(row)));
        };
        if output.shape() != label_array.shape() {
            return Err(format!(
                "`{}`, as it holds classes, must have the shape of `{}`, got shapes {:?} and {:?}",
                self.output,
                self.labels,
                output.shape(),
                label_array.shape()
            )
            .into());
        }
        for (at, class) in found.iter().enumerate() {
            let Some(label) = labels.get(at, classes)? else { continue };
            let class = usize::try_from(*class).ok().filter(|class| *class < classes);
            let Some(class) = class else {
                let output = &self.output;
                return Err(
                    format!("`{output}` predicts {}, of {classes} classes", found[at]).into()
                );
            };
            visit(label, Some(class));
        }
        Ok(())
    }
}

impl Rows<'_> {
    /// Returns an error for another number of classes in the logits.
    pub(super) fn check_classes(&self, expected: usize) -> Result<(), BoxError> {
        if self.classes == expected {
            return Ok(());
        }
        Err(format!("the logits are of {} classes, `num_classes` is {expected}", self.classes)
            .into())
    }

    /// Calls `visit` with each label that is not ignored, and its logits.
    pub(super) fn for_each(&self, mut visit: impl FnMut(usize, &[f32])) -> Result<(), BoxError> {
        let Self { classes, inner, .. } = *self;
        let mut gathered = vec![0.0; if inner > 1 { GATHERED * classes } else { 0 }];
        for sample in 0..self.labels.values.len() / inner.max(1) {
            let logits = &self.logits[sample * classes * inner..][..classes * inner];
            for start in (0..inner).step_by(GATHERED) {
                let count = GATHERED.min(inner - start);
                let mut rows = logits;
                if inner > 1 {
                    gather(logits, (inner, start, count), &mut gathered);
                    rows = &gathered[..count * classes];
                }
                for (row, at) in rows.chunks_exact(classes).zip(sample * inner + start..) {
                    if let Some(label) = self.labels.get(at, classes)? {
                        visit(label, row);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Number of rows gathered at once: the logits of a row are so far apart that the cache holds only
/// few rows.
const GATHERED: usize = 64;

/// Copies rows `start..start + count` of `[classes, inner]` logits to `rows`, classes last.
fn gather(logits: &[f32], (inner, start, count): (usize, usize, usize), rows: &mut [f32]) {
    let classes = logits.len() / inner;
    for (class, logits) in logits.chunks_exact(inner).enumerate() {
        for (row, logit) in logits[start..start + count].iter().enumerate() {
            rows[row * classes + class] = *logit;
        }
    }
}

/// Returns the output called `name`.
pub(super) fn find_output<'a>(
    outputs: &'a [(String, Array)],
    name: &str,
) -> Result<&'a Array, BoxError> {
    let found = outputs.iter().find(|(known, _)| known == name);
    found.map(|(_, array)| array).ok_or_else(|| {
        let names: Vec<_> = outputs.iter().map(|(known, _)| known.as_str()).collect();
        format!("the model has no output `{name}`; it has {names:?}").into()
    })
}

/// Returns the elements as `f32`, exactly; `None` for other types.
pub(super) fn to_floats(array: &Array) -> Option<Cow<'_, [f32]>> {
    match array.data() {
        ArrayData::F32(values) => Some(Cow::Borrowed(values)),
        ArrayData::F16(values) => Some(Cow::Owned(values.to_f32_vec())),
        ArrayData::BF16(values) => Some(Cow::Owned(values.to_f32_vec())),
        _ => None,
    }
}

/// Returns the elements as `i64`; `None` for other types.
fn to_classes(array: &Array) -> Option<Cow<'_, [i64]>> {
    match array.data() {
        ArrayData::I64(values) => Some(Cow::Borrowed(values)),
        ArrayData::I32(values) => Some(values.iter().map(|value| i64::from(*value)).collect()),
        ArrayData::U8(values) => Some(values.iter().map(|value| i64::from(*value)).collect()),
        _ => None,
    }
}

/// Index of the first largest value; `None` if any is NaN.
fn argmax(row: &[f32]) -> Option<usize> {
    if row.iter().any(|value| value.is_nan()) {
        return None;
    }
    (0..row.len()).reduce(|best, at| if row[at] > row[best] { at } else { best })
}
