//! Data for training: data sets, samplers, loaders, batches and metrics.
//!
//! A [`Dataset`] makes [`Sample`]s by index, a [`DataLoader`] cuts a [`DefaultSampler`]'s order
//! into [`Batch`]es: named, shaped arrays in host memory. A [`Stream`] reads samples without a
//! length from shards, and a [`StreamLoader`] makes batches of them. [`tokens`] are files of
//! tokens. [`transforms`] change samples and batches. [`Workers`] does work on threads ahead of
//! time, in order. [`metrics`] are sums over a data set that ranks add up. There is no training
//! loop, tensor or collective here.

// docs.rs notes at each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod array;
mod collate;
mod dataset;
mod error;
#[cfg(feature = "image")]
mod image_folder;
mod loader;
pub mod metrics;
mod named;
mod sampler;
pub mod stream;
pub mod tokens;
pub mod transforms;
mod workers;

pub use array::{Array, ArrayData, Batch, Sample};
pub use collate::PadCollate;
pub use dataset::{Dataset, Draw, SampleRng};
pub use error::{BoxError, Error, Result};
#[cfg(feature = "image")]
pub use image_folder::ImageFolder;
pub use loader::{Collate, DataLoader, DataLoaderBuilder, DataPosition, IterScale, Layout};
pub use sampler::DefaultSampler;
pub use stream::{Stream, StreamLoader, StreamOptions, StreamPosition};
pub use workers::{OrderedMap, WorkerError, Workers};

/// The examples of the README.
#[cfg(all(doctest, feature = "image", feature = "tokenizers"))]
#[doc = include_str!("../README.md")]
pub struct Readme;
