//! The pass over the gradients before the update: the check for non-finite values, norms, and
//! clipping factors.
//!
//! A sum of squares is finite exactly if all gradients are, so one pass computes both.

use crate::cpu::{self, GradMap, Reduction};
use crate::rule::OwnClip;
use crate::{Clip, ClipNorm, FoundInf, Result, Slice, StepCtl};

/// Factors of the gradients.
#[derive(Debug)]
pub(crate) struct Scales {
    common: f64,
    /// A further factor of each gradient, in order.
    own: Option<Vec<f64>>,
}

impl Scales {
    /// Factor of a gradient, rounded once, and its limit. `limit` applies before the rule's own
    /// factor.
    #[inline]
    pub(crate) fn map(&self, at: usize, limit: f32, maximize: bool) -> GradMap {
        let own = self.own.as_ref().map_or(1.0, |all| all[at]);
        let scale = (self.common * own) as f32;
        let limit = (f64::from(limit) * own) as f32;
        GradMap { scale: if maximize { -scale } else { scale }, limit }
    }
}

/// Whether gradients must be read before the update.
pub(crate) fn needed(ctl: &StepCtl, own: &[OwnClip]) -> bool {
    let check_or_norm = ctl.found_inf == FoundInf::Check || matches!(ctl.clip, Some(Clip::Norm(_)));
    check_or_norm && ctl.total_norm().is_none() || own.iter().any(|own| *own != OwnClip::None)
}

/// Checks the gradients and computes their norms. Gradient `i` is of group `groups[i]`; group `j`
/// clips by `own[j]`. Returns the factors and the norm for `ctl.clip`, or `None` if the step is
/// skipped.
pub(crate) fn grad_scales(
    grads: &[Slice<'_>],
    groups: &[usize],
    own: &[OwnClip],
    ctl: &StepCtl,
    threads: usize,
) -> Result<Option<(Scales, Option<f64>)>> {
    let map = GradMap { scale: ctl.grad_scale, ..GradMap::IDENTITY };
    let clip = match ctl.clip {
        Some(Clip::Norm(clip)) => Some(clip),
        _ => None,
    };
    let own_needed = own.iter().any(|own| *own != OwnClip::None);
    // The rule's own norms are of gradients already clipped by value.
    let limited = GradMap { limit: ctl.limit(), ..map };
    let first = match clip {
        Some(clip) => clip.reduction(),
        None if own_needed && limited == map => Reduction::Squares,
        None => Reduction::MaxAbs,
    };
    let mut reduced = None;
    let (mut coefficient, mut norm) = (1.0, ctl.host_total_norm()?);
    if norm.is_none() && (clip.is_some() || ctl.found_inf == FoundInf::Check) {
        let each = cpu::reduce(grads, first, map, threads);
        let whole = first.fold(&mut each.clone());
        // Other powers may overflow where the gradients do not.
        let finite = match first {
            Reduction::Squares | Reduction::MaxAbs => whole.is_finite(),
            Reduction::Powers(_) => {
                let mut largest = cpu::reduce(grads, Reduction::MaxAbs, map, threads);
                Reduction::MaxAbs.fold(&mut largest).is_finite()
            }
        };
        if ctl.found_inf == FoundInf::Check && !finite {
            return Ok(None);
        }
        norm = clip.map(|_| first.norm(whole));
        reduced = Some(each);
    }
    if let (Some(clip), Some(norm)) = (clip, norm) {
        coefficient = clip.coefficient(norm)?;
    }
    let own = own_needed.then(|| {
        let squares = match reduced {
            Some(each) if first == Reduction::Squares && limited == map => each,
            _ => cpu::reduce(grads, Reduction::Squares, limited, threads),
        };
        own_factors(&squares, groups, own, coefficient)
    });
    let common = f64::from(ctl.grad_scale) * coefficient;
    Ok(Some((Scales { common, own }, norm)))
}

/// The rule's own factor of each gradient. `squares` are the gradients' sums of squares before
/// `ctl.clip` multiplies them by `clipped`.
fn own_factors(squares: &[f64], groups: &[usize], own: &[OwnClip], clipped: f64) -> Vec<f64> {
    let norm = |mut squares: Vec<f64>| clipped * Reduction::Squares.fold(&mut squares).sqrt();
    let coefficient = |max, norm| {
        let clip = ClipNorm::new(max);
        clip.coefficient(norm).expect("`error_if_nonfinite` is not set")
    };
    let group_factor = |(group, own): (usize, &OwnClip)| match own {
        OwnClip::Group(max) => {
            let members = squares.iter().zip(groups).filter(|(_, of)| **of == group);
            coefficient(*max, norm(members.map(|(square, _)| *square).collect()))
        }
        _ => 1.0,
    };
    let group_factors: Vec<f64> = own.iter().enumerate().map(group_factor).collect();
    let unit = match own.contains(&OwnClip::Unit) {
        // Written so that a NaN norm gives a NaN factor.
        true => match norm(squares.to_vec()) {
            norm if norm <= 1.0 => 1.0,
            norm => norm.recip(),
        },
        false => 1.0,
    };
    let factor = |(square, group): (&f64, &usize)| match own[*group] {
        OwnClip::Tensor(max) => unit * coefficient(max, clipped * square.sqrt()),
        _ => unit * group_factors[*group],
    };
    squares.iter().zip(groups).map(factor).collect()
}
