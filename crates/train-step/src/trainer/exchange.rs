//! Exchanges between the ranks of a step: what they compare before its first batch and after its
//! last one.
//!
//! On the CPU an error of one rank is an error on all, with the rank and the reason. On GPUs, where
//! a step does not wait for the other ranks' hosts, it aborts the group.
//!
//! Invariant: either all ranks update the variables, with the same factor and hyper-parameters, or
//! none does, or the group is aborted.

use collective::device::DeviceWork;
use collective::object::all_gather_object;
use fused_optim::HyperParam;

use super::Trainer;
use crate::averages::ModelWrapper;
use crate::{Error, Result};

/// Methods that all ranks call together.
const CALLS: [&str; 7] = ["step", STEP_WEIGHTED, "mean", "sum", "save", "resume", "begin_epoch"];
const STEP_WEIGHTED: &str = "step_weighted";

/// A step of which batches have been trained.
#[derive(Debug, Default)]
pub(super) struct OpenStep {
    /// The method that trains its batches; `None` before the first one.
    pub(super) call: Option<&'static str>,
    /// The count that gradients are relative to: the largest of the ranks' first batches, and if
    /// more batches follow, times the power of two that is closest to the last step's mean above
    /// it. So gradients stay in the range of `f16` if a batch is an unusual one; with equal counts
    /// no bit changes. 0 while no rank has counted anything.
    pub(super) unit: f64,
    /// The sum of this rank's counts.
    pub(super) count: f64,
    /// The first error of a batch on this rank, to be told to the others.
    pub(super) failed: Option<String>,
}

impl Trainer {
    /// Begins a batch of this count: before the first of a step ranks compare their calls and agree
    /// on the unit of counts.
    pub(super) fn begin_batch(&mut self, call: &'static str, count: f64) -> Result<()> {
        if self.averages.is_unfinished() {
            // A batch has panicked.
            self.drop_gradients();
            if self.world_size() == 1 {
                self.open = OpenStep::default();
            }
        }
        let is_first = self.open.call.is_none();
        if is_first || self.open.unit == 0.0 {
            let first = if self.world_size() > 1 && self.compares(call) {
                let counts = self.compare_calls(call, count.to_bits())?;
                counts.into_iter().map(f64::from_bits).fold(0.0, f64::max)
            } else {
                count
            };
            let more = call == STEP_WEIGHTED && self.optim.accumulation().counts() > 1;
            self.open.unit = match self.mean_count {
                Some(mean) if more && first > 0.0 && mean > first => {
                    first * 2_f64.powi((mean / first).log2().round() as i32)
                }
                _ => first,
            };
        }
        if is_first {
            self.open.call = Some(call);
        }
        Ok(())
    }

    /// Whether hosts wait for each other in a step.
    pub(super) fn compares(&self, call: &str) -> bool {
        self.on_host || call == STEP_WEIGHTED
    }

    /// Returns `result`; an error that is this rank's alone aborts the group, because other ranks
    /// may have stepped, or wait for this one.
    ///
    /// # Errors
    ///
    /// The error of `result`.
    pub fn or_abort<T, E: std::fmt::Display>(&self, result: Result<T, E>) -> Result<T, E> {
        if let Err(error) = &result
            && self.world_size() > 1
        {
            self.group().abort(first_line(&error.to_string()));
        }
        result
    }

    /// Waits until the averages of all steps have ended, and returns their failure: of a rank that
    /// died meanwhile, say. On the host a step does so itself, and on devices one in mixed
    /// precision. After another step on devices the weights are those of all ranks' gradients only
    /// if this, or [`mean`](Self::mean), [`sum`](Self::sum), [`save`](Self::save) or
    /// [`begin_epoch`](Self::begin_epoch), which call it, has returned `Ok`: call it before weights
    /// are used otherwise.
    ///
    /// # Errors
    ///
    /// The failure of a rank or of the device. The weights are unspecified then.
    pub fn settle(&self) -> Result<()> {
        self.or_abort(self.averages.gradients().settle())
    }

    /// Lets [`settle`](Self::settle) wait for this operation of the model's own on its device, such
    /// as a broadcast of buffers, and for those of earlier calls in the same stream.
    pub fn watch(&self, work: DeviceWork) {
        self.averages.gradients().watch(work);
    }

    /// Compares the ranks' calls, and fails on all ranks if they differ.
    pub(super) fn announce(&self, call: &str) -> Result<()> {
        self.announce_result(call, Ok(()))
    }

