//! Tests that compare transforms with torchvision's, on small images and, optionally, on many.

use std::process::Command;
use std::sync::Arc;

use serde_json::Value;

use super::*;
use crate::{DataLoader, DataLoaderBuilder, DefaultSampler, PadCollate};

/// Bytes of the same random number generator as in `transforms.py`.
fn pixels(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = (state * 1_103_515_245 + 12_345) % (1 << 31);
        (state >> 16) as u8
    };
    let all = (0..count).map(|_| next());
    if seed.is_multiple_of(4) {
        all.map(|b| if b < 128 { 0 } else { 255 }).collect()
    } else {
        all.collect()
    }
}

/// One line of the vectors.
struct Case<'a>(&'a Value);

impl Case<'_> {
    fn number(&self, key: &str) -> f64 {
        self.0[key].as_f64().unwrap()
    }

    fn numbers(&self, key: &str) -> Vec<f64> {
        self.0[key].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect()
    }

    fn counts<const N: usize>(&self, key: &str) -> [usize; N] {
        let numbers: Vec<_> = self.numbers(key).iter().map(|n| *n as usize).collect();
        numbers.try_into().unwrap()
    }

    fn pair(&self, key: &str) -> [f64; 2] {
        self.numbers(key).try_into().unwrap()
    }

    fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap()
    }

    fn bytes(&self, key: &str) -> Vec<u8> {
        let (digits, _) = self.text(key).as_bytes().as_chunks::<2>();
        let byte = |d: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap();
        digits.iter().map(byte).collect()
    }

    fn floats(&self, key: &str) -> Vec<u32> {
        self.bytes(key).as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }

    fn image(&self) -> Array {
        let shape: [usize; 3] = self.counts("shape");
        let count = shape.iter().product();
        Array::new(shape, pixels(count, self.number("seed") as u64)).unwrap()
    }

    /// Asserts that pixels are equal to the last bit.
    fn assert_pixels(&self, got: &Array) {
        assert_eq!(*got.data(), self.bytes("pixels").into(), "{}", self.0);
    }

    fn assert_floats(&self, got: &Array) {
        let ArrayData::F32(got) = got.data() else {
            panic!("{} are no floats", got.data().type_name())
        };
        let bits: Vec<_> = got.iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, self.floats("floats"), "{}", self.0);
    }
}

fn filter(name: &str) -> Filter {
    match name {
        "NEAREST" => Filter::Nearest,
        "BOX" => Filter::Box,
        "BILINEAR" => Filter::Bilinear,
        "HAMMING" => Filter::Hamming,
        "BICUBIC" => Filter::Bicubic,
        _ => Filter::Lanczos,
    }
}

fn check_resized(case: &Case<'_>) {
    let got = resize(&case.image(), case.counts("to"), filter(case.text("filter"))).unwrap();
    case.assert_pixels(&got);
}

fn check_short_edge(case: &Case<'_>) {
    let [height, width] = case.counts("size");
    let to: [usize; 2] = case.counts("to");
    if to.contains(&0) {
        return;
    }
    let image = Array::new([1, height, width], vec![0_u8; height * width]).unwrap();
    let resize = Resize::short_edge(case.number("short") as usize);
    let got = resize.image(image, &mut Draw::from(0).random()).unwrap();
    assert_eq!(got.shape()[1..], to, "{}", case.0);
}

fn check_cropped(case: &Case<'_>) {
    case.assert_pixels(&center_crop(&case.image(), case.counts("to")).unwrap());
}

fn check_region(case: &Case<'_>) {
    let (scale, ratio) = (case.pair("scale"), case.pair("ratio"));
    let crop = RandomResizedCrop { scale, ratio, ..RandomResizedCrop::square(1) };
    let units = case.numbers("units");
    let mut units = units.iter().copied();
    let region = crop.region(case.counts("size"), || units.next().unwrap());
    let Region { top, left, height, width } = region;
    let expected: [usize; 4] = case.counts("region");
    if expected[2] * expected[3] == 0 {
        // For some images of a few pixels torchvision's is empty, an error later.
        assert!(height * width > 0, "{}", case.0);
        return;
    }
    assert_eq!([top as usize, left as usize, height, width], expected, "{}", case.0);
}

