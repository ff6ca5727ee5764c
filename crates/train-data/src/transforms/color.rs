//! Color jitter that equals Pillow's.
//!
//! Follows: torchvision 0.29, `transforms/functional.py` of PIL images, and the parts of Pillow
//! 13.0 that it calls: `ImageEnhance.py`, `Blend.c`, `Convert.c`. Equal to it bit for bit for one
//! and three channels. With two and four Pillow leaves the last one, transparency, as it is:
//! [`adjust_brightness`] changes it, too, and the others return an error.

use super::{ImageTransform, bytes, happens, image_shape, random, unfit};
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// Multiplies all pixels by `factor`: 0 yields black, 1 the original image.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if the image is not `[channels, height, width]` of bytes,
/// or the factor not a finite number.
pub fn adjust_brightness(image: Array, factor: f32) -> Result<Array> {
    check_factor(factor)?;
    let shape = image_shape(&image)?;
    let mut pixels = into_bytes(image)?;
    let table: [u8; 256] = std::array::from_fn(|byte| blend(0, byte as u8, factor));
    pixels.iter_mut().for_each(|pixel| *pixel = table[usize::from(*pixel)]);
    Array::new(shape, pixels)
}

/// Interpolates between the mean brightness and the image: 0 yields gray, 1 the original image.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) if the image is not of bytes with 1 or 3 channels, or the
/// factor not a finite number.
pub fn adjust_contrast(image: Array, factor: f32) -> Result<Array> {
    check_factor(factor)?;
    let shape = image_shape(&image)?;
    let gray = gray(&image)?;
    let sum: u64 = gray.iter().copied().map(u64::from).sum();
    let mean = (sum as f64 / gray.len() as f64 + 0.5) as u8;
    let mut pixels = into_bytes(image)?;
    let table: [u8; 256] = std::array::from_fn(|byte| blend(mean, byte as u8, factor));
    pixels.iter_mut().for_each(|pixel| *pixel = table[usize::from(*pixel)]);
    Array::new(shape, pixels)
}

/// Interpolates between each pixel's brightness and the pixel: 0 yields black and white, 1 the
/// original image.
///
/// # Errors
///
/// As [`adjust_contrast`].
pub fn adjust_saturation(image: Array, factor: f32) -> Result<Array> {
    check_factor(factor)?;
    let shape = image_shape(&image)?;
    let gray = gray(&image)?;
    let mut pixels = into_bytes(image)?;
    for plane in pixels.chunks_exact_mut(gray.len()) {
        let pixels = plane.iter_mut().zip(&gray);
        pixels.for_each(|(pixel, gray)| *pixel = blend(*gray, *pixel, factor));
    }
    Array::new(shape, pixels)
}

/// Shifts all hues by `factor` of the circle, from -0.5 to 0.5. Gray pixels are unchanged.
///
/// # Errors
///
/// As [`adjust_contrast`]; a factor out of range.
pub fn adjust_hue(image: Array, factor: f64) -> Result<Array> {
    if !(-0.5..=0.5).contains(&factor) {
        return Err(unfit(format!("a shift of the hue must be from -0.5 to 0.5, not {factor}")));
    }
    let shape = image_shape(&image)?;
    match shape[0] {
        1 => return Ok(image),
        3 => {}
        channels => return Err(other_channels(channels)),
    }
    let turn = (factor * 255.0) as i32 as u8;
    let mut pixels = into_bytes(image)?;
    let (red, rest) = pixels.split_at_mut(shape[1] * shape[2]);
    let (green, blue) = rest.split_at_mut(red.len());
    for ((r, g), b) in red.iter_mut().zip(green).zip(blue) {
        let [hue, saturation, value] = to_hsv([*r, *g, *b]);
        [*r, *g, *b] = from_hsv([hue.wrapping_add(turn), saturation, value]);
    }
    Array::new(shape, pixels)
}

