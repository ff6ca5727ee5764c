//! Averages over NCCL in a group of one rank, beside those of `torch.distributed`.
//!
//! One rank says what a call costs and that the path from a gradient through a bucket and back is
//! right; what several ranks reach is not asked here.

use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::Arc;

use collective::reducer::{DeviceReducer, DeviceReducerOptions, NoKernels, ParamInfo};
use collective::{
    DType, DeviceBuf, DeviceStream, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Transport,
};

use super::{Result, status};

/// A group and the stream it is used in; made by [`gpu_group`].
#[derive(Debug)]
pub struct Group {
    group: ProcessGroup,
    stream: DeviceStream,
    reducer: Option<DeviceReducer<NoKernels>>,
}

/// Writes a group of one rank on device 0.
///
/// # Safety
///
/// `stream` must be a stream of the primary context, or null, and outlive the group; `group` a place for
/// a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_group(stream: *mut c_void, group: *mut *mut Group) -> c_int {
    let open = || {
        let options = GroupOptions::default().with_transport(Transport::Nccl).with_cuda_device(0);
        let made = ProcessGroup::from_store(Arc::new(MemoryStore::new()), 0, 1, options)?;
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { DeviceStream::from_raw(stream) };
        let made = Box::new(Group { group: made, stream, reducer: None });
        // SAFETY: the caller's place for a pointer.
        unsafe { group.write(Box::into_raw(made)) };
        Ok(())
    };
    status(open)
}

/// Averages `len` elements in place, in order of the stream.
///
/// # Safety
///
/// The group's; a device address of as many elements of the type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_all_reduce(
    group: *mut Group,
    address: u64,
    len: usize,
    dtype: c_int,
) -> c_int {
    // SAFETY: the caller's group.
    let group = unsafe { &*group };
    let call = || {
        // SAFETY: the caller vouches for the memory.
        let buf = unsafe { DeviceBuf::from_raw(address, len, type_of(dtype)?) }?;
        let _ = group.group.device()?.all_reduce(buf, ReduceOp::Avg)?.enqueue(group.stream)?;
        Ok(())
    };
    status(call)
}

/// Makes a reducer for `count` gradients, with PyTorch's sizes of buckets.
///
/// # Safety
///
/// The group's; `lens` of `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_reducer(
    group: *mut Group,
    count: usize,
    lens: *const u64,
    dtype: c_int,
) -> c_int {
    // SAFETY: the caller's group, used by nobody else meanwhile.
    let group = unsafe { &mut *group };
    // SAFETY: so many numbers, by the caller's word.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let make = || {
        let dtype = type_of(dtype)?;
        let param =
            |(index, len): (usize, &u64)| ParamInfo::new(index.to_string(), *len as usize, dtype);
        let params = lens.iter().enumerate().map(param).collect();
        let options = DeviceReducerOptions::default();
        group.reducer = Some(DeviceReducer::new(group.group.clone(), params, options, NoKernels)?);
        Ok(())
    };
    status(make)
}

/// A pass: takes all gradients, the last first, averages them, and writes where the averages are.
///
/// # Safety
///
/// The group's; `grads` of as many device addresses as the reducer has gradients, of as many elements;
/// `places` room for as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_reduce(
    group: *mut Group,
    grads: *const u64,
    places: *mut u64,
) -> c_int {
    // SAFETY: the caller's group, used by nobody else meanwhile.
    let group = unsafe { &mut *group };
    let stream = group.stream;
    let pass = || {
        let reducer = group.reducer.as_mut().ok_or("no reducer")?;
        let count = reducer.plan().places().len();
        // SAFETY: so many numbers, by the caller's word.
        let grads = unsafe { slice::from_raw_parts(grads, count) };
        reducer.zero_grad();
        reducer.prepare(true)?;
        for index in (0..count).rev() {
            let slot = reducer.slot(index);
            // SAFETY: the caller vouches for the gradient.
            let grad = unsafe { DeviceBuf::from_raw(grads[index], slot.count(), slot.dtype()) }?;
            // SAFETY: as above; the stream outlives the group.
            unsafe { reducer.ready(index, grad, stream) }?;
        }
        // SAFETY: as above.
        unsafe { reducer.finish(stream) }?;
        // SAFETY: room for so many numbers, by the caller's word.
        let places = unsafe { slice::from_raw_parts_mut(places, count) };
        for (index, place) in places.iter_mut().enumerate() {
            *place = reducer.grad(index).ok_or("no gradient")?.address();
        }
        Ok(())
    };
    status(pass)
}

fn type_of(number: c_int) -> Result<DType> {
    match number {
        0 => Ok(DType::F32),
        1 => Ok(DType::F16),
        2 => Ok(DType::Bf16),
        _ => Err("no such type".into()),
    }
}
