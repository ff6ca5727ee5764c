//! Selects a rank's device, from the variables that limit the devices visible to a process.
//!
//! A process numbers its visible devices from 0. If a launcher shows each rank only its own device
//! (`srun --gpus-per-task=1`), the index is 0 in every rank, whatever the local rank. It is
//! computed on demand, so a wrong variable does not affect jobs on CPUs.

use super::reader::{Lookup, invalid};
use super::topology::Fact;
use crate::Result;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Accelerator {
    /// A CUDA GPU; made visible by `CUDA_VISIBLE_DEVICES`.
    Cuda,
    /// An Ascend NPU; made visible by `ASCEND_RT_VISIBLE_DEVICES`.
    Npu,
}

impl Accelerator {
    /// Returns the variable that limits the visible devices of this kind.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA_VISIBLE_DEVICES",
            Self::Npu => "ASCEND_RT_VISIBLE_DEVICES",
        }
    }

    /// Returns why a list shows fewer devices than it has tokens; empty unless it `ends_early`.
    fn rule(self, ends_early: bool) -> &'static str {
        match self {
            _ if !ends_early => "",
            Self::Cuda => ": CUDA stops at the first token that is not a device",
            Self::Npu => ": CANN stops at the first token that is not a larger number",
        }
    }

    /// Returns the number of devices that `list`, the variable's value, makes visible.
    pub fn shown(self, list: &str) -> usize {
        match self {
            Self::Cuda => shown_cuda(list),
            Self::Npu => shown_npu(list),
        }
    }
}

/// The variables' values; `None` if unset, which makes all devices visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Devices([Option<String>; 2]);

/// All kinds, with the names of their facts.
const KINDS: [(Accelerator, &str); 2] =
    [(Accelerator::Cuda, "cuda_device"), (Accelerator::Npu, "npu_device")];

impl Devices {
    pub(super) fn read(lookup: Lookup<'_>) -> Self {
        Self(KINDS.map(|(kind, _)| lookup(kind.variable())))
    }

    fn list(&self, kind: Accelerator) -> Option<&String> {
        self.0[kind as usize].as_ref()
    }

    pub(super) fn index(&self, kind: Accelerator, local_rank: Option<usize>) -> Result<usize> {
        let local_rank = local_rank.ok_or_else(|| {
            invalid(
                "cannot select this rank's device: LOCAL_RANK is not set, and the ranks may be on \
                 several hosts; set it, or call Topology::locate"
                    .to_owned(),
            )
        });
        let Some(text) = self.list(kind) else { return local_rank };
        let variable = kind.variable();
        match kind.shown(text) {
            0 => Err(invalid(format!("{variable}={text:?} shows no device"))),
            // If a longer list ends early, only the first rank can use its one visible device.
            1 if !text.contains(',') => Ok(0),
            count => match local_rank? {
                local_rank if local_rank < count => Ok(local_rank),
                local_rank => Err(invalid(format!(
                    "{variable}={text:?} shows {count}, and none is left for local rank \
                     {local_rank}{}",
                    kind.rule(text.split(',').count() > count)
                ))),
            },
        }
    }

    /// Records, once, the device of each kind whose variable is set and shows one for this rank.
    pub(super) fn note(&self, local_rank: Option<usize>, facts: &mut Vec<Fact>) {
        for (kind, name) in KINDS {
            if facts.iter().any(|fact| fact.name == name) {
                continue;
            }
            if let (Some(_), Ok(index)) = (self.list(kind), self.index(kind, local_rank)) {
                facts.push(Fact { name, value: index.to_string(), origin: kind.variable() });
            }
        }
    }
}

/// CUDA reads indices and identifiers, and stops at the first other token (`-1`, Slurm's
/// `NoDevFiles`). It shows no device if one is repeated.
fn shown_cuda(text: &str) -> usize {
    let is_device = |token: &&str| {
        let digits = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_digit());
        digits || token.starts_with("GPU-") || token.starts_with("MIG-")
    };
    let devices: Vec<_> = text.split(',').map(str::trim).take_while(is_device).collect();
    let is_repeated = devices.iter().enumerate().any(|(i, device)| devices[..i].contains(device));
    if is_repeated { 0 } else { devices.len() }
}

/// CANN reads indices in ascending order, and stops at the first other token.
fn shown_npu(text: &str) -> usize {
    let mut last = None;
    let ascends = |token: &str| {
        let index = token.parse::<u32>().ok().filter(|&index| last.is_none_or(|last| last < index));
        last = index.or(last);
        index
    };
    text.split(',').map(str::trim).map_while(ascends).count()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MPICH, OPEN_MPI, SLURM, STATIC, from};
    use super::*;

    #[test]
    fn the_device_is_the_local_rank_or_the_only_one() {
        for (text, local) in [(STATIC, 1), (SLURM, 1), (OPEN_MPI, 3), (MPICH, 3), ("", 0)] {
            for kind in [Accelerator::Cuda, Accelerator::Npu] {
                let name = kind.variable();
                let device =
                    |value: &str| from(&format!("{text}\n{name}{value}")).unwrap().device(kind);
                assert_eq!(device("").unwrap(), local, "{name}: all are visible");
                assert_eq!(device("=0,1,2,3").unwrap(), local);
                assert_eq!(device("=5").unwrap(), 0);
                assert!(device("=").unwrap_err().to_string().contains("shows no device"));
            }
        }
    }

    #[test]
    fn the_recorded_step_shows_two_devices() {
        let topology = from(SLURM).unwrap();
        assert_eq!(topology.device(Accelerator::Cuda).unwrap(), 1);
        assert!(topology.to_string().contains("cuda_device 1 (CUDA_VISIBLE_DEVICES)"));
        let crowded = from(&format!("{OPEN_MPI}\nCUDA_VISIBLE_DEVICES=4,5")).unwrap();
        let error = crowded.device(Accelerator::Cuda).unwrap_err().to_string();
        assert!(error.contains("\"4,5\" shows 2") && error.contains("local rank 3"), "{error}");
        assert!(!crowded.to_string().contains("cuda_device"), "a job on CPUs is not affected");
    }

    #[test]
    fn devices_after_the_end_of_a_list_are_not_used() {
        let device = |text: &str, local: usize| {
            let launched = format!("{STATIC}\nASCEND_RT_VISIBLE_DEVICES={text}");
            let launched = launched.replace("LOCAL_RANK=1", &format!("LOCAL_RANK={local}"));
            from(&launched).unwrap().device(Accelerator::Npu)
        };
        assert_eq!(device("5,2", 0).unwrap(), 0);
        assert_eq!(device("5", 1).unwrap(), 0);
        let error = device("5,2", 1).unwrap_err().to_string();
        assert!(error.contains("none is left for local rank 1: CANN stops at"), "{error}");
    }

    #[test]
    fn a_list_ends_at_the_first_bad_token() {
        for (text, cuda, npu) in [
            ("0,1", 2, 2),
            ("1,0", 2, 1),
            ("-1", 0, 0),
            ("0,-1,2", 1, 1),
            ("NoDevFiles", 0, 0),
            ("GPU-8932f937, MIG-1", 2, 0),
            ("3, 7,7", 0, 2),
        ] {
            assert_eq!((shown_cuda(text), shown_npu(text)), (cuda, npu), "{text:?}");
        }
    }
}
