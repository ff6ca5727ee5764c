//! All-reduces over NCCL, to compare with those of `torch.distributed`, and steps after them.
//!
//! One rank measures the overhead of a call and checks that gradients come back from their buckets;
//! two share a GPU if NCCL supports that.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use collective::reducer::{DeviceReducer, NoKernels, ParamInfo, ReducerOptions};
use collective::{
    GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Store, TcpStore, Transport,
    device::{DeviceBuf, DeviceStream},
    store::TcpStoreServer,
};
use fused_optim::cuda::{DeviceSlice, LossScale};

use super::reducer_step::{ReducerStep, type_of};
use super::{ctl, dtype, status};

/// A group and its stream, created by [`gpu_group`].
#[derive(Debug)]
pub struct Group {
    reducer: Option<DeviceReducer<NoKernels>>,
    steps: Option<ReducerStep>,
    group: ProcessGroup,
    device: usize,
    stream: DeviceStream,
    _server: Option<TcpStoreServer>,
}

/// The version of our groups' NCCL, for example 22707 for 2.27.7; 0 without NCCL.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_nccl_version() -> c_int {
    let mut version = 0;
    let ask = || {
        version = collective::nccl::Libraries::global()?.version();
        Ok(())
    };
    if status(ask) == 0 { version } else { 0 }
}

/// Creates a group of `world` ranks as rank `rank` on a device, and writes its pointer. Several
/// ranks connect to rank 0 at `port` of this machine.
///
/// # Safety
///
/// `stream` must be a stream of the device's primary context, or null, and outlive the group;
/// `group` must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_group(
    stream: *mut c_void,
    device: c_int,
    rank: c_int,
    world: c_int,
    port: c_int,
    group: *mut *mut Group,
) -> c_int {
    let open = || {
        let (device, port) = (u32::try_from(device)?, u16::try_from(port)?);
        let (rank, world) = (usize::try_from(rank)?, usize::try_from(world)?);
        let server = (world > 1 && rank == 0)
            .then(|| TcpStoreServer::bind(([127, 0, 0, 1], port).into()))
            .transpose()?;
        let timeout = Duration::from_secs(20);
        let store: Arc<dyn Store> = match world {
            1 => Arc::new(MemoryStore::new()),
            _ => Arc::new(TcpStore::connect("127.0.0.1", port, timeout)?),
        };
        let options = GroupOptions::default().with_timeout(timeout);
        let options = options.with_transport(Transport::Nccl).with_cuda_device(device);
        let made = ProcessGroup::from_store(store, rank, world, options)?;
        // SAFETY: the caller guarantees the stream.
        let stream = unsafe { DeviceStream::from_raw(stream) };
        let device = device as usize;
        let (reducer, steps, group_of) = (None, None, made);
        let made = Group { reducer, steps, group: group_of, device, stream, _server: server };
        let made = Box::new(made);
        // SAFETY: the caller guarantees that the pointer is writable.
        unsafe { group.write(Box::into_raw(made)) };
        Ok(())
    };
    status(open)
}

/// Averages `len` elements in place; enqueued on the stream.
///
/// # Safety
///
/// A valid group; the device address of `len` elements of this type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_all_reduce(
    group: *mut Group,
    address: u64,
    len: usize,
    number: c_int,
) -> c_int {
    // SAFETY: the caller's group.
    let group = unsafe { &*group };
    let call = || {
        // SAFETY: the caller guarantees the memory.
        let buf = unsafe { DeviceBuf::from_raw(address, len, type_of(dtype(number)?)) }?;
        let _ = group.group.device()?.all_reduce(buf, ReduceOp::Avg)?.enqueue(group.stream)?;
        Ok(())
    };
    status(call)
}

/// Creates a reducer for `count` gradients, with PyTorch's bucket sizes.
///
/// # Safety
///
/// A valid group; `lens` has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_reducer(
    group: *mut Group,
    count: usize,
    lens: *const u64,
    number: c_int,
) -> c_int {
    // SAFETY: the caller's group, which nothing else uses meanwhile.
    let group = unsafe { &mut *group };
    // SAFETY: the caller guarantees as many numbers.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let make = || {
        let dtype = type_of(dtype(number)?);
        let param =
            |(index, len): (usize, &u64)| ParamInfo::new(index.to_string(), *len as usize, dtype);
        let params = lens.iter().enumerate().map(param).collect();
        let options = ReducerOptions::default();
        group.reducer = Some(DeviceReducer::new(group.group.clone(), params, options, NoKernels)?);
        Ok(())
    };
    status(make)
}

