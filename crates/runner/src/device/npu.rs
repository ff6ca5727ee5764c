//! An Ascend NPU as a rank has it: found, opened, and what is said of it.

use ::amp::npu::DeviceOverflow;
use collective::{ProcessGroup, ReduceOp};
use fused_optim::npu::{Operators, probe};

use super::{Overflows, refused};
use crate::{Error, Result};

/// An NPU.
#[derive(Debug)]
pub(super) struct Npu {
    on: Operators,
    switch_to_amp: bool,
    group: ProcessGroup,
}

/// Whether CANN is here, and an NPU of this number among those that the environment leaves.
pub(super) fn find(index: u32) -> Result<u32> {
    let found = probe().map_err(refused)?;
    if (index as usize) < found.count {
        return Ok(index);
    }
    Err(refused(format!(
        "this rank's own is NPU {index}, and there are {} ({found}); ASCEND_RT_VISIBLE_DEVICES may hide some, \
         or the launcher starts more ranks than there are NPUs",
        found.count
    )))
}

impl Npu {
    /// Opens it. Every rank of the group calls this.
    pub(super) fn open(index: u32, switch_to_amp: bool, group: &ProcessGroup) -> Result<Self> {
        let on = Operators::open(index as usize).map_err(refused);
        // Also a rank that has none tells the others, who would wait.
        let own = on.as_ref().map_or_else(ToString::to_string, |on| on.soc().name().to_owned());
        let own = (on.as_ref().ok().map(|on| on.soc().is_second_generation()), own);
        let all = collective::object::all_gather_object(group, &own)?;
        let on = on?;
        match all.iter().position(|other| other.0 != own.0) {
            None => Ok(Self { on, switch_to_amp, group: group.clone() }),
            Some(rank) => Err(refused(format!(
                "this rank has {}, rank {rank} has {}: all ranks need NPUs of one generation",
                own.1, all[rank].1
            ))),
        }
    }

    pub(super) fn name(&self) -> String {
        format!("npu:{}", self.on.context().device())
    }

    pub(super) fn operators(&self) -> &Operators {
        &self.on
    }

    /// Why it trains in mixed precision, if it does and nobody has declined.
    pub(super) fn needs_amp(&self) -> Option<String> {
        let soc = self.on.soc();
        let old = self.switch_to_amp && !soc.is_second_generation();
        old.then(|| {
            format!(
                "{} is {soc}, of the first generation of NPUs, which trains in mixed precision only",
                self.name()
            )
        })
    }

    pub(super) fn overflows(&self) -> Option<Overflows> {
        let group = self.group.clone();
        // `None`, no gradient, is less than `Some(false)`.
        let reduce = move |seen: Option<bool>| {
            let mut word = [seen.map_or(0_u8, |seen| 1 + u8::from(seen))];
            group.all_reduce(&mut word, ReduceOp::Max)?;
            Ok::<_, Error>([None, Some(false), Some(true)][usize::from(word[0].min(2))])
        };
        let source = DeviceOverflow::new(self.on.clone(), reduce);
        source.is_flag().then(|| {
            let source: Overflows = Box::new(source);
            source
        })
    }

    /// A line that says what is where, and a warning if gradients do not go by HCCL.
    pub(super) fn words(&self, group: &ProcessGroup) -> (String, Option<String>) {
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
                    "gradients are averaged by the host's backend `{backend}`, not by HCCL: {reason}"
                );
                (own, Some(warning))
            }
        }
    }
}
