//! The pass over the gradients that comes before the sweep: non-finite values, norms, and what they
//! make of the gradients' scale.
//!
//! A sum of squares is not finite exactly if a gradient is not, so one pass answers both questions.

use crate::cpu::{self, GradMap, Measure};
use crate::rule::OwnClip;
use crate::{Clip, ClipNorm, FoundInf, Result, Slice, StepCtl};

/// What gradients are multiplied by.
#[derive(Debug)]
pub(crate) struct Scales {
    common: f64,
    /// A further factor for each gradient, in order.
    own: Option<Vec<f64>>,
}

impl Scales {
    /// What becomes of a gradient: the product, rounded once, and the limit, which is one before the
    /// rule's own factor.
    pub(crate) fn map(&self, at: usize, limit: f32, maximize: bool) -> GradMap {
        let own = self.own.as_ref().map_or(1.0, |all| all[at]);
        let scale = (self.common * own) as f32;
        let limit = (f64::from(limit) * own) as f32;
        GradMap { scale: if maximize { -scale } else { scale }, limit }
    }
}

/// Whether gradients must be read before the sweep.
pub(crate) fn needed(ctl: &StepCtl, own: &[OwnClip]) -> bool {
    ctl.found_inf == FoundInf::Check
        || matches!(ctl.clip, Some(Clip::Norm(ClipNorm { total_norm: None, .. })))
        || own.iter().any(|own| *own != OwnClip::None)
}

/// Looks at gradients, the `i`-th of group `groups[i]`, where group `j` clips as `own[j]` says.
/// Returns their scales and the norm for `ctl.clip`, or nothing if the step is to be skipped.
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
        Some(clip) => clip.measure(),
        None if own_needed && limited == map => Measure::Squares,
        None => Measure::Largest,
    };
    let mut measured = None;
    let (mut coefficient, mut norm) = (1.0, ctl.total_norm());
    if norm.is_none() && (clip.is_some() || ctl.found_inf == FoundInf::Check) {
        let each = cpu::measure(grads, first, map, threads);
        let whole = first.fold(&mut each.clone());
        // Other powers may overflow where the gradients do not.
        let finite = match first {
            Measure::Squares | Measure::Largest => whole.is_finite(),
            Measure::Powers(_) => {
                let mut largest = cpu::measure(grads, Measure::Largest, map, threads);
                Measure::Largest.fold(&mut largest).is_finite()
            }
        };
        if ctl.found_inf == FoundInf::Check && !finite {
            return Ok(None);
        }
        norm = clip.map(|_| first.norm(whole));
        measured = Some(each);
    }
    if let (Some(clip), Some(norm)) = (clip, norm) {
        coefficient = clip.coefficient(norm)?;
    }
    let own = own_needed.then(|| {
        let squares = match measured {
            Some(each) if first == Measure::Squares && limited == map => each,
            _ => cpu::measure(grads, Measure::Squares, limited, threads),
        };
        // The norms were taken before the clip had its say.
        own_factors(&squares, groups, own, coefficient)
    });
    let common = f64::from(ctl.grad_scale) * coefficient;
    Ok(Some((Scales { common, own }, norm)))
}

/// The rule's own factor for each gradient, whose sums of squares before multiplication by
/// `clipped` are given.
fn own_factors(squares: &[f64], groups: &[usize], own: &[OwnClip], clipped: f64) -> Vec<f64> {
    let norm = |mut squares: Vec<f64>| clipped * Measure::Squares.fold(&mut squares).sqrt();
    let coefficient = |max, norm| {
        let clip = ClipNorm::new(max);
        clip.coefficient(norm).expect("it was not asked to refuse any norm")
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
        // Written so that a NaN divides.
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
