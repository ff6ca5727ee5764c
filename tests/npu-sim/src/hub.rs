//! The hub of a communicator: every operation goes through one thread of the root's process, which
//! collects the ranks' data, reduces it in the order of ranks, and sends each rank its result.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use npu_sys::sys::{HcclDataType, HcclReduceOp};

use crate::kernels::to_half;
use crate::wire::{Frame, Part};
use crate::world::world;

/// The kind of a request to the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Verb {
    Hello,
    AllReduce,
    Broadcast,
    ReduceScatter,
    AllGather,
    Reduce,
    Scatter,
    Barrier,
    Messages,
}

impl Verb {
    const ALL: [Self; 9] = [
        Self::Hello,
        Self::AllReduce,
        Self::Broadcast,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Reduce,
        Self::Scatter,
        Self::Barrier,
        Self::Messages,
    ];

    fn of(frame: &Frame) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| *verb as u64 == frame.kind)
    }
}

pub(crate) const PARAMETER: i32 = 1;
pub(crate) const UNSUPPORTED: i32 = 5;

/// Starts a hub; where it listens. It ends when every rank has gone, or when they have not all come
/// within `patience`.
pub(crate) fn open(patience: Duration) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("npu-sim hub".into()).spawn(move || {
        // On failure the connections close, so the ranks that wait for the hub get an error.
        if let Ok(ranks) = assemble(&listener, patience) {
            serve(ranks);
        }
    })?;
    Ok(address)
}

