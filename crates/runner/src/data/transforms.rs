//! Registries of transforms: `TRANSFORMS` for `pipeline` of a data set, `BATCH_TRANSFORMS` for
//! `batch_augments`.
//!
//! Names and keys are MMCV's if it has the transform, otherwise torchvision's.

use std::sync::Arc;

use train_data::transforms::{
    BatchTransform, CenterCrop, ColorJitter, CutMix, Direction, Filter, ImageTransform, MixUp,
    Normalize, On, PadTokens, Pipeline, RandomCrop, RandomFlip, RandomGrayscale, RandomResizedCrop,
    Resize, ResizeTo, ToTensor, Transform, Transformed, TruncateTokens,
};

use super::{DatasetFactory, Registry, StreamFactory};
use crate::Result;
use crate::config::{Section, Span};

/// Transforms that a configuration can name in `dataset.pipeline`.
pub static TRANSFORMS: Registry<TransformFactory> = Registry::with(
    "transform",
    &[
        ("CenterCrop", |s| {
            let size = size(s, &["crop_size", "size"])?;
            image(s, CenterCrop(size))
        }),
        ("ColorJitter", color_jitter),
        ("LoadImageFromFile", load_image),
        ("Normalize", normalize),
        ("PadTokens", |s| {
            let pad = PadTokens { length: s.required("length")?, token: s.required("token")? };
            ready(pad)
        }),
        ("RandomCrop", |s| {
            let size = size(s, &["crop_size", "size"])?;
            let padding = s.or("padding", 0)?;
            let pad_if_needed = s.or("pad_if_needed", false)?;
            image(s, RandomCrop { size, padding, pad_if_needed })
        }),
        ("RandomFlip", |s| {
            let directions = [
                ("horizontal", Direction::Horizontal),
                ("vertical", Direction::Vertical),
                ("diagonal", Direction::Diagonal),
            ];
            let direction = s.choice("direction", "horizontal", &directions)?;
            let prob = probability(s, "prob", 0.5)?;
            image(s, RandomFlip { prob, direction })
        }),
        ("RandomGrayscale", |s| {
            let prob = probability(s, "prob", 0.1)?;
            image(s, RandomGrayscale(prob))
        }),
        ("RandomHorizontalFlip", |s| {
            let prob = probability(s, "p", 0.5)?;
            image(s, RandomFlip { prob, direction: Direction::Horizontal })
        }),
        ("RandomResizedCrop", random_resized_crop),
        ("RandomVerticalFlip", |s| {
            let prob = probability(s, "p", 0.5)?;
            image(s, RandomFlip { prob, direction: Direction::Vertical })
        }),
        ("Resize", resize),
        ("ToTensor", |s| image(s, ToTensor)),
        ("Tokenize", tokenize),
        ("TruncateTokens", |s| ready(TruncateTokens(s.required("length")?))),
    ],
);

/// Creates a transform. The call may read files; it is made only after the whole configuration was
/// checked.
pub type TransformFactory = Box<dyn FnOnce() -> Result<Box<dyn Transform>> + Send>;

/// Batch transforms that a configuration can name in `dataset.batch_augments`.
pub static BATCH_TRANSFORMS: Registry<Box<dyn BatchTransform>> = Registry::with(
    "batch transform",
    &[
        ("CutMix", |s| {
            let (alpha, num_classes) = mixing(s)?;
            Ok(Box::new(CutMix { alpha, num_classes }))
        }),
        ("MixUp", |s| {
            let (alpha, num_classes) = mixing(s)?;
            Ok(Box::new(MixUp { alpha, num_classes }))
        }),
    ],
);

/// Transforms of a data set, by sample and by batch: the keys `pipeline` and `batch_augments`.
#[derive(Default)]
pub(crate) struct Steps {
    pipeline: Vec<TransformFactory>,
    of_batches: Vec<Box<dyn BatchTransform>>,
}

impl Steps {
    pub(crate) fn read(section: &mut Section) -> Result<Self> {
        let mut steps = Self::default();
        for step in section.sections("pipeline")? {
            steps.pipeline.extend(section.attempt_whole(|_| TRANSFORMS.build(step))?);
        }
        for step in section.sections("batch_augments")? {
            steps.of_batches.extend(section.attempt_whole(|_| BATCH_TRANSFORMS.build(step))?);
        }
        Ok(steps)
    }

