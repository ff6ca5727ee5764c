//! Detects overflows that averaged gradients do not show, on a device whose f16 saturates.
//!
//! Such a device replaces infinities by its largest number, also in averages of 16-bit gradients.
//! So every gradient is checked when it is reported, and the device's overflow flag is read
//! before the step; the source combines both to a result that is equal on all ranks.

use std::fmt;
use std::sync::Arc;

use fused_optim::Slice;
use parking_lot::Mutex;

use crate::model::has_non_finite;
use crate::{Error, GradSink, Result, SharedSink};

/// Detects overflows that do not show in values.
pub type Overflows = Box<dyn amp::OverflowSource<Error = Error> + Send>;

/// Checks the gradients of one step.
pub(super) struct OverflowCheck {
    source: Overflows,
    /// Passes since the last step; empty before the first.
    passes: Vec<Arc<Mutex<CheckedSink>>>,
}

impl OverflowCheck {
    pub(super) const fn new(source: Overflows) -> Self {
        Self { source, passes: Vec::new() }
    }

    /// Wraps the sink of a pass. The first pass of a step clears earlier overflows.
    pub(super) fn before_forward(&mut self, inner: SharedSink) -> Result<SharedSink> {
        if self.passes.is_empty() {
            self.source.clear()?;
        }
        let checked = Arc::new(Mutex::new(CheckedSink { inner, seen: None }));
        self.passes.push(Arc::clone(&checked));
        Ok(checked)
    }

    /// Returns whether any rank has detected an overflow since the last step. Every rank calls it.
    pub(super) fn found(&mut self) -> Result<bool> {
        let passes = std::mem::take(&mut self.passes);
        let seen = passes.iter().filter_map(|pass| pass.lock().seen).max();
        Ok(self.source.overflowed(seen)? == Some(true))
    }
}

impl fmt::Debug for OverflowCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OverflowCheck").field("passes", &self.passes.len()).finish_non_exhaustive()
    }
}

/// Checks each gradient and passes it on.
struct CheckedSink {
    inner: SharedSink,
    seen: Option<bool>,
}

impl GradSink for CheckedSink {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> Result<()> {
        self.seen = self.seen.max(Some(has_non_finite(grad)));
        self.inner.lock().ready(index, grad)
    }
}

#[cfg(test)]
mod tests {
    use amp::LossScaler;
    use collective::reducer::ReducerOptions;
    use fused_optim::{Applied, Sgd, SgdHyper};
    use half::f16;

    use crate::testing::{FakeModel, Values, group};
    use crate::{DistributedDataParallel, Error, Model, OptimWrapper, Result};

    /// A device: its overflow flag, and the calls made.
    #[derive(Clone, Default)]
    struct Device(std::sync::Arc<parking_lot::Mutex<(bool, Vec<String>)>>);

    impl amp::OverflowSource for Device {
        type Error = Error;

        fn clear(&mut self) -> Result<()> {
            let mut device = self.0.lock();
            device.0 = false;
            device.1.push("clear".into());
            Ok(())
        }

        fn overflowed(&mut self, seen: Option<bool>) -> Result<Option<bool>> {
            let mut device = self.0.lock();
            device.1.push(format!("{seen:?}"));
            Ok(seen.max(Some(device.0)))
        }
    }

    #[test]
    fn overflow_in_gradients_or_flag_skips_one_step() {
        let mut model = FakeModel::new(&[("w", Values::F16(vec![f16::ONE; 2]))], &[]);
        let options = ReducerOptions::default();
        let mut wrapper = DistributedDataParallel::new(group(), model.params(), options).unwrap();
        let sgd = Sgd::with_one_group(SgdHyper { lr: 0.5, ..SgdHyper::default() }, 1).unwrap();
        let device = Device::default();
        let mut optim = OptimWrapper::new(Box::new(sgd), 2)
            .with_mixed_precision(LossScaler::fixed(1.0).unwrap())
            .with_overflows(Some(Box::new(device.clone())));
        let mut applied = Vec::new();
        for (gradient, flag) in [
            (0.25, false),
            (0.25, false),
            (1e6, false),
            (0.25, false),
            (0.25, true),
            (0.25, false),
            (0.25, false),
            (0.25, false),
        ] {
            model.gradient = gradient;
            let update = model.update(&mut wrapper, &mut optim, None).unwrap();
            applied.extend(update.applied);
            device.0.lock().0 |= flag;
        }
        let (yes, no) = (Applied::Applied, Applied::SkippedNonFinite);
        assert_eq!(applied, [yes, no, no, yes]);
        let step = |seen: &str| ["clear".to_owned(), format!("Some({seen})")];
        let steps = [step("false"), step("true"), step("false"), step("false")].concat();
        assert_eq!(device.0.lock().1, steps);
    }
}
