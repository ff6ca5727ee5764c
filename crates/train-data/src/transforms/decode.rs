//! Decoding of JPEG and PNG, by the crate `image`.

use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use super::vectors::{Kernel, vectorized};
use super::{ImageTransform, color, unfit};
use crate::{Array, ArrayData, BoxError, Result, SampleRng};

/// Decodes a JPEG or PNG to bytes `[3, height, width]` in the order red, green, blue. Transparency
/// is dropped, and EXIF orientation is ignored, as in torchvision with Pillow.
///
/// Samples of 16 bits are scaled to 8 bits and rounded. Pillow rounds those of colours down, a
/// difference of at most 1, and clips those of gray images, so that most of them become white.
///
/// A call needs at most 11 bytes per pixel, with the limit below less than 1 GB; each worker
/// thread decodes one image at a time.
///
/// # Errors
///
/// Those of the decoder, for a file that is broken or of another format; a truncated JPEG. Other
/// damage in a JPEG may decode to wrong pixels. An image of more than 89,478,485 pixels, before its
/// pixels are decoded: a small file may unpack to gigabytes. The limit is Pillow's
/// `MAX_IMAGE_PIXELS`, above which Pillow warns; it refuses twice as many.
pub fn decode(file: &[u8]) -> Result<Array, BoxError> {
    if file.starts_with(&[0xff, 0xd8]) && !is_whole_jpeg(file) {
        return Err(unfit("the JPEG file is cut off: it has no end marker").into());
    }
    let mut reader = ImageReader::new(std::io::Cursor::new(file));
    match image::guess_format(file) {
        Ok(format @ (ImageFormat::Jpeg | ImageFormat::Png)) => reader.set_format(format),
        _ => return Err(unfit("not a JPEG or PNG file").into()),
    }
    let mut decoder = reader.into_decoder()?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels > MOST_PIXELS {
        let text = format!(
            "the image has {width} x {height} = {pixels} pixels, and at most {MOST_PIXELS} are decoded: scale it down \
             before training"
        );
        return Err(unfit(text).into());
    }
    let mut limits = Limits::default();
    limits.reserve(decoder.total_bytes())?;
    decoder.set_limits(limits)?;
    let image = DynamicImage::from_decoder(decoder)?.into_rgb8();
    let (width, height) = (image.width() as usize, image.height() as usize);
    let planes = vectorized(Planes { pixels: image.as_raw() });
    Ok(Array::new([3, height, width], planes)?)
}

/// Pillow's `MAX_IMAGE_PIXELS`: 2^28 bytes of three channels.
const MOST_PIXELS: u64 = (1 << 28) / 3;

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

    /// The start of a PNG of gray pixels: up to the first byte of its pixels.
    fn header(width: u32, height: u32) -> Vec<u8> {
        let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
        let size = [width.to_be_bytes(), height.to_be_bytes()].concat();
        for chunk in [[&b"IHDR"[..], &size, &[8, 0, 0, 0, 0]].concat(), b"IDAT\x78".to_vec()] {
            let mut crc = flate2::Crc::new();
            crc.update(&chunk);
            file.extend((chunk.len() as u32 - 4).to_be_bytes());
            file.extend(&chunk);
            file.extend(crc.sum().to_be_bytes());
        }
        file
    }

    #[test]
    fn an_image_that_unpacks_to_gigabytes_is_refused_before_it_is_decoded() {
        assert_eq!(MOST_PIXELS, 89_478_485);
        for (size, pixels) in [
            ([20_000, 20_000], "20000 x 20000 = 400000000 pixels"),
            ([89_478_486, 1], "89478486 x 1 = 89478486 pixels"),
            ([1, 2_147_483_647], "1 x 2147483647 = 2147483647 pixels"),
        ] {
            let error = decode(&header(size[0], size[1])).unwrap_err().to_string();
            assert!(error.contains(pixels) && error.contains("at most 89478485"), "{error}");
        }
        // At the limit it is decoded, and the pixels are missing.
        let error = decode(&header(89_478_485, 1)).unwrap_err().to_string();
        assert!(!error.contains("at most"), "{error}");
    }

    #[test]
    fn samples_of_16_bits_are_scaled_and_transparency_is_dropped() {
        let png = |image: DynamicImage| {
            let mut file = Vec::new();
            image.write_to(&mut std::io::Cursor::new(&mut file), ImageFormat::Png).unwrap();
            let ArrayData::U8(pixels) = decode(&file).unwrap().into_data() else { panic!() };
            pixels
        };
        let gray = image::ImageBuffer::from_pixel(1, 1, image::Luma([0x8000_u16]));
        assert_eq!(png(gray.into()), [128; 3]);
        let rgb = image::ImageBuffer::from_pixel(1, 1, image::Rgb([0xffff_u16, 0x01ff, 0]));
        assert_eq!(png(rgb.into()), [255, 2, 0]);
        let rgba = image::ImageBuffer::from_pixel(1, 1, image::Rgba([1_u8, 2, 3, 0]));
        assert_eq!(png(rgba.into()), [1, 2, 3]);
    }

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
