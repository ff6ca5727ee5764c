//! MixUp and CutMix: mix pairs of a batch's images and labels.
//!
//! Follows: torchvision 0.29, `transforms/v2/_augment.py`: each sample is paired with the previous
//! one in the batch.

use super::crop::Region;
use super::{BatchTransform, checked_len, random, unfit};
use crate::array::with_elements;
use crate::{Array, ArrayData, Batch, BoxError, Result, SampleRng};

/// Computes `lambda` times each image and label plus `1 - lambda` times those of the previous
/// sample, for `inputs`, floats, and `labels`, classes, which become `[samples, classes]` floats.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if a field has another form, a label is out of range,
/// there are not as many labels as images, or `lambda` is not from 0 to 1.
pub fn mix_up(mut batch: Batch, lambda: f64, classes: usize) -> Result<Batch> {
    let images = batch.take("inputs")?;
    let shape = images.shape().to_vec();
    let ArrayData::F32(own) = images.into_data() else {
        return Err(unfit("MixUp needs images of f32; normalize them before"));
    };
    if !(0.0..=1.0).contains(&lambda) {
        return Err(unfit(format!("`lambda` must be from 0 to 1, got {lambda}")));
    }
    let Some(&samples) = shape.first() else {
        return Err(unfit("MixUp needs images [samples, ...], not a single number"));
    };
    batch.set("inputs", Array::new(shape, mix(&own, samples, lambda))?);
    mix_labels(batch, samples, lambda, classes)
}

/// Pastes `region` of the previous image into each image. Labels are mixed by area, as in
/// [`mix_up`].
///
/// # Errors
///
/// As [`mix_up`]; also a region that extends beyond the image.
pub fn cut_mix(mut batch: Batch, region: Region, classes: usize) -> Result<Batch> {
    let images = batch.take("inputs")?;
    let shape = images.shape().to_vec();
    let [samples, channels, height, width] = shape[..] else {
        return Err(unfit(format!(
            "CutMix needs images [samples, channels, height, width], not {shape:?}"
        )));
    };
    let (Ok(top), Ok(left)) = (usize::try_from(region.top), usize::try_from(region.left)) else {
        return Err(unfit(format!("{region:?} reaches beyond the image")));
    };
    let is_within = |first: usize, count, extent| count <= extent && first <= extent - count;
    if !is_within(top, region.height, height) || !is_within(left, region.width, width) {
        return Err(unfit(format!("{region:?} reaches beyond {height} x {width}")));
    }
    if height == 0 || width == 0 {
        return Err(unfit(format!("CutMix needs images with pixels, not {shape:?}")));
    }
    let data = with_elements!(images.into_data(), own => {
        let mut mixed = own.clone();
        let planes = samples * channels;
        for plane in 0..planes {
            // Previous sample; for the first one the last.
            let before = (plane + planes - channels) % planes;
            for row in top..top + region.height {
                let at = |plane: usize| (plane * height + row) * width + left;
                mixed[at(plane)..][..region.width]
                    .copy_from_slice(&own[at(before)..][..region.width]);
            }
        }
        ArrayData::from(mixed)
    });
    batch.set("inputs", Array::new(shape, data)?);
    let area = |height: usize, width: usize| height as f64 * width as f64;
    let part = area(region.height, region.width) / area(height, width);
    mix_labels(batch, samples, 1.0 - part, classes)
}

fn mix_labels(mut batch: Batch, samples: usize, lambda: f64, classes: usize) -> Result<Batch> {
    let labels = batch.take("labels")?;
    let ArrayData::I64(labels) = labels.data() else {
        return Err(unfit(format!(
            "labels must be classes (i64), not {}",
            labels.data().type_name()
        )));
    };
    if labels.len() != samples {
        let labels = labels.len();
        return Err(unfit(format!("{samples} images cannot be mixed with {labels} labels")));
    }
    if classes == 0 {
        return Err(unfit("`num_classes` must be at least 1"));
    }
    let mut one_hot = vec![0.0; checked_len(&[labels.len(), classes])?];
    for (label, row) in labels.iter().zip(one_hot.chunks_exact_mut(classes)) {
        let class = usize::try_from(*label).ok().and_then(|class| row.get_mut(class));
        *class.ok_or_else(|| unfit(format!("label {label} is none of {classes} classes")))? = 1.0;
    }
    let mixed = mix(&one_hot, labels.len(), lambda);
    batch.set("labels", Array::new([labels.len(), classes], mixed)?);
    Ok(batch)
}

/// Computes `lambda` times each of `samples` parts plus `1 - lambda` times the previous part.
fn mix(own: &[f32], samples: usize, lambda: f64) -> Vec<f32> {
    let (lambda, rest) = (lambda as f32, (1.0 - lambda) as f32);
    let before = own.len() - own.len() / samples.max(1);
    let before = own[before..].iter().chain(own);
    let mixed = own.iter().zip(before).map(|(own, before)| before * rest + own * lambda);
    mixed.collect()
}

