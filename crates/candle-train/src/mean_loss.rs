//! [`Trainer::mean_loss`]: the loss on a data set.

use candle_core::Tensor;
use train_data::{Dataset, Draw};

use crate::data::{Fields, tensor};
use crate::{Result, Trainer};

impl Trainer {
    /// Mean loss on a data set, of which each sample is evaluated on one rank, in order. `loss`
    /// gets the fields of a batch as tensors on the variables' device, and returns the mean over
    /// its samples; it runs as in [`evaluate`](Self::evaluate). Every rank must call it. `exp` of a
    /// language model's mean loss is its perplexity.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module};
    /// # use candle_nn::VarMap;
    /// # use candle_ops::cross_entropy;
    /// # use candle_train::{AdamWHyper, Trainer, seeded};
    /// use candle_train::train_data::{Array, Sample};
    /// # let vars = VarMap::new();
    /// # let net = candle_nn::linear(2, 3, seeded(&vars, 1, DType::F32, &Device::Cpu))?;
    /// # let mut train = Trainer::builder(&vars).build(AdamWHyper::default())?;
    ///
    /// let x = Array::new([2], vec![0.5_f32, -1.0])?;
    /// let unseen = vec![Sample::new().with("x", x).with("y", Array::scalar(2_i64)); 5];
    /// let loss = train.mean_loss(&unseen, 2, |fields| {
    ///     cross_entropy(&net.forward(fields.get("x")?)?, fields.get("y")?)
    /// })?;
    /// println!("a perplexity of {:.2}", loss.exp());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`eval_batches`](Self::eval_batches), of the data set and of `loss`; a data set
    /// without samples.
    #[doc(alias = "perplexity")]
    pub fn mean_loss(
        &mut self,
        data: &dyn Dataset,
        batch_size: usize,
        loss: impl Fn(&Fields) -> candle_core::Result<Tensor>,
    ) -> Result<f64> {
        let batches = self.eval_batches(data.len(), batch_size)?;
        let device = self.device().clone();
        // One call: other weights for evaluation are computed once.
        let own = self.evaluate(|| -> Result<[f64; 2]> {
            let mut sums = [0.0; 2];
            for rows in batches {
                let draws: Vec<_> = rows.iter().map(|row| Draw::from(*row as usize)).collect();
                let batch = data.batch(&draws).and_then(|batch| data.finish(batch, &draws));
                let batch = batch.map_err(train_step::Error::model)?;
                let fields = Fields::of(&batch, |array| tensor(array, &device))?;
                let mean = fields.with_known(&batch, || loss(&fields))?;
                let mean = mean.to_dtype(candle_core::DType::F32)?.to_scalar::<f32>()?;
                sums[0] += f64::from(mean) * rows.len() as f64;
                sums[1] += rows.len() as f64;
            }
            Ok(sums)
        });
        let [sum, count] = self.total("mean_loss", own)?;
        if count == 0.0 {
            let text = "the data set has no samples".to_owned();
            return Err(crate::Error::InvalidArgument(text));
        }
        Ok(sum / count)
    }
}
