//! Messages between the ranks and the hub.

use std::io::{self, Read, Write};

/// Most bytes of one part, and most parts: a frame is from a process of one's own, but may be cut.
const MOST: u64 = 1 << 32;
const PARTS: u64 = 1 << 16;

/// One message, or the whole of a buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    /// The peer of a message.
    pub(crate) peer: u64,
    /// 1 for what is to be received.
    pub(crate) receive: u64,
    /// Bytes that are expected in return.
    pub(crate) expects: u64,
    pub(crate) bytes: Vec<u8>,
}

/// A request or its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    /// A [`Verb`](crate::hub::Verb), or an answer's status.
    pub(crate) kind: u64,
    pub(crate) dtype: u64,
    pub(crate) op: u64,
    pub(crate) root: u64,
    pub(crate) count: u64,
    pub(crate) parts: Vec<Part>,
}

impl Frame {
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::new();
        let head = [self.kind, self.dtype, self.op, self.root, self.count, self.parts.len() as u64];
        bytes.extend(head.iter().flat_map(|number| number.to_le_bytes()));
        for part in &self.parts {
            let head = [part.peer, part.receive, part.expects, part.bytes.len() as u64];
            bytes.extend(head.iter().flat_map(|number| number.to_le_bytes()));
            bytes.extend(&part.bytes);
        }
        to.write_all(&bytes)
    }

    pub(crate) fn read(from: &mut impl Read) -> io::Result<Self> {
        let [kind, dtype, op, root, count, parts] = numbers(from)?;
        if parts > PARTS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut frame = Self { kind, dtype, op, root, count, parts: Vec::new() };
        for _ in 0..parts {
            let [peer, receive, expects, len] = numbers(from)?;
            if len > MOST {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut bytes = Vec::new();
            if from.take(len).read_to_end(&mut bytes)? as u64 != len {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            frame.parts.push(Part { peer, receive, expects, bytes });
        }
        Ok(frame)
    }
}

fn numbers<const N: usize>(from: &mut impl Read) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        from.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_survives_the_wire_and_half_a_frame_does_not() {
        let part = Part { peer: 3, receive: 1, expects: 9, bytes: vec![1, 2, 3] };
        let frame = Frame { kind: 7, count: 5, parts: vec![part; 2], ..Frame::default() };
        let mut bytes = Vec::new();
        frame.write(&mut bytes).expect("memory takes it");
        assert_eq!(Frame::read(&mut bytes.as_slice()).expect("it is whole"), frame);
        for cut in 0..bytes.len() {
            assert!(Frame::read(&mut &bytes[..cut]).is_err());
        }
    }
}
