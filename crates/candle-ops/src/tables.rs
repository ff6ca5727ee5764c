//! What operators on a device read from tables that depend on shapes alone: made and sent once, then kept by the
//! engine, since a captured step can send nothing large.
//!
//! An engine opens its tables on this thread for the length of a step ([`open`]); without them each is made anew.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{Device, Result, Tensor};

thread_local! {
    static OPEN: RefCell<Option<Tables>> = const { RefCell::new(None) };
}

/// By operator and what else a table depends on.
pub type Tables = HashMap<(&'static str, Vec<usize>), Tensor>;

/// How many are kept.
const MOST: usize = 256;

/// Runs `call`, a step, with `tables` open on this thread.
pub fn open<R>(tables: &mut Tables, call: impl FnOnce() -> R) -> R {
    /// Brings the tables back however the call ends.
    struct Open<'a>(&'a mut Tables);
    impl Drop for Open<'_> {
        fn drop(&mut self) {
            *self.0 = OPEN.take().unwrap_or_default();
        }
    }
    OPEN.set(Some(std::mem::take(tables)));
    let _open = Open(tables);
    call()
}

/// The table of this operator for these shapes.
pub(super) fn table(
    operator: &'static str,
    shapes: &[usize],
    device: &Device,
    make: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    let key = (operator, shapes.to_vec());
    let kept = OPEN.with_borrow(|open| open.as_ref()?.get(&key).cloned());
    if let Some(kept) = kept.filter(|kept| kept.device().same_device(device)) {
        return Ok(kept);
    }
    let made = make()?;
    OPEN.with_borrow_mut(|open| {
        if let Some(open) = open.as_mut().filter(|open| open.len() < MOST) {
            open.insert(key, made.clone());
        }
    });
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_made_once_for_its_shapes_while_they_are_open() {
        let mut made = 0;
        let mut get = |shapes: &[usize]| {
            let make = || {
                made += 1;
                Tensor::new(made as f32, &Device::Cpu)
            };
            table("test", shapes, &Device::Cpu, make).unwrap().to_scalar::<f32>().unwrap()
        };
        let mut tables = Tables::new();
        let opened = open(&mut tables, || [get(&[1]), get(&[2]), get(&[1])]);
        assert_eq!(opened, [1.0, 2.0, 1.0]);
        assert_eq!(get(&[1]), 3.0);
        assert_eq!(open(&mut tables, || get(&[2])), 2.0);
    }
}
