//! HCCL: communicators over a hub, operations as work in streams.

#![expect(non_snake_case, reason = "the names are C's")]

mod comm;

use std::ffi::{CStr, c_char, c_void};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use npu_sys::sys::*;

use crate::hub::{self, PARAMETER, UNSUPPORTED, Verb};
use crate::memory::pointer;
use crate::raw;
use crate::stream::Job;
use crate::wire::{Frame, Part};
use crate::world::{World, set_current_context, world};

pub(crate) use comm::Comm;
use comm::{Turn, exchange};

type Outcome = Result<(), i32>;

const NULL: i32 = 2;
const INTERNAL: i32 = 4;
const TIMEOUT: i32 = 9;
const RUNTIME: i32 = 15;
const REMOTE: i32 = 21;
const SUSPENDED: i32 = 22;
/// Status of a stream whose HCCL work failed.
const IN_STREAM: i32 = 507_015;

fn comm_of(comm: HcclComm) -> Result<Arc<Comm>, i32> {
    if comm == HcclComm::NULL {
        return Err(NULL);
    }
    let mut world = world();
    let found = world.comms.get(&comm.0.addr()).cloned();
    found.ok_or_else(|| {
        world.violation("a communicator is used that does not exist");
        PARAMETER
    })
}

pub(crate) fn HcclGetRootInfo(info: *mut HcclRootInfo) -> Outcome {
    let patience = {
        let world = world();
        world.current().map_err(|_| RUNTIME)?;
        world.config.connect_timeout
    };
    let address = hub::open(patience).map_err(|_| INTERNAL)?.to_string();
    let mut internal = [0; 4108];
    internal[..address.len()].copy_from_slice(address.as_bytes());
    raw::put(info, HcclRootInfo { internal }).ok_or(NULL)
}

/// Meets the other ranks at the hub.
fn join(ranks: u32, info: &HcclRootInfo, rank: u32, comm: *mut HcclComm) -> Outcome {
    let (device, connect, execute) = {
        let world = world();
        let (_, device) = world.current().map_err(|_| RUNTIME)?;
        (device, world.config.connect_timeout, world.config.execute_timeout)
    };
    if rank >= ranks || comm.is_null() {
        return Err(PARAMETER);
    }
    let end = info.internal.iter().position(|byte| *byte == 0).ok_or(PARAMETER)?;
    let text = str::from_utf8(&info.internal[..end]).map_err(|_| PARAMETER)?;
    let address: SocketAddr = text.parse().map_err(|_| PARAMETER)?;
    let mut stream = TcpStream::connect_timeout(&address, connect).map_err(|_| TIMEOUT)?;
    let prepared = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_read_timeout(Some(connect)))
        .and_then(|()| stream.set_write_timeout(Some(connect)));
    prepared.map_err(|_| INTERNAL)?;
    let hello = Frame { root: rank.into(), count: ranks.into(), ..Frame::default() };
    // A hub that gives up closes the connection: to its ranks that is the timeout it is.
    exchange(&mut stream, &hello).map_err(|code| if code == REMOTE { TIMEOUT } else { code })?;
    stream.set_read_timeout(Some(execute)).map_err(|_| INTERNAL)?;
    let made = Comm::new((rank, ranks), device, address.to_string(), stream);
    let made = made.map_err(|_| INTERNAL)?;
    let mut world = world();
    let id = world.handle();
    world.comms.insert(id, Arc::new(made));
    raw::put(comm, HcclComm(pointer(id))).ok_or(NULL)
}

pub(crate) fn HcclCommInitRootInfo(
    ranks: u32,
    info: *const HcclRootInfo,
    rank: u32,
    comm: *mut HcclComm,
) -> Outcome {
    join(ranks, &raw::get(info).ok_or(NULL)?, rank, comm)
}

pub(crate) fn HcclCommInitRootInfoConfig(
    ranks: u32,
    info: *const HcclRootInfo,
    rank: u32,
    config: *const HcclCommConfig,
    comm: *mut HcclComm,
) -> Outcome {
    // Only what the size names may be read: the fifth version ends where C's does.
    let size = raw::get(config.cast::<usize>()).ok_or(NULL)?;
    if size < HcclCommConfig::SIZE || !config.is_aligned() {
        world().violation("an HcclCommConfig that is too short or badly aligned");
        return Err(PARAMETER);
    }
    let magic = raw::get(config.cast::<u32>().wrapping_add(2));
    let version = raw::get(config.cast::<u32>().wrapping_add(3));
    if magic != Some(HcclCommConfig::MAGIC) || version.is_none_or(|version| version == 0) {
        return Err(PARAMETER);
    }
    HcclCommInitRootInfo(ranks, info, rank, comm)
}