/// Converts an image to black and white, with the same number of channels.
///
/// # Errors
///
/// As [`adjust_contrast`].
pub fn grayscale(image: &Array) -> Result<Array> {
    let shape = image_shape(image)?;
    Array::new(shape, gray(image)?.repeat(shape[0]))
}

fn check_factor(factor: f32) -> Result<()> {
    match factor.is_finite() {
        true => Ok(()),
        false => Err(unfit(format!("a factor must be a finite number, not {factor}"))),
    }
}

/// `from + factor * (to - from)`, clipped to 0..=255.
fn blend(from: u8, to: u8, factor: f32) -> u8 {
    let (from, to) = (f32::from(from), f32::from(to));
    // A cast rounds towards 0, and clips to the range of a byte.
    (from + factor * (to - from)) as u8
}

/// Brightness of each pixel.
pub(super) fn gray(image: &Array) -> Result<Vec<u8>> {
    let [channels, height, width] = image_shape(image)?;
    let pixels = bytes(image)?;
    match channels {
        1 => Ok(pixels.to_vec()),
        3 => {
            let (red, rest) = pixels.split_at(height * width);
            let (green, blue) = rest.split_at(height * width);
            let weigh = |r: u8, g: u8, b: u8| {
                let [r, g, b] = [r, g, b].map(u32::from);
                ((r * 19_595 + g * 38_470 + b * 7_471 + 0x8000) >> 16) as u8
            };
            Ok(red.iter().zip(green).zip(blue).map(|((r, g), b)| weigh(*r, *g, *b)).collect())
        }
        channels => Err(other_channels(channels)),
    }
}

fn other_channels(channels: usize) -> crate::Error {
    unfit(format!("colours are those of 1 or 3 channels, not {channels}"))
}

fn into_bytes(image: Array) -> Result<Vec<u8>> {
    bytes(&image)?;
    match image.into_data() {
        ArrayData::U8(bytes) => Ok(bytes),
        // Checked above.
        _ => Ok(Vec::new()),
    }
}

/// Hue, saturation and value, each as a byte.
fn to_hsv([r, g, b]: [u8; 3]) -> [u8; 3] {
    let (most, least) = (r.max(g).max(b), r.min(g).min(b));
    if most == least {
        return [0, 0, most];
    }
    let range = f32::from(most - least);
    let saturation = range / f32::from(most);
    let [rc, gc, bc] = [r, g, b].map(|c| f32::from(most - c) / range);
    // In double precision if Pillow's constants are, and rounded if its variables are.
    let hue = if r == most {
        bc - gc
    } else if g == most {
        (2.0 + f64::from(rc) - f64::from(bc)) as f32
    } else {
        (4.0 + f64::from(gc) - f64::from(rc)) as f32
    };
    let hue = ((f64::from(hue) / 6.0 + 1.0) % 1.0) as f32;
    [(f64::from(hue) * 255.0) as u8, (f64::from(saturation) * 255.0) as u8, most]
}

fn from_hsv([hue, saturation, value]: [u8; 3]) -> [u8; 3] {
    if saturation == 0 {
        return [value; 3];
    }
    let sixth = f64::from(hue) * 6.0 / 255.0;
    let rest = (sixth - sixth.floor()) as f32;
    let saturation = (f64::from(saturation) / 255.0) as f32;
    let less = |part: f64| (f64::from(value) * (1.0 - part)).round() as u8;
    let low = less(saturation.into());
    let falling = less((saturation * rest).into());
    let rising = less(f64::from(saturation) * (1.0 - f64::from(rest)));
    match sixth as u8 % 6 {
        0 => [value, rising, low],
        1 => [falling, value, low],
        2 => [low, value, rising],
        3 => [low, falling, value],
        4 => [rising, low, value],
        _ => [value, low, falling],
    }
}

