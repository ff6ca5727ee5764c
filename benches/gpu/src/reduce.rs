//! Averages over NCCL, beside those of `torch.distributed`, and what comes behind them.
//!
//! One rank says what a call costs and that the path from a gradient through a bucket and back is
//! right; two share a GPU if NCCL lets them.

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

use super::joined::{Joined, type_of};
use super::{ctl, dtype, status};

/// A group and the stream it is used in; made by [`gpu_group`].
#[derive(Debug)]
pub struct Group {
    reducer: Option<DeviceReducer<NoKernels>>,
    joined: Option<Joined>,
    group: ProcessGroup,
    device: usize,
    stream: DeviceStream,
    _server: Option<TcpStoreServer>,
}

/// The version of NCCL that groups are over, for example 22707 for 2.27.7; 0 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_nccl_version() -> c_int {
    let mut version = 0;
    let ask = || {
        version = collective::nccl::Libraries::global()?.version();
        Ok(())
    };
    if status(ask) == 0 { version } else { 0 }
}

/// Writes a group of `world` ranks, of which this is the `rank`-th, on a device. Several ranks meet at
/// `port` of this machine, where rank 0 listens.
///
/// # Safety
///
/// `stream` must be a stream of the device's primary context, or null, and outlive the group; `group` a
/// place for a pointer.
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
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { DeviceStream::from_raw(stream) };
        let device = device as usize;
        let (reducer, joined, group_of) = (None, None, made);
        let made = Group { reducer, joined, group: group_of, device, stream, _server: server };
        let made = Box::new(made);
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
    number: c_int,
) -> c_int {
    // SAFETY: the caller's group.
    let group = unsafe { &*group };
    let call = || {
        // SAFETY: the caller vouches for the memory.
        let buf = unsafe { DeviceBuf::from_raw(address, len, type_of(dtype(number)?)) }?;
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
    number: c_int,
) -> c_int {
    // SAFETY: the caller's group, used by nobody else meanwhile.
    let group = unsafe { &mut *group };
    // SAFETY: so many numbers, by the caller's word.
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
        let count = reducer.plan().slots().len();
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

/// Joins the group's averages to an optimizer of the rule over `count` tensors, which clips to
/// `max_norm` unless that is below 0, and keeps a loss scale that begins at `scale`.
///
/// # Safety
///
/// The group's; `rule` a C string; `weights` and `lens` of `count` numbers, which are device addresses
/// and lengths of tensors of this type that stay where they are.
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
    // SAFETY: the caller's group, used by nobody else meanwhile.
    let group = unsafe { &mut *group };
    // SAFETY: the caller's C string.
    let rule = unsafe { CStr::from_ptr(rule) };
    // SAFETY: so many numbers, by the caller's word; likewise below.
    let weights = unsafe { slice::from_raw_parts(weights, count) };
    // SAFETY: as above.
    let lens = unsafe { slice::from_raw_parts(lens, count) };
    let make = || {
        let dtype = dtype(weight_type)?;
        let slice = |(ptr, len): (&u64, &u64)| DeviceSlice { ptr: *ptr, len: *len as usize, dtype };
        let weights = weights.iter().zip(lens).map(slice).collect();
        let place = (group.device, group.stream);
        let how = (ReducerOptions::default(), ctl(1.0, 1, max_norm));
        // SAFETY: the caller vouches for weights and stream.
        let joined =
            unsafe { Joined::new(group.group.clone(), place, rule.to_str()?, weights, how) };
        let mut joined = joined?;
        joined.set_loss_scale(LossScale { scale, ..Default::default() })?;
        group.joined = Some(joined);
        Ok(())
    };
    status(make)
}

/// A pass of [`gpu_join`]'s: averages these gradients, and looks at them on the way.
///
/// # Safety
///
/// The group's; `grads` of as many device addresses as there are weights, of as many elements of their
/// type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_joined_average(group: *mut Group, grads: *const u64) -> c_int {
    // SAFETY: the caller's group, used by nobody else meanwhile.
    let group = unsafe { &mut *group };
    let pass = || {
        let joined = group.joined.as_mut().ok_or("nothing is joined")?;
        let count = joined.reducer().plan().slots().len();
        // SAFETY: so many numbers, by the caller's word.
        let grads = unsafe { slice::from_raw_parts(grads, count) };
        let buf = |(index, address): (usize, &u64)| {
            let slot = joined.reducer().slot(index);
            // SAFETY: the caller vouches for the gradient.
            unsafe { DeviceBuf::from_raw(*address, slot.count(), slot.dtype()) }
        };
        let grads = grads.iter().enumerate().map(buf).collect::<collective::Result<Vec<_>>>()?;
        // SAFETY: as above.
        unsafe { joined.average(&grads) }
    };
    status(pass)
}

/// A step of [`gpu_join`]'s, behind its pass.
///
/// # Safety
///
/// The group's; its weights must be where they were.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_joined_step(group: *mut Group) -> c_int {
    // SAFETY: the caller's group, used by nobody else meanwhile.
    let group = unsafe { &mut *group };
    status(|| {
        let joined = group.joined.as_mut().ok_or("nothing is joined")?;
        // SAFETY: the caller vouches for the weights.
        unsafe { joined.step() }
    })
}

/// Ends the group, in order, with its other ranks.
///
/// # Safety
///
/// The group's, which is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_group_end(group: *mut Group) {
    // SAFETY: made by `gpu_group` from a box.
    drop(unsafe { Box::from_raw(group) });
}
