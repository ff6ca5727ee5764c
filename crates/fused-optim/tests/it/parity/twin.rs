//! The slow, obvious twin: every rule as a plain loop in f64, with an optional mistake.

use std::collections::BTreeMap;

use serde_json::Value;

use super::oracle::{Loaded, Subject};

/// Mistakes of an optimizer, and a list of all of them.
macro_rules! mistakes {
    ($($mistake:ident),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(crate) enum Mistake {
            None,
            $($mistake),*
        }

        pub(crate) const MISTAKES: &[Mistake] = &[$(Mistake::$mistake),*];
    };
}

mistakes! {
    DecayInGradient, DecayForgotten, DecayAfterUpdate, DecayTimesLr, DecayWithoutLr,
    BiasCorrectionForgotten, BiasCorrectionAdded, StepOfWholeOptimizer, StepOffByOne,
    EpsElsewhere, EpsForgotten, BetasSwapped, AmsgradForgotten, DampenedFirstStep,
    MomentumForgotten, NesterovForgotten, NesterovTwice, MaximizeForgotten, ScaleForgotten,
    InfApplied, InfCounted, MissingGradIsZero, FirstGroupForAll, CenteredForgotten,
    SquareStartsAtZero, LrBeforeMomentum, DeltaFromNewAverage, ProjectionForgotten,
    ProjectionByWholeOnly, ProjectionByRowsOnly, DecayRatioForgotten, ThresholdWithoutRoot,
    RatioForgotten, RatioUnbounded, RatioOfZeroNorm, GlobalNormForgotten, ClipForgotten,
    ClipByOtherScope, ScheduleForgotten, ScheduleFromOne, WarmupForgotten, SignForgotten,
    UpdateFromNewMomentum, AverageForgotten, AverageOfEqualSteps, DecayAtOtherWeights,
    OtherRuleForShape, NotOrthogonalized, OtherCoefficients, OneStepLess, RatioOfOtherSide,
    DecayTimesAdjustedLr, MomentOfLastStep, StepSizeUnbounded, NotScaled, ScaleWithoutLeast,
    ScaleAfterDecay, NotFactored, MeanForgotten,
}

pub(crate) struct Twin {
    mistake: Mistake,
    kind: String,
    groups: Vec<Value>,
    rows: Vec<usize>,
    weights: Vec<Vec<f64>>,
    state: Vec<BTreeMap<&'static str, Vec<f64>>>,
    steps: Vec<u64>,
    calls: u64,
}

/// The step of one tensor: the inputs and outputs of its rule.
pub(super) struct TensorStep<'a> {
    pub(super) mistake: Mistake,
    pub(super) h: &'a Value,
    pub(super) t: f64,
    pub(super) rows: usize,
    pub(super) p: &'a mut Vec<f64>,
    pub(super) g: Vec<f64>,
    pub(super) state: &'a mut BTreeMap<&'static str, Vec<f64>>,
}

impl Twin {
    pub(crate) fn new(loaded: &Loaded, mistake: Mistake) -> Self {
        let count = loaded.counts.len();
        let weights = loaded.split().into_iter();
        Self {
            mistake,
            kind: loaded.case.kind.clone(),
            groups: loaded.case.groups.clone(),
            rows: loaded.rows(),
            weights: weights.map(|all| all.into_iter().map(f64::from).collect()).collect(),
            state: vec![BTreeMap::new(); count],
            steps: vec![0; count],
            calls: 0,
        }
    }

