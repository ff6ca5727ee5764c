//! The types of `cuda.rs` without the feature `cuda`; they have no values.

#![expect(missing_docs, reason = "see `cuda.rs`")]

use std::convert::Infallible;
use std::marker::PhantomData;

#[derive(Clone, Copy, Debug)]
pub struct DeviceParams<'a>(Infallible, PhantomData<&'a ()>);

#[derive(Clone, Copy, Debug)]
pub enum DeviceParam {}

#[derive(Clone, Debug)]
pub enum GradStats {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Launches {}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tuned {}
