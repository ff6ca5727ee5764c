//! The operators' computations as plain loops: each reads all its inputs, computes in f32, rounds
//! once and writes.

use half::{bf16, f16};
use npu_sys::sys::AclDataType;

use crate::nnop::Tensor;
use crate::raw;
use crate::world::World;

/// Numbers of one tensor.
pub(crate) type Numbers = Vec<f64>;

/// An operator with its arguments.
#[derive(Clone)]
pub(crate) struct Kernel {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<Tensor>,
    pub(crate) compute: Compute,
}

/// From the inputs' numbers to the outputs'; to nothing from numbers that the operator's documents
/// forbid.
pub(crate) type Compute = std::sync::Arc<dyn Fn(&[Numbers]) -> Vec<Numbers> + Send + Sync>;

/// Status of a kernel that accesses an invalid address or gets numbers its documents forbid.
const VECTOR_CORE: i32 = 507_035;

impl Kernel {
    /// Runs it on a device. Inputs are read whole before anything is written.
    pub(crate) fn run(&self, world: &mut World, device: usize) -> Result<(), i32> {
        let mut inputs = Vec::new();
        for tensor in &self.inputs {
            let at = find(world, tensor, device)?;
            inputs.push(load(tensor.dtype, &raw::read(at, tensor.bytes())));
        }
        let outputs = (self.compute)(&inputs);
        if outputs.len() < self.outputs.len() {
            world.violation("an operator is given numbers that its documents forbid");
            return Err(VECTOR_CORE);
        }
        for (tensor, numbers) in self.outputs.iter().zip(outputs) {
            let at = find(world, tensor, device)?;
            let saturates = world.config.soc.saturates() && tensor.dtype == AclDataType::FLOAT16;
            let (bytes, overflowed) = store(tensor.dtype, &numbers, saturates);
            world.overflow |= overflowed;
            raw::write(at, &bytes);
        }
        Ok(())
    }
}

fn find(world: &mut World, tensor: &Tensor, device: usize) -> Result<*mut u8, i32> {
    if tensor.bytes() == 0 {
        return Ok(std::ptr::NonNull::dangling().as_ptr());
    }
    let found = world.memory.on_device(tensor.address, tensor.bytes(), device);
    found.map_err(|what| {
        world.violation(format!("an operator's tensor: {what}"));
        VECTOR_CORE
    })
}

fn load(dtype: AclDataType, bytes: &[u8]) -> Numbers {
    fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Numbers {
        bytes.as_chunks().0.iter().map(|chunk| number(*chunk)).collect()
    }
    match dtype {
        AclDataType::FLOAT => each(bytes, |b| f64::from(f32::from_le_bytes(b))),
        AclDataType::FLOAT16 => each(bytes, |b| f16::from_le_bytes(b).to_f64()),
        AclDataType::BF16 => each(bytes, |b| bf16::from_le_bytes(b).to_f64()),
        AclDataType::DOUBLE => each(bytes, f64::from_le_bytes),
        AclDataType::INT8 => each(bytes, |b: [u8; 1]| f64::from(b[0].cast_signed())),
        AclDataType::INT32 => each(bytes, |b| f64::from(i32::from_le_bytes(b))),
        AclDataType::INT64 => each(bytes, |b| i64::from_le_bytes(b) as f64),
        _ => each(bytes, |b: [u8; 1]| f64::from(b[0])),
    }
}

/// The bytes, and whether a number had to be made to fit.
fn store(dtype: AclDataType, numbers: &[f64], saturates: bool) -> (Vec<u8>, bool) {
    let mut overflowed = false;
    let mut half = |number: f64| {
        let (kept, changed) = to_half(number, saturates);
        overflowed |= changed;
        kept
    };
    let bytes = match dtype {
        AclDataType::FLOAT => numbers.iter().flat_map(|n| (*n as f32).to_le_bytes()).collect(),
        AclDataType::FLOAT16 => numbers.iter().flat_map(|n| half(*n).to_le_bytes()).collect(),
        AclDataType::BF16 => {
            numbers.iter().flat_map(|n| bf16::from_f64(*n).to_le_bytes()).collect()
        }
        AclDataType::DOUBLE => numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
        AclDataType::INT8 => numbers.iter().flat_map(|n| (*n as i8).to_le_bytes()).collect(),
        AclDataType::INT32 => numbers.iter().flat_map(|n| (*n as i32).to_le_bytes()).collect(),
        AclDataType::INT64 => numbers.iter().flat_map(|n| (*n as i64).to_le_bytes()).collect(),
        AclDataType::BOOL => numbers.iter().map(|n| u8::from(*n != 0.0)).collect(),
        _ => numbers.iter().map(|n| *n as u8).collect(),
    };
    (bytes, overflowed)
}

