//! The first program of `train-data`'s README.

use std::sync::Arc;
use train_data::{
    Array, BoxError, DataLoader, Dataset, DefaultSampler, Sample, SampleRng, Workers,
};

struct Points;

impl Dataset for Points {
    fn len(&self) -> usize {
        1000
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let x = index as f32;
        Ok(Sample::new().with("x", Array::new([1], vec![x])?).with("y", Array::scalar(2.0 * x)))
    }
}

fn main() -> train_data::Result<()> {
    let sampler = DefaultSampler::new(1000); // shuffled, and divided among the ranks, if any
    let loader = DataLoader::builder(Arc::new(Points), sampler).batch_size(32).drop_last();
    let mut loader = loader.workers(Workers::new(2)).build()?;
    let whole: Vec<_> = loader.batches(3).collect::<Result<_, _>>()?;
    // A loader resumes after ten batches of epoch 3, usually in another process.
    loader.batches(3).take(10).for_each(drop);
    loader.resume(loader.position())?;
    let rest: Vec<_> = loader.batches(3).collect::<Result<_, _>>()?;
    assert_eq!(rest, whole[10..]);
    println!("{} batches of shape {:?}", whole.len(), rest[0].get("x")?.shape());
    Ok(())
}
