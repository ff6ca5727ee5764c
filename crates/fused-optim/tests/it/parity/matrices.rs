//! The plain loops of the rules for matrices, with an optional mistake.

use super::twin::{Mistake, TensorStep, dot, zip};

/// Row-major `lhs · rhs` of `rows` by `inner` by `cols`.
fn product(lhs: &[f64], rhs: &[f64], (rows, inner, cols): (usize, usize, usize)) -> Vec<f64> {
    let at = |i: usize, j: usize| (0..inner).map(|k| lhs[i * inner + k] * rhs[k * cols + j]).sum();
    (0..rows * cols).map(|at_| at(at_ / cols, at_ % cols)).collect()
}

fn transposed(x: &[f64], cols: usize) -> Vec<f64> {
    let rows = x.len() / cols;
    (0..x.len()).map(|at| x[at % rows * cols + at / rows]).collect()
}

impl TensorStep<'_> {
    pub(super) fn muon(mut self) {
        let by_adamw = self.rows == 0 || !self.flag("use_muon");
        if by_adamw != self.is(Mistake::OtherRuleForShape) || self.p.is_empty() {
            let mut h = self.h.clone();
            h["eps"] = h["adamw_eps"].clone();
            return TensorStep { h: &h, ..self }.adam(true);
        }
        let (lr, wd) = (self.h("lr"), self.unless(Mistake::DecayForgotten, "weight_decay"));
        let mu = self.unless(Mistake::MomentumForgotten, "momentum");
        let g = self.g.clone();
        let mut x = self.average("momentum_buffer", mu, &g);
        if self.flag("nesterov") && !self.is(Mistake::NesterovForgotten) {
            x = zip(&x, &g, |m, g| m * mu + g * (1.0 - mu));
        }
        let rows = self.rows.max(1);
        let cols = x.len() / rows;
        if !self.is(Mistake::NotOrthogonalized) {
            let eps = self.unless(Mistake::EpsForgotten, "eps");
            let norm = dot(&x, &x).sqrt().max(eps);
            x.iter_mut().for_each(|x| *x /= norm);
            let [a, b, c] = match self.mistake {
                Mistake::OtherCoefficients => [1.875, -1.25, 0.375],
                _ => [3.4445, -4.7750, 2.0315],
            };
            let steps = self.h("ns_steps") as usize - usize::from(self.is(Mistake::OneStepLess));
            for _ in 0..steps {
                let gram = product(&x, &transposed(&x, cols), (rows, cols, rows));
                let square = product(&gram, &gram, (rows, rows, rows));
                let polynomial = zip(&gram, &square, |a, aa| b * a + c * aa);
                let moved = product(&polynomial, &x, (rows, rows, cols));
                x = zip(&x, &moved, |x, moved| a * x + moved);
            }
        }
        let (tall, wide) = (rows as f64 / cols as f64, cols as f64 / rows as f64);
        let ratio = if self.is(Mistake::RatioOfOtherSide) { wide } else { tall };
        let adjust = match self.h["adjust_lr_fn"].as_str().unwrap() {
            _ if self.is(Mistake::RatioForgotten) => 1.0,
            "original" => ratio.max(1.0).sqrt(),
            "match_rms_adamw" => 0.2 * (rows.max(cols) as f64).sqrt(),
            "spectral_unclamped" => ratio.sqrt(),
            other => panic!("no adjustment {other}"),
        };
        let decayed = lr * if self.is(Mistake::DecayTimesAdjustedLr) { adjust } else { 1.0 };
        *self.p = zip(self.p, &x, |p, x| p * (1.0 - decayed * wd) - lr * adjust * x);
    }

    pub(super) fn adafactor(self) {
        if self.p.is_empty() {
            return;
        }
        let (lr, wd) = (self.h("lr"), self.unless(Mistake::DecayForgotten, "weight_decay"));
        let eps = |at: usize| self.h["eps"][at].as_f64().unwrap();
        let eps1 = if self.is(Mistake::EpsForgotten) { 1e-30 } else { eps(0) };
        let rms = |x: &[f64]| (dot(x, x) / x.len() as f64).sqrt();
        let b = match self.mistake {
            Mistake::MomentOfLastStep => 1.0,
            _ => self.t.powf(self.h("beta2_decay")),
        };
        let rate = if self.is(Mistake::StepSizeUnbounded) { lr } else { lr.min(self.t.powf(-0.5)) };
        let before = rms(self.p);
        let decayed: Vec<f64> = self.p.iter().map(|p| p * (1.0 - lr * wd)).collect();
        let scale = match self.mistake {
            Mistake::NotScaled => 1.0,
            Mistake::ScaleWithoutLeast => before,
            Mistake::ScaleAfterDecay => rms(&decayed).max(eps(1)),
            _ => before.max(eps(1)),
        };
        let squares = zip(&self.g, &self.g, |a, b| a * b);
        let mean = |x: &mut dyn Iterator<Item = f64>, count: usize| x.sum::<f64>() / count as f64;
        let rows = if self.is(Mistake::NotFactored) { 0 } else { self.rows };
        let cols = squares.len() / rows.max(1);
        let means: Vec<(&'static str, Vec<f64>)> = match rows {
            0 => vec![("variance", squares)],
            _ => {
                let row = |i| mean(&mut (0..cols).map(|j| squares[i * cols + j]), cols);
                let col = |j| mean(&mut (0..rows).map(|i| squares[i * cols + j]), rows);
                vec![
                    ("row_var", (0..rows).map(row).collect()),
                    ("col_var", (0..cols).map(col).collect()),
                ]
            }
        };
        for (name, new) in means {
            let old = self.state.entry(name).or_insert_with(|| vec![0.0; new.len()]);
            *old = zip(old, &new, |old, new| old + b * (new - old));
        }
        let v = |i: usize| {
            if rows == 0 {
                return self.state["variance"][i];
            }
            let (r, c) = (&self.state["row_var"], &self.state["col_var"]);
            let of_rows = mean(&mut r.iter().copied(), rows).max(eps1);
            let of_rows = if self.is(Mistake::MeanForgotten) { 1.0 } else { of_rows };
            r[i / cols] * c[i % cols] / of_rows
        };
        let u: Vec<f64> =
            self.g.iter().enumerate().map(|(i, g)| g / v(i).max(eps1 * eps1).sqrt()).collect();
        let clip =
            if self.is(Mistake::ClipForgotten) { 1.0 } else { (rms(&u) / self.h("d")).max(1.0) };
        *self.p = zip(&decayed, &u, |p, u| p - scale * rate / clip * u);
    }
}
