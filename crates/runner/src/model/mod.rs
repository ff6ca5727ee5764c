//! Models and their wrappers by name.
//!
//! A [`ModelWrapper`] stores gradients and averages them over ranks. To write your own, implement
//! the trait, or [`WrapperOver`] to change parts of another wrapper, and register it in
//! [`MODEL_WRAPPERS`].

mod builtin;

pub use builtin::{MODEL_WRAPPERS, MODELS};
pub use train_step::{
    DistributedDataParallel, ModelWrapper, WrapperFactory, WrapperOver, with_host_grads,
};

pub use crate::engine::{LoraOptions, ModelContext, ModelFactory};