pub(crate) fn HcclCommInitAll(ranks: u32, devices: *mut i32, comms: *mut HcclComm) -> Outcome {
    let devices = raw::array(devices, ranks.into()).ok_or(NULL)?;
    let (patience, context) = {
        let world = world();
        let (context, _) = world.current().map_err(|_| RUNTIME)?;
        (world.config.connect_timeout, context)
    };
    let address = hub::open(patience).map_err(|_| INTERNAL)?.to_string();
    let mut internal = [0; 4108];
    internal[..address.len()].copy_from_slice(address.as_bytes());
    let info = HcclRootInfo { internal };
    let made: Vec<Result<HcclComm, i32>> = thread::scope(|scope| {
        let start = |(rank, device): (usize, &i32)| {
            let (device, info) = (*device, &info);
            scope.spawn(move || {
                crate::acl::aclrtSetDevice(device).map_err(|_| PARAMETER)?;
                let mut comm = HcclComm::NULL;
                join(ranks, info, rank as u32, &raw mut comm).map(|()| comm)
            })
        };
        let started: Vec<_> = devices.iter().enumerate().map(start).collect();
        started.into_iter().map(|rank| rank.join().unwrap_or(Err(INTERNAL))).collect()
    });
    set_current_context(context);
    for (rank, comm) in made.into_iter().enumerate() {
        raw::put(comms.wrapping_add(rank), comm?).ok_or(NULL)?;
    }
    Ok(())
}

pub(crate) fn HcclCommDestroy(comm: HcclComm) -> Outcome {
    let found = comm_of(comm)?;
    let done = found.ended();
    let mut world = world();
    // Relaxed: counted by the threads that call, of which this is the last.
    if done < found.issued.load(Ordering::Relaxed) {
        world.violation("HcclCommDestroy with work of it in a stream");
    }
    world.comms.remove(&comm.0.addr());
    found.close();
    Ok(())
}

pub(crate) fn HcclGetRankSize(comm: HcclComm, ranks: *mut u32) -> Outcome {
    raw::put(ranks, comm_of(comm)?.ranks as u32).ok_or(NULL)
}

pub(crate) fn HcclGetRankId(comm: HcclComm, rank: *mut u32) -> Outcome {
    raw::put(rank, comm_of(comm)?.rank as u32).ok_or(NULL)
}

/// Bytes of an element.
fn width(dtype: HcclDataType) -> Result<usize, i32> {
    match dtype {
        HcclDataType::INT8 | HcclDataType::UINT8 => Ok(1),
        HcclDataType::INT16 | HcclDataType::UINT16 | HcclDataType::FP16 | HcclDataType::BFP16 => {
            Ok(2)
        }
        HcclDataType::INT32 | HcclDataType::UINT32 | HcclDataType::FP32 => Ok(4),
        HcclDataType::INT64 | HcclDataType::UINT64 | HcclDataType::FP64 => Ok(8),
        _ => Err(PARAMETER),
    }
}

/// A range of the device, of a collective.
#[derive(Clone, Copy, Debug)]
struct Range {
    address: usize,
    bytes: usize,
}

impl Range {
    fn new(address: *const c_void, count: u64, dtype: HcclDataType) -> Result<Self, i32> {
        let bytes = usize::try_from(count).ok().and_then(|c| c.checked_mul(width(dtype).ok()?));
        let bytes = bytes.ok_or(PARAMETER)?;
        if address.is_null() && bytes > 0 {
            return Err(NULL);
        }
        Ok(Self { address: address.addr(), bytes })
    }

    fn find(self, world: &mut World, device: usize) -> Result<*mut u8, i32> {
        let found = world.memory.on_device(self.address, self.bytes, device);
        found.map_err(|what| {
            world.violation(format!("HCCL: {what}"));
            IN_STREAM
        })
    }