/// Draws the weight from Beta(`alpha`, `alpha`).
fn lambda(random: &mut SampleRng, alpha: f64) -> Result<f64> {
    if !(alpha > 0.0 && alpha.is_finite()) {
        return Err(unfit(format!("`alpha` must be a finite number above 0, not {alpha}")));
    }
    Ok(random::beta(random, alpha))
}

/// Mixes images and labels of a batch, with a random weight from Beta(`alpha`, `alpha`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixUp {
    /// Parameter of the distribution, above 0: 1 is uniform, smaller values favor 0 and 1.
    pub alpha: f64,
    /// Number of classes.
    pub num_classes: usize,
}

impl BatchTransform for MixUp {
    fn apply(&self, batch: Batch, random: &mut SampleRng) -> Result<Batch, BoxError> {
        let lambda = lambda(random, self.alpha)?;
        Ok(mix_up(batch, lambda, self.num_classes)?)
    }
}

/// Mixes images of a batch by a random rectangle, whose fraction of the area is from Beta(`alpha`,
/// `alpha`), and labels by that fraction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CutMix {
    /// Parameter of the distribution, above 0: 1 is uniform, smaller values favor 0 and 1.
    pub alpha: f64,
    /// Number of classes.
    pub num_classes: usize,
}

impl CutMix {
    /// Returns the rectangle around a point with `1 - lambda` of the area, clipped to the image.
    pub(super) fn region([height, width]: [usize; 2], lambda: f64, [y, x]: [usize; 2]) -> Region {
        let half = 0.5 * (1.0 - lambda).sqrt();
        let span = |center: usize, extent: usize| {
            let half = (half * extent as f64) as usize;
            let first = center.saturating_sub(half);
            (first as isize, (center + half).min(extent) - first)
        };
        let ((top, height), (left, width)) = (span(y, height), span(x, width));
        Region { top, left, height, width }
    }
}

impl BatchTransform for CutMix {
    fn apply(&self, batch: Batch, random: &mut SampleRng) -> Result<Batch, BoxError> {
        let [height, width] = match batch.get("inputs")?.shape() {
            [.., height, width] if *height > 0 && *width > 0 => [*height, *width],
            shape => return Err(unfit(format!("the batch is not of images: {shape:?}")).into()),
        };
        let lambda = lambda(random, self.alpha)?;
        let [x, y] = [width, height].map(|extent| random::below(random, extent));
        Ok(cut_mix(batch, Self::region([height, width], lambda, [y, x]), self.num_classes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(images: &[usize], labels: usize) -> Batch {
        let pixels = vec![1.0_f32; images.iter().product()];
        Batch::new()
            .with("inputs", Array::new(images, pixels).unwrap())
            .with("labels", Array::new([labels], vec![0_i64; labels]).unwrap())
    }

    fn region([top, left]: [isize; 2], [height, width]: [usize; 2]) -> Region {
        Region { top, left, height, width }
    }

    #[test]
    fn another_number_of_labels_than_images_is_refused() {
        for labels in [1, 2, 4] {
            let expected = format!("3 images cannot be mixed with {labels} labels");
            let error = mix_up(batch(&[3, 1, 2, 2], labels), 0.5, 2).unwrap_err().to_string();
            assert!(error.contains(&expected), "{error}");
            let whole = region([0, 0], [2, 2]);
            let error = cut_mix(batch(&[3, 1, 2, 2], labels), whole, 2).unwrap_err().to_string();
            assert!(error.contains(&expected), "{error}");
        }
        assert!(mix_up(batch(&[3, 1, 2, 2], 3), 0.5, 2).is_ok());
        assert!(cut_mix(batch(&[0, 1, 2, 2], 0), region([0, 0], [2, 2]), 2).is_ok());
    }

    #[test]
    fn weights_that_are_no_fraction_are_refused() {
        for lambda in [f64::NAN, -0.1, 1.1, f64::INFINITY] {
            let error = mix_up(batch(&[1, 1], 1), lambda, 2).unwrap_err().to_string();
            assert!(error.contains("`lambda` must be from 0 to 1"), "{error}");
        }
        assert!(mix_up(batch(&[], 1), 0.5, 2).unwrap_err().to_string().contains("single number"));
    }

    #[test]
    fn regions_beyond_the_image_are_refused() {
        let most = usize::MAX;
        for region in [
            region([1, 0], [most, 1]),
            region([0, 1], [1, most]),
            region([isize::MAX, 0], [most, 1]),
            region([-1, 0], [1, 1]),
            region([1, 0], [2, 1]),
            region([3, 0], [0, 0]),
        ] {
            let error = cut_mix(batch(&[2, 1, 2, 2], 2), region, 2).unwrap_err().to_string();
            assert!(error.contains("reaches beyond"), "{error}");
        }
        let (none, most) =
            (batch(&[0, 1, 1 << 40, 1 << 40], 0), region([0, 0], [1 << 40, 1 << 40]));
        assert!(cut_mix(none, most, 2).is_ok());
        let error = cut_mix(batch(&[2, 1, 0, 2], 2), region([0, 0], [0, 2]), 2).unwrap_err();
        assert!(error.to_string().contains("images with pixels"), "{error}");
    }
}
