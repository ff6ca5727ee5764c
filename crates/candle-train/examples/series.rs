//! Trains an LSTM to predict the next value of time series of different lengths: steps instead of
//! epochs, means over values instead of over batches.
//!
//! ```sh
//! cargo run --release -p gradstack-candle-train --example series FILE STEPS
//! launch --nproc-per-node 2 -- target/release/examples/series FILE STEPS
//! ```

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::nn::{Linear, Lstm, Module, RnnConfig, VarBuilder, VarMap, linear};
use candle_train::train_data::{
    Array, ArrayData, Batch, BoxError, DataLoader, Dataset, Sample, SampleRng, Workers,
};
use candle_train::{AdamWHyper, Clip, Fields, Trainer, seeded};

const TIMES: usize = 32;

/// Sums of two waves, of 8 to 32 values, filled with zeros: those with these numbers.
struct Waves(Range<usize>);

impl Dataset for Waves {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> std::result::Result<Sample, BoxError> {
        let index = self.0.start + index;
        let len = 8 + index * 7 % 25;
        let [first, second] = [19, 43].map(|prime| (index * prime % 97) as f32 / 97.0);
        let value = |at: usize| {
            let at = at as f32;
            (at * (0.3 + 0.4 * first) + 6.0 * second).sin() * 0.7 + (at * 1.1).cos() * 0.3
        };
        let mut values: Vec<f32> = (0..len).map(value).collect();
        values.resize(TIMES, 0.0);
        let values = Array::new([TIMES, 1], values)?;
        Ok(Sample::new().with("values", values).with("len", Array::scalar(len as i64)))
    }
}

struct Net(Lstm, Linear);

impl Net {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let config = RnnConfig { num_layers: 2, ..RnnConfig::default() };
        Ok(Self(Lstm::new(1, 32, config, vb.pp("lstm"))?, linear(32, 1, vb.pp("head"))?))
    }

    /// Mean squared error of the value after each one, over those of a series.
    fn loss(&self, fields: &Fields, lengths: &[usize]) -> Result<Tensor> {
        let values = fields.get("values")?;
        let known: Vec<usize> = lengths.iter().map(|len| len - 1).collect();
        let x = values.narrow(1, 0, TIMES - 1)?;
        let (states, _) = self.0.forward_with(&x, None, Some(&known))?;
        let errors = (self.1.forward(&states)? - values.narrow(1, 1, TIMES - 1)?)?.sqr()?;
        let counts = known.iter().flat_map(|len| (0..TIMES - 1).map(move |at| at < *len));
        let counts: Vec<f32> = counts.map(|is_in| f32::from(u8::from(is_in))).collect();
        let mask = Tensor::from_vec(counts, errors.shape(), errors.device())?;
        (errors * mask)?.sum_all()? / known.iter().sum::<usize>() as f64
    }
}

fn lengths(batch: &Batch) -> std::result::Result<Vec<usize>, BoxError> {
    match batch.get("len")?.data() {
        ArrayData::I64(lengths) => Ok(lengths.iter().map(|len| *len as usize).collect()),
        _ => Err("lengths are integers".into()),
    }
}

/// Trains up to this number of steps, and returns the error of series that were not trained.
pub(crate) fn train(run: &Path, steps: u64) -> std::result::Result<f64, BoxError> {
    let vars = VarMap::new();
    let net = Net::new(seeded(&vars, 1, DType::F32, &Device::Cpu))?;
    let hyper = AdamWHyper { lr: 5e-3, ..Default::default() };
    let mut train = Trainer::builder(&vars).clip(Clip::norm(1.0)).build(hyper)?;
    let loader = DataLoader::builder(Arc::new(Waves(0..256)), train.sampler(256)).batch_size(16);
    let mut run =
        train.resumable_steps(loader.workers(Workers::new(1)).build()?, run, steps)?.every(20);
    while let Some(batch) = run.next_batch(&mut train)? {
        let lengths = lengths(&batch)?;
        let count = lengths.iter().sum::<usize>() - lengths.len();
        let step = train.step_on_weighted(count, &batch, |fields| net.loss(fields, &lengths))?;
        let loss = train.mean(&step.loss)?;
        if train.is_main() && train.steps().is_multiple_of(50) {
            println!("step {}: {loss:.4}", train.steps());
        }
    }
    let others =
        DataLoader::builder(Arc::new(Waves(256..512)), train.eval_sampler(256)).batch_size(64);
    let (mut sum, mut count) = (0.0, 0);
    for batch in others.build()?.batches(0) {
        let batch = batch?;
        let (fields, lengths) =
            (Fields::of(&batch, |array| train.tensor(array))?, lengths(&batch)?);
        let values = lengths.iter().sum::<usize>() - lengths.len();
        let loss = train.evaluate(|| net.loss(&fields, &lengths))?;
        sum += f64::from(loss.to_scalar::<f32>()?) * values as f64;
        count += values;
    }
    let [sum, count] = train.sum([sum, count as f64])?;
    Ok(sum / count)
}

fn main() -> std::result::Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let run = arguments.next().unwrap_or_else(|| "target/series.safetensors".into());
    let steps = arguments.next().map_or(Ok(300), |steps| steps.parse())?;
    println!("error of other series: {:.4}", train(Path::new(&run), steps)?);
    Ok(())
}
