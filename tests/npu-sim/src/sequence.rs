//! Programs on the safe layer of `npu-sys`, operators included, that are generated from bytes and
//! compared with a model in plain memory.
//!
//! For all input bytes: no rule is broken, nothing leaks, and every byte read equals the model's.

use npu_sys::safe::{Buffer, Context, Event, Operators, Stream, View};
use npu_sys::sys::AclDataType;
use npu_sys::{Error, Result};

use crate::{Config, acl, nnop, ops, start};

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
    streams: [Operators; 2],
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
        let streams = [new_stream(&context)?, new_stream(&context)?];
        Ok(Self { context, streams, turn: 0, pairs: Vec::new() })
    }

    /// One step: what to do, to which buffer, where, with how much.
    fn step(&mut self, [what, which, offset, bytes]: [u8; 4]) -> Result<()> {
        let (at, count) = (usize::from(offset), usize::from(bytes));
        match what % 10 {
            0 => return self.allocate(count),
            6 => return self.pass_on(),
            7 => return self.replace_stream(),
            _ if self.pairs.is_empty() => return Ok(()),
            8 | 9 => return self.compute(what, which, at, count % 16),
            _ => {}
        }
        let stream = self.streams[self.turn].stream();
        let (to, from) = (usize::from(which) % self.pairs.len(), usize::from(which / 16));
        match what % 10 {
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
        event.record(self.streams[self.turn].stream())?;
        self.turn = 1 - self.turn;
        event.wait(self.streams[self.turn].stream())
    }

    /// An operator on numbers of two buffers, or of one: `to ← f·from`, or `to ← to + f·from`.
    fn compute(&mut self, what: u8, which: u8, at: usize, count: usize) -> Result<()> {
        let (to, from) = (usize::from(which) % self.pairs.len(), usize::from(which / 16));
        let (from, factor) = (from % self.pairs.len(), f32::from(what) - 100.0);
        let on = &self.streams[self.turn];
        let view = |pair: &Pair| View::new(&pair.buffer, at, &[count], AclDataType::FLOAT);
        let views = view(&self.pairs[to]).and_then(|to| Ok((to, view(&self.pairs[from])?)));
        let aligned = at.is_multiple_of(32);
        let numbers = |pair: &mut Pair| -> Option<Vec<f32>> {
            let bytes = pair.range(at, 4 * count).filter(|_| aligned)?;
            Some(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
        };
        let old = numbers(&mut self.pairs[to]);
        let modelled = old.zip(numbers(&mut self.pairs[from]));
        let sums = what % 10 == 9;
        let done = views.and_then(|(to, from)| match sums {
            true => on.add(&to, &to, &from, factor),
            false => on.muls(&to, &from, factor),
        });
        agree(done, modelled.as_ref().map(|_| ()))?;
        let Some((old, new)) = modelled else { return Ok(()) };
        let pairs = old.into_iter().zip(new);
        let new: Vec<f32> =
            pairs.map(|(to, from)| if sums { to + factor * from } else { from * factor }).collect();
        let mut bytes: Vec<u8> = new.iter().flat_map(|x| x.to_le_bytes()).collect();
        if new.iter().any(|x| x.is_nan()) {
            // The payload bits of a NaN are not specified, so these bytes are reset.
            bytes.fill(0);
            on.stream().fill(&self.pairs[to].buffer, at, bytes.len(), 0)?;
        }
        self.pairs[to].range(at, bytes.len()).expect("it was read").copy_from_slice(&bytes);
        Ok(())
    }

    fn replace_stream(&mut self) -> Result<()> {
        self.streams[self.turn] = new_stream(&self.context)?;
        Ok(())
    }
}

fn new_stream(context: &Context) -> Result<Operators> {
    Operators::new(Stream::new(context)?, nnop(), ops())
}

/// Fails unless the call was refused exactly if the model cannot do it.
fn agree(done: Result<()>, modelled: Option<()>) -> Result<()> {
    match (done, modelled) {
        (Err(Error::Argument { .. }), None) => Ok(()),
        (done, Some(())) => done,
        (done, None) => panic!("a range is outside, or overlaps itself, but: {done:?}"),
    }
}