    /// The clipping that the rule itself does.
    fn own_clip(&self, grads: &mut [Option<Vec<f64>>]) {
        let norm = |grads: &[Option<Vec<f64>>], of: &[usize]| {
            let all = of.iter().filter_map(|i| grads[*i].as_ref()).flatten();
            all.map(|g| g * g).sum::<f64>().sqrt()
        };
        let scale = |grads: &mut [Option<Vec<f64>>], of: &[usize], by: f64| {
            let all = of.iter().filter_map(|i| grads[*i].take().map(|g| (*i, g)));
            for (i, g) in all.collect::<Vec<_>>() {
                grads[i] = Some(g.into_iter().map(|g| g * by).collect());
            }
        };
        let every: Vec<usize> = (0..grads.len()).collect();
        let unit = self.groups.iter().any(|group| group["use_global_grad_norm"] == true);
        if unit && self.mistake != Mistake::GlobalNormForgotten {
            let by = norm(grads, &every).max(1.0).recip();
            scale(grads, &every, by);
        }
        for group in &self.groups {
            let max = group["max_grad_norm"].as_f64().unwrap_or(0.0);
            if max <= 0.0 || self.mistake == Mistake::ClipForgotten {
                continue;
            }
            let members = indices(group);
            let by_group =
                (group["clip"] == "group") != (self.mistake == Mistake::ClipByOtherScope);
            let sets = if by_group {
                vec![members]
            } else {
                members.into_iter().map(|i| vec![i]).collect()
            };
            for set in sets {
                let by = (max / (norm(grads, &set) + 1e-6)).min(1.0);
                scale(grads, &set, by);
            }
        }
    }
}

impl Subject for Twin {
    fn step(&mut self, grads: &[Option<Vec<f32>>], grad_scale: f32, found_inf: bool) {
        if found_inf && self.mistake == Mistake::InfCounted {
            self.steps.iter_mut().for_each(|step| *step += 1);
        }
        if found_inf && self.mistake != Mistake::InfApplied {
            return;
        }
        self.calls += 1;
        let scale = if self.mistake == Mistake::ScaleForgotten { 1.0 } else { grad_scale };
        let scaled = |grad: &Vec<f32>| grad.iter().map(|g| f64::from(g * scale)).collect();
        let mut grads: Vec<Option<Vec<f64>>> =
            grads.iter().map(|grad| grad.as_ref().map(scaled)).collect();
        if self.mistake == Mistake::MissingGradIsZero {
            for (grad, weight) in grads.iter_mut().zip(&self.weights) {
                grad.get_or_insert_with(|| vec![0.0; weight.len()]);
            }
        }
        self.own_clip(&mut grads);
        for group in &self.groups {
            let h = if self.mistake == Mistake::FirstGroupForAll { &self.groups[0] } else { group };
            for tensor in indices(group) {
                let Some(mut g) = grads[tensor].take() else { continue };
                self.steps[tensor] += 1;
                if h["maximize"] == true && self.mistake != Mistake::MaximizeForgotten {
                    g.iter_mut().for_each(|g| *g = -*g);
                }
                let t = match self.mistake {
                    Mistake::StepOfWholeOptimizer => self.calls,
                    Mistake::StepOffByOne => self.steps[tensor] + 1,
                    _ => self.steps[tensor],
                };
                let step = TensorStep {
                    mistake: self.mistake,
                    h,
                    t: t as f64,
                    rows: self.rows[tensor],
                    p: &mut self.weights[tensor],
                    g,
                    state: &mut self.state[tensor],
                };
                match self.kind.as_str() {
                    "sgd" => step.sgd(),
                    "adam" => step.adam(false),
                    "adamw" => step.adam(true),
                    "adamp" => step.adamp(),
                    "lamb" => step.lamb(),
                    "bert_adam" => step.bert_adam(),
                    "rmsprop" => step.rmsprop(),
                    "rmsprop_tf" => step.rmsprop_tf(),
                    "adadelta" => step.adadelta(),
                    "lion" => step.lion(),
                    "adafactor" => step.adafactor(),
                    "muon" => step.muon(),
                    "schedule_free_adamw" => step.schedule_free(),
                    other => panic!("no rule {other}"),
                }
            }
        }
    }

    fn weights(&self) -> Vec<f32> {
        self.weights.concat().into_iter().map(|x| x as f32).collect()
    }

    fn state(&self, tensor: usize, name: &str) -> (u64, Option<Vec<f32>>) {
        let values = self.state[tensor].get(name);
        let rounded = values.map(|values| values.iter().map(|x| *x as f32).collect());
        (self.steps[tensor], rounded)
    }
}

