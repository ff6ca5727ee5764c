//! Element types: what a collective can move and add.
//!
//! [`Element`] is sealed: every backend, kernel and fingerprint knows all nine types, and a type is
//! only listed here when any pattern of bytes is a value of it, so that memory may be received into
//! and allocated zeroed.

use std::fmt;

use half::{bf16, f16};

macro_rules! elements {
    ($($(#[$doc:meta])* $dtype:ident = $type:ident,)*) => {
        /// The type of the numbers in a buffer.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $dtype,)*
        }

        impl DType {
            /// Every type, in the order of their codes.
            pub const ALL: [Self; 9] = [$(Self::$dtype),*];

            /// Bytes of one element.
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$dtype => size_of::<$type>(),)*
                }
            }

            /// The name Rust has for the type.
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
}

impl DType {
    /// Whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A number that collectives can move: one of the nine types of [`DType`]. Sealed.
pub trait Element: sealed::Sealed + Copy + Default + fmt::Debug + Send + Sync + 'static {
    /// This type's [`DType`].
    const DTYPE: DType;
}

mod sealed {
    #[expect(unnameable_types, reason = "nobody else may implement it")]
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
    fn sizes_and_names_are_those_of_the_types() {
        agrees::<f16>();
        agrees::<bf16>();
        agrees::<f32>();
        agrees::<f64>();
        agrees::<i8>();
        agrees::<u8>();
        agrees::<i32>();
        agrees::<i64>();
        agrees::<u64>();
    }

    #[test]
    fn codes_are_positions() {
        for (code, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, code);
        }
    }
}
