//! Arbitrary bytes as the saved state of a PyTorch optimizer.
//!
//! Checked: what is read can be written and read again as a state of ours, and loading it into an
//! optimizer either works or changes nothing.

#![no_main]

use fused_optim::{Optimizer, Sgd, SgdHyper, StateDict};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(dict) = StateDict::from_torch(bytes) else { return };
    let again = dict.to_safetensors().expect("what was read can be written");
    let again = StateDict::from_safetensors(&again).expect("and read again");
    // NaNs are not equal to themselves; their text is.
    assert_eq!(format!("{dict:?}"), format!("{again:?}"));
    let mut optimizer =
        Sgd::with_one_group(SgdHyper::default(), 1).expect("the defaults are valid");
    let before = optimizer.state_dict().expect("state on the host");
    if optimizer.load_state_dict(&dict).is_err() {
        assert_eq!(optimizer.state_dict().expect("state on the host"), before);
    }
});
