//! The variables of a program of the `tch` crate under our steps: libtorch's operators and
//! automatic differentiation, and our averages, mixed precision, optimizers and checkpoints. To be
//! copied into a program of one's own; the README says what it needs of it.
//!
//! * [`Variables`] for a loop of one's own, with [`train_step::Trainer`]: `examples/trainer.rs`.
//! * [`TchEngine`], a thin layer over them, for `runner`'s loop.
//!
//! Parameters are lent as slices of libtorch's own memory, nothing is copied, and each gradient is
//! reported while backward still runs, by hooks that tch does not know of (`shim.cpp`). Parameters
//! are f32 on the CPU; for half precision there is autocast. libtorch's random numbers (dropout)
//! are not part of a checkpoint.
//!
//! `tests/it/numerics.rs` trains networks here and in candle and compares every number.
//!
//! ```
//! use runner::data::Batch;
//! use tch::{Tensor, nn, nn::Module};
//! use tch_engine::{TchEngine, TchModel, field};
//!
//! struct Net(nn::Linear);
//!
//! impl TchModel for Net {
//!     fn loss(&self, batch: &Batch) -> runner::Result<Tensor> {
//!         let logits = self.0.forward(&field(batch, "inputs")?);
//!         Ok(logits.cross_entropy_for_logits(&field(batch, "labels")?))
//!     }
//!
//!     fn predict(&self, batch: &Batch) -> runner::Result<Vec<(String, Tensor)>> {
//!         Ok(vec![("logits".to_owned(), self.0.forward(&field(batch, "inputs")?))])
//!     }
//! }
//!
//! fn factory() -> runner::model::ModelFactory {
//!     Box::new(|cx| {
//!         let net = |vs: &nn::Path<'_>| Net(nn::linear(vs / "fc", 64, 10, Default::default()));
//!         // SAFETY: `Net` keeps its layer to itself.
//!         Ok(Box::new(unsafe { TchEngine::new(cx, net) }?))
//!     })
//! }
//!
//! // In `main`, before `runner::cli::main()`; configurations then say `model.type = "Net"`.
//! runner::model::MODELS.register("Net", |_| Ok(factory()))?;
//! # Ok::<(), runner::Error>(())
//! ```

mod engine;
mod shim;
mod variables;

pub use engine::{TchEngine, TchModel, field};
pub use variables::{Variables, autocast};