/// Takes connections until each rank has one.
fn assemble(listener: &TcpListener, patience: Duration) -> io::Result<Vec<TcpStream>> {
    let deadline = Instant::now() + patience;
    listener.set_nonblocking(true)?;
    let mut ranks = BTreeMap::new();
    let mut size = None;
    while size.is_none_or(|size| (ranks.len() as u64) < size) {
        match listener.accept() {
            Ok((mut stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(patience))?;
                let hello = Frame::read(&mut stream)?;
                let fits = hello.root < hello.count && size.is_none_or(|size| size == hello.count);
                if !fits || ranks.contains_key(&hello.root) {
                    refuse(ranks.into_values().chain([stream]));
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                size = Some(hello.count);
                stream.set_read_timeout(None)?;
                ranks.insert(hello.root, stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
    let mut ranks: Vec<_> = ranks.into_values().collect();
    for stream in &mut ranks {
        Frame::default().write(stream)?;
    }
    Ok(ranks)
}

fn refuse(ranks: impl Iterator<Item = TcpStream>) {
    let refused = Frame { kind: PARAMETER as u64, ..Frame::default() };
    // A rank that has left needs no answer.
    ranks.for_each(|mut stream| drop(refused.write(&mut stream)));
}

type Arrival = (usize, Option<Frame>);

fn listen(rank: usize, stream: &TcpStream, arrivals: Sender<Arrival>) -> io::Result<()> {
    let mut stream = stream.try_clone()?;
    thread::Builder::new().name("npu-sim rank".into()).spawn(move || {
        loop {
            let frame = Frame::read(&mut stream).ok();
            let gone = frame.is_none();
            if arrivals.send((rank, frame)).is_err() || gone {
                return;
            }
        }
    })?;
    Ok(())
}

/// One operation after another, until the ranks are gone. A rank sends nothing before its last
/// operation was answered, so each has at most one outstanding.
fn serve(ranks: Vec<TcpStream>) {
    let (sender, arrivals) = mpsc::channel();
    let listening =
        ranks.iter().enumerate().try_for_each(|(rank, s)| listen(rank, s, sender.clone()));
    drop(sender);
    if listening.is_ok() {
        answer_all(ranks.iter().collect(), &arrivals);
    }
    for stream in &ranks {
        // It may have gone by itself.
        drop(stream.shutdown(Shutdown::Both));
    }
}

fn answer_all(mut ranks: Vec<&TcpStream>, arrivals: &Receiver<Arrival>) {
    let mut outstanding: Vec<Option<Frame>> = vec![None; ranks.len()];
    let mut left = ranks.len();
    while left > 0 {
        let Ok((rank, frame)) = arrivals.recv() else { return };
        match frame {
            Some(frame) => outstanding[rank] = Some(frame),
            // Peers of one that died wait until they have waited long enough, as with HCCL.
            None => left -= 1,
        }
        let ready: Option<Vec<Frame>> = outstanding.iter().cloned().collect();
        let together = ready
            .filter(|frames| frames.iter().all(|frame| Verb::of(frame) != Some(Verb::Messages)));
        let answers: Vec<_> = match together {
            Some(frames) => fold(&frames).into_iter().enumerate().collect(),
            None => delivered(&mut outstanding),
        };
        // Rank 0 last: with its answer its process may end, which as a rule has this thread.
        for (rank, answer) in answers.into_iter().rev() {
            outstanding[rank] = None;
            // A rank that has left needs no answer.
            drop(answer.write(&mut ranks[rank]));
        }
    }
}

fn failed(code: i32) -> Frame {
    Frame { kind: code as u64, ..Frame::default() }
}

fn done(bytes: Vec<u8>) -> Frame {
    Frame { parts: vec![Part { bytes, ..Part::default() }], ..Frame::default() }
}

/// The ranks' results of one collective.
fn fold(frames: &[Frame]) -> Vec<Frame> {
    let same = |a: &Frame, b: &Frame| {
        (a.kind, a.dtype, a.op, a.root, a.count) == (b.kind, b.dtype, b.op, b.root, b.count)
    };
    let ranks = frames.len();
    let verb = Verb::of(&frames[0]);
    if frames.iter().any(|frame| !same(frame, &frames[0])) {
        return vec![failed(PARAMETER); ranks];
    }
    let (root, dtype) = (frames[0].root as usize, HcclDataType(frames[0].dtype as i32));
    let sent: Vec<&[u8]> =
        frames.iter().map(|f| f.parts.first().map_or(&[][..], |p| &p.bytes)).collect();
    let reduced = || reduce(&sent, dtype, HcclReduceOp(frames[0].op as i32));
    let shares = |all: Vec<u8>| {
        let share = all.len() / ranks;
        (0..ranks).map(|rank| done(all[rank * share..][..share].to_vec())).collect()
    };
    let at_root = |bytes: Vec<u8>| {
        let mut answers = vec![done(Vec::new()); ranks];
        answers[root] = done(bytes);
        answers
    };
    match verb {
        Some(Verb::AllReduce) => vec![done(reduced()); ranks],
        Some(Verb::Reduce) => at_root(reduced()),
        Some(Verb::ReduceScatter) => shares(reduced()),
        Some(Verb::AllGather) => vec![done(sent.concat()); ranks],
        Some(Verb::Broadcast) => vec![done(sent[root].to_vec()); ranks],
        Some(Verb::Scatter) => shares(sent[root].to_vec()),
        Some(Verb::Barrier) => vec![done(Vec::new()); ranks],
        Some(Verb::Hello | Verb::Messages) | None => vec![failed(UNSUPPORTED); ranks],
    }
}

/// Reduces in the order of ranks: integers wrap, floats are reduced in f32 and rounded once. f16
/// saturates if the chip's does; no document says that this sets the overflow flag, so it does not.
fn reduce(sent: &[&[u8]], dtype: HcclDataType, op: HcclReduceOp) -> Vec<u8> {
    match dtype {
        HcclDataType::INT8 => {
            integers(sent, op, |b| i8::from_le_bytes(b).into(), |n| (n as i8).to_le_bytes())
        }
        HcclDataType::INT16 => {
            integers(sent, op, |b| i16::from_le_bytes(b).into(), |n| (n as i16).to_le_bytes())
        }
        HcclDataType::INT32 => {
            integers(sent, op, |b| i32::from_le_bytes(b).into(), |n| (n as i32).to_le_bytes())
        }
        HcclDataType::INT64 => integers(sent, op, i64::from_le_bytes, i64::to_le_bytes),
        HcclDataType::FP16 => {
            let saturates = world().config.soc.saturates();
            let write = |n: f32| to_half(n.into(), saturates).0.to_le_bytes();
            floats(sent, op, |b| f16::from_le_bytes(b).to_f32(), write)
        }
        HcclDataType::BFP16 => floats(
            sent,
            op,
            |b| bf16::from_le_bytes(b).to_f32(),
            |n| bf16::from_f32(n).to_le_bytes(),
        ),
        _ => floats(sent, op, f32::from_le_bytes, f32::to_le_bytes),
    }
}

fn integers<const N: usize>(
    sent: &[&[u8]],
    op: HcclReduceOp,
    read: impl Fn([u8; N]) -> i64,
    write: impl Fn(i64) -> [u8; N],
) -> Vec<u8> {
    columns(sent, read, |a, b| match op {
        HcclReduceOp::PROD => a.wrapping_mul(b),
        HcclReduceOp::MAX => a.max(b),
        HcclReduceOp::MIN => a.min(b),
        _ => a.wrapping_add(b),
    })
    .flat_map(write)
    .collect()
}

fn floats<const N: usize>(
    sent: &[&[u8]],
    op: HcclReduceOp,
    read: impl Fn([u8; N]) -> f32,
    write: impl Fn(f32) -> [u8; N],
) -> Vec<u8> {
    columns(sent, read, |a, b| match op {
        HcclReduceOp::PROD => a * b,
        HcclReduceOp::MAX => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        HcclReduceOp::MIN => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        _ => a + b,
    })
    .flat_map(write)
    .collect()
}

/// Every rank's elements, folded one by one in the order of ranks.
fn columns<const N: usize, T: Copy>(
    sent: &[&[u8]],
    read: impl Fn([u8; N]) -> T,
    fold: impl Fn(T, T) -> T,
) -> impl Iterator<Item = T> {
    let each: Vec<Vec<T>> =
        sent.iter().map(|bytes| bytes.as_chunks().0.iter().map(|c| read(*c)).collect()).collect();
    let first = each[0].clone();
    let folded = each[1..].iter().fold(first, |so_far: Vec<T>, next: &Vec<T>| {
        so_far.iter().zip(next).map(|(a, b)| fold(*a, *b)).collect()
    });
    folded.into_iter()
}

/// Matches sends with receives; the answers of ranks all of whose messages have met.
fn delivered(outstanding: &mut [Option<Frame>]) -> Vec<(usize, Frame)> {
    let mut answers = Vec::new();
    let messages = |frame: &Option<Frame>| {
        frame.as_ref().filter(|frame| Verb::of(frame) == Some(Verb::Messages)).cloned()
    };
    let mut frames: Vec<Option<Frame>> = outstanding.iter().map(messages).collect();
    for from in 0..frames.len() {
        let parts = frames[from].as_ref().map_or(0, |frame| frame.parts.len());
        for at in 0..parts {
            let Some(sent) = frames[from].as_ref().map(|frame| frame.parts[at].clone()) else {
                continue;
            };
            if sent.receive != 0 || sent.expects == MET {
                continue;
            }
            let to = sent.peer as usize;
            let Some(peer) = frames.get_mut(to).and_then(Option::as_mut) else { continue };
            let waiting = |part: &&mut Part| part.receive == 1 && part.peer == from as u64;
            let Some(place) = peer.parts.iter_mut().find(waiting) else { continue };
            if place.expects != sent.bytes.len() as u64 {
                return vec![(from, failed(PARAMETER)), (to, failed(PARAMETER))];
            }
            (place.receive, place.bytes) = (RECEIVED, sent.bytes);
            if let Some(sender) = frames[from].as_mut() {
                sender.parts[at] = Part { peer: sent.peer, expects: MET, ..Part::default() };
            }
        }
    }
    for (rank, frame) in frames.into_iter().enumerate() {
        let Some(mut frame) = frame else { continue };
        let met =
            |part: &Part| part.receive == RECEIVED || (part.receive == 0 && part.expects == MET);
        if frame.parts.iter().all(met) {
            frame.kind = 0;
            answers.push((rank, frame));
        } else {
            outstanding[rank] = Some(frame);
        }
    }
    answers
}

/// A send that has met its receive.
const MET: u64 = u64::MAX;
/// A receive that has its bytes.
const RECEIVED: u64 = 2;