/// Averages all gradients, the last first, and writes the addresses of the averages.
///
/// # Safety
///
/// A valid group; `grads` has the device address of each of the reducer's gradients; `places` is
/// writable for as many addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_reduce(
    group: *mut Group,
    grads: *const u64,
    places: *mut u64,
) -> c_int {
    // SAFETY: the caller's group, which nothing else uses meanwhile.
    let group = unsafe { &mut *group };
    let stream = group.stream;
    let pass = || {
        let reducer = group.reducer.as_mut().ok_or("no reducer")?;
        let count = reducer.plan().slots().len();
        // SAFETY: the caller guarantees as many numbers.
        let grads = unsafe { slice::from_raw_parts(grads, count) };
        reducer.zero_grad();
        reducer.prepare(true)?;
        for index in (0..count).rev() {
            let slot = reducer.slot(index);
            // SAFETY: the caller guarantees the gradient.
            let grad = unsafe { DeviceBuf::from_raw(grads[index], slot.count(), slot.dtype()) }?;
            // SAFETY: as above; the stream outlives the group.
            unsafe { reducer.ready(index, grad, stream) }?;
        }
        // SAFETY: as above.
        unsafe { reducer.finish(stream) }?;
        // SAFETY: the caller guarantees space for as many numbers.
        let places = unsafe { slice::from_raw_parts_mut(places, count) };
        for (index, place) in places.iter_mut().enumerate() {
            *place = reducer.grad(index).ok_or("no gradient")?.address();
        }
        Ok(())
    };
    status(pass)
}

/// Creates an optimizer for `count` tensors that steps with the group's averages, clips to
/// `max_norm` unless that is below 0, and has a loss scale that starts at `scale`.
///
/// # Safety
///
/// A valid group; `rule` is a C string; `weights` and `lens` have `count` elements, the device
/// addresses and lengths of tensors of this type, which must stay valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_join(
    group: *mut Group,
    rule: *const c_char,
    count: usize,
    weights: *const u64,
    lens: *const u64,
    weight_type: c_int,
    max_norm: f64,
    scale: f32,
) -> c_int {
    // SAFETY: the caller's group, which nothing else uses meanwhile.
    let group = unsafe { &mut *group };
    // SAFETY: the caller's C string.
    let rule = unsafe { CStr::from_ptr(rule) };
    // SAFETY: the caller guarantees `count` numbers, also below.
    let weights = unsafe { slice::from_raw_parts(weights, count) };
    // SAFETY: as above.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let make = || {
        let dtype = dtype(weight_type)?;
        let slice = |(ptr, len): (&u64, &u64)| DeviceSlice { ptr: *ptr, len: *len as usize, dtype };
        let weights = weights.iter().zip(lens).map(slice).collect();
        let place = (group.device, group.stream);
        let how = (ReducerOptions::default(), ctl(1.0, 1, max_norm));
        // SAFETY: the caller guarantees weights and stream.
        let steps =
            unsafe { ReducerStep::new(group.group.clone(), place, rule.to_str()?, weights, how) };
        let mut steps = steps?;
        steps.set_loss_scale(LossScale { scale, ..Default::default() })?;
        group.steps = Some(steps);
        Ok(())
    };
    status(make)
}

/// Averages the gradients for [`gpu_join`]'s optimizer and checks each bucket.
///
/// # Safety
///
/// A valid group; `grads` has a device address for each weight, with as many elements of the same
/// type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_joined_average(group: *mut Group, grads: *const u64) -> c_int {
    // SAFETY: the caller's group, which nothing else uses meanwhile.
    let group = unsafe { &mut *group };
    let pass = || {
        let steps = group.steps.as_mut().ok_or("`gpu_join` has not been called")?;
        let count = steps.reducer().plan().slots().len();
        // SAFETY: the caller guarantees as many numbers.
        let grads = unsafe { slice::from_raw_parts(grads, count) };
        let buf = |(index, address): (usize, &u64)| {
            let slot = steps.reducer().slot(index);
            // SAFETY: the caller guarantees the gradient.
            unsafe { DeviceBuf::from_raw(*address, slot.count(), slot.dtype()) }
        };
        let grads = grads.iter().enumerate().map(buf).collect::<collective::Result<Vec<_>>>()?;
        // SAFETY: as above.
        unsafe { steps.average(&grads) }
    };
    status(pass)
}

/// Runs a step of [`gpu_join`]'s optimizer.
///
/// # Safety
///
/// A valid group; its weights must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_joined_step(group: *mut Group) -> c_int {
    // SAFETY: the caller's group, which nothing else uses meanwhile.
    let group = unsafe { &mut *group };
    status(|| {
        let steps = group.steps.as_mut().ok_or("`gpu_join` has not been called")?;
        // SAFETY: the caller guarantees the weights.
        unsafe { steps.step() }
    })
}

/// Destroys the group; all ranks must call it.
///
/// # Safety
///
/// A valid group, which must not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_group_end(group: *mut Group) {
    // SAFETY: made by `gpu_group` from a box.
    drop(unsafe { Box::from_raw(group) });
}
