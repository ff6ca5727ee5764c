//! The nine rules as kernels know them: the type of `rules.h`, and the numbers `h` of its constructor.

use crate::rule::Hyper;
use crate::rules::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, CosineEps, LambHyper,
    RmsPropHyper, RmsPropTfHyper, Schedule, SgdHyper,
};

/// A rule that has kernels.
pub(crate) trait DeviceHyper: Hyper + 'static {
    /// Its type in `rules.h`.
    fn form(&self) -> String;
    /// Its numbers, in the order in which that type reads them.
    fn numbers(&self) -> Vec<f64>;
}

fn flag(x: bool) -> f64 {
    f64::from(u8::from(x))
}

impl DeviceHyper for AdadeltaHyper {
    fn form(&self) -> String {
        "Adadelta".into()
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.lr, self.rho, self.eps, self.weight_decay]
    }
}

impl DeviceHyper for AdamHyper {
    fn form(&self) -> String {
        format!("Adam<{}>", self.amsgrad)
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.lr, self.betas.0, self.betas.1, self.eps, self.weight_decay]
    }
}

impl DeviceHyper for AdamWHyper {
    fn form(&self) -> String {
        format!("AdamW<{}>", self.amsgrad)
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.lr, self.betas.0, self.betas.1, self.eps, self.weight_decay]
    }
}

impl DeviceHyper for AdamPHyper {
    fn form(&self) -> String {
        "AdamP".into()
    }

    fn numbers(&self) -> Vec<f64> {
        let Self { lr, betas, eps, weight_decay, delta, wd_ratio, nesterov, cos_eps, .. } = *self;
        let bound = cos_eps == CosineEps::Max;
        vec![lr, betas.0, betas.1, eps, weight_decay, delta, wd_ratio, flag(nesterov), flag(bound)]
    }
}

impl DeviceHyper for BertAdamHyper {
    fn form(&self) -> String {
        "BertAdam".into()
    }

    fn numbers(&self) -> Vec<f64> {
        let schedule = match self.schedule {
            Schedule::Linear => 0.0,
            Schedule::Cosine => 1.0,
            Schedule::Constant => 2.0,
            Schedule::Poly => 3.0,
        };
        let t_total = self.t_total as f64;
        vec![self.lr, self.b1, self.b2, self.e, self.weight_decay, t_total, self.warmup, schedule]
    }
}

impl DeviceHyper for LambHyper {
    fn form(&self) -> String {
        "Lamb".into()
    }

    fn numbers(&self) -> Vec<f64> {
        let Self { lr, betas, eps, weight_decay, adam, .. } = *self;
        vec![lr, betas.0, betas.1, eps, weight_decay, flag(adam)]
    }
}

impl DeviceHyper for RmsPropHyper {
    fn form(&self) -> String {
        format!("RmsProp<{}, {}>", self.centered, self.momentum > 0.0)
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.lr, self.alpha, self.eps, self.weight_decay, self.momentum]
    }
}

impl DeviceHyper for RmsPropTfHyper {
    fn form(&self) -> String {
        format!("RmsPropTf<{}, {}>", self.centered, self.momentum > 0.0)
    }

    fn numbers(&self) -> Vec<f64> {
        let decoupled = match (self.decoupled_decay, self.decoupled_lr) {
            (false, _) => 0.0,
            (true, false) => 1.0,
            (true, true) => 2.0,
        };
        let Self { lr, alpha, eps, weight_decay, momentum, lr_in_momentum, .. } = *self;
        vec![lr, alpha, eps, weight_decay, momentum, decoupled, flag(lr_in_momentum)]
    }
}

impl DeviceHyper for SgdHyper {
    fn form(&self) -> String {
        format!("Sgd<{}, {}>", self.momentum > 0.0, self.nesterov)
    }

    fn numbers(&self) -> Vec<f64> {
        vec![self.lr, self.momentum, self.dampening, self.weight_decay]
    }
}