fn check_jittered(case: &Case<'_>) {
    let (image, factor) = (case.image(), case.number("factor"));
    let got = match case.text("name") {
        "brightness" => adjust_brightness(image, factor as f32),
        "contrast" => adjust_contrast(image, factor as f32),
        "saturation" => adjust_saturation(image, factor as f32),
        _ => adjust_hue(image, factor),
    };
    case.assert_pixels(&got.unwrap());
}

fn check_normalized(case: &Case<'_>) {
    let floats = |key| case.numbers(key).iter().map(|x| *x as f32).collect::<Vec<_>>();
    let image = to_tensor(case.image()).unwrap();
    case.assert_floats(&normalize(image, &floats("mean"), &floats("std")).unwrap());
}

fn check_mixed(case: &Case<'_>) {
    let shape: [usize; 4] = case.counts("shape");
    let count = shape.iter().product();
    let bytes = pixels(count, case.number("seed") as u64);
    let floats: Vec<_> = bytes.iter().map(|byte| f32::from(*byte) / 255.0).collect();
    let labels: Vec<_> = (0..shape[0] as i64).collect();
    let batch = Batch::new()
        .with("inputs", Array::new(shape, floats).unwrap())
        .with("labels", Array::new([shape[0]], labels).unwrap());
    let lambda = case.number("lambda");
    let got = if case.0.get("region").is_none() {
        mix_up(batch, lambda, shape[0])
    } else {
        let region = CutMix::region([shape[2], shape[3]], lambda, case.counts("center"));
        let Region { top, left, height, width } = region;
        let got = [top as usize, left as usize, height, width];
        assert_eq!(got, case.counts("region"), "{}", case.0);
        cut_mix(batch, region, shape[0])
    };
    let got = got.unwrap();
    case.assert_floats(got.get("inputs").unwrap());
    let labels: Vec<_> = case.numbers("labels").iter().map(|x| *x as f32).collect();
    assert_eq!(*got.get("labels").unwrap().data(), labels.into(), "{}", case.0);
}

