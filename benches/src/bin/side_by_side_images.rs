//! Our side of `images.sh`: `side_by_side_images FOLDER WORKERS` prints the images a second that a
//! loader of so many workers makes of a folder of JPEGs: resized, cropped, flipped, normalized, in
//! batches of 32.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![expect(clippy::print_stdout, reason = "the script reads the output")]

use std::sync::Arc;
use std::time::Instant;

use train_data::transforms::{CenterCrop, Normalize, Pipeline, RandomFlip, Resize, Transformed};
use train_data::{DataLoader, Dataset, DefaultSampler, ImageFolder, Workers};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let workers = args[1].parse().unwrap();
    let pipeline = Pipeline::new()
        .then(Resize::short_edge(256))
        .then(CenterCrop::square(224))
        .then(RandomFlip::default())
        .then(Normalize::new([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]));
    let images = Transformed::new(ImageFolder::new(&args[0]).unwrap(), pipeline);
    let len = images.len();
    let sampler =
        DefaultSampler { len, shuffle: true, seed: 1, rank: 0, world_size: 1, round_up: true };
    let builder = DataLoader::builder(Arc::new(images), sampler).batch_size(32);
    let loader = builder.workers(Workers::new(workers).persistent()).build().unwrap();
    let mut seconds = 0.0;
    // The first epoch brings files into memory and starts the workers.
    for epoch in 0..2 {
        let start = Instant::now();
        let seen: usize = loader.batches(epoch).map(|batch| batch.unwrap().len()).sum();
        assert_eq!(seen, len);
        seconds = start.elapsed().as_secs_f64();
    }
    println!("{:.1}", len as f64 / seconds);
}
