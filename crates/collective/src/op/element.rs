//! Element types of the collectives.
//!
//! [`Element`] is sealed: every backend, kernel and fingerprint knows all types. Any byte pattern
//! is a valid value of each type, so memory may be received into and allocated zeroed. The
//! exception is `bool`: a backend sets its bytes to 0 or 1 before it returns.

use std::fmt;

use half::{bf16, f16};

macro_rules! elements {
    ($($(#[$doc:meta])* $dtype:ident = $type:ident,)*) => {
        /// The element type of a buffer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $dtype,)*
        }

        impl DType {
            /// All types, in the order of their codes.
            pub const ALL: [Self; 15] = [$(Self::$dtype),*];

            /// Returns the size of one element in bytes.
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$dtype => size_of::<$type>(),)*
                }
            }

            /// Returns the type's name in Rust.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$dtype => stringify!($type),)*
                }
            }
        }

        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    /// IEEE 754 half precision.
    F16 = f16,
    /// bfloat16: the upper half of an `f32`.
    Bf16 = bf16,
    /// IEEE 754 single precision.
    F32 = f32,
    /// IEEE 754 double precision.
    F64 = f64,
    /// Signed byte.
    I8 = i8,
    /// Unsigned byte.
    U8 = u8,
    /// Signed 32-bit integer.
    I32 = i32,
    /// Signed 64-bit integer.
    I64 = i64,
    /// Unsigned 64-bit integer.
    U64 = u64,
    /// Signed 16-bit integer.
    I16 = i16,
    /// Unsigned 16-bit integer.
    U16 = u16,
    /// Unsigned 32-bit integer.
    U32 = u32,
    /// Boolean: one byte, 0 or 1.
    Bool = bool,
    /// 8-bit float, see [`F8E4M3`].
    F8E4M3 = F8E4M3,
    /// 8-bit float, see [`F8E5M2`].
    F8E5M2 = F8E5M2,
}

/// The bits of an 8-bit float with 4 bits of exponent and 3 of mantissa. Can be moved, not reduced.
#[doc(alias = "float8_e4m3fn")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// The bits of an 8-bit float with 5 bits of exponent and 2 of mantissa. Can be moved, not reduced.
#[doc(alias = "float8_e5m2")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

impl DType {
    /// Returns whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        use DType::{Bf16, F8E4M3, F8E5M2, F16, F32, F64};
        matches!(self, F16 | Bf16 | F32 | F64 | F8E4M3 | F8E5M2)
    }
}

#[cfg(feature = "cuda")]
impl From<cuda_rt::DType> for DType {
    fn from(dtype: cuda_rt::DType) -> Self {
        match dtype {
            cuda_rt::DType::F32 => Self::F32,
            cuda_rt::DType::F16 => Self::F16,
            cuda_rt::DType::Bf16 => Self::Bf16,
        }
    }
}

#[cfg(feature = "cuda")]
impl TryFrom<DType> for cuda_rt::DType {
    type Error = crate::Error;

    fn try_from(dtype: DType) -> crate::Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 => Ok(Self::F16),
            DType::Bf16 => Ok(Self::Bf16),
            other => Err(crate::Error::InvalidArgument(format!(
                "a slice of CUDA's memory is of f32, f16 or bf16, not {other}"
            ))),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A value that collectives can move: one of the types of [`DType`]. Sealed.
pub trait Element: sealed::Sealed + Copy + Default + fmt::Debug + Send + Sync + 'static {
    /// This type's [`DType`].
    const DTYPE: DType;
}

mod sealed {
    #[expect(unnameable_types, reason = "seals the trait")]
    pub trait Sealed {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agrees<T: Element>() {
        assert_eq!(T::DTYPE.size(), size_of::<T>());
        assert!(std::any::type_name::<T>().ends_with(T::DTYPE.name()));
    }

    #[test]
    fn sizes_and_names_match_the_types() {
        agrees::<f16>();
        agrees::<bf16>();
        agrees::<f32>();
        agrees::<f64>();
        agrees::<i8>();
        agrees::<u8>();
        agrees::<i32>();
        agrees::<i64>();
        agrees::<u64>();
        agrees::<i16>();
        agrees::<u16>();
        agrees::<u32>();
        agrees::<bool>();
        agrees::<F8E4M3>();
        agrees::<F8E5M2>();
    }

    #[test]
    fn codes_are_indices_in_all() {
        for (code, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, code);
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn types_of_cudas_slices_are_types_here() {
        for dtype in [cuda_rt::DType::F32, cuda_rt::DType::F16, cuda_rt::DType::Bf16] {
            let own = DType::from(dtype);
            assert_eq!((own.to_string(), own.size()), (dtype.to_string(), dtype.size()));
            assert_eq!(cuda_rt::DType::try_from(own).unwrap(), dtype);
        }
        let error = cuda_rt::DType::try_from(DType::I64).unwrap_err().to_string();
        assert!(error.contains("f32, f16 or bf16, not i64"), "{error}");
    }
}
