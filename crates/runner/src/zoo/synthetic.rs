//! Synthetic images and texts of any size, for benchmarks: a sample is a copy of memory and so
//! costs little time.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::data::{Array, BoxError, Dataset, Sample, SampleRng};
use crate::{Error, Result};

/// Images of random bytes with random classes.
///
/// A sample has `inputs`, bytes `[channels, rows, columns]`, and `labels`, a number. Image and
/// class depend only on index and seed.
#[derive(Clone, Debug)]
pub struct SyntheticImages {
    /// Each image is a part of these bytes.
    pixels: Vec<u8>,
    /// Channels, rows, columns.
    shape: [usize; 3],
    num_classes: usize,
    count: usize,
    seed: u64,
}

impl SyntheticImages {
    /// Creates `count` images of this shape: channels, rows, columns.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if there are no classes, or if an image does not fit into memory.
    pub fn new(count: usize, shape: [usize; 3], num_classes: usize, seed: u64) -> Result<Self> {
        if num_classes == 0 {
            return Err(Error::data("synthetic images need at least one class"));
        }
        let mut pixels = zeros(&shape, 1 << 20)?;
        ChaCha8Rng::seed_from_u64(seed).fill_bytes(&mut pixels);
        Ok(Self { pixels, shape, num_classes, count, seed })
    }
}

impl Dataset for SyntheticImages {
    fn name(&self) -> &'static str {
        "synthetic_images"
    }

    fn len(&self) -> usize {
        self.count
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let size: usize = self.shape.iter().product();
        let [start, label] = drawn(self, self.seed, index)?;
        let start = start % (self.pixels.len() - size);
        let image = Array::new(self.shape, self.pixels[start..start + size].to_vec())?;
        let label = Array::scalar((label % self.num_classes) as i64);
        Ok(Sample::new().with("inputs", image).with("labels", label))
    }
}

/// Returns `product of shape + more` zeros, or an error if memory cannot hold them.
fn zeros<T: Clone + Default>(shape: &[usize], more: usize) -> Result<Vec<T>> {
    let count = shape.iter().try_fold(1_usize, |count, dim| count.checked_mul(*dim));
    let mut zeros = Vec::new();
    match count.and_then(|count| count.checked_add(more)) {
        Some(count) if zeros.try_reserve_exact(count).is_ok() => zeros.resize(count, T::default()),
        _ => {
            let text = format!("synthetic data of shape {shape:?} do not fit into memory");
            return Err(Error::data(text));
        }
    }
    Ok(zeros)
}

/// Texts of random tokens: nine in ten follow from the previous one, so that a model can learn.
///
/// A sample has `inputs`, tokens `[length]`, and `labels`, the next token at each position. A text
/// depends only on index and seed.
#[derive(Clone, Debug)]
pub struct SyntheticTokens {
    /// Each text is a part of these tokens.
    tokens: Vec<i64>,
    length: usize,
    count: usize,
    seed: u64,
}

impl SyntheticTokens {
    /// Creates `count` texts of `length` tokens from a vocabulary of `vocab_size`.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the vocabulary is empty, or if a text does not fit into memory.
    pub fn new(count: usize, length: usize, vocab_size: usize, seed: u64) -> Result<Self> {
        if vocab_size == 0 {
            return Err(Error::data("synthetic tokens need a vocabulary of at least one token"));
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut token = 0;
        let next = || {
            let drawn = random.next_u64() as usize;
            let is_drawn = drawn.is_multiple_of(10);
            token = if is_drawn { drawn / 10 } else { 5 * token + 1 } % vocab_size;
            token as i64
        };
        let mut tokens = zeros(&[length], 1 << 16)?;
        tokens.fill_with(next);
        Ok(Self { tokens, length, count, seed })
    }
}

impl Dataset for SyntheticTokens {
    fn name(&self) -> &'static str {
        "synthetic_tokens"
    }

    fn len(&self) -> usize {
        self.count
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let [start, _] = drawn(self, self.seed, index)?;
        let start = start % (self.tokens.len() - self.length);
        let text =
            |from: usize| Array::new([self.length], self.tokens[from..from + self.length].to_vec());
        Ok(Sample::new().with("inputs", text(start)?).with("labels", text(start + 1)?))
    }
}

/// Draws two random numbers for a sample.
fn drawn(of: &dyn Dataset, seed: u64, index: usize) -> Result<[usize; 2], BoxError> {
    if index >= of.len() {
        return Err(format!("there are {} samples", of.len()).into());
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(index as u64 + 1);
    // Far below 2^63.
    Ok([random.next_u64(), random.next_u64()].map(|drawn| (drawn >> 1) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::ArrayData;

    #[test]
    fn synthetic_images_depend_only_on_seed_and_index() {
        let of = |seed| SyntheticImages::new(100, [3, 4, 5], 7, seed).unwrap();
        let batch = of(0).batch(&[1.into(), 99.into()]).unwrap();
        assert_eq!(batch.get("inputs").unwrap().shape(), [2, 3, 4, 5]);
        let ArrayData::I64(labels) = batch.get("labels").unwrap().data() else { panic!() };
        assert!(labels.iter().all(|label| (0..7).contains(label)));
        let alone = of(0).batch(&[99.into()]).unwrap();
        let ArrayData::U8(both) = batch.get("inputs").unwrap().data() else { panic!() };
        let ArrayData::U8(pixels) = alone.get("inputs").unwrap().data() else { panic!() };
        assert!(both[60..] == pixels[..] && both[..60] != pixels[..]);
        assert_ne!(of(1).batch(&[99.into()]).unwrap(), alone);
        let error = of(0).batch(&[100.into()]).unwrap_err();
        assert!(error.to_string().contains("`synthetic_images`, sample 100"), "{error}");
    }

    #[test]
    fn labels_of_synthetic_tokens_are_the_next_tokens() {
        let tokens = SyntheticTokens::new(100, 50, 11, 0).unwrap();
        let batch = tokens.batch(&[3.into(), 98.into()]).unwrap();
        let field = |name| match batch.get(name).unwrap().data() {
            ArrayData::I64(values) => values.clone(),
            other => panic!("{other:?}"),
        };
        let (inputs, labels) = (field("inputs"), field("labels"));
        assert_eq!(batch.get("labels").unwrap().shape(), [2, 50]);
        assert!(inputs[1..50] == labels[..49] && inputs[51..] == labels[50..99]);
        assert_ne!(inputs[..50], inputs[50..]);
        assert!(inputs.iter().all(|token| (0..11).contains(token)));
        let follows = inputs.iter().zip(&labels).filter(|(a, b)| (5 * **a + 1) % 11 == **b);
        assert!((80..=98).contains(&follows.count()));
        assert!(tokens.batch(&[100.into()]).is_err());
    }
}