impl TensorStep<'_> {
    pub(super) fn is(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    pub(super) fn h(&self, name: &str) -> f64 {
        self.h[name].as_f64().unwrap_or_else(|| panic!("no {name}"))
    }

    /// A hyper-parameter, or 0 with `mistake`.
    pub(super) fn unless(&self, mistake: Mistake, name: &str) -> f64 {
        if self.is(mistake) { 0.0 } else { self.h(name) }
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        self.h[name] == true
    }

    fn slot(&mut self, name: &'static str, start: f64) -> Vec<f64> {
        let count = self.p.len();
        self.state.entry(name).or_insert_with(|| vec![start; count]).clone()
    }

    /// `s ← β·s + (1−β)·x`.
    pub(super) fn average(&mut self, name: &'static str, beta: f64, x: &[f64]) -> Vec<f64> {
        let old = self.slot(name, 0.0);
        let new: Vec<f64> = old.iter().zip(x).map(|(s, x)| s * beta + x * (1.0 - beta)).collect();
        self.state.insert(name, new.clone());
        new
    }

    fn decay_into_gradient(&mut self) {
        let wd = self.unless(Mistake::DecayForgotten, "weight_decay");
        self.g = zip(&self.g, self.p, |g, p| g + wd * p);
    }

    fn moments(&mut self, mut b1: f64, mut b2: f64) -> (Vec<f64>, Vec<f64>) {
        if self.is(Mistake::BetasSwapped) {
            (b1, b2) = (b2, b1);
        }
        let g = self.g.clone();
        let squares = zip(&g, &g, |a, b| a * b);
        (self.average("exp_avg", b1, &g), self.average("exp_avg_sq", b2, &squares))
    }

    fn betas(&self) -> (f64, f64) {
        (self.h["betas"][0].as_f64().unwrap(), self.h["betas"][1].as_f64().unwrap())
    }

    fn corrections(&self) -> (f64, f64) {
        let (b1, b2) = self.betas();
        match self.mistake {
            Mistake::BiasCorrectionForgotten => (1.0, 1.0),
            _ => (1.0 - b1.powf(self.t), 1.0 - b2.powf(self.t)),
        }
    }

    /// `√v/√c + eps`.
    fn root(&self, v: f64, c: f64, eps: &str) -> f64 {
        let eps = self.unless(Mistake::EpsForgotten, eps);
        if self.is(Mistake::EpsElsewhere) {
            (v / c + eps).sqrt()
        } else {
            v.sqrt() / c.sqrt() + eps
        }
    }

    pub(super) fn adam(mut self, decoupled: bool) {
        let (lr, wd) = (self.h("lr"), self.unless(Mistake::DecayForgotten, "weight_decay"));
        let decoupled = decoupled != self.is(Mistake::DecayInGradient);
        let before = if self.is(Mistake::DecayAfterUpdate) { 0.0 } else { lr * wd };
        match decoupled {
            true => self.p.iter_mut().for_each(|p| *p *= 1.0 - before),
            false => self.decay_into_gradient(),
        }
        let (b1, b2) = self.betas();
        let (m, mut v) = self.moments(b1, b2);
        if self.flag("amsgrad") {
            let max = self.slot("max_exp_avg_sq", 0.0);
            if !self.is(Mistake::AmsgradForgotten) {
                v = zip(&max, &v, f64::max);
            }
            self.state.insert("max_exp_avg_sq", v.clone());
        }
        let (c1, c2) = self.corrections();
        for i in 0..m.len() {
            self.p[i] -= lr / c1 * m[i] / self.root(v[i], c2, "eps");
            if decoupled && self.is(Mistake::DecayAfterUpdate) {
                self.p[i] *= 1.0 - lr * wd;
            }
        }
    }

    fn adamp(mut self) {
        let (lr, wd, eps) =
            (self.h("lr"), self.unless(Mistake::DecayForgotten, "weight_decay"), self.h("eps"));
        let (b1, b2) = self.betas();
        let (m, v) = self.moments(b1, b2);
        let (c1, c2) = self.corrections();
        let nesterov = self.flag("nesterov") && !self.is(Mistake::NesterovForgotten);
        let ahead = |m: f64, g: f64| if nesterov { b1 * m + (1.0 - b1) * g } else { m };
        let mut u: Vec<f64> =
            (0..m.len()).map(|i| ahead(m[i], self.g[i]) / self.root(v[i], c2, "eps")).collect();
        let mut ratio = 1.0;
        let views = match self.mistake {
            Mistake::ProjectionForgotten => vec![],
            Mistake::ProjectionByWholeOnly => vec![1],
            Mistake::ProjectionByRowsOnly => vec![self.rows],
            _ => vec![self.rows, 1],
        };
        for rows in views.into_iter().filter(|_| self.rows > 0 && !u.is_empty()) {
            let cols = u.len() / rows;
            let row = |all: &[f64], i: usize| all[i * cols..(i + 1) * cols].to_vec();
            let cosine = |i: usize| {
                let (g, p) = (row(&self.g, i), row(self.p, i));
                let (gn, pn) = (dot(&g, &g).sqrt(), dot(&p, &p).sqrt());
                match self.h["cos_eps"] == "add" {
                    true => dot(&g, &p).abs() / (gn + eps) / (pn + eps),
                    false => dot(&g, &p).abs() / gn.max(eps) / pn.max(eps),
                }
            };
            let root =
                if self.is(Mistake::ThresholdWithoutRoot) { 1.0 } else { (cols as f64).sqrt() };
            let largest = (0..rows).map(cosine).fold(0.0, f64::max);
            if largest < self.h("delta") / root {
                for i in 0..rows {
                    let p = row(self.p, i);
                    let pn = dot(&p, &p).sqrt() + eps;
                    let n: Vec<f64> = p.iter().map(|p| p / pn).collect();
                    let along = dot(&n, &row(&u, i));
                    for (u, n) in u[i * cols..(i + 1) * cols].iter_mut().zip(&n) {
                        *u -= n * along;
                    }
                }
                ratio = self.h("wd_ratio");
                break;
            }
        }
        if self.is(Mistake::DecayRatioForgotten) {
            ratio = 1.0;
        }
        for (p, u) in self.p.iter_mut().zip(&u) {
            *p = *p * (1.0 - lr * wd * ratio) - lr / c1 * u;
        }
    }

    /// `m/(√v + eps) + wd·p`, for the two rules without bias correction.
    fn direction(&mut self, (b1, b2): (f64, f64), eps: &str) -> Vec<f64> {
        let (m, v) = self.moments(b1, b2);
        let wd = self.unless(Mistake::DecayForgotten, "weight_decay");
        let added = self.is(Mistake::BiasCorrectionAdded);
        let c = |b: f64| if added { 1.0 - b.powf(self.t) } else { 1.0 };
        (0..m.len()).map(|i| m[i] / c(b1) / self.root(v[i], c(b2), eps) + wd * self.p[i]).collect()
    }

    fn lamb(mut self) {
        let betas = self.betas();
        let u = self.direction(betas, "eps");
        let (mut pn, un) = (dot(self.p, self.p).sqrt(), dot(&u, &u).sqrt());
        if !self.is(Mistake::RatioUnbounded) {
            pn = pn.min(10.0);
        }
        let zero = (pn == 0.0 || un == 0.0) && !self.is(Mistake::RatioOfZeroNorm);
        let one = zero || self.flag("adam") || self.is(Mistake::RatioForgotten);
        let step = self.h("lr") * if one { 1.0 } else { pn / un };
        *self.p = zip(self.p, &u, |p, u| p - step * u);
    }

    fn bert_adam(mut self) {
        let u = self.direction((self.h("b1"), self.h("b2")), "e");
        let (total, mut warmup) = (self.h("t_total"), self.h("warmup"));
        if self.is(Mistake::WarmupForgotten) {
            warmup = -1.0;
        }
        let late = if self.is(Mistake::ScheduleFromOne) { 0.0 } else { 1.0 };
        let x = (self.t - late) / total;
        let factor = match self.h["schedule"].as_str().unwrap() {
            _ if total == -1.0 || self.is(Mistake::ScheduleForgotten) => 1.0,
            _ if x < warmup => x / warmup,
            "warmup_cosine" => 0.5 * (1.0 + (std::f64::consts::PI * x).cos()),
            "warmup_constant" => 1.0,
            "warmup_linear" => ((x - 1.0) / (warmup - 1.0)).max(0.0),
            "warmup_poly" => (1.0 - x).max(0.0).sqrt(),
            other => panic!("no schedule {other}"),
        };
        let step = self.h("lr") * factor;
        *self.p = zip(self.p, &u, |p, u| p - step * u);
    }

    fn sgd(mut self) {
        self.decay_into_gradient();
        let first = !self.state.contains_key("momentum_buffer");
        let momentum = self.unless(Mistake::MomentumForgotten, "momentum");
        let damp = 1.0 - self.h("dampening");
        if self.h("momentum") != 0.0 {
            let undampened = first && !self.is(Mistake::DampenedFirstStep);
            let old = self.slot("momentum_buffer", 0.0);
            let taken = if undampened { 1.0 } else { damp };
            let b = zip(&old, &self.g, |b, g| momentum * b + taken * g);
            self.state.insert("momentum_buffer", b.clone());
            self.g = match (self.flag("nesterov"), self.mistake) {
                (false, _) | (true, Mistake::NesterovForgotten) => b,
                (true, Mistake::NesterovTwice) => {
                    zip(&self.g, &b, |g, b| g + momentum * (g + momentum * b))
                }
                (true, _) => zip(&self.g, &b, |g, b| g + momentum * b),
            };
        }
        let lr = self.h("lr");
        *self.p = zip(self.p, &self.g, |p, g| p - lr * g);
    }

    /// The centered or plain second moment.
    fn spread(&self, s: Vec<f64>, mean: Option<Vec<f64>>) -> Vec<f64> {
        match mean {
            Some(a) if !self.is(Mistake::CenteredForgotten) => {
                zip(&s, &a, |s, a| (s - a * a).max(0.0))
            }
            _ => s,
        }
    }

    fn rmsprop(mut self) {
        self.decay_into_gradient();
        let (alpha, lr) = (self.h("alpha"), self.h("lr"));
        let g = self.g.clone();
        let s = self.average("square_avg", alpha, &zip(&g, &g, |a, b| a * b));
        let mean = self.flag("centered").then(|| self.average("grad_avg", alpha, &g));
        let spread = self.spread(s, mean);
        let mut u: Vec<f64> =
            g.iter().zip(&spread).map(|(g, s)| g / self.root(*s, 1.0, "eps")).collect();
        if self.h("momentum") > 0.0 {
            let momentum = self.unless(Mistake::MomentumForgotten, "momentum");
            u = zip(&self.slot("momentum_buffer", 0.0), &u, |b, u| b * momentum + u);
            self.state.insert("momentum_buffer", u.clone());
        }
        *self.p = zip(self.p, &u, |p, u| p - lr * u);
    }

    fn rmsprop_tf(mut self) {
        let (alpha, lr, eps) = (self.h("alpha"), self.h("lr"), self.h("eps"));
        let wd = self.unless(Mistake::DecayForgotten, "weight_decay");
        match self.flag("decoupled_decay") != self.is(Mistake::DecayInGradient) {
            true => {
                let by_lr = match self.mistake {
                    Mistake::DecayTimesLr => true,
                    Mistake::DecayWithoutLr => false,
                    _ => self.flag("decoupled_lr"),
                };
                let factor = 1.0 - wd * if by_lr { lr } else { 1.0 };
                self.p.iter_mut().for_each(|p| *p *= factor);
            }
            false => self.decay_into_gradient(),
        }
        let start = if self.is(Mistake::SquareStartsAtZero) { 0.0 } else { 1.0 };
        self.slot("square_avg", start);
        let g = self.g.clone();
        let s = self.average("square_avg", alpha, &zip(&g, &g, |a, b| a * b));
        let mean = self.flag("centered").then(|| self.average("grad_avg", alpha, &g));
        let spread = self.spread(s, mean);
        let outside = self.is(Mistake::EpsElsewhere);
        let eps = if self.is(Mistake::EpsForgotten) { 0.0 } else { eps };
        let u =
            zip(&g, &spread, |g, s| g / if outside { s.sqrt() + eps } else { (s + eps).sqrt() });
        if self.h("momentum") > 0.0 {
            let momentum = self.unless(Mistake::MomentumForgotten, "momentum");
            let inside = self.flag("lr_in_momentum") != self.is(Mistake::LrBeforeMomentum);
            let (before, after) = if inside { (lr, 1.0) } else { (1.0, lr) };
            let b = zip(&self.slot("momentum_buffer", 0.0), &u, |b, u| b * momentum + before * u);
            *self.p = zip(self.p, &b, |p, b| p - after * b);
            self.state.insert("momentum_buffer", b);
        } else {
            *self.p = zip(self.p, &u, |p, u| p - lr * u);
        }
    }

    fn lion(mut self) {
        let (lr, wd) = (self.h("lr"), self.unless(Mistake::DecayForgotten, "weight_decay"));
        let (mut b1, mut b2) = self.betas();
        if self.is(Mistake::BetasSwapped) {
            (b1, b2) = (b2, b1);
        }
        let g = self.g.clone();
        let mut m = self.slot("exp_avg", 0.0);
        let new = self.average("exp_avg", b2, &g);
        if self.is(Mistake::UpdateFromNewMomentum) {
            m = new;
        }
        let sign =
            |u: f64| if u == 0.0 || self.is(Mistake::SignForgotten) { u } else { u.signum() };
        let u: Vec<f64> = zip(&m, &g, |m, g| sign(b1 * m + (1.0 - b1) * g));
        *self.p = zip(self.p, &u, |p, u| p * (1.0 - lr * wd) - lr * u);
    }

    /// Keeps the average `x` in the state; the crate computes it from weights and `z`.
    fn schedule_free(mut self) {
        let (lr, wd) = (self.h("lr"), self.unless(Mistake::DecayForgotten, "weight_decay"));
        let (b1, b2) = self.betas();
        let warmup = self.unless(Mistake::WarmupForgotten, "warmup_steps").max(1.0);
        let share = |t: f64| (t / warmup).min(1.0);
        let (y, g) = (self.p.clone(), self.g.clone());
        for name in ["x", "z"] {
            self.state.entry(name).or_insert_with(|| y.clone());
        }
        let v = self.average("exp_avg_sq", b2, &zip(&g, &g, |a, b| a * b));
        let (_, c2) = self.corrections();
        let (x, z) = (self.state["x"].clone(), self.state["z"].clone());
        let at = if self.is(Mistake::DecayAtOtherWeights) { &z } else { &y };
        let sum: f64 = (1..=self.t as u64).map(|t| share(t as f64).powi(2)).sum();
        let c = match self.mistake {
            Mistake::AverageForgotten => 1.0,
            Mistake::AverageOfEqualSteps => 1.0 / self.t,
            _ => share(self.t).powi(2) / sum,
        };
        for i in 0..y.len() {
            let u = g[i] / self.root(v[i], c2, "eps") + wd * at[i];
            let new_z = z[i] - lr * share(self.t) * u;
            let new_x = (1.0 - c) * x[i] + c * new_z;
            self.state.get_mut("z").unwrap()[i] = new_z;
            self.state.get_mut("x").unwrap()[i] = new_x;
            self.p[i] = (1.0 - b1) * new_z + b1 * new_x;
        }
    }

    fn adadelta(mut self) {
        self.decay_into_gradient();
        let (rho, lr) = (self.h("rho"), self.h("lr"));
        let eps = self.unless(Mistake::EpsForgotten, "eps");
        let outside = self.is(Mistake::EpsElsewhere);
        let root = |x: f64| if outside { x.sqrt() + eps } else { (x + eps).sqrt() };
        let g = self.g.clone();
        let s = self.average("square_avg", rho, &zip(&g, &g, |a, b| a * b));
        let a = self.slot("acc_delta", 0.0);
        let delta = |a: &[f64]| -> Vec<f64> {
            (0..g.len()).map(|i| root(a[i]) / root(s[i]) * g[i]).collect()
        };
        let mut d = delta(&a);
        let new = self.average("acc_delta", rho, &zip(&d, &d, |a, b| a * b));
        if self.is(Mistake::DeltaFromNewAverage) {
            d = delta(&new);
        }
        *self.p = zip(self.p, &d, |p, d| p - lr * d);
    }
}

fn indices(group: &Value) -> Vec<usize> {
    serde_json::from_value(group["idx"].clone()).unwrap()
}

pub(super) fn zip(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect()
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
