//! The check for overflows that averaged gradients do not show: those of a device whose f16 saturates.
//!
//! Such a device turns infinities into its largest number, also in the averages of 16-bit
//! gradients. So every gradient is checked on its way out of the engine, and the device's own flag is
//! read before the step; the source makes one verdict of both, the same on all ranks.

use std::fmt;
use std::sync::Arc;

use fused_optim::Slice;
use parking_lot::Mutex;

use crate::Result;
use crate::engine::{GradSink, SharedSink};
use crate::placement::Overflows;

/// Checks the gradients of one step.
pub(super) struct OverflowCheck {
    source: Overflows,
    /// The passes since the last step; none before the first.
    passes: Vec<Arc<Mutex<CheckedSink>>>,
}

impl OverflowCheck {
    pub(super) const fn new(source: Overflows) -> Self {
        Self { source, passes: Vec::new() }
    }

    /// Puts itself before the sink of a pass. The first pass of a step forgets earlier overflows.
    pub(super) fn before_forward(&mut self, inner: SharedSink) -> Result<SharedSink> {
        if self.passes.is_empty() {
            self.source.clear()?;
        }
        let checked = Arc::new(Mutex::new(CheckedSink { inner, seen: None }));
        self.passes.push(Arc::clone(&checked));
        Ok(checked)
    }

    /// Whether any rank has seen an overflow since the last step. Every rank calls it.
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

/// Whether any of these numbers is infinite or NaN.
pub(crate) fn has_non_finite(slice: Slice<'_>) -> bool {
    match slice {
        Slice::F32(values) => ::amp::has_non_finite(values),
        Slice::F16(values) => ::amp::has_non_finite(values),
        Slice::Bf16(values) => ::amp::has_non_finite(values),
    }
}

/// Checks each gradient and hands it on.
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
    use ::amp::LossScaler;
    use collective::reducer::ReducerOptions;
    use fused_optim::{Applied, Sgd, SgdHyper};
    use half::f16;

    use crate::data::Batch;
    use crate::engine::{Engine, EngineState};
    use crate::model::DistributedDataParallel;
    use crate::optim_wrapper::OptimWrapper;
    use crate::testing::{FakeEngine, Values, group};
    use crate::{Error, Result};

    /// A device: whether its flag is set, and what it was asked.
    #[derive(Clone, Default)]
    struct Device(std::sync::Arc<parking_lot::Mutex<(bool, Vec<String>)>>);

    impl ::amp::OverflowSource for Device {
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
    fn what_a_rank_saw_and_the_flag_skip_a_step_and_are_forgotten() {
        let mut engine = FakeEngine::new(&[("w", Values::F16(vec![f16::ONE; 2]))], &[]);
        let options = ReducerOptions::default();
        let mut model = DistributedDataParallel::new(group(), engine.params(), options).unwrap();
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
            engine.gradient = gradient;
            let update = optim
                .update_params(&mut engine, &mut model, &Batch::new(), &mut EngineState::default())
                .unwrap();
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