    /// As [`announce`](Self::announce); fails on all ranks if the arguments of one are an error.
    pub(super) fn announce_result<T, E: From<Error>>(
        &self,
        call: &str,
        own: Result<T, E>,
    ) -> Result<T, E> {
        if self.world_size() == 1 {
            return own;
        }
        self.settle()?;
        let failed = self.compare_calls(call, own.is_err().into())?;
        match (own, failed.iter().position(|failed| *failed != 0)) {
            (Ok(_), Some(rank)) => {
                let text = format!("`Trainer::{call}` failed on rank {rank}, whose error says why");
                Err(Error::InvalidArgument(text).into())
            }
            (own, _) => own,
        }
    }

    /// Compares the numbers of the ranks' epochs; fails on all ranks if they differ, or if those of
    /// one are an error.
    pub(super) fn compare_epochs<E: From<Error>>(
        &self,
        own: Result<(usize, usize), E>,
    ) -> Result<(usize, usize), E> {
        let own = self.announce_result("begin_epoch", own)?;
        if self.world_size() == 1 {
            return Ok(own);
        }
        let mut all = vec![0_u64; 2 * self.world_size()];
        self.group().all_gather(&mut all, &[own.0 as u64, own.1 as u64]).map_err(Error::from)?;
        let Some(rank) = all.chunks_exact(2).position(|of| *of != all[..2]) else { return Ok(own) };
        let of = |rank: usize| {
            let (len, first) = (all[2 * rank], all[2 * rank + 1]);
            format!("rank {rank} one of {len} batches at batch {first}")
        };
        let text = format!(
            "ranks begin different epochs: {}, {}; give all ranks the same numbers",
            of(0),
            of(rank)
        );
        Err(Error::InvalidArgument(text).into())
    }

    /// Compares the ranks' calls, and returns the number that each rank gave.
    fn compare_calls(&self, call: &str, own: u64) -> Result<Vec<u64>> {
        let index = CALLS.iter().position(|name| *name == call).expect("a name of `CALLS`");
        let part = hash(self.part.as_deref().unwrap_or_default().bytes());
        let mut all = vec![0_u64; 3 * self.world_size()];
        self.group().all_gather(&mut all, &[index as u64, part, own])?;
        let calls = || all.chunks_exact(3);
        if calls().all(|of| of[..2] == [index as u64, part]) {
            return Ok(calls().map(|of| of[2]).collect());
        }
        let parts = all_gather_object(self.group(), &self.part)?;
        let name = |call: u64| usize::try_from(call).ok().and_then(|call| CALLS.get(call));
        let called = |(rank, (of, part)): (usize, (&[u64], &Option<String>))| {
            let part = part.as_ref().map_or_else(String::new, |part| format!(" of part `{part}`"));
            format!("rank {rank}: `Trainer::{}`{part}", name(of[0]).unwrap_or(&"?"))
        };
        let called: Vec<_> = calls().zip(&parts).enumerate().map(called).collect();
        let text = format!("ranks called different methods: {}; {SAME_CALLS}", called.join(", "));
        Err(Error::InvalidArgument(text))
    }

    /// Ends the batches of a step: returns the sum of the counts over ranks and batches, or an
    /// error on all ranks if a batch failed on one of them, or if their hyper-parameters differ.
    /// `batches` is their number on each rank.
    pub(super) fn agree(&mut self, batches: f64) -> Result<f64> {
        let call = self.open.call.unwrap_or("step");
        let ranks = self.world_size();
        let total = match (ranks, self.compares(call)) {
            (1, _) => self.open.count,
            (_, false) => self.open.count * ranks as f64,
            _ => self.exchange_outcomes()?,
        };
        if total > 0.0 {
            if call == STEP_WEIGHTED {
                self.mean_count = Some(total / (batches * ranks as f64));
            }
            return Ok(total);
        }
        let text =
            "the counts of all ranks and batches of the step are 0: there is nothing to average";
        Err(Error::InvalidArgument(text.to_owned()))
    }

    fn exchange_outcomes(&self) -> Result<f64> {
        let own = self.or_abort(self.hyper_params())?;
        let values = own.iter().flat_map(|(.., value)| value.to_bits().to_le_bytes());
        let failed = self.open.failed.is_some().into();
        let status = [failed, self.open.count.to_bits(), hash(values)];
        let mut all = vec![0_u64; 3 * self.world_size()];
        self.group().all_gather(&mut all, &status)?;
        let ranks = || all.chunks_exact(3);
        if ranks().any(|of| of[0] != 0) {
            let reasons = all_gather_object(self.group(), &self.open.failed)?;
            let first =
                reasons.into_iter().enumerate().find_map(|(rank, text)| Some((rank, text?)));
            let (rank, reason) = first.unwrap_or_default();
            return Err(Error::RankFailed { rank, reason });
        }
        if let Some(rank) = ranks().position(|of| of[2] != all[2]) {
            let own: Vec<_> = own.iter().map(describe).collect();
            let all = all_gather_object(self.group(), &own)?;
            let differs = all[0].iter().zip(&all[rank]).find(|(first, other)| first != other);
            let (first, other) = differs.unzip();
            let text = |text: Option<&String>| text.map_or("others", String::as_str).to_owned();
            return Err(Error::InvalidArgument(format!(
                "ranks differ in hyper-parameters of this step: rank 0 has {}; rank {rank} {}; give all ranks the same \
                 schedule, and set hyper-parameters on all ranks alike",
                text(first),
                text(other)
            )));
        }
        Ok(ranks().map(|of| f64::from_bits(of[1])).sum())
    }