    fn read(self, device: usize) -> Result<Vec<u8>, i32> {
        if self.bytes == 0 {
            return Ok(Vec::new());
        }
        let mut world = world();
        Ok(raw::read(self.find(&mut world, device)?, self.bytes))
    }

    fn write(self, device: usize, bytes: &[u8]) -> Outcome {
        let mut world = world();
        let range = Self { bytes: bytes.len(), ..self };
        if bytes.is_empty() {
            return Ok(());
        }
        raw::write(range.find(&mut world, device)?, bytes);
        Ok(())
    }
}

/// An operation of one rank: its request, and for each part the ranges to send from and receive to.
struct Call {
    frame: Frame,
    sends: Vec<Option<Range>>,
    receives: Vec<Option<Range>>,
}

/// Puts an operation into a stream.
fn enqueue(comm: HcclComm, stream: AclrtStream, call: Call) -> Outcome {
    let found = comm_of(comm)?;
    // Relaxed: nothing else hangs on it.
    if found.suspended.load(Ordering::Relaxed) != 0 {
        return Err(SUSPENDED);
    }
    let mut world = world();
    let stream = world.stream_of(stream.0.addr()).map_err(|_| PARAMETER)?;
    if world.streams.get(&stream).is_none_or(|stream| stream.device != found.device) {
        world.violation("a communicator is used in a stream of another device");
        return Err(PARAMETER);
    }
    // Under the world's lock, so that numbers are in the order of the streams' work.
    let number = found.issued.fetch_add(1, Ordering::Relaxed);
    let turn = Turn::new(found, number);
    let job: Job = Box::new(move || perform(turn, call));
    world.submit(stream, job).map(drop).map_err(|_| RUNTIME)
}

fn perform(mut turn: Turn, call: Call) -> Outcome {
    let device = turn.comm.device;
    let Call { mut frame, sends, receives } = call;
    for (part, range) in frame.parts.iter_mut().zip(sends) {
        if let Some(range) = range {
            part.bytes = range.read(device)?;
        }
    }
    let answer = turn.ask(&frame).map_err(|_| IN_STREAM)?;
    for (part, range) in answer.parts.iter().zip(receives) {
        if let Some(range) = range {
            range.write(device, &part.bytes)?;
        }
    }
    Ok(())
}

/// The arguments of a collective that must be the same on all ranks.
struct Shape {
    verb: Verb,
    dtype: HcclDataType,
    op: Option<HcclReduceOp>,
    root: u32,
    count: u64,
}

/// A collective: one part goes, one comes.
fn collective(
    comm: HcclComm,
    stream: AclrtStream,
    shape: Shape,
    from: Option<Range>,
    to: Option<Range>,
) -> Outcome {
    let Shape { verb, dtype, op, root, count } = shape;
    if let Some(op) = op {
        if !(HcclReduceOp::SUM.0..=HcclReduceOp::MIN.0).contains(&op.0) {
            return Err(PARAMETER);
        }
        if !world().config.soc.reduces(dtype, op) {
            return Err(UNSUPPORTED);
        }
    }
    if root as usize >= comm_of(comm)?.ranks {
        return Err(PARAMETER);
    }
    let op = op.map_or(0, |op| op.0 as u64);
    let (kind, dtype) = (verb as u64, dtype.0 as u64);
    let parts = vec![Part::default()];
    let frame = Frame { kind, dtype, op, root: root.into(), count, parts };
    enqueue(comm, stream, Call { frame, sends: vec![from], receives: vec![to] })
}

pub(crate) fn HcclAllReduce(
    from: *mut c_void,
    to: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    op: HcclReduceOp,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let shape = Shape { verb: Verb::AllReduce, dtype, op: Some(op), root: 0, count };
    let (from, to) = (Range::new(from, count, dtype)?, Range::new(to, count, dtype)?);
    collective(comm, stream, shape, Some(from), Some(to))
}

pub(crate) fn HcclBroadcast(
    buffer: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    root: u32,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let shape = Shape { verb: Verb::Broadcast, dtype, op: None, root, count };
    let here = Range::new(buffer, count, dtype)?;
    let is_root = comm_of(comm)?.rank == root as usize;
    let (from, to) = if is_root { (Some(here), None) } else { (None, Some(here)) };
    collective(comm, stream, shape, from, to)
}

