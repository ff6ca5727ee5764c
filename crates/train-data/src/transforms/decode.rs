//! Decoding of JPEG and PNG, by the crate `image`.

use image::{ImageFormat, ImageReader};

use super::vectors::{Kernel, vectorized};
use super::{ImageTransform, color, unfit};
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// Decodes a JPEG or PNG to bytes `[3, height, width]` in the order red, green, blue. Transparency
/// is dropped, and EXIF orientation is ignored, as in torchvision.
///
/// # Errors
///
/// Those of the decoder, for a file that is broken or of another format; a truncated JPEG. Other
/// damage in a JPEG may decode to wrong pixels.
pub fn decode(file: &[u8]) -> Result<Array, BoxError> {
    if file.starts_with(&[0xff, 0xd8]) && !is_whole_jpeg(file) {
        return Err(unfit("the JPEG file is cut off: it has no end marker").into());
    }
    let mut reader = ImageReader::new(std::io::Cursor::new(file));
    match image::guess_format(file) {
        Ok(format @ (ImageFormat::Jpeg | ImageFormat::Png)) => reader.set_format(format),
        _ => return Err(unfit("not a JPEG or PNG file").into()),
    }
    let image = reader.decode()?.into_rgb8();
    let (width, height) = (image.width() as usize, image.height() as usize);
    let planes = vectorized(Planes { pixels: image.as_raw() });
    Ok(Array::new([3, height, width], planes)?)
}

/// Returns whether the segments of a JPEG extend to its end marker, without which the decoder fills
/// the rest with gray. Data after the marker are ignored.
fn is_whole_jpeg(file: &[u8]) -> bool {
    let mut rest = file;
    loop {
        // In the data of a scan 0xff is followed by 0 or a restart marker, and may be repeated
        // before any marker.
        let Some(at) = rest.iter().position(|byte| *byte == 0xff) else { return false };
        rest = &rest[at + 1..];
        match rest {
            [0xd9, ..] => return true,
            [0xff, ..] => {}
            [0x00 | 0x01 | 0xd0..=0xd8, behind @ ..] => rest = behind,
            // A segment with its length, which may have a thumbnail in it.
            [_, high, low, ..] => {
                let len = 1 + usize::from(u16::from_be_bytes([*high, *low]));
                let Some(behind) = rest.get(len..) else { return false };
                rest = behind;
            }
            _ => return false,
        }
    }
}

/// Converts interleaved pixels to planes of red, green and blue.
struct Planes<'a> {
    pixels: &'a [u8],
}

impl Kernel for Planes<'_> {
    type Output = Vec<u8>;

    #[inline(always)]
    fn run(self) -> Vec<u8> {
        let (pixels, _) = self.pixels.as_chunks();
        let mut planes = vec![0; 3 * pixels.len()];
        let (red, rest) = planes.split_at_mut(pixels.len());
        let (green, blue) = rest.split_at_mut(pixels.len());
        for ((([r, g, b], red), green), blue) in pixels.iter().zip(red).zip(green).zip(blue) {
            (*red, *green, *blue) = (*r, *g, *b);
        }
        planes
    }
}

/// Decodes a JPEG or PNG, `[bytes]`; a decoded image is unchanged.
#[doc(alias = "LoadImageFromFile")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decode {
    /// Whether to decode to a single channel, the brightness, instead of three.
    pub gray: bool,
}

impl ImageTransform for Decode {
    fn image(&self, image: Array, _: &mut SampleRng) -> Result<Array, BoxError> {
        let image = match (image.shape(), image.data()) {
            ([_], ArrayData::U8(file)) => decode(file)?,
            _ => image,
        };
        match image.shape() {
            [3, height, width] if self.gray => {
                Ok(Array::new([1, *height, *width], color::gray(&image)?)?)
            }
            _ => Ok(image),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jpeg_that_is_cut_off_is_an_error() {
        let mut file = Vec::new();
        let image = image::RgbImage::from_fn(64, 48, |x, y| image::Rgb([x as u8, y as u8, 9]));
        image.write_to(&mut std::io::Cursor::new(&mut file), ImageFormat::Jpeg).unwrap();
        assert_eq!(decode(&file).unwrap().shape(), [3, 48, 64]);
        for len in [file.len() - 1, file.len() / 2, file.len() / 5] {
            let error = decode(&file[..len]).unwrap_err().to_string();
            assert!(error.contains("cut off"), "{error}");
        }
        // A phone appends a video, another image, or a part of one.
        let whole = file.clone();
        for tail in [&b"more"[..], &whole, &whole[..whole.len() / 2]] {
            file.truncate(whole.len());
            file.extend(tail);
            assert!(decode(&file).is_ok());
        }
        // A thumbnail has an end marker of its own.
        let header = [0xff, 0xe1, 0, 6, 0xff, 0xda, 0xff, 0xd9];
        let mut file = [&whole[..2], &header, &whole[2..]].concat();
        assert!(decode(&file).is_ok());
        file.truncate(whole.len() / 2);
        assert!(decode(&file).unwrap_err().to_string().contains("cut off"));
    }
}
