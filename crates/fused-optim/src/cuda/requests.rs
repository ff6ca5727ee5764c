//! The host's arguments of a step: its half of `Ctl`, and the table of groups.

use super::LossScale;
use super::rules::DeviceHyper;
use super::table::{Group, Request};
use crate::rule::OwnClip;
use crate::{FoundInf, ParamGroup, Result, StepCtl, TotalNorm};

/// The half of `Ctl` that the host writes.
pub(super) fn request<H: DeviceHyper>(
    ctl: &StepCtl,
    groups: &[ParamGroup<H>],
    loss_scale: Option<LossScale>,
) -> Result<Request> {
    let own = |group: &ParamGroup<H>| group.hyper.own_clip() == OwnClip::Unit;
    let scale = loss_scale.unwrap_or_default();
    let (total_norm, total_norm_at) = match ctl.total_norm() {
        Some(TotalNorm::Value(norm)) => (norm, 0),
        Some(TotalNorm::At { address }) => (-1.0, address),
        None => (-1.0, 0),
    };
    Ok(Request {
        max_norm: ctl.max_norm_on_device()?.unwrap_or(-1.0),
        total_norm,
        total_norm_at,
        growth: scale.growth_factor,
        backoff: scale.backoff_factor,
        interval: scale.growth_interval as f64,
        min_scale: scale.min_scale.unwrap_or(-1.0),
        limit: ctl.limit(),
        grad_scale: ctl.grad_scale,
        scaled: loss_scale.is_some().into(),
        known: (ctl.found_inf == FoundInf::Known(true)).into(),
        check: (ctl.found_inf == FoundInf::Check).into(),
        unit: groups.iter().any(own).into(),
        unused: 0,
    })
}

/// The table of groups.
pub(super) fn group_table<H: DeviceHyper>(groups: &[ParamGroup<H>]) -> Vec<Group> {
    let group = |group: &ParamGroup<H>| {
        let mut h = [0.0; 12];
        h.iter_mut().zip(group.hyper.numbers()).for_each(|(h, number)| *h = number);
        let (own_clip, max) = match group.hyper.own_clip() {
            OwnClip::None => (0, 0.0),
            OwnClip::Group(max) => (1, max),
            OwnClip::Tensor(max) => (2, max),
            OwnClip::Unit => (3, 0.0),
        };
        Group { h, max, own_clip, maximize: group.hyper.maximize().into() }
    };
    groups.iter().map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaOptimizer;
    use crate::cuda::tests::test_device;
    use crate::{Error, HalfWeights, SgdHyper};

    #[test]
    fn invalid_loss_scales_are_errors() {
        let groups = [ParamGroup::new(SgdHyper::default(), 0..1)];
        let mut device = CudaOptimizer::new(test_device(1), groups, HalfWeights::Master).unwrap();
        let ok = LossScale::default();
        for invalid in [
            LossScale { scale: f32::NAN, ..ok },
            LossScale { scale: f32::INFINITY, ..ok },
            LossScale { scale: 0.0, min_scale: None, ..ok },
            LossScale { scale: 1.0, min_scale: Some(2.0), ..ok },
            LossScale { growth_factor: 1.0, ..ok },
            LossScale { backoff_factor: 1.0, ..ok },
            LossScale { backoff_factor: 0.0, ..ok },
            LossScale { growth_interval: 0, ..ok },
        ] {
            let error = device.set_loss_scale(Some(invalid));
            assert!(matches!(error, Err(Error::InvalidHyper { .. })), "{invalid:?}");
        }
        assert_eq!(device.status().unwrap().loss_scale, None);
    }
}
