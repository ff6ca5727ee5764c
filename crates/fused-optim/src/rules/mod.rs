//! The update rules, one file for each: formula, source, hyper-parameters, and the arithmetic of
//! one element.

mod adadelta;
mod adafactor;
mod adam;
mod adamp;
mod adamw;
mod bert_adam;
mod lamb;
mod lion;
#[cfg(feature = "muon")]
mod muon;
#[cfg(feature = "muon")]
mod newton_schulz;
mod rmsprop;
mod rmsprop_tf;
mod schedule_free;
mod sgd;

pub use adadelta::{Adadelta, AdadeltaHyper};
pub use adafactor::{Adafactor, AdafactorHyper};
pub use adam::{Adam, AdamHyper};
pub use adamp::{AdamP, AdamPHyper, CosineEps};
pub use adamw::{AdamW, AdamWHyper};
pub use bert_adam::{BertAdam, BertAdamHyper, ClipScope, Schedule};
pub use lamb::{Lamb, LambHyper};
pub use lion::{Lion, LionHyper};
#[cfg(feature = "muon")]
pub use muon::{AdjustLr, Muon, MuonHyper};
pub use rmsprop::{RmsProp, RmsPropHyper};
pub use rmsprop_tf::{RmsPropTf, RmsPropTfHyper};
pub use schedule_free::{ScheduleFreeAdamW, ScheduleFreeAdamWHyper};
pub use sgd::{Sgd, SgdHyper};