pub(crate) fn HcclReduceScatter(
    from: *mut c_void,
    to: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    op: HcclReduceOp,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let ranks = comm_of(comm)?.ranks as u64;
    let shape = Shape { verb: Verb::ReduceScatter, dtype, op: Some(op), root: 0, count };
    let all = Range::new(from, count.saturating_mul(ranks), dtype)?;
    collective(comm, stream, shape, Some(all), Some(Range::new(to, count, dtype)?))
}

pub(crate) fn HcclAllGather(
    from: *mut c_void,
    to: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let ranks = comm_of(comm)?.ranks as u64;
    let shape = Shape { verb: Verb::AllGather, dtype, op: None, root: 0, count };
    let all = Range::new(to, count.saturating_mul(ranks), dtype)?;
    collective(comm, stream, shape, Some(Range::new(from, count, dtype)?), Some(all))
}

pub(crate) fn HcclReduce(
    from: *mut c_void,
    to: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    op: HcclReduceOp,
    root: u32,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let is_root = comm_of(comm)?.rank == root as usize;
    let shape = Shape { verb: Verb::Reduce, dtype, op: Some(op), root, count };
    let to = if is_root { Some(Range::new(to, count, dtype)?) } else { None };
    collective(comm, stream, shape, Some(Range::new(from, count, dtype)?), to)
}

pub(crate) fn HcclScatter(
    from: *mut c_void,
    to: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    root: u32,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let found = comm_of(comm)?;
    let shape = Shape { verb: Verb::Scatter, dtype, op: None, root, count };
    let all = count.saturating_mul(found.ranks as u64);
    let is_root = found.rank == root as usize;
    let from = if is_root { Some(Range::new(from, all, dtype)?) } else { None };
    collective(comm, stream, shape, from, Some(Range::new(to, count, dtype)?))
}

pub(crate) fn HcclBarrier(comm: HcclComm, stream: AclrtStream) -> Outcome {
    let dtype = HcclDataType::INT8;
    let shape = Shape { verb: Verb::Barrier, dtype, op: None, root: 0, count: 0 };
    collective(comm, stream, shape, None, None)
}

/// A message to, or from, a peer.
struct Message {
    receive: bool,
    range: Range,
    peer: u32,
}

fn messages(comm: HcclComm, stream: AclrtStream, messages: &[Message]) -> Outcome {
    let found = comm_of(comm)?;
    if messages.iter().any(|message| message.peer as usize >= found.ranks) {
        return Err(PARAMETER);
    }
    let part = |message: &Message| Part {
        peer: message.peer.into(),
        receive: u64::from(message.receive),
        expects: if message.receive { message.range.bytes as u64 } else { 0 },
        bytes: Vec::new(),
    };
    let parts = messages.iter().map(part).collect();
    let frame = Frame { kind: Verb::Messages as u64, parts, ..Frame::default() };
    let ranges = |receive| {
        let only = |m: &Message| (m.receive == receive).then_some(m.range);
        messages.iter().map(only).collect()
    };
    enqueue(comm, stream, Call { frame, sends: ranges(false), receives: ranges(true) })
}

pub(crate) fn HcclSend(
    from: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    peer: u32,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let range = Range::new(from, count, dtype)?;
    messages(comm, stream, &[Message { receive: false, range, peer }])
}

pub(crate) fn HcclRecv(
    to: *mut c_void,
    count: u64,
    dtype: HcclDataType,
    peer: u32,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let range = Range::new(to, count, dtype)?;
    messages(comm, stream, &[Message { receive: true, range, peer }])
}

pub(crate) fn HcclBatchSendRecv(
    items: *mut HcclSendRecvItem,
    count: u32,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let items = raw::array(items, count.into()).ok_or(NULL)?;
    let mut all = Vec::new();
    for item in items {
        let receive = match item.direction {
            HcclSendRecvType::SEND => false,
            HcclSendRecvType::RECV => true,
            _ => return Err(PARAMETER),
        };
        let range = Range::new(item.buf, item.count, item.data_type)?;
        all.push(Message { receive, range, peer: item.remote_rank });
    }
    messages(comm, stream, &all)
}

