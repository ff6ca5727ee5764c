//! Casts between f32, f16 and bf16 over slices.

use half::{bf16, f16};

use self::sealed::Sealed as _;
use crate::{Error, Result, cpu};

/// An element type that [`cast`] converts to `D`. Sealed.
pub trait CastTo<D>: sealed::Sealed<D> {}

mod sealed {
    #[expect(unnameable_types, reason = "sealed: only this crate implements it")]
    pub trait Sealed<D>: Sized {
        /// Both slices have the same length.
        fn cast(input: &[Self], output: &mut [D]);
    }
}

/// Casts `input` into `output`, element by element.
///
/// Widening is exact. Narrowing rounds to nearest, ties to even: too large values become infinite,
/// subnormal results are kept, a NaN stays a NaN with its sign. Casts between f16 and bf16 round
/// the exact f32 value once. The bits are the same on every processor.
///
/// # Errors
///
/// [`Error::LengthMismatch`].
///
/// # Examples
///
/// ```
/// use half::{bf16, f16};
///
/// let mut halves = [f16::ZERO; 3];
/// amp::cast(&[1.0_f32, 1e6, 1e-7], &mut halves)?;
/// assert_eq!(halves.map(f16::to_f32), [1.0, f32::INFINITY, 1.1920929e-7]);
///
/// let mut brains = [bf16::ZERO; 3];
/// amp::cast(&halves, &mut brains)?;
/// assert_eq!(brains[0], bf16::ONE);
/// # Ok::<(), amp::Error>(())
/// ```
pub fn cast<S: CastTo<D>, D>(input: &[S], output: &mut [D]) -> Result<()> {
    if input.len() != output.len() {
        return Err(Error::LengthMismatch { expected: input.len(), got: output.len() });
    }
    S::cast(input, output);
    Ok(())
}

/// Implements the cast from `$source` to `$target` by an expression over two slices.
macro_rules! casts {
    ($($source:ty => $target:ty: $cast:expr;)*) => {$(
        impl CastTo<$target> for $source {}

        impl sealed::Sealed<$target> for $source {
            fn cast(input: &[Self], output: &mut [$target]) {
                let cast: fn(&[$source], &mut [$target]) = $cast;
                cast(input, output);
            }
        }
    )*};
}

casts! {
    f32 => f16: cpu::to_f16;
    f16 => f32: cpu::from_f16;
    f32 => bf16: cpu::to_bf16;
    bf16 => f32: cpu::from_bf16;
    f16 => bf16: through_f32;
    bf16 => f16: through_f32;
}

/// Widens and narrows a block at a time, so that the block stays in the L1 cache.
fn through_f32<S: CastTo<f32>, D>(input: &[S], output: &mut [D])
where
    f32: CastTo<D>,
{
    let mut wide = [0.0; BLOCK];
    for (input, output) in input.chunks(BLOCK).zip(output.chunks_mut(BLOCK)) {
        let wide = &mut wide[..input.len()];
        S::cast(input, wide);
        f32::cast(wide, output);
    }
}

const BLOCK: usize = 1024;
