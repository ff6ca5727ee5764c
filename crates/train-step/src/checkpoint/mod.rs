//! The file of a checkpoint: safetensors with a checksum, one writer, one reader, one place.

mod file;
mod place;

use fused_optim::{DType, Optimizer, Slice, SliceMut};
use safetensors::Dtype;

pub use self::file::{Entry, Id, Number, Reader, Writer, Written};
pub use self::place::Places;
use crate::{BoxError, HostTensor, Model, TensorSpec};

/// The tensors of a model, saved to and read from a file. Each [`Model`] is one.
pub trait Stored {
    /// Names, types and shapes of all tensors: first those that the optimizer trains, by its
    /// indices.
    fn entries(&self) -> Vec<Entry>;

    /// Number of tensors that the optimizer trains.
    fn trained(&self) -> usize;

    /// Writes the tensors for which `wanted` returns true, by index, in order. With an optimizer,
    /// those that it trains are written as its
    /// [weights for evaluation](Optimizer::eval_weights).
    ///
    /// # Errors
    ///
    /// Those of the file, of a device and of the optimizer.
    fn write(
        &mut self,
        writer: &mut Writer<'_>,
        wanted: &dyn Fn(usize) -> bool,
        eval: Option<&dyn Optimizer>,
    ) -> Result<(), BoxError>;

    /// Reads the tensors for which `entry` returns the name of an entry, by index.
    ///
    /// # Errors
    ///
    /// Those of the file and of a device.
    fn read(
        &mut self,
        reader: &Reader,
        entry: &dyn Fn(usize) -> Option<String>,
    ) -> Result<(), BoxError>;

    /// Returns this rank's position in random numbers; by default it is that of
    /// [`Trainer::state_mut`](crate::Trainer::state_mut).
    fn random_position(&self) -> Option<u64> {
        None
    }

    /// Returns the fastest implementations found by autotuning; by default they are those of
    /// [`Trainer::state_mut`](crate::Trainer::state_mut).
    fn autotune_cache(&self) -> Option<String> {
        None
    }

    /// Checks the program's own state before a save, and before a resume.
    ///
    /// # Errors
    ///
    /// The reason why it can be neither saved nor resumed.
    fn check_saved(&self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Checks a file after names, types and shapes, and the program's own state. `entry` returns
    /// the name of a tensor's entry, by index. Changes nothing.
    ///
    /// # Errors
    ///
    /// The reason why the file cannot be resumed.
    fn check(&self, _reader: &Reader, _entry: &dyn Fn(usize) -> String) -> Result<(), BoxError> {
        Ok(())
    }
}

impl<M: Model + ?Sized> Stored for M {
    fn entries(&self) -> Vec<Entry> {
        let all = [self.params(), self.buffers(), self.frozen()].into_iter().flatten();
        all.map(|TensorSpec { name, shape, dtype }| (name.clone(), type_of(*dtype), shape.clone()))
            .collect()
    }

    fn trained(&self) -> usize {
        self.params().len()
    }

    fn write(
        &mut self,
        writer: &mut Writer<'_>,
        wanted: &dyn Fn(usize) -> bool,
        eval: Option<&dyn Optimizer>,
    ) -> Result<(), BoxError> {
        let trained = self.trained();
        visit(self, &mut |index, slice| {
            if !wanted(index) {
                return Ok(());
            }
            if let Some(optimizer) = eval.filter(|_| index < trained) {
                let mut values = vec![0.0; slice.len()];
                match optimizer.eval_weights(index, slice.as_slice(), &mut values) {
                    // A tensor in no group keeps its own.
                    Err(fused_optim::Error::MissingParam { .. }) => {}
                    result => {
                        result?;
                        return write(
                            writer,
                            HostTensor::rounded(slice.dtype(), &values).as_slice(),
                        );
                    }
                }
            }
            write(writer, slice.as_slice())
        })
    }

    fn read(
        &mut self,
        reader: &Reader,
        entry: &dyn Fn(usize) -> Option<String>,
    ) -> Result<(), BoxError> {
        visit(self, &mut |index, slice| {
            let Some(name) = entry(index) else { return Ok(()) };
            match slice {
                SliceMut::F32(values) => reader.values(&name, values)?,
                SliceMut::F16(values) => reader.values(&name, values)?,
                SliceMut::Bf16(values) => reader.values(&name, values)?,
            }
            Ok(())
        })
    }
}

/// Lends all tensors one by one, in the order of their entries.
fn visit<M: Model + ?Sized>(
    model: &mut M,
    each: &mut dyn FnMut(usize, &mut SliceMut<'_>) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let mut next = 0..;
    let mut all = |slices: &mut [SliceMut<'_>]| {
        let mut slices = slices.iter_mut().zip(&mut next);
        slices.try_for_each(|(slice, index)| each(index, slice)).map_err(crate::Error::Model)
    };
    model.with_params(&mut all)?;
    model.with_buffers(&mut all)?;
    model.with_frozen(&mut all)?;
    Ok(())
}

fn write(writer: &mut Writer<'_>, slice: Slice<'_>) -> Result<(), BoxError> {
    Ok(match slice {
        Slice::F32(values) => writer.values(values),
        Slice::F16(values) => writer.values(values),
        Slice::Bf16(values) => writer.values(values),
    }?)
}

const fn type_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
    }
}