    /// The optimizer's hyper-parameters that can be set between steps, by group.
    fn hyper_params(&self) -> Result<Vec<(usize, HyperParam, f64)>> {
        let optimizer = self.optim.optimizer();
        let mut all = Vec::new();
        for group in 0..optimizer.group_count() {
            for param in [HyperParam::Lr, HyperParam::Momentum, HyperParam::WeightDecay] {
                let value = optimizer.hyper_param(group, param)?;
                all.extend(value.map(|value| (group, param, value)));
            }
        }
        Ok(all)
    }
}

/// The error's text without its backtrace.
pub(super) fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// FNV-1a.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.fold(0xcbf2_9ce4_8422_2325, step)
}

fn describe((group, param, value): &(usize, HyperParam, f64)) -> String {
    format!("{param} {value:?} of group {group}")
}

pub(super) const SAME_CALLS: &str = "every rank has to call `step`, `step_weighted` (also as `step_on`, `step_on_weighted`), `mean`, `sum` (also by `keep_best`), `save_with`, `resume_with`, `resume_with_all`, `begin_epoch`, `zero_grad`, `save` and `resume` equally often, in the same order";

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::thread;
    use std::time::Duration;

    use collective::ProcessGroup;
    use fused_optim::{Optimizer, Sgd, SgdHyper};

    use super::*;
    use crate::testing::{FakeModel, Values};

    /// Runs `call` on two ranks that accumulate two batches per step. Returns their errors.
    fn errors(call: fn(&mut Trainer, &mut FakeModel, &Path) -> Result<()>) -> [String; 2] {
        let directory = tempfile::tempdir().unwrap();
        let groups = ProcessGroup::threads(2, Duration::from_secs(60)).unwrap();
        let rank = |group: ProcessGroup| {
            let mut model = FakeModel::new(&[("w", Values::F32(vec![0.0]))], &[]);
            let sgd: Box<dyn Optimizer> =
                Box::new(Sgd::with_one_group(SgdHyper::default(), 1).unwrap());
            let builder = Trainer::builder().accumulate(2).group(group);
            let mut train = builder.build(&mut model, sgd).unwrap();
            call(&mut train, &mut model, directory.path()).unwrap_err().to_string()
        };
        thread::scope(|scope| {
            let ranks: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
            let errors: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            errors.try_into().unwrap()
        })
    }

    #[test]
    fn begin_epoch_with_other_numbers_on_a_rank_is_an_error_on_all() {
        let said = "ranks begin different epochs: rank 0 one of 8 batches at batch 0, rank 1 one of 8 batches at \
                    batch 1; give all ranks the same numbers";
        let errors = errors(|train, _, _| train.begin_epoch(8, train.rank()));
        assert_eq!(errors, [said; 2]);
    }

    #[test]
    fn begin_epoch_that_fails_on_a_rank_is_an_error_on_all() {
        let [first, second] = errors(|train, _, _| train.begin_epoch(8, 9 * train.rank()));
        assert!(first.contains("`Trainer::begin_epoch` failed on rank 1"), "{first}");
        assert_eq!(second, "an epoch of 8 batches does not begin at batch 9");
    }

    #[test]
    fn save_to_another_path_on_a_rank_is_an_error_on_all() {
        let errors = errors(|train, model, directory| {
            train.save(model, directory.join(format!("run{}", train.rank())), 1)
        });
        for error in errors {
            assert!(error.contains("ranks differ in the path: rank 0 has "), "{error}");
            assert!(error.contains("/run0, rank 1 ") && error.ends_with("/run1"), "{error}");
        }
    }

    #[test]
    fn resume_from_another_path_on_a_rank_is_an_error_on_all() {
        let errors = errors(|train, model, directory| {
            train.resume(model, directory.join(format!("run{}", train.rank()))).map(drop)
        });
        for error in errors {
            assert!(error.contains("ranks differ in the path: rank 0 has "), "{error}");
            assert!(error.ends_with("/run1; give all ranks the same one"), "{error}");
        }
    }
}
