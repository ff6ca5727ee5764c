//! Slices of device memory and their element types.

use std::fmt;

use cudarc::driver::{CudaSlice, DevicePtr};

/// The element type of a [`DeviceSlice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Size of an element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The number of this type in kernels.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["f32", "f16", "bf16"][*self as usize])
    }
}

/// A slice of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Address of the first element, a `CUdeviceptr`.
    pub ptr: u64,
    /// Number of elements.
    pub len: usize,
    /// Element type.
    pub dtype: DType,
}

macro_rules! of_slices {
    ($($element:ty => $dtype:ident),*) => {$(
        impl From<&CudaSlice<$element>> for DeviceSlice {
            /// All elements of a slice of cudarc. Use it only on the slice's stream.
            fn from(slice: &CudaSlice<$element>) -> Self {
                let (ptr, _) = slice.device_ptr(slice.stream());
                Self { ptr, len: slice.len(), dtype: DType::$dtype }
            }
        }
    )*};
}
of_slices!(f32 => F32, half::f16 => F16, half::bf16 => Bf16);
