//! Handwritten digits, small enough to be included: 1 797 images of 8 x 8 from the UCI repository.
//!
//! The file is compiled in (`digits/README.md`: source, licence, checksum), so examples run without
//! a download. It has no division into training and test samples; a fifth, chosen by a seed, is
//! held out.

use std::io::Read;

use flate2::read::GzDecoder;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::images::{Images, Split};
use crate::data::{BoxError, Dataset, Sample, SampleRng};
use crate::{Error, Result};

/// The digits, or one split of them.
///
/// A batch has `inputs`, bytes `[n, 1, 8, 8]`, and `labels`, `[n]`. The file's intensities 0..=16
/// are scaled to 0..=255, the usual range of bytes; over the whole set, in units of the maximum,
/// the mean is then [`MEAN`](Self::MEAN) and the standard deviation [`STD`](Self::STD).
#[derive(Clone, Debug)]
pub struct Digits {
    images: Images,
}

impl Digits {
    /// Mean intensity, in units of the maximum.
    pub const MEAN: f32 = 0.3053;
    /// Standard deviation of the intensities, in units of the maximum.
    pub const STD: f32 = 0.3759;

    /// Creates one split: `Test` is a fifth of the samples (359), chosen at random by `split_seed`,
    /// `Train` the others (1 438).
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if the compiled-in file is damaged.
    pub fn new(split: Split, split_seed: u64) -> Result<Self> {
        let all = parse(FILE)?;
        let order = shuffled(all.len(), split_seed);
        let (test, train) = order.split_at(all.len() / 5);
        let chosen = match split {
            Split::Train => train,
            Split::Test => test,
        };
        let images = Images {
            pixels: chosen.iter().flat_map(|i| all.image(*i)).copied().collect(),
            labels: chosen.iter().map(|i| all.labels[*i]).collect(),
            height: all.height,
            width: all.width,
        };
        Ok(Self { images })
    }
}

impl Dataset for Digits {
    fn name(&self) -> &'static str {
        "digits"
    }

    fn len(&self) -> usize {
        self.images.len()
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        self.images.sample(index)
    }
}

/// Parses lines of 64 intensities and a label.
fn parse(file: &[u8]) -> Result<Images> {
    let mut text = String::new();
    GzDecoder::new(file)
        .take(MAX_BYTES)
        .read_to_string(&mut text)
        .map_err(|e| Error::data_failed(Some("digits".to_owned()), e))?;
    let mut images = Images { pixels: Vec::new(), labels: Vec::new(), height: 8, width: 8 };
    for (number, line) in (1..).zip(text.lines()) {
        let wrong =
            || Error::data_of(format_args!("digits, line {number}"), "not 64 numbers and a label");
        let values: Vec<u8> =
            line.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
        match values.as_slice() {
            [pixels @ .., label] if pixels.len() == 64 && *label < 10 => {
                for pixel in pixels {
                    let stretched = (u16::from(*pixel) * 255 + 8) / 16;
                    images.pixels.push(u8::try_from(stretched).map_err(|_| wrong())?);
                }
                images.labels.push(*label);
            }
            _ => return Err(wrong()),
        }
    }
    if images.len() != COUNT {
        return Err(Error::data_of(
            "digits",
            format_args!("{} samples instead of {COUNT}", images.len()),
        ));
    }
    Ok(images)
}

/// Returns the numbers below `count` in a random order that depends only on `seed`: a Fisher-Yates
/// shuffle, implemented here so that no dependency can change a split.
fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut order: Vec<_> = (0..count).collect();
    for i in (1..count).rev() {
        // A 64-bit number modulo a small one: the bias is below 2^-50.
        order.swap(i, (rng.next_u64() % (i as u64 + 1)) as usize);
    }
    order
}

/// `digits.csv.gz` of scikit-learn, unchanged.
const FILE: &[u8] = include_bytes!("digits/digits.csv.gz");

/// Number of samples in the file.
const COUNT: usize = 1797;

/// Maximum number of unpacked bytes; the file has 264 712.
const MAX_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Write;

    use super::*;
    use crate::data::{ArrayData, Draw};

    fn packed(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn file_matches_its_readme() {
        let all = parse(FILE).unwrap();
        let mut per_class = [0; 10];
        all.labels.iter().for_each(|label| per_class[usize::from(*label)] += 1);
        // Counts of scikit-learn's `load_digits().target`.
        assert_eq!(per_class, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        assert_eq!(&all.image(0)[..8], [0, 0, 80, 207, 143, 16, 0, 0]); // 0 0 5 13 9 1 0 0
        let values: Vec<_> = all.pixels.iter().map(|v| f64::from(*v) / 255.0).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let var = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!((mean - f64::from(Digits::MEAN)).abs() < 1e-4, "{mean}");
        assert!((var.sqrt() - f64::from(Digits::STD)).abs() < 1e-4, "{}", var.sqrt());
    }

    #[test]
    fn splits_are_disjoint_complete_and_fixed_by_the_seed() {
        let order = shuffled(COUNT, 3);
        assert_eq!(order.iter().collect::<HashSet<_>>().len(), COUNT);
        assert_eq!(order, shuffled(COUNT, 3));
        assert_ne!(order, shuffled(COUNT, 4));
        // A change here would change the samples of every published accuracy.
        assert_eq!(shuffled(10, 0), [7, 8, 9, 0, 1, 5, 4, 6, 3, 2]);
        let (train, test) =
            (Digits::new(Split::Train, 0).unwrap(), Digits::new(Split::Test, 0).unwrap());
        assert_eq!((train.len(), test.len()), (1438, 359));
    }

    #[test]
    fn batch_keeps_the_requested_order() {
        let digits = Digits::new(Split::Test, 0).unwrap();
        let batch = digits.batch(&[5, 2].map(Draw::from)).unwrap();
        assert_eq!(batch.get("inputs").unwrap().shape(), [2, 1, 8, 8]);
        let ArrayData::I64(labels) = batch.get("labels").unwrap().data() else { panic!() };
        let expected = [5, 2].map(|i| i64::from(digits.images.labels[i]));
        assert_eq!(labels.as_slice(), expected);
        let error = digits.batch(&[Draw::from(359)]).unwrap_err();
        assert_eq!(error.to_string(), "data set `digits`, sample 359: there are 359 samples");
    }

    #[test]
    fn damaged_files_are_refused() {
        assert!(parse(b"not gzip").is_err());
        assert!(parse(&FILE[..FILE.len() / 2]).is_err());
        for (text, says) in [
            ("1,2,3\n", "line 1"),
            (&format!("{}10\n", "0,".repeat(64)), "line 1"),
            (&format!("{}3\n{}17,3\n", "0,".repeat(64), "0,".repeat(63)), "line 2"),
            (&format!("{}3\n", "0,".repeat(64)), "1 samples instead of 1797"),
        ] {
            let error = parse(&packed(text)).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
