//! Tensors in device memory, and other arguments and results of a
//! [`DeviceOptimizer`](crate::DeviceOptimizer).

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod without_cuda;

#[cfg(feature = "cuda")]
pub(crate) use self::cuda::TakesStats;
#[cfg(feature = "cuda")]
pub use self::cuda::{DeviceParam, DeviceParams, GradStats, LaunchShape, Launches, Tuned};
#[cfg(not(feature = "cuda"))]
pub use self::without_cuda::{DeviceParam, DeviceParams, GradStats, Launches, Tuned};
