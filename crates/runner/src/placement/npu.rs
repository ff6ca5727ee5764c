//! The Ascend NPU of a rank.

use ::amp::npu::DeviceOverflow;
use collective::{ProcessGroup, ReduceOp};
use fused_optim::npu::Operators;

use super::{Overflows, refused};
use crate::Result;

/// An open NPU.
#[derive(Debug)]
pub(super) struct Npu {
    on: Operators,
    switch_to_amp: bool,
    group: ProcessGroup,
}

impl Npu {
    /// Opens the NPU. Every rank of the group calls this.
    pub(super) fn open(index: u32, switch_to_amp: bool, group: &ProcessGroup) -> Result<Self> {
        let on = Operators::open(index as usize).map_err(|e| refused("npu", e));
        // A rank without NPU takes part as well, because the others wait for it.
        let own = on.as_ref().map_or_else(ToString::to_string, |on| on.soc().name().to_owned());
        let own = (on.as_ref().ok().map(|on| on.soc().is_second_generation()), own);
        let all = collective::object::all_gather_object(group, &own)?;
        let on = on?;
        match all.iter().position(|other| other.0 != own.0) {
            None => Ok(Self { on, switch_to_amp, group: group.clone() }),
            Some(rank) => {
                let (own, other) = (own.1, &all[rank].1);
                let text = format!("this rank has {own}, rank {rank} has {other}");
                Err(refused("npu", format!("{text}: all ranks need NPUs of the same generation")))
            }
        }
    }

    pub(super) fn name(&self) -> String {
        format!("npu:{}", self.on.context().device())
    }

    pub(super) fn operators(&self) -> &Operators {
        &self.on
    }

    /// Returns the reason for mixed precision, if the chip needs it and the switch is enabled.
    pub(super) fn needs_amp(&self) -> Option<String> {
        let soc = self.on.soc();
        let old = self.switch_to_amp && !soc.is_second_generation();
        old.then(|| {
            format!(
                "{} is {soc}, an NPU of the first generation, which trains in mixed precision only",
                self.name()
            )
        })
    }

    pub(super) fn overflows(&self) -> Option<Overflows> {
        let group = self.group.clone();
        // `None` (no gradient) orders below `Some(false)`.
        let reduce = move |seen: Option<bool>| {
            let mut word = [seen.map_or(0_u8, |seen| 1 + u8::from(seen))];
            group.all_reduce(&mut word, ReduceOp::Max)?;
            Ok::<_, train_step::Error>([None, Some(false), Some(true)][usize::from(word[0].min(2))])
        };
        let source = DeviceOverflow::new(self.on.clone(), reduce);
        source.is_flag().then(|| {
            let source: Overflows = Box::new(source);
            source
        })
    }

    /// Returns a line about the device, and a warning if gradients are not averaged by HCCL.
    pub(super) fn describe(&self, group: &ProcessGroup) -> (String, Option<String>) {
        let own = format!(
            "device {} ({}): the optimizer's state and steps; the model computes on the host",
            self.name(),
            self.on.soc()
        );
        let (backend, reason) = (group.backend_name(), group.backend_reason());
        match (group.world_size(), backend) {
            (1, _) => (own, None),
            (_, "hccl") => (format!("{own}; gradients are averaged by HCCL ({reason})"), None),
            _ => {
                let warning = format!(
                    "gradients are averaged on the host by backend `{backend}`, not by HCCL: {reason}"
                );
                (own, Some(warning))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fused_optim::npu::HostOptimizer;
    use fused_optim::{HalfWeights, Optimizer, ParamGroup, Sgd, SgdHyper};
    use npu_sim::{Config, Soc};

    use crate::placement::{OptimizerDevice, Placement};
    use crate::testing::group;

    use super::*;

    fn placement(switch_to_amp: bool) -> Placement {
        let on = npu_sim::operators(0).unwrap();
        let npu = Npu { on, switch_to_amp, group: group() };
        Placement::on_npu(npu)
    }

    #[test]
    fn optimizer_on_the_host_is_refused_by_name() {
        let session = npu_sim::start(Config::default());
        let npu = placement(true);
        let sgd = Sgd::with_one_group(SgdHyper::default(), 1).unwrap();
        let error = npu.check(&sgd).unwrap_err().to_string();
        assert!(error.contains("`sgd` computes on cpu, not on npu:0"), "{error}");
        Placement::host().check(&sgd).unwrap();
        let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
        let OptimizerDevice::Npu(on) = npu.optimizer().clone() else { panic!("the NPU") };
        let fed: Box<dyn Optimizer> =
            Box::new(HostOptimizer::new(on, groups, HalfWeights::Master).unwrap());
        npu.check(&*fed).unwrap();
        drop((fed, npu));
        assert_eq!(session.finish(), [""; 0]);
    }

    #[test]
    fn only_the_first_generation_switches_to_amp_and_has_an_overflow_flag() {
        for (soc, old) in [(Soc::Ascend910A, true), (Soc::Ascend910B, false)] {
            let session = npu_sim::start(Config { soc, ..Config::default() });
            for asked in [true, false] {
                let npu = placement(asked);
                assert_eq!(npu.switches_to_amp("OptimWrapper"), old && asked);
                let (line, warnings) = npu.describe(&group());
                assert!(line.unwrap().starts_with("device npu:0 (Ascend910"));
                assert_eq!(warnings.len(), usize::from(old && asked));
                // The warning is returned only once.
                assert_eq!(npu.describe(&group()).1, [""; 0]);
                let overflows = npu.overflows();
                assert_eq!(overflows.is_some(), old);
                if let Some(mut source) = overflows {
                    source.clear().unwrap();
                    for seen in [None, Some(false), Some(true)] {
                        assert_eq!(source.overflowed(seen).unwrap(), seen);
                    }
                }
            }
            assert_eq!(session.finish(), [""; 0]);
        }
    }
}
