//! For each of the nine rules: its type in `rules.h`, and the numbers `h` of that type's
//! constructor.

use crate::rule::Hyper;
use crate::rules::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, CosineEps, LambHyper,
    RmsPropHyper, RmsPropTfHyper, SgdHyper,
};

/// A rule that has kernels.
pub(crate) trait DeviceHyper: Hyper + 'static {
    /// Its type in `rules.h`.
    fn rule_type(&self) -> String;
    /// The numbers `h`, in that type's order.
    fn numbers(&self) -> Vec<f64>;
}

/// For each rule `h`: a type of `rules.h`, its arguments if it is a template, and its numbers.
macro_rules! kernels {
    ($h:ident: $($hyper:ty => $name:literal [$($flag:expr),*], $numbers:expr;)*) => {$(
        impl DeviceHyper for $hyper {
            fn rule_type(&self) -> String {
                template($name, &[$({ let $h = self; $flag }),*])
            }

            fn numbers(&self) -> Vec<f64> {
                let $h = self;
                $numbers.to_vec()
            }
        }
    )*};
}

kernels! { h:
    AdadeltaHyper => "Adadelta" [], [h.lr, h.rho, h.eps, h.weight_decay];
    AdamHyper => "Adam" [h.amsgrad], [h.lr, h.betas.0, h.betas.1, h.eps, h.weight_decay];
    AdamPHyper => "AdamP" [], [
        h.lr, h.betas.0, h.betas.1, h.eps, h.weight_decay, h.delta, h.wd_ratio,
        flag(h.nesterov), flag(h.cos_eps == CosineEps::Max),
    ];
    AdamWHyper => "AdamW" [h.amsgrad], [h.lr, h.betas.0, h.betas.1, h.eps, h.weight_decay];
    BertAdamHyper => "BertAdam" [], [
        h.lr, h.b1, h.b2, h.e, h.weight_decay, h.t_total as f64, h.warmup,
        f64::from(h.schedule as u8),
    ];
    LambHyper => "Lamb" [], [h.lr, h.betas.0, h.betas.1, h.eps, h.weight_decay, flag(h.adam)];
    RmsPropHyper => "RmsProp" [h.centered, h.momentum > 0.0],
        [h.lr, h.alpha, h.eps, h.weight_decay, h.momentum];
    // The decay is coupled (0), decoupled (1), or decoupled and multiplied by `lr` (2).
    RmsPropTfHyper => "RmsPropTf" [h.centered, h.momentum > 0.0], [
        h.lr, h.alpha, h.eps, h.weight_decay, h.momentum,
        flag(h.decoupled_decay) * (1.0 + flag(h.decoupled_lr)), flag(h.lr_in_momentum),
    ];
    SgdHyper => "Sgd" [h.momentum > 0.0, h.nesterov],
        [h.lr, h.momentum, h.dampening, h.weight_decay];
}

fn flag(x: bool) -> f64 {
    f64::from(u8::from(x))
}

/// A type's name with its arguments.
fn template(name: &str, arguments: &[bool]) -> String {
    let arguments: Vec<String> = arguments.iter().map(bool::to_string).collect();
    if arguments.is_empty() { name.into() } else { format!("{name}<{}>", arguments.join(", ")) }
}
