//! Programs on the safe layer of `npu-sys`, made of bytes, beside a model of plain memory.
//!
//! Whatever the bytes, no rule may be broken, nothing left, and every byte read as the model says.

use npu_sys::safe::{Buffer, Context, Event, Stream};
use npu_sys::{Error, Result};

use crate::{Config, acl, start};

/// Most buffers at a time.
const BUFFERS: usize = 4;
/// Bytes that fresh memory holds.
const FRESH: u8 = 0xff;

/// A buffer and what must be in it.
struct Pair {
    buffer: Buffer,
    model: Vec<u8>,
}

impl Pair {
    /// The bytes of a range, if it is inside.
    fn range(&mut self, offset: usize, bytes: usize) -> Option<&mut [u8]> {
        self.model.get_mut(offset..offset + bytes)
    }
}

/// One buffer's context, the streams that take turns in it, and the buffers.
struct Program {
    context: Context,
    streams: [Stream; 2],
    turn: usize,
    pairs: Vec<Pair>,
}

/// Runs the program that these bytes spell.
///
/// # Panics
///
/// If a rule of CANN is broken, something is left, or a byte is not what it must be.
pub fn run(bytes: &[u8]) {
    let (first, mut rest) = bytes.split_first().unwrap_or((&0, &[]));
    let sim = start(Config { eager: first & 1 == 1, ..Config::default() });
    let device = usize::from(first >> 1) % 8;
    let made = Program::new(device).and_then(|mut program| {
        while let Some((step, after)) = rest.split_first_chunk::<4>() {
            rest = after;
            program.step(*step)?;
        }
        Ok(())
    });
    made.expect("no call is made to fail");
    assert_eq!(sim.finish(), [""; 0]);
}

impl Program {
    fn new(device: usize) -> Result<Self> {
        let context = Context::new(acl(), device)?;
        let streams = [Stream::new(&context)?, Stream::new(&context)?];
        Ok(Self { context, streams, turn: 0, pairs: Vec::new() })
    }

    /// One step: what to do, to which buffer, where, with how much.
    fn step(&mut self, [what, which, offset, bytes]: [u8; 4]) -> Result<()> {
        let (at, count) = (usize::from(offset), usize::from(bytes));
        match what % 8 {
            0 => return self.allocate(count),
            6 => return self.pass_on(),
            7 => return self.replace_stream(),
            _ if self.pairs.is_empty() => return Ok(()),
            _ => {}
        }
        let stream = &self.streams[self.turn];
        let (to, from) = (usize::from(which) % self.pairs.len(), usize::from(which / 16));
        match what % 8 {
            1 => drop(self.pairs.remove(to)),
            2 => {
                let pair = &mut self.pairs[to];
                let content: Vec<u8> = (0..bytes).map(|byte| byte ^ offset ^ what).collect();
                let done = stream.upload(&pair.buffer, at, &content);
                agree(done, pair.range(at, count).map(|range| range.copy_from_slice(&content)))?;
            }
            3 => {
                let pair = &mut self.pairs[to];
                let done = stream.fill(&pair.buffer, at, count.max(1), what);
                agree(done, pair.range(at, count.max(1)).map(|range| range.fill(what)))?;
            }
            4 => {
                let from = from % self.pairs.len();
                let (start, count) = (at / 2, count.max(1));
                let (source, target) = (&self.pairs[from].buffer, &self.pairs[to].buffer);
                let done = stream.copy((target, at), (source, start), count);
                let apart = from != to || at.abs_diff(start) >= count;
                let content = self.pairs[from].range(start, count).map(|range| range.to_vec());
                let content = content.filter(|_| apart);
                let target = self.pairs[to].range(at, count);
                agree(done, target.zip(content).map(|(to, from)| to.copy_from_slice(&from)))?;
            }
            _ => {
                let pair = &mut self.pairs[to];
                let mut read = vec![0; count];
                let done = stream.download(&pair.buffer, at, &mut read);
                agree(done, pair.range(at, count).map(|range| assert_eq!(read, range)))?;
            }
        }
        Ok(())
    }

    fn allocate(&mut self, bytes: usize) -> Result<()> {
        if self.pairs.len() == BUFFERS {
            return Ok(());
        }
        let made = Buffer::new(&self.context, bytes);
        match made {
            Ok(buffer) => self.pairs.push(Pair { buffer, model: vec![FRESH; bytes] }),
            Err(Error::Argument { .. }) if bytes == 0 => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The other stream goes on where this one is.
    fn pass_on(&mut self) -> Result<()> {
        let event = Event::new(&self.context)?;
        event.record(&self.streams[self.turn])?;
        self.turn = 1 - self.turn;
        event.hold_back(&self.streams[self.turn])
    }

    fn replace_stream(&mut self) -> Result<()> {
        self.streams[self.turn] = Stream::new(&self.context)?;
        Ok(())
    }
}

/// What the model cannot do must have been refused, and nothing else.
fn agree(done: Result<()>, modelled: Option<()>) -> Result<()> {
    match (done, modelled) {
        (Err(Error::Argument { .. }), None) => Ok(()),
        (done, Some(())) => done,
        (done, None) => panic!("a range is outside, or overlaps itself, but: {done:?}"),
    }
}
