//! The step of rules that need sums over whole tensors, with a single copy to the host.
//!
//! The state is updated before the result of the check for non-finite gradients is known. So with a
//! check, the old state is saved, and restored if a gradient is not finite; weights are updated
//! afterwards.

use npu_sys::safe::{Operators, View};
use npu_sys::sys::AclDataType;

use super::flat::Span;
use super::fused::NpuOptimizer;
use super::grad_scales::{APART, GradScales};
use super::numbers::{bytes, floats};
use super::rules::{Finish, NpuHyper};
use super::sequence::Reg;
use crate::cpu::Sums;
use crate::cpu::plan::Layout;
use crate::{Result, Slice};

/// A tensor with sums.
#[derive(Clone, Copy, Debug)]
struct FullTensor {
    rows: usize,
    count: usize,
    /// Its first element in its span.
    start: usize,
    /// Index of its first sum; the sums of each product are [`FullTensor::stride`] apart.
    at: usize,
}

impl FullTensor {
    const fn stride(&self) -> usize {
        self.rows.next_multiple_of(APART)
    }
}

#[expect(private_bounds, reason = "sealed: the nine rules only")]
impl<H: NpuHyper> NpuOptimizer<H> {
    /// Takes the step; returns `false` if it is skipped.
    pub(super) fn step_tensors(&mut self, spans: &[Span], scales: &GradScales) -> Result<bool> {
        let check_len = scales.check.as_ref().map_or(0, View::count);
        let (tensors, len) = self.plan(spans, check_len);
        if len == 0 && spans.is_empty() {
            return Ok(true);
        }
        let results = self.on.alloc(len.max(1), AclDataType::FLOAT)?;
        if let Some(check) = &scales.check {
            self.on.copy(&results.part(0, check.count())?, check)?;
            self.save()?;
        }
        for (span, tensors) in spans.iter().zip(&tensors) {
            let grad = self.gradient(span, scales)?;
            self.widen(span)?;
            self.sequence(span, &grad)?;
            self.sums(span, &grad, tensors, &results)?;
        }
        let results = if len == 0 { Vec::new() } else { self.on.read(&results)? };
        let results = floats(&results, AclDataType::FLOAT);
        if results[..check_len].iter().any(|x| !x.is_finite()) {
            self.restore()?;
            return Ok(false);
        }
        for (span, tensors) in spans.iter().zip(&tensors) {
            // Weights without a master were converted in scratch memory that all spans share.
            if self.flats[span.flat].master.is_none() {
                self.widen(span)?;
            }
            self.finish(span, tensors, &results)?;
            self.narrow(span)?;
        }
        Ok(true)
    }

    /// Lays out the results, the check and then the sums. Returns the tensors of each span, `None`
    /// for those without sums, and the number of results.
    fn plan(&self, spans: &[Span], check_len: usize) -> (Vec<Vec<Option<FullTensor>>>, usize) {
        let mut len = check_len;
        let mut tensor = |span: &Span, at: usize| {
            let flat = &self.flats[span.flat];
            let (entry, group) = (&flat.entries[at], flat.kind.group);
            let products = self.core.groups()[group].hyper.products().len();
            let rows = if H::BY_ROWS { entry.rows } else { 1 };
            if products == 0 || rows == 0 || entry.count == 0 {
                return None;
            }
            let start = entry.start - span.start;
            let tensor = FullTensor { rows, count: entry.count, start, at: len };
            len += products * tensor.stride();
            Some(tensor)
        };
        let of_span = |span: &Span| span.entries.clone().map(|at| tensor(span, at)).collect();
        let tensors = spans.iter().map(of_span).collect();
        (tensors, len)
    }

    fn save(&mut self) -> Result<()> {
        for flat in &mut self.flats {
            if flat.saved.is_empty() {
                let copy = |slot: &View| self.on.alloc(slot.count(), slot.dtype());
                flat.saved = flat.slots.iter().map(copy).collect::<npu_sys::Result<_>>()?;
            }
            copy_all(&self.on, &flat.saved, &flat.slots)?;
        }
        Ok(())
    }

    fn restore(&self) -> Result<()> {
        self.flats.iter().try_for_each(|flat| copy_all(&self.on, &flat.slots, &flat.saved))
    }

    /// Writes sums of products of a span's tensors to the results.
    fn sums(
        &self,
        span: &Span,
        grad: &View,
        tensors: &[Option<FullTensor>],
        results: &View,
    ) -> Result<()> {
        let hyper = &self.core.groups()[self.flats[span.flat].kind.group].hyper;
        let tensors: Vec<&FullTensor> = tensors.iter().flatten().collect();
        if tensors.is_empty() {
            return Ok(());
        }
        for (at, [a, b]) in hyper.products().iter().enumerate() {
            let (x, y) = (self.register(span, grad, *a)?, self.register(span, grad, *b)?);
            let place =
                |tensor: &FullTensor| results.part(tensor.at + at * tensor.stride(), tensor.rows);
            // A norm is the root of a row's sum of squares.
            if a == b && !H::BY_ROWS && self.on.soc().is_second_generation() {
                for some in tensors.chunks(Operators::MAX_NORMS) {
                    let views = some.iter().map(|tensor| x.part(tensor.start, tensor.count));
                    let views = views.collect::<npu_sys::Result<Vec<_>>>()?;
                    let norms = some.iter().map(|tensor| place(tensor));
                    self.on.foreach_norm(&norms.collect::<npu_sys::Result<Vec<_>>>()?, &views)?;
                }
                continue;
            }
            let products = self.register(span, grad, Reg::T)?;
            self.on.mul(&products, &x, &y)?;
            for tensor in &tensors {
                self.on.row_sums(&place(tensor)?, &products.part(tensor.start, tensor.count)?)?;
            }
        }
        Ok(())
    }

