//! The nine optimizers by name, on the GPU and on the CPU.

use fused_optim::cuda::{CudaOptimizer, DeviceParam, Gpu, LossScale, Status};
use fused_optim::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, HalfWeights, LambHyper,
    Optimizer, ParamGroup, RmsPropHyper, RmsPropTfHyper, SgdHyper, StepCtl,
};

use super::Result;

macro_rules! rules {
    ($($name:literal: $rule:ident, $hyper:ident { $($field:ident: $value:expr),* };)*) => {
        /// An optimizer that is selected at run time.
        #[derive(Debug)]
        pub enum Any {
            $(
                #[doc = concat!("`", $name, "`.")]
                $rule(CudaOptimizer<$hyper>),
            )*
        }

        /// All names.
        pub const NAMES: &[&str] = &[$($name),*];

        impl Any {
            /// Creates an optimizer for `count` tensors.
            ///
            /// # Errors
            ///
            /// An unknown name; those of [`CudaOptimizer::new`].
            pub fn new(name: &str, gpu: Gpu, count: usize) -> Result<Self> {
                Ok(match name {
                    $($name => {
                        let hyper = $hyper { $($field: $value,)* ..Default::default() };
                        let groups = [ParamGroup::new(hyper, 0..count)];
                        Self::$rule(CudaOptimizer::new(gpu, groups, HalfWeights::Master)?)
                    })*
                    _ => return Err(unknown(name).into()),
                })
            }

            /// [`CudaOptimizer::bind`].
            ///
            /// # Errors
            ///
            /// Those of that method.
            ///
            /// # Safety
            ///
            /// Those of that method.
            pub unsafe fn bind(&mut self, params: &[DeviceParam]) -> fused_optim::Result<()> {
                match self {
                    // SAFETY: guaranteed by the caller.
                    $(Self::$rule(one) => unsafe { one.bind(params) },)*
                }
            }

            /// [`CudaOptimizer::step`].
            ///
            /// # Errors
            ///
            /// Those of that method.
            ///
            /// # Safety
            ///
            /// Those of that method.
            pub unsafe fn step(&mut self, ctl: &StepCtl) -> fused_optim::Result<()> {
                match self {
                    // SAFETY: guaranteed by the caller.
                    $(Self::$rule(one) => unsafe { one.step(ctl) },)*
                }
            }

            /// [`CudaOptimizer::take_grad_stats`].
            ///
            /// # Errors
            ///
            /// Those of that method.
            ///
            /// # Safety
            ///
            /// Those of that method.
            pub unsafe fn take_grad_stats(
                &mut self,
                indices: &[usize],
                ctl: &StepCtl,
                on: Option<&Gpu>,
            ) -> fused_optim::Result<()> {
                match self {
                    // SAFETY: guaranteed by the caller.
                    $(Self::$rule(one) => unsafe { one.take_grad_stats(indices, ctl, on) },)*
                }
            }

            /// [`CudaOptimizer::set_loss_scale`].
            ///
            /// # Errors
            ///
            /// Those of that method.
            pub fn set_loss_scale(&mut self, scale: Option<LossScale>) -> fused_optim::Result<()> {
                match self {
                    $(Self::$rule(one) => one.set_loss_scale(scale),)*
                }
            }

            /// [`CudaOptimizer::status`].
            ///
            /// # Errors
            ///
            /// Those of that method.
            pub fn status(&self) -> fused_optim::Result<Status> {
                match self {
                    $(Self::$rule(one) => one.status(),)*
                }
            }
        }

        /// The same optimizer on the CPU.
        ///
        /// # Errors
        ///
        /// An unknown name; those of the optimizer.
        pub fn on_cpu(name: &str, count: usize) -> Result<Box<dyn Optimizer>> {
            Ok(match name {
                $($name => {
                    let hyper = $hyper { $($field: $value,)* ..Default::default() };
                    Box::new(fused_optim::$rule::with_one_group(hyper, count)?)
                })*
                _ => return Err(unknown(name).into()),
            })
        }
    };
}

rules! {
    "adamw": AdamW, AdamWHyper { weight_decay: 0.01 };
    "sgd": Sgd, SgdHyper { lr: 1e-3, momentum: 0.9 };
    "lamb": Lamb, LambHyper { weight_decay: 0.01 };
    "adam": Adam, AdamHyper { amsgrad: true };
    "adamp": AdamP, AdamPHyper { weight_decay: 0.01 };
    "adadelta": Adadelta, AdadeltaHyper {};
    "bert_adam": BertAdam, BertAdamHyper { lr: 1e-3 };
    "rmsprop": RmsProp, RmsPropHyper { momentum: 0.9, centered: true };
    "rmsprop_tf": RmsPropTf, RmsPropTfHyper { momentum: 0.9 };
}

fn unknown(name: &str) -> String {
    format!("there is no rule `{name}`; there are {}", NAMES.join(", "))
}
