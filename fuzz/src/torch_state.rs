//! Parses arbitrary bytes as the state dict of a PyTorch optimizer.
//!
//! Checks: a parsed state survives a round trip in our format, and loading it either succeeds or
//! changes nothing.

use fused_optim::{Optimizer, Sgd, SgdHyper, StateDict};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    let Ok(dict) = StateDict::from_torch(bytes) else { return };
    let again = dict.to_safetensors().expect("a parsed state can be written");
    let again = StateDict::from_safetensors(&again).expect("a written state can be read");
    // Compared as text, since NaN != NaN.
    assert_eq!(format!("{dict:?}"), format!("{again:?}"));
    let mut optimizer =
        Sgd::with_one_group(SgdHyper::default(), 1).expect("the defaults are valid");
    let before = optimizer.state_dict().expect("state on the host");
    if optimizer.load_state_dict(&dict).is_err() {
        assert_eq!(optimizer.state_dict().expect("state on the host"), before);
    }
}