    /// A tensor's sums by row, from the results on the host.
    fn read_sums(&self, products: &[[Reg; 2]], tensor: &FullTensor, results: &[f32]) -> Vec<Sums> {
        let norms = !H::BY_ROWS && self.on.soc().is_second_generation();
        let row = |row: usize| {
            let mut sums = Sums::default();
            for (at, product) in products.iter().enumerate() {
                let sum = f64::from(results[tensor.at + at * tensor.stride() + row]);
                let sum = if norms { sum * sum } else { sum };
                match product {
                    [Reg::P, Reg::P] => sums.pp = sum,
                    [Reg::U, Reg::U] => sums.uu = sum,
                    [Reg::G, Reg::G] => sums.gg = sum,
                    [Reg::G, Reg::P] => sums.gp = sum,
                    _ => sums.pu = sum,
                }
            }
            sums
        };
        (0..tensor.rows).map(row).collect()
    }

    /// Updates the parameters of a span, from its sums.
    fn finish(&self, span: &Span, tensors: &[Option<FullTensor>], results: &[f32]) -> Result<()> {
        let flat = &self.flats[span.flat];
        let hyper = &self.core.groups()[flat.kind.group].hyper;
        let no_grad = self.raw_gradient(span)?;
        let p = self.register(span, &no_grad, Reg::P)?;
        let u = self.register(span, &no_grad, Reg::U)?;
        let finish = |tensor: &Option<FullTensor>| {
            let read = |tensor: &FullTensor| self.read_sums(hyper.products(), tensor, results);
            let mut rows = tensor.as_ref().map_or_else(Vec::new, read);
            let rows_of = if H::BY_ROWS { rows.len() } else { 0 };
            let layout = Layout::new(tensor.map_or(0, |tensor| tensor.count), rows_of);
            hyper.finish_sums(span.step, &mut rows, layout)
        };
        let finishes: Vec<Finish> = tensors.iter().map(finish).collect();
        for (tensor, finish) in tensors.iter().zip(&finishes) {
            if let Some(tensor) = tensor.filter(|_| !finish.projection.is_empty()) {
                let part = |view: &View| view.part(tensor.start, tensor.count);
                self.subtract_projection(&part(&u)?, &part(&p)?, &finish.projection)?;
            }
        }
        let entries = &flat.entries[span.entries.clone()];
        let each = |factor: fn(&Finish) -> Option<f32>| -> Vec<(usize, usize, f32)> {
            let some = entries.iter().zip(&finishes).filter(|(entry, _)| entry.count > 0);
            let some = some.filter_map(|(entry, finish)| {
                Some((entry.start - span.start, entry.count, factor(finish)?))
            });
            some.collect()
        };
        self.scale_each(&u, span.count, &each(|finish| finish.direction))?;
        self.scale_each(&p, span.count, &each(|finish| finish.decay))?;
        self.launch(&hyper.last(span.step), span, &no_grad)
    }

    /// `u ← u − factors·p`, with one factor per row.
    fn subtract_projection(&self, u: &View, p: &View, factors: &[f32]) -> Result<()> {
        if factors.iter().all(|factor| *factor == factors[0]) {
            return Ok(self.on.add(u, u, p, -factors[0])?);
        }
        let rows = [factors.len(), u.count() / factors.len()];
        let own = self.on.alloc(factors.len(), AclDataType::FLOAT)?;
        self.on.write(&own, bytes(Slice::F32(factors)))?;
        let (u, p, own) = (u.shaped(&rows)?, p.shaped(&rows)?, own.shaped(&[rows[0], 1])?);
        Ok(self.on.addcmul(&u, &u, [&p, &own], -1.0)?)
    }

    /// Multiplies each part `(start, count, factor)` of a view by its factor.
    fn scale_each(&self, x: &View, count: usize, parts: &[(usize, usize, f32)]) -> Result<()> {
        let same = parts.iter().all(|part| part.2 == parts[0].2);
        let Some((_, _, first)) = parts.first() else { return Ok(()) };
        if same {
            return match *first {
                1.0 => Ok(()),
                factor => Ok(self.on.muls(&x.part(0, count)?, &x.part(0, count)?, factor)?),
            };
        }
        let view = |(start, count, _): &(usize, usize, f32)| x.part(*start, *count);
        for some in parts.chunks(Operators::MAX_LIST) {
            let views = some.iter().map(view).collect::<npu_sys::Result<Vec<_>>>()?;
            let factors: Vec<f32> = some.iter().map(|part| part.2).collect();
            if self.on.soc().is_second_generation() {
                self.on.foreach_muls(&views, &factors)?;
                continue;
            }
            for (view, factor) in views.iter().zip(factors) {
                self.on.muls(view, view, factor)?;
            }
        }
        Ok(())
    }
}

fn copy_all(on: &Operators, to: &[View], from: &[View]) -> Result<()> {
    Ok(to.iter().zip(from).try_for_each(|(to, from)| on.copy(to, from))?)
}
