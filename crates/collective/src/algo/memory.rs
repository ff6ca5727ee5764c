//! The memory of one rank that a schedule works on.

use super::{Buf, Local, Region, Round};
use crate::span::Span;
use crate::{DType, simd};

/// The buffers of one rank during an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
    /// Only read.
    pub(crate) input: Span<'a>,
    pub(crate) output: Span<'a>,
    pub(crate) scratch: Span<'a>,
    /// The outputs of the ranks of this machine, if they are in a shared buffer.
    pub(crate) members: &'a [Span<'a>],
}

impl<'a> Memory<'a> {
    /// The bytes of a region.
    ///
    /// # Panics
    ///
    /// If it is out of bounds of its buffer.
    pub(crate) fn region(&self, region: Region) -> Span<'a> {
        let buf = match region.buf {
            Buf::Input => self.input,
            Buf::Output => self.output,
            Buf::Scratch => self.scratch,
            Buf::Member(index) => self.members[index],
        };
        buf.part(region.offset, region.len)
    }

    /// Executes the local work of a round of a schedule, which folds `f32` if it is `wide`.
    pub(crate) fn work(&self, dtype: DType, wide: bool, round: &Round) {
        for local in &round.local {
            match local {
                Local::Copy { to, from } => {
                    simd::convert(dtype, self.region(*to), self.region(*from));
                }
                Local::Fold { op, to, from } => {
                    let sources = &round.sources[from.clone()];
                    let sources: Vec<_> = sources.iter().map(|&part| self.region(part)).collect();
                    let dtype = if wide { DType::F32 } else { dtype };
                    simd::fold(dtype, *op, &[self.region(*to)], &sources);
                }
            }
        }
    }
}
