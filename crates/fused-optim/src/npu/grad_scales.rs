//! Gradients in f32, scaled and clipped, and the check for non-finite values, before the rule.
//!
//! Norms and the factors computed from them stay on the device. The check is the sum of zero times
//! the gradients, which is NaN exactly if one of them is not finite; the host reads it.

use std::collections::BTreeMap;

use npu_sys::safe::View;
use npu_sys::sys::AclDataType;

use super::flat::Span;
use super::fused::NpuOptimizer;
use super::numbers::floats;
use super::rules::NpuHyper;
use crate::rule::OwnClip;
use crate::{Clip, FoundInf, Result, StepCtl};

/// Distance in elements between results that are tensors of their own: 32 bytes.
pub(super) const APART: usize = 8;

/// PyTorch's ε for clipping by norm.
const EPS: f32 = 1e-6;

/// Factors of a step's gradients, and the check for non-finite values.
#[derive(Debug, Default)]
pub(super) struct GradScales {
    scale: f32,
    limit: Option<f32>,
    /// One value per span, [`APART`]: 0, or NaN if a gradient is not finite.
    pub(super) check: Option<View>,
    /// Factors on the device, one number each: for all gradients, by group, by tensor.
    common: Vec<View>,
    groups: BTreeMap<usize, View>,
    tensors: BTreeMap<usize, View>,
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: NpuHyper> NpuOptimizer<H> {
    /// Launches the check and the norms that `ctl` asks for.
    pub(super) fn grad_scales(&mut self, spans: &[Span], ctl: &StepCtl) -> Result<GradScales> {
        let mut scales = GradScales { scale: ctl.grad_scale, ..GradScales::default() };
        if ctl.found_inf == FoundInf::Check && !spans.is_empty() {
            let check = self.on.alloc(APART * spans.len(), AclDataType::FLOAT)?;
            self.on.zero(&check)?;
            for (at, span) in spans.iter().enumerate() {
                let grad = self.scaled(span, &scales)?;
                let zeros = self.scratch.t.part(0, span.count)?;
                self.on.muls(&zeros, &grad, 0.0)?;
                self.on.row_sums(&check.part(APART * at, 1)?, &zeros)?;
            }
            scales.check = Some(check);
        }
        if let Some(Clip::Norm(clip)) = ctl.clip {
            let norm = match ctl.host_total_norm()? {
                Some(norm) => {
                    let known = self.on.alloc(1, AclDataType::FLOAT)?;
                    self.on.fill(&known, norm as f32)?;
                    known
                }
                None => self.norm(spans, &scales)?,
            };
            scales.common.push(self.bound(&norm, clip.max_norm, EPS)?);
            self.norm = Some(norm);
        }
        scales.limit = Some(ctl.limit()).filter(|limit| limit.is_finite());
        self.own_clip_scales(spans, &mut scales)?;
        Ok(scales)
    }

    /// The rules' own clipping, after that of `ctl`.
    fn own_clip_scales(&self, spans: &[Span], scales: &mut GradScales) -> Result<()> {
        let own = self.core.own_clips();
        let mut common = Vec::new();
        if own.contains(&OwnClip::Unit) && !spans.is_empty() {
            common.push(self.bound(&self.norm(spans, scales)?, 1.0, 0.0)?);
        }
        for (group, own) in own.iter().enumerate() {
            let of_group = |span: &&Span| self.flats[span.flat].kind.group == group;
            let spans: Vec<Span> = spans.iter().filter(of_group).cloned().collect();
            match own {
                OwnClip::Group(max) if !spans.is_empty() => {
                    let norm = self.norm(&spans, scales)?;
                    scales.groups.insert(group, self.bound(&norm, *max, EPS)?);
                }
                OwnClip::Tensor(max) => {
                    for one in spans.iter().flat_map(|span| self.tensors_of(span)) {
                        let index = self.flats[one.flat].entries[one.entries.start].index;
                        let norm = self.norm(&[one], scales)?;
                        scales.tensors.insert(index, self.bound(&norm, *max, EPS)?);
                    }
                }
                _ => {}
            }
        }
        scales.common.extend(common);
        Ok(())
    }

    /// Splits a span into spans of one tensor.
    pub(super) fn tensors_of(&self, span: &Span) -> Vec<Span> {
        let entries = &self.flats[span.flat].entries;
        let one = |at: usize| {
            let (start, count) = (entries[at].start, entries[at].count);
            Span { entries: at..at + 1, start, count, ..span.clone() }
        };
        span.entries.clone().filter(|at| entries[*at].count > 0).map(one).collect()
    }

    /// Gradients times the scale, clamped to the limit; the buffer itself if neither changes it.
    fn scaled(&self, span: &Span, scales: &GradScales) -> Result<View> {
        let raw = self.raw_gradient(span)?;
        let scratch = self.scratch.g.part(0, span.count)?;
        let mut grad = raw;
        if grad.dtype() != AclDataType::FLOAT {
            self.on.cast(&scratch, &grad)?;
            grad = scratch.clone();
        }
        let group = &self.core.groups()[self.flats[span.flat].kind.group];
        let scale = if group.hyper.maximize() { -scales.scale } else { scales.scale };
        if scale != 1.0 {
            self.on.muls(&scratch, &grad, scale)?;
            grad = scratch.clone();
        }
        if let Some(limit) = scales.limit {
            let least = self.on.alloc(1, AclDataType::FLOAT)?;
            self.on.fill(&least, -limit)?;
            for _ in 0..2 {
                self.on.maximum(&scratch, &grad, &least)?;
                self.on.muls(&scratch, &scratch, -1.0)?;
                grad = scratch.clone();
            }
        }
        Ok(grad)
    }

    /// A span's gradients for the rule, in f32, with all factors.
    pub(super) fn gradient(&self, span: &Span, scales: &GradScales) -> Result<View> {
        let mut grad = self.scaled(span, scales)?;
        let scratch = self.scratch.g.part(0, span.count)?;
        let group = scales.groups.get(&self.flats[span.flat].kind.group);
        for factor in scales.common.iter().chain(group) {
            self.on.mul(&scratch, &grad, factor)?;
            grad = scratch.clone();
        }
        for one in self.tensors_of(span) {
            let index = self.flats[span.flat].entries[one.entries.start].index;
            if let Some(factor) = scales.tensors.get(&index) {
                if grad != scratch {
                    self.on.copy(&scratch, &grad)?;
                    grad = scratch.clone();
                }
                let part = scratch.part(one.start - span.start, one.count)?;
                self.on.mul(&part, &part, factor)?;
            }
        }
        Ok(grad)
    }

    /// The 2-norm of all gradients of the spans, one number on the device.
    fn norm(&self, spans: &[Span], scales: &GradScales) -> Result<View> {
        let parts = self.on.alloc(APART * spans.len().max(1), AclDataType::FLOAT)?;
        let norm = self.on.alloc(1, AclDataType::FLOAT)?;
        self.on.zero(&parts)?;
        for (at, span) in spans.iter().enumerate() {
            let mut grad = self.scaled(span, scales)?;
            let squares = self.scratch.t.part(0, span.count)?;
            for factor in &scales.common {
                let scratch = self.scratch.g.part(0, span.count)?;
                self.on.mul(&scratch, &grad, factor)?;
                grad = scratch;
            }
            self.on.mul(&squares, &grad, &grad)?;
            self.on.row_sums(&parts.part(APART * at, 1)?, &squares)?;
        }
        self.on.row_sums(&norm, &parts)?;
        self.on.sqrt(&norm, &norm)?;
        Ok(norm)
    }

    /// `max / max(norm + ε, max)`, which is `min(1, max / (norm + ε))`; a NaN stays NaN.
    fn bound(&self, norm: &View, max: f64, eps: f32) -> Result<View> {
        let alloc = || self.on.alloc(1, AclDataType::FLOAT);
        let (limit, larger, factor) = (alloc()?, alloc()?, alloc()?);
        self.on.fill(&limit, max as f32)?;
        self.on.adds(&larger, norm, eps)?;
        self.on.maximum(&larger, &larger, &limit)?;
        self.on.div(&factor, &limit, &larger)?;
        Ok(factor)
    }

    /// Whether a gradient is not finite. Waits for the device if the step has a check.
    pub(super) fn found_inf(&self, scales: &GradScales) -> Result<bool> {
        let Some(check) = &scales.check else { return Ok(false) };
        let check = floats(&self.on.read(check)?, AclDataType::FLOAT);
        Ok(check.iter().any(|x| !x.is_finite()))
    }
}
