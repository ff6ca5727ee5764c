//! The nine rules by name, on the GPU and on the CPU: they have no public trait to be generic over.

use fused_optim::cuda::{CudaOptimizer, DType, DeviceParam, Gpu, LossScale, Status, Tuned};
use fused_optim::{
    AdadeltaHyper, AdamHyper, AdamPHyper, AdamWHyper, BertAdamHyper, HalfWeights, LambHyper,
    Optimizer, ParamGroup, RmsPropHyper, RmsPropTfHyper, SgdHyper, StepCtl,
};

use super::Result;

macro_rules! rules {
    ($($name:literal: $rule:ident, $hyper:ident { $($field:ident: $value:expr),* };)*) => {
        /// An optimizer of a rule that is known when it runs.
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
            /// Over `count` tensors.
            ///
            /// # Errors
            ///
            /// For a name that is none; those of [`CudaOptimizer::new`].
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

            /// [`CudaOptimizer::compile_for`] of every rule, for tensors of these types.
            ///
            /// # Errors
            ///
            /// As there.
            pub fn compile_for(arch: i32, types: &[(DType, DType)]) -> fused_optim::Result<()> {
                $(
                    let hyper = $hyper { $($field: $value,)* ..Default::default() };
                    let groups = [ParamGroup::new(hyper, 0..1)];
                    CudaOptimizer::compile_for(arch, &groups, HalfWeights::Master, types)?;
                )*
                Ok(())
            }

            /// [`CudaOptimizer::bind`].
            ///
            /// # Errors
            ///
            /// As there.
            ///
            /// # Safety
            ///
            /// As there.
            pub unsafe fn bind(&mut self, params: &[DeviceParam]) -> fused_optim::Result<()> {
                match self {
                    // SAFETY: the caller's promise.
                    $(Self::$rule(one) => unsafe { one.bind(params) },)*
                }
            }

            /// [`CudaOptimizer::step`].
            ///
            /// # Errors
            ///
            /// As there.
            ///
            /// # Safety
            ///
            /// As there.
            pub unsafe fn step(&mut self, ctl: &StepCtl) -> fused_optim::Result<()> {
                match self {
                    // SAFETY: the caller's promise.
                    $(Self::$rule(one) => unsafe { one.step(ctl) },)*
                }
            }

            /// [`CudaOptimizer::tune`].
            ///
            /// # Errors
            ///
            /// As there.
            pub fn tune(&mut self, params: &[DeviceParam]) -> fused_optim::Result<Vec<Tuned>> {
                match self {
                    $(Self::$rule(one) => one.tune(params),)*
                }
            }

            /// [`CudaOptimizer::look_part`].
            ///
            /// # Errors
            ///
            /// As there.
            ///
            /// # Safety
            ///
            /// As there.
            pub unsafe fn look_part(
                &mut self,
                indices: &[usize],
                ctl: &StepCtl,
                on: Option<&Gpu>,
            ) -> fused_optim::Result<()> {
                match self {
                    // SAFETY: the caller's promise.
                    $(Self::$rule(one) => unsafe { one.look_part(indices, ctl, on) },)*
                }
            }

            /// [`CudaOptimizer::set_loss_scale`].
            ///
            /// # Errors
            ///
            /// As there.
            pub fn set_loss_scale(&mut self, scale: Option<LossScale>) -> fused_optim::Result<()> {
                match self {
                    $(Self::$rule(one) => one.set_loss_scale(scale),)*
                }
            }

            /// [`CudaOptimizer::status`].
            ///
            /// # Errors
            ///
            /// As there.
            pub fn status(&self) -> fused_optim::Result<Status> {
                match self {
                    $(Self::$rule(one) => one.status(),)*
                }
            }
        }

        /// The same rule on the CPU.
        ///
        /// # Errors
        ///
        /// For a name that is none; those of the rule.
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
