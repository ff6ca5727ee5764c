//! Fashion-MNIST: 70 000 images of clothing, 28 x 28, as packaged by Debian.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use flate2::read::GzDecoder;

use super::idx::{self, Idx};
use super::images::{Images, Split};
use crate::data::{BoxError, Dataset, Sample, SampleRng};
use crate::{Error, Result};

/// One split of Fashion-MNIST: 60 000 training samples or 10 000 test samples, of ten classes.
///
/// A batch has `inputs`, bytes `[n, 1, 28, 28]`, and `labels`, `[n]`. Over the training split, in
/// units of the maximum, the mean is [`MEAN`](Self::MEAN) and the standard deviation
/// [`STD`](Self::STD).
#[derive(Clone, Debug)]
pub struct FashionMnist {
    images: Images,
}

impl FashionMnist {
    /// Mean intensity, in units of the maximum.
    pub const MEAN: f32 = 0.2860;
    /// Standard deviation of the intensities, in units of the maximum.
    pub const STD: f32 = 0.3530;
    /// Directory of the files in Debian's package `dataset-fashion-mnist`.
    pub const ROOT: &str = "/usr/share/datasets/fashion-mnist";

    /// Reads one split from `root`, by default [`ROOT`](Self::ROOT): the files
    /// `train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`, `t10k-...`.
    ///
    /// # Errors
    ///
    /// [`Error::Data`] if a file is missing (the text explains how to get it), damaged, or of
    /// another kind.
    pub fn new(split: Split, root: Option<&Path>) -> Result<Self> {
        let root = root.unwrap_or_else(|| Path::new(Self::ROOT));
        let part = match split {
            Split::Train => "train",
            Split::Test => "t10k",
        };
        let images = open(&root.join(format!("{part}-images-idx3-ubyte.gz")), 3)?;
        let labels = open(&root.join(format!("{part}-labels-idx1-ubyte.gz")), 1)?;
        if images.extents != [labels.bytes.len(), 28, 28] || labels.bytes.iter().any(|l| *l > 9) {
            return Err(Error::data_of(
                root.display(),
                format_args!(
                    "{part} images of extents {:?} and {} labels are not Fashion-MNIST",
                    images.extents,
                    labels.bytes.len()
                ),
            ));
        }
        let images = Images { pixels: images.bytes, labels: labels.bytes, height: 28, width: 28 };
        Ok(Self { images })
    }
}

impl Dataset for FashionMnist {
    fn name(&self) -> &'static str {
        "fashion_mnist"
    }

    fn len(&self) -> usize {
        self.images.len()
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        self.images.sample(index)
    }
}

fn open(path: &Path, dimensions: u8) -> Result<Idx> {
    let what = path.display().to_string();
    let file = File::open(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => Error::data(format!(
            "{what} does not exist: `apt-get install dataset-fashion-mnist`, or set `root` to \
             the folder that has it"
        )),
        _ => Error::Io { what: format!("opening {what}"), source },
    })?;
    idx::read(&mut GzDecoder::new(file), &what, dimensions, MAX_BYTES)
}

/// Maximum number of bytes read from a file; the largest has 47 040 000.
const MAX_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::data::Draw;

    fn write(root: &Path, name: &str, dimensions: &[u32], bytes: &[u8]) {
        let file = File::create(root.join(name)).unwrap();
        let mut gz = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        gz.write_all(&[0, 0, 8, dimensions.len() as u8]).unwrap();
        dimensions.iter().for_each(|d| gz.write_all(&d.to_be_bytes()).unwrap());
        gz.write_all(bytes).unwrap();
        gz.finish().unwrap();
    }

    #[test]
    fn reads_images_and_labels() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "t10k-images-idx3-ubyte.gz", &[2, 28, 28], &[7; 2 * 784]);
        write(root.path(), "t10k-labels-idx1-ubyte.gz", &[2], &[9, 0]);
        let set = FashionMnist::new(Split::Test, Some(root.path())).unwrap();
        assert_eq!(set.len(), 2);
        let batch = set.batch(&[0, 1, 0].map(Draw::from)).unwrap();
        assert_eq!(batch.get("inputs").unwrap().shape(), [3, 1, 28, 28]);
    }

    #[test]
    fn error_of_a_missing_file_explains_how_to_get_it() {
        let root = tempfile::tempdir().unwrap();
        let error = FashionMnist::new(Split::Train, Some(root.path())).unwrap_err().to_string();
        assert!(error.contains("apt-get install dataset-fashion-mnist"), "{error}");
        assert!(error.contains("train-images-idx3-ubyte.gz"), "{error}");
    }

    #[test]
    fn damaged_files_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let open = || FashionMnist::new(Split::Test, Some(root.path())).unwrap_err().to_string();
        write(root.path(), "t10k-images-idx3-ubyte.gz", &[2, 28, 28], &[7; 2 * 784]);
        write(root.path(), "t10k-labels-idx1-ubyte.gz", &[3], &[1, 2, 3]);
        assert!(open().contains("3 labels"), "{}", open());
        write(root.path(), "t10k-labels-idx1-ubyte.gz", &[2], &[1, 10]);
        assert!(open().contains("not Fashion-MNIST"), "{}", open());
        let images = root.path().join("t10k-images-idx3-ubyte.gz");
        let whole = std::fs::read(&images).unwrap();
        std::fs::write(&images, &whole[..whole.len() - 9]).unwrap();
        assert!(open().contains("t10k-images"), "{}", open());
        std::fs::write(&images, b"plain").unwrap();
        assert!(open().contains("t10k-images"), "{}", open());
    }
}