/// The nearest half, on a chip that saturates without infinity and NaN, and whether it was such.
pub(crate) fn to_half(number: f64, saturates: bool) -> (f16, bool) {
    let rounded = f16::from_f64(number);
    if !saturates || rounded.is_finite() {
        (rounded, false)
    } else if rounded.is_nan() {
        (f16::ZERO, true)
    } else if rounded.is_sign_negative() {
        (f16::MIN, true)
    } else {
        (f16::MAX, true)
    }
}

/// Whether an input of these dimensions goes with an output of those: from the last one on each is
/// the same, or 1, or missing.
pub(crate) fn broadcasts(from: &[usize], to: &[usize]) -> bool {
    let pairs = from.iter().rev().zip(to.iter().rev());
    from.len() <= to.len() && pairs.into_iter().all(|(from, to)| from == to || *from == 1)
}

/// Index of the input's number that is broadcast to the output's number at index `place`.
fn broadcast(from: &[usize], to: &[usize], mut place: usize) -> usize {
    let (mut at, mut stride) = (0, 1);
    for (behind, dim) in to.iter().rev().enumerate() {
        let own = from.len().checked_sub(behind + 1).map_or(1, |dim| from[dim]);
        if own != 1 {
            at += place % dim * stride;
            stride *= own;
        }
        place /= dim;
    }
    at
}

/// Element by element in f32; `inputs` are the inputs' dimensions, which go with the output's.
pub(crate) fn element_wise(
    inputs: Vec<Vec<usize>>,
    output: Vec<usize>,
    f: impl Fn(&[f32]) -> f32 + Send + Sync + 'static,
) -> Compute {
    let count = output.iter().product();
    std::sync::Arc::new(move |numbers| {
        let one = |place| {
            let operand = |(numbers, dims): (&Numbers, &Vec<usize>)| {
                let same = numbers.len() == count;
                numbers[if same { place } else { broadcast(dims, &output, place) }] as f32
            };
            let operands: Vec<f32> = numbers.iter().zip(&inputs).map(operand).collect();
            f64::from(f(&operands))
        };
        vec![(0..count).map(one).collect()]
    })
}

/// Sums over dimensions, in f32, in order of place.
pub(crate) fn sum(numbers: &Numbers, dims: &[usize], over: &[usize]) -> Numbers {
    let kept: Vec<usize> = (0..dims.len()).filter(|dim| !over.contains(dim)).collect();
    let count: usize = kept.iter().map(|dim| dims[*dim]).product();
    let mut sums = vec![0.0f32; count];
    for (place, number) in numbers.iter().enumerate() {
        let mut rest = place;
        let mut index = vec![0; dims.len()];
        for dim in (0..dims.len()).rev() {
            index[dim] = rest % dims[dim];
            rest /= dims[dim];
        }
        let to = kept.iter().fold(0, |to, dim| to * dims[*dim] + index[*dim]);
        sums[to] += *number as f32;
    }
    sums.into_iter().map(f64::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_saturates_where_the_chip_does() {
        let numbers = [1e6, -1e6, f64::NAN, 1.0];
        let read = |saturates| {
            let (bytes, overflowed) = store(AclDataType::FLOAT16, &numbers, saturates);
            (load(AclDataType::FLOAT16, &bytes), overflowed)
        };
        assert_eq!(read(true), (vec![65504.0, -65504.0, 0.0, 1.0], true));
        let (kept, overflowed) = read(false);
        assert!(kept[0].is_infinite() && kept[2].is_nan() && !overflowed);
    }

    #[test]
    fn dimensions_of_one_go_with_all() {
        assert!(broadcasts(&[2, 1], &[2, 3]) && broadcasts(&[3], &[2, 3]) && broadcasts(&[], &[2]));
        assert!(!broadcasts(&[2], &[2, 3]) && !broadcasts(&[2, 3], &[3]));
        let at = |from: &[usize]| (0..6).map(|i| broadcast(from, &[2, 3], i)).collect::<Vec<_>>();
        assert_eq!(at(&[2, 1]), [0, 0, 0, 1, 1, 1]);
        assert_eq!(at(&[3]), [0, 1, 2, 0, 1, 2]);
        assert_eq!(at(&[1]), [0; 6]);
    }

    #[test]
    fn sums_run_over_the_dimensions_named() {
        let numbers = (1..=6).map(f64::from).collect();
        assert_eq!(sum(&numbers, &[2, 3], &[1]), [6.0, 15.0]);
        assert_eq!(sum(&numbers, &[2, 3], &[0]), [5.0, 7.0, 9.0]);
        assert_eq!(sum(&numbers, &[2, 3], &[0, 1]), [21.0]);
    }
}
