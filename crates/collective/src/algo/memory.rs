//! The memory of one rank that a schedule works on.

use super::{Buf, Local, Region, Round};
use crate::DType;
use crate::memory::Span;
use crate::simd::{self, Operands};

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

    /// Executes the local work of a round.
    pub(crate) fn work(&self, dtype: DType, round: &Round) {
        for local in &round.local {
            match *local {
                Local::Copy { to, from } => self.region(to).copy_from(self.region(from)),
                Local::Fold { op, to, prefix, ref from, ranks } => {
                    let sources = round.sources[from.clone()].iter();
                    let sources: Vec<_> = sources.map(|&part| self.region(part)).collect();
                    let (outs, prefix) = (&[self.region(to)], prefix.map(|part| self.region(part)));
                    let operands = Operands { outs, sources: &sources, prefix, ranks };
                    simd::fold_part(dtype, op, &operands);
                }
            }
        }
    }
}
