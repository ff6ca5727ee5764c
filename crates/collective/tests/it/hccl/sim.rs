//! Ranks on the simulator: each is a thread with a context, a stream and memory of its own device.

#![expect(unsafe_code, reason = "passes on the simulator's functions and memory")]

use std::cell::RefCell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use collective::hccl::{Config, Libraries, connector};
use collective::{
    DType, Element, GroupOptions, MemoryStore, ProcessGroup, ReduceOp, Result, Store,
    backend::Connect,
    device::{DeviceBuf, DeviceStream},
};
use npu_sim::Session;
use npu_sys::safe::{Buffer, Context, Stream as Queue};
use npu_sys::sys::AclrtMemcpyKind;

/// The simulator's functions, except those that `instead` replaces; null removes a function.
pub(crate) fn libraries_but(
    instead: &dyn Fn(&'static str) -> Option<*mut c_void>,
) -> Result<Libraries> {
    let find = |name| match instead(name) {
        Some(other) => NonNull::new(other),
        None => npu_sim::symbol(name),
    };
    // SAFETY: the simulator is generated from the rows of the tables; replacements have the
    // prototypes of the functions that they replace.
    unsafe { Libraries::from_symbols(&find) }
}

pub(crate) fn libraries() -> Libraries {
    libraries_but(&|_| None).unwrap()
}

/// One rank, not bound to a thread.
#[derive(Debug)]
pub(crate) struct Rank {
    // In the order in which they must be dropped.
    pub(crate) group: ProcessGroup,
    context: Context,
}

/// Joins a group as the rank of this number, on the device of the same number.
pub(crate) fn join(
    store: Arc<dyn Store>,
    (rank, world): (usize, usize),
    options: GroupOptions,
    connect: Arc<Connect>,
) -> Result<Rank> {
    let context = Context::new(npu_sim::acl(), rank).unwrap();
    let entered = context.enter().unwrap();
    let options = options.with_npu_device(rank as u32);
    let group = ProcessGroup::from_store_with(store, rank, world, options, connect)?;
    drop(entered);
    Ok(Rank { group, context })
}

/// Joins one rank per connector and options, each on its own thread and device.
pub(crate) fn join_all(ranks: Vec<(Arc<Connect>, GroupOptions)>) -> Vec<Result<Rank>> {
    let (store, world) = (Arc::new(MemoryStore::new()), ranks.len());
    std::thread::scope(|scope| {
        let join = |(rank, (connect, options))| {
            let store: Arc<dyn Store> = Arc::<MemoryStore>::clone(&store);
            scope.spawn(move || join(store, (rank, world), options, connect))
        };
        let ranks: Vec<_> = ranks.into_iter().enumerate().map(join).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The ranks of a group, or their errors.
pub(crate) fn groups(world: usize, options: &GroupOptions, config: &Config) -> Vec<Result<Rank>> {
    let connect = connector(libraries(), config.clone());
    join_all(vec![(connect, options.clone()); world])
}

/// The ranks of a group, each with its own libraries; panics if one fails to join.
pub(crate) fn connect_all(options: &GroupOptions, libraries: &[Libraries]) -> Vec<Rank> {
    let connect = |libraries: &Libraries| connector(libraries.clone(), Config::default());
    let ranks = libraries.iter().map(|libraries| (connect(libraries), options.clone())).collect();
    join_all(ranks).into_iter().map(Result::unwrap).collect()
}

/// Calls `rank` on every rank, with its stream; memory that it allocates is on its device.
/// Everything has been released when this returns.
pub(crate) fn play<T: Send>(
    ranks: Vec<Rank>,
    rank: impl Fn(ProcessGroup, &Stream) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let one = |Rank { group, context }| {
            scope.spawn(move || {
                let stream = Stream::new(&context);
                HERE.with_borrow_mut(|here| *here = Some(Rc::clone(&stream.0)));
                // No context is current from here on; code that needs one enters it.
                let result = rank(group, &stream);
                HERE.with_borrow_mut(|here| *here = None);
                result
            })
        };
        let threads: Vec<_> = ranks.into_iter().map(one).collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Joins a group and calls `rank` on every rank; panics if one fails to join.
pub(crate) fn play_all<T: Send>(
    world: usize,
    options: &GroupOptions,
    config: &Config,
    rank: impl Fn(ProcessGroup, &Stream) -> T + Sync,
) -> Vec<T> {
    play(groups(world, options, config).into_iter().map(Result::unwrap).collect(), rank)
}

/// Ends a session and checks that no rule was broken and everything was released.
#[track_caller]
pub(crate) fn finish(session: Session) {
    assert_eq!(session.finish(), [""; 0]);
}

/// Whether HCCL supports the operator for the type, on the second generation of chips.
pub(crate) fn has(op: ReduceOp, of: DType) -> bool {
    let known = [DType::I8, DType::I32, DType::I64, DType::F16, DType::Bf16, DType::F32];
    let by = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Min | ReduceOp::Max => true,
        ReduceOp::Product => of != DType::Bf16,
        _ => false,
    };
    by && known.contains(&of)
}

/// Whether its results have the same bits as on the host, where an average is a product with the
/// reciprocal, rounded once; averages have their own test.
pub(crate) fn reduces(op: ReduceOp, of: DType) -> bool {
    has(op, of) && op != ReduceOp::Avg
}

thread_local! {
    static HERE: RefCell<Option<Rc<Queue>>> = const { RefCell::new(None) };
}

/// The stream of this thread's rank.
fn here() -> Rc<Queue> {
    HERE.with_borrow(|here| Rc::clone(here.as_ref().unwrap()))
}

/// A stream of a rank's device.
#[derive(Clone, Debug)]
pub(crate) struct Stream(Rc<Queue>);

impl Stream {
    fn new(context: &Context) -> Self {
        Self(Rc::new(Queue::new(context).unwrap()))
    }

    /// Another stream of the same device.
    pub(crate) fn another() -> Self {
        Self::new(here().context())
    }

    pub(crate) fn raw(&self) -> DeviceStream {
        // SAFETY: the stream exists, and tests wait until their work has completed or failed.
        unsafe { DeviceStream::from_raw(self.0.raw().0) }
    }

    pub(crate) fn context(&self) -> Context {
        self.0.context().clone()
    }

    /// Waits until the stream has completed its work, with or without an error.
    pub(crate) fn sync(&self) {
        drop(self.0.synchronize());
    }
}

/// Memory on the device of this thread's rank.
#[derive(Debug)]
pub(crate) struct Memory<T> {
    buffer: Buffer,
    count: usize,
    of: PhantomData<T>,
}

impl<T: Element> Memory<T> {
    pub(crate) fn new(numbers: Vec<T>) -> Self {
        let bytes = size_of_val(&numbers[..]);
        let buffer = Buffer::new(here().context(), bytes.max(1)).unwrap();
        // SAFETY: every element type is plain bits; the slice has this many bytes.
        let raw = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), bytes) };
        here().upload(&buffer, 0, raw).unwrap();
        here().synchronize().unwrap();
        Self { buffer, count: numbers.len(), of: PhantomData }
    }

    pub(crate) fn buf(&mut self) -> DeviceBuf {
        let address = self.buffer.address().expose_provenance() as u64;
        // SAFETY: tests keep the memory until their work has settled, and do not access it
        // meanwhile.
        unsafe { DeviceBuf::from_raw(address, self.count, T::DTYPE) }.unwrap()
    }

    pub(crate) fn numbers(&self) -> Vec<T> {
        download(&self.buffer, self.count)
    }
}

fn download<T: Element>(buffer: &Buffer, count: usize) -> Vec<T> {
    let mut numbers = vec![T::default(); count];
    let bytes = size_of_val(&numbers[..]);
    // SAFETY: every bit pattern is a number; the slice has this many bytes.
    let raw = unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<u8>(), bytes) };
    here().download(buffer, 0, raw).unwrap();
    numbers
}

/// Reads a buffer on the device of this thread's rank, once its stream is done.
pub(crate) fn read<T: Element>(buf: DeviceBuf) -> Vec<T> {
    let stream = here();
    let _entered = stream.context().enter().unwrap();
    let mut numbers = vec![T::default(); buf.count()];
    let from = std::ptr::with_exposed_provenance(buf.address() as usize);
    let (to, bytes) = (numbers.as_mut_ptr().cast(), buf.bytes());
    let kind = AclrtMemcpyKind::DEVICE_TO_HOST;
    // SAFETY: both have this many bytes; every bit pattern is a number.
    unsafe { npu_sim::acl().aclrtMemcpy(to, bytes, from, bytes, kind) }.unwrap();
    numbers
}