    /// Wraps a data set to apply them.
    pub(crate) fn of(self, dataset: DatasetFactory) -> DatasetFactory {
        if self.pipeline.is_empty() && self.of_batches.is_empty() {
            return dataset;
        }
        Box::new(move || {
            let pipeline = self.pipeline.into_iter().map(|make| make()).collect::<Result<_>>()?;
            let transformed = Transformed::new(dataset()?, pipeline);
            let add = |transformed: Transformed<_>, t| transformed.with_batch_transform(t);
            Ok(Arc::new(self.of_batches.into_iter().fold(transformed, add)))
        })
    }

    /// Wraps a stream to apply the pipeline.
    pub(crate) fn of_stream(self, stream: StreamFactory) -> StreamFactory {
        if self.pipeline.is_empty() {
            return stream;
        }
        Box::new(move |options| {
            let pipeline: Pipeline =
                self.pipeline.into_iter().map(|make| make()).collect::<Result<_>>()?;
            Ok(stream(options)?.transform(pipeline))
        })
    }
}

fn ready(transform: impl Transform + 'static) -> Result<TransformFactory> {
    let transform: Box<dyn Transform + Send> = Box::new(transform);
    Ok(Box::new(move || Ok(transform)))
}

/// Creates a transform of the image in `field`, by default `inputs`.
fn image(
    section: &mut Section,
    transform: impl ImageTransform + 'static,
) -> Result<TransformFactory> {
    ready(On(section.or("field", "inputs".to_owned())?, transform))
}

fn resize(section: &mut Section) -> Result<TransformFactory> {
    let filter = filter(section)?;
    let keep_ratio = section.or("keep_ratio", false)?;
    let to = if section.has("scale") {
        let place = section.offset_of("scale");
        // MMCV's order is width, height.
        let given: Vec<usize> = section.one_or_more("scale")?;
        let [width, height] = extents(section, "scale", &place, &given)?;
        if keep_ratio {
            ResizeTo::Within([height, width])
        } else {
            ResizeTo::Exact([height, width])
        }
    } else if section.is_number("size") {
        ResizeTo::ShortEdge(section.count("size", 1)?)
    } else {
        ResizeTo::Exact(size(section, &["size"])?)
    };
    image(section, Resize { to, filter })
}

fn random_resized_crop(section: &mut Section) -> Result<TransformFactory> {
    let crop = RandomResizedCrop::square(1);
    let range = |section: &mut Section, key, default: [f64; 2]| {
        let place = section.offset_of(key);
        let (low, high) = section.or(key, (default[0], default[1]))?;
        if low > 0.0 && low <= high {
            return Ok([low, high]);
        }
        let text = format!("`{key}` must be two numbers above 0, the smaller one first");
        section.note(place.error(text)).map(|()| default)
    };
    let scale = range(section, "scale", crop.scale)?;
    let ratio = range(section, "ratio", crop.ratio)?;
    let filter = filter(section)?;
    let size = size(section, &["size"])?;
    image(section, RandomResizedCrop { size, scale, ratio, filter })
}

fn normalize(section: &mut Section) -> Result<TransformFactory> {
    let place = section.offset_of("mean");
    let mut mean: Vec<f32> = section.required("mean")?;
    let mut std: Vec<f32> = section.required("std")?;
    if mean.is_empty()
        || mean.len() != std.len()
        || mean.iter().any(|mean| !mean.is_finite())
        || std.iter().any(|std| !(*std > 0.0 && std.is_finite()))
    {
        section.note(place.error(
            "`mean` and `std` must have equal lengths, and `std` must be positive; both must be finite",
        ))?;
        (mean, std) = (vec![0.0], vec![1.0]);
    }
    let to_rgb = section.offset_of("to_rgb");
    if !section.or("to_rgb", true)? {
        section.note(to_rgb.error("`to_rgb` must be true: images are RGB"))?;
    }
    image(section, Normalize::new(mean, std))
}

fn color_jitter(section: &mut Section) -> Result<TransformFactory> {
    let mut ranges = [None; 4];
    let keys = ["brightness", "contrast", "saturation", "hue"];
    for ((key, range), least) in keys.into_iter().zip(&mut ranges).zip([0.0, 0.0, 0.0, -0.5]) {
        let (middle, most) = if key == "hue" { (0.0, 0.5) } else { (1.0, f32::MAX.into()) };
        let place = section.offset_of(key);
        let given: Vec<f64> = section.one_or_more(key)?;
        *range = match given[..] {
            [] | [0.0] => None,
            // A single value means the middle plus or minus this value, as in torchvision.
            [by] if by > 0.0 => Some([f64::max(middle - by, least), middle + by]),
            [low, high] => Some([low, high]),
            // Refused below.
            _ => Some([1.0, 0.0]),
        };
        if range.is_some_and(|[low, high]| !(least <= low && low <= high && high <= most)) {
            let most = if key == "hue" { " to 0.5" } else { "" };
            let text =
                format!("`{key}` must be a number, or two increasing numbers, from {least}{most}");
            section.note(place.error(text))?;
        }
    }
    let [brightness, contrast, saturation, hue] = ranges;
    image(section, ColorJitter { brightness, contrast, saturation, hue })
}

