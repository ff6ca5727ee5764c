//! [`Trainer::mean`] and [`Trainer::sum`].

use candle_core::{DType, Tensor};

use crate::{Error, Result, Trainer};

impl Trainer {
    /// The mean over the ranks of one number per rank, such as a loss. Waits for the device. Every
    /// rank must call it.
    ///
    /// # Errors
    ///
    /// A tensor of several elements, on any rank; a failure of another rank.
    pub fn mean(&self, value: &Tensor) -> Result<f64> {
        let own = || value.to_dtype(DType::F64)?.flatten_all()?.squeeze(0)?.to_scalar::<f64>();
        let [sum] = self.total("mean", own().map(|value| [value]).map_err(Error::from))?;
        Ok(sum / self.world_size() as f64)
    }

    /// The sums over the ranks of several numbers per rank, such as the numbers of correct
    /// predictions and of samples; see [`eval_batches`](Self::eval_batches). Every rank must call
    /// it, with the same number of values.
    ///
    /// Takes an array, or a slice whose numbers are replaced with their sums, such as the states of
    /// `train-data`'s metrics:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_train::{AdamWHyper, Trainer};
    /// use train_data::metrics::{Accuracy, CrossEntropy, Evaluator};
    /// use train_data::{Array, Batch};
    ///
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let net = candle_nn::linear(2, 4, vb)?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    /// # let inputs = Tensor::ones((10, 2), DType::F32, &Device::Cpu)?;
    /// # let labels = Tensor::zeros(10, DType::I64, &Device::Cpu)?;
    /// let mut evaluator = Evaluator::new().with(Accuracy::new([1, 2])).with(CrossEntropy::new());
    /// for rows in train.eval_batches(10, 4)? {
    ///     let rows = Tensor::new(rows, &Device::Cpu)?;
    ///     let logits = train.evaluate(|| net.forward(&inputs.index_select(&rows, 0)?))?;
    ///     let logits = Array::new(logits.dims(), logits.flatten_all()?.to_vec1::<f32>()?)?;
    ///     let labels = labels.index_select(&rows, 0)?.to_vec1::<i64>()?;
    ///     let batch = Batch::new().with("labels", Array::new([labels.len()], labels)?);
    ///     evaluator.update(&batch, &[("logits".to_owned(), logits)])?;
    /// }
    /// evaluator.reduce(|states| train.sum(states).map(drop))?;
    /// for (name, value) in evaluator.compute()? {
    ///     println!("{name}: {value:.4}");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A failure of another rank.
    pub fn sum<V: AsMut<[f64]>>(&self, values: V) -> Result<V> {
        self.total("sum", Ok(values))
    }

    pub(crate) fn total<V: AsMut<[f64]>>(&self, call: &'static str, own: Result<V>) -> Result<V> {
        self.core.total(call, own).map_err(|error| self.failed(call, error))
    }
}