/// Changes brightness, contrast, saturation and hue, each by a random factor, in a random order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ColorJitter {
    /// Minimum and maximum factor of the brightness; `None` leaves it unchanged.
    pub brightness: Option<[f64; 2]>,
    /// Minimum and maximum factor of the contrast.
    pub contrast: Option<[f64; 2]>,
    /// Minimum and maximum factor of the saturation.
    pub saturation: Option<[f64; 2]>,
    /// Minimum and maximum shift of the hue, from -0.5 to 0.5.
    pub hue: Option<[f64; 2]>,
}

impl ColorJitter {
    /// Takes torchvision's arguments: factors from 1 - x (at least 0) to 1 + x, shifts from -`hue`
    /// to `hue`; 0 leaves the property unchanged.
    ///
    /// # Panics
    ///
    /// If an argument is negative or NaN.
    #[must_use]
    pub fn new(brightness: f64, contrast: f64, saturation: f64, hue: f64) -> Self {
        for x in [brightness, contrast, saturation, hue] {
            assert!(x >= 0.0, "a range of colors must not be negative, got {x}");
        }
        let around = |x: f64| (x > 0.0).then(|| [(1.0 - x).max(0.0), 1.0 + x]);
        Self {
            brightness: around(brightness),
            contrast: around(contrast),
            saturation: around(saturation),
            hue: (hue > 0.0).then_some([-hue, hue]),
        }
    }
}

impl ImageTransform for ColorJitter {
    fn image(&self, mut image: Array, random: &mut SampleRng) -> Result<Array, BoxError> {
        let mut order = [0, 1, 2, 3];
        random::shuffle(&mut order, random);
        let ranges = [self.brightness, self.contrast, self.saturation, self.hue];
        let factors = ranges.map(|range| range.map(|range| random::uniform(random, range)));
        for change in order {
            let Some(factor) = factors[change] else { continue };
            image = match change {
                0 => adjust_brightness(image, factor as f32),
                1 => adjust_contrast(image, factor as f32),
                2 => adjust_saturation(image, factor as f32),
                _ => adjust_hue(image, factor),
            }?;
        }
        image_shape(&image)?;
        Ok(image)
    }
}

/// Converts an image to black and white with this probability, with the same number of channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomGrayscale(pub f64);

impl ImageTransform for RandomGrayscale {
    fn image(&self, image: Array, random: &mut SampleRng) -> Result<Array, BoxError> {
        if happens(self.0, random)? { Ok(grayscale(&image)?) } else { Ok(image) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draw;

    #[test]
    fn factors_that_are_no_numbers_are_refused() {
        let image = || Array::new([3, 1, 2], vec![9_u8, 8, 7, 6, 5, 4]).unwrap();
        for adjust in [adjust_brightness, adjust_contrast, adjust_saturation] {
            for factor in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let error = adjust(image(), factor).unwrap_err().to_string();
                assert!(error.contains("must be a finite number"), "{error}");
            }
        }
        assert!(adjust_hue(image(), f64::NAN).is_err());
        let range = Some([f64::NAN, 1.0]);
        let jitters = [
            ColorJitter { brightness: range, ..Default::default() },
            ColorJitter { contrast: range, ..Default::default() },
            ColorJitter { saturation: range, ..Default::default() },
            ColorJitter { hue: range, ..Default::default() },
        ];
        for jitter in jitters {
            let made = jitter.image(image(), &mut Draw::from(0).random());
            assert!(made.is_err(), "{jitter:?}");
        }
        for (x, at) in [f64::NAN, -0.5].into_iter().flat_map(|x| (0..4).map(move |at| (x, at))) {
            let of = |index| if index == at { x } else { 0.0 };
            let made = std::panic::catch_unwind(|| ColorJitter::new(of(0), of(1), of(2), of(3)));
            assert!(made.is_err(), "{x} at {at}");
        }
        for prob in [f64::NAN, -0.1, 1.1] {
            let error = RandomGrayscale(prob).image(image(), &mut Draw::from(0).random());
            let error = error.unwrap_err().to_string();
            assert!(error.contains("a probability must be from 0 to 1"), "{error}");
        }
    }
}
