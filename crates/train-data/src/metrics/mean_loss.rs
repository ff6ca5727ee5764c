//! `MeanLoss`: the means of losses that the model reports in evaluation.

use super::fields::{find_output, to_floats};
use super::{ExactSum, Metric};
use crate::{Array, Batch, BoxError};

/// Means over samples of losses that the model returns as outputs, reported by the outputs' names.
/// An output is `f32`, `f16` or `bf16` and has one value per sample of the batch, or a single
/// value, their mean; a batch without samples counts nothing. A loss that is NaN or infinite makes
/// the mean NaN or infinite.
#[derive(Clone, Debug)]
pub struct MeanLoss {
    outputs: Vec<String>,
    /// For each output the sum of losses, and the number of samples.
    state: Vec<f64>,
}

const STATE: usize = ExactSum::PARTS + 1;

impl Default for MeanLoss {
    fn default() -> Self {
        Self::new(["loss"])
    }
}

impl MeanLoss {
    /// Averages these outputs.
    #[must_use]
    pub fn new<S: Into<String>>(outputs: impl IntoIterator<Item = S>) -> Self {
        let outputs: Vec<String> = outputs.into_iter().map(Into::into).collect();
        let state = vec![0.0; STATE * outputs.len()];
        Self { outputs, state }
    }
}

impl Metric for MeanLoss {
    fn names(&self) -> Option<Vec<String>> {
        Some(self.outputs.clone())
    }

    fn update(&mut self, batch: &Batch, outputs: &[(String, Array)]) -> Result<(), BoxError> {
        let (states, _) = self.state.as_chunks_mut::<STATE>();
        for (name, [parts @ .., samples]) in self.outputs.iter().zip(states) {
            let array = find_output(outputs, name)?;
            let losses = to_floats(array).ok_or_else(|| {
                format!("`{name}` must be f32, f16 or bf16, got {}", array.data().type_name())
            })?;
            let mut sum = ExactSum::from_parts(*parts);
            match losses[..] {
                // The mean of no sample, a NaN, has no weight.
                [_] if batch.is_empty() => {}
                [mean] => sum.add(f64::from(mean) * batch.len() as f64),
                _ if array.shape() == [batch.len()] => {
                    losses.iter().for_each(|loss| sum.add(f64::from(*loss)));
                }
                _ => {
                    let (shape, len) = (array.shape(), batch.len());
                    let why = "must be one number, or one for each sample";
                    return Err(
                        format!("`{name}` {why}, got shape {shape:?} of {len} samples").into()
                    );
                }
            }
            *parts = sum.parts();
            *samples += batch.len() as f64;
        }
        Ok(())
    }

    fn state(&mut self) -> &mut [f64] {
        &mut self.state
    }

    fn compute(&self) -> Result<Vec<(String, f64)>, BoxError> {
        let (states, _) = self.state.as_chunks::<STATE>();
        let means = self.outputs.iter().zip(states).map(|(name, [parts @ .., samples])| {
            if *samples == 0.0 {
                return Err("there are no samples".into());
            }
            Ok((name.clone(), ExactSum::from_parts(*parts).value() / samples))
        });
        means.collect()
    }

    fn reset(&mut self) {
        self.state.fill(0.0);
    }
}