fn load_image(section: &mut Section) -> Result<TransformFactory> {
    let gray = section.choice("color_type", "color", &[("color", false), ("grayscale", true)])?;
    with_image::decode(section, gray)
}

/// Builders of components that need the feature `image`.
#[cfg(feature = "image")]
pub(super) mod with_image {
    use std::sync::Arc;

    use train_data::ImageFolder;
    use train_data::transforms::Decode;

    use super::{DatasetFactory, Result, Section, TransformFactory, image};

    pub(super) fn decode(section: &mut Section, gray: bool) -> Result<TransformFactory> {
        image(section, Decode { gray })
    }

    /// Reads `ImageFolder`, with the key `root`.
    pub(in crate::data) fn image_folder(section: &mut Section) -> Result<DatasetFactory> {
        let place = section.offset_of("root");
        let root: String = section.required("root")?;
        if !std::path::Path::new(&root).is_dir() {
            section.note(place.error(format!("`root`: no such directory: `{root}`")))?;
        }
        Ok(Box::new(move || Ok(Arc::new(ImageFolder::new(root)?))))
    }
}

#[cfg(not(feature = "image"))]
pub(super) mod with_image {
    use super::{DatasetFactory, Result, Section, TransformFactory};

    pub(super) fn decode(section: &mut Section, _: bool) -> Result<TransformFactory> {
        section.optional::<String>("field")?;
        Err(section.error("`LoadImageFromFile` needs `runner` built with the feature `image`"))
    }

    pub(in crate::data) fn image_folder(section: &mut Section) -> Result<DatasetFactory> {
        section.required::<String>("root")?;
        Err(section.error("`ImageFolder` needs `runner` built with the feature `image`"))
    }
}

#[cfg(feature = "tokenizers")]
fn tokenize(section: &mut Section) -> Result<TransformFactory> {
    let place = section.offset_of("tokenizer");
    let file: String = section.required("tokenizer")?;
    if !std::path::Path::new(&file).is_file() {
        section.note(place.error(format!("`tokenizer`: no such file: `{file}`")))?;
    }
    Ok(Box::new(move || {
        let tokenize = train_data::transforms::Tokenize::from_file(&file);
        Ok(Box::new(tokenize.map_err(|why| crate::Error::data_failed(None, why))?))
    }))
}

#[cfg(not(feature = "tokenizers"))]
fn tokenize(section: &mut Section) -> Result<TransformFactory> {
    section.required::<String>("tokenizer")?;
    Err(section.error("`Tokenize` needs `runner` built with the feature `tokenizers`"))
}

/// Reads the keys `alpha` and `num_classes`.
fn mixing(section: &mut Section) -> Result<(f64, usize)> {
    let alpha = section.or_checked("alpha", 1.0, "a finite number above 0", |alpha: &f64| {
        *alpha > 0.0 && alpha.is_finite()
    })?;
    let place = section.offset_of("num_classes");
    let num_classes = section.required("num_classes")?;
    if num_classes == 0 {
        section.note(place.error("`num_classes` must be at least 1, got 0"))?;
    }
    Ok((alpha, num_classes))
}

fn filter(section: &mut Section) -> Result<Filter> {
    let filters = [
        ("nearest", Filter::Nearest),
        ("box", Filter::Box),
        ("area", Filter::Box),
        ("bilinear", Filter::Bilinear),
        ("hamming", Filter::Hamming),
        ("bicubic", Filter::Bicubic),
        ("lanczos", Filter::Lanczos),
    ];
    section.choice("interpolation", "bilinear", &filters)
}

fn probability(section: &mut Section, key: &'static str, default: f64) -> Result<f64> {
    section.or_checked(key, default, "from 0 to 1", |p| (0.0..=1.0).contains(p))
}