/// Counts and offsets of one side of an all-to-all, in elements.
fn blocks(
    address: *const c_void,
    (counts, offsets): (&[u64], &[u64]),
    dtype: HcclDataType,
    receive: bool,
) -> Result<Vec<Message>, i32> {
    let wide = width(dtype)?;
    let block = |(peer, (count, offset)): (usize, (&u64, &u64))| {
        let at = usize::try_from(*offset).ok().and_then(|offset| offset.checked_mul(wide));
        let from = address.wrapping_byte_add(at.ok_or(PARAMETER)?);
        Ok(Message { receive, range: Range::new(from, *count, dtype)?, peer: peer as u32 })
    };
    counts.iter().zip(offsets).enumerate().map(block).collect()
}

pub(crate) fn HcclAlltoAll(
    from: *const c_void,
    send_count: u64,
    send_dtype: HcclDataType,
    to: *const c_void,
    recv_count: u64,
    recv_dtype: HcclDataType,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let ranks = comm_of(comm)?.ranks as u64;
    let even = |count: u64| -> (Vec<u64>, Vec<u64>) {
        ((0..ranks).map(|_| count).collect(), (0..ranks).map(|rank| rank * count).collect())
    };
    let ((sent, sent_at), (got, got_at)) = (even(send_count), even(recv_count));
    let mut all = blocks(from, (&sent, &sent_at), send_dtype, false)?;
    all.extend(blocks(to, (&got, &got_at), recv_dtype, true)?);
    messages(comm, stream, &all)
}

pub(crate) fn HcclAlltoAllV(
    from: *const c_void,
    send_counts: *const c_void,
    send_offsets: *const c_void,
    send_dtype: HcclDataType,
    to: *const c_void,
    recv_counts: *const c_void,
    recv_offsets: *const c_void,
    recv_dtype: HcclDataType,
    comm: HcclComm,
    stream: AclrtStream,
) -> Outcome {
    let ranks = comm_of(comm)?.ranks as u64;
    let numbers = |list: *const c_void| raw::array(list.cast::<u64>(), ranks).ok_or(NULL);
    let (sent, sent_at) = (numbers(send_counts)?, numbers(send_offsets)?);
    let (got, got_at) = (numbers(recv_counts)?, numbers(recv_offsets)?);
    let mut all = blocks(from, (&sent, &sent_at), send_dtype, false)?;
    all.extend(blocks(to, (&got, &got_at), recv_dtype, true)?);
    messages(comm, stream, &all)
}

pub(crate) fn HcclGetCommAsyncError(comm: HcclComm, error: *mut HcclResult) -> Outcome {
    // Relaxed: the number is all there is.
    let code = comm_of(comm)?.error.load(Ordering::Relaxed);
    raw::put(error, HcclResult(code)).ok_or(NULL)
}

pub(crate) fn HcclGetErrorString(error: HcclResult) -> Result<*const c_char, i32> {
    let text: &CStr = match error.0 {
        0 => c"no error",
        PARAMETER => c"parameter error",
        UNSUPPORTED => c"feature not supported",
        TIMEOUT => c"timeout",
        _ => c"error",
    };
    Ok(text.as_ptr())
}

pub(crate) fn HcclGetCommConfigCapability() -> Result<u32, i32> {
    Ok(HcclCommConfig::VERSION)
}

pub(crate) fn HcclGetCommName(comm: HcclComm, name: *mut c_char) -> Outcome {
    let found = comm_of(comm)?;
    for (at, byte) in found.name.bytes().chain([0]).enumerate() {
        raw::put(name.wrapping_add(at), c_char::from_ne_bytes([byte])).ok_or(NULL)?;
    }
    Ok(())
}

pub(crate) fn HcclCommSuspend(comm: HcclComm) -> Outcome {
    // Relaxed: nothing else hangs on it.
    comm_of(comm)?.suspended.store(1, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn HcclCommResume(comm: HcclComm) -> Outcome {
    // Relaxed: nothing else hangs on it.
    comm_of(comm)?.suspended.store(0, Ordering::Relaxed);
    Ok(())
}

pub(crate) fn HcclSetConfig(which: HcclConfig, _value: HcclConfigValue) -> Outcome {
    if which == HcclConfig::DETERMINISTIC { Ok(()) } else { Err(PARAMETER) }
}
