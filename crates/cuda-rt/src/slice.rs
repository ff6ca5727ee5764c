//! Elements in a device's memory, and their types.

use std::fmt;

use cudarc::driver::{CudaSlice, DevicePtr};

/// The type of elements in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl DType {
    /// Bytes of an element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The number that kernels know it by.
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

/// Elements in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Address of the first element, a `CUdeviceptr`.
    pub ptr: u64,
    /// Number of elements.
    pub len: usize,
    /// Their type.
    pub dtype: DType,
}

macro_rules! of_slices {
    ($($element:ty => $dtype:ident),*) => {$(
        impl From<&CudaSlice<$element>> for DeviceSlice {
            /// All of a slice of cudarc; its stream must be the one it is used on.
            fn from(slice: &CudaSlice<$element>) -> Self {
                let (ptr, _) = slice.device_ptr(slice.stream());
                Self { ptr, len: slice.len(), dtype: DType::$dtype }
            }
        }
    )*};
}
of_slices!(f32 => F32, half::f16 => F16, half::bf16 => Bf16);