/// Reads height and width: one length for both or two, under the first of `keys` that is present.
fn size(section: &mut Section, keys: &[&'static str]) -> Result<[usize; 2]> {
    let key = *keys.iter().find(|key| section.has(key)).unwrap_or(&keys[0]);
    let place = section.offset_of(key);
    let given: Vec<usize> = match section.has(key) {
        true => section.one_or_more(key)?,
        false => section.required(key)?,
    };
    extents(section, key, &place, &given)
}

fn extents(section: &Section, key: &str, place: &Span, given: &[usize]) -> Result<[usize; 2]> {
    match *given {
        [size] if size > 0 => Ok([size, size]),
        [a, b] if a > 0 && b > 0 => Ok([a, b]),
        _ => {
            let text = format!("`{key}` must be one or two lengths of at least 1");
            section.note(place.error(text)).map(|()| [1, 1])
        }
    }
}

#[cfg(test)]
mod tests {
    use train_data::{
        Array, ArrayData, Batch, BoxError, Dataset, Draw, Sample, SampleRng, Stream, StreamLoader,
        StreamOptions, Workers,
    };

    use super::*;
    use crate::config::Config;

    /// Gray images of 20 x 30 pixels, filled with their index.
    struct Images;

    impl Dataset for Images {
        fn len(&self) -> usize {
            4
        }

        fn sample(&self, index: usize, _: &mut SampleRng) -> std::result::Result<Sample, BoxError> {
            let pixels = (0..600).map(|i| (i * (index + 1)) as u8).collect::<Vec<_>>();
            let image = Array::new([1, 20, 30], pixels)?;
            Ok(Sample::new().with("inputs", image).with("labels", Array::scalar(index as i64)))
        }
    }

    fn read(text: &str) -> Result<DatasetFactory> {
        let mut section = Config::from_text("c.toml", text)?.into_section();
        let mistakes = section.collect_mistakes();
        let steps = Steps::read(&mut section)?;
        section.finish()?;
        mistakes.check()?;
        Ok(steps.of(Box::new(|| Ok(Arc::new(Images)))))
    }

    fn batch(text: &str) -> Batch {
        let draws = [0, 3].map(|index| Draw { index, seed: 5, pass: 2 });
        let images = read(text).unwrap()().unwrap();
        images.finish(images.batch(&draws).unwrap(), &draws).unwrap()
    }

    #[test]
    fn every_transform_is_built_by_name() {
        let text = r#"
            pipeline = [
                { type = "Resize", size = 16 },
                { type = "Resize", scale = [40, 20], keep_ratio = true, interpolation = "bicubic" },
                { type = "RandomResizedCrop", size = [20, 30], scale = [0.5, 1], ratio = [0.5, 2] },
                { type = "RandomCrop", crop_size = 18, padding = 1, pad_if_needed = true },
                { type = "CenterCrop", crop_size = [17, 16] },
                { type = "RandomFlip", prob = 0.3, direction = "diagonal" },
                { type = "RandomHorizontalFlip" },
                { type = "RandomVerticalFlip", p = 0.1 },
                { type = "ColorJitter", brightness = 0.2, contrast = [0.9, 1.1], hue = [-0.1, 0.1] },
                { type = "RandomGrayscale", prob = 0.2 },
                { type = "Normalize", mean = [123.675], std = [58.395], field = "inputs" },
            ]
            batch_augments = [{ type = "MixUp", alpha = 0.2, num_classes = 4 },]"#;
        let made = batch(text);
        assert_eq!(made.get("inputs").unwrap().shape(), [2, 1, 17, 16]);
        assert_eq!(made.get("labels").unwrap().shape(), [2, 4]);
        assert_eq!(made, batch(text));
    }

    #[test]
    fn normalize_uses_mmcvs_scale_or_torchvisions_after_to_tensor() {
        let largest = |steps: &str| {
            let batch = batch(&format!("pipeline = [{steps}]"));
            let ArrayData::F32(floats) = batch.get("inputs").unwrap().data() else { panic!() };
            floats.iter().copied().fold(f32::MIN, f32::max)
        };
        let normalize =
            |mean, std| format!("{{ type = 'Normalize', mean = [{mean}], std = [{std}] }}");
        assert_eq!(largest(&normalize("127.5", "51")), 2.5);
        assert_eq!(largest(&normalize("0", "1")), 255.0);
        let to_tensor = "{ type = 'ToTensor' }";
        assert_eq!(largest(to_tensor), 1.0);
        assert_eq!(largest(&format!("{to_tensor}, {}", normalize("0.5", "0.25"))), 2.0);
        assert_eq!(largest(&format!("{to_tensor}, {}", normalize("0.5", "2"))), 0.25);
    }

    #[test]
    fn pipeline_is_applied_to_a_stream() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.txt");
        std::fs::write(&file, "one\ntwo\n").unwrap();
        let text = "pipeline = [{ type = 'Upper' }]";
        TRANSFORMS
            .register("Upper", |_| {
                ready(train_data::transforms::from_fn(|mut sample, _| {
                    let ArrayData::U8(text) = sample.take("text")?.into_data() else {
                        return Err("no text".into());
                    };
                    let text = text.to_ascii_uppercase();
                    Ok(sample.with("text", Array::new([text.len()], text)?))
                }))
            })
            .unwrap();
        let mut section = Config::from_text("c.toml", text).unwrap().into_section();
        let file = file.to_string_lossy().into_owned();
        let stream: StreamFactory = Box::new(move |options| Ok(Stream::text([file], options)?));
        let stream = Steps::read(&mut section).unwrap().of_stream(stream);
        let stream = stream(StreamOptions::default()).unwrap();
        let mut loader = StreamLoader::new(stream, 2, Workers::new(0)).unwrap();
        let batch = loader.next_batch().unwrap().unwrap();
        assert_eq!(*batch.get("text").unwrap().data(), b"ONETWO".to_vec().into());
    }

    #[test]
    fn empty_pipeline_changes_nothing() {
        assert_eq!(batch(""), batch("pipeline = []"));
        assert_eq!(batch("").get("inputs").unwrap().shape(), [2, 1, 20, 30]);
    }

    #[cfg(all(feature = "image", feature = "tokenizers"))]
    #[test]
    fn missing_files_are_reported_with_position() {
        let dataset = |text: &str| Config::from_text("c.toml", text).unwrap().into_section();
        let folder = dataset("type = 'ImageFolder'\nroot = 'no/such'");
        let error = crate::data::DATASETS.build(folder).err().unwrap().to_string();
        assert_eq!(error, "c.toml:2:8: `root`: no such directory: `no/such`");
        let steps = "pipeline = [{ type = 'Tokenize', tokenizer = 'no.json' }]";
        let error = read(steps).err().unwrap().to_string();
        assert_eq!(error, "c.toml:1:46: `tokenizer`: no such file: `no.json`");
    }

    #[test]
    fn errors_have_a_position() {
        let step = |step: &str| {
            let text = format!("pipeline = [\n  {{ type = \"RandomFlip\" }},\n  {{ {step} }},\n]");
            read(&text).err().expect(step).to_string()
        };
        for (mistake, told) in [
            (
                "type = 'Resiz', size = 2",
                "c.toml:3:12: unknown transform `Resiz`; did you mean `Resize`?",
            ),
            ("type = 'Resize', sice = 2", "missing key `size`"),
            ("type = 'Resize', scale = [1, 2, 3]", "`scale` must be one or two lengths"),
            ("type = 'CenterCrop', crop_size = 0", "`crop_size` must be one or two"),
            ("type = 'RandomFlip', prob = 2", "`prob` must be from 0 to 1, got 2"),
            ("type = 'RandomFlip', direction = 'left'", "unknown value `left`"),
            ("type = 'Normalize', mean = [nan], std = [1]", "both must be finite"),
            ("type = 'Normalize', mean = [1], std = [inf]", "both must be finite"),
            (
                "type = 'Normalize', mean = [1], std = [0]",
                "`mean` and `std` must have equal lengths",
            ),
            ("type = 'Normalize', mean = [1], std = [1], to_rgb = false", "`to_rgb` must be true"),
            (
                "type = 'ColorJitter', hue = 0.6",
                "`hue` must be a number, or two increasing numbers",
            ),
            ("type = 'ColorJitter', contrast = -1", "`contrast` must be a number"),
            (
                "type = 'RandomResizedCrop', size = 2, scale = [1, 0.5]",
                "`scale` must be two numbers",
            ),
            ("type = 'PadTokens', length = 3", "missing key `token`"),
            ("type = 'PackInputs'", "`PackInputs` is not supported: samples are arrays"),
        ] {
            let said = step(mistake);
            assert!(said.contains(told), "{said}\n{told}");
        }
        let error = read("batch_augments = [{ type = 'CutMax', num_classes = 3 }]").err().unwrap();
        assert!(error.to_string().contains("did you mean `CutMix`?"), "{error}");
        for (keys, told) in [
            ("alpha = inf, num_classes = 3", "`alpha` must be a finite number above 0, got inf"),
            ("alpha = nan, num_classes = 3", "`alpha` must be a finite number above 0, got NaN"),
            ("num_classes = 0", "`num_classes` must be at least 1, got 0"),
        ] {
            let error = read(&format!("batch_augments = [{{ type = 'MixUp', {keys} }}]"));
            let error = error.err().expect(keys).to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}