fn check_all(text: &str) {
    let all: Value = serde_json::from_str(text).unwrap();
    type Check = fn(&Case<'_>);
    let checks: [(&str, Check); 7] = [
        ("resized", check_resized),
        ("short_edges", check_short_edge),
        ("cropped", check_cropped),
        ("regions", check_region),
        ("jittered", check_jittered),
        ("normalized", check_normalized),
        ("mixed", check_mixed),
    ];
    for (name, check) in checks {
        let cases = all[name].as_array().unwrap();
        assert!(cases.len() >= 18, "{name}");
        cases.iter().for_each(|case| check(&Case(case)));
    }
}

#[test]
fn small_images_are_torchvisions_to_the_last_bit() {
    check_all(include_str!("../../tests/vectors/transforms.json"));
}

#[test]
#[ignore = "needs torchvision: TORCH_PYTHON, or python3, imports it"]
fn many_images_are_torchvisions_to_the_last_bit() {
    let python = std::env::var("TORCH_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/transforms.py");
    let output = Command::new(python).args([script, "--many", "7"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    check_all(&String::from_utf8(output.stdout).unwrap());
}

/// An image whose pixels count up.
fn counting(shape: [usize; 3]) -> Array {
    let count: usize = shape.iter().product();
    Array::new(shape, (0..count).map(|i| i as u8).collect::<Vec<_>>()).unwrap()
}

fn values(image: &Array) -> Vec<u8> {
    bytes(image).unwrap().to_vec()
}

#[test]
fn flips_are_their_own_inverse() {
    let image = counting([2, 3, 2]);
    let flipped = |direction| flip(image.clone(), direction).unwrap();
    assert_eq!(values(&flipped(Direction::Horizontal))[..6], [1, 0, 3, 2, 5, 4]);
    assert_eq!(values(&flipped(Direction::Vertical))[..6], [4, 5, 2, 3, 0, 1]);
    assert_eq!(values(&flipped(Direction::Diagonal))[..6], [5, 4, 3, 2, 1, 0]);
    for direction in [Direction::Horizontal, Direction::Vertical, Direction::Diagonal] {
        assert_eq!(flip(flipped(direction), direction).unwrap(), image);
    }
}

#[test]
fn crops_beyond_an_image_are_zeros() {
    let image = counting([1, 2, 3]);
    let region = |top, left, height, width| Region { top, left, height, width };
    let cropped = |region| values(&crop(&image, region).unwrap());
    assert_eq!(cropped(region(0, 1, 2, 2)), [1, 2, 4, 5]);
    assert_eq!(cropped(region(-1, -1, 3, 3)), [0, 0, 0, 0, 0, 1, 0, 3, 4]);
    assert_eq!(cropped(region(1, 2, 2, 2)), [5, 0, 0, 0]);
    assert_eq!(cropped(region(7, -9, 1, 2)), [0, 0]);
    for far in [-100, -2, 3, 4, 100, isize::MIN, isize::MAX] {
        assert_eq!(cropped(region(0, far, 2, 2)), [0; 4], "left {far}");
        assert_eq!(cropped(region(far, 0, 2, 2)), [0; 4], "top {far}");
    }
    assert!(crop(&image, region(0, 0, 0, 2)).is_err());
}

#[test]
fn normalize_takes_numbers_in_the_images_own_unit() {
    let image = Array::new([2, 1, 2], vec![0_u8, 255, 51, 204]).unwrap();
    let floats = |image: Result<Array>| match image.unwrap().into_data() {
        ArrayData::F32(floats) => floats,
        other => panic!("{}", other.type_name()),
    };
    // MMCV's numbers of bytes, also those that change nothing.
    let got = normalize(image.clone(), &[127.5, 51.0], &[51.0, 2.0]);
    assert_eq!(floats(got), [-2.5, 2.5, 0.0, 76.5]);
    assert_eq!(floats(normalize(image.clone(), &[0.0], &[1.0])), [0.0, 255.0, 51.0, 204.0]);
    // torchvision's of floats from 0 to 1, a deviation of 2 among them.
    let unit = to_tensor(image.clone()).unwrap();
    assert_eq!(floats(normalize(unit.clone(), &[0.5], &[0.25, 2.0])), [-2.0, 2.0, -0.15, 0.15]);
    assert_eq!(to_tensor(unit.clone()).unwrap(), unit);
    let error = normalize(image, &[0.485], &[0.229]).unwrap_err().to_string();
    assert!(error.contains("put ToTensor before Normalize"), "{error}");
}

#[test]
fn random_crops_reach_all_places_and_only_these() {
    let crop = RandomCrop { padding: 1, ..RandomCrop::square(2) };
    let mut seen = std::collections::BTreeSet::new();
    for index in 0..200 {
        let image = Array::new([1, 2, 2], vec![1_u8, 2, 3, 4]).unwrap();
        seen.insert(values(&crop.image(image, &mut Draw::from(index).random()).unwrap()));
    }
    assert_eq!(seen.len(), 9);
    let refused = RandomCrop::square(3).image(counting([1, 2, 2]), &mut Draw::from(0).random());
    assert!(refused.unwrap_err().to_string().contains("`pad_if_needed`"));
    // A crop smaller than the padding may miss the image.
    let crop = RandomCrop { padding: 5, ..RandomCrop::square(2) };
    let image = |index| crop.image(counting([1, 4, 4]), &mut Draw::from(index).random()).unwrap();
    let crops: Vec<_> = (0..200).map(|index| values(&image(index))).collect();
    assert!(crops.contains(&vec![0; 4]) && crops.contains(&vec![5, 6, 9, 10]));
    let crop = RandomCrop { padding: usize::MAX / 2, ..crop };
    assert!(crop.image(counting([1, 4, 4]), &mut Draw::from(0).random()).is_err());
    let padded = RandomCrop { pad_if_needed: true, ..RandomCrop::square(3) };
    let got = padded.image(counting([1, 2, 2]), &mut Draw::from(0).random()).unwrap();
    assert_eq!(got.shape(), [1, 3, 3]);
}

#[test]
fn a_resized_crop_is_a_crop_resized() {
    let image = Array::new([3, 20, 30], pixels(1800, 1)).unwrap();
    let transform = RandomResizedCrop::square(9);
    for index in 0..20 {
        let mut random = Draw::from(index).random();
        let got = transform.image(image.clone(), &mut random.clone()).unwrap();
        let region = transform.region([20, 30], || random::unit(&mut random));
        let expected = resize(&crop(&image, region).unwrap(), [9, 9], Filter::Bilinear).unwrap();
        assert_eq!(got, expected);
    }
}

#[test]
fn sizes_within_a_box_keep_the_ratio() {
    // As MMCV's `rescale_size` rounds.
    let of = |size, within| {
        let resize = Resize { to: ResizeTo::Within(within), filter: Filter::Nearest };
        resize.image(counting(size), &mut Draw::from(0).random()).unwrap().shape().to_vec()
    };
    assert_eq!(of([1, 30, 40], [10, 10]), [1, 8, 10]);
    assert_eq!(of([1, 40, 30], [20, 10]), [1, 13, 10]);
    assert_eq!(of([1, 3, 4], [30, 100]), [1, 30, 40]);
}

#[test]
fn images_that_become_too_large_are_refused() {
    let random = &mut Draw::from(0).random();
    let long = || Array::new([3, 1, 65_535], vec![0_u8; 3 * 65_535]).unwrap();
    let mut refused = |transform: &dyn ImageTransform, image: Array| {
        let error = transform.image(image, random).unwrap_err().to_string();
        assert!(error.contains("more than 268435456 values"), "{error}");
        error
    };
    let error = refused(&Resize::short_edge(1 << 40), counting([1, 2, 4]));
    assert!(error.contains("from 2 x 4 to 1099511627776 x 2199023255552"), "{error}");
    refused(&Resize::short_edge(usize::MAX / 2), counting([1, 2, 4]));
    refused(&Resize { to: ResizeTo::Within([1 << 40; 2]), ..Resize::short_edge(1) }, long());
    refused(&RandomResizedCrop::square(1 << 40), long());
    refused(&CenterCrop::square(1 << 40), long());
    for size in [1 << 40, usize::MAX - 1] {
        refused(&RandomCrop { pad_if_needed: true, ..RandomCrop::square(size) }, long());
    }
    let error = refused(&Resize::short_edge(256), long());
    assert!(error.contains("from 1 x 65535 to 256 x 16776960"), "{error}");
}

#[test]
fn resized_crops_check_their_ranges() {
    let refused = |crop: RandomResizedCrop, what: &str| {
        let error = crop.image(counting([1, 40, 40]), &mut Draw::from(0).random()).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    };
    let crop = RandomResizedCrop::square(2);
    refused(RandomResizedCrop::square(0), "at least 1 x 1");
    for range in [[2.0, 1.0], [0.0, 1.0], [f64::NAN, 1.0], [1.0, f64::INFINITY]] {
        refused(RandomResizedCrop { ratio: range, ..crop }, "`ratio` must be");
        refused(RandomResizedCrop { scale: range, ..crop }, "`scale` must be");
    }
}

#[test]
fn jitter_is_of_its_functions_in_any_order() {
    let image = Array::new([3, 6, 5], pixels(90, 3)).unwrap();
    let jitter = ColorJitter::new(0.4, 0.4, 0.4, 0.1);
    let results: std::collections::BTreeSet<_> = (0..20)
        .map(|i| values(&jitter.image(image.clone(), &mut Draw::from(i).random()).unwrap()))
        .collect();
    assert_eq!(results.len(), 20);
    let none = ColorJitter::default().image(image.clone(), &mut Draw::from(0).random()).unwrap();
    assert_eq!(none, image);
    let gray = RandomGrayscale(1.0).image(image, &mut Draw::from(0).random()).unwrap();
    assert_eq!(values(&gray)[..30], values(&gray)[60..]);
}

#[test]
fn images_of_another_form_are_refused() {
    let text = |result: Result<Array>| result.unwrap_err().to_string();
    let flat = Array::new([6], vec![0_u8; 6]).unwrap();
    assert!(text(flip(flat, Direction::Vertical)).contains("[channels, height, width], not [6]"));
    let floats = Array::new([1, 2, 3], vec![0.0_f32; 6]).unwrap();
    assert!(text(resize(&floats, [1, 1], Filter::Box)).contains("bytes (u8), not f32"));
    assert!(text(adjust_hue(counting([2, 1, 1]), 0.1)).contains("1 or 3 channels, not 2"));
    assert!(text(normalize(floats, &[0.0; 2], &[1.0])).contains("2 means"));
    assert!(resize(&counting([1, 1, 1]), [0, 1], Filter::Nearest).is_err());
    let empty = Array::new([3, 0, 2], Vec::<u8>::new()).unwrap();
    assert!(resize(&empty, [1, 1], Filter::Nearest).is_err());
}

/// Images 2 x 4 that count up, labelled by their index.
struct Images;

impl Dataset for Images {
    fn len(&self) -> usize {
        6
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let label = Array::scalar(index as i64);
        Ok(Sample::new().with("inputs", counting([1, 2, 4])).with("labels", label))
    }
}

/// A batch as a loader makes it.
fn made(images: &impl Dataset, draws: &[Draw]) -> Result<Batch, BoxError> {
    images.finish(images.batch(draws)?, draws)
}

#[test]
fn a_loader_transforms_batches_of_its_own_collate_function() {
    let images = Transformed::new(Images, Pipeline::new().then(Normalize::new([127.5], [51.0])))
        .with_batch_transform(MixUp { alpha: 1.0, num_classes: 6 });
    let builder = DataLoader::builder(Arc::new(images), DefaultSampler::new(6)).batch_size(4);
    let batches = |builder: DataLoaderBuilder| {
        builder.build().unwrap().batches(0).map(Result::unwrap).collect::<Vec<_>>()
    };
    let mixed = batches(builder.clone());
    assert_eq!(mixed[0].get("labels").unwrap().shape(), [4, 6]);
    assert_eq!(batches(builder.collate(|all| Ok(PadCollate::new(0.0).collate(all)?))), mixed);
}

#[test]
fn a_pipeline_is_the_same_for_the_same_draw_alone() {
    let pipeline =
        || Pipeline::new().then(RandomCrop::square(2)).then(Normalize::new([127.5], [127.5]));
    let images = Transformed::new(Images, pipeline())
        .with_batch_transform(MixUp { alpha: 1.0, num_classes: 6 });
    let draws = |indices: &[usize]| {
        indices.iter().map(|i| Draw { index: *i, seed: 3, pass: 1 }).collect::<Vec<_>>()
    };
    let batch = made(&images, &draws(&[2, 0, 5])).unwrap();
    assert_eq!(batch, made(&images, &draws(&[2, 0, 5])).unwrap());
    assert_eq!(batch.get("inputs").unwrap().shape(), [3, 1, 2, 2]);
    assert_eq!(batch.get("labels").unwrap().shape(), [3, 6]);
    let alone = Transformed::new(Images, pipeline());
    let of = |indices: &[usize]| match alone
        .batch(&draws(indices))
        .unwrap()
        .take("inputs")
        .unwrap()
        .into_data()
    {
        ArrayData::F32(floats) => floats,
        other => panic!("{}", other.type_name()),
    };
    // The result does not depend on the other samples of the batch.
    assert_eq!(of(&[2, 0, 5])[8..], of(&[5]));
}

#[test]
fn a_failing_transform_is_named() {
    let pipeline = Pipeline::new().then(RandomFlip::default()).then(CenterCrop::square(0));
    assert_eq!(format!("{pipeline:?}"), r#"["RandomFlip", "CenterCrop"]"#);
    let images = Transformed::new(Images, pipeline);
    let error = images.batch(&[4.into()]).unwrap_err().to_string();
    assert!(error.contains("sample 4: transform 2 (`CenterCrop`): a crop must be"), "{error}");
    let masks = Pipeline::new().then(On("mask".into(), RandomFlip::default()));
    let error = masks.apply(Sample::new(), &mut Draw::from(0).random()).unwrap_err().to_string();
    assert!(error.contains("transform 1 (`RandomFlip`)") && error.contains("`mask`"), "{error}");
    let own = Pipeline::new().then(from_fn(|_, _| Err("no".into())));
    let error = own.apply(Sample::new(), &mut Draw::from(0).random()).unwrap_err().to_string();
    assert!(error.contains("a_failing_transform_is_named`): no"), "{error}");
}

#[test]
fn labels_that_are_no_class_are_refused_by_mixing() {
    let images = Transformed::new(Images, Pipeline::new())
        .with_batch_transform(CutMix { alpha: 1.0, num_classes: 5 });
    assert!(made(&images, &[1.into(), 2.into()]).is_ok());
    let error = made(&images, &[1.into(), 5.into()]).unwrap_err().to_string();
    assert!(error.contains("label 5 is none of 5 classes"), "{error}");
    let bytes = Transformed::new(Images, Pipeline::new())
        .with_batch_transform(MixUp { alpha: 1.0, num_classes: 6 });
    let error = made(&bytes, &[1.into()]).unwrap_err().to_string();
    assert!(error.contains("normalize them before"), "{error}");
}

#[test]
fn mixing_checks_alpha_and_the_number_of_classes() {
    let refused = |transform: &dyn BatchTransform, what: &str| {
        let floats = Array::new([2, 1, 1, 1], vec![0.0_f32; 2]).unwrap();
        let batch = Batch::new()
            .with("inputs", floats)
            .with("labels", Array::new([2], vec![0_i64; 2]).unwrap());
        let error = transform.apply(batch, &mut Draw::from(0).random()).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    for (num_classes, what) in
        [(0, "`num_classes` must be at least 1"), (usize::MAX / 2, "more than 268435456 values")]
    {
        refused(&MixUp { alpha: 1.0, num_classes }, what);
        refused(&CutMix { alpha: 1.0, num_classes }, what);
    }
    for alpha in [0.0, f64::NEG_INFINITY, f64::NAN, f64::INFINITY] {
        refused(&MixUp { alpha, num_classes: 1 }, "`alpha` must be");
        refused(&CutMix { alpha, num_classes: 1 }, "`alpha` must be");
    }
}

/// The tokens of a sample: one for each byte.
fn tokenized(text: &str) -> Sample {
    let sample =
        Sample::new().with("text", Array::new([text.len()], text.as_bytes().to_vec()).unwrap());
    let tokenize = Tokenize::new(|text| Ok(text.bytes().map(i64::from).collect()));
    tokenize.apply(sample, &mut Draw::from(0).random()).unwrap()
}

fn ids(batch: &Batch, field: &str) -> Vec<i64> {
    match batch.get(field).unwrap().data() {
        ArrayData::I64(tokens) => tokens.clone(),
        other => panic!("{}", other.type_name()),
    }
}

#[test]
fn texts_are_truncated_and_padded() {
    let pipeline = Pipeline::new().then(TruncateTokens(3)).then(PadTokens { length: 4, token: 9 });
    let made = |text| pipeline.apply(tokenized(text), &mut Draw::from(0).random()).unwrap();
    let batch = Batch::collate(vec![made("\x01\x02\x03\x04\x05"), made("\x06")]).unwrap();
    assert_eq!(ids(&batch, "input_ids"), [1, 2, 3, 9, 6, 9, 9, 9]);
    assert_eq!(ids(&batch, "attention_mask"), [1, 1, 1, 0, 1, 0, 0, 0]);
    assert!(batch.get("text").is_err());
    let long =
        PadTokens { length: 1, token: 0 }.apply(tokenized("ab"), &mut Draw::from(0).random());
    assert!(long.unwrap_err().to_string().contains("truncate before"));
    let broken = Sample::new().with("text", Array::new([1], vec![0xff_u8]).unwrap());
    let tokenize = Tokenize::new(|_| Ok(Vec::new()));
    let error = tokenize.apply(broken, &mut Draw::from(0).random()).unwrap_err().to_string();
    assert!(error.contains("not UTF-8"), "{error}");
}

#[test]
fn packed_rows_hold_every_token_once() {
    let pack = |texts: &[&str], length| {
        pack(texts.iter().map(|text| tokenized(text)).collect(), length, 0).unwrap()
    };
    let batch = pack(&["\x01\x02\x03", "\x04", "\x05\x06"], 4);
    assert_eq!(batch.get("labels").unwrap().shape(), [2, 4]);
    assert_eq!(ids(&batch, "input_ids"), [1, 2, 3, 0, 4, 0, 5, 6]);
    assert_eq!(ids(&batch, "labels"), [2, 3, 0, 4, 0, 5, 6, 0]);
    let batch = pack(&["\x01\x02"], 4);
    assert_eq!(ids(&batch, "input_ids"), [1, 2, 0, 0]);
    assert_eq!(ids(&batch, "labels"), [2, 0, IGNORED, IGNORED]);
    assert!(pack(&[], 4).is_empty());
    // A text without tokens has its end alone.
    assert_eq!(ids(&pack(&["", "\x01"], 2), "input_ids"), [0, 1]);
}

#[test]
fn packing_refuses_a_batch_without_a_label() {
    let error = pack(vec![tokenized("")], 4, 0).unwrap_err().to_string();
    assert!(error.contains("the batch has no tokens"), "{error}");
}

#[cfg(feature = "tokenizers")]
#[test]
fn a_file_has_its_tokenizer() {
    let file = std::env::temp_dir().join(format!("tokenizer-{}.json", std::process::id()));
    let text = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"the": 0, "cat": 1, "?": 2}, "unk_token": "?"}}"#;
    std::fs::write(&file, text).unwrap();
    let tokenize = Tokenize::from_file(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let text = "the dog the cat".as_bytes().to_vec();
    let sample = Sample::new().with("text", Array::new([text.len()], text).unwrap());
    let made = tokenize.apply(sample, &mut Draw::from(0).random()).unwrap();
    assert_eq!(*made.get("input_ids").unwrap().data(), vec![0_i64, 2, 0, 1].into());
    let error = Tokenize::from_file(&file).unwrap_err().to_string();
    assert!(error.contains("cannot read the tokenizer") && error.contains("json"), "{error}");
}

#[cfg(feature = "image")]
mod images {
    use image::{DynamicImage, ImageBuffer, ImageFormat, Rgb};

    use super::*;

    fn encoded(format: ImageFormat) -> Vec<u8> {
        let smooth = |x: u32, y: u32| Rgb([(8 * x) as u8, (9 * y) as u8, (x + 3 * y) as u8]);
        let image = DynamicImage::from(ImageBuffer::from_fn(16, 24, smooth));
        let mut file = std::io::Cursor::new(Vec::new());
        image.write_to(&mut file, format).unwrap();
        file.into_inner()
    }

    #[test]
    fn files_are_decoded_to_planes() {
        let image = decode(&encoded(ImageFormat::Png)).unwrap();
        assert_eq!(image.shape(), [3, 24, 16]);
        let pixels = values(&image);
        let at = |channel: usize, y: usize, x: usize| pixels[(channel * 24 + y) * 16 + x];
        assert_eq!([at(0, 3, 5), at(1, 3, 5), at(2, 3, 5)], [40, 27, 14]);
        let jpeg = values(&decode(&encoded(ImageFormat::Jpeg)).unwrap());
        let most = pixels.iter().zip(&jpeg).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(most.unwrap() < 40, "{most:?}");
    }

    #[test]
    fn files_that_are_broken_are_refused() {
        let file = encoded(ImageFormat::Jpeg);
        assert!(decode(&file[..file.len() / 2]).is_err());
        let error = decode(b"GIF89a").unwrap_err().to_string();
        assert!(error.contains("not a JPEG or PNG"), "{error}");
        assert!(decode(&encoded(ImageFormat::Png)[..40]).is_err());
    }

    #[test]
    fn images_that_are_decoded_stay() {
        let gray = Decode { gray: true };
        let random = &mut Draw::from(0).random();
        let file = encoded(ImageFormat::Png);
        let image = gray.image(Array::new([file.len()], file).unwrap(), random).unwrap();
        assert_eq!(image.shape(), [1, 24, 16]);
        assert_eq!(gray.image(image.clone(), random).unwrap(), image);
    }
}
