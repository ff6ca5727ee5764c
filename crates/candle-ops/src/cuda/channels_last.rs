//! Images whose memory is channels-last: `[n, h, w, c]`.

use candle_core::{Result, Tensor};

use super::{Kernel, Kernels, Output, pair};

impl Kernels {
    /// Images, or a weight, `[n, c, h, w]` as `[n, h, w, c]`, contiguous and outside of any graph: the same memory if it
    /// lies so, else a copy.
    pub(super) fn channels_last(&self, images: &Tensor) -> Result<Tensor> {
        let images = images.detach();
        let turned = images.permute((0, 2, 3, 1))?;
        if turned.is_contiguous() {
            return Ok(turned);
        }
        let images = images.contiguous()?;
        let (n, c, h, w) = images.dims4()?;
        Ok(self.transpose(&images, [n, c, h * w], &[n, h, w, c])?.tensor())
    }

    /// The reverse: `[n, h, w, c]`, contiguous, as `[n, c, h, w]`, contiguous.
    pub(super) fn channels_first(&self, images: Output) -> Result<Output> {
        let (n, h, w, c) = images.shape.dims4()?;
        if c == 1 || h * w == 1 {
            return Ok(Output { shape: (n, c, h, w).into(), ..images });
        }
        self.transpose(&images.tensor(), [n, h * w, c], &[n, c, h, w])
    }

    /// Transposes each of `count` matrices.
    fn transpose(
        &self,
        from: &Tensor,
        [count, rows, columns]: [usize; 3],
        shape: &[usize],
    ) -> Result<Output> {
        let to = self.empty(shape, from.dtype())?;
        let job = [self.address(from)?, to.at, pair(count, rows), pair(columns, 0)];
        let blocks = (count * rows.div_ceil(TILE) * columns.div_ceil(TILE)).min(1 << 16);
        // SAFETY: a `TransposeJob` of `count` matrices, and memory for as many.
        unsafe { self.launch(from.dtype(), Kernel::transpose, blocks, &job) }?;
        Ok(to)
    }
}

/// Rows and columns that a block transposes at a time.
const TILE: usize = 32;
